"""The sum of clipped individual gradients, for differentially private training."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce, singledispatch
from math import inf, prod
from numbers import Real
from typing import ClassVar, Literal, TypeAlias, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import FirstOrderExtension, SampleProduct, memory_budget
from backpack_core.contract.affine import AffineProduct
from backpack_core.contract.extension import FailMode
from backpack_core.contract.operations import (
    as_formed,
    batch_sum,
    dense,
    is_formed,
    squared_norm,
    weighted_sum,
)
from backpack_core.errors import UsageError
from backpack_core.tuning import READ, WRITE
from backpack_firstorder.norms import in_single, norm, scale_of

Clipping: TypeAlias = Literal["flat", "per_layer"]


@dataclass(frozen=True, eq=False)
class Handle:
    """What the clipped sum of one parameter needs, kept until all norms are known."""

    product: SampleProduct
    norm: Tensor  # [N]
    module: Module | None


class _Kept(threading.local):
    """Individual gradients that passes of this thread keep, as long as these do."""

    def __init__(self) -> None:
        self._known: list[ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Note one."""
        self._known.append(ref(tensor))

    def size(self) -> int:
        """How many bytes there are."""
        self._known = [known for known in self._known if known() is not None]
        return sum(kept.nbytes for known in self._known if (kept := known()) is not None)


_kept = _Kept()


class ClippedSumGrad(FirstOrderExtension):
    """Sum of the individual gradients, each clipped to a norm.

    Stored in ``grad_clipped``, shape ``[*θ]``: ``Σ_n g_n min(1, C / ‖g_n‖)`` with the individual
    gradients ``g_n`` as they arrive: ``∇ ℓ_n`` for a sum and ``1/N ∇ ℓ_n`` for a mean, so that with
    a mean loss a bound ``C`` on the gradients of the samples is written ``max_norm=C/N``.

    ``clipping="flat"`` takes the norm over all parameters of the model that the backward pass
    reaches, ``"per_layer"`` over the parameters of each module by itself (Abadi et al., 2016,
    arXiv:1607.00133, section 3.1; McMahan et al., 2018, arXiv:1710.06963).

    Norms are read during the backward pass, sums at its end. Each layer takes what needs fewer
    multiply-adds and readings (Bu et al., 2022, arXiv:2205.10683, section 4): norms from Gram
    matrices over positions or from products that are not kept, and at the end one more product, of
    the price of a plain gradient; or products that are kept and weighted, as far as those of all
    layers fit into the memory budget. Where they are not kept, inputs and output gradients are.
    Norms neither overflow nor underflow, and sums are in single precision at least before they are
    stored in that of the parameter.
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
        if not _is_number(max_norm) or not max_norm > 0:
            raise UsageError(f"max_norm must be a positive number. Got {max_norm!r}.")
        if clipping not in get_args(Clipping):
            raise UsageError(f"clipping must be one of {get_args(Clipping)}. Got {clipping!r}.")
        if not _is_number(scale) or not 0 < scale < inf:
            raise UsageError(f"scale must be a positive and finite number. Got {scale!r}.")
        super().__init__(subsampling, savefield, fail_mode)
        self.max_norm = max_norm
        self.scale = scale
        self.clipping: Clipping = clipping

    def read(self, product: SampleProduct) -> Handle:
        """The norms, and what the sum will need."""
        single = in_single(product)
        if not torch.is_grad_enabled() and not is_formed(single):
            self._form(single)
        norms = norm(product).squeeze(0)
        # What the weights will multiply, and nothing of what it was made of.
        kept = as_formed(single) if is_formed(single) else single
        return Handle(kept, norms, product.module)

    def _form(self, product: SampleProduct) -> None:
        """Form individual gradients to be kept, where that costs less and there is room."""
        size = product.samples * prod(product.shape) * product.like.element_size()
        room = memory_budget() - _kept.size()
        if size <= product.like.nbytes or (size <= room and is_cheaper_kept(product)):
            _kept.add(dense(product))

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
        return None if self.clipping == "flat" else handle.module

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
        product = handle.product  # in single precision: a factor may be tiny where the sum is not
        return weighted_sum(product, weights.to(product.like.dtype)[None, None]).squeeze(0)


def _is_number(value: object) -> bool:
    """Whether an argument is a number, be it in a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


@singledispatch
def is_cheaper_kept(product: SampleProduct) -> bool:
    """Whether to keep individual gradients costs less than to form weighted sums by themselves."""
    return False


@is_cheaper_kept.register
def is_cheaper_kept_affine(product: AffineProduct) -> bool:
    """By multiply-adds and readings for an entry of the product, which the sum costs ``S``."""
    inp, positions = product.inp, product.positions
    if inp is None or positions == 1:
        return False
    features, size = product.out.shape[4], inp.shape[3]
    by_gram = positions**2 * (features + READ + size) / (features * size)
    by_products = positions + READ
    is_summed = batch_sum in product.needs
    if is_summed:
        by_gram, by_products = by_gram + positions, by_products + READ
    kept = by_products + READ + WRITE
    return kept < positions + min(by_gram, by_products)
