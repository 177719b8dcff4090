"""Jacobians of the model's output in parameters, sample by sample, and their inner products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor

from backpack_core import LossRule, View
from backpack_core.contract.extension import FailMode
from backpack_core.errors import UnsupportedError
from backpack_products import ColumnPropagator, Columns, SampleProduct, SecondOrderExtension
from backpack_products.extensions import as_subsampling
from backpack_products.merging import OverBatches, Part, Refused
from backpack_products.operations import dense, gram
from backpack_products.values import is_symbolic
from backpack_secondorder.in_chunks import Rows, joined, rows_of, stored
from backpack_secondorder.residual import unit_vectors
from backpack_secondorder.square_root import as_chunk_size


@dataclass(frozen=True)
class OutputRows(ColumnPropagator):
    """A unit vector for each number that a sample has at the input of an extended loss.

    At a parameter they become the rows of the Jacobian. They do not depend on the loss or its
    scale: the loss only says where the model ends.

    Attributes:
        subsampling: The samples that take part; ``None`` for all.
    """

    needs_gradient: ClassVar[bool] = False

    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Columns:
        """``[C, N, *in]`` for an input ``[N, *in]`` of ``C`` numbers each."""
        return Columns.start("output", unit_vectors(view.input))

    def split_positions(self, quantity: Columns, owners: Tensor | None, samples: int) -> Columns:
        """The numbers of a sample's first entry come first, as they do in memory.

        Raises:
            UnsupportedError: It is not known which entries a sample has.
        """
        if owners is None and not is_symbolic(quantity.mat):
            raise UnsupportedError(
                "It is not known which sample each row at the loss belongs to, so the numbers of a "
                "sample have no order. Keep positions on an axis behind that of the samples, such "
                "as [N, C, T] for CrossEntropyLoss, or [N, T, C] for SumOutputs."
            )
        split = super().split_positions(quantity, owners, samples)
        numbers = len(quantity.mat)
        return Columns.start("output", rearrange(split.mat, "(c k) ... -> (k c) ...", c=numbers))


class _OfOutput(SecondOrderExtension):
    """An extension of one output's Jacobian, for any loss."""

    degree = 0

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        super().__init__(OutputRows(as_subsampling(subsampling)), savefield, fail_mode)

    def one_output(self, product: SampleProduct) -> SampleProduct:
        """Check that a product belongs to a single loss, and return it.

        Raises:
            UnsupportedError: Several extended losses depend on the parameter.
        """
        if len(product.roots) > 1:
            raise UnsupportedError(
                f"{type(self).__name__} belongs to one output, but {len(product.roots)} extended "
                f"losses depend on {product.name!r} of {product.path}. Go backward from one of "
                "them, or join the outputs for one loss: SumOutputs()(torch.cat([a, b], 1))."
            )
        return product


class Jacobians(_OfOutput):
    """Jacobians of the model's output, sample by sample.

    Stored in ``jacobians``, shape ``[N, C, *θ]``: ``∂f_c(x_n) / ∂θ`` for the output ``f`` that an
    extended loss receives, with the ``C`` numbers of a sample in the order of memory. They do not
    depend on the loss or its scale. Without a loss, use
    :class:`~backpack_secondorder.outputs.SumOutputs`.

    If a sample has several rows at the loss (``logits.flatten(0, 1)``), its numbers are those of
    its first row, then of the next. Where samples have different numbers of rows, the last ones of
    a sample with fewer are zero. The pass raises an error if it is not known which rows a sample
    has.

    Rows go through the net in chunks, so a pass takes little more memory than the result. For
    products with a Jacobian that is not formed, take
    :class:`~backpack_secondorder.jacobian_products.JMP`; for inner products of rows, :class:`NTK`.
    """

    savefield = "jacobians"
    over_batches = OverBatches({"": Part("concatenate")})
    columns_add = True
    per_sample = True
    needs = (dense,)

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        chunk_size: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            chunk_size: How many rows of a sample to carry at once; default: as many as fit into the
                memory budget.
        """
        super().__init__(subsampling, savefield, fail_mode)
        self.chunk_size = as_chunk_size(chunk_size)

    def read(self, product: SampleProduct) -> Tensor | Rows:
        """``M``, samples first; with rows in front in memory, each is copied as a whole."""
        return _turned(rows_of(self.one_output(product)))

    def as_stored(self, value: Tensor | Rows, parameter: Tensor) -> Tensor | Rows:
        """The rows in the dtype of results."""
        return stored(super().as_stored(value, parameter), self, parameter)

    def combine(self, first: Tensor | Rows, second: Tensor | Rows) -> Tensor | Rows:
        """One after the other."""
        return _turned(joined(_turned(first), _turned(second)))


def _turned(value: Tensor | Rows) -> Tensor | Rows:
    """Axes 0 and 1 exchanged; rows of a chunk keep rows in front."""
    return value.transpose(0, 1) if isinstance(value, Tensor) else value


class NTK(_OfOutput):
    """The tangent kernel ``J Jᵀ`` of the batch, a block for each parameter.

    Stored in ``ntk``, shape ``[N, C, N, C]``: ``⟨∂f_c(x_n) / ∂θ, ∂f_d(x_m) / ∂θ⟩`` for the output
    ``f`` that an extended loss receives. Summed over parameters, it is the empirical neural tangent
    kernel of the net (Jacot et al., 2018, arXiv:1806.07572); as a matrix it is
    ``ntk.reshape(N * C, N * C)``. It does not depend on the loss or its scale.

    The Jacobian is not formed if factors are cheaper: a linear layer has ``(G Gᵀ) ⊙ (X Xᵀ)`` with
    its inputs ``X`` and the rows ``G`` at its output. For the kernel between two sets of points,
    go through both as one batch.
    """

    savefield = "ntk"
    over_batches = Refused(
        "no batch's kernel has entries between samples of two batches: go through both as one "
        "batch, or take Jacobians, which combines batches, and multiply."
    )
    needs = (gram,)

    def read(self, product: SampleProduct) -> Tensor:
        """``⟨M[c, n], M[d, m]⟩``, samples first."""
        return gram(self.one_output(product)).permute(1, 0, 3, 2)
