"""The two walks through a graph that find where samples lie, and what has to be kept apart.

Consumers first, to see which tensors have samples; then back, to see behind which of the others
somebody reads. ``docs/design/operations.md`` has the rules that decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.record.call import Edge
from backpack_operations import nodes
from backpack_operations.alignment import Alignment
from backpack_operations.batch import declared_axis, is_doubtful
from backpack_operations.of_weights import Origins
from backpack_operations.order import consumers_first, reached
from backpack_operations.owners import Owners
from backpack_operations.survey import GraphSurvey
from backpack_operations.tensors import Known, Tensors, Way


class Walk:
    """Goes through a graph twice: consumers first, and back."""

    def __init__(
        self,
        survey: GraphSurvey,
        found: Alignment,
        targets: Mapping[Node, Mapping[int, Tensor]],
        owners: Owners,
    ) -> None:
        """Begin.

        Args:
            survey: What is known about the graph.
            found: Gets what is found.
            targets: Parameters that no call reads off, by node and position of their uses.
            owners: Knows whose the entries of tensors are.
        """
        self._survey = survey
        self._found = found
        self._size = max(1, survey.batch_size)
        self._origins = Origins(survey)
        self._tensors = Tensors(survey, targets)
        self._owners = owners

    def run(self, roots: list[Edge]) -> None:
        """Fill in what is found."""
        found = self._found
        found.beside.clear()
        starts = [self._tensors[edge.node, edge.output_nr] for edge in roots]
        for root in starts:
            root.positions = int(root.length == self._survey.batch_size)
            root.is_before |= not root.positions
            root.is_outer = not (root.site or root.is_returned)
        tensors = consumers_first(starts, self._tensors.further)
        for tensor in tensors:
            for below, position in tensor.ways:
                # Much faster than Way(...).
                self._derive(tuple.__new__(Way, (tensor, below, position)))
        found.positions.update((tensor.place, tensor.positions) for tensor in tensors)
        found.owned.update((t.place, t.owned) for t in tensors if t.owned is not None)
        found.before = {tensor.place for tensor in tensors if tensor.is_before}
        before = -1
        while before < len(found.apart):
            before = len(found.apart)
            for tensor in reversed(tensors):
                self._keep_apart(tensor)
            for tensor in tensors if found.apart else ():
                for below, _ in tensor.ways if tensor.is_apart else ():
                    if not below.positions:  # as far as the next samples, where it is seen to fit
                        self._stay_apart(below)
        # Of what is apart already, all comes from above: it would count twice.
        begin = {tensor.node for tensor in tensors if tensor.is_settled() and not tensor.is_apart}
        for node in found.starts.keys() - begin:
            del found.starts[node]

    # Downwards -----------------------------------------------------------------------------------

    def _derive(self, way: Way) -> None:
        """How many entries of axis 0 each sample has at an operand, as this way tells."""
        above, below, _ = way
        below.is_outer |= above.is_outer and not (below.site or below.is_returned)
        if below.is_settled():
            return
        if not self._survey.batch_size:  # of no sample, every entry is
            below.positions = int(below.length == 0)
            return
        is_before = above.is_before
        count, rest = divmod(1 if below.length is None else below.length, self._size)
        if self._owners.are_moved and self._is_told(way):
            pass
        elif above.is_loss:
            below.positions = count  # a loss says where samples are
        elif self._is_elsewhere(way):
            pass
        elif way.is_handed_out(self._size):
            below.is_picked = True
        elif self._origins.of_weights(below.node) or (not is_before and self._is_table(way)):
            pass
        elif below.length == self._size and self._is_certain(way):
            below.positions = 1
        elif below.shape and not rest and self._keeps_rows(way):
            below.positions = count
        else:
            below.is_before |= is_before
        if below.is_settled():
            below.is_before = False

    def _is_told(self, way: Way) -> bool:
        """Whether it is known which samples the rows of an operand are of, in another order."""
        above, this, _ = way
        # By order, as above, or where the loss ends; else by what is known of it.
        is_like = way.keeps_rows or (way.keeps_length and len(above.shape) == len(this.shape))
        is_whole = above.is_loss or above.length is None or this.is_returned
        is_free = above.owned is not None if is_like else not is_whole
        is_table = not above.is_loss and self._origins.of_tables(this.node)
        owners = None if is_table else self._owners.rows(*this.place, this.axis, is_free)
        if owners is None:
            return False
        samples, count = torch.arange(self._size, device="cpu"), len(owners) // self._size
        is_usual = not (self._survey.is_declared or (this.axis and self._survey.is_told))
        if is_usual and owners.equal(samples.repeat_interleave(count)):
            if way.above.operation in nodes.INDEXED:
                this.positions = count  # else picks of one of each, in any order, are not seen
            return bool(this.positions)
        if above.positions and not above.is_call and way.keeps_rows:
            return False  # the operation has made rows of them in order: the dye has to look
        this.owned = owners == samples[:, None]
        return True

    def _is_elsewhere(self, way: Way) -> bool:
        """Whether samples are known to be on another axis, and nothing in front was made of rows.

        Else the dye has to look at it.
        """
        owners = self._owners
        return (
            owners.are_moved
            and (way.above.is_before or not self._keeps_rows(way))
            and owners.are_elsewhere(way.below.place)
        )

    def _is_table(self, way: Way) -> bool:
        """Whether an operand may be a table, and no sample is made of it entry by entry."""
        return self._origins.of_tables(way.below.node) and way.repeats()

    def _is_certain(self, way: Way) -> bool:
        """Whether axis 0, as long as the batch, holds the samples as far as is known."""
        above, below, _ = way
        if self._survey.is_declared and is_doubtful(below.shape, self._size):
            is_first = below.site is not None and not declared_axis(below.site.call)
            return is_first or bool(above.positions and self._keeps_rows(way))
        return not self._is_other(way)

    def _is_other(self, way: Way) -> bool:
        """Whether axis 0 is as long as the batch by chance, as the operation on the way tells."""
        (above, below, _), of_constants = way, self._origins.of_constants
        operation, has_samples = above.operation, bool(above.positions)
        is_repeated = has_samples and operation in {"Expand", "Repeat"}
        if way.is_broadcast and (is_repeated or operation in nodes.ELEMENTWISE):
            return True
        if above.is_outer and below.is_returned:
            return False
        if not (above.is_call or above.is_before) and of_constants(below.node):
            has_own_rows, is_picked = self._origins.has_own_rows, operation in nodes.GATHERS
            if not has_samples or (has_own_rows(below.node) if is_picked else way.is_beside()):
                return True
        if not operation or above.is_before:
            is_as_long = above.is_call and above.length == self._size
            is_other = is_as_long and not (has_samples or above.axis or above.is_before)
            return (is_other and not of_constants(above.node)) or above.is_dropped
        if operation in nodes.SAME_AXES or way.keeps_rows:
            return not has_samples and way.shows_none(self._size)
        if operation in nodes.TURNS:
            return has_samples
        return way.loses_samples(self._size)

    def _keeps_rows(self, way: Way) -> bool:
        """Whether axis 0 of an operand is known to hold the samples one after the other."""
        above = way.above
        if above.is_before:  # nobody has said yet where they are: the dye will tell
            return not self._survey.is_declared or self._size == 1
        if not above.positions:
            return False
        return way.keeps_length if above.is_call else way.keeps_rows

    # Upwards -------------------------------------------------------------------------------------

    def _keep_apart(self, this: Known) -> None:
        """Whether samples have to be told apart at a tensor that has none, for what is behind."""
        found, node = self._found, this.node
        needs = bool(found.apart) and True in [below.is_apart for below, _ in this.ways]
        for position, parameter in self._targets(this):
            needs, (child, number) = True, node.next_functions[position]
            assert child is not None
            leaf = (child, number)
            found.leaves[leaf] = parameter
            found.apart.add(leaf)
            found.positions[leaf] = 0
        if this.site is not None and not this.positions and not this.is_loss:
            needs |= bool(self._survey.trained[this.site.call])
        if not needs:
            return
        if this.is_settled() and not this.is_apart:
            if not this.is_call:  # else the call sees to it
                found.starts[node] = None
        elif not this.is_before:
            self._stay_apart(this)
        elif not this.is_loss:
            self._note_beside(this)

    def _targets(self, this: Known) -> Iterable[tuple[int, Tensor]]:
        """The parameters that an operation uses, and no call reads off."""
        return () if this.is_call else self._tensors.targets.get(this.node, {}).items()

    def _stay_apart(self, this: Known) -> None:
        if not this.is_apart:
            this.is_apart = True
            self._found.apart.add(this.place)
            self._found.starts.pop(this.node, None)  # it began above

    def _note_beside(self, number: Known) -> None:
        """What is kept apart behind a number that has no samples is not a function of any."""
        beside = self._found.beside

        def further(this: Known) -> list[Known]:
            return [below for below, _ in this.ways if below.is_apart]

        for this in reached([number], further):
            beside += [(parameter, this.node) for _, parameter in self._targets(this)]
            if this.site is not None and this is not number:
                trained = self._survey.trained[this.site.call]
                beside += [(own.parameter, this.node) for own in trained]
