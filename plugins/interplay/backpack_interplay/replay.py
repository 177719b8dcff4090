"""Computes the output of a call again, as a function of its inputs and parameters.

``create_graph=True`` needs the output with its graph. A call cannot store it, since the graph owns
the call: that would be a reference cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backpack_core.errors import OverwrittenInputError
from backpack_core.record.nested import iter_tensors

if TYPE_CHECKING:
    from backpack_core.record.view import View


def output_again(view: View, stored: Tensor) -> Tensor:
    """The output of a call with a graph, by running the module's forward again.

    Args:
        view: The call, with all samples.
        stored: The output, detached.

    Raises:
        OverwrittenInputError: An input was changed in place, or the output differs this time.
    """
    io = view.values

    def run() -> Tensor:
        for slot in range(len(io.inputs)):
            view.tensor_input(slot)  # raises if it was changed
        result = view.module.forward(*io.args, **io.kwargs)
        return list(iter_tensors(result))[view.index]

    again = view.once(f"attached {view.index}", run)
    if again.shape != stored.shape or not torch.allclose(again, stored):
        raise OverwrittenInputError(
            f"{view.path}: create_graph=True needs its output as a function of its input, but "
            "its forward pass gives another output when it runs again."
        )
    return again
