"""Products of gains and offsets, ``Σ_s out[v, n, s] ⊙ inp[n, s]``, as in normalisation layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backpack_products.contractions import slices
from backpack_products.factors import FactorProduct
from backpack_products.operations import batch_sum, dense, is_formed
from backpack_products.product import SampleProduct, misfit
from backpack_products.tuning import CACHE


class ScaleProduct(FactorProduct):
    """The product of an elementwise gain or offset: ``Σ_s out[v, n, s] ⊙ inp[n, s]``.

    Attributes:
        out: Columns at the output. Shape ``[V, N, S, D]``.
        inp: What the gain multiplies, ``[N, S, D]``; ``None`` for an offset.
        terms: If ``inp`` is a difference of larger numbers, their norm over all samples; its
            rounding errors are those of these numbers.
    """

    terms: Tensor | None = None

    def __init__(
        self, out: Tensor, inp: Tensor | None, shape: torch.Size, is_own: Tensor | None = None
    ) -> None:
        """Store the factors; ``D`` is the number of entries of the parameter."""
        if out.dim() != 4 or (inp is not None and inp.shape != out.shape[1:]):
            raise misfit(self, "[V, N, S, D] and [N, S, D]", out, inp)
        super().__init__(out.shape[0], out.shape[1], shape, out)
        self.out, self.inp, self.is_own = out, inp, is_own

    @property
    def other(self) -> Tensor | None:
        """What the gain multiplies, ``[N, S, D]``."""
        return self.inp

    def with_factors(
        self, out: Tensor, other: Tensor | None, is_own: Tensor | None
    ) -> ScaleProduct:
        """A product of the same parameter with other factors."""
        return ScaleProduct(out, other, self.shape, is_own)

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples: the sum over positions."""
        out, inp = self.out, self.inp
        if (columns, samples) != (slice(0, self.columns), slice(0, self.samples)):
            out, inp = out[columns, samples], None if inp is None else inp[samples]
        if inp is None:
            total = out.squeeze(2) if out.shape[2] == 1 else out.sum(2)
        else:
            total = _summed(out, inp, (1,))
        return total.reshape(*out.shape[:2], *self.shape)


class TableProduct(ScaleProduct):
    """The product of a table whose rows are added to the positions of every sample.

    Each row is used by one position, as in a table of positions. The last axis of the table holds
    the features of a row.

    Attributes:
        used: The mask of rows that are added, ``[num]``, on the host; ``None`` for all.
    """

    used: Tensor | None = None

    def with_factors(
        self, out: Tensor, other: Tensor | None, is_own: Tensor | None
    ) -> TableProduct:
        """A product of the same rows with other factors."""
        product = TableProduct(out, other, self.shape, is_own)
        product.used = self.used
        return product

    def has_form_of(self, other: SampleProduct) -> bool:
        """Whether another product uses the same rows."""
        mine, its = self.used, getattr(other, "used", None)
        same = mine is its or (mine is not None and its is not None and torch.equal(mine, its))
        return same and super().has_form_of(other)

    def behind(self, push: Callable[[Tensor], Tensor], shape: torch.Size) -> TableProduct | None:
        """The product of a larger table, from which an operation took this one.

        Args:
            push: The transpose of the operation, for gradients ``[B, *self.shape]``.
            shape: Shape of the larger table.

        Returns:
            The product; ``None`` if the operation did not take whole rows.
        """
        rows, dtype = self.shape[:-1], self.like.dtype
        used = torch.ones(rows, device="cpu") if self.used is None else self.used.reshape(rows)
        sent = push(used.to(dtype).unsqueeze(-1).expand(1, *self.shape))[0]
        sent = sent.reshape(-1, shape[-1] if shape else 1)
        whole = sent[:, :1].bool().to(dtype).expand_as(sent)
        if self.shape[-1] != sent.shape[1] or not torch.equal(sent, whole):
            return None
        lead = self.out.shape[:3]
        mat = push(self.out.reshape(lead.numel(), *self.shape)).reshape(*lead, -1)
        product = TableProduct(mat, None, shape, self.is_own)
        product.used = sent[:, 0].bool()
        return product


@batch_sum.register
def batch_sum_scale(product: ScaleProduct) -> Tensor:
    """The sum over samples and positions."""
    if is_formed(product):
        return dense(product).sum(1)
    if product.inp is None:
        total = product.out.sum((1, 2))
    else:
        total = _summed(product.out, product.inp, (0, 1))
    return total.reshape(product.columns, *product.shape)


def _summed(out: Tensor, inp: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``Σ out[v] ⊙ inp`` over some axes, in pieces that fit into the cache: ten times as fast."""
    within = [1 + axis for axis in axes]
    few = max(1, CACHE // max(1, out[:1].nbytes))
    pieces = [(out[some] * inp).sum(within) for some in slices(len(out), few)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
