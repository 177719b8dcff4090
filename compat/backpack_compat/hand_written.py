"""Module extensions as carriers: a quantity written by hand for one pair (extension, module type).

Imports backpack_core and the second-order family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from backpack_core import Extension, Propagator, View
from backpack_core.contract.rules import expect
from backpack_core.errors import UnsupportedError
from backpack_core.graph import Trained
from backpack_core.record.guards import ask
from backpack_operations.carrier import Carrier, ParameterResult
from backpack_products import ColumnPropagator, Columns
from backpack_secondorder.hessian import Hessian
from backpack_secondorder.signed_sqrt import SignedSqrt

if TYPE_CHECKING:
    from backpack.extensions.module_extension import ModuleExtension


class HandWrittenCarrier(Carrier):
    """A module extension, in one backward pass.

    Its methods find ``input0``, ``input1``, … and ``output`` on the module. They hold all samples,
    even if the extension is restricted to some. ``g_inp`` holds ``None`` for every input, since
    gradients at inputs do not exist yet.
    """

    gives_values = True

    def __init__(
        self, module_extension: ModuleExtension, extension: Extension, propagator: Propagator
    ) -> None:
        self._module_extension = self.speaker = module_extension
        self._extension = extension
        self._propagator = propagator

    def starts(self, view: View) -> bool:
        """Whether the call is a loss: its output is a number, or its type is known as a loss."""
        return view.output_shape == () or bool(view.call.rule.is_loss)

    def arrive(self, view: View, waiting: Any) -> Any:
        """As the propagator does; at a loss, ``backpropagate`` starts the quantity."""
        if self.starts(view):
            return waiting
        return self._propagator.arrive(view.call.rule, view, waiting)

    def find(
        self, view: View, trained: Iterable[Trained], quantity: Any
    ) -> Iterator[ParameterResult]:
        """Results of the methods that are named after the parameters; others are left out."""
        self._run("check", view)
        arrived = present(quantity) if self._propagator.travels else None
        owned = view.stored.owned
        for name in self._module_extension.params:
            if name in view.stored.computed:
                raise UnsupportedError(
                    f"The parameter {name!r} of {view.path} is computed from others (by a "
                    "parametrization, or in a hook), which a module extension cannot account for."
                )
            parameter = owned[name][0] if name in owned else None
            if parameter is not None and parameter.requires_grad:
                yield ParameterResult(name, parameter, self._run(name, view, arrived))
        for own in trained:
            if own.name not in self._module_extension.params:
                yield ParameterResult(own.name, own.parameter, None)

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """Send the result of ``backpropagate`` to every input."""
        value = self._run("backpropagate", view, present(quantity))
        wanting = [i for i, edge in enumerate(view.call.edges) if edge is not None]
        if isinstance(self._propagator, ColumnPropagator):
            for i in wanting:
                shape = view.inputs[i].shape
                expect(view, self._module_extension, "backpropagate returned", value, shape)
        return dict.fromkeys(wanting, adopt(self._propagator, value, quantity))

    def _run(self, method: str, view: View, *quantity: Any) -> Any:
        """Call a method of the module extension with inputs and output set on the module."""
        whole = view.full
        g_inp, g_out = (None,) * len(whole.stored.inputs), (whole.grad_output,)
        with _io_on_module(whole):
            given = self._extension, whole.call.module, g_inp, g_out, *quantity
            return ask(view, self._module_extension, method, *given)


@contextmanager
def _io_on_module(view: View) -> Iterator[None]:
    """Set ``module.input0``, ``module.input1``, …, ``module.output`` for a ``with`` block."""
    io = {f"input{i}": view.tensor_input(i) for i in range(len(view.stored.inputs))}
    io["output"] = view.output
    attributes = view.call.module.__dict__
    before = {name: attributes[name] for name in io if name in attributes}
    attributes.update(io)
    try:
        yield
    finally:
        for name in io:
            attributes.pop(name, None)
        attributes.update(before)


def present(quantity: Any) -> Any:
    """A quantity as module extensions receive it: columns as one tensor ``[V, N, *out]``."""
    return quantity.mat if isinstance(quantity, Columns) else quantity


def adopt(propagator: Propagator, value: Any, like: Any = None) -> Any:
    """The value that ``backpropagate`` of a module extension returned, as a quantity.

    Args:
        propagator: The propagator of the extension.
        value: The value.
        like: The quantity at the output. If the number of columns is unchanged, they keep its
            roots; otherwise they get a new root.

    Raises:
        UnsupportedError: The propagator sends a :class:`Hessian`, and the value is not one.
    """
    if isinstance(propagator, SignedSqrt) and not isinstance(value, Hessian):
        raise UnsupportedError(
            f"A module extension for {propagator!r} must return a Hessian from backpropagate. Got "
            f"{type(value).__name__}: write a layer rule with second derivatives instead."
        )
    if not isinstance(propagator, ColumnPropagator):
        return value
    if like is not None and len(like.mat) == len(value):
        return like.split(value)
    return Columns.start(repr(propagator), value)
