"""Kronecker-factored approximations of the generalised Gauss-Newton matrix from its square root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar, get_args

from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_core.errors import UsageError
from backpack_products import SampleProduct, SecondOrderExtension
from backpack_products.operations import square_sum
from backpack_products.tuning import memory_budget
from backpack_secondorder import lookup_factors  # noqa: F401 - registers its operations
from backpack_secondorder.both_ways import add_columns
from backpack_secondorder.factors import (
    StructureError,
    WeightSharing,
    block,
    kronecker_factors,
    weight_of,
)
from backpack_secondorder.kronecker import KroneckerFactors, diagonal_matrix
from backpack_secondorder.matrix import CurvatureMatrix, ParameterOrder
from backpack_secondorder.merging import OF_FACTORS
from backpack_secondorder.square_root import ExactExtension, SampledExtension

Matrix = TypeVar("Matrix", bound=CurvatureMatrix)
Fallback: TypeAlias = Literal["block", "diagonal"]
StructureMode: TypeAlias = Literal[FailMode, Fallback]


class MatrixExtension(SecondOrderExtension):
    """An extension that stores a matrix in Kronecker form.

    If a parameter has none (no layer rule, or uses of several forms), ``fail_mode`` may also be

    - ``"block"``: the block of the generalised Gauss-Newton matrix itself, ``[P, P]``, exact;
    - ``"diagonal"``: its diagonal, exact, a vector ``[P]``.

    The stored matrix then has the block or diagonal as its only factor, and ``structure`` names it.
    Parameters of modules without a rule are read where operations use them, as with
    ``"autodiff"``.

    Attributes:
        fallback: ``"block"``, ``"diagonal"`` or ``None``.
    """

    fallback: Fallback | None = None

    def factors(self, product: SampleProduct, sharing: WeightSharing) -> KroneckerFactors:
        """The factors; without factors the block or its diagonal, as ``fallback`` says.

        Raises:
            StructureError: The parameter has no factors, and the fallback is ``None``.
        """
        try:
            return kronecker_factors(product, sharing)
        except StructureError:
            if self.fallback is None:
                raise
        return self.without_factors(product)

    def without_factors(self, product: SampleProduct) -> KroneckerFactors:
        """What ``fallback`` says: the block, or its diagonal."""
        if self.fallback == "block":
            return KroneckerFactors([block(product)], ParameterOrder.of(product))
        return diagonal_matrix(square_sum(product))

    def as_stored(self, value: Matrix, parameter: Tensor) -> Matrix:
        """Cast to the dtype of the parameter, which may differ from the columns' under autocast."""
        dtype = self.dtype_for(parameter)
        is_stored_so = all(tensor.dtype is dtype for tensor in value.tensors().values())
        return value if is_stored_so else value.to(dtype)


class FactorsExtension(MatrixExtension):
    """The base of :class:`KFAC` (sampled columns) and :class:`KFLR` (exact columns)."""

    columns_add = True
    columns_mix = True
    needs = (kronecker_factors,)
    weight_sharing: WeightSharing

    def read(self, product: SampleProduct) -> KroneckerFactors:
        """The factors; for a part of the uses, with what would be stored without factors."""
        factors = self.factors(product, self.weight_sharing)
        read = KroneckerFactors(factors, factors.order, weight_of(product), factors.parts)
        if product.is_part and self.fallback is not None and self._fits(product):
            read.instead = self.without_factors(product)
        return read

    def _fits(self, product: SampleProduct) -> bool:
        """Whether the memory budget has room for values that may turn out to be useless."""
        size = product.shape.numel() ** (2 if self.fallback == "block" else 1)
        return size * product.new_zeros(0).element_size() <= memory_budget()

    def as_stored(self, value: Matrix, parameter: Tensor) -> Matrix:
        """Cast the factors, with the parts to which later chunks of columns are added."""
        factors = super().as_stored(value, parameter)
        if isinstance(factors, KroneckerFactors) and isinstance(value, KroneckerFactors):
            factors.parts = [part.to(factors[0].dtype) for part in value.parts]
            if value.instead is not None:
                factors.instead = value.instead.to(factors[0].dtype)
        return factors

    def combine(self, first: KroneckerFactors, second: KroneckerFactors) -> KroneckerFactors | None:
        """Add the factors of two chunks of columns, which enter only one factor of each use.

        Chunks may reach different uses, which have no common factors. Then the fallback values are
        added. Without them, the parameter may be left out: the last chunk reads all uses.

        Raises:
            StructureError: The fallback is ``None``, or does not fit into memory; and ``fail_mode``
                leaves nothing out.
        """
        try:
            found = add_columns(first, second)
        except StructureError:
            if self.fallback is not None:
                return add_columns(first.instead or first, second.instead or second)
            if self.fail_mode in ("warning", "silent"):
                return None
            raise
        if first.instead is not None and second.instead is not None:
            found.instead = add_columns(first.instead, second.instead)
        return found


class KFAC(FactorsExtension, SampledExtension):
    """Kronecker-factored curvature with a sampled loss Hessian.

    Stored in ``kfac``, a :class:`~backpack_secondorder.kronecker.KroneckerFactors`. It is a list of
    matrices, and their Kronecker product approximates the block of the generalised Gauss-Newton
    matrix:

    - weights of affine layers (``Linear``, convolutions): ``[B, A]``, of shapes ``[O, O]`` and
      ``[I, I]``. ``B = Σ_v Σ_n g gᵀ`` from the columns at the layer's output, with the scale of the
      loss (``1/N`` for a mean); ``A`` is an average over samples.
    - tables (``Embedding``): the same for inputs that are unit vectors, so ``A`` is diagonal, a
      vector ``[num]``; features come first, as for other weights.
    - tables that are added to all samples (``h + self.positions``, ``[1, T, D]``, or rows of one):
      the same, since every position looks up one row. Features lie on the last axis.
    - tables that are looked up and also give logits (tied embeddings): the factors of both uses as
      below, with the diagonal in the rows. No numbers are stored for pairs of rows of a
      vocabulary.
    - biases, and vectors that a layer is linear in (``LayerNorm``): ``[B]``, the block itself.

    With positions ``s`` that share the weight (pixels, tokens), ``weight_sharing`` chooses between
    three forms, which are equal for one position:

    - ``"kfc"``: ``A = 1/N Σ_n Σ_s x xᵀ`` and ``B`` from ``Σ_s g``, the block of the bias. For
      convolutions this is Grosse and Martens (2016), eq. 32, with their ``Γ`` multiplied by the
      number of positions.
    - ``"expand"``: ``A = 1/(N S) Σ_n Σ_s x xᵀ`` and ``B = Σ_v Σ_n Σ_s g gᵀ``: positions are treated
      like samples (Eschenhagen et al., 2023, eq. 19).
    - ``"reduce"``: ``A`` from the mean of ``x`` over positions, ``B`` from ``Σ_s g`` (eq. 22).

    If several modules, or several calls of one module, use a weight, the positions of all of them
    share it (Eschenhagen et al. treat every use as one more shared axis). Some uses may be
    transposed, as in a penalty on gradients. Then the columns ``b`` are at their inputs, and the
    data ``a`` at their outputs. With factors ``[B, A]`` of the plain uses and ``[B', A']`` of the
    transposed ones, the weight has ``[B + w A', A + B' / w]``. Here ``w`` is the ``weight`` of
    :class:`~backpack_secondorder.kronecker.KroneckerFactors`: the number of samples times the
    factor in front of each sample's loss (of several losses, the largest). This is derived in
    :func:`~backpack_secondorder.both_ways.both_ways`. Like other factors, it scales as the loss and
    joins over batches.

    A layer with ``G > 1`` groups has factors ``[G, O, O]`` and ``[G, I, I]``. Blocks between groups
    are left out. For fully connected layers, see Martens and Grosse (2015).
    """

    savefield = "kfac"
    degree = 1
    over_batches = OF_FACTORS

    def __init__(
        self,
        mc_samples: int = 1,
        weight_sharing: WeightSharing = "kfc",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: StructureMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            mc_samples: Number of samples from the model's likelihood for each datum.
            weight_sharing: ``"kfc"``, ``"expand"`` or ``"reduce"``; see the class.
            subsampling: Indices of the samples to take; default: all. ``B`` sums over them with the
                scale of the whole batch, ``A`` averages over them.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: For parameters without structure, ``"warning"`` and ``"silent"`` leave them
                out, ``"block"`` and ``"diagonal"`` store these; see :class:`MatrixExtension`.
        """
        self.fallback, mode = split_mode(fail_mode)
        super().__init__(mc_samples, subsampling, savefield, mode)
        self.weight_sharing = as_weight_sharing(weight_sharing)


class KFLR(FactorsExtension, ExactExtension):
    """Kronecker-factored curvature with the exact loss Hessian (low rank: a column per output).

    Stored in ``kflr``: the expectation of ``kfac`` of :class:`KFAC`. For a batch of one sample and
    a layer with one position, it is the block itself. Botev et al. (2017), section 3.3.
    """

    savefield = "kflr"
    degree = 1
    over_batches = OF_FACTORS

    def __init__(
        self,
        weight_sharing: WeightSharing = "kfc",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: StructureMode = "autodiff",
        chunk_size: int | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Store the settings.

        Args:
            weight_sharing: ``"kfc"``, ``"expand"`` or ``"reduce"``; see :class:`KFAC`.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: For parameters without structure, ``"warning"`` and ``"silent"`` leave them
                out, ``"block"`` and ``"diagonal"`` store these; see :class:`MatrixExtension`.
            chunk_size: How many columns to carry at once; default: by the memory budget.
            tolerance: Share of the trace of the loss Hessian that may be left out; see
                :class:`~backpack_secondorder.square_root.ExactExtension`.
        """
        self.fallback, mode = split_mode(fail_mode)
        super().__init__(subsampling, savefield, mode, chunk_size, tolerance)
        self.weight_sharing = as_weight_sharing(weight_sharing)


def split_mode(fail_mode: StructureMode) -> tuple[Fallback | None, FailMode]:
    """Split ``fail_mode`` into the fallback of this plugin, and the ``fail_mode`` of the core."""
    if fail_mode == "block" or fail_mode == "diagonal":
        return fail_mode, "autodiff"
    if fail_mode not in (modes := get_args(StructureMode)):
        raise UsageError(f"fail_mode must be one of {modes}. Got {fail_mode!r}.")
    return None, fail_mode


def as_weight_sharing(value: WeightSharing) -> WeightSharing:
    """Check the setting, and return it.

    Raises:
        UsageError: The setting is unknown.
    """
    if value not in get_args(WeightSharing):
        known = ", ".join(map(repr, get_args(WeightSharing)))
        raise UsageError(f"weight_sharing must be one of {known}. Got {value!r}.")
    return value
