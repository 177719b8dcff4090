"""Parameters that functions use have products in the form that a module's would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_checks.dye import DyePropagator
from backpack_core.errors import PluginError, ShapeError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SumGradSquared,
)
from backpack_operations import operands
from backpack_operations.operands import FactoredColumns, Operand, by_root, products_at
from backpack_products import Columns
from backpack_products.affine import AffineProduct
from backpack_products.columns import ApartColumns, Root
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct, SampleProduct, SumProduct
from backpack_products.scale import ScaleProduct, TableProduct
from tests import oracle
from tests.cases import Net, Problem, classification

Forward = Callable[[Any, Tensor], Tensor]
T, D, C = 4, 3, 3


def _parameters(*shape: int, bias: int = 0) -> dict[str, tuple[int, ...]]:
    return {"w": shape, "b": (bias,)} if bias else {"w": shape}


def _tokens(x: Tensor) -> Tensor:
    """Numbers ``[N, T]`` of rows, the first for padding."""
    return (x[..., 0] * 10).long() % 5


def _kernel(*shape: int, **options: Any) -> Forward:
    function = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 1]
    return lambda net, x: function(x.reshape(-1, 2, *shape), net.w, net.b, **options).flatten(1)


FORMS = {
    "affine": AffineProduct,
    "scale": ScaleProduct,
    "lookup": LookupProduct,
    "table": TableProduct,
    "formed": DenseProduct,
    "sum": SumProduct,
}
# Forward passes of [N, T, D] with what they use, and the forms that their products have.
CASES: dict[str, tuple[Forward, dict[str, tuple[int, ...]], str]] = {
    "linear": (
        lambda net, x: F.linear(x, net.w, net.b),
        _parameters(5, D, bias=5),
        "affine affine",
    ),
    "linear_of_rows": (
        lambda net, x: F.linear(x[:, 0], net.w, net.b),
        _parameters(5, D, bias=5),
        "affine affine",
    ),
    "linear_without_bias": (lambda net, x: F.linear(x, net.w), _parameters(5, D), "affine"),
    "matmul": (lambda net, x: x @ net.w + net.b, _parameters(D, 5, bias=5), "affine affine"),
    "square": (lambda net, x: x @ net.w.mT - 2 * net.b, _parameters(D, D, bias=D), "affine formed"),
    "sub": (
        lambda net, x: torch.sub(x @ net.w, net.b, alpha=2),
        _parameters(D, D, bias=D),
        "affine affine",
    ),
    "addmm": (
        lambda net, x: torch.addmm(net.b, x[:, 0], net.w, beta=3, alpha=2),
        _parameters(D, 5, bias=5),
        "affine affine",
    ),
    "positions_times_weight": (lambda net, x: x @ net.w @ x.mT, _parameters(D, D), "affine"),
    "turned": (lambda net, x: (net.w @ x[:, 0].mT).mT, _parameters(5, D), "affine"),
    "einsum": (lambda net, x: torch.einsum("nti,oi->nto", x, net.w), _parameters(5, D), "affine"),
    "heads": (
        lambda net, x: torch.einsum("nti,hio->nhto", x, net.w),
        _parameters(2, D, 5),
        "affine",
    ),
    "gain": (lambda net, x: x * net.w + net.b, _parameters(D, bias=D), "scale affine"),
    "gain_of_positions": (lambda net, x: net.w * x, _parameters(1, T, D), "scale"),
    "gain_of_one_axis": (lambda net, x: net.w * x, _parameters(T, 1), "formed"),
    "single_gain": (lambda net, x: net.w * x, _parameters(1), "formed"),
    "table": (lambda net, x: x + net.w, _parameters(1, T, D), "table"),
    "embedding": (lambda net, x: F.embedding(_tokens(x), net.w), _parameters(5, 2), "lookup"),
    "padded": (
        lambda net, x: F.embedding(_tokens(x), net.w, padding_idx=2),
        _parameters(5, 2),
        "lookup",
    ),
    "index": (lambda net, x: net.w[_tokens(x) - 5], _parameters(5, 2), "lookup"),
    "index_of_vector": (lambda net, x: net.w[_tokens(x)], _parameters(5), "formed"),
    "conv1d": (_kernel(6), _parameters(4, 2, 3, bias=4), "affine affine"),
    "conv2d": (_kernel(2, 3, padding=1), _parameters(4, 2, 2, 2, bias=4), "affine affine"),
    "groups": (
        _kernel(2, 3, padding=(0, 1), dilation=(1, 2), groups=2),
        _parameters(4, 1, 1, 2, bias=4),
        "affine affine",
    ),
    "stride": (_kernel(6, stride=2, padding=2), _parameters(3, 2, 3, bias=3), "affine affine"),
    "conv3d": (_kernel(1, 2, 3), _parameters(3, 2, 1, 2, 2, bias=3), "affine affine"),
    "conv_transpose": (
        lambda net, x: F.conv_transpose1d(x.reshape(-1, 2, 6), net.w).flatten(1),
        _parameters(2, 3, 2),
        "formed",
    ),
    "normalised": (lambda net, x: F.linear(x, net.w / net.w.norm()), _parameters(5, D), "formed"),
    "parts": (
        lambda net, x: torch.cat([x @ part.mT for part in net.w.chunk(2)], 2),
        _parameters(4, D),
        "formed",
    ),
    "twice": (
        lambda net, x: F.linear(torch.tanh(F.linear(x, net.w)), net.w),
        _parameters(D, D),
        "affine",
    ),
    "two_forms": (
        lambda net, x: F.linear(F.embedding(_tokens(x), net.w), net.w),
        _parameters(5, D),
        "sum",
    ),
}


def _problem(name: str, samples: int = 3, reduction: str = "mean") -> Problem:
    """Of a net that goes on with a module, so that something is behind and before."""
    forward, shapes, _ = CASES[name]

    def inner(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        return torch.cat([torch.tanh(forward(net, h)).flatten(1), h.flatten(1)], 1)

    own = {key: nn.Parameter(torch.randn(shape)) for key, shape in shapes.items()}
    net = Net(inner, a=nn.Linear(D, D), **own)
    problem = classification(net, (T, D), samples, C, reduction=reduction)
    net.z = nn.Linear(net(*problem.inputs).shape[1], C)
    net.function = lambda net, x: net.z(inner(net, x))
    return problem


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, type] = {}
    read = BatchGrad.read

    def note(self: BatchGrad, product: SampleProduct) -> Any:
        found[product.name] = type(product)
        return read(self, product)

    monkeypatch.setattr(BatchGrad, "read", note)
    _problem(name, samples=2).run(BatchGrad())
    own = [found[key] for key in ("w", "b") if key in found]
    assert own == [FORMS[form] for form in CASES[name][2].split()]


@pytest.mark.parametrize(("reduction", "samples"), [("mean", 1), ("sum", 5), ("mean", T)])
@pytest.mark.parametrize("name", CASES)
def test_against_autograd(name: str, reduction: str, samples: int) -> None:
    problem = _problem(name, samples, reduction)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(BatchGrad(), BatchL2Grad(), SumGradSquared(), DiagGGNExact(), BatchDiagGGNExact())
    problem.compare("grad_batch", gradients)
    problem.compare("batch_l2", [g.flatten(1).square().sum(1) for g in gradients])
    problem.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])
    problem.compare("diag_ggn_exact_batch", diagonals)


def _twins(forward: Forward, own: nn.Linear | nn.Conv1d, batch: int = 5) -> tuple[Problem, Problem]:
    """A layer as a module, and its parameters as a function uses them."""
    problems = []
    for use in (lambda net, x: net.a(x), forward):
        net = Net(lambda net, x, use=use: net.z(torch.tanh(use(net, x)).mean(1)), a=own)
        net.z = nn.Linear(4, C)
        torch.manual_seed(0)
        problems.append(classification(net, (T, D), batch, C))
        problems[-1].model.z.load_state_dict(problems[0].model.z.state_dict())
    return problems[0], problems[1]


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: F.linear(x, net.a.weight, net.a.bias),
        lambda net, x: x @ net.a.weight.mT + net.a.bias,
        lambda net, x: torch.einsum("nti,oi->nto", x, net.a.weight).add(net.a.bias),
        lambda net, x: torch.cat(
            [net.a(x[:, :2]), F.linear(x[:, 2:], net.a.weight, net.a.bias)], 1
        ),
    ],
    ids=["linear", "matmul", "einsum", "tied"],
)
def test_kronecker_factors(forward: Forward, size: int | None) -> None:
    """They are those of the module, and so where the module has some of the positions."""
    module, function = _twins(forward, nn.Linear(D, 4))
    module.run(KFLR("expand", chunk_size=size))
    expected = [p.kflr for p in module.parameters]
    function.run(KFLR("expand", chunk_size=size))
    for ours, theirs in zip([p.kflr for p in function.parameters], expected, strict=True):
        for factor, reference in zip(ours, theirs, strict=True):
            oracle.assert_close(factor, reference)


def test_kronecker_factors_of_a_kernel() -> None:
    module, function = _twins(
        lambda net, x: F.conv1d(x, net.a.weight, net.a.bias, padding=1),
        nn.Conv1d(T, 2, 2, padding=1),
    )
    module.run(KFLR())
    expected = [p.kflr for p in module.parameters]
    function.run(KFLR())
    for ours, theirs in zip([p.kflr for p in function.parameters], expected, strict=True):
        for factor, reference in zip(ours, theirs, strict=True):
            oracle.assert_close(factor, reference)


@pytest.mark.parametrize("name", ["linear", "matmul", "embedding", "conv2d", "gain", "two_forms"])
def test_what_is_frozen_gets_nothing(name: str) -> None:
    problem = _problem(name)
    frozen = [p for key, p in problem.model.named_parameters() if key in ("w", "a.weight")][:1]
    for parameter in frozen:
        parameter.requires_grad_(False)
    problem.check()
    assert not any(hasattr(parameter, "grad_batch") for parameter in frozen)


@pytest.mark.parametrize("name", CASES)
def test_where_autograd_saves_by_hooks(name: str) -> None:
    """Nobody may ask nodes for what they saved: columns are masked instead."""
    problem = _problem(name, samples=2)
    problem.model.function = _saved_by_hooks(problem.model.function)
    problem.check()


def _saved_by_hooks(function: Forward) -> Forward:
    def run(net: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return function(net, x)

    return run


@pytest.mark.parametrize("chosen", [[1], [2, 0], [1, 1]])
@pytest.mark.parametrize("name", ["linear", "matmul", "embedding", "conv1d", "gain", "twice"])
def test_chosen_samples(name: str, chosen: list[int]) -> None:
    problem = _problem(name)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(BatchGrad(chosen), BatchDiagGGNExact(chosen))
    problem.compare("grad_batch", [g[chosen] for g in gradients])
    problem.compare("diag_ggn_exact_batch", [d[chosen] for d in diagonals])


@pytest.mark.parametrize("name", ["linear", "matmul", "embedding", "conv1d", "gain", "two_forms"])
def test_in_chunks(name: str) -> None:
    problem = _problem(name)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(DiagGGNExact(chunk_size=1))
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])


def test_columns_of_several_roots() -> None:
    """What is formed, and what has another root, stands beside factors."""
    first, second = Root("first"), Root("second")
    out, inp = torch.randn(2, 3, 1, 1, 4), torch.randn(3, 1, 1, 5)
    product = AffineProduct(out, inp, torch.Size([4, 5]))
    dense = torch.randn(2, 3, 4, 5)
    factored = FactoredColumns({first: [product]})
    formed = torch.einsum("vnsgo,nsgi->vnoi", out, inp)
    other = ApartColumns({first: dense, second: dense[:1]})
    for both in (factored.merge(other), other.merge(factored)):
        assert isinstance(both, FactoredColumns)
        oracle.assert_close(both.blocks[first], formed + dense)
        oracle.assert_close(both.blocks[second], dense[:1])
        whole = both.product()
        assert both.sizes == {first: 2, second: 1} == whole.roots
        values = whole.part(slice(0, 3), slice(0, 3))
        oracle.assert_close(values, torch.cat([formed + dense, dense[:1]]))
    assert type(factored.map(lambda mat: 2 * mat)) is ApartColumns
    assert isinstance(other.merge(other), Columns)
    assert factored.to(torch.float64) is factored
    assert factored.to(torch.float32).mat.dtype == torch.float32


def test_columns_of_several_roots_at_one_operand() -> None:
    """They meet the same there, so it is one use; columns at another operand are another one."""
    first, second = Root("first"), Root("second")
    out, inp, shape = torch.randn(3, 2, 1, 1, 4), torch.randn(2, 1, 1, 5), torch.Size([4, 5])
    whole = AffineProduct(out, inp, shape)
    factored = FactoredColumns(by_root(whole, {first: 1, second: 2}))
    again = FactoredColumns({second: [AffineProduct(out[:2], inp.clone(), shape)]})
    formed = torch.einsum("vnsgo,nsgi->vnoi", out, inp)
    oracle.assert_close(factored.blocks[second], formed[1:])
    product, both = factored.product(), factored.merge(again).product()  # type: ignore[attr-defined]
    assert isinstance(product, AffineProduct)
    assert isinstance(both, AffineProduct)
    assert (product.positions, both.positions) == (1, 2)
    assert product.roots == both.roots == {first: 1, second: 2}
    every = slice(0, 3), slice(0, 2)
    oracle.assert_close(product.part(*every), formed)
    formed[1:] += torch.einsum("vnsgo,nsgi->vnoi", out[:2], inp)
    oracle.assert_close(both.part(*every), formed)
    parts = by_root(DenseProduct(formed), {first: 1, second: 2})
    oracle.assert_close(parts[second][0].part(slice(1, 2), every[1]), formed[2:])


def test_a_net_of_functions_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared at a parameter, so nothing is left to be compared there."""
    passes: list[int] = []
    start, seen = DyePropagator.start, []

    def note(*args: Any) -> Any:
        seen.append(len(passes))
        return start(*args)

    monkeypatch.setattr(DyePropagator, "start", note)
    problem = _problem("linear")
    for number in range(1, 10):
        passes.append(number)
        problem.run(BatchGrad())
    assert seen == [1, 2, 4, 8]


def test_a_sparse_factor() -> None:
    """A graph's matrix: what it multiplies is masked, as anything that is not known."""
    adjacency = torch.eye(T).roll(1, 0).to_sparse()
    table = nn.Parameter(torch.randn(T, D))
    net = Net(lambda net, x: net.z(x + torch.mm(adjacency, net.w)).mean(1), w=table)
    net.z = nn.Linear(D, C)
    problem = classification(net, (T, D), 3, C)
    problem.check()


def _makes(what: Any) -> Any:
    def make(operand: Operand, mat: Tensor) -> Any:
        return what(operand, mat)

    return make


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (lambda operand, mat: mat, r"returned tensor\("),
        (lambda operand, mat: DenseProduct(mat[:, :2]), r"returned <DenseProduct"),
        (lambda operand, mat: DenseProduct(mat[..., :2]), r"returned <DenseProduct"),
    ],
)
def test_products_of_a_plugin_fit_the_columns(
    what: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(operands._MAKERS, "Mul", {})
    products_at("Mul")(_makes(what))
    net = Net(
        lambda net, x: net.linear(x) * net.w, linear=nn.Linear(3, 3), w=nn.Parameter(torch.ones(3))
    )
    said = found + r".* for an operand of Mul, expected a SampleProduct \[1, 4, 3\], or None"
    with pytest.raises(ShapeError, match=rf"{__name__}\._makes.*" + said):
        classification(net, (3,), 4).run(BatchGrad())


def test_products_are_for_operations_with_names() -> None:
    with pytest.raises(PluginError, match=r"products_at takes names of operations"):
        products_at(_makes(None))
