"""Run a module's forward pass again with other parameters.

If the output is linear in a parameter, this gives the coefficients: the output for one minus the
output for zero.

Imports torch and backpack_core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from backpack_core import View, disable


class _Forward(Module):
    """Calls a module's ``forward`` without its hooks, which have run already."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def output_with(view: View, **parameters: Tensor) -> Tensor:
    """Run the forward pass of a call again, with other parameters.

    The result rounds as the module does: many of these layers compute in single precision for any
    dtype.

    Args:
        view: The call.
        parameters: Tensors to use instead of parameters, by name.

    Returns:
        The output ``[N, *out]``; with a graph to the inputs if quantities are differentiable.

    Raises:
        OverwrittenInputError: An input was changed in place since the forward pass.
    """
    for slot in range(len(view.stored.inputs)):
        view.tensor_input(slot)  # checks whether it was changed
    others = {f"module.{name}": parameter for name, parameter in parameters.items()}
    with disable(), torch.set_grad_enabled(view.is_differentiable):
        output: Tensor = functional_call(
            _Forward(view.module), others, view.args, view.kwargs, tie_weights=False
        )
    return output
