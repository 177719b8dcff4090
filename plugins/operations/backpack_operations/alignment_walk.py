"""The two walks through a graph that find where samples lie, and what must be kept apart.

The first walk goes from the loss to the inputs and finds the tensors with samples on axis 0. The
second goes back and finds those among the others behind which something is read.
``docs/design/operations.md`` explains the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.record.call import Call, Edge
from backpack_operations import nodes
from backpack_operations.alignment import Alignment
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.nodes import NodeOutput
from backpack_operations.of_weights import Origins
from backpack_operations.order import consumers_first, reached
from backpack_operations.owners import Owners
from backpack_operations.runs import run_behind
from backpack_operations.survey import GraphSurvey
from backpack_operations.tensors import Link, TensorFacts, Tensors
from backpack_operations.viewed import rows_seen


class Walk:
    """Goes through a graph twice, from the loss to the inputs and back."""

    def __init__(
        self,
        survey: GraphSurvey,
        alignment: Alignment,
        targets: Mapping[Node, Mapping[int, Tensor]],
        owners: Owners,
    ) -> None:
        """Begin.

        Args:
            survey: What is known about the graph.
            alignment: The result, which is filled in.
            targets: Parameters that are read where operations use them, by node and position.
            owners: Knows which samples the rows of tensors belong to.
        """
        self._survey = survey
        self._alignment = alignment
        self._size = max(1, survey.batch_size)
        self._origins = Origins(survey)
        self._tensors = Tensors(survey, targets)
        self._owners = owners
        self._returning: dict[NodeOutput, list[Call]] = {}
        for (call, _), site in survey.sites.items():
            self._returning.setdefault(site.edge[:2], []).append(call)

    def run(self, roots: list[Edge]) -> None:
        """Fill in the alignment."""
        alignment = self._alignment
        alignment.beside.clear()
        starts = [self._tensors[edge.node, edge.output_nr] for edge in roots]
        for root in starts:
            root.positions = int(root.length == self._survey.batch_size)
            root.is_before |= not root.positions
            root.is_outer = not (root.site or root.is_returned)
        tensors = consumers_first(starts, self._tensors.further)
        for tensor in tensors:
            for operand, position in tensor.operands:
                # Much faster than Link(...).
                self._derive(tuple.__new__(Link, (tensor, operand, position)))
        alignment.positions.update((tensor.output, tensor.positions) for tensor in tensors)
        alignment.owned.update((t.output, t.owned) for t in tensors if t.owned is not None)
        alignment.before = {tensor.output for tensor in tensors if tensor.is_before}
        self._find_apart(tensors)
        self._find_runs(tensors)
        # At a tensor that is itself kept apart, columns arrive apart: none may begin there as well.
        begin = {tensor.node for tensor in tensors if tensor.is_settled() and not tensor.is_apart}
        for node in alignment.starts.keys() - begin:
            del alignment.starts[node]

    def _find_apart(self, tensors: list[TensorFacts]) -> None:
        """Find the tensors at which columns are kept apart: those between tensors with samples."""
        apart, before = self._alignment.apart, -1
        while before < len(apart):
            before = len(apart)
            for tensor in reversed(tensors):
                self._keep_apart(tensor)
            for tensor in tensors if apart else ():
                for operand, _ in tensor.operands if tensor.is_apart else ():
                    if not operand.positions:
                        self._stay_apart(operand)

    def _find_runs(self, tensors: list[TensorFacts]) -> None:
        """Find the tensors kept apart each of whose entries belongs to one sample, in runs."""
        runs, found = self._alignment.runs, dict[NodeOutput, set[int]]()
        runs.clear()
        for this in tensors if self._alignment.apart and self._size > 1 else ():
            run = 0
            if this.is_apart and this.site is None:
                run, *others = found.get(this.output, {0})
                if run and not others:
                    runs[this.output] = run
                run = runs.get(this.output, 0)
            elif this.positions and not (this.is_apart or this.is_call):
                is_in_order = this.length == this.positions * self._size
                run = prod(this.shape) // self._size if is_in_order else 0
            for operand, position in this.operands:
                if operand.is_apart:
                    way = *this.output, position, self._size, run
                    behind = run_behind(*way) if run else 0
                    found.setdefault(operand.output, set()).add(behind or 0)

    # From the loss to the inputs -----------------------------------------------------------------

    def _derive(self, link: Link) -> None:
        """Find how many entries of axis 0 each sample has at an operand, as one link tells."""
        result, operand, _ = link
        operand.is_outer |= result.is_outer and not (operand.site or operand.is_returned)
        if operand.is_settled():
            return
        if not self._survey.batch_size:  # an empty batch: empty tensors have samples
            operand.positions = int(operand.length == 0)
            return
        is_before = result.is_before
        count, rest = divmod(1 if operand.length is None else operand.length, self._size)
        if self._owners.are_moved and self._is_told(link):
            pass
        elif count and self._is_lost(link):
            operand.is_before |= is_before
        elif result.is_loss:
            operand.positions = count  # a loss says where samples are
        elif self._is_elsewhere(link) or link.is_taken_elsewhere():
            pass
        elif link.is_handed_out(self._size):
            operand.is_picked = True
        elif self._origins.of_weights(operand.node) or (not is_before and self._is_table(link)):
            pass
        elif operand.length == self._size and self._is_certain(link):
            operand.positions = 1
        elif operand.shape and not rest and self._keeps_rows(link):
            operand.positions = count
        else:
            operand.is_before |= is_before
        if operand.positions and self._is_hidden(operand):
            operand.positions = 0
        elif operand.is_settled():
            operand.is_before = False

    def _is_hidden(self, base: TensorFacts) -> bool:
        """Whether a call returned a view of this in which samples are not in order on its axis.

        So it is if a layer received ``x[None]``, and a view of what it returned was overwritten.
        """
        if base.site is None or base.site.layout is None:
            return False
        samples = torch.arange(self._size, device="cpu")
        rows = samples.repeat_interleave(base.positions)
        for site, layout in self._survey.views_of(base.node):
            if site.edge[:2] == base.output and not site.call.rule.is_loss:
                axis = self._survey.axes.get((site.call, site.index), 0)
                seen = rows_seen(layout, rows, axis)
                if seen is None or not seen.equal(
                    samples.repeat_interleave(len(seen) // self._size)
                ):
                    return True
        return False

    def _is_told(self, link: Link) -> bool:
        """Whether carried ids tell the samples of the rows of an operand; if so, note them."""
        result, this, _ = link
        # Rows are taken to be in order if the operation keeps them so, or where the net ends.
        is_like = link.keeps_rows or (link.keeps_length and len(result.shape) == len(this.shape))
        is_whole = result.is_loss or result.length is None or this.is_returned
        is_known = result.owned is not None or self._is_in_order(result)
        is_free = is_known if is_like else not is_whole
        is_table = not result.is_loss and self._origins.of_tables(this.node)
        owners = None if is_table else self._owners.rows(*this.output, this.axis, is_free)
        if owners is None:
            return False
        # Of one sample, all rows are its own.
        is_by_length = self._size > 1 and self._owners.ids.is_by_length(this.output)
        if is_by_length and (self._is_refuted(link, owners) or self._is_other(link)):
            return False
        samples, count = torch.arange(self._size, device="cpu"), len(owners) // self._size
        is_usual = not (self._survey.is_declared or (this.axis and self._survey.is_told))
        if is_usual and owners.equal(samples.repeat_interleave(count)):
            is_joined = result.owned is not None and this.is_call and nodes.joins(result.node)
            # A rule takes the samples there. If axis 0 is as long, it is unclear what it received.
            is_turned = this.is_call and this.axis > 0 and this.shape[0] != self._size
            is_turned &= this.site is not None and this.site.layout is None
            if is_joined or is_turned or result.operation in nodes.INDEXED:
                this.positions = count  # else a pick of one row each, in any order, would be missed
            return bool(this.positions)
        is_contradicted = result.positions and not result.is_call and link.keeps_rows
        if is_contradicted and not self._survey.is_told:
            return False  # contradicts the result, whose rows are in order: the dye decides
        this.owned = owners == samples[:, None]
        return True

    def _is_refuted(self, link: Link, rows: Tensor) -> bool:
        """Whether a result has rows of other samples than an operand whose length alone tells them.

        Two views of a batch may lie one behind the other (``torch.cat([x, flipped])``). As many
        rows as two of each sample would be, are halves of which each is a batch.
        """
        result, this, _ = link
        this.is_refuted |= result.is_refuted or self._differs(link, rows)
        if this.is_refuted:
            self._survey.sample_ids[this.output] = None
        return this.is_refuted

    def _differs(self, link: Link, rows: Tensor) -> bool:
        result = link.result
        if result.is_loss or not result.is_settled():
            return False
        if not (link.keeps_length if result.is_call else link.keeps_rows):
            found = self._owners.rows(*result.output, result.axis, is_free=True)
            if found is None:
                return True
            rows = found
        samples = torch.arange(self._size, device="cpu")
        expected = samples.repeat_interleave(result.positions)
        if result.owned is not None:
            expected = result.owned.int().argmax(0)
        # A view that merges axes has several rows for each, or the other way round.
        rows, expected = (
            own.repeat_interleave(max(1, len(other) // max(1, len(own))))
            for own, other in ((rows, expected), (expected, rows))
        )
        return not rows.equal(expected)

    def _is_lost(self, link: Link) -> bool:
        """Whether rows of samples that the user told come out of the net, and nobody knows whose.

        They need not be in order, as they are if each row that the model receives is a sample.
        """
        result, this, _ = link
        told, is_last = self._survey.told, result.is_loss or result.is_before
        if told is None or told.is_usual or not is_last:
            return False
        # As many as samples, but not as rows, may be sums over the rows of each sample, in order.
        is_summed = this.length == self._size != len(told.rows)
        rows = self._owners.rows(*this.output, this.axis, is_free=True)
        return rows is None and not is_summed

    def _is_in_order(self, this: TensorFacts) -> bool:
        """Whether carried ids tell that a tensor has one row of each sample, in order."""
        rows = self._owners.rows(*this.output, is_free=True)
        return rows is not None and rows.equal(self._owners.ids.samples)

    def _is_elsewhere(self, link: Link) -> bool:
        """Whether samples are known to be on an axis other than 0.

        Not where the operation made the rows of the result from those of the operand: the two
        contradict each other then, and the dye decides.
        """
        is_free = link.result.is_before or not self._keeps_rows(link)
        owners, output = self._owners, link.operand.output
        if not (owners.are_moved and is_free):
            return False
        return owners.are_elsewhere(output) or owners.are_added_up(output[0])

    def _is_table(self, link: Link) -> bool:
        """Whether an operand may be a table that all samples share."""
        return self._origins.of_tables(link.operand.node) and link.repeats()

    def _is_certain(self, link: Link) -> bool:
        """Whether axis 0, which is as long as the batch, holds the samples, as far as is known."""
        result, operand, _ = link
        if self._survey.is_declared and is_doubtful(operand.shape, self._size):
            is_first = operand.site is not None and not declared_axis(operand.site.call)
            return is_first or bool(result.positions and self._keeps_rows(link))
        return not (operand.is_uneven() or self._is_other(link))

    def _is_other(self, link: Link) -> bool:
        """Whether axis 0 is as long as the batch by chance, as the operation tells."""
        (result, operand, _), of_constants = link, self._origins.of_constants
        operation, has_samples = result.operation, bool(result.positions)
        is_repeated = has_samples and operation in {"Expand", "Repeat"}
        if link.is_broadcast and (is_repeated or operation in nodes.ELEMENTWISE):
            return True  # its axis 0 meets a later axis of the result
        if operation == "Stack" and has_samples and not link.keeps_rows:
            return True  # each is a sample's
        if result.is_outer and operand.is_returned:
            return False  # a model returns samples in front
        if not (result.is_call or result.is_before) and of_constants(operand.node):
            has_own_rows, is_picked = self._origins.has_own_rows, operation in nodes.GATHERS
            if not has_samples or (has_own_rows(operand.node) if is_picked else link.is_beside()):
                return True
        if not operation or result.is_before:  # a call, an unknown operation, or the loss itself
            is_as_long = result.is_call and result.length == self._size
            is_other = is_as_long and not (has_samples or result.axis or result.is_before)
            return (is_other and not of_constants(result.node)) or result.is_dropped
        if operation in nodes.SAME_AXES or link.keeps_rows:
            if result.is_settled():
                return False
            is_of_several = nodes.joins(result.node) and self._are_unknown(result, operand)
            return is_of_several or link.shows_none(self._size)
        if operation in nodes.INDEXED and nodes.joins(operand.node):
            return self._are_unknown(operand)  # the index may put rows into order
        if operation in nodes.TURNS:
            return has_samples  # in front of the result, hence not in front of the operand
        return link.loses_samples(self._size)

    def _are_unknown(self, *tensors: TensorFacts) -> bool:
        """Whether at most lengths tell the samples of the rows of tensors."""
        return not any(self._owners.ids.is_known(each.output) for each in tensors)

    def _keeps_rows(self, link: Link) -> bool:
        """Whether axis 0 of an operand is known to hold the samples one after the other."""
        result = link.result
        if result.is_before:  # no samples are known yet: the dye checks it
            return not self._survey.is_declared or self._size == 1
        if not result.positions:
            return False
        return link.keeps_length if result.is_call else link.keeps_rows

    # From the inputs to the loss -----------------------------------------------------------------

    def _keep_apart(self, this: TensorFacts) -> None:
        """Keep columns apart at a tensor without samples, if something behind it is read."""
        alignment, node = self._alignment, this.node
        is_needed = bool(alignment.apart) and True in [
            operand.is_apart for operand, _ in this.operands
        ]
        for position, parameter in self._targets(this):
            is_needed, (child, number) = True, node.next_functions[position]
            assert child is not None
            leaf = (child, number)
            alignment.leaves[leaf] = parameter
            alignment.apart.add(leaf)
            alignment.positions[leaf] = 0
        if this.site is not None and not this.positions and not this.is_loss:
            is_needed |= any(self._survey.trained[call] for call in self._calls_at(this))
        if not is_needed:
            return
        if this.is_settled() and not this.is_apart:
            if not this.is_call:  # a call sends them apart itself
                alignment.starts[node] = None
        elif not this.is_before:
            self._stay_apart(this)
        elif not this.is_loss:
            self._note_beside(this)

    def _calls_at(self, this: TensorFacts) -> list[Call]:
        """The calls that returned a tensor.

        If a view was overwritten in place, they may be several: a module, and one inside of it.
        """
        own = () if this.site is None else (this.site.call,)
        return list(dict.fromkeys((*own, *self._returning.get(this.output, ()))))

    def _targets(self, this: TensorFacts) -> Iterable[tuple[int, Tensor]]:
        """The parameters that are read where this operation uses them, by position."""
        return () if this.is_call else self._tensors.targets.get(this.node, {}).items()

    def _stay_apart(self, this: TensorFacts) -> None:
        if not this.is_apart:
            this.is_apart = True
            self._alignment.apart.add(this.output)
            self._alignment.starts.pop(this.node, None)  # columns arrive apart already

    def _note_beside(self, number: TensorFacts) -> None:
        """Note parameters behind a number that no samples lead to: a term beside the loss."""
        beside = self._alignment.beside

        def further(this: TensorFacts) -> list[TensorFacts]:
            return [operand for operand, _ in this.operands if operand.is_apart]

        for this in reached([number], further):
            beside += [(parameter, this.node) for _, parameter in self._targets(this)]
            for call in () if this is number else self._calls_at(this):
                beside += [(own.parameter, this.node) for own in self._survey.trained[call]]
