"""Which sample a number belongs to is measured: a gradient dyed sample by sample.

Two columns travel besides what was asked for. One is the gradient itself; in the other, every
sample has a random weight of its own. Where samples stay apart, the second is the first times the
weights, at every call. Where they do not, an operation on the way mixes them, or axis 0 holds
something else that is as long as the batch. The first column tells how large rounding is, and
whether autograd brought what is known of, or something besides: a term beside the loss, a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.column_propagator import cross_columns
from backpack_core.contract.columns import Columns, Root
from backpack_core.contract.loss import LossRule
from backpack_core.contract.parametric import ParametricRule
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import OverwrittenInputError, SampleMixingError, UnsupportedError
from backpack_core.graph import nodes
from backpack_core.record.call import Call
from backpack_core.record.view import View

_OF_LOSS = Root("dyed behind an extended loss")
_BESIDE = Root("dyed elsewhere")
# A scalar has no samples yet; what it becomes is dyed where it gets some.
_DYED_LATER = {Root("in an extended loss"): _OF_LOSS, Root("before any loss"): _BESIDE}
_IN_LOSS, _BEFORE = _DYED_LATER
# How many different weights there are; in a larger batch, some samples share one, others each time.
_LEVELS = 9


class Dye(NamedTuple):
    """The dyed gradient at a tensor.

    Attributes:
        columns: Blocks of two columns, ``[2, N, *]``: the gradient, and the weighted one.
        is_whole: Whether it came through every operation on the way.
        size: The largest entry it had at the calls that it comes from.
        unit: The coarsest rounding unit on the way.
        way: Calls and operations that it came through.
    """

    columns: Columns
    is_whole: bool = True
    size: float = 0.0
    unit: float = 0.0
    way: tuple[str, ...] = ()

    def total(self) -> Tensor | None:
        """The sum of all blocks."""
        blocks = list(self.columns.blocks.values())
        return sum(blocks[1:], blocks[0]) if blocks else None


_LOST = Dye(Columns({}), is_whole=False)


class DyePropagator(Propagator):
    """Starts at every call anew, and compares what arrives with what autograd brought.

    Attributes:
        settled: Outputs of calls where there is nothing more to learn in passes of this structure.
    """

    per_sample = True
    starts_everywhere = True

    def __init__(self, batch_size: int, seed: int, is_curvature: bool, is_readable: bool) -> None:
        """Draw the weights.

        Args:
            batch_size: Number of samples.
            seed: Of the weights, which touch no generator of the user's.
            is_curvature: Whether what is not known of makes a difference.
            is_readable: Whether nodes between calls may be asked for what autograd saved.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(batch_size, generator=generator)
        # Powers of two: rounding is the same with them and without, to the last bit.
        self._weights = 2.0 ** (order % _LEVELS - _LEVELS // 2)
        self._is_curvature = is_curvature
        self._is_readable = is_readable
        self.settled: set[tuple[Call, int]] = set()

    def begin(self, gradient: Tensor) -> Dye:
        """The gradient at a root of the pass, not dyed yet unless it has samples."""
        twice = gradient.detach().expand(2, *gradient.shape)
        return self._dyed(Dye(Columns({_BEFORE: twice}), size=_largest(gradient)))

    def start(self, rule: LayerRule, view: View) -> Dye:
        """The gradient at the loss; :meth:`cross` dyes it where it gets samples."""
        assert view.grad_output is not None
        gradient = view.grad_output.detach()
        twice = Columns({_IN_LOSS: gradient.expand(2, *gradient.shape)})
        return self._dyed(Dye(twice, size=_largest(gradient), way=(view.path,)))

    def arrive(self, rule: LayerRule, view: View, waiting: Dye | None) -> Dye:
        """Compare, and start anew.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: The gradient is not that of the extended loss alone, which curvature
                is.
        """
        assert view.grad_output is not None
        gradient = view.grad_output.detach()
        if isinstance(rule, LossRule) or not gradient.dim():
            return self.start(rule, view)
        if gradient.shape[:1] != self._weights.shape:
            return self.begin(gradient) if waiting is None else waiting
        weights = self._along(gradient, 0)
        expected = torch.stack([gradient, gradient * weights])
        if waiting is not None:
            self._compare(view, waiting, expected)
        if view.axis and view.call.goes_inside:
            return _LOST
        return Dye(Columns({_OF_LOSS: expected}), True, _largest(gradient), way=(view.path,))

    def _compare(self, view: View, arrived: Dye, expected: Tensor) -> None:
        total = arrived.total()
        place = (view.call, view.index)
        if not arrived.is_whole or total is None or total.shape != expected.shape:
            self.settled.add(place)  # nobody will know more next time
            return
        plain, dyed = total
        own = expected[0]
        size = max(_largest(own), _largest(plain))
        if not size:
            return
        self.settled.add(place)
        unit = max(arrived.unit, torch.finfo(own.dtype).eps)
        allowed = max(size * unit**0.6, arrived.size * unit * 64)
        weights = self._along(plain, 0)
        if _largest((dyed - plain * weights) / weights) > allowed:
            raise _mixed(view, arrived)
        if not self._is_curvature:
            return
        besides = arrived.columns.blocks.get(_BESIDE)
        # Some of torch's own formulas have constants in single precision (CELU, Hardsigmoid).
        is_other = _largest(plain - own) > max(16 * allowed, size * 1e-5)
        if is_other or (besides is not None and _largest(besides[0]) > allowed):
            raise _something_besides(view, arrived)

    def propagate(self, rule: LayerRule, view: View, quantity: Dye) -> dict[int, Dye]:
        """By the rule; where that fails, it ends."""
        live = [i for i, edge in enumerate(view.call.edges) if edge is not None]
        try:
            with torch.no_grad():
                products = rule.jac_t_mat_prod(view, quantity.columns.mat)
        except OverwrittenInputError:
            raise
        except Exception:  # whatever it is, the quantities that were asked for may do without
            return dict.fromkeys(live, _LOST)
        return {
            i: quantity._replace(columns=quantity.columns.split(p))
            for i, p in enumerate(products)
            if p is not None
        }

    def product(self, rule: ParametricRule, view: View, name: str, quantity: Dye) -> Any:
        """Nobody reads it."""
        raise AssertionError("no extension reads the dye")

    def nothing(self, view: View) -> Dye:
        """Nothing."""
        return Dye(Columns({}))

    def merge(self, first: Dye, second: Dye) -> Dye:
        """Added over branches."""
        return Dye(
            first.columns.merge(second.columns),
            first.is_whole and second.is_whole,
            max(first.size, second.size),
            max(first.unit, second.unit),
            tuple(dict.fromkeys(first.way + second.way)),
        )

    def map(self, quantity: Dye, function: Any) -> Dye:
        """Block by block."""
        if not quantity.columns.blocks:
            return quantity
        return quantity._replace(columns=quantity.columns.map(function))

    def cross(
        self, node: Node, quantities: dict[int, Dye], batch_size: int
    ) -> list[tuple[int, Dye]]:
        """Call the node for both columns, if that has no effects; else it ends."""
        arrived = list(quantities.values())
        is_free = self._is_readable and (not nodes.is_function(node) or nodes.is_hook(node))
        if is_free and all(dye.is_whole for dye in arrived):
            columns = {nr: dye.columns for nr, dye in quantities.items()}
            try:
                with torch.no_grad():
                    crossed = cross_columns(node, columns)
            except Exception:  # as in propagate
                crossed = []
            if crossed:
                size, unit = (max(d.size for d in arrived), max(d.unit for d in arrived))
                steps = [*(step for dye in arrived for step in dye.way), nodes.described(node)]
                way = tuple(dict.fromkeys(steps))
                found = ((i, Dye(c, True, size, max(unit, _unit(c)), way)) for i, c in crossed)
                return [(i, self._dyed(dye)) for i, dye in found]
        return [(i, _LOST) for i, (child, _) in enumerate(node.next_functions) if child is not None]

    def _dyed(self, dye: Dye) -> Dye:
        """Weigh what has got samples just now."""
        blocks: dict[Root, Tensor] = {}
        is_whole = dye.is_whole
        for root, block in dye.columns.blocks.items():
            axis = self._samples_of(block[0], root) if root in _DYED_LATER else None
            if axis is not None and axis < 0:
                is_whole = False  # several rows for each sample, in an order that is not known
            elif axis is not None:
                root, block = _DYED_LATER[root], block.clone()
                block[1] *= self._along(block[1], axis)
            blocks[root] = blocks[root] + block if root in blocks else block
        return dye._replace(columns=Columns(blocks), is_whole=is_whole)

    def _samples_of(self, gradient: Tensor, root: Root) -> int | None:
        """Which axis holds the samples; -1 if none alone does, ``None`` if they are not there."""
        batch_size = len(self._weights)
        if gradient.numel() == 1 and batch_size != 1:
            return None
        axes = [axis for axis, size in enumerate(gradient.shape) if size == batch_size]
        if axes and (axes == axes[:1] or (root is _IN_LOSS and axes[0] == 0)):
            return axes[0]
        is_multiple = bool(axes) or (batch_size > 0 and gradient.numel() % batch_size == 0)
        return -1 if is_multiple else None

    def _along(self, gradient: Tensor, axis: int) -> Tensor:
        shape = [1] * gradient.dim()
        shape[axis] = -1
        weights = self._weights.to(gradient.device, gradient.dtype)
        return weights.reshape(shape)


def _unit(columns: Columns) -> float:
    return max((torch.finfo(b.dtype).eps for b in columns.blocks.values()), default=0.0)


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.abs().nan_to_num(0, 0, 0).max())


def _stretch(view: View, arrived: Dye) -> str:
    return f"Between {view.path} and what uses its output ({_listed(arrived.way)})"


def _listed(way: Iterable[str], most: int = 8) -> str:
    steps = list(way)
    return ", ".join(steps if len(steps) <= most else [*steps[: most - 1], "..."])


def _mixed(view: View, arrived: Dye) -> SampleMixingError:
    return SampleMixingError(
        f"{_stretch(view, arrived)}, samples of the batch influence each other: a gradient of one "
        "sample reaches another one, or axis 0 holds something else there that is as long as the "
        "batch. Quantities of single samples do not exist. Look for an operation over axis 0; "
        "every module has to receive its samples there. (Measured, with check='first'.)"
    )


def _something_besides(view: View, arrived: Dye) -> UnsupportedError:
    return UnsupportedError(
        f"{_stretch(view, arrived)}, autograd brings another gradient than that of the extended "
        "losses: a term beside them depends on the output, or a hook changes gradients on the way. "
        "Curvature would be that of something else. Extend the loss as a whole, compute the "
        "other term's in a backward pass of its own, or remove the hook."
    )
