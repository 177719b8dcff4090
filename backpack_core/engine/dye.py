"""Which sample a number belongs to is measured: a gradient dyed sample by sample.

Columns travel besides what was asked for. The first is the gradient itself; in the others, every
sample has a random weight of its own. Where samples stay apart, they are the first times the
weights, at every call. Where they do not, an operation on the way mixes them, or axis 0 holds
something else that is as long as the batch. The first column tells whether autograd brought what is
known of, or something besides: a term beside the loss, a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from backpack_core.engine.weights import Weights
from backpack_core.errors import OverwrittenInputError, SampleMixingError, UnsupportedError
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Crossing
from backpack_core.record.call import Call
from backpack_core.record.view import View

_OF_LOSS = Root("dyed behind an extended loss")
_BESIDE = Root("dyed elsewhere")
# A scalar has no samples yet; what it becomes is dyed where it gets some.
_DYED_LATER = {Root("in an extended loss"): _OF_LOSS, Root("before any loss"): _BESIDE}
_IN_LOSS, _BEFORE = _DYED_LATER
_COUPLED = Root("a function of numbers that several samples share")


class Dye(NamedTuple):
    """The dyed gradient at a tensor.

    Attributes:
        columns: Blocks of columns ``[V, N, *]``: the gradient, and weighted ones.
        is_whole: Whether it came through every operation on the way.
        is_open: Whether calls send something here, besides, that is dyed by their own samples: how
            much, autograd's gradient tells.
        size: The largest entry it had at the calls that it comes from.
        unit: The coarsest rounding unit on the way.
        way: Calls and operations that it came through.
    """

    columns: Columns
    is_whole: bool = True
    is_open: bool = False
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

    def __init__(
        self, batch_size: int, seed: int, guesses: int, is_curvature: bool, is_readable: bool
    ) -> None:
        """Draw the weights.

        Args:
            batch_size: Number of samples.
            seed: Of the weights, which touch no generator of the user's.
            guesses: How many layouts to try where nobody says where samples are.
            is_curvature: Whether what is not known of makes a difference.
            is_readable: Whether nodes between calls may be asked for what autograd saved.
        """
        self._weights = Weights(batch_size, seed, guesses)
        self._right = {*range(guesses)}
        self._is_curvature = is_curvature
        self._is_readable = is_readable
        self.settled: set[tuple[Call, int]] = set()

    def begin(self, gradient: Tensor) -> Dye:
        """The gradient at a root of the pass, not dyed yet unless it has samples."""
        columns = Columns({_BEFORE: self._weights.plain(gradient.detach())})
        return self._dyed(Dye(columns, size=_largest(gradient)))

    def start(self, rule: LayerRule, view: View) -> Dye:
        """The gradient at the loss; :meth:`cross` dyes it where it gets samples."""
        assert view.grad_output is not None
        gradient = view.grad_output.detach()
        columns = Columns({_IN_LOSS: self._weights.plain(gradient)})
        return self._dyed(Dye(columns, size=_largest(gradient), way=(view.path,)))

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
        if not view.positions:  # what arrives is kept apart
            self.settled.add((view.call, view.index))
            return _LOST
        if not self._weights.fit(gradient, view.positions):
            return self.begin(gradient) if waiting is None else waiting
        if waiting is not None:
            self._compare(view, waiting, gradient)
        if self._is_told_by_autograd(view):
            return Dye(Columns({}), is_open=True, way=(view.path,))
        if view.axis and view.call.goes_inside:
            return _LOST
        dyed = self._weights.dyed(gradient, view.positions)
        return Dye(Columns({_OF_LOSS: dyed}), size=_largest(gradient), way=(view.path,))

    def _is_told_by_autograd(self, view: View) -> bool:
        """Whether what a call sends can be told from the gradient at its input.

        A rule keeps samples apart. So where only they matter, what it sends is not computed but
        taken from autograd, at the next operation that may mix them.
        """
        if self._is_curvature or view.axis or view.call.goes_inside or view.positions != 1:
            return False
        live = _live(view)
        return len(live) == 1 and self._weights.fit(view.stored.inputs[live[0]])

    def _compare(self, view: View, arrived: Dye, own: Tensor) -> None:
        total = arrived.total()
        place = (view.call, view.index)
        if not arrived.is_whole or total is None or total.shape[1:] != own.shape:
            self.settled.add(place)  # nobody will know more next time, or need to
            return
        plain, *guesses = total
        size = max(_largest(own), _largest(plain))
        if not size:
            return
        self.settled.add(place)
        unit = max(arrived.unit, torch.finfo(own.dtype).eps)
        allowed = max(size * unit**0.6, arrived.size * unit * 64)
        if self._is_curvature:
            of_loss = arrived.columns.blocks.get(_OF_LOSS)
            besides = plain if of_loss is None else plain - of_loss[0]
            # Some of torch's own formulas have constants in single precision (CELU, Hardsigmoid).
            is_other = _largest(plain - own) > max(16 * allowed, size * 1e-5)
            if is_other or _largest(besides) > allowed:
                raise _something_besides(view, arrived)
        if not self._is_apart(plain, guesses, view.positions, allowed):
            raise _mixed(f"{view.path} and what uses its output", arrived)

    def _is_apart(
        self, plain: Tensor, guesses: Sequence[Tensor], positions: int, allowed: float
    ) -> bool:
        """Whether dyed columns are the plain one, weighted sample by sample."""
        weights = self._weights.along(plain, positions=positions)
        # One guess has to be right everywhere.
        self._right &= {
            number
            for number, dyed in enumerate(guesses)
            if _largest((dyed - plain * weights) / weights) <= allowed
        }
        return bool(self._right)

    def _compare_before(self, node: Node, quantities: dict[int, Dye], there: Crossing) -> None:
        """Compare at the last tensors that have samples.

        Raises:
            SampleMixingError: Samples influence each other on the way.
        """
        for nr, arrived in quantities.items():
            total, positions = arrived.total(), there.positions.get(nr, 0)
            if not arrived.is_whole or total is None or not self._weights.fit(total[0], positions):
                continue
            plain, *guesses = total
            unit = max(arrived.unit, torch.finfo(plain.dtype).eps)
            allowed = max(_largest(plain) * unit**0.6, arrived.size * unit * 64)
            if not self._is_apart(plain, guesses, positions, allowed):
                raise _mixed(f"the operation {nodes.described(node)} and its result", arrived)

    def propagate(self, rule: LayerRule, view: View, quantity: Dye) -> dict[int, Dye]:
        """By the rule; where that fails, it ends."""
        if quantity.is_open:
            return dict.fromkeys(_live(view), quantity)
        try:
            with torch.no_grad():
                products = rule.jac_t_mat_prod(view, quantity.columns.mat)
        except OverwrittenInputError:
            raise
        except Exception:  # whatever it is, the quantities that were asked for may do without
            return dict.fromkeys(_live(view), _LOST)
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
            first.is_open or second.is_open,
            max(first.size, second.size),
            max(first.unit, second.unit),
            tuple(dict.fromkeys(first.way + second.way)),
        )

    def map(self, quantity: Dye, function: Any) -> Dye:
        """Block by block."""
        if not quantity.columns.blocks:
            return quantity
        return quantity._replace(columns=quantity.columns.map(function))

    def supply(self, quantities: dict[int, Dye], grads: Sequence[Tensor | None]) -> dict[int, Dye]:
        """What calls sent is what autograd brought, but for what came by operations."""
        return {nr: self._closed(dye, grads[nr]) for nr, dye in quantities.items()}

    def _closed(self, dye: Dye, gradient: Tensor | None) -> Dye:
        if not dye.is_open or not dye.is_whole:
            return dye
        if gradient is None or not self._weights.fit(gradient):
            return _LOST
        known = dye.total()
        own = gradient.detach() if known is None else gradient.detach() - known[0]
        columns = dye.columns.merge(Columns({_OF_LOSS: self._weights.dyed(own)}))
        size = max(dye.size, _largest(gradient))
        return dye._replace(columns=columns, is_open=False, size=size)

    def cross(
        self, node: Node, quantities: dict[int, Dye], there: Crossing
    ) -> list[tuple[int, Dye]]:
        """Call the node for all columns, if that has no effects; else it ends."""
        crossed = self._cross(node, quantities)
        if not there.apart:
            return crossed
        self._compare_before(node, quantities, there)
        # Samples may be together again further on, where something is missing then.
        return [(i, _LOST if i in there.apart else dye) for i, dye in crossed]

    def _cross(self, node: Node, quantities: dict[int, Dye]) -> list[tuple[int, Dye]]:
        arrived = list(quantities.values())
        is_free = self._is_readable and (not nodes.is_function(node) or nodes.hands_on(node))
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
                unit = max(unit, *(_unit(columns) for _, columns in crossed))
                found = ((i, Dye(c, size=size, unit=unit, way=way)) for i, c in crossed)
                return [(i, self._dyed(self._coupled(node, dye))) for i, dye in found]
        return [(i, _LOST) for i, (child, _) in enumerate(node.next_functions) if child is not None]

    @staticmethod
    def _coupled(node: Node, dye: Dye) -> Dye:
        """Behind a nonlinear function of numbers that all samples share, it is theirs for good."""
        blocks = dye.columns.blocks
        is_scalar = all(not nodes.shape_of(node, nr) for nr in range(len(node._input_metadata)))
        if _BEFORE not in blocks or is_scalar or nodes.is_linear(node):
            return dye
        return dye._replace(
            columns=Columns({_COUPLED if r is _BEFORE else r: b for r, b in blocks.items()})
        )

    def _dyed(self, dye: Dye) -> Dye:
        """Weigh what has got samples just now."""
        blocks: dict[Root, Tensor] = {}
        is_whole = dye.is_whole
        for root, block in dye.columns.blocks.items():
            is_later = root in _DYED_LATER
            guesses = self._weights.guess(block[0], root is _IN_LOSS) if is_later else None
            if guesses:
                root = _DYED_LATER[root]
                dyed = [column * w for column, w in zip(block[1:], guesses, strict=True)]
                block = torch.stack([block[0], *dyed])
            elif guesses is not None:
                is_whole &= self._is_curvature  # nobody knows where samples are
            blocks[root] = blocks[root] + block if root in blocks else block
        return dye._replace(columns=Columns(blocks), is_whole=is_whole)


def _live(view: View) -> list[int]:
    return [position for position, edge in enumerate(view.call.edges) if edge is not None]


def _unit(columns: Columns) -> float:
    return max((torch.finfo(b.dtype).eps for b in columns.blocks.values()), default=0.0)


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0, 0, 0).max())


def _listed(way: Iterable[str], most: int = 8) -> str:
    steps = list(way)
    return ", ".join(steps if len(steps) <= most else [*steps[: most - 1], "..."])


def _mixed(where: str, arrived: Dye) -> SampleMixingError:
    return SampleMixingError(
        f"Between {where} ({_listed(arrived.way)}), samples of the batch influence each "
        "other: a gradient of one sample reaches another one, or axis 0 holds something else there "
        "that is as long as the batch. Quantities of single samples do not exist. Look for an "
        "operation over axis 0; "
        "every module has to receive its samples there. (This is measured: see docs/checks.md.)"
    )


def _something_besides(view: View, arrived: Dye) -> UnsupportedError:
    return UnsupportedError(
        f"Between {view.path} and what uses its output ({_listed(arrived.way)}), autograd brings "
        "another gradient than that of the extended "
        "losses: a term beside them depends on the output, or a hook changes gradients on the way. "
        "Curvature would be that of something else. Extend the loss as a whole, compute the "
        "other term's in a backward pass of its own, or remove the hook."
    )
