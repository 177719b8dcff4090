"""Finds tensors that are functions of parameters alone, and so have no samples.

Shapes cannot tell: a table of positions may be as long as the batch by chance.
"""

from __future__ import annotations

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import is_leaf
from backpack_core.record.call import Call, Edge
from backpack_operations import nodes
from backpack_operations.order import children_of
from backpack_operations.survey import GraphSurvey
from backpack_operations.viewed import has_call
from backpack_products.substitutes import is_parameter

# The five questions of ``Origins``, as bits of one number.
_WEIGHTS, _TABLES, _CONSTANTS, _OWN_ROWS, _ROWS_OF_WEIGHTS = 1, 2, 4, 8, 16
_ALL, _OF_TABLES = 31, _TABLES | _CONSTANTS | _OWN_ROWS


class Origins:
    """Answers, for a node, five questions about what its outputs were computed from.

    One walk answers all of them, and goes only as far as the answer needs.
    """

    def __init__(self, survey: GraphSurvey) -> None:
        self._survey = survey
        self._answers: dict[Node, int] = {}

    def of_weights(self, node: Node) -> bool:
        """Whether an output is known to be a function of parameters alone."""
        return bool(self._of(node) & _WEIGHTS)

    def of_tables(self, node: Node) -> bool:
        """Whether it is a function of parameters, and of the survey's tables."""
        return bool(self._of(node) & _TABLES)

    def of_constants(self, node: Node) -> bool:
        """Whether it is a function of parameters, and of tensors without gradient (data, masks)."""
        return bool(self._of(node) & _CONSTANTS)

    def has_own_rows(self, node: Node) -> bool:
        """Whether its rows are those of parameters, even if masks or noise were applied to them.

        Or those of the survey's tables.
        """
        return bool(self._of(node) & _OWN_ROWS)

    def has_rows_of_weights(self, node: Node) -> bool:
        """Whether they are, if what the survey takes for tables are data."""
        return bool(self._of(node) & _ROWS_OF_WEIGHTS)

    def _of(self, node: Node) -> int:
        answers = self._answers
        todo = [] if node in answers else [(node, *self._begin(node))]
        while todo:
            this, bits, behind = todo.pop()
            while bits and behind and behind[-1] in answers:
                bits &= answers[behind.pop()]
            if bits and behind:
                todo += [(this, bits, behind), (behind[-1], *self._begin(behind[-1]))]
            else:
                answers[this] = bits | (_OF_TABLES if this in self._survey.tables else 0)
        return answers[node]

    def _begin(self, node: Node) -> tuple[int, list[Node]]:
        """The bits that a node itself allows, and the nodes behind that must have them, too."""
        survey, calls = self._survey, []
        if has_call(node) or (survey.leaves and (node, 0) in survey.leaves):
            sites = [survey.site_at(Edge(node, nr)) for nr in range(len(node._input_metadata))]
            calls = [s.call for s in sites if s is not None and s.call not in survey.opened]
        if calls:  # the node belongs to calls that are stepped over: their inputs count
            behind = [e.node for call in calls for e in call.edges if e is not None]
            given = [tensor for call in calls for tensor in given_to(call)]
            is_any = bool(behind) or any(t.requires_grad for t in given)
            return _ALL if is_any and all(map(is_parameter, given)) else 0, behind
        children = children_of(node)
        behind = [child for child in children if not is_leaf(child)]
        if not children or not all(self._is_weight(c) for c in children if is_leaf(c)):
            return 0, behind
        if nodes.is_of_its_operands(node):
            return _ALL, behind
        return _CONSTANTS | (_OWN_ROWS | _ROWS_OF_WEIGHTS if _keeps_rows(node) else 0), behind

    def _is_weight(self, leaf: Node) -> bool:
        """Whether a leaf is a parameter, or a single number (which has no rows)."""
        tensor = leaf.variable  # type: ignore[attr-defined]
        return id(tensor) in self._survey.uses or is_parameter(tensor) or not tensor.dim()


def _keeps_rows(node: Node) -> bool:
    """Whether axis 0 of a result may come from an operand with an edge, and not from data."""
    operation = nodes.operation_of(node)
    if operation in nodes.ROW_BY_ROW:
        return any(
            child is not None
            and nodes.lengths_of(child, number)[:1] != (1,)  # one row is broadcast
            and nodes.keeps_rows(node, 0, position)
            for position, (child, number) in enumerate(node.next_functions)
        )
    is_picked = operation in nodes.GATHERS | {"EmbeddingBag"}
    return node.next_functions[0][0] is not None and not is_picked


def given_to(call: Call) -> list[Tensor]:
    """The inputs of a call that were not computed in the graph: data, tables, parameters."""
    if None not in call.edges:
        return []
    return [t for t, edge in zip(call.stored.inputs, call.edges, strict=True) if edge is None]


def has_parameters_given(call: Call) -> bool:
    """Whether a call received trained parameters as arguments."""
    return any(is_parameter(tensor) and tensor.requires_grad for tensor in given_to(call))
