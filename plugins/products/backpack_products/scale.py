"""Products of gains and offsets, ``Σ_s out[v, n, s] ⊙ inp[n, s]``.

As in normalisations; their sums need no ``[V, N, *θ]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.factors import FactorProduct
from backpack_products.operations import batch_sum, dense, is_formed
from backpack_products.product import misfit


class ScaleProduct(FactorProduct):
    """``Σ_s out[v, n, s] ⊙ inp[n, s]``: of a gain, or an offset, that acts elementwise.

    Attributes:
        out: Columns at the output. Shape ``[V, N, S, D]``.
        inp: What the gain multiplies, ``[N, S, D]``; ``None`` for an offset.
    """

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
        """What the gain multiplies."""
        return self.inp

    def with_factors(
        self, out: Tensor, other: Tensor | None, is_own: Tensor | None
    ) -> ScaleProduct:
        """Of the same gain."""
        return ScaleProduct(out, other, self.shape, is_own)

    def part(self, columns: slice, samples: slice) -> Tensor:
        """The sum over positions."""
        out, inp = self.out, self.inp
        if (columns, samples) != (slice(0, self.columns), slice(0, self.samples)):
            out, inp = out[columns, samples], None if inp is None else inp[samples]
        found = out.sum(2) if inp is None else _summed(out, inp, (1,))
        return found.reshape(*out.shape[:2], *self.shape)


@batch_sum.register
def batch_sum_scale(product: ScaleProduct) -> Tensor:
    """The sum over samples and positions alike."""
    if is_formed(product):
        return dense(product).sum(1)
    if product.inp is None:
        total = product.out.sum((1, 2))
    else:
        total = _summed(product.out, product.inp, (0, 1))
    return total.reshape(product.columns, *product.shape)


def _summed(out: Tensor, inp: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``Σ out[v] ⊙ inp`` over some axes, column by column: at once it takes ten times as long."""
    if out.shape[0] < 2:
        return (out * inp).sum([1 + axis for axis in axes])
    return torch.stack([(column * inp).sum(axes) for column in out])
