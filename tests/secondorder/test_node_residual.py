"""Diagonals of the Hessian through operations between modules, against plain double backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError, UnsupportedError
from backpack_core.extensions import BatchDiagHessian, DiagGGNExact, DiagHessian
from backpack_operations.alignment import Crossing
from backpack_products import Columns
from backpack_products.tuning import within_budget as budget
from backpack_secondorder.propagators import LossSqrt
from tests.cases import Net, Problem, classification
from tests.core.functional import Cube
from tests.secondorder.problems import hessians
from tests.secondorder.test_diag_hessian import diagonals

Forward = Callable[[Any, Tensor], Tensor]


def _between(operation: Callable[[Tensor], Tensor]) -> Forward:
    """A function of one layer's output."""
    return lambda net, x: net.last(operation(net.a(x)))


def _heads(net: Any, x: Tensor) -> list[Tensor]:
    return [layer(x).unflatten(2, (2, 2)).transpose(1, 2) for layer in (net.q, net.k, net.v)]


def _eager(net: Any, x: Tensor) -> Tensor:
    q, k, v = _heads(net, x)
    h = (q @ k.mT / 2**0.5).softmax(-1) @ v
    return net.last((h.transpose(1, 2).flatten(2) + x).mean(1))  # type: ignore[no-any-return]


def _fused(backend: SDPBackend) -> Forward:
    def forward(net: Any, x: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            h = F.scaled_dot_product_attention(*_heads(net, x), is_causal=True)
        return net.last((h.transpose(1, 2).flatten(2) + x).mean(1))  # type: ignore[no-any-return]

    return forward


def _turned(h: Tensor) -> Tensor:
    """Samples are on another axis, where an operation is applied."""
    return h.T.sigmoid().cumsum(0).softmax(0).T


def _assigned(net: Any, x: Tensor) -> Tensor:
    h = net.a(x) * 1.0
    h[:, 0] = net.b(x).exp()[:, 0]
    h[:, 1].mul_(net.b(x)[:, 1])
    return net.last(h)  # type: ignore[no-any-return]


def _in_place(net: Any, x: Tensor) -> Tensor:
    h = F.hardswish(net.a(x.unsqueeze(1)), inplace=True).squeeze(1)  # a view's
    return net.last(F.silu(h, inplace=True).mul_(net.b(x)))  # type: ignore[no-any-return]


def _stacked(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    for layer in (net.b, net.c):
        h = h + layer(h.tanh() * h)
    return net.last(h)  # type: ignore[no-any-return]


FLAT: dict[str, Forward] = {
    "sigmoid": _between(torch.sigmoid),
    "exp": _between(torch.exp),
    "its own square": _between(lambda h: h * h),
    "gelu by hand": _between(lambda h: 0.5 * h * (1 + torch.tanh(h + 0.04 * h.pow(3)))),
    "softmax": _between(lambda h: h.softmax(1)),
    "log of a softmax": _between(lambda h: h.log_softmax(1)),
    "unit norm": _between(lambda h: h / h.norm(dim=1, keepdim=True)),
    "layer norm": _between(lambda h: F.layer_norm(h, (4,))),
    "variance": _between(lambda h: h - h.var(1, keepdim=True)),
    "product": _between(lambda h: h * h.prod(1, keepdim=True)),
    "diagonal": _between(lambda h: h * (h.unsqueeze(2) @ h.unsqueeze(1)).diagonal(0, 1, 2)),
    "outer product": _between(lambda h: (h.unsqueeze(2) @ h.unsqueeze(1)).mean(2)),
    "turned": _between(_turned),
    "gate": lambda net, x: net.last(net.a(x) * net.b(x).sigmoid()),
    "broadcast gate": lambda net, x: net.last(net.a(x) * net.b(x)[:, :1]),
    "quotient": lambda net, x: net.last(net.a(x) / (1 + net.b(x).square())),
    "one layer twice": lambda net, x: net.last(net.a(x) * net.a(x.flip(1))),
    "assigned": _assigned,
    "in place": _in_place,
    "stacked": _stacked,
    "checkpoint": _between(lambda h: checkpoint(torch.sin, h * h, use_reentrant=False)),
}
TOKENS: dict[str, Forward] = {"eager attention": _eager, "attention": _fused(SDPBackend.MATH)}
ALL = {**FLAT, **TOKENS}
TWO = ("gate", "broadcast gate", "quotient", "assigned", "in place")
LAYERS = {**dict.fromkeys(TWO, "ab"), "stacked": "abc"}


def _make(name: str, batch: int = 3, forward: Forward | None = None) -> Problem:
    torch.manual_seed(1)
    layers = "qkv" if name in TOKENS else LAYERS.get(name, "a")
    # A bias of the keys changes nothing: its diagonal is rounding.
    parts = {layer: nn.Linear(4, 4, bias=layer != "k") for layer in layers}
    shape = (4,) if name in FLAT else (3, 4)
    return classification(Net(forward or ALL[name], **parts, last=nn.Linear(4, 3)), shape, batch)


@cache
def _expected(name: str, batch: int = 3) -> list[Tensor]:
    """Computed once: the numbers of a net are the same each time."""
    problem = _make(name, batch)
    return diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])


def _check(name: str, batch: int = 3, **options: Any) -> None:
    problem, expected = _make(name, batch), _expected(name, batch)
    problem.run(DiagHessian(**options), BatchDiagHessian(**options))
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)


@pytest.mark.parametrize("batch", [1, 3, 4])  # as many samples as features, too
@pytest.mark.parametrize("name", ALL)
def test_exact(name: str, batch: int) -> None:
    _check(name, batch)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_exact_in_chunks(name: str, size: int) -> None:
    _check(name, chunk_size=size)


@pytest.mark.parametrize("name", ALL)
def test_exact_within_a_small_budget(name: str) -> None:
    with budget(256):
        _check(name)


@pytest.mark.parametrize("name", ["gate", "softmax", "diagonal", "eager attention", "attention"])
def test_chosen_samples(name: str) -> None:
    problem = _make(name)
    expected = _expected(name)
    problem.run(BatchDiagHessian(subsampling=[2, 0, 2]))
    problem.compare("diag_h_batch", [d[[2, 0, 2]] for d in expected])


def test_the_only_sample_lies_wherever_it_does() -> None:
    _check("turned", 1, subsampling=[0])


@pytest.mark.parametrize("chosen", [[0], [2, 0, 2]])
def test_chosen_samples_that_may_lie_anywhere(chosen: list[int]) -> None:
    problem = _make("turned")
    expected = _expected("turned")
    problem.run(BatchDiagHessian(subsampling=chosen))
    problem.compare("diag_h_batch", [d[chosen] for d in expected])


@pytest.mark.parametrize("name", ["in place", "gate", "softmax", "eager attention"])
def test_pass_that_is_told_its_inputs(name: str) -> None:
    """Autograd's nodes leave out what such a pass does not need, whoever calls them."""
    problem = _make(name)
    (first, *_), expected = problem.parameters, _expected(name)
    extend(problem.model), extend(problem.lossfunc)
    loss = problem.loss()
    with backpack(BatchDiagHessian()):
        loss.backward(inputs=[first])
    torch.testing.assert_close(first.diag_h_batch, expected[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["gate", "softmax", "eager attention"])
def test_differentiable(name: str) -> None:
    """With ``create_graph=True``, the gradient that arrives has a graph of its own."""
    problem = _make(name)
    extend(problem.model), extend(problem.lossfunc)
    first = problem.parameters[0]

    def total() -> Tensor:
        with backpack(DiagHessian()):
            torch.autograd.grad(problem.loss(), problem.parameters, create_graph=True)
        return first.diag_h.sum()  # type: ignore[attr-defined,no-any-return]

    (found,) = torch.autograd.grad(total(), first)
    step = torch.zeros_like(first)
    step[1, 2] = 1e-5
    both = []
    for sign in (1, -1):
        with torch.no_grad():
            first += sign * step
        both.append(total().item())
        with torch.no_grad():
            first -= sign * step
    assert found[1, 2].item() == pytest.approx((both[0] - both[1]) / 2e-5, rel=1e-6)


@dataclass(frozen=True)
class Listening(LossSqrt):
    """What goes through everything in chunks of the loss, and splits nothing off later."""

    heard: list[Crossing] = field(default_factory=list, compare=False)

    def cross(
        self, node: Node, quantities: dict[int, Columns], there: Crossing
    ) -> list[tuple[int, Columns]]:
        self.heard.append(there)
        return super().cross(node, quantities, there)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_takes_columns_is_each_propagators_own(is_first: bool) -> None:
    """Of two that cross a node, one is not told what was told the other."""
    other = DiagGGNExact()
    other.propagator = listening = Listening()
    both = [DiagHessian(), other] if is_first else [other, DiagHessian()]
    _make("sigmoid").run(*both)
    assert listening.heard
    assert not any(there.grads for there in listening.heard)


@pytest.mark.host("no kernel of a GPU takes double precision")
def test_kernel_without_second_derivative() -> None:
    problem = _make("attention", forward=_fused(SDPBackend.FLASH_ATTENTION))
    with pytest.raises(UnsupportedError, match="has no second derivative"):
        problem.run(DiagHessian())


@pytest.mark.parametrize(
    "operation", [Cube.apply, lambda h: (h + 1j).abs()], ids=["function", "complex numbers"]
)
def test_what_is_refused(operation: Callable[[Tensor], Tensor]) -> None:
    net = Net(_between(operation), a=nn.Linear(4, 4), last=nn.Linear(4, 3))
    with pytest.raises(BridgeError, match="not known to be linear") as error:
        classification(net, (4,)).run(DiagHessian())
    where = error.value.backpack_context  # type: ignore[attr-defined]
    assert where == "[DiagHessian of backpack-plugin-secondorder 0.1.0, after Linear 'a']"
