"""What a module computes with another parameter: what its output is linear in is read off that.

Imports torch and backpack_core.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import View, disable
from backpack_core._torch import parametrized


def output_with(view: View, **parameters: Tensor) -> Tensor:
    """Run the forward pass of a call again, with other parameters.

    The result rounds as the module does: many of these layers compute in single precision, whatever
    dtype they are given.

    Args:
        view: The call.
        parameters: What takes the place of parameters, by name.

    Returns:
        The output ``[N, *out]``, a function of the inputs where quantities are differentiable.

    Raises:
        OverwrittenInputError: An input was changed in place since the forward pass.
    """
    for slot in range(len(view.stored.inputs)):
        view.tensor_input(slot)  # which looks whether it was changed
    with (
        disable(),
        torch.set_grad_enabled(view.is_differentiable),
        parametrized(view.module, parameters),
    ):
        output: Tensor = view.module.forward(*view.args, **view.kwargs)
    return output
