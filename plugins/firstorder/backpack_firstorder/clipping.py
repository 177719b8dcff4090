"""The sum of clipped individual gradients, for differentially private training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.extension import FailMode
from backpack_core.contract.rules import Normaliser
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
from backpack_products.open_functions import OpenFunction
from backpack_products.operations import (
    as_formed,
    batch_sum,
    dense,
    is_formed,
    squared_norm,
    weighted_sum,
)
from backpack_products.owned import OwnedAffine
from backpack_products.product import DenseProduct
from backpack_products.tuning import READ, WRITE

Clipping: TypeAlias = Literal["flat", "per_layer"]
# From a parameter and the module that reads it by a rule to a key: parameters with the same key
# are clipped together.
GroupOf: TypeAlias = Callable[[Tensor, Module | None], Hashable]
# From the norms ``[N]`` of each group to the weights ``[N]`` of the samples' gradients.
WeightsOf: TypeAlias = Callable[[Mapping[Hashable, Tensor]], Mapping[Hashable, Tensor]]

# Parameters with at most this many entries are handled together: one kernel for all their norms.
_SMALL = 2**12


@dataclass(frozen=True, eq=False)
class Handle:
    """The data of one parameter's clipped sum, kept until all norms are known.

    Attributes:
        product: The individual gradients.
        module: The module that has the parameter.
        norms: Norms ``[N]``; ``None`` if the parameter is small and handled together with others.
        is_measured: Whether values may be looked at.
    """

    product: SampleProduct
    module: Module | None
    norms: Norm | None = None
    is_measured: bool = True


class ClippedSumGrad(FirstOrderExtension):
    """Sum of the gradients of the samples' own losses, each clipped to a norm.

    Stored in ``grad_clipped``, shape ``[*θ]``: ``Σ_n g_n min(1, C / ‖g_n‖)`` with ``g_n = ∇ℓ_n``,
    the gradient of sample ``n``'s own loss. ``backward()`` is called on ``1/W Σ_n ℓ_n``. The
    *normaliser* ``W``, which the loss divides by, is not a part of ``ℓ_n``. So bound and value are
    the same for a mean and for a sum. Each sample adds at most ``C`` to the value, and values of
    several batches and processes add up. The value does not have the scale of ``.grad``: for a
    step, divide it by the (expected) number of samples.

    ``ℓ_n`` is what the extended loss module gives for this sample with ``reduction="sum"``. If
    a sample has several rows or elements at the loss, it is their sum, with class weights and
    without ignored targets. ``MSELoss()`` on ``[N, D]`` has ``W = N D``, and ``ℓ_n`` is a sum of
    ``D`` squares. For ``CrossEntropyLoss()`` on ``[N T, C]``, ``W`` is the number of tokens that
    count. For another ``ℓ_n``, pass ``normaliser``. With ``normaliser=N``, ``ℓ_n`` is ``N`` times
    what the sample adds to the loss, such as the mean over its tokens.

    Several losses must divide by one number: for ``1/W (a Σ_n ℓ_n + b Σ_n m_n)``, the sample's own
    loss is ``a ℓ_n + b m_n``. Otherwise the pass raises an error. It also raises one if the loss is
    a function, has ``reduction="none"``, or is one of several terms. Then pass ``normaliser``. If a
    script multiplies or divides the loss by a number (of a gradient scaler, or of micro-batches),
    the number counts as a part of ``ℓ_n``, unless ``scale`` names it.

    ``clipping="flat"`` takes the norm over all parameters of the model that the backward pass
    reaches. ``"per_layer"`` takes it over the parameters of each module (Abadi et al., 2016,
    arXiv:1607.00133, section 3.1; McMahan et al., 2018, arXiv:1710.06963). A parameter counts with
    the module whose layer rule reads it: all of ``nn.MultiheadAttention``, ``out_proj`` included,
    is clipped together. Without a rule, it counts with the module that owns it. If several modules
    use it, it counts with the one that runs first.

    Norms are computed during the backward pass, sums at its end. Each layer chooses the cheaper of
    two ways, by multiply-adds and memory reads (Bu et al., 2022, arXiv:2205.10683, section 4):

    - Keep inputs and output gradients. Take norms from Gram matrices over positions, or from
      individual gradients that are dropped again. Form the weighted sum at the end, at the cost of
      a plain gradient.
    - Keep the individual gradients and weight them, if they take no more memory than that.

    Norms are computed so that their squares do not overflow or underflow. Sums are computed at
    least in single precision, and stored in the precision of the parameter. They are not numbers if
    a gradient, or the factor that it is clipped by, is out of the range of this precision.
    """

    savefield = "grad_clipped"
    without_degree = (
        "a scaler's factor enlarges norms, so they are clipped too early. Say beforehand what the "
        "loss is multiplied by, ClippedSumGrad(..., scale=scaler.get_scale()): its value is that "
        "of the loss without the factor."
    )
    unless_told = UNLESS_TOLD
    over_batches = OfOwnLosses({"": Part("sum", degree=0)})
    is_deferred = True
    needs_every_parameter: ClassVar[bool] = True
    needs = (squared_norm,)  # norms are made of these

    def __init__(
        self,
        max_norm: float,
        clipping: Clipping | GroupOf = "flat",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        scale: float = 1.0,
        normaliser: Told = "loss",
        weights: WeightsOf | None = None,
    ) -> None:
        """Store the settings.

        Args:
            max_norm: The bound ``C`` on ``‖∇ℓ_n‖``.
            clipping: Over which parameters norms are taken, see the class. Or a function of a
                parameter and the module that it counts with; it returns the same value for all
                parameters that are clipped together.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            scale: What else the loss was multiplied by (by a gradient scaler, for example); the
                bound and the value are those of the loss without it.
            normaliser: What the loss divides by, ``W``: the number of samples for a mean over them,
                ``None`` for a sum; default: what the extended losses say.
            weights: What gradients are multiplied by, instead of ``min(1, C / ‖g_n‖)``. A function
                from a mapping to a mapping, each with the group's value of ``clipping`` as key
                (``None`` for ``"flat"``): from norms ``‖g_n‖`` to weights, ``[N]`` each.

        Raises:
            UsageError: The bound, the scale or the normaliser is not positive, or the kind of
                clipping is unknown.
        """
        if not is_number(max_norm) or not max_norm > 0:
            raise UsageError(f"max_norm must be a positive number. Got {max_norm!r}.")
        if not callable(clipping) and clipping not in get_args(Clipping):
            raise UsageError(
                f"clipping must be one of {get_args(Clipping)}, or a function of a parameter and "
                f"its module. Got {clipping!r}."
            )
        if weights is not None and not callable(weights):
            raise UsageError(f"weights must be a function of the norms. Got {weights!r}.")
        if not is_number(scale) or not 0 < scale < inf:
            raise UsageError(f"scale must be a positive and finite number. Got {scale!r}.")
        super().__init__(subsampling, savefield, fail_mode)
        self.max_norm = max_norm
        self.normaliser = check_normaliser(normaliser)
        self.scale = scale
        self.clipping: Clipping | GroupOf = clipping
        self.weights = weights

    def read(self, product: SampleProduct) -> Handle:
        """The norms, and the product that the sum will weight."""
        single, is_recorded = in_single(product), torch.is_grad_enabled()
        is_small = single.samples * prod(single.shape) <= single.like.numel()
        if not (is_recorded or is_formed(single)) and (is_small or is_cheaper_kept(single)):
            dense(single)
        # Keep the product only: what it was computed from can be freed.
        kept = as_formed(single) if is_formed(single) else single
        is_there = isinstance(kept, DenseProduct) and kept.values is not None
        if is_there and prod(product.shape) <= _SMALL and not is_recorded:
            return Handle(kept, product.module, None, product.is_measured)
        norms = norm(single).map(lambda numbers: numbers.squeeze(0))
        return Handle(kept, product.module, norms, product.is_measured)

    @property
    def needs_normalisers(self) -> bool:  # type: ignore[override]
        """Whether the extended losses must say what they divide by."""
        return isinstance(self.normaliser, str)

    def finish(
        self, values: Mapping[Tensor, Handle], normalisers: Sequence[Normaliser] = ()
    ) -> dict[Tensor, Any]:
        """Weights from the norms, then the weighted sums.

        Args:
            values: A :class:`Handle` for each parameter.
            normalisers: What each of the losses divides by.

        Returns:
            The clipped sum for each parameter.

        Raises:
            UsageError: The losses divide by several numbers.
        """
        return self.clipped(values, normalisers)[0]

    def clipped(
        self, values: Mapping[Tensor, Handle], normalisers: Sequence[Normaliser]
    ) -> tuple[dict[Tensor, Tensor], dict[Hashable, Tensor]]:
        """The clipped sums, and the norms that they were clipped by.

        Args:
            values: See :meth:`finish`.
            normalisers: See :meth:`finish`.

        Returns:
            The sum for each parameter, ``[*θ]``; and by the key of parameters that are clipped
            together, the norms ``‖g_n‖``, ``[N]``.

        Raises:
            UsageError: The losses divide by several numbers.
        """
        is_measured = all(handle.is_measured for handle in values.values())
        factor = factor_of(self.scale, self.normaliser, normalisers, is_measured)
        groups: dict[Hashable, dict[Tensor, Handle]] = {}
        for parameter, handle in values.items():
            key = self.group(parameter, handle.module)
            groups.setdefault(key, {})[parameter] = handle
        tables = {key: _table(handles) for key, handles in groups.items()}
        norms = {key: _norms(groups[key], table) / factor for key, table in tables.items()}
        weights = (self.weights or self._clip)(norms)
        sums: dict[Tensor, Tensor] = {}
        for key, handles in groups.items():
            # Not zero: a sample whose norm overflows would be left out without a word.
            each = torch.where(norms[key].isfinite(), weights[key] / factor, torch.nan)
            sums.update(_sums(handles, tables[key], each))
        return {parameter: sums[parameter].to(parameter.dtype) for parameter in values}, norms

    def group(self, parameter: Tensor, module: Module | None) -> Hashable:
        """The key of the parameters that are clipped together with this one."""
        if callable(self.clipping):
            return self.clipping(parameter, module)
        return None if self.clipping == "flat" else module

    def _clip(self, norms: Mapping[Hashable, Tensor]) -> Mapping[Hashable, Tensor]:
        """The usual weights, ``min(1, C / ‖g_n‖)``. A gradient of zero has weight one."""
        return {key: (self.max_norm / norm).clamp(max=1.0) for key, norm in norms.items()}


def _sums(
    handles: Mapping[Tensor, Handle], table: Tensor | None, weights: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The weighted sums of parameters that are clipped together."""
    for parameter, handle in handles.items():
        if handle.norms is not None:
            some = _cast(weights, handle.product.like.dtype)[None, None]
            yield parameter, weighted_sum(handle.product, some).squeeze(0)
    if table is not None:
        small = [parameter for parameter, handle in handles.items() if handle.norms is None]
        total = _cast(weights, table.dtype) @ table
        parts = total.split([parameter.numel() for parameter in small])
        for parameter, part in zip(small, parts, strict=True):
            yield parameter, part.view(parameter.shape).clone()


def _cast(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in the precision of the gradients; not a number where one underflows.

    Such a weight keeps few digits. It may be rounded up, and the sample would exceed the bound.
    """
    is_lost = (weights != 0) & (weights.abs() < torch.finfo(dtype).tiny)
    return weights.masked_fill(is_lost, torch.nan).to(dtype)


def _table(handles: Mapping[Tensor, Handle]) -> Tensor | None:
    """The individual gradients of all small parameters side by side, ``[N, P]``."""
    small = [handle.product for handle in handles.values() if handle.norms is None]
    return torch.cat([_rows(product) for product in small], 1) if small else None


def _norms(handles: Mapping[Tensor, Handle], table: Tensor | None) -> Tensor:
    """The norms of parameters that are clipped together, with the factor. Shape ``[N]``."""
    known = [handle.norms for handle in handles.values() if handle.norms is not None]
    known += [] if table is None else [vector_norm(table, 1)]
    return stacked(known).total(0).value()


def _rows(product: SampleProduct) -> Tensor:
    """Individual gradients as rows, ``[N, P]``."""
    assert isinstance(product, DenseProduct)
    assert product.values is not None
    return product.values.reshape(product.samples, prod(product.shape))


@OpenFunction
def is_cheaper_kept(product: SampleProduct) -> bool:
    """Whether keeping individual gradients costs less than forming the weighted sum again.

    It must take less time, and at most the memory of what the sum would be formed from.
    """
    return False


@is_cheaper_kept.register
def is_cheaper_kept_affine(product: AffineProduct) -> bool:
    """By multiply-adds and reads per entry of the product; forming the sum costs ``S`` of them."""
    return _is_cheaper_kept(product, product, product.positions)


@is_cheaper_kept.register
def is_cheaper_kept_owned(product: OwnedAffine) -> bool:
    """The same for samples with several rows: a sample has the positions of all its rows."""
    rows = product.of_rows
    positions = rows.positions * rows.samples / max(1, product.samples)
    return _is_cheaper_kept(product, rows, positions)


def _is_cheaper_kept(product: AffineProduct, factors: AffineProduct, positions: float) -> bool:
    inp, out = factors.inp, factors.out
    if inp is None or product.samples * prod(product.shape) > out.numel() + prod(inp.shape):
        return False
    features, size = out.shape[4], inp.shape[3]
    by_gram = contractions.gram_count(positions, features, size) / (features * size)
    by_products = positions + READ
    is_summed = batch_sum in product.needs
    if is_summed:
        by_gram, by_products = by_gram + positions, by_products + READ
    kept = by_products + READ + WRITE
    return kept < positions + min(by_gram, by_products)
