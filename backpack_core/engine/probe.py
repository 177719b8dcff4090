"""The debugging probe: samples must not mix between calls."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.columns import Columns
from backpack_core.contract.loss import LossRule
from backpack_core.contract.propagator import ColumnPropagator
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import SampleMixingError
from backpack_core.record.view import View


class SampleProbe(ColumnPropagator):
    """Sends random columns of some samples from every call to the calls before it.

    Where they arrive at other samples, an operation on the way mixes samples. There are two columns
    for every binary digit of the sample's index: one on the samples that have it, one on the rest.
    Any two samples differ in a digit, so no influence of one on another stays unseen.
    """

    def start(self, rule: LossRule, view: View) -> Columns:
        """The same as at any other call."""
        return self.arrive(rule, view, None)

    def arrive(self, rule: LayerRule, view: View, waiting: Columns | None) -> Columns:
        """Check what arrived at a call; send fresh columns on.

        Raises:
            SampleMixingError: It reaches beyond the samples it was sent from.
        """
        output = view.stored.outputs[view.index].movedim(view.axis, 0)
        like: Tensor = view.stored.inputs[0] if rule.is_loss else output
        sent = _masks(like)
        arrived = () if waiting is None else waiting.blocks.values()
        if any(bool(block.masked_fill(sent, 0).any()) for block in arrived):
            raise SampleMixingError(
                f"Between {view.path} and the modules that use its output, samples of the batch "
                "influence each other (a gradient of one sample reaches another one): per-sample "
                "quantities do not exist. Look for an operation over axis 0."
            )
        # Numbers of its own: quantities by Monte Carlo are the same with and without the probe.
        generator = torch.Generator(like.device).manual_seed(0)
        shape = (len(sent), *like.shape)
        values = torch.rand(shape, generator=generator, dtype=view.dtype, device=like.device)
        return Columns.start("probe", (values + 0.5) * sent)


def _masks(like: Tensor) -> Tensor:
    """Which samples each column is sent from. Shape ``[V, N, 1, ...]``."""
    samples = torch.arange(len(like), device=like.device)
    digits = range(max(1, (len(like) - 1).bit_length()))
    has = torch.stack([(samples >> digit) % 2 == 1 for digit in digits])
    masks = torch.cat([has, ~has])
    return masks.reshape(*masks.shape, *[1] * (like.dim() - 1))
