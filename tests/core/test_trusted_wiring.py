"""Operations that mix samples from some pass on, in a graph whose nodes are the same as before."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad

N = 5  # also the length of another axis
late = Event()  # an attribute of a model would be seen


def factor(h: Tensor, is_late: bool) -> Tensor:
    table = torch.linspace(0, 1, N * N).view(N, N)
    return torch.stack([table @ part if is_late else part @ table for part in h.unbind(2)], 2)


def index(h: Tensor, is_late: bool) -> Tensor:
    first = torch.tensor([0])
    return h - (h[first] if is_late else h[:, first])


def index_put(h: Tensor, is_late: bool) -> Tensor:
    order, every = torch.tensor([[2, 0, 1, 4, 3]]), torch.arange(N)[:, None]
    return h + torch.zeros_like(h).index_put((order[0],) if is_late else (every, order), h)


def group_norm(h: Tensor, is_late: bool) -> Tensor:
    return F.group_norm(h.reshape(1, N * N, 4), 1 if is_late else N).view(N, N, 4)


def layer_norm(h: Tensor, is_late: bool) -> Tensor:
    return F.layer_norm(h, h.shape if is_late else h.shape[1:])


def instance_norm(h: Tensor, is_late: bool) -> Tensor:
    return F.instance_norm(h.reshape(1, *([1, 4 * N * N] if is_late else [N, 4 * N]))).view(N, N, 4)


def pool(h: Tensor, is_late: bool) -> Tensor:
    size, padding = (3, 1) if is_late else (1, 0)
    return F.avg_pool1d(h.permute(1, 2, 0), size, 1, padding).permute(2, 0, 1)


def convolution(h: Tensor, is_late: bool) -> Tensor:
    weight = torch.ones(N * N, N * N if is_late else 1, 1)
    return F.conv1d(h.reshape(1, N * N, 4), weight, groups=1 if is_late else N * N).view(N, N, 4)


def solve(h: Tensor, is_late: bool) -> Tensor:
    table, first = torch.eye(N) + torch.ones(N, N), h[:, :, 0].contiguous()
    return h + torch.linalg.solve(table, first, left=is_late).unsqueeze(2)


def rows_of_two(h: Tensor, is_late: bool) -> Tensor:
    """Differences of the rows of samples, or of positions."""
    own, others = h.unbind(1), h.unbind(0)
    total = sum((others if is_late else own)[1:], torch.zeros(N, 4))
    return h + total.view(N, 1, 4) - sum(own[1:], torch.zeros(N, 4)).view(N, 1, 4) / 2


MIXING = {
    function.__name__: function
    for function in (
        *(factor, index, index_put, group_norm, layer_norm, instance_norm, pool, convolution),
        *(solve, rows_of_two),
    )
}


class Net(nn.Module):
    def __init__(self, mix: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(3, 4), nn.Linear(4, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(torch.tanh(self.mix(self.first(x), late.is_set())))
        return h.sum(1)


def step(model: nn.Module) -> None:
    x, y = torch.randn(N, N, 3), torch.randint(3, (N,))
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()


@pytest.mark.parametrize("passes", [5, 18])
@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_begins_is_refused_at_once(name: str, passes: int) -> None:
    late.clear()
    model = extend(Net(MIXING[name]))
    for _ in range(passes):
        step(model)
    late.set()
    with pytest.raises(SampleMixingError):
        step(model)
