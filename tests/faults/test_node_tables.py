"""What the bridge knows of autograd nodes: by their type, and true of every one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import BridgeError
from backpack_core.extensions import (
    HMP,
    PCHMP,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
)
from backpack_operations import nodes
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.node_cases import (
    LINEAR,
    PIECEWISE,
    PRODUCTS,
    QUOTIENTS,
    SCALED,
    SCALED_QUOTIENTS,
)
from tests.faults.refusal import right_or_refused
from tests.secondorder.problems import hessians


class Cube(torch.autograd.Function):
    """The base of functions with misleading names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


TABLES = ["LINEAR", "PIECEWISE_LINEAR", "FACTORS", "QUOTIENTS"]


def _between(operation: Callable[[Tensor], Tensor], **parts: nn.Module) -> Problem:
    model = Net(
        lambda net, x: net.b(operation(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3), **parts
    )
    return classification(model, (3,))


def _check_diagonal(problem: Problem) -> None:
    """The diagonal of the Hessian against double backward."""
    blocks = problem.expected(hessians)
    problem.run(DiagHessian(), BatchDiagHessian())
    pairs = list(zip(blocks, problem.parameters, strict=True))
    diagonals = [b.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape) for b, p in pairs]
    problem.compare("diag_h_batch", diagonals)
    problem.compare("diag_h", [d.sum(0) for d in diagonals])


@pytest.mark.parametrize("name", ["Clamp", "Relu", "Add", "View", "Sum", "Div", "Mul", "Sort"])
def test_a_function_named_like_a_node(name: str) -> None:
    """Nothing is known of what it computes: the Hessian is exact, or refused."""
    function = type(name, (Cube,), {})
    problem = _between(function.apply)
    blocks = [block.sum(0) for block in problem.expected(hessians)]
    with right_or_refused(name, error=BridgeError):
        problem.run(DiagHessian(), HMP())
        for p, block in zip(problem.parameters, blocks, strict=True):
            vectors = torch.randn(2, *p.shape)
            oracle.assert_close(p.hmp(vectors).flatten(1), vectors.flatten(1) @ block)
            oracle.assert_close(p.diag_h.flatten(), block.diagonal())


def test_positive_curvature_knows_nothing_of_a_function() -> None:
    with pytest.raises(BridgeError, match="Clamp"):
        _between(type("Clamp", (Cube,), {}).apply).run(PCHMP())


@pytest.mark.parametrize("name", ["Clamp", "Add", "AccumulateGrad"])
def test_a_function_named_like_a_node_is_crossed_exactly(name: str) -> None:
    function = type(name, (Cube,), {})
    _between(function.apply).check()


def test_absolute_value_of_complex_numbers() -> None:
    """``|x + i|`` is as curved as a root is."""
    with right_or_refused("Abs", error=BridgeError):
        _check_diagonal(_between(lambda x: (x + 1j).abs()))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.ops.aten.mul.Scalar(x, 2.5),
        lambda x: torch.ops.aten.div.Scalar(x, 2.5),
        lambda x: torch.cumulative_trapezoid(torch.cat([x, x[:, :1]], 1)),
        lambda x: torch.cumulative_trapezoid(torch.cat([x, x[:, :1]], 1), dx=0.3),
    ],
    ids=["mul", "div", "cumulative_trapezoid", "cumulative_trapezoid-dx"],
)
def test_multiplication_by_a_number(operation: Callable[[Tensor], Tensor]) -> None:
    _check_diagonal(_between(operation))


def _table(name: str) -> set[str]:
    """The types of nodes that a table stands for."""
    names: Iterable[str] = getattr(nodes, name)
    known = vars(torch._C._functions)
    return {k for n in names for k in known if re.fullmatch(rf"{n}Backward\d+(_copy)?", k)}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_that_of_a_node(table: str) -> None:
    known = vars(torch._C._functions)
    unknown = [
        name
        for name in getattr(nodes, table)
        if not any(re.fullmatch(rf"{name}Backward\d+", kind) for kind in known)
    ]
    assert not unknown


@pytest.mark.parametrize(
    ("table", "cases"),
    [
        ("LINEAR", [LINEAR]),
        ("PIECEWISE_LINEAR", [PIECEWISE]),
        ("FACTORS", [PRODUCTS, SCALED]),
        ("QUOTIENTS", [QUOTIENTS, SCALED_QUOTIENTS]),
    ],
    ids=TABLES,
)
def test_every_type_of_node_has_a_case(table: str, cases: list[dict[str, Any]]) -> None:
    assert _table(table) == {name for part in cases for name in part}


def _node(result: Tensor, kind: str) -> Any:
    """The node of that type behind a result."""
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == kind:
            return node
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
    raise AssertionError(f"no {kind} behind {result.grad_fn}")


def _second_difference(function: Callable[[Tensor], Tensor], x: Tensor, step: float) -> Tensor:
    """``f(x + u) - 2 f(x) + f(x - u)``, with the same random numbers for all three."""
    u = step * torch.randn_like(x)
    values = []
    for shifted in (x, x + u, x - u):
        torch.manual_seed(1)
        values.append(function(shifted).detach())
    return values[1] - 2 * values[0] + values[2]


@pytest.mark.filterwarnings("ignore:.*[Nn]ested:UserWarning")
@pytest.mark.parametrize("kind", [*LINEAR, *SCALED, "DivBackward1"])
def test_linear(kind: str) -> None:
    function = {**LINEAR, **SCALED, **SCALED_QUOTIENTS}[kind]
    x = torch.randn(2, 4, 6)
    assert nodes.is_linear(_node(function((x * 1).requires_grad_() * 1), kind))
    oracle.assert_close(1 + _second_difference(function, x, 1.0).abs().max(), torch.ones(()))


@pytest.mark.parametrize("kind", [*PIECEWISE, "DivBackward3"])
def test_piecewise_linear(kind: str) -> None:
    function = {**PIECEWISE, **SCALED_QUOTIENTS}[kind]
    x = torch.randn(2, 4, 6)
    assert nodes.is_linear(_node(function((x * 1).requires_grad_() * 1), kind))
    # Far from kinks at random points, and a quadratic part would be seen at 1e-10.
    curvature = _second_difference(function, x, 1e-5).abs().max() / 1e-5**2
    assert curvature < 1e-4


@pytest.mark.filterwarnings("ignore:.*[Nn]ested:UserWarning")
@pytest.mark.parametrize("kind", [*PRODUCTS, *QUOTIENTS])
def test_products_are_linear_in_one_factor(kind: str) -> None:
    function = {**PRODUCTS, **QUOTIENTS}[kind]
    x, y = torch.randn(2, 2, 4, 4)
    left, right = ((t * 1).requires_grad_() * 1 for t in (x, y))
    assert nodes.is_linear(_node(function(left, y), kind))
    assert not nodes.is_linear(_node(function(left, right), kind))
    assert nodes.is_linear(_node(function(x, right), kind)) == (kind in PRODUCTS)
    step = 1e-5 if kind == "DivBackward2" else 1.0
    oracle.assert_close(
        1 + _second_difference(lambda t: function(t, y), x, step).abs().max(), torch.ones(())
    )
    if kind in PRODUCTS:
        second = _second_difference(lambda t: function(x, t), y, 1.0)
        oracle.assert_close(1 + second.abs().max(), torch.ones(()))


def test_leaves_are_constants() -> None:
    """A product with a parameter is linear in the activation."""
    x, weight = torch.randn(3, requires_grad=True) * 1, nn.Parameter(torch.randn(3))
    assert nodes.is_linear(_node(x * weight, "MulBackward0"))
    assert not nodes.is_linear(_node(x * weight.exp(), "MulBackward0"))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_a_curved_function_needs_no_table(extension: Any) -> None:
    _between(torch.sin).check(first=extension is BatchGrad, second=extension is DiagGGNExact)
