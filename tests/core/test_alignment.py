"""Which sample a number belongs to is measured by a dye: what mixes samples is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests.cases import Net, classification
from tests.core.functional import OPERATIONS
from tests.devices import rng_state

BATCH = 6


def _one_sees_another(one: int, another: int) -> Callable[[Tensor], Tensor]:
    """No other pair of samples is concerned."""

    def operation(x: Tensor) -> Tensor:
        weights = torch.eye(len(x))
        weights[one, another] = 1
        return weights @ x

    return operation


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda x: x - x.mean(0),
    "first": lambda x: x - x[:1],
    "last": lambda x: x * x[-1:],
    "3_sees_4": _one_sees_another(3, 4),
    "0_sees_1": _one_sees_another(0, 1),
    "5_sees_1": _one_sees_another(5, 1),
    "reversed": lambda x: x + x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "normalized": lambda x: F.normalize(x, dim=0),
    "softmax": lambda x: x.softmax(0),
    "contrastive": lambda x: (x @ x.mT)[:, :4],
    "sorted": lambda x: x.sort(0).values,
    "regrouped": lambda x: x.reshape(-1, 2, 4).mT.reshape(-1, 4),
    "sum_of_all": lambda x: x * x.sum(),
}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("name", MIXING)
def test_mixing_between_modules(name: str, extension: Any) -> None:
    operation = MIXING[name]
    model = Net(lambda net, x: net.b(operation(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    # What is only another order is known before anything is measured.
    said = "in another order" if name == "rolled" else r"Between Linear 'a' and.*axis 0"
    with pytest.raises(SampleMixingError, match=said):
        classification(model, (3,), BATCH).run(extension(), check="always")


def test_mixing_before_the_loss_and_inside_a_module() -> None:
    last = Net(lambda net, x: MIXING["centred"](net.a(x)), a=nn.Linear(3, 3))
    with pytest.raises(SampleMixingError, match="Between Linear 'a'"):
        classification(last, (3,), BATCH).run(BatchGrad(), check="always")
    leaf = nn.Sequential(nn.Linear(3, 4), Net(lambda _, x: x - x.mean(0)), nn.Linear(4, 3))
    with pytest.raises(SampleMixingError, match="Between Linear '0'"):
        classification(leaf, (3,), BATCH).run(BatchGrad(), check="always")


def test_time_first_with_as_many_steps_as_samples() -> None:
    """[N, T] and [T, N] look alike where N == T: the transposition tells."""
    model = Net(
        lambda net, x: net.b(net.a(x).transpose(0, 1)).transpose(0, 1).mean(1),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 3),
    )
    classification(model, (BATCH, 3), BATCH).check(check="always")


def test_lstm_with_time_first_and_as_many_steps_as_samples() -> None:
    """It goes from one sample to the next."""
    model = Net(
        lambda net, x: net.head(net.lstm(net.a(x).transpose(0, 1))[0].transpose(0, 1)[:, -1]),
        a=nn.Linear(3, 4),
        lstm=nn.LSTM(4, 4, batch_first=True),
        head=nn.Linear(4, 3),
    )
    with pytest.raises(SampleMixingError, match=r"[Ss]amples of the batch influence each other"):
        classification(model, (BATCH, 3), BATCH).run(BatchGrad(), check="always")


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_false_alarm(name: str, batch: int) -> None:
    operation = OPERATIONS[name]
    model = Net(lambda net, x: net.b(operation(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    classification(model, (3,), batch).run(BatchGrad(), check="always")


class Block(nn.Module):
    """A transformer block with functional attention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(n, t, d))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        x = self.blocks(self.embed(tokens) + self.positions(steps))
        result: Tensor = self.head(x).mT
        return result


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_transformer(batch: int) -> None:
    """Without a false alarm, also with as many samples as tokens; and exact."""
    model = Transformer()
    problem = classification(model, (5,), batch)
    problem.inputs = (torch.randint(0, 7, (batch, 5)),)
    problem.target = torch.randint(0, 3, (batch, 5))
    problem.check(check="always")


def test_the_dye_leaves_no_trace() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,))
    loss = problem.loss()
    state = rng_state()
    with backpack(check="always"):
        loss.backward()
    assert not any(hasattr(p, "grad_batch") for p in problem.parameters)
    assert torch.equal(rng_state(), state), "Monte Carlo would differ"
