"""The debugging probe: samples must not mix between calls. Imports core's contract only."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall
from backpack_core.columns import Columns
from backpack_core.errors import SampleMixingError
from backpack_core.extension import ColumnPropagator
from backpack_core.loss_rule import LossRule


class SampleProbe(ColumnPropagator):
    """Sends random columns of some samples from every call to the calls before it.

    Where they arrive at other samples, an operation on the way mixes samples. There are two columns
    for every binary digit of the sample's index: one on the samples that have it, one on the rest.
    Any two samples differ in a digit, so no influence of one on another stays unseen.
    """

    def start(self, rule: LossRule, call: ModuleCall) -> Columns:
        """The same as at any other call."""
        return self.arrive(call, None)

    def arrive(self, call: ModuleCall, columns: Columns | None) -> Columns:
        """Check what arrived at a call; send fresh columns on.

        Args:
            call: The call.
            columns: What came from the calls behind it.

        Raises:
            SampleMixingError: It reaches beyond the samples it was sent from.
        """
        output = call.outputs[call.output_nr]
        like: Tensor = call.inputs[0] if output.dim() == 0 else output
        sent = _masks(like)
        arrived = () if columns is None else columns.blocks.values()
        if any(bool(block.masked_fill(sent, 0).any()) for block in arrived):
            raise SampleMixingError(
                f"Between {call.path} and the modules that use its output, samples of the batch "
                "influence each other (a gradient of one sample reaches another one): per-sample "
                "quantities do not exist. Look for an operation over axis 0."
            )
        # Numbers of its own: quantities by Monte Carlo are the same with and without the probe.
        generator = torch.Generator(like.device).manual_seed(0)
        shape = (len(sent), *like.shape)
        values = torch.rand(shape, generator=generator, dtype=call.dtype, device=like.device)
        return Columns.start("probe", (values + 0.5) * sent)


def _masks(like: Tensor) -> Tensor:
    """Which samples each column is sent from. Shape ``[V, N, 1, ...]``."""
    samples = torch.arange(len(like), device=like.device)
    digits = range(max(1, (len(like) - 1).bit_length()))
    has = torch.stack([(samples >> digit) % 2 == 1 for digit in digits])
    masks = torch.cat([has, ~has])
    return masks.reshape(*masks.shape, *[1] * (like.dim() - 1))
