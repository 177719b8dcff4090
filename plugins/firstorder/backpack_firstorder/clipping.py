"""The sum of clipped individual gradients, for differentially private training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import ClassVar, Literal, TypeAlias, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import memory_budget
from backpack_core.contract.extension import FailMode
from backpack_core.contract.loss import Normaliser
from backpack_core.contract.operation import OpenFunction
from backpack_core.errors import UsageError
from backpack_firstorder import contractions
from backpack_firstorder.own_loss import (
    UNLESS_TOLD,
    OfOwnLosses,
    Told,
    check_normaliser,
    factor_of,
    is_number,
)
from backpack_firstorder.products import norm
from backpack_firstorder.scaled import Norm, stacked, vector_norm
from backpack_firstorder.single import in_single
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.affine import AffineProduct
from backpack_products.merging import Part
from backpack_products.operations import (
    as_formed,
    batch_sum,
    dense,
    is_formed,
    squared_norm,
    weighted_sum,
)
from backpack_products.product import DenseProduct
from backpack_products.tuning import READ, WRITE

Clipping: TypeAlias = Literal["flat", "per_layer"]

# Parameters with at most this many entries are handled together: one kernel for all their norms.
_SMALL = 2**12


@dataclass(frozen=True, eq=False)
class Handle:
    """The data of one parameter's clipped sum, kept until all norms are known.

    Attributes:
        product: The individual gradients.
        module: The module that has the parameter.
        norms: Norms ``[N]``; ``None`` if the parameter is small, and handled together with others.
        is_measured: Whether values may be looked at.
    """

    product: SampleProduct
    module: Module | None
    norms: Norm | None = None
    is_measured: bool = True


class _Kept(threading.local):
    """Counts the individual gradients that are held by the passes of this thread."""

    def __init__(self) -> None:
        self._known: list[ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Count a tensor for as long as it lives."""
        self._known.append(ref(tensor))

    def size(self) -> int:
        """How many bytes are held."""
        self._known = [known for known in self._known if known() is not None]
        return sum(kept.nbytes for known in self._known if (kept := known()) is not None)


_kept = _Kept()


class ClippedSumGrad(FirstOrderExtension):
    """Sum of the gradients of the samples' own losses, each clipped to a norm.

    Stored in ``grad_clipped``, shape ``[*θ]``: ``Σ_n g_n min(1, C / ‖g_n‖)`` with ``g_n = ∇ℓ_n``,
    the gradient of sample ``n``'s own loss. What the loss divides by, its *normaliser* ``W``, is no
    part of it: ``backward()`` is called on ``1/W Σ_n ℓ_n``. So bound and value are the same for a
    mean and for a sum, no sample adds more than ``C`` to the value, and values of several batches
    and processes add up. The value has not the scale of ``.grad``: for a step, divide it by the
    (expected) number of samples.

    ``ℓ_n`` is what the extended loss module gives for the sample alone with ``reduction="sum"``. If
    a sample has several rows or elements at the loss, it is their sum, with their class weights and
    without ignored targets: ``MSELoss()`` on ``[N, D]`` has ``W = N D``, and ``ℓ_n`` is a sum of
    ``D`` squares; ``CrossEntropyLoss()`` on ``[N T, C]`` has the number of tokens that count as
    ``W``. For another ``ℓ_n``, give ``normaliser``: with ``normaliser=N``, it is ``N`` times what
    the sample adds to the loss, such as the mean over its tokens.

    Several losses have to divide by one number: of ``1/W (a Σ_n ℓ_n + b Σ_n m_n)``, the sample's
    own loss is ``a ℓ_n + b m_n``. Otherwise this raises, and so it does if the loss is a function,
    has ``reduction="none"``, or stands beside other terms: then ``normaliser`` has to be given.
    Numbers that a script multiplies or divides the loss by (of a gradient scaler, or the number of
    micro-batches) count as a part of ``ℓ_n``, unless ``scale`` names them.

    ``clipping="flat"`` takes the norm over all parameters of the model that the backward pass
    reaches, ``"per_layer"`` over the parameters of each module by itself (Abadi et al., 2016,
    arXiv:1607.00133, section 3.1; McMahan et al., 2018, arXiv:1710.06963). A parameter counts with
    the module whose layer rule reads it: all of ``nn.MultiheadAttention``, ``out_proj`` included,
    is clipped together. Without a rule, it counts with the module that owns it; if several modules
    use it, with the one that runs first.

    Norms are computed during the backward pass, sums at its end. Each layer chooses the cheaper of
    two ways, by multiply-adds and memory reads (Bu et al., 2022, arXiv:2205.10683, section 4):

    - keep inputs and output gradients, take norms from Gram matrices over positions or from
      individual gradients that are dropped again, and form the weighted sum at the end, at the cost
      of a plain gradient;
    - keep the individual gradients and weight them, as far as they fit into the memory budget.

    Norms neither overflow nor underflow. Sums are computed in single precision at least, and stored
    in the precision of the parameter.
    """

    savefield = "grad_clipped"
    without_degree = (
        "a norm that is too large by the factor of a scaler is clipped too early. Say what the "
        "loss is multiplied by beforehand, ClippedSumGrad(..., scale=scaler.get_scale()): its "
        "value is that of the loss without the factor."
    )
    unless_told = UNLESS_TOLD
    over_batches = OfOwnLosses({"": Part("sum", degree=0)})
    is_deferred = True
    needs_every_parameter: ClassVar[bool] = True
    needs = (squared_norm,)  # norms are made of these

    def __init__(
        self,
        max_norm: float,
        clipping: Clipping = "flat",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        scale: float = 1.0,
        normaliser: Told = "loss",
    ) -> None:
        """Store the settings.

        Args:
            max_norm: The bound ``C`` on ``‖∇ℓ_n‖``.
            clipping: Over what norms are taken, see the class.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            scale: What the loss was multiplied by besides (by a gradient scaler, for example); the
                bound and the value are those of the loss without it.
            normaliser: What the loss divides by, ``W``: the number of samples for a mean over them,
                ``None`` for a sum; default: what the extended losses say.

        Raises:
            UsageError: The bound, the scale or the normaliser is not positive, or the kind of
                clipping is unknown.
        """
        if not is_number(max_norm) or not max_norm > 0:
            raise UsageError(f"max_norm must be a positive number. Got {max_norm!r}.")
        if clipping not in get_args(Clipping):
            raise UsageError(f"clipping must be one of {get_args(Clipping)}. Got {clipping!r}.")
        if not is_number(scale) or not 0 < scale < inf:
            raise UsageError(f"scale must be a positive and finite number. Got {scale!r}.")
        super().__init__(subsampling, savefield, fail_mode)
        self.max_norm = max_norm
        self.normaliser = check_normaliser(normaliser)
        self.scale = scale
        self.clipping: Clipping = clipping

    def read(self, product: SampleProduct) -> Handle:
        """The norms, and the product that the sum will weight."""
        single, is_recorded = in_single(product), torch.is_grad_enabled()
        if not is_recorded and not is_formed(single):
            self._form(single)
        # Keep the product only: what it was computed from can be freed.
        kept = as_formed(single) if is_formed(single) else single
        is_there = isinstance(kept, DenseProduct) and kept.values is not None
        if is_there and prod(product.shape) <= _SMALL and not is_recorded:
            return Handle(kept, product.module, None, product.is_measured)
        norms = norm(single).map(lambda numbers: numbers.squeeze(0))
        return Handle(kept, product.module, norms, product.is_measured)

    def _form(self, product: SampleProduct) -> None:
        """Form and keep individual gradients, where that is cheaper and they fit into memory."""
        size = product.samples * prod(product.shape) * product.like.element_size()
        if size <= product.like.nbytes or (
            is_cheaper_kept(product) and size <= memory_budget() - _kept.size()
        ):
            _kept.add(dense(product))

    @property
    def needs_normalisers(self) -> bool:  # type: ignore[override]
        """Whether the extended losses have to say what they divide by."""
        return isinstance(self.normaliser, str)

    def finish(
        self, values: Mapping[Tensor, Handle], normalisers: Sequence[Normaliser] = ()
    ) -> dict[Tensor, Tensor]:
        """Weights from the norms, then the weighted sums.

        Args:
            values: A :class:`Handle` for each parameter.
            normalisers: What each of the losses divides by.

        Returns:
            The clipped sum for each parameter.

        Raises:
            UsageError: The losses divide by several numbers.
        """
        is_measured = all(handle.is_measured for handle in values.values())
        factor = factor_of(self.scale, self.normaliser, normalisers, is_measured)
        groups: dict[Module | None, dict[Tensor, Handle]] = {}
        for parameter, handle in values.items():
            key = None if self.clipping == "flat" else handle.module
            groups.setdefault(key, {})[parameter] = handle
        found: dict[Tensor, Tensor] = {}
        for handles in groups.values():
            found.update(self._sums(handles, factor))
        return {parameter: found[parameter].to(parameter.dtype) for parameter in values}

    def _sums(
        self, handles: Mapping[Tensor, Handle], factor: float | Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The weighted sums of parameters that are clipped together."""
        small = [parameter for parameter, handle in handles.items() if handle.norms is None]
        table = torch.cat([_rows(handles[p].product) for p in small], 1) if small else None
        weights = self._weights([*handles.values()], table, factor)
        for parameter, handle in handles.items():
            if handle.norms is not None:  # a weight may underflow in half precision
                some = weights.to(handle.product.like.dtype)[None, None]
                yield parameter, weighted_sum(handle.product, some).squeeze(0)
        if table is not None:
            total = weights.to(table.dtype) @ table
            parts = total.split([parameter.numel() for parameter in small])
            for parameter, part in zip(small, parts, strict=True):
                yield parameter, part.view(parameter.shape).clone()

    def _weights(
        self, handles: Sequence[Handle], table: Tensor | None, factor: float | Tensor
    ) -> Tensor:
        """``min(1, C / ‖g_n‖) / factor``, where ``g_n`` is without the factor. Shape ``[N]``."""
        known = [handle.norms for handle in handles if handle.norms is not None]
        known += [] if table is None else [vector_norm(table, 1)]
        quotients = stacked(known).total(0).dividing(self.max_norm * factor)
        # A gradient of zero has weight one.
        return quotients.clamp(max=1.0) / factor


def _rows(product: SampleProduct) -> Tensor:
    """Individual gradients as rows, ``[N, P]``."""
    assert isinstance(product, DenseProduct)
    assert product.values is not None
    return product.values.reshape(product.samples, prod(product.shape))


@OpenFunction
def is_cheaper_kept(product: SampleProduct) -> bool:
    """Whether keeping individual gradients costs less than forming the weighted sum anew."""
    return False


@is_cheaper_kept.register
def is_cheaper_kept_affine(product: AffineProduct) -> bool:
    """By multiply-adds and reads per entry of the product; forming the sum costs ``S`` of them."""
    inp, positions = product.inp, product.positions
    if inp is None or positions == 1:
        return False
    features, size = product.out.shape[4], inp.shape[3]
    by_gram = contractions.gram_count(positions, features, size) / (features * size)
    by_products = positions + READ
    is_summed = batch_sum in product.needs
    if is_summed:
        by_gram, by_products = by_gram + positions, by_products + READ
    kept = by_products + READ + WRITE
    return kept < positions + min(by_gram, by_products)
