"""Runs module extensions with inputs and output set on the module. Imports core's contract only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from backpack_core.calls import ModuleCall
from backpack_core.extension import Extension, OutputGradient
from backpack_core.module_extension import Grads, ModuleExtension


class ModuleExtensionRun:
    """One module extension at one call, for one extension."""

    def __init__(
        self, module_extension: ModuleExtension, extension: Extension, call: ModuleCall
    ) -> None:
        self.module_extension = module_extension
        self.extension = extension
        self.call = call

    def read(self, check: Callable[[Parameter, str], None], quantity: Any) -> None:
        """Store what the methods named after the parameters return."""
        self.run("check")
        first_order = isinstance(self.extension.propagator, OutputGradient)
        for name in self.module_extension.params:
            parameter = getattr(self.call.module, name, None)
            if not isinstance(parameter, Parameter) or not parameter.requires_grad:
                continue
            check(parameter, name)
            value = self.run(name, None if first_order else quantity)
            setattr(parameter, self.extension.savefield, value)

    def backpropagate(self, quantity: Any) -> dict[int, Any]:
        """What the module extension sends to inputs, by their positions."""
        value = self.run("backpropagate", quantity)
        to_all = self.module_extension.sends_to_every_input
        return dict.fromkeys(range(len(self.call.inputs) if to_all else 1), value)

    def run(self, method: str, *quantity: Any) -> Any:
        """Call a method of the module extension with inputs and output set on the module."""
        call = self.call
        g_inp: Grads = (None,) * len(call.inputs)
        g_out: Grads = (call.grad_output,)
        with io_on_module(call):
            function = getattr(self.module_extension, method)
            return function(self.extension, call.module, g_inp, g_out, *quantity)


@contextmanager
def io_on_module(call: ModuleCall) -> Iterator[None]:
    """Set ``module.input0``, ``module.input1``, …, ``module.output`` for a ``with`` block.

    All samples are there, also with subsampling, as module extensions expect.
    """
    io = {f"input{i}": call.tensor_input(i) for i in range(len(call.inputs))}
    io["output"] = call.output
    attributes = call.module.__dict__
    before = {name: attributes[name] for name in io if name in attributes}
    attributes.update(io)
    try:
        yield
    finally:
        for name in io:
            attributes.pop(name, None)
        attributes.update(before)
