"""Looks at the whole graph behind a call before anything is computed. Imports calls and registry.

Some faults can only be seen from above: a parameter that several calls use, or that is used by a
bare functional call as well; calls that disagree about the batch; an operation that mixes samples.
The survey walks the autograd graph once per backward pass. Calls with a rule are stepped over, so
it costs a visit per call and per node between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.nn import Module, Parameter

from backpack_core import bridge
from backpack_core.calls import Edge, Frame, ModuleCall, Node, records_at
from backpack_core.errors import SampleMixingError, ShapeError, UnsupportedError
from backpack_core.loss_rule import LossRule
from backpack_core.registry import Resolved, registry
from backpack_core.rules import ParametricRule

ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass
class Survey:
    """What is known about the graph of one backward pass.

    Attributes:
        batch_size: Number of samples, the same in every call.
        widest: Bytes that one column takes at the widest call.
        weights: Bytes of the parameters.
        calls: Every recorded output of a call, as (call, output number).
        uses: How often calls use a parameter, by ``id``.
        bare: Parameters that operations outside of any owning module use, by ``id``, with the
            operation's name.
    """

    batch_size: int = 0
    widest: int = 0
    weights: int = 0
    first: str = ""
    calls: set[tuple[ModuleCall, int]] = field(default_factory=set)
    uses: dict[int, int] = field(default_factory=dict)
    bare: dict[int, tuple[Parameter, str]] = field(default_factory=dict)
    _nodes: set[tuple[Node, Frame | None]] = field(default_factory=set)

    def add(self, call: ModuleCall, node: Node, output_nr: int) -> None:
        """Walk everything behind an output of a call.

        Args:
            call: The call; its graph may be known already.
            node: The autograd node of the output.
            output_nr: Which output of the node.

        Raises:
            SampleMixingError: Samples influence each other somewhere.
            ShapeError: Calls disagree about the number of samples.
        """
        index = next(i for c, i in records_at(node, output_nr) if c is call)
        todo = list(self._visit_call(call, index, node, output_nr))
        while todo:
            edge, frame = todo.pop()
            todo += self._visit_edge(edge, frame)

    def _visit_call(
        self, call: ModuleCall, index: int, node: Node, output_nr: int
    ) -> Iterator[tuple[Edge, Frame | None]]:
        """Enter a call; yield where to go on."""
        if (call, index) in self.calls or call.is_released:
            return
        self.calls.add((call, index))
        self.widest = max(self.widest, *(t.nbytes for t in (call.outputs[index], *call.inputs)))
        resolved = registry.resolve(call.module)
        self._check(call, index, resolved)
        for _, parameter, _ in parameters_of(call.module, resolved):
            known = self.uses.get(id(parameter), 0)
            self.weights += 0 if known else parameter.nbytes
            self.uses[id(parameter)] = known + 1
        if resolved.rule.transparent or call.is_rewired:
            yield self.below(call, node, output_nr), call.frame
        else:
            parent = None if call.frame is None else call.frame.parent
            for edge in call.edges:
                if edge is not None:
                    yield own_edge(edge, node), parent

    @staticmethod
    def below(call: ModuleCall, node: Node, output_nr: int) -> Edge:
        """The output of a call as the graph made it: what lies under its own record."""
        records = records_at(node, output_nr)
        depth = next(i for i, (other, _) in enumerate(records) if other is call)
        return Edge(node, output_nr, depth)

    def _visit_edge(self, edge: Edge, frame: Frame | None) -> Iterator[tuple[Edge, Frame | None]]:
        node, output_nr = edge.node, edge.output_nr
        assert node is not None
        frame = _leave(node, frame)
        if edge.depth:
            call, index = records_at(node, output_nr)[edge.depth - 1]
            yield from self._visit_call(call, index, node, output_nr)
            return
        # Twice, where it is reached from inside an execution and from outside past its output.
        if (node, frame) in self._nodes:
            return
        self._nodes.add((node, frame))
        if bridge.mixes_samples(node):
            raise SampleMixingError(
                f"The graph contains a batch normalisation in train mode ({node.name()}): every "
                "sample influences every other, so per-sample quantities do not exist. Call "
                "model.eval(), or use GroupNorm or LayerNorm."
            )
        for child, number in node.next_functions:
            if child is None:
                continue
            if child.name() == ACCUMULATE:
                self._visit_parameter(child.variable, node, frame)  # type: ignore[attr-defined]
                continue
            yield Edge(child, number, len(records_at(child, number))), frame

    def _visit_parameter(self, parameter: Parameter, node: Node, frame: Frame | None) -> None:
        """Note a parameter that no enclosing module owns."""
        while frame is not None:
            if any(parameter is own for own in frame.module._parameters.values()):
                return
            frame = frame.parent
        if isinstance(parameter, Parameter):
            self.bare[id(parameter)] = (parameter, bridge.name_of(node))

    def _check(self, call: ModuleCall, index: int, resolved: Resolved) -> None:
        _check_parameters(call, resolved)
        if resolved.rule.mixes_samples(call):
            raise SampleMixingError(
                f"{call.path} makes every sample of the batch influence every other (a batch "
                "normalisation in train mode does), so per-sample quantities do not exist. Call "
                "model.eval(), or use a layer that treats samples one by one, as GroupNorm."
            )
        if not call.inputs:
            if any(True for _ in parameters_of(call.module, resolved)):
                raise UnsupportedError(
                    f"{call.path} has parameters but receives no tensor (a parametrization, say), "
                    "so there is no batch axis to tell samples apart by. Remove the "
                    "parametrization, or freeze its parameters."
                )
            return
        size = call.batch_size if call.inputs[0].dim() else 0
        output = call.outputs[index]
        axis = resolved.rule.batch_axis(call, index)
        is_loss = isinstance(resolved.rule, LossRule) or output.dim() == 0
        if not is_loss and (axis >= output.dim() or output.shape[axis] != size):
            raise ShapeError(
                f"{call.path} received {size} samples (axis 0 of its input) and returned a tensor "
                f"of shape {list(output.shape)}: it moves or merges the batch axis, so samples "
                "cannot be told apart. Keep samples on axis 0 of every module."
            )
        if not self.batch_size:
            self.batch_size, self.first = size, call.path
        elif size != self.batch_size:
            raise ShapeError(
                f"{call.path} received a batch of {size}, but {self.first} one of "
                f"{self.batch_size}: the first dimension must be the samples in every module. "
                "Where positions were merged into the batch (as in logits.flatten(0, 1)), keep "
                "them as extra dimensions: Linear takes [N, T, D], CrossEntropyLoss [N, C, T]."
            )


def _check_parameters(call: ModuleCall, resolved: Resolved) -> None:
    """Refuse a call whose parts have parameters that nobody would look at."""
    if resolved.rule.transparent or not call.module._modules:
        return
    covered = {id(parameter) for _, parameter, _ in parameters_of(call.module, resolved)}
    for name, parameter in call.module.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            raise UnsupportedError(
                f"{call.path} has the trained parameter {name!r}, which the rule "
                f"{type(resolved.rule).__name__} knows nothing of. If it belongs to a "
                "parametrization, remove that (torch.nn.utils.parametrize."
                "remove_parametrizations), or freeze the parameter."
            )


def own_edge(edge: Edge, node: Node) -> Edge:
    """An edge of a call whose output ``node`` made, with that node put in where it was left out."""
    return Edge(node, edge.output_nr, edge.depth) if edge.node is None else edge


def _leave(node: Node, frame: Frame | None) -> Frame | None:
    """The enclosing execution at a node: the parent, where the execution's inputs begin."""
    while frame is not None and any(e is not None and e.node is node for e in frame.edges):
        frame = frame.parent
    return frame


def parameters_of(module: Module, resolved: Resolved) -> Iterator[tuple[str, Parameter, bool]]:
    """The parameters a call reads off: name, parameter, and whether the rule covers it."""
    rule = resolved.rule
    covered = rule.parameter_names(module) if isinstance(rule, ParametricRule) else ()
    for name in covered:
        value = _attribute(module, name)
        if isinstance(value, Parameter) and value.requires_grad:
            yield name, value, True
    for name, value in module._parameters.items():
        if name not in covered and value is not None and value.requires_grad:
            yield name, value, False


def _attribute(module: Module, name: str) -> object:
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
