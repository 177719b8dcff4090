"""Takes quantities from calls to the calls before them, and lets extensions read off.

Knows no layer and no quantity. A :class:`Traversal` visits calls in topological order. Who decides
the order is left open: autograd does (``engine.py``), or a list made beforehand (``sweep.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack_core.autodiff import AutodiffRule
from backpack_core.calls import Edge, ModuleCall, Node, records_at
from backpack_core.columns import Columns, Root
from backpack_core.errors import (
    AutodiffFallbackWarning,
    BackpackError,
    BackpackWarning,
    NotExtendedError,
    OverwrittenInputError,
    UnsupportedError,
)
from backpack_core.extension import (
    ColumnPropagator,
    Extension,
    OutputGradient,
    Propagator,
    warn_once,
)
from backpack_core.legacy import ModuleExtensionRun
from backpack_core.loss_rule import LossRule
from backpack_core.module_extension import ModuleExtension
from backpack_core.ops import MaterializedRule
from backpack_core.plugins import missing
from backpack_core.probe import SampleProbe
from backpack_core.registry import Resolved, registry
from backpack_core.rules import ParametricRule
from backpack_core.survey import ACCUMULATE, Survey, own_edge, parameters_of

Group = tuple[Propagator, tuple[Extension, ...]]

_GRADIENT = Root("gradient")
_AUTODIFF = AutodiffRule()
_warned: set[Any] = set()


class Traversal(ABC):
    """What waits where, and what happens when a call is visited.

    Attributes:
        survey: What is known about the graph.
        groups: Extensions by propagator; a *slot* is a position in it.
    """

    def __init__(self, survey: Survey, groups: list[Group]) -> None:
        self.survey = survey
        self.groups = groups
        self._at_calls: dict[tuple[int, ModuleCall, int], Any] = {}
        self._at_nodes: dict[Node, dict[int, dict[int, Any]]] = {}
        self._shared: dict[tuple[int, int], Columns] = {}

    @abstractmethod
    def store(self, extension: Extension, parameter: Parameter, value: Any) -> None:
        """Take the value an extension computed for a parameter."""

    @abstractmethod
    def await_node(self, node: Node) -> None:
        """Something waits at a node for the first time: see to it that :meth:`cross` is called."""

    @abstractmethod
    def start(
        self, slot: int, resolved: Resolved, call: ModuleCall, output: tuple[Node, int]
    ) -> Any:
        """The quantity at the input of a loss; ``output`` is where the loss sits in the graph."""

    def compute(self, call: ModuleCall, index: int, node: Node, output_nr: int) -> None:
        """Read off and propagate, for every group, at one output of one call.

        Args:
            call: The call.
            index: Which of its outputs.
            node: The autograd node of that output.
            output_nr: Which output of the node.
        """
        resolved = registry.resolve(call.module)
        if not isinstance(resolved.rule, LossRule):  # a loss matters only where something starts
            resolved.rule.check(call)
        for slot in range(len(self.groups)):
            self.compute_slot(slot, resolved, call, index, (node, output_nr))

    def compute_slot(
        self, slot: int, resolved: Resolved, call: ModuleCall, index: int, output: tuple[Node, int]
    ) -> None:
        """The same for one group."""
        call.full.node = output[0]
        try:
            self._compute_slot(slot, resolved, call, index, output)
        finally:
            call.full.node = None

    def _compute_slot(
        self, slot: int, resolved: Resolved, call: ModuleCall, index: int, output: tuple[Node, int]
    ) -> None:
        propagator, extensions = self.groups[slot]
        axis = resolved.rule.batch_axis(call, index)
        seen = call.move_batch_axis(axis) if axis else call
        view = seen.subsample(propagator.subsampling)
        override = self._override(extensions, call)
        legacy = None if override is None else ModuleExtensionRun(override, extensions[0], call)
        quantity = self._quantity(slot, resolved, view, index, legacy, output)
        for extension in extensions:
            with _context_of(call, resolved, extension):
                if legacy is not None:
                    arrived = None if quantity is None else propagator.present(quantity)
                    legacy.read(self._refuse_shared, arrived)
                else:
                    self._read(slot, extension, resolved, view, quantity)
        if not isinstance(propagator, OutputGradient):
            with _context_of(call, resolved, extensions[0] if extensions else None):
                self._propagate(slot, resolved, view, quantity, legacy, output)

    def waits(self, slot: int, call: ModuleCall, index: int) -> bool:
        """Whether something arrived at an output of a call."""
        return (slot, call, index) in self._at_calls

    def _override(
        self, extensions: tuple[Extension, ...], call: ModuleCall
    ) -> ModuleExtension | None:
        # An extension with overrides has a group of its own, so looking at the first is enough.
        found = registry.override(extensions[0], call.module) if extensions else None
        return None if found is None else found[0]

    def _quantity(
        self,
        slot: int,
        resolved: Resolved,
        call: ModuleCall,
        index: int,
        legacy: ModuleExtensionRun | None,
        output: tuple[Node, int],
    ) -> Any:
        """What the propagator has at this output."""
        propagator, extensions = self.groups[slot]
        if isinstance(propagator, OutputGradient):
            assert call.grad_output is not None
            return Columns({_GRADIENT: call.grad_output.unsqueeze(0)})
        waiting = self._at_calls.pop((slot, call.full, index), None)
        if isinstance(propagator, SampleProbe):
            return propagator.arrive(call, waiting)
        if waiting is not None:
            if isinstance(waiting, Columns):  # under autocast, neighbours differ in precision
                waiting = waiting.to(call.dtype)
            axis = resolved.rule.batch_axis(call.full, index)
            return propagator.move_batch_axis(waiting, axis) if axis else waiting
        if legacy is not None and call.outputs[index].dim() == 0:
            return None
        if isinstance(resolved.rule, LossRule):
            with _context_of(call, resolved, extensions[0]):
                resolved.rule.check(call.full)
                return self.start(slot, resolved, call, output)
        raise _nothing_arrived(call, extensions[0], resolved)

    def _read(
        self, slot: int, extension: Extension, resolved: Resolved, call: ModuleCall, quantity: Any
    ) -> None:
        """Let an extension read off every parameter of the call's module."""
        for name, parameter, covered in parameters_of(call.module, resolved):
            rule = resolved.rule if covered else _fallback(call, extension)
            if rule is None:
                continue
            if id(parameter) in self.survey.bare:
                operation = self.survey.bare[id(parameter)][1]
                raise UnsupportedError(
                    f"The parameter {name!r} is also used by the operation {operation!r} outside "
                    f"of any module, so '{extension.savefield}' would miss that part. Apply the "
                    "parameter through a module (nn.Linear with a tied weight, say)."
                )
            try:
                value = self._value(slot, extension, rule, call, name, parameter, quantity)
            except UnsupportedError as error:
                if extension.fail_mode in ("error", "autodiff"):
                    raise
                if extension.fail_mode == "warning":
                    key = (type(call.module), type(extension), name)
                    warn_once(_warned, key, f"{call.path}: {error}", BackpackWarning)
                continue
            if isinstance(value, Tensor):
                value = _own(call, name, value).to(parameter.dtype)
            self.store(extension, parameter, value)

    def _value(
        self,
        slot: int,
        extension: Extension,
        rule: Any,
        call: ModuleCall,
        name: str,
        parameter: Parameter,
        quantity: Any,
    ) -> Any:
        propagator = self.groups[slot][0]
        if self.survey.uses[id(parameter)] == 1:
            return extension.read(rule, call, name, _presented(extension, quantity))
        if not extension.shared_parameters or not isinstance(propagator, ColumnPropagator):
            raise UnsupportedError(
                f"{type(extension).__name__} has no meaning for the parameter {name!r}, which "
                f"{self.survey.uses[id(parameter)]} module calls share. Leave the extension out, "
                "or untie the parameter."
            )
        # The sum over calls comes before any nonlinear reduction: restate the result each time.
        key = (slot, id(parameter))
        memo = ("shared", slot, name, call.output_nr)
        if memo not in call.memo:
            product = rule.param_jac_t_mat_prod(call, name, quantity.mat)
            summed = quantity.split(product)
            if key in self._shared:
                summed = self._shared[key].merge(summed)
            call.memo[memo] = self._shared[key] = summed
        total: Columns = call.memo[memo]
        stated = MaterializedRule(total.mat)
        return extension.read(stated, call, name, _presented(extension, total))

    def _refuse_shared(self, parameter: Parameter, name: str) -> None:
        if self.survey.uses.get(id(parameter), 1) > 1 or id(parameter) in self.survey.bare:
            raise UnsupportedError(
                f"The parameter {name!r} is used more than once, which a module extension cannot "
                "account for: write a layer rule instead."
            )

    def _propagate(
        self,
        slot: int,
        resolved: Resolved,
        call: ModuleCall,
        quantity: Any,
        legacy: ModuleExtensionRun | None,
        output: tuple[Node, int],
    ) -> None:
        """Send the quantity on to the inputs of the call, or into the graph inside it."""
        propagator = self.groups[slot][0]
        node, output_nr = output
        full = call.full
        looks_inside = resolved.rule.transparent and legacy is None
        if all(edge is None for edge in call.edges) and not looks_inside:
            return  # nothing before this call wants the quantity
        is_loss = isinstance(resolved.rule, LossRule)
        if legacy is not None:
            at_output = None if quantity is None else propagator.present(quantity)
            sent = legacy.backpropagate(at_output)
            inputs = {i: propagator.adopt(value, quantity) for i, value in sent.items()}
        elif is_loss:
            inputs = {0: quantity}
        elif resolved.rule.transparent or call.is_rewired:
            self.deliver(slot, Survey.below(full, node, output_nr), quantity)
            return
        else:
            try:
                inputs = propagator.propagate(resolved.rule, call, quantity)
            except OverwrittenInputError:
                # Autograd kept its own copy: go through the node that made the output.
                self.deliver(slot, Survey.below(full, node, output_nr), quantity)
                return
        for position, arriving in inputs.items():
            edge = call.edges[position]
            if edge is not None:
                self.deliver(slot, own_edge(edge, node), arriving)

    def deliver(self, slot: int, edge: Edge, quantity: Any, is_wide: bool = False) -> None:
        """Leave a quantity at an edge, to wait for autograd.

        Args:
            slot: Which group it belongs to.
            edge: Where it goes: to a call, or to a node between calls.
            quantity: The quantity.
            is_wide: It comes from a node between calls, and so from the whole batch.
        """
        propagator = self.groups[slot][0]
        merge = propagator.merge
        node = edge.node
        assert node is not None
        if is_wide and edge.depth:
            quantity = propagator.narrow(quantity)
        elif not is_wide and not edge.depth:
            quantity = propagator.widen(quantity, self.survey.batch_size)
        if edge.depth:
            call, index = records_at(node, edge.output_nr)[edge.depth - 1]
            key = (slot, call, index)
            before = self._at_calls.get(key)
            self._at_calls[key] = quantity if before is None else merge(before, quantity)
            return
        if node not in self._at_nodes:
            self._at_nodes[node] = {}
            self.await_node(node)
        waiting = self._at_nodes[node].setdefault(slot, {})
        before = waiting.get(edge.output_nr)
        waiting[edge.output_nr] = quantity if before is None else merge(before, quantity)

    def cross(self, node: Node) -> None:
        """Push what waits at a node through it."""
        arrived = self._at_nodes.pop(node, {})
        for slot, quantities in arrived.items():
            propagator = self.groups[slot][0]
            crossed = propagator.cross(node, quantities, self.survey.batch_size)
            for position, quantity in crossed:
                child, number = node.next_functions[position]
                if child is not None and child.name() != ACCUMULATE:
                    edge = Edge(child, number, len(records_at(child, number)))
                    self.deliver(slot, edge, quantity, is_wide=True)


def _own(call: ModuleCall, name: str, value: Tensor) -> Tensor:
    """The value, or a copy of one that another extension had: results are their users' own."""
    given: list[Tensor] = call.memo.setdefault(("given", name), [])
    if any(value is other for other in given):
        return value.clone()
    given.append(value)
    return value


def _presented(extension: Extension, quantity: Any) -> Any:
    return quantity if extension.reads_quantity else extension.propagator.present(quantity)


def _fallback(call: ModuleCall, extension: Extension) -> ParametricRule | None:
    """The automatic rule for a parameter no rule covers, as far as the extension allows it."""
    name = type(call.module).__name__
    if extension.fail_mode == "error":
        raise missing(
            f"No layer rule covers the parameters of {call.path}, and fail_mode is 'error'. "
            f"Install a plugin that knows {name}, or write a layer rule.",
            name,
        )
    if extension.fail_mode == "silent":
        return None
    if extension.fail_mode == "warning":
        message = f"{call.path} has no layer rule: {type(extension).__name__} leaves it out."
        warn_once(_warned, (type(call.module), type(extension)), message, BackpackWarning)
        return None
    warn_once(
        _warned,
        type(call.module),
        f"{call.path} has no layer rule: its parameters are differentiated automatically, which is "
        f"exact but slower. Install a plugin that knows {name} (backpack-plugin-layers covers "
        "torch.nn), or write a layer rule.",
        AutodiffFallbackWarning,
    )
    return _AUTODIFF


def _nothing_arrived(call: ModuleCall, extension: Extension, resolved: Resolved) -> BackpackError:
    name = type(extension).__name__
    if call.outputs[call.output_nr].dim() == 0:
        return missing(
            f"{name} starts at a loss, and no loss rule is known for {call.path}. Use a loss that "
            "an installed plugin knows (backpack-plugin-layers covers torch.nn), or write a "
            f"LossRule for {type(call.module).__name__}.",
            "loss",
        )
    return NotExtendedError(
        f"{name} needs a quantity that starts at the loss, but nothing arrived at {call.path} "
        f"(rule of {resolved.provenance}). Call lossfunc = extend(lossfunc) with a loss module of "
        "torch.nn, and compute the loss with it; a functional loss cannot be seen."
    )


@contextmanager
def _context_of(
    call: ModuleCall, resolved: Resolved, extension: Extension | None
) -> Iterator[None]:
    """Add where it happened to an error: module, extension, and who provided them."""
    try:
        yield
    except Exception as error:
        if getattr(error, "backpack_context", None) is None:
            who = "sample probe" if extension is None else registry.describe(extension)
            text = (
                f"[{who}, at {call.path}, rule {type(resolved.rule).__name__} of "
                f"{resolved.provenance}]"
            )
            error.backpack_context = text  # type: ignore[attr-defined]
            if isinstance(error, BackpackError):
                error.args = (f"{error.args[0] if error.args else ''}\n{text}",)
            elif hasattr(error, "add_note"):
                error.add_note(text)
        raise
