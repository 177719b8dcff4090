"""Passes in which nothing needs a gradient: autograd does not go, and values are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import BackpackWarning, SampleMixingError, UnsupportedError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    TaskDotGrad,
    TaskGrad,
    Variance,
)
from backpack_core.record.nested import iter_tensors
from tests.cases import Net
from tests.core.side_by_side import conv_net, token_net

N = 4


def tied_net() -> nn.Module:
    """A module in two calls, a branch, and a recurrent layer of which one output is used."""
    return Net(
        lambda net, x: net.c(net.b(net.a(x).relu())[0][:, -1] + net.a(x).mean(1)),
        a=nn.Linear(2, 4),
        b=nn.LSTM(4, 4, batch_first=True),
        c=nn.Linear(4, 3),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (conv_net, (2, 5, 5)),
    "tokens": (token_net, (9, 2)),
    "tied": (tied_net, (3, 2)),
}
ASKED: dict[str, Callable[[], list[Any]]] = {
    "factors": lambda: [KFAC(1, "reduce"), KFAC(2, savefield="other"), DiagGGNMC()],
    "exact": lambda: [DiagGGNExact(), BatchDiagGGNExact(chunk_size=1), KFLR("expand")],
    "not in chunks": lambda: [EKFAC(None), SqrtGGNExact(subsampling=[0, 2])],
}


class Seen:
    """A model in double precision whose activations tell whether autograd came by."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        self.model, self.lossfunc = extend(model.double()), extend(nn.CrossEntropyLoss())
        self.x = torch.randn(N, *shape, dtype=torch.float64)
        self.y = torch.arange(N) % 3
        self.count = 0
        for module in model.modules():
            module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            output.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self.count += 1

    def run(
        self,
        extensions: list[Any],
        gradient: Any = "skipped",
        check: Any = "never",
        loss: Callable[[Tensor], Tensor] = lambda loss: loss,
        options: dict[str, Any] | None = None,
        **block: Any,
    ) -> list[Tensor]:
        """The values of one pass; ``count`` is how often it came by activations."""
        self.count = 0
        torch.manual_seed(0)
        value = loss(self.lossfunc(self.model(self.x), self.y))
        with backpack(*extensions, gradient=gradient, check=check, **block):
            value.backward(**(options or {}))
        found: list[Tensor] = []
        for parameter in self.model.parameters():
            for extension in extensions:
                found += iter_tensors([getattr(parameter, extension.savefield)])
        return found


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("net", NETS)
def test_values_are_those_of_a_pass_with_autograd(net: str, asked: str) -> None:
    make, shape = NETS[net]
    seen = Seen(make(), shape)
    wanted = seen.run(ASKED[asked](), gradient="none")
    assert seen.count
    found = seen.run(ASKED[asked]())
    assert not seen.count
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert all(parameter.grad is None for parameter in seen.model.parameters())


def test_autograd_goes_where_a_structure_is_measured() -> None:
    seen = Seen(*_made("tokens"))
    went = []
    for _ in range(6):
        seen.run([KFAC()], check="first")
        went.append(bool(seen.count))
    assert went[:2] == [True, True]
    assert not all(went)


def test_samples_that_mix_are_noticed() -> None:
    seen = Seen(
        Net(lambda net, x: net.a(x - x.mean(0)) * net.a(x).mean(0), a=nn.Linear(2, 3)), (2,)
    )
    with pytest.raises(SampleMixingError):
        seen.run([KFAC()], check="first")


@pytest.mark.parametrize(
    ("extensions", "options"),
    [
        (lambda: [Variance(), KFAC()], {}),
        (lambda: [DiagHessian()], {}),
        (lambda: [KFRA()], {}),
        (lambda: [KFAC()], {"extension_hook": lambda module: None}),
    ],
    ids=["first order", "residuals", "averages", "hook"],
)
def test_autograd_goes_where_somebody_needs_it(extensions: Any, options: dict[str, Any]) -> None:
    seen = Seen(*_made("conv"))
    if "KFRA" in str(extensions()[0]):
        seen = Seen(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 3)), (2,))
    wanted = seen.run(extensions(), gradient="none", **options)
    found = seen.run(extensions(), **options)
    assert seen.count
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("asked", ASKED)
def test_a_gradient_that_is_given_arrives_at_the_loss(asked: str) -> None:
    options = {"gradient": torch.tensor(2.0).double()}
    seen = Seen(*_made("conv"))
    wanted = seen.run(ASKED[asked](), gradient="none", options=options)
    found = seen.run(ASKED[asked](), options=options)
    assert not seen.count
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    plain = seen.run(ASKED[asked]())
    assert not all(map(torch.equal, plain, wanted))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("net", NETS)
def test_operations_in_front_of_the_loss(net: str, asked: str) -> None:
    seen = Seen(*_made(net))
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda loss: 2 * loss,
        lambda loss: (loss + 1) / 3,
        lambda loss: torch.stack([loss, loss.detach(), 3 * loss]).mean(),
    ]
    for loss in ways:
        wanted = seen.run(ASKED[asked](), gradient="none", loss=loss)
        assert seen.count
        found = seen.run(ASKED[asked](), loss=loss)
        assert not seen.count
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("net", NETS)
def test_several_losses(net: str, reduction: str) -> None:
    make, shape = NETS[net]
    model, x = extend(make().double()), torch.randn(N, *shape, dtype=torch.float64)
    entropy = extend(nn.CrossEntropyLoss(reduction=reduction))
    square, other = extend(nn.MSELoss(reduction=reduction)), torch.randn(N, 3).double()
    visits: list[Tensor] = []
    asked = [DiagGGNExact(), KFLR("expand"), TaskGrad(), TaskDotGrad()]
    found: list[list[Tensor]] = []
    for gradient in ("none", "skipped"):
        outputs = model(x)
        outputs.register_hook(visits.append)
        losses = [entropy(outputs, torch.arange(N) % 3), square(outputs, other)]
        losses.append(entropy(2 * outputs, torch.arange(N) % 2))
        value = sum(weight * loss.sum() for weight, loss in enumerate(losses, start=1))
        with backpack(*asked, gradient=gradient, check="never"):  # type: ignore[arg-type]
            value.backward()  # type: ignore[union-attr]
        fields = [getattr(p, e.savefield) for p in model.parameters() for e in asked]
        found.append([*iter_tensors(fields)])
    assert len(visits) == 1, "autograd goes once"
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_another_root_gets_its_gradient() -> None:
    """A parameter itself, behind which autograd alone would go."""
    seen, own = Seen(*_made("conv")), torch.zeros((), requires_grad=True)
    loss = seen.lossfunc(seen.model(seen.x), seen.y)
    with backpack(KFAC(), gradient="skipped", check="never"):
        torch.autograd.backward([loss, own])
    assert own.grad == 1


def test_inputs_that_are_trained_get_their_gradient() -> None:
    seen = Seen(*_made("tokens"))
    seen.x.requires_grad_()
    seen.run([KFAC()])
    (wanted,) = torch.autograd.grad(seen.lossfunc(seen.model(seen.x), seen.y), seen.x)
    torch.testing.assert_close(seen.x.grad, wanted)


@pytest.mark.parametrize("gradient", ["none", "skipped"])
def test_a_target_that_is_trained_is_refused(gradient: Any) -> None:
    first, second = [extend(nn.Linear(2, 3).double()) for _ in range(2)]
    x = torch.randn(N, 2, dtype=torch.float64)
    loss = extend(nn.MSELoss())(first(x), second(x).sigmoid())
    with (
        pytest.raises(UnsupportedError, match=r"another one .* requires a gradient"),
        backpack(DiagGGNExact(), gradient=gradient, check="never"),
    ):
        loss.backward()


class Blocked(torch.autograd.Function):
    """The first of two, with no gradient for the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_what_a_function_leaves_undefined_is_zero() -> None:
    net = Net(
        lambda net, x: Blocked.apply(net.a(x), net.b(x)), a=nn.Linear(2, 3), b=nn.Linear(2, 3)
    )
    seen = Seen(net, (2,))
    wanted, found = [seen.run([DiagGGNExact()], way) for way in ("none", "skipped")]
    torch.testing.assert_close(found, wanted)
    assert not net.b.weight.diag_ggn_exact.any()


def test_observers_are_shown_no_zeros_for_gradients() -> None:
    seen, shown = Seen(*_made("conv")), []
    seen.run([DiagGGNExact()], observer=lambda view: shown.append(view.grad_output))
    assert shown[1:] == [None] * (len(shown) - 1)


def test_a_parameter_of_a_function_gets_its_gradient() -> None:
    net = Net(lambda net, x: net.a(x) @ net.weight, a=nn.Linear(2, 3))
    net.weight = nn.Parameter(torch.randn(3, 3))
    seen = Seen(net, (2,))
    seen.run([DiagGGNExact()])
    assert seen.count
    assert hasattr(net.weight, "diag_ggn_exact")


def test_checkpoints_are_left_to_autograd() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    net = Net(
        lambda net, x: net.c(checkpoint(net.inner, x, use_reentrant=False)),
        inner=inner,
        c=nn.Linear(3, 3),
    )
    seen = Seen(net, (2,))
    wanted = seen.run([DiagGGNExact()], gradient="autograd")
    with pytest.warns(BackpackWarning, match="saves tensors through hooks"):
        found = seen.run([DiagGGNExact()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def _made(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = NETS[name]
    return make(), shape
