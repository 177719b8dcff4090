"""The two walks through a graph that find where samples lie, and what has to be kept apart.

Consumers first, to see which tensors have samples; then back, to see behind which of the others
somebody reads. ``docs/design/samples.md`` has the rules that decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import nodes
from backpack_core.graph.alignment import Alignment, Place
from backpack_core.graph.batch import declared_axis, is_doubtful
from backpack_core.graph.of_weights import Origins
from backpack_core.graph.order import ranks, reached
from backpack_core.graph.owners import owners_behind_loss, owners_of_rows
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Edge, Site


class _Here(NamedTuple):
    """What stands at a place.

    Attributes:
        site: The call that is recorded there.
        is_call: Whether that is stepped over, and not gone through by nodes.
        operation: The operation; empty where a call is stepped over, or nothing is known.
        shape: The shape of the tensor.
        length: That of its axis 0; ``None`` of a number.
    """

    site: Site | None
    is_call: bool
    operation: str
    shape: tuple[int, ...]
    length: int | None


class _Map(dict[Place, _Here]):
    """What stands at places, looked at once: the graph stays as it is while it is walked through.

    Asked for several times for every way that leads there, so that is a plain look-up.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    def __missing__(self, place: Place) -> _Here:
        """Look."""
        site = self._survey.site_at(Edge(*place))
        is_call = site is not None and not self._survey.goes_inside(site.call)
        operation = "" if is_call else nodes.operation_of(place[0])
        shape = nodes.lengths_of(*place)
        here = self[place] = _Here(site, is_call, operation, shape, shape[0] if shape else None)
        return here


class Walk:
    """Goes through a graph twice: consumers first, and back."""

    def __init__(
        self,
        survey: Survey,
        found: Alignment,
        tables: set[Node],
        targets: Mapping[tuple[Node, int], Tensor],
    ) -> None:
        """Begin.

        Args:
            survey: What is known about the graph.
            found: Gets what is found.
            tables: Nodes inside of calls that returned something that all samples share.
            targets: Parameters that no call reads off, by the edge that leads to them.
        """
        self._survey = survey
        self._found = found
        self._size = max(1, survey.batch_size)
        self._before = found.before
        self._origins = Origins(survey, tables)
        self._targets = targets
        self._picked: set[Place] = set()
        self._sorted: set[Place] = set()
        self._guessed: set[Place] = set()
        self._dropped: set[Place] = set()
        self._at = _Map(survey)
        self._ways: dict[Place, list[tuple[Place, int]]] = {}

    def run(self, roots: list[Edge]) -> None:
        """Fill in what is found."""
        self._found.beside.clear()
        start: list[Place] = [(edge.node, edge.output_nr) for edge in roots]
        outputs: dict[Node, dict[int, None]] = {}
        for place in start:
            self._found.positions[place] = int(self._at[place].length == self._size)
            if not self._found.positions[place]:
                self._before.add(place)
            outputs.setdefault(place[0], {})[place[1]] = None
        for node in ranks(*outputs):
            for nr in outputs.get(node, ()):
                ways = self._ways[node, nr] = self._behind((node, nr))
                for child, position in ways:
                    self._derive((node, nr), child, position)
                    outputs.setdefault(child[0], {})[child[1]] = None
        before = -1
        while before < len(self._found.apart):
            before = len(self._found.apart)
            for place in reversed(self._ways):
                self._keep_apart(place)
            for place in self._ways if self._found.apart else ():
                self._stay_apart(place)

    def _behind(self, place: Place) -> list[tuple[Place, int]]:
        """Where what arrives goes on to, and by which way out of the node."""
        here, beside = self._at[place], self._survey.beside
        if here.site is not None and here.is_call:
            edges = here.site.call.edges
            return [((e.node, e.output_nr), i) for i, e in enumerate(edges) if e is not None]
        ways = [((e.node, e.output_nr), i) for i, e in edges_behind(place[0])]
        return [way for way in ways if not nodes.is_leaf(way[0][0]) and way[0] not in beside]

    # Downwards -----------------------------------------------------------------------------------

    def _derive(self, place: Place, child: Place, position: int) -> None:
        """How many entries of axis 0 each sample has at a child, as this way tells."""
        found = self._found.positions
        if found.get(child) or child in self._found.owned:
            return
        above, (*_, shape, length) = self._at[place], self._at[child]
        is_before, is_owned = place in self._before, place in self._found.owned
        is_loss = above.site is not None and above.site.call.rule.is_loss
        entries = 1 if length is None else length
        is_picked = is_owned and above.operation in nodes.GATHERS and not entries % self._size
        if (is_loss or is_before or is_owned) and self._is_owned(place, child, position):
            found[child] = 0
        elif (is_picked and not self._origins.of_tables(child[0])) or is_loss:
            found[child] = entries // self._size  # a loss says where samples are
        elif self._is_picked(place, child, position):
            found[child] = 0
            self._picked.add(child)
        elif self._origins.of_weights(child[0]) or (
            not is_before and self._is_table(place, child, position)
        ):
            found[child] = 0
        elif is_before and nodes.is_stack_of_numbers(child[0]):
            found[child] = 0
            self._before.add(child)
        elif length == self._size and self._is_certain(place, child, position):
            found[child] = 1
        elif shape and not entries % self._size and self._keeps_rows(place, child, position):
            found[child] = entries // self._size
        else:
            found[child] = 0
            if is_before:
                self._before.add(child)
        if found[child] or child in self._found.owned:
            self._before.discard(child)
            # A sum of everything says nothing of what it was of.
            is_guessed = place in self._guessed and not above.is_call
            if is_guessed or (is_before and above.operation in nodes.REDUCTIONS):
                self._guessed.add(child)

    def _is_owned(self, place: Place, child: Place, position: int) -> bool:
        """Whether rows are in no order, and known to be some sample's all the same."""
        of_loss, above = place not in self._before, self._at[place]
        is_loss = above.site is not None and above.site.call.rule.is_loss
        is_picked = of_loss and above.operation in nodes.GATHERS
        # As many rows as samples are taken for theirs behind a loss: the dye will tell.
        is_as_long = self._at[child].length == self._size
        is_usual = is_as_long and (is_loss or is_picked)
        if is_usual or not self._found.is_readable or self._origins.of_tables(child[0]):
            return False
        is_same = place in self._found.owned and above.length == self._at[child].length
        if is_same and (above.is_call or nodes.keeps_rows(*place, position)):
            self._found.owned[child] = self._found.owned[place]
            return True
        is_table = self._origins.of_tables
        known = owners_behind_loss(child[0], self._size, is_table) if of_loss else None
        if known is None and (not of_loss or place in self._found.owned):
            # Of as many, data and what a constant made of a table are not told apart.
            is_table = self._origins.of_constants if is_as_long else is_table
            known = owners_of_rows(child[0], self._size, child[1], is_table)
        # A module's rule needs some; where rows are no multiple of samples, nothing else tells.
        is_needed = self._at[child].is_call and not is_loss
        is_other = known is not None and len(known.rows) % self._size and is_needed
        if known is None or not (known.are_sure or is_other):
            return False
        owners = known.rows
        samples = torch.arange(self._size, device=owners.device)
        if torch.equal(owners, samples.repeat_interleave(len(owners) // self._size)):
            return False
        self._found.owned[child] = owners == samples[:, None]
        return True

    def _is_picked(self, place: Place, child: Place, position: int) -> bool:
        """Whether entries of axis 0 are handed out, as tokens to experts, however many they are.

        Or samples are sorted, as packed sequences are: there, rows of any number are in that order.
        """
        operation, is_sorted = self._at[place].operation, place in self._sorted
        if place not in self._picked or operation in nodes.GATHERS:
            is_sorted = operation == "IndexSelect" and nodes.selected(*place) == self._size
            if is_sorted and self._found.positions[place]:
                is_sorted = not nodes.keeps_rows(*place, position)
            is_picked = is_sorted or (operation in nodes.SCATTERS and position == 1)
        else:
            is_picked = is_sorted or self._at[place].length == self._at[child].length
        if is_sorted:
            self._sorted.add(child)
        return is_picked

    def _is_table(self, place: Place, child: Place, position: int) -> bool:
        """Whether a child may be a table, and no sample is made of it without repeating entries."""
        if not self._origins.of_tables(child[0]):
            return False
        above, below = self._at[place], self._at[child]
        operation = above.operation
        if operation in nodes.GATHERS or nodes.TURNS & {operation, below.operation}:
            return True
        if not self._found.positions.get(place):
            return True
        is_longer = len(above.shape) > len(below.shape)
        return is_longer and not (operation and nodes.keeps_rows(*place, position))

    def _is_certain(self, place: Place, child: Place, position: int) -> bool:
        """Whether axis 0, as long as the batch, holds the samples as far as is known."""
        if self._survey.is_declared and is_doubtful(self._at[child].shape, self._size):
            site = self._at[child].site
            is_first = site is not None and not declared_axis(site.call)
            known = self._found.positions.get(place) and self._keeps_rows(place, child, position)
            return is_first or bool(known)
        return not self._is_other(place, child, position)

    def _is_other(self, place: Place, child: Place, position: int) -> bool:
        """Whether axis 0 is as long as the batch by chance, as the operation on the way tells."""
        above, below = self._at[place], self._at[child]
        operation = above.operation
        is_broadcast = len(below.shape) < len(above.shape)
        if is_broadcast and operation in nodes.ELEMENTWISE:
            return True
        has_samples = bool(self._found.positions[place])
        if not operation or place in self._before:
            is_as_long = above.is_call and above.length == self._size
            is_other = is_as_long and not (has_samples or self._axis(above.site))
            is_other &= place not in self._before and not self._origins.of_constants(place[0])
            return is_other or place in self._dropped
        is_constant = not has_samples and self._origins.of_constants(child[0])
        if is_constant or nodes.is_shared(operation, position, has_samples):
            return True
        if operation in nodes.SAME_AXES or nodes.keeps_rows(*place, position):
            return not has_samples and self._has_none(above.shape, below.shape)
        if operation in nodes.TURNS:
            return has_samples
        # Is what is left of axis 0, or picked from it, of some samples, or with all of them?
        is_picked = operation in nodes.GATHERS and not has_samples
        is_less = operation in nodes.REDUCTIONS and place not in self._guessed
        is_less &= len(below.shape) > len(above.shape)
        if is_picked or operation in nodes.SELECTIONS or is_less:
            kept = above.shape[is_picked:]
            is_other = any(length % self._size == 0 for length in kept)
            if is_other and not self._axis(below.site):
                self._dropped.add(child)
            return is_other
        return False

    def _axis(self, site: Site | None) -> int:
        """Where an output of a call has its samples: states have them elsewhere than on axis 0."""
        return self._survey.axes[site.call, site.index] if site is not None else 0

    def _has_none(self, shape: tuple[int, ...], behind: tuple[int, ...]) -> bool:
        """Whether a tensor may have no samples in front, as what keeps its order has none there."""
        if shape[:1] == behind[:1]:
            return True
        merged = list(behind[1:])  # or taken apart
        for length in reversed(shape):
            if merged[-1:] != [length]:
                break
            merged.pop()
        return any(length % self._size == 0 for length in merged)

    def _keeps_rows(self, place: Place, child: Place, position: int) -> bool:
        """Whether axis 0 of a child is known to hold the samples one after the other."""
        if place in self._before:  # nobody has said yet where they are: the dye will tell
            return not self._survey.is_declared or self._size == 1
        if not self._found.positions.get(place):
            return False
        if self._at[place].is_call:
            return self._at[place].length == self._at[child].length
        return nodes.keeps_rows(*place, position)

    # Upwards -----------------------------------------------------------------------------------

    def _keep_apart(self, place: Place) -> None:
        """Whether samples have to be told apart at a place that has none, for what is behind."""
        found, survey = self._found, self._survey
        node, (site, is_call, *_) = place[0], self._at[place]
        needs = bool(found.apart) and any(child in found.apart for child, _ in self._ways[place])
        for leaf, parameter in () if is_call else self._targets_at(node):
            needs = True
            found.leaves[leaf] = parameter
            found.apart.add((leaf, 0))
            found.positions[leaf, 0] = 0
            if place in self._before:
                found.beside.append((parameter, node))
        if site is not None and not found.positions[place] and not site.call.rule.is_loss:
            needs |= bool(survey.trained[site.call])
        if not needs:
            return
        if found.positions[place] or place in found.owned:
            if not is_call:  # else the call sees to it
                found.starts[node] = None
        elif place not in self._before:
            found.apart.add(place)
        elif site is None or not site.call.rule.is_loss:
            self._note_beside(place)

    def _stay_apart(self, place: Place) -> None:
        """What is kept apart stays so as far as the next samples, where it is seen to fit."""
        found = self._found
        if place in found.apart:
            children = (child for child, _ in self._ways[place])
            found.apart.update(child for child in children if not found.positions[child])

    def _note_beside(self, place: Place) -> None:
        """What is kept apart behind a number that has no samples is no function of any."""
        found = self._found

        def further(this: Place) -> list[Place]:
            places = [(edge.node, edge.output_nr) for _, edge in edges_behind(this[0])]
            return [p for p in places if p in found.apart and not nodes.is_leaf(p[0])]

        for this in reached([place], further):
            found.beside += [(parameter, this[0]) for _, parameter in self._targets_at(this[0])]
            site = self._at[this].site
            if site is not None and this != place:
                trained = self._survey.trained[site.call]
                found.beside += [(own.parameter, this[0]) for own in trained]

    def _targets_at(self, node: Node) -> list[tuple[Node, Tensor]]:
        """Parameters that a node sends something to and no call reads off, by their nodes."""
        if not self._targets:
            return []
        ways = [(edge.node, self._targets.get((node, i))) for i, edge in edges_behind(node)]
        return [(leaf, parameter) for leaf, parameter in ways if parameter is not None]
