"""The sum of clipped individual gradients, for differentially private training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import FirstOrderExtension, SampleProduct
from backpack_core.contract.extension import FailMode
from backpack_core.contract.operations import squared_norm, weighted_sum
from backpack_core.errors import UsageError
from backpack_firstorder.norms import in_single, norm, scale_of

Clipping: TypeAlias = Literal["flat", "per_layer"]


@dataclass(frozen=True, eq=False)
class Handle:
    """What the clipped sum of one parameter needs, kept until all norms are known."""

    product: SampleProduct
    norm: Tensor  # [N]


class ClippedSumGrad(FirstOrderExtension):
    """Sum of the individual gradients, each clipped to a norm.

    Stored in ``grad_clipped``, shape ``[*θ]``: ``Σ_n g_n min(1, C / ‖g_n‖)`` with the individual
    gradients ``g_n`` as they arrive: ``∇ ℓ_n`` for a sum and ``1/N ∇ ℓ_n`` for a mean, so that with
    a mean loss a bound ``C`` on the gradients of the samples is written ``max_norm=C/N``.

    ``clipping="flat"`` takes the norm over all parameters of the model that the backward pass
    reaches, ``"per_layer"`` over the parameters of each module by itself (Abadi et al., 2016,
    arXiv:1607.00133, section 3.1; McMahan et al., 2018, arXiv:1710.06963).

    No individual gradient is formed where the layer's rule knows contractions: norms during the
    backward pass, and at its end one more product per layer, of the price of a plain gradient
    (Bu et al., 2023, arXiv:2210.00038). Inputs and output gradients of all layers are kept until
    then. Norms neither overflow nor underflow, and sums are in single precision at least before
    they are stored in that of the parameter.
    """

    savefield = "grad_clipped"
    without_degree = (
        "a norm that is too large by the factor of a scaler is clipped too early. Say what the "
        "loss is multiplied by beforehand, ClippedSumGrad(..., scale=scaler.get_scale()): its "
        "value is that of the loss without the factor."
    )
    over_batches = "sum"
    is_deferred: ClassVar[bool] = True
    needs_every_parameter: ClassVar[bool] = True
    needs = (squared_norm,)  # of which norms are made

    def __init__(
        self,
        max_norm: float,
        clipping: Clipping = "flat",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        scale: float = 1.0,
    ) -> None:
        """Store the settings.

        Args:
            max_norm: The bound ``C``.
            clipping: Over what norms are taken, see the class.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            scale: What the loss was multiplied by, as by a gradient scaler; bound and value are
                those without it.

        Raises:
            UsageError: The bound or the scale is not positive, or the kind of clipping is unknown.
        """
        if not max_norm > 0:
            raise UsageError(f"max_norm must be positive. Got {max_norm!r}.")
        if clipping not in get_args(Clipping):
            raise UsageError(f"clipping must be one of {get_args(Clipping)}. Got {clipping!r}.")
        if not 0 < scale < inf:
            raise UsageError(f"scale must be positive and finite. Got {scale!r}.")
        super().__init__(subsampling, savefield, fail_mode)
        self.max_norm = max_norm
        self.scale = scale
        self.clipping: Clipping = clipping

    def read(self, product: SampleProduct) -> Handle:
        """The norms, and what the sum will need."""
        return Handle(product, norm(product).squeeze(0))

    def finish(self, values: Mapping[Tensor, Handle]) -> dict[Tensor, Tensor]:
        """Weights from the norms, then the weighted sums.

        Args:
            values: A :class:`Handle` for each parameter.

        Returns:
            The clipped sum for each parameter.
        """
        groups: dict[Module | None, list[Tensor]] = {}
        for handle in values.values():
            groups.setdefault(self._group(handle), []).append(handle.norm)
        weights = {key: self._weights(norms) for key, norms in groups.items()}
        return {
            parameter: self._sum(handle, weights[self._group(handle)]).to(parameter.dtype)
            for parameter, handle in values.items()
        }

    def _group(self, handle: Handle) -> Module | None:
        return None if self.clipping == "flat" else handle.product.module

    def _weights(self, norms: list[Tensor]) -> Tensor:
        """``min(1, C / ‖g_n‖)`` for gradients without the scale, and one over it. ``[N]``."""
        dtype = reduce(torch.promote_types, (norm.dtype for norm in norms))
        each = torch.stack([norm.to(dtype) for norm in norms], 1)  # [N, parameters]
        # Squares of large or tiny norms leave the range of single precision.
        scale = scale_of(each, 1)
        total = (each / scale.unsqueeze(-1)).square().sum(1).sqrt()
        # A gradient of zero is left alone, whatever the bound.
        return (self.max_norm * self.scale / scale / total).clamp(max=1.0) / self.scale

    @staticmethod
    def _sum(handle: Handle, weights: Tensor) -> Tensor:
        # A factor may be smaller than any number in half precision, where its product is not.
        product = in_single(handle.product)
        return weighted_sum(product, weights.to(product.like.dtype)[None, None]).squeeze(0)
