"""The dye: extra columns that measure whether samples stay apart on their way through the net.

The first column is the gradient. In each other column, every sample has a random weight. If samples
stay apart, these columns equal the first one times the weights, at every call. Otherwise an
operation mixes samples, or axis 0 holds something else that is as long as the batch. The first
column also shows whether autograd's gradient contains anything but the gradient of the losses, such
as another term, or a change by a hook. See ``docs/design/measuring.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_checks.dyed import (
    IN_LOSS,
    LOST,
    OF_LOSS,
    OPEN,
    Dye,
    Judge,
    Positions,
    history,
    is_zero,
    largest,
)
from backpack_checks.units import coarsest_at
from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule, LossRule
from backpack_core.errors import OverwrittenInputError
from backpack_core.graph import described, is_leaf
from backpack_core.record.call import Call, Edge
from backpack_core.record.view import View
from backpack_operations import nodes
from backpack_operations.alignment import Crossing
from backpack_operations.apart import cross_columns
from backpack_operations.batch import is_doubtful
from backpack_operations.owners import Owners, rows_at_loss
from backpack_operations.paths import inside
from backpack_operations.survey import GraphSurvey
from backpack_products.columns import Columns, Root
from backpack_products.loss import HessianLossRule
from backpack_products.parametric import ParametricRule
from backpack_products.values import rounding_unit

Dyes: TypeAlias = dict[int, Dye]
Sent: TypeAlias = tuple[int, Dye]
# Roots of gradients without samples, and their names after samples were weighted.
_BEFORE = Root("before any loss")
_DYED_LATER = {IN_LOSS: OF_LOSS, _BEFORE: Root("dyed elsewhere")}
_COUPLED = Root("a function of numbers that several samples share")


class DyePropagator(Propagator):
    """A quantity that is compared with autograd's gradient at each call, and starts anew there.

    Attributes:
        settled: Outputs of calls at which passes of this structure have nothing more to measure.
        is_cut: Whether an operation that may mix samples sent zeros only (a factor of zero, a
            closed gate). In a later pass it may send more.
    """

    per_sample = True
    starts_everywhere = True

    def __init__(self, judge: Judge, survey: GraphSurvey, trusts_rules: bool) -> None:
        """Begin.

        Args:
            judge: Compares columns; it has the weights and the question to answer.
            survey: What is known about the graph.
            trusts_rules: Whether an earlier pass has shown that rules keep samples apart.
        """
        self._judge, self._weights, self._question = judge, judge.weights, judge.question
        # Whether nodes can be called without harm to checkpoints, as other quantities call them.
        self._unpacks_twice = all(call.unpacks_twice for call, _ in survey.sites)
        self._survey = survey
        self._owners, self._trusts_rules = Owners(survey), trusts_rules
        self.settled: set[tuple[Call, int]] = set()
        self.is_cut = False

    def begin(
        self, gradient: Tensor, edge: Edge, root: Root = _BEFORE, way: tuple[str, ...] = ()
    ) -> Dye:
        """The gradient at a root of the pass; weighted at once if it has samples, else later."""
        columns = Columns({root: self._weights.plain(gradient.detach())})
        return self._dyed(Dye(columns, way=way), edge.node, edge.output_nr)

    def start(self, rule: LayerRule, view: View) -> Dye:
        """The gradient at a loss; :meth:`cross` weights it where samples begin.

        A rule of a loss says that it is a sum over samples. So if only separate samples matter, and
        a pass has shown that once, its nodes are passed by, as those of layers are.
        """
        assert view.grad_output is not None
        key, survey = (view.call, view.index), self._survey
        edge = survey.sites[key].edge
        if self._question.is_per_sample and isinstance(rule, HessianLossRule):
            is_usual = view.positions == 1 and not (survey.is_told or self._owners.are_moved)
            owners = None if is_usual else rows_at_loss(survey, key)
            if is_usual or owners is not None:
                rule.check_apart(view, owners)
            if is_usual and self._trusts_rules and self._is_told_by_autograd(view):
                return OPEN._replace(way=(view.path,))
        return self.begin(view.grad_output, edge, IN_LOSS, (view.path,))

    def goes_inside(self, quantity: Dye) -> bool:
        """Whether the nodes inside of a loss are gone through."""
        return not quantity.positions

    def arrive(self, rule: LayerRule, view: View, waiting: Dye | None) -> Dye:
        """Compare the arrived columns, and start anew with autograd's gradient at this output.

        Raises:
            SampleMixingError: Samples influence each other on the way.
            UnsupportedError: The gradient is not that of the extended losses, but curvature needs
                that.
        """
        assert view.grad_output is not None
        gradient = view.grad_output.detach()
        if isinstance(rule, LossRule):
            return self.start(rule, view)
        key, survey = (view.call, view.index), self._survey
        edge = survey.sites[key].edge
        owned = None if view.positions else survey.alignment.owned_of(survey.sites[key])
        positions = view.positions if owned is None else owned
        if owned is None and not positions:
            if waiting is not None and not survey.alignment.is_apart(edge):
                return waiting  # samples are on another axis: compare where they are in front
            self.settled.add(key)  # columns are kept apart here
            if waiting is None or not self._goes_apart((waiting,)):
                return OPEN
            self._judge.compare(f"{view.path} and what uses its output", waiting, gradient, 0)
            return waiting._replace(way=(view.path,))
        is_before = edge[:2] in survey.alignment.before  # axis 0 may be anything there
        is_fitting = not is_before and self._weights.fit(gradient, positions)
        if waiting is not None and (is_fitting or not self._question.is_per_sample):
            total, where = waiting.total(), f"{view.path} and what uses its output"
            is_whole = total is not None and total.shape[1:] == gradient.shape
            if not is_whole or self._judge.compare(where, waiting, gradient, positions):
                self.settled.add(key)  # later passes cannot know more
        if not is_fitting:
            if not gradient.dim():
                self.settled.add(key)  # numbers are never compared
                waiting = waiting if waiting is None or waiting.is_whole else None
            if waiting is not None:
                return waiting
            return self.begin(gradient, edge, way=(view.path,))
        if self._is_told_by_autograd(view):
            return OPEN._replace(way=(view.path,))
        dyed = self._weights.dyed(gradient, positions)
        return Dye(Columns({OF_LOSS: dyed}), size=largest(gradient), way=(view.path,))

    def _is_told_by_autograd(self, view: View) -> bool:
        """Whether autograd's gradients at the inputs of a call replace what the call would send.

        A rule keeps samples apart by contract. So if only that matters, the products of the rule
        are not computed: autograd's gradient is taken at the next operation that may mix samples.
        """
        return not self._question.is_curvature and self._has_samples_in_front(view)

    def _has_samples_in_front(self, view: View) -> bool:
        """Whether all inputs of a call with a gradient have an entry of axis 0 for each sample."""
        is_other = view.axis or view.call.goes_inside or view.positions != 1
        received = [view.stored.inputs[position] for position in _live(view)]
        if is_other or not received:
            return False
        # One of several inputs may have samples elsewhere: the states of a recurrent layer.
        is_known = len(view.stored.inputs) == 1 or not any(
            is_doubtful(t.shape, len(self._weights)) for t in received
        )
        return is_known and all(map(self._weights.fit, received))

    def propagate(self, rule: LayerRule, view: View, quantity: Dye) -> Dyes:
        """Columns at the inputs, by the rule; if it fails, the dye ends here.

        Of a rule that keeps samples apart, the first column is enough: it is weighted behind it.
        """
        if quantity.positions:
            return dict.fromkeys(_live(view), quantity)
        lost = dict.fromkeys(_live(view), LOST)
        if not self._question.is_per_sample and rule.mixes_samples(view):
            return lost  # the rule is for single samples
        mat, is_anew = quantity.columns.mat, quantity.columns.blocks.keys() == {OF_LOSS}
        is_one = is_anew and self._trusts_rules and self._has_samples_in_front(view)
        try:
            rule.check(view)
            with torch.no_grad():
                products = rule.jac_t_mat_prod(view, mat[:1] if is_one else mat)
        except OverwrittenInputError:
            raise
        except Exception:  # the other quantities may not need this product
            return lost
        unit = max(quantity.unit, self._unit_inside(view))
        # A product for an input without a graph goes nowhere, and may have samples elsewhere.
        sent = {i: p for i in _live(view) if i < len(products) and (p := products[i]) is not None}
        return {
            i: quantity._replace(
                columns=quantity.columns.split(self._weights.dyed(p[0]) if is_one else p), unit=unit
            )
            for i, p in sent.items()
        }

    def products(
        self, rule: ParametricRule, view: View, names: Sequence[str], quantity: Dye
    ) -> Sequence[Any]:
        """Raise an error: no extension reads the dye."""
        raise AssertionError("no extension reads the dye")

    def nothing(self, view: View) -> Dye:
        """An empty dye, for an output that the loss does not depend on."""
        return Dye(Columns({}))

    def merge(self, first: Dye, second: Dye) -> Dye:
        """Add columns where branches meet."""
        return history((first, second))._replace(columns=first.columns.merge(second.columns))

    def map(self, quantity: Dye, function: Any) -> Dye:
        """Apply the function to all columns."""
        if not quantity.columns.blocks:
            return quantity
        return quantity._replace(columns=quantity.columns.map(function))

    def supply(self, quantities: Dyes, grads: Sequence[Tensor | None]) -> Dyes:
        """Add autograd's gradients at the node, to compare with."""
        return {nr: dye._replace(brought=grads[nr]) for nr, dye in quantities.items()}

    def cross(self, node: Node, quantities: Dyes, there: Crossing) -> list[Sent]:
        """The dye behind a node, if it can be called without side effects; else it ends here."""
        children = [(i, c) for i, (c, _) in enumerate(node.next_functions) if c is not None]
        is_aside = any(dye.positions and nr in there.others for nr, dye in quantities.items())
        is_apart = is_aside or not there.apart_outputs.isdisjoint(quantities)
        sent = dict.fromkeys((i for i, _ in children) if is_apart else there.apart, OPEN)
        if sent and self._goes_apart(quantities.values()):
            # Zeros of single samples hide nothing at a parameter; a closed gate may.
            blocks = [b for dye in quantities.values() for b in dye.columns.blocks.values()]
            apart = frozenset(sent) if not is_apart or all(map(is_zero, blocks)) else frozenset()
            sent |= {i: dye for i, dye in self._through(node, quantities, apart) if i in sent}
        known: dict[int, Positions] = {**there.owned, **there.positions}
        if is_apart:  # parts that were split off may have samples beside others that have none
            others = known.keys() - there.apart_outputs
            beside = {nr: self._closed(dye) for nr, dye in quantities.items() if nr in others}
            self._judge_at(node, beside, known)
            return [*sent.items()]
        passed = self._passed(node, quantities) | sent
        is_passed = all(i in passed or is_leaf(child) for i, child in children)
        if there.apart or not is_passed:
            quantities = {nr: self._closed(dye) for nr, dye in quantities.items()}
        if there.apart:
            self._judge_at(node, quantities, known)
        crossed = {} if is_passed else dict(self._cross(node, quantities, there.apart))
        return [*(crossed | passed).items()]

    def _passed(self, node: Node, quantities: Dyes) -> Dyes:
        """The dye behind a node that keeps rows apart: autograd's gradient suffices there, too."""
        size, passed = len(self._weights), {}
        before = history(quantities.values())
        for nr, dye in quantities.items():
            if not dye.is_told or nodes.shape_of(node, nr)[:1] != (dye.positions * size,):
                return {}
        for position, (child, output_nr) in enumerate(node.next_functions):
            if child is None or not all(nodes.keeps_rows(node, nr, position) for nr in quantities):
                continue
            if (child, output_nr) in self._survey.alignment.owned:
                continue  # its rows are in no order: they are compared with what is known of them
            length = nodes.shape_of(child, output_nr)[:1].numel()
            positions, rest = divmod(length, size) if size else (0, 0)
            if positions and not rest:
                passed[position] = OPEN._replace(positions=positions, way=before.way)
        return passed

    def _closed(self, dye: Dye) -> Dye:
        """Add what calls sent: autograd's gradient, less what came from operations, weighted."""
        gradient, total = dye.brought, dye.total()
        if not dye.positions or not dye.is_whole:
            return dye
        if gradient is None or not self._weights.fit(gradient, dye.positions):
            return LOST
        own = gradient.detach() if total is None else gradient.detach() - total[0]
        dyed = Columns({OF_LOSS: self._weights.dyed(own, dye.positions)})
        size = max(dye.size, largest(gradient))
        return dye._replace(columns=dye.columns.merge(dyed), positions=0, size=size)

    def _judge_at(self, node: Node, quantities: Dyes, positions: Mapping[int, Positions]) -> bool:
        """Compare at the outputs of a node; returns whether all of them could be compared."""
        where = f"the operation {described(node)} and its result"
        are_all = True
        for nr, arrived in quantities.items():
            total, own = arrived.total(), arrived.brought
            if total is None or not self._weights.fit(total[0], positions.get(nr, 0)):
                are_all = False
                continue
            # At an overwritten view, autograd's gradient has the shape of the base.
            own = own if own is not None and own.shape == total.shape[1:] else None
            self._judge.compare(where, arrived, own, positions[nr])
        return are_all

    def _unit_inside(self, view: View) -> float:
        """The coarsest rounding unit in a call, which autocast may turn into half precision.

        Only autograd's gradient rounds so: a rule computes in the precision of what it received.
        """
        if not self._question.is_curvature:
            return 0.0
        return coarsest_at(inside(self._survey.sites[view.call, view.index]))

    def _cross(self, node: Node, quantities: Dyes, apart: frozenset[int]) -> Iterator[Sent]:
        """Send the dye through a node, or compare it here and start anew behind the node."""
        crossed, step = [*self._through(node, quantities, apart)], described(node)
        for position, dye in crossed:
            yield position, self._dyed(dye, *node.next_functions[position])
        if crossed:
            return
        axes = {nr: self._judge.axis(dye) for nr, dye in quantities.items()}
        is_first = not any(axes.values())  # else samples may lie on any axis
        is_right = is_first and self._judge_at(node, quantities, dict.fromkeys(axes, 1))
        for i, (child, nr) in enumerate(node.next_functions):
            if child is not None:
                is_fitting = is_right and nodes.shape_of(child, nr)[:1] == (len(self._weights),)
                yield i, OPEN._replace(way=(step,)) if is_fitting else LOST

    def _through(self, node: Node, quantities: Dyes, apart: frozenset[int]) -> Iterator[Sent]:
        """Yields the dye behind a node; nothing if the node cannot be called.

        Zeros at the positions ``apart`` hide nothing, so they are not noted in ``is_cut``.
        """
        before, step = history(quantities.values()), described(node)
        for position, columns in self._pushed(node, quantities) if before.is_whole else ():
            self.is_cut |= position not in apart and is_zero(columns.mat)
            units = [rounding_unit(block) for block in columns.blocks.values()]
            way = (*before.way, *(() if step in before.way else (step,)))
            yield position, Dye(columns, True, 0, before.size, max(before.unit, *units), way)

    def _goes_apart(self, dyes: Iterable[Dye]) -> bool:
        """Whether the dye goes where columns are kept apart: hooks may change gradients there."""
        return self._question.is_curvature and all(
            dye.is_whole and not dye.positions and _DYED_LATER.keys().isdisjoint(dye.columns.blocks)
            for dye in dyes
        )

    def _pushed(self, node: Node, quantities: Dyes) -> list[tuple[int, Columns]]:
        """The columns behind a node; none if calling the node may have side effects."""
        # Columns of a curvature call a Python function several times anyway.
        may_act = nodes.may_act(node) and not self._question.is_curvature
        if may_act or not self._unpacks_twice:
            return []
        try:
            with torch.no_grad():
                crossed = cross_columns(node, {nr: dye.columns for nr, dye in quantities.items()})
        except Exception:  # the other quantities may not cross this node
            return []
        is_scalar = all(not nodes.shape_of(node, nr) for nr in range(len(node._input_metadata)))
        if nodes.is_linear(node) or (is_scalar and not self._owners.meet_in(node)):
            return crossed
        # A nonlinear function of numbers that samples share couples the samples.
        return [
            (i, Columns({_COUPLED if r is _BEFORE else r: b for r, b in columns.blocks.items()}))
            for i, columns in crossed
        ]

    def _dyed(self, dye: Dye, node: Node | None, output_nr: int) -> Dye:
        """Multiply columns by the weights, where samples begin."""
        blocks: dict[Root, Tensor] = {}
        is_whole, size = dye.is_whole, dye.size
        for root, block in dye.columns.blocks.items():
            is_before = root is _BEFORE
            # A loss may stack as many terms as there are samples, by chance.
            are_terms = is_before and node is not None and nodes.is_stack_of_numbers(node)
            # An extended loss has one or more rows for each sample.
            is_usual = not (is_before or self._owners.are_moved) and self._weights.fit(block[0])
            owners = None if is_usual else self._owners.rows(node, output_nr)
            is_later = root in _DYED_LATER and not are_terms
            guesses = self._weights.guess(block[0], not is_before, owners) if is_later else None
            if guesses:
                root, size = _DYED_LATER[root], max(size, largest(block[0]))
                dyed = [column * w for column, w in zip(block[1:], guesses, strict=True)]
                block = torch.stack([block[0], *dyed])
            elif guesses is not None:
                is_whole &= self._question.is_curvature  # it is unknown where samples lie
            blocks[root] = blocks[root] + block if root in blocks else block
        return dye._replace(columns=Columns(blocks), is_whole=is_whole, size=size)


def _live(view: View) -> list[int]:
    """The positions of the inputs of a call that have an edge."""
    return [position for position, edge in enumerate(view.call.edges) if edge is not None]
