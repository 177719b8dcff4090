"""What happens when autograd has the gradient of a call's output. Imports core; knows no layer.

One backward pass of autograd is one :class:`BackwardPass`. Autograd runs our hooks in topological
order: when the hook on an output fires, every consumer of that output has been visited. So a
quantity waits where it was delivered, at a call's output or at an autograd node between calls,
until autograd gets there, and every call and every node is passed exactly once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core.budget import even_size
from backpack_core.calls import ModuleCall, Node, Record
from backpack_core.columns import Columns
from backpack_core.context import Context, current, logger
from backpack_core.errors import UncoveredParameterWarning, UnsupportedError
from backpack_core.extension import Extension, warn_once
from backpack_core.loss_rule import LossRule
from backpack_core.probe import SampleProbe
from backpack_core.registry import Resolved, registry
from backpack_core.survey import Survey, own_edge
from backpack_core.sweep import Sweep, chunk_size, visiting_order
from backpack_core.traversal import Group, Traversal

_warned: set[Any] = set()


class OutputHook:
    """The tensor hook on an output: runs the calls that returned it, last one first."""

    __slots__ = ("output_nr", "records")

    def __init__(self, records: list[Record], output_nr: int) -> None:
        self.records = records
        self.output_nr = output_nr

    def __call__(self, grad: Tensor) -> None:
        """Called by autograd with the gradient of the output."""
        context = current(self.records[0][0].thread)
        if context is None:
            if not _keeps_graph():
                for call, _ in self.records:
                    call.release()
            return
        task: int = torch._C._current_graph_task_id()
        node = torch._C._current_autograd_node()
        try:
            current_pass = context.passes.get(task) or BackwardPass(context, task)
            for call, index in reversed(self.records):
                current_pass.visit(call, index, node, self.output_nr, grad)
        except BaseException:
            context.passes.pop(task, None)
            raise


class BackwardPass(Traversal):
    """The state of one backward pass under one context; dropped when the pass ends or fails."""

    def __init__(self, context: Context, task: int) -> None:
        groups: list[Group] = list(context.groups)
        if context.debug:
            groups.append((SampleProbe(), ()))
        super().__init__(Survey(), groups)
        self.context = context
        self.task = task
        self._partial: dict[tuple[Extension, int], Any] = {}
        self._release_last: list[ModuleCall] = []
        self.visiting: ModuleCall | None = None
        self._unshared: set[int] = set()
        self._summed: dict[tuple[Extension, int], tuple[Parameter, int]] = {}
        # A pass inside another one (re-entrant checkpointing) must not compute for its parameters.
        outer: BackwardPass | None = next(iter(context.passes.values()), None)
        self._owners: dict[int, int] = {} if outer is None else outer._owners
        self._is_outermost = outer is None
        self._deferred: dict[Extension, dict[Parameter, Any]] = {}
        if outer is not None:
            self._deferred = outer._deferred
        context.passes[task] = self
        context.seen.add("ran")
        # Autograd owns the pass: it ends when autograd is through, or has failed.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self.context.passes.pop(self.task, None)
        for call in self._release_last:
            call.release()
        # With backward(inputs=...), some of the calls that share a parameter may not be reached.
        for (extension, key), (parameter, calls) in self._summed.items():
            if calls < self.survey.uses[key]:
                parameter.__dict__.pop(extension.savefield, None)
                self._deferred.get(extension, {}).pop(parameter, None)
        if not self._is_outermost:
            return
        for extension, values in self._deferred.items():
            for parameter, value in extension.finish(values).items():
                setattr(parameter, extension.savefield, value)

    def visit(self, call: ModuleCall, index: int, node: Node, output_nr: int, grad: Tensor) -> None:
        """Everything that happens at one output of one call."""
        call._check_released()
        call.output_nr, call.grad_output = index, grad
        self.visiting = call
        if self.groups:
            self._survey(call, index, node, output_nr)
            self.compute(call, index, node, output_nr)
        if self.context.debug:
            _log(call)
        call.memo.clear()  # so that a hook frees what it drops
        if self.context.extension_hook is not None:
            self.context.extension_hook(call.module)
        if len(call.outputs) == 1:  # another output may be visited yet
            call.constants.clear()
        if self.context.retain_graph or torch.is_grad_enabled():
            call.grad_output = None
        elif len(call.outputs) == 1:
            call.release()
        else:  # other outputs may be visited yet
            self._release_last.append(call)

    def store(self, extension: Extension, parameter: Parameter, value: Any) -> None:
        """Set the attribute, with what earlier chunks of columns gave added."""
        key = id(parameter)
        if self._owners.setdefault(key, self.task) != self.task:
            raise UnsupportedError(
                f"A parameter of shape {list(parameter.shape)} is used inside a re-entrant "
                f"checkpoint and elsewhere, so '{extension.savefield}' would miss a part. Use "
                "torch.utils.checkpoint(use_reentrant=False)."
            )
        if self.survey.uses.get(key) == 1:
            self._unshared.add(key)
        else:
            _, calls = self._summed.get((extension, key), (parameter, 0))
            self._summed[extension, key] = (parameter, calls + 1)
        before = self._partial.get((extension, key))
        if before is not None:
            value = extension.combine(before, value)
        if extension.is_deferred:
            self._deferred.setdefault(extension, {})[parameter] = value
        else:
            setattr(parameter, extension.savefield, value)

    def await_node(self, node: Node) -> None:
        """Autograd calls back when it has visited every consumer of the node's outputs."""
        # It may never do so (backward(inputs=...), an exception): then the hook stays on the node,
        # and must hold neither the node nor this pass.
        this = weakref.ref(self)

        def arrive(_: Any) -> None:
            handle.remove()
            owner = this()
            if owner is not None:
                owner.cross(torch._C._current_autograd_node())

        handle = node.register_prehook(arrive)

    def start(
        self, slot: int, resolved: Resolved, call: ModuleCall, output: tuple[Node, int]
    ) -> Any:
        """Start at a loss; with many columns, carry all but the last chunk through right away."""
        propagator, extensions = self.groups[slot]
        assert isinstance(resolved.rule, LossRule)
        quantity = propagator.start(resolved.rule, call)
        if not isinstance(quantity, Columns):
            return quantity
        size = chunk_size(extensions, self.survey, quantity.mat.device)
        edge = call.edges[0]
        if size is None or size >= len(quantity.mat) or edge is None or self._alone(extensions):
            return quantity
        *chunks, last = quantity.chunks(even_size(len(quantity.mat), size))
        order = visiting_order(own_edge(edge, output[0]))
        for chunk in chunks:
            Sweep(self, slot, self._partial).run(order, edge, chunk)
        return last

    @staticmethod
    def _alone(extensions: tuple[Extension, ...]) -> bool:
        """Whether module extensions take part, which want all columns at once."""
        return any(e.module_extensions or registry.has_overrides(type(e)) for e in extensions)

    def _survey(self, call: ModuleCall, index: int, node: Node, output_nr: int) -> None:
        if (call, index) in self.survey.calls:
            return
        known = set(self.survey.bare)
        self.survey.add(call, node, output_nr)
        if any(self.survey.uses[k] > 1 or k in self.survey.bare for k in self._unshared):
            raise UnsupportedError(
                f"{call.path} belongs to a second forward pass, or a second branch, which shares "
                "parameters with the first and meets it only behind the losses. The first was "
                "through before this one was seen, so per-sample sums over both are not to be had. "
                "Call backward() on each loss, or apply one loss to the concatenated outputs."
            )
        for key in self.survey.bare.keys() - known - self.survey.uses.keys():
            parameter, operation = self.survey.bare[key]
            warn_once(
                _warned,
                (tuple(parameter.shape), operation),
                f"A parameter of shape {list(parameter.shape)} is used by the operation "
                f"{operation!r} outside of any module that owns it: it gets no quantity. Make it a "
                "parameter of the module whose forward() uses it.",
                UncoveredParameterWarning,
            )


def _keeps_graph() -> bool:
    """Whether the graph outlives the backward pass under way."""
    # With create_graph=True, grad mode is on inside hooks.
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", torch.is_grad_enabled)
    return torch.is_grad_enabled() or bool(asked())


def _log(call: ModuleCall) -> None:
    resolved = registry.resolve(call.module)
    logger.info(
        "%s: output %s, rule %s of %s",
        call.path,
        list(call.output_shape),
        type(resolved.rule).__name__,
        resolved.provenance,
    )
