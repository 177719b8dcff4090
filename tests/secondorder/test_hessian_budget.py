"""Diagonals of the Hessian within the memory budget: exact, and nothing large is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack_core import extend
from backpack_core.extensions import BatchDiagHessian, DiagHessian
from backpack_products.tuning import within_budget as budget
from tests.cases import Net, Problem, classification
from tests.secondorder import problems as secondorder
from tests.secondorder.problems import hessians

SAMPLES = 2


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.size = max(self.size, leaf.untyped_storage().nbytes())
        return result


def _tokens() -> tuple[nn.Module, tuple[int, ...]]:
    """Two blocks of a Transformer without attention, on eight tokens."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        for norm, up, act, down in zip(net.norm, net.up, net.act, net.down, strict=True):
            x = x + down(act(up(norm(x))))
        return net.last(x.mean(1))  # type: ignore[no-any-return]

    def twice(make: Callable[[], nn.Module]) -> nn.ModuleList:
        return nn.ModuleList(make() for _ in range(2))

    blocks = {
        "norm": twice(lambda: nn.LayerNorm(2)),
        "up": twice(lambda: nn.Linear(2, 12)),
        "act": twice(nn.GELU),
        "down": twice(lambda: nn.Linear(12, 2)),
    }
    return Net(forward, first=nn.Linear(2, 2), **blocks, last=nn.Linear(2, 3)), (8, 2)


def _operations() -> tuple[nn.Module, tuple[int, ...]]:
    """A nonlinear module behind operations that no module covers."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.act(net.conv(x) + 0.5 * x.repeat(1, 6, 1))
        return net.last(net.gelu(net.mix(hidden.flatten(1) * 2) / 3))  # type: ignore[no-any-return]

    parts = {"conv": nn.Conv1d(1, 6, 3, padding=1), "mix": nn.Linear(96, 2)}
    act = {"act": nn.Sigmoid(), "gelu": nn.GELU()}
    return Net(forward, **parts, **act, last=nn.Linear(2, 3)), (1, 16)


def _inside() -> tuple[nn.Module, tuple[int, ...]]:
    """A module with a parameter and a child of its own, which is gone through."""

    def outer(net: Any, x: Tensor) -> Tensor:
        return net.layer(x) * net.gain  # type: ignore[no-any-return]

    gain = nn.Parameter(torch.randn(96), requires_grad=False)
    net = Net(outer, layer=nn.Linear(4, 96, bias=False), gain=gain)
    return nn.Sequential(net, nn.Tanh(), nn.Linear(96, 3)), (4,)


def _wide() -> tuple[nn.Module, tuple[int, ...]]:
    """A block and a diagonal at three features, of which the block of the 48 before has no room."""
    layers = [nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 3), nn.Tanh(), nn.Softmax(1)]
    return nn.Sequential(*layers, nn.Linear(3, 3)), (4,)


NETS = {"tokens": _tokens, "operations": _operations, "inside": _inside, "wide": _wide}
# Columns of the widest tensor: 96 activations, two samples, eight bytes.
COLUMN = 96 * SAMPLES * 8
BUDGET = 8 * COLUMN


def make(net: str) -> Problem:
    model, shape = NETS[net]()
    return classification(model, shape, SAMPLES)


def largest(problem: Problem, *extensions: DiagHessian | BatchDiagHessian) -> int:
    extend(problem.model)
    mode = Largest()
    with budget(BUDGET), mode:
        problem.run(*extensions)
    return mode.size


@pytest.mark.parametrize("net", NETS)
def test_nothing_exceeds_the_budget(net: str) -> None:
    problem = make(net)
    widest = max(p.nbytes for p in problem.parameters)
    assert largest(problem, DiagHessian()) <= max(2 * BUDGET, widest)


def never(*_: Any) -> Any:
    raise AssertionError("there is no such module")


@pytest.mark.parametrize("net", ["normalised", "residual", "deep"])
def test_exact_where_columns_cannot_go_in_chunks(net: str) -> None:
    """With a carrier of its own, whatever for: residuals too large for the budget all the same."""
    problem = secondorder.make(net, SAMPLES)
    expected = [
        block.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        for block, p in zip(problem.expected(hessians), problem.parameters, strict=True)
    ]
    extension = BatchDiagHessian()
    extension.carriers[nn.Bilinear] = never
    with budget(1):
        problem.run(extension)
    problem.compare("diag_h_batch", expected)


@pytest.mark.parametrize("net", NETS)
def test_exact_within_the_budget(net: str) -> None:
    problem = make(net)
    expected = [
        block.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        for block, p in zip(problem.expected(hessians), problem.parameters, strict=True)
    ]
    with budget(BUDGET):
        problem.run(DiagHessian(), BatchDiagHessian())
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)
    with budget(BUDGET):
        problem.run(BatchDiagHessian(subsampling=[1, 0, 1]))
    problem.compare("diag_h_batch", [d[[1, 0, 1]] for d in expected])
