"""Records calls that do anything other than make one new tensor from others.

Modules may return several tensors, views of what they received, or what they changed in place. A
call must not refer to the nodes of its own outputs, so some inputs are replaced before they are
stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import base_of, version_of
from backpack_core.plugins.registry import FALLBACK
from backpack_core.record.call import Edge, edge_of, site_at
from backpack_core.record.execution import Execution, new_base
from backpack_core.record.nested import in_order, iter_tensors, tensors_in
from backpack_core.record.state import Traits
from backpack_core.recording import attach, make_call, pass_on
from backpack_products.nested import map_tensors


def record(module: Module, traits: Traits, args: Any, result: Any, execution: Execution) -> Any:
    """Record a call; returns what replaces the result, or ``None``; see :class:`Between`."""
    resolved = traits.resolved
    outputs = (result,) if isinstance(result, Tensor) else tuple(iter_tensors(result))
    live = [o for o in outputs if is_recordable(o)]
    if not live:
        return pass_on(module, args, outputs)
    views = aliases(live, execution)
    if True in [t.is_complex() for t in (*outputs, *execution.tensors)]:
        resolved = FALLBACK  # rules have formulas for real numbers only
    kwargs = in_order(module, execution) if execution else {}
    received = Received(execution, outputs, views.values())
    inputs = tuple([received.store(t) for t in tensors_in(args, kwargs)])
    # Lists and dicts are copied: something that is made of the output may be added to them later,
    # and the call would then keep its own graph alive.
    if received.replaced or any(isinstance(a, (list, dict)) for a in (*args, *kwargs.values())):
        args, kwargs = map_tensors((args, kwargs), lambda t: received.replaced.get(id(t), t))
    tensors = args, kwargs, inputs, outputs
    call = make_call(module, traits, resolved, tensors, received, execution)
    for index, output in enumerate(outputs):
        if is_recordable(output):
            returned = views.get(id(output), output)
            assert returned.grad_fn is not None
            base = new_base(returned, execution.tensors) if returned._is_view() else None
            attach(call, index, returned, returned.grad_fn, base)
    return map_tensors(result, lambda t: views.get(id(t), t)) if views else None


class Received:
    """The inputs of an execution, in a form that a call may store.

    Attributes:
        edges: The edge of each input before the forward.
        versions: The version counter of each input before the forward.
        replaced: The tensor to store instead of an input, by ``id`` of the input.
        is_rewired: Whether the module changed a view in place; see :class:`Call`.
    """

    def __init__(
        self, execution: Execution, outputs: tuple[Tensor, ...], views: Iterable[Tensor]
    ) -> None:
        """Take what is needed to tell which inputs must be replaced.

        Args:
            execution: What was known before the forward.
            outputs: The tensors that the module returned.
            views: The views that are returned instead of some outputs; see :func:`aliases`.
        """
        self._execution = execution
        self._nodes = [node for o in outputs if (node := o.grad_fn) is not None]
        self._bases = [base for o in (*outputs, *views) if (base := base_of(o)) is not None]
        self.edges: tuple[Edge | None, ...] = ()
        self.versions: list[int] = []
        self.replaced: dict[int, Tensor] = {}
        self.is_rewired = False

    def store(self, tensor: Tensor) -> Tensor:
        """The input, or the tensor to store instead; appends its edge and version."""
        edge, version = edge_of(tensor), version_of(tensor)
        is_own = tensor.grad_fn in self._nodes
        before, execution = (edge, version), self._execution
        for slot, other in enumerate(execution.tensors):
            if other is tensor:
                before = execution.edges[slot], execution.versions[slot]
                break
        else:  # a user's pre-hook that ran after ours replaced an argument
            if is_own:  # the module rewrote it, and its edge before the forward is unknown
                before, self.is_rewired = (None, -1), True
        if is_own and edge != before[0]:
            # The module changed its input in place: the tensor has the edge of the output now.
            self.is_rewired |= base_of(tensor) is not None and version != before[1]
            tensor = self._replace(tensor, tensor.detach())
        elif edge is not None and self._bases and self._is_seen(tensor):
            # The output is a view of the input, so that an in-place change of the output would
            # rewrite the input's node, too.
            tensor = self._replace(tensor, _Twin.apply(tensor))  # type: ignore[no-untyped-call]
        self.edges = (*self.edges, before[0])
        self.versions.append(before[1])
        return tensor

    def _replace(self, tensor: Tensor, by: Tensor) -> Tensor:
        self.replaced[id(tensor)] = by
        return by

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether an output is a view of a tensor, or of its base."""
        base = base_of(tensor)
        return any(seen is tensor or seen is base for seen in self._bases)


class _Twin(torch.autograd.Function):
    """An alias with its own autograd node, which in-place changes of others do not rewrite."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Detach, so that autograd does not treat the result as a view of the input."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass the gradient on."""
        return grad


def is_recordable(output: Tensor) -> bool:
    """Whether a call can be recorded at a tensor: it has a node, and is dense or nested."""
    return output.grad_fn is not None and output.layout in (torch.strided, torch.jagged)


def aliases(live: list[Tensor], execution: Execution) -> dict[int, Tensor]:
    """Views to return instead of outputs whose edge is that of an input or of another call.

    A module may return its input, or what a submodule returned; and one of several outputs may
    depend on another. Every output is visited separately, with its own gradient, so it needs its
    own edge.

    Args:
        live: The outputs that have a graph.
        execution: What was known before the forward.

    Returns:
        The views, by ``id`` of the outputs that they replace.
    """
    views: dict[int, Tensor] = {}
    for output in live:
        edge = edge_of(output)
        assert edge is not None
        if len(live) > 1 or edge in execution.edges or site_at(edge) is not None:
            view = output.view_as(output)
            # ``view_as`` may give axes of length one other strides, and torch refuses to copy
            # between tensors that differ in these.
            is_same = view.stride() == output.stride()
            views[id(output)] = view if is_same else output[...]
    return views
