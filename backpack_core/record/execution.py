"""A module execution that has begun, and what it turns out to have received and returned.

What a call stores must not hold the nodes of the call's own outputs: that would be a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node, base_of, version_of, versions_of
from backpack_core.record.call import SITES, Edge, edge_of, site_at


class Execution(dict[str, Any]):
    """The keyword arguments of a module, with what only the moment before the forward can tell.

    The module gets them in the place of its own: so what was noted belongs to this execution and to
    no other one of the module (in another thread, inside of this one), and is gone with it.

    Attributes:
        tensors: The tensors among all arguments.
        versions: How often each was changed in place.
        edges: Where each came from.
        is_recorded: Whether the call was made already.
        computed: Parameters that a parametrization computed meanwhile, by name.
        place: Our place before hooks of all modules, if there are any.
    """

    __slots__ = ("computed", "edges", "is_recorded", "place", "tensors", "versions")
    is_rewired = False  # which what it received tells
    place: object

    def __init__(self, kwargs: dict[str, Any], tensors: tuple[Tensor, ...]) -> None:
        if kwargs:
            self.update(kwargs)
        self.tensors = tensors
        self.edges = tuple(map(edge_of, tensors))
        self.versions = versions_of(tensors)
        self.is_recorded = False
        self.computed: dict[str, Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and what is restored from a file, which hooks of the user's make, are plain."""
        return dict, (dict(self),)


class Received:
    """What an execution received, as it is stored.

    Attributes:
        edges: Where each input came from.
        versions: How often each had been changed in place.
        replaced: What is stored in the place of an input, by ``id``.
        is_rewired: The module changed a view in place.
    """

    def __init__(
        self, execution: Execution, outputs: tuple[Tensor, ...], own: Iterable[Tensor]
    ) -> None:
        """Begin.

        Args:
            execution: What was known before the forward.
            outputs: What it returned.
            own: What takes the place of some of them.
        """
        self._execution = execution
        self._nodes = [node for o in outputs if (node := o.grad_fn) is not None]
        self._bases = [base for o in (*outputs, *own) if (base := base_of(o)) is not None]
        self.edges: tuple[Edge | None, ...] = ()
        self.versions: list[int] = []
        self.replaced: dict[int, Tensor] = {}
        self.is_rewired = False

    def store(self, tensor: Tensor) -> Tensor:
        """The tensor, or what takes its place."""
        edge, version = edge_of(tensor), version_of(tensor)
        is_own = tensor.grad_fn in self._nodes
        was, known = (edge, version), self._execution
        for slot, other in enumerate(known.tensors):
            if other is tensor:
                was = known.edges[slot], known.versions[slot]
                break
        else:  # a pre-hook of the user's that ran after ours replaced an argument
            if is_own:  # and it was rewritten: what it was before, nobody saw
                was, self.is_rewired = (None, -1), True
        if is_own and edge != was[0]:
            # The module rewrote its input. Where it came from before, a pre-hook saw.
            self.is_rewired |= base_of(tensor) is not None and version != was[1]
            tensor = self._replace(tensor, tensor.detach())
        elif edge is not None and self._bases and self._is_seen(tensor):
            # Whoever changes the output in place rewrites the input, too, into its own future.
            tensor = self._replace(tensor, _Twin.apply(tensor))  # type: ignore[no-untyped-call]
        self.edges = (*self.edges, was[0])
        self.versions.append(was[1])
        return tensor

    def _replace(self, tensor: Tensor, by: Tensor) -> Tensor:
        self.replaced[id(tensor)] = by
        return by

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether an output is a view of an input, or of what that is a view of."""
        base = base_of(tensor)
        return any(seen is tensor or seen is base for seen in self._bases)


class _Twin(torch.autograd.Function):
    """The same numbers, in the same memory, with a node that nothing rewrites."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """No view, as far as autograd is concerned."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """As it is."""
        return grad


def is_made(output: Tensor) -> bool:
    """Whether a tensor lies in the graph, and is dense or nested: one that a call may stand at."""
    return output.grad_fn is not None and output.layout in (torch.strided, torch.jagged)


def simple_node(
    args: tuple[Any, ...], result: Any, execution: Execution
) -> tuple[Node, Tensor | None] | None:
    """The node of the output, if a module made one new real tensor of others.

    And left everything as it was: what was known before the forward is all that there is to store.

    Returns:
        The node, and the tensor that the output is a view of, if the module made that, too.
    """
    # Tensors are the arguments themselves where nothing else was found among them; keywords there
    # may be all the same, by a hook that had just been put behind ours.
    if args is not execution.tensors or execution or not args or not isinstance(result, Tensor):
        return None
    node: Any = result.grad_fn
    base = result._base
    if (
        node is None
        or result.layout is not torch.strided
        or result.dtype.is_complex
        or SITES in node.metadata
        or (base is not None and (base := new_base(result, args)) is None)
    ):
        return None
    for received, edge in zip(args, execution.edges):  # noqa: B905 - one for each, and quicker
        if node is received.grad_fn or (edge and node is edge[0]) or received.dtype.is_complex:
            return None
    return node, base


def new_base(view: Tensor, received: Iterable[Tensor]) -> Tensor | None:
    """The tensor that an output is a view of, where the module made that, with a node."""
    base = view._base
    for tensor in received:
        if base is tensor or base is base_of(tensor):
            return None  # whoever made that is recorded there
    return None if base is None or base.grad_fn is None else base


def aliases(live: list[Tensor], execution: Execution) -> dict[int, Tensor]:
    """Outputs with a node of their own, for those that share one with something else.

    A module may return its input, or what a module inside returned; and of several outputs one may
    depend on another. Each output is looked at by itself, with a gradient of its own.

    Args:
        live: The outputs that lie in the graph.
        execution: What was known before the forward.
    """
    found: dict[int, Tensor] = {}
    for output in live:
        edge = edge_of(output)
        assert edge is not None
        if len(live) > 1 or edge in execution.edges or site_at(edge) is not None:
            found[id(output)] = output.view_as(output)
    return found
