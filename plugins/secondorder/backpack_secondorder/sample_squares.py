"""``Σ_v M[v, n]²`` of each sample, from the factors of an affine product."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct, for_weights
from backpack_products.contractions import add_squares, is_empty, pieces, products, squares
from backpack_products.operations import per_sample_square_sum
from backpack_products.recycled import taken_zeros
from backpack_products.rows import Rows, whole


def _of_bias(product: AffineProduct) -> Tensor:
    found = product.shared(squares, product.out)
    assert found is not None
    return product.to_parameter(found)


@for_weights(per_sample_square_sum, _of_bias)
def per_sample_square_sum_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """See :func:`contracted`."""
    out, inp = product.factors(inp)
    return product.to_parameter(contracted(out, inp, product.shared(squares, out)))


def contracted(out: Tensor, inp: Rows, known: Tensor | None = None) -> Tensor:
    """``Σ_v M²`` of columns ``[V, N, S, G, O]`` and inputs ``[N, S, G, I]``: ``[N, G, O, I]``.

    Args:
        out: The columns.
        inp: The inputs.
        known: Their :func:`squares`, if they are known.
    """
    columns, samples, positions, groups, features = out.shape
    if is_empty(out, inp):
        return out.new_zeros(samples, groups, features, inp.shape[3])
    if positions == 1:
        left = squares(out) if known is None else known  # [N, G, O]
        return products(left[None, :, None], whole(inp).square()).squeeze(0)
    if columns == 1 or torch.is_grad_enabled():
        formed = products(out, inp)
        of_each = formed.square() if torch.is_grad_enabled() else formed.square_()
        return of_each.squeeze(0) if columns == 1 else of_each.sum(0)
    result = taken_zeros(out, (samples, groups, features, inp.shape[3]))
    for _, rows, piece in pieces(out, inp):
        for target, sample in zip(result[rows], piece, strict=True):
            add_squares(target, sample.transpose(0, 1))
    return result
