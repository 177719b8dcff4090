"""The debugging probe: checks that samples do not mix between calls. Imports core's contract only."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall
from backpack_core.columns import Columns
from backpack_core.errors import SampleMixingError
from backpack_core.extension import ColumnPropagator
from backpack_core.rules import LossRule


class SampleProbe(ColumnPropagator):
    """Sends a random column of the first sample from every call to the calls before it.

    Where it arrives at another sample too, an operation on the way mixes samples.
    """

    def start(self, rule: LossRule, call: ModuleCall) -> Columns:
        """The same as at any other call: a column at the first sample."""
        return self.arrive(call, None)

    def arrive(self, call: ModuleCall, columns: Columns | None) -> Columns:
        """Check what arrived at a call; send a fresh column on.

        Args:
            call: The call.
            columns: What came from the calls behind it.

        Raises:
            SampleMixingError: It reaches beyond the first sample.
        """
        if columns is not None and bool(columns.mat[:, 1:].any()):
            raise SampleMixingError(
                f"Between {call.path} and the modules that use its output, samples of the batch "
                "influence each other (a gradient of the first sample reaches another one): "
                "per-sample quantities do not exist. Look for an operation over axis 0."
            )
        output = call.outputs[call.output_nr]
        at_input = output.dim() == 0
        like: Tensor = call.inputs[0] if at_input else output
        column = torch.zeros(1, *like.shape, dtype=call.dtype, device=like.device)
        column[:, :1] = torch.rand_like(column[:, :1]) + 0.5
        return Columns.start("probe", column)
