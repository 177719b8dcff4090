"""How many multiply-adds a quantity needs at least, counted layer by layer.

``backpack_core.cli.counts`` says what is counted. The bytes of the result are added at the rate of
a write into memory that is there, as from one pass of a training loop to the next. All products are
assumed to run at the rate of the gradient's, which is low for nets as small as logistic regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from backpack_core.cli.counts import Layer, of_module, result_size, work
from benchmarks.problems import Problem
from benchmarks.quantities import Quantity

_CURVED = (nn.Sigmoid, nn.LayerNorm, nn.MultiheadAttention)


@dataclass(frozen=True)
class Limit:
    """Lower bound, relative to the gradient: ``work`` (without bytes) and bytes of the result."""

    work: float
    result_bytes: int

    def time(self, gradient: float, write_rate: float) -> float:
        """Seconds that are needed at least, if the gradient takes ``gradient`` seconds."""
        return self.work * gradient + self.result_bytes / write_rate


@cache
def layers(problem: Problem) -> list[Layer]:
    """The affine maps of a net, in order."""
    model, found = replace(problem, device="cpu").net(), []

    def visit(module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        found.extend(of_module(module, args, result, first=not found))

    for module in model.modules():
        module.register_forward_hook(visit)
    model(replace(problem, device="cpu").data(1)[0])
    return found


def limit(problem: Problem, quantity: Quantity, batch: int) -> Limit | None:
    """The lower bound, or ``None`` where it was not worked out."""
    net = layers(problem)
    gradient = sum(2 * layer.product + layer.back for layer in net)  # for a sample
    params = sum(layer.params for layer in net)
    columns = problem.classes - 1 if quantity.exact else 1
    parts = [work(layer, quantity.name, columns) for layer in net[-1:]]
    parts += [
        work(layer, quantity.name, _behind_head(net, quantity, columns)) for layer in net[:-1]
    ]
    if any(part is None for part in parts):
        return None
    size = result_size(quantity.name, params, batch, columns)
    return Limit(1 + sum(part or 0 for part in parts) / gradient, 4 * size)


def _behind_head(net: Sequence[Layer], quantity: Quantity, columns: int) -> int:
    """Columns in the rest of a net: at most as many as the last layer has inputs, if mixed."""
    head = net[-1]
    is_mixed = head.positions == 1 and not quantity.name.startswith("Sqrt")
    return min(columns, head.inputs) if is_mixed else columns


def shared_limit(problem: Problem, quantity: Quantity, batch: int) -> Limit | None:
    """The lower bound where the plain gradient of a weight is the sum of what is formed.

    That is so where positions share the weight: one product serves both, and clipped sums as well.
    Without shared positions, norms and moments need no product, and autograd's is left as it is.
    """
    net = layers(problem)
    gradient = sum(2 * layer.product + layer.back for layer in net)
    params = sum(layer.params for layer in net)
    more = [work(one, quantity.name, 1) for one in net if one.params and one.positions == 1]
    if quantity.exact or any(part is None for part in more):
        return None
    size = result_size(quantity.name, params, batch, 1)
    return Limit(1 + sum(part or 0 for part in more) / gradient, 4 * size)


def largest(problem: Problem, quantity: Quantity, bound: Limit | None) -> int:
    """Bytes of the largest tensor that cannot be avoided, if it is large."""
    width = max(layer.positions * layer.outputs * layer.groups for layer in layers(problem))
    if quantity.square:
        return 2 * 4 * width * width  # and its product with a Jacobian
    if quantity.curved and any(isinstance(m, _CURVED) for m in problem.model().modules()):
        return 4 * problem.exact_batch * width * width
    return 0 if bound is None else bound.result_bytes
