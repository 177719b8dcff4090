"""Samples that mix where some are kept apart, or several axes are as long; what looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core._torch import memory_of
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_operations.received import hold_address
from tests import oracle
from tests.cases import Net

T, D = 4, 3


def net(forward: Callable[[Any, Tensor], Tensor], **parts: nn.Parameter) -> Any:
    """Two linear layers of one width."""
    return Net(forward, a=nn.Linear(D, D), b=nn.Linear(D, D), **parts)


def run(model: nn.Module, extension: Any, x: Tensor, check: Any = "always") -> None:
    """One pass, with an extended loss."""
    output = extend(model)(x)
    loss = extend(nn.MSELoss())(output, torch.zeros_like(output))
    with backpack(extension(), check=check):
        loss.backward()


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda h: torch.cat([h[1:], h[:1]]),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "convolution": lambda h: F.conv1d(h.T[None], torch.ones(D, 1, 3), padding=1, groups=D)[0].T,
}


@pytest.mark.parametrize("extension", [BatchGrad, SumGradSquared, DiagGGNExact])
@pytest.mark.parametrize("way", MIXED)
def test_samples_that_mix_where_a_module_is_the_last(way: str, extension: Any) -> None:
    """Behind it, samples are on axis 0 again, and a function uses a parameter."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(MIXED[way](net.a(x * net.gain)))  # type: ignore[no-any-return]

    model = net(forward, gain=nn.Parameter(torch.randn(D)))
    with pytest.raises(SampleMixingError):
        run(model, extension, torch.randn(T, D))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("second", ["function", "module"])
@pytest.mark.parametrize("is_constant", [True, False])
def test_two_axes_of_one_tensor(second: str, extension: Any, is_constant: bool) -> None:
    """One way takes the first of two axes of the same length for samples, another one the other."""

    def forward(net: Any, x: Tensor) -> Tensor:
        turned = net.a(x[:, 0] * net.gain).unsqueeze(1).expand(-1, T, -1).permute(1, 0, 2)
        first = turned.unbind(0)[0]
        summed = (net.b(turned) if second == "module" else turned).sum(1)
        return net.b(first + summed)  # type: ignore[no-any-return]

    model = net(forward)
    model.gain = torch.ones(D) if is_constant else nn.Parameter(torch.ones(D))
    with pytest.raises(SampleMixingError):
        run(model, extension, torch.randn(T, T, D))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_an_output_that_is_a_stack_of_numbers(samples: int, extension: Any) -> None:
    """What an extended loss receives has samples, also where numbers were put side by side."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = x @ net.weight
        return torch.cat([h, h.exp()], 1) if samples == 1 else torch.stack([*h.exp().flatten()])

    model = Net(forward, weight=nn.Parameter(torch.randn(D, 1)))
    run(model, extension, torch.randn(samples, D))
    if extension is BatchGrad:
        oracle.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)


@pytest.mark.parametrize("way", ["alone", "beside", "beside_others", "gate", "in_the_loss"])
def test_where_nothing_was_compared_it_is_measured_again(way: str) -> None:
    """A factor that starts at zero hides what mixes samples behind it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        mixed = net.factor * (h - h.mean(0))
        if way == "in_the_loss":
            return net.b(h) + mixed.square().mean()  # type: ignore[no-any-return]
        if way == "beside_others":
            mixed = mixed + h.flip(1)
        if way == "gate":
            mixed = (h - h.mean(0) - 100 * (1 - net.factor)).relu() + h.flip(1)
        return net.b(mixed + (x if way == "alone" else h))  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.factor = 0.0  # type: ignore[assignment]
    for _ in range(7):
        run(model, BatchGrad, torch.randn(T, T, D), check="first")
    model.factor = 1.0  # type: ignore[assignment]
    with pytest.raises(SampleMixingError):
        run(model, BatchGrad, torch.randn(T, T, D), check="first")


FRONTS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "activation": nn.ReLU6,
    "several": lambda: nn.Sequential(nn.Softplus(), nn.Sigmoid(), nn.Tanh()),
    "frozen": lambda: nn.Linear(D, D).requires_grad_(False),
}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("front", FRONTS)
def test_layers_without_a_graph_pass_the_samples_on(front: str, extension: Any) -> None:
    """Two samples are as small as a table of positions; what is made of the input is none."""
    model = net(lambda net, x: net.b(net.a(net.front(x)).softmax(0)))
    model.front = FRONTS[front]()
    with pytest.raises(SampleMixingError):
        run(model, extension, torch.randn(2, 1, D), check="first")
    model = net(lambda net, x: net.b(net.a(net.front(x)).softmax(-1)))
    model.front, x = FRONTS[front](), torch.randn(2, 1, D)
    run(model, extension, x)
    if extension is BatchGrad:
        for n, sample in enumerate(x):
            own = model(sample[None]).square().sum() / (2 * D)
            expected = torch.autograd.grad(own, model.a.weight)[0]
            oracle.assert_close(model.a.weight.grad_batch[n], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_neighbours_in_any_precision(dtype: torch.dtype, scale: float) -> None:
    """Weights of samples are powers of two: what they make different is no rounding."""

    def neighbours(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        out: Tensor = net.b(h + 0.3 * h.roll(1, 0))
        return out

    with pytest.raises(SampleMixingError):
        run(net(neighbours).to(dtype), BatchGrad, (scale * torch.randn(2, D)).to(dtype))
    run(
        net(lambda net, x: net.b(net.a(x).tanh())).to(dtype), BatchGrad, torch.randn(6, D).to(dtype)
    )


def test_an_address_that_is_held_is_not_given_again() -> None:
    tensor = torch.randn(3)
    number, held = memory_of(tensor), hold_address(tensor)
    del tensor
    assert number not in [memory_of(torch.randn(3)) for _ in range(50)]
    del held


class Halved(nn.Linear):
    """Another forward pass, whose parameters are looked at where operations use them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / 2, self.bias)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize(("positions", "width"), [(1, 3), (2, 1)])
def test_a_part_of_what_such_a_module_returned_is_overwritten(positions: int, width: int) -> None:
    """Inside, the output is a view of ``[N · positions, width]``."""

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.halved(x)
        F.elu_(h.narrow(1, 0, 1))
        return h, net.a(x.tanh())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        lossfunc = extend(nn.MSELoss(reduction="sum"))
        first, second = model(x)
        return lossfunc(first, first * 0) + lossfunc(second, second * 0)  # type: ignore[no-any-return]

    model = extend(Net(forward, halved=Halved(1, width), a=nn.Linear(1, 1)))
    x = torch.randn(3, positions, 1)
    with backpack(BatchGrad()):
        loss(model, x).backward()
    for n in range(3):
        own = torch.autograd.grad(loss(model, x[n : n + 1]), [*model.parameters()])
        for parameter, expected in zip(model.parameters(), own, strict=True):
            oracle.assert_close(parameter.grad_batch[n], expected)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_samples_that_mix_beside_a_much_larger_gradient(extension: Any) -> None:
    """What two samples exchange is rounding of a third one's."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.b(torch.cat([h[:2], h[2:].flip(0) + h[2:]]))  # type: ignore[no-any-return]

    output = extend(net(forward))(torch.randn(T, D))
    losses = extend(nn.MSELoss(reduction="none"))(output, torch.zeros_like(output))
    weights = torch.tensor([1e11, 1.0, 1.0, 1.0])
    with pytest.raises(SampleMixingError), backpack(extension(), check="always"):
        (weights * losses.sum(1)).sum().backward()
