"""Which sample a number belongs to is measured: a gradient dyed sample by sample.

Columns travel besides what was asked for. The first is the gradient itself; in the others, every
sample has a random weight of its own. Where samples stay apart, they are the first times the
weights, at every call. Where they do not, an operation on the way mixes them, or axis 0 holds
something else that is as long as the batch. The first column tells whether autograd brought what is
known of, or something besides: a term beside the loss, a hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.column_propagator import cross_columns
from backpack_core.contract.columns import Columns, Root
from backpack_core.contract.loss import LossRule
from backpack_core.contract.parametric import ParametricRule
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule
from backpack_core.engine.dyed import (
    LOST,
    OPEN,
    Dye,
    Question,
    largest,
    mixed,
    something_besides,
    unit_of,
)
from backpack_core.engine.weights import Weights
from backpack_core.errors import OverwrittenInputError
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Crossing
from backpack_core.graph.batch import is_doubtful
from backpack_core.record.call import Call
from backpack_core.record.view import View

_OF_LOSS = Root("dyed behind an extended loss")
_BESIDE = Root("dyed elsewhere")
# A scalar has no samples yet; what it becomes is dyed where it gets some.
_DYED_LATER = {Root("in an extended loss"): _OF_LOSS, Root("before any loss"): _BESIDE}
_IN_LOSS, _BEFORE = _DYED_LATER
_COUPLED = Root("a function of numbers that several samples share")


class DyePropagator(Propagator):
    """Starts at every call anew, and compares what arrives with what autograd brought.

    Attributes:
        settled: Outputs of calls where there is nothing more to learn in passes of this structure.
    """

    per_sample = True
    starts_everywhere = True

    def __init__(
        self, batch_size: int, seed: int, guesses: int, question: Question, is_readable: bool
    ) -> None:
        """Draw the weights.

        Args:
            batch_size: Number of samples.
            seed: Of the weights, which touch no generator of the user's.
            guesses: How many layouts to try where nobody says where samples are.
            question: What has to be known.
            is_readable: Whether nodes between calls may be asked for what autograd saved.
        """
        self._weights = Weights(batch_size, seed, guesses)
        self._right = {*range(guesses)}
        self._question = question
        self._is_readable = is_readable
        self.settled: set[tuple[Call, int]] = set()

    def begin(self, gradient: Tensor) -> Dye:
        """The gradient at a root of the pass, not dyed yet unless it has samples."""
        columns = Columns({_BEFORE: self._weights.plain(gradient.detach())})
        return self._dyed(Dye(columns, size=largest(gradient)))

    def start(self, rule: LayerRule, view: View) -> Dye:
        """The gradient at the loss; :meth:`cross` dyes it where it gets samples."""
        assert view.grad_output is not None
        gradient = view.grad_output.detach()
        columns = Columns({_IN_LOSS: self._weights.plain(gradient)})
        return self._dyed(Dye(columns, size=largest(gradient), way=(view.path,)))

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
            return OPEN
        is_fitting = self._weights.fit(gradient, view.positions)
        if waiting is not None and (is_fitting or not self._question.is_per_sample):
            self._compare(view, waiting, gradient)
        if not is_fitting:
            return self.begin(gradient) if waiting is None else waiting
        if self._is_told_by_autograd(view):
            return OPEN._replace(way=(view.path,))
        if view.axis and view.call.goes_inside:
            return LOST
        dyed = self._weights.dyed(gradient, view.positions)
        return Dye(Columns({_OF_LOSS: dyed}), size=largest(gradient), way=(view.path,))

    def _is_told_by_autograd(self, view: View) -> bool:
        """Whether what a call sends can be told from the gradient at its input.

        A rule keeps samples apart. So where only they matter, what it sends is not computed but
        taken from autograd, at the next operation that may mix them.
        """
        is_other = view.axis or view.call.goes_inside or view.positions != 1
        if self._question.is_curvature or is_other:
            return False
        received = [view.stored.inputs[position] for position in _live(view)]
        # Of several, some may have samples elsewhere: states of a recurrent layer.
        is_known = len(received) == 1 or not any(
            is_doubtful(t.shape, len(self._weights)) for t in received
        )
        return bool(received) and is_known and all(map(self._weights.fit, received))

    def _compare(self, view: View, arrived: Dye, own: Tensor) -> None:
        total = arrived.total()
        is_known = arrived.is_whole and total is not None and total.shape[1:] == own.shape
        where = f"{view.path} and what uses its output"
        if not is_known or self._judge(where, arrived, own, view.positions):
            self.settled.add((view.call, view.index))  # nobody will know more next time

    def _judge(self, where: str, arrived: Dye, own: Tensor | None, positions: int) -> bool:
        """Compare columns with each other and with autograd's gradient; false if all are zero.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: The gradient is not what is known of.
        """
        total = arrived.total()
        assert total is not None
        plain, *guesses = total
        size = max(largest(plain), 0.0 if own is None else largest(own))
        if not size:
            return False
        dtypes = {plain.dtype, plain.dtype if own is None else own.dtype}
        unit = max(arrived.unit, *(torch.finfo(dtype).eps for dtype in dtypes))
        allowed = max(size * unit**0.6, arrived.size * unit * 64)
        is_whole = own is not None and self._question.is_curvature and not arrived.positions
        # Some of torch's own formulas have constants in single precision (CELU, Hardsigmoid).
        if is_whole and largest(plain - own) > max(16 * allowed, size * 1e-5):
            raise something_besides(where, arrived)
        if self._question.is_of_losses:
            of_loss = arrived.columns.blocks.get(_OF_LOSS)
            if largest(plain if of_loss is None else plain - of_loss[0]) > allowed:
                raise something_besides(where, arrived)
        is_known = self._question.is_per_sample and self._weights.fit(plain, positions)
        if is_known and not self._is_apart(plain, guesses, positions, allowed):
            raise mixed(where, arrived)
        return True

    def _is_apart(
        self, plain: Tensor, guesses: Sequence[Tensor], positions: int, allowed: float
    ) -> bool:
        """Whether dyed columns are the plain one, weighted sample by sample."""
        weights = self._weights.along(plain, positions=positions)
        # One guess has to be right everywhere.
        self._right &= {
            number
            for number, dyed in enumerate(guesses)
            if largest(dyed / weights - plain) <= allowed
        }
        return bool(self._right)

    def _judge_at(self, node: Node, quantities: dict[int, Dye], positions: dict[int, int]) -> bool:
        """Compare at the outputs of a node; whether everything there is known."""
        where = f"the operation {nodes.described(node)} and its result"
        known = True
        for nr, arrived in quantities.items():
            total = arrived.total()
            known &= arrived.is_whole and total is not None
            if not arrived.is_whole or total is None:
                continue
            if self._weights.fit(total[0], positions.get(nr, 0)):
                own = arrived.brought  # of another shape at a tensor that is seen through a view
                is_same = own is not None and own.shape == total.shape[1:]
                self._judge(where, arrived, own if is_same else None, positions[nr])
            else:
                known = False
        return known

    def propagate(self, rule: LayerRule, view: View, quantity: Dye) -> dict[int, Dye]:
        """By the rule; where that fails, it ends."""
        if quantity.positions:
            return dict.fromkeys(_live(view), quantity)
        if not self._question.is_per_sample and rule.mixes_samples(view):
            return dict.fromkeys(_live(view), LOST)  # its rule is that of single samples
        try:
            with torch.no_grad():
                products = rule.jac_t_mat_prod(view, quantity.columns.mat)
        except OverwrittenInputError:
            raise
        except Exception:  # whatever it is, the quantities that were asked for may do without
            return dict.fromkeys(_live(view), LOST)
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
        positions = {first.positions, second.positions} - {0}
        return Dye(
            first.columns.merge(second.columns),
            first.is_whole and second.is_whole and len(positions) < 2,
            max(positions, default=0),
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
        """Autograd's gradient, to compare with."""
        return {nr: dye._replace(brought=grads[nr]) for nr, dye in quantities.items()}

    def _closed(self, dye: Dye) -> Dye:
        """What calls sent is what autograd brought, but for what came by operations."""
        gradient = dye.brought
        if not dye.positions or not dye.is_whole:
            return dye
        if gradient is None or not self._weights.fit(gradient, dye.positions):
            return LOST
        known = dye.total()
        own = gradient.detach() if known is None else gradient.detach() - known[0]
        columns = dye.columns.merge(Columns({_OF_LOSS: self._weights.dyed(own, dye.positions)}))
        size = max(dye.size, largest(gradient))
        return dye._replace(columns=columns, positions=0, size=size)

    def cross(
        self, node: Node, quantities: dict[int, Dye], there: Crossing
    ) -> list[tuple[int, Dye]]:
        """Call the node for all columns, if that has no effects; else it ends."""
        aside = dict.fromkeys(there.apart, OPEN)
        is_open = any(dye.positions and nr in there.others for nr, dye in quantities.items())
        if is_open or not there.kept.isdisjoint(quantities):
            return [(i, OPEN) for i, (child, _) in enumerate(node.next_functions) if child]
        kept = self._kept(node, quantities)
        known = kept | aside
        if all(
            i in known or c is None or nodes.is_leaf(c)
            for i, (c, _) in enumerate(node.next_functions)
        ):
            return [*known.items()]
        quantities = {nr: self._closed(dye) for nr, dye in quantities.items()}
        if aside:
            self._judge_at(node, quantities, there.positions)
        return [*(dict(self._cross(node, quantities)) | known).items()]

    def _kept(self, node: Node, quantities: dict[int, Dye]) -> dict[int, Dye]:
        """Where samples are known to stay apart: autograd's gradient tells behind the node, too."""
        size = len(self._weights)
        for nr, dye in quantities.items():
            is_known = dye.positions and dye.is_whole and not dye.columns.blocks
            if not is_known or nodes.shape_of(node, nr)[:1] != (dye.positions * size,):
                return {}
        found, way = {}, tuple(dict.fromkeys(s for dye in quantities.values() for s in dye.way))
        for position, (child, number) in enumerate(node.next_functions):
            shape = () if child is None else nodes.shape_of(child, number)
            positions, rest = divmod(shape[0], size) if shape and size else (0, 0)
            if rest or not positions:
                continue
            if all(nodes.keeps_rows(node, nr, position) for nr in quantities):
                found[position] = OPEN._replace(positions=positions, way=way)
        return found

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
                unit = max(unit, *(unit_of(columns) for _, columns in crossed))
                found = ((i, Dye(c, size=size, unit=unit, way=way)) for i, c in crossed)
                return [(i, self._entered(node, i, self._coupled(node, dye))) for i, dye in found]
        return list(self._behind(node, quantities))

    def _behind(self, node: Node, quantities: dict[int, Dye]) -> Iterator[tuple[int, Dye]]:
        """Where the dye does not get through, it starts anew behind, as behind a call."""
        axes = {nr: self._axis(dye) for nr, dye in quantities.items()}
        is_first = not any(axes.values())  # else samples may lie anywhere
        known = is_first and self._judge_at(node, quantities, dict.fromkeys(axes, 1))
        way = (nodes.described(node),)
        for i, (child, nr) in enumerate(node.next_functions):
            if child is not None:
                is_fitting = known and nodes.shape_of(child, nr)[:1] == (len(self._weights),)
                yield i, OPEN._replace(way=way) if is_fitting else LOST

    def _axis(self, dye: Dye) -> int:
        """Where samples lie; another axis than the first only if that is as long as well."""
        total = dye.total()
        if total is None:
            return 0
        plain, *guesses = total
        axes = [axis for axis, n in enumerate(plain.shape) if n == len(self._weights)]
        allowed = largest(plain) * torch.finfo(plain.dtype).eps ** 0.6
        fitting = (
            axis
            for axis in axes
            for dyed in guesses
            if largest(dyed - plain * self._weights.along(plain, axis)) <= allowed
        )
        return next(fitting, 0)

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

    def _entered(self, node: Node, position: int, dye: Dye) -> Dye:
        """Dyed, if there are samples behind; terms of a loss may be as many by chance."""
        child, _ = node.next_functions[position]
        is_terms = child is not None and nodes.is_stack_of_numbers(child)
        return dye if is_terms else self._dyed(dye)

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
                is_whole &= self._question.is_curvature  # nobody knows where samples are
            blocks[root] = blocks[root] + block if root in blocks else block
        return dye._replace(columns=Columns(blocks), is_whole=is_whole)


def _live(view: View) -> list[int]:
    return [position for position, edge in enumerate(view.call.edges) if edge is not None]
