"""Columns that cross a node together arrive as they do one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack
from backpack_core.extensions import KFRA, DiagGGNExact
from backpack_operations.apart import cross_columns
from backpack_operations.nodes import vmap_nodes
from backpack_products.columns import Columns
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.own_functions import Sine

ROOT = Path(__file__).parents[2]
Operation = Callable[[Tensor], Tensor]


def _points(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(4, 2)


def _distances(**options: Any) -> Operation:
    """To four points on a plane, from each of two. ``[N, 4] → [N, 8]``."""
    return lambda x: torch.cdist(x.reshape(-1, 2, 2), _points(x), **options).flatten(1)


def _scattered(x: Tensor) -> Tensor:
    """Its formula takes the gradient to begin where its memory does, which a column may not."""
    part = torch.sin(x[:, :2]).contiguous()
    return torch.as_strided_scatter(x.contiguous(), part, (len(x), 2), (4, 1), 0)


class Buffered(Sine):
    """Its backward pass writes into one buffer."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(grad, x.cos(), out=torch.empty_like(x))


OPERATIONS: dict[str, Operation] = {
    "cdist": _distances(),
    "cdist-direct": _distances(compute_mode="donot_use_mm_for_euclid_dist"),
    "cdist-1": _distances(p=1.0),
    "cdist-3": _distances(p=3.0),
    "cdist-inf": _distances(p=float("inf")),
    "cdist-of-two": lambda x: torch.cdist(x.reshape(-1, 2, 2), x.sin().reshape(-1, 2, 2)).flatten(
        1
    ),
    "as_strided_scatter": _scattered,
    "roll": lambda x: x * torch.stack([row.sum().roll(1) for row in x]).unsqueeze(1),
    "buffer": Buffered.apply,
}


def _problem(operation: Operation, **parts: Any) -> Problem:
    width = operation(torch.randn(2, 4)).shape[1]
    model = Net(lambda net, x: net.b(operation(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(width, 3))
    return classification(model, (3,), 4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_between_modules(name: str) -> None:
    _problem(OPERATIONS[name]).check()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", OPERATIONS)
def test_columns_in_chunks(name: str, size: int) -> None:
    problem = _problem(OPERATIONS[name])
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact(chunk_size=size))
    problem.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("name", ["cdist", "as_strided_scatter"])
def test_operation_before_the_loss(name: str, size: int | None) -> None:
    operation = OPERATIONS[name]
    width = operation(torch.randn(2, 4)).shape[1]
    model = Net(lambda net, x: operation(net.a(x)), a=nn.Linear(3, 4))
    problem = classification(model, (3,), 4, width)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact(chunk_size=size))
    problem.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize(
    "operation",
    [lambda x: torch.cdist(x, x.sin()), _scattered],
    ids=["cdist", "as_strided_scatter"],
)
def test_columns_that_begin_anywhere_in_memory(operation: Operation, columns: int) -> None:
    result = operation(torch.randn(4, 4, requires_grad=True) * 1)
    node: Any = result.grad_fn
    mat = torch.randn(5, *result.shape)[5 - columns :]
    found = dict(cross_columns(node, {0: Columns.start("any", mat)}))
    expected = [node(column.clone()) for column in mat]
    for position, arrived in found.items():
        oracle.assert_close(arrived.mat, torch.stack([e[position] for e in expected]))


class Prototypes(nn.Module):
    """Distances to learned points, without a rule."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(4, 3))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points, p=self.p)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["first", "between"])
def test_parameter_of_a_module_without_a_rule(inside: bool, p: float) -> None:
    before = [nn.Linear(3, 3)] if inside else []
    model = nn.Sequential(*before, Prototypes(p), nn.Tanh(), nn.Linear(4, 3))
    classification(model, (3,), 4).check()


def test_single_precision() -> None:
    """Rounding is not mistaken for a fault, and a fault not for rounding."""
    torch.set_default_dtype(torch.float32)
    for name in ("cdist", "as_strided_scatter"):
        problem = _problem(OPERATIONS[name])
        problem.rtol = 1e-4
        problem.check(first=False)


def test_batch_averages() -> None:
    """KFRA crosses nodes from both sides."""
    problem = _problem(OPERATIONS["cdist"])
    problem.inputs = (problem.inputs[0][:1],)
    problem.target = problem.target[:1]
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(KFRA())
    for ours, block in zip(problem.fields("kfra"), blocks, strict=True):
        oracle.assert_close(ours.dense(), block)


def test_patches_that_are_put_together_are_not_compared_with_a_loop() -> None:
    assert "Col2ImBackward0" in vmap_nodes()[1]


class Solving(nn.Module):
    """A module of functions: its matrix is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(2 * torch.eye(3) + 0.1 * torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.linalg.solve(self.matrix, x.unsqueeze(-1))
        return result.squeeze(-1)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_one_matrix_and_a_batch_of_one_vector() -> None:
    """With a graph, torch's formula then has an axis too many under vmap."""
    problem = classification(nn.Sequential(Solving(), nn.Linear(3, 3)), (3,), batch=1)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(DiagGGNExact()):
        torch.autograd.grad(loss, problem.parameters, create_graph=True)
    problem.compare("diag_ggn_exact", diagonals)
    for parameter in problem.parameters:
        parameter.__dict__.clear()


@pytest.mark.long
def test_operators_of_torch() -> None:
    """Every node whose formula is not checked when it is crossed."""
    known, exact = vmap_nodes()
    if not torch.__version__.startswith(tuple(f"{version}." for version in known)):
        pytest.skip("The list is of other versions of torch.")
    command = [sys.executable, "-m", "tests.faults.vmap_nodes"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    wrong = {line.split()[1] for line in found.stdout.splitlines()}
    assert {"CdistBackward0", "AsStridedScatterBackward0"} <= wrong
    assert not exact & wrong
