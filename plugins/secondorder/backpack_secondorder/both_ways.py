"""Kronecker factors of a weight with plain and transposed uses.

Examples are a penalty on gradients, and tied embeddings: rows of a table are looked up, and its
transpose gives logits. Importing this file registers its operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from backpack_products import AffineProduct, LookupProduct, SampleProduct
from backpack_products.product import SumProduct
from backpack_secondorder.factors import (
    StructureError,
    WeightSharing,
    kept_input_covariance,
    kronecker_factors,
    parameter_order,
    weight_of,
)
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import Number


@kronecker_factors.register
def kronecker_factors_sum(product: SumProduct, sharing: WeightSharing = "kfc") -> KroneckerFactors:
    """The factors of a weight with plain and transposed uses; other sums have none."""
    parts: list[KroneckerFactors] = []
    is_table = any(isinstance(part, LookupProduct) for part in product.parts)
    factors = factors_of_table if is_table else kronecker_factors
    if len(product.shape) > 1:
        with suppress(StructureError):  # the error of the sum explains it
            parts += [factors(part.placed_as(product), sharing) for part in product.parts]
    found = both_ways(parts, weight_of(product))
    return kronecker_factors.definition(product, sharing) if found is None else found


def factors_of_table(product: SampleProduct, sharing: WeightSharing) -> KroneckerFactors:
    """Factors of a use of a table that is looked up elsewhere: diagonal in the rows.

    At a look-up, that factor is diagonal anyway. As a matrix that gives logits, the table has the
    covariance of all pairs of logits, ``[num, num]``; only its diagonal is taken. So the block
    between the entries of one row stays in Kronecker form, and no numbers are stored for pairs of
    rows of a vocabulary.
    """
    if not isinstance(product, AffineProduct) or product.inp is None or product.sizes[0] > 1:
        factors = kronecker_factors(product, sharing)
        return factors.with_factors([factors[0], *map(_diagonal, factors[1:])])
    order = parameter_order(product)
    if order.positions is not None:  # a transposed use has the rows at its inputs
        outer, inner = kronecker_factors(product, sharing)
        return KroneckerFactors([outer, _diagonal(inner)], order)
    out = product.out if sharing == "expand" else product.out.sum(2, keepdim=True)
    logits = out.square().sum((0, 1, 2, 3))
    return KroneckerFactors([logits, kept_input_covariance(product, sharing)], order)


def both_ways(parts: Sequence[KroneckerFactors], weight: Number) -> KroneckerFactors | None:
    """Combine the factors of plain uses, ``[B, A]``, and of transposed uses, ``[B', A']``.

    ``F₁ = B + w A'`` and ``F₂ = A + B' / w``, with ``w = Σ_n s`` the weight of the averages. At a
    transposed use the columns ``b`` are at the weight's inputs, and the data ``a`` at its outputs,
    so ``B' = Σ_v Σ_n b bᵀ`` is ``[I, I]`` and ``A' = 1/N Σ_n a aᵀ`` is ``[O, O]``.

    Derived here: every use of a weight adds what stands at its outputs to one factor, and what
    stands at its inputs to the other (for uses in one order: Eschenhagen et al., 2023). The first
    factor is a sum with the samples' weights ``s``, ``w A' = Σ_n s a aᵀ``. The second one is an
    average, ``B' / w``, of columns that have the scale ``s`` already. So a multiple of the loss
    multiplies ``B``, ``B'`` and ``w``, and thus only ``F₁``; factors of disjoint sets of samples
    are joined like all others. ``F₁ ⊗ F₂`` is the sum of ``B ⊗ A + A' ⊗ B'``, the factors of both
    orders, and the positive semi-definite ``B ⊗ B' / w + w A' ⊗ A``. For uses in one order, this
    second term has products of one's ``B`` with the other's ``A`` in the same way. Positions are
    shared within an order, by the setting ``sharing``.

    Args:
        parts: The factors of each order.
        weight: ``w``.

    Returns:
        Factors that hold ``parts``; ``None`` unless these are two parts, of a matrix and of its
        transpose.
    """
    if len(parts) != 2 or any(len(part) != 2 or part.groups > 1 for part in parts):
        return None
    here, there = (_numbers(part) for part in parts)
    if not torch.equal(here, there.T):
        return None
    # The parameter's own order comes first. For a single row or column, both orders are the same.
    ranks = [(n.flatten()[:2].tolist(), len(n) != parts[0].order.shape[0]) for n in (here, there)]
    is_first = ranks[0] <= ranks[1]
    straight, turned = parts if is_first else parts[::-1]
    (outer, inner), (columns, data) = straight, turned
    share = 1 / torch.as_tensor(weight, device=outer.device)
    share = torch.where(share.isfinite(), share, 0.0).to(outer.dtype)  # zero without samples
    factors = [_added(outer, weight * data), _added(inner, share * columns)]
    return KroneckerFactors(factors, straight.order, weight, parts)


def add_columns(first: KroneckerFactors, second: KroneckerFactors) -> KroneckerFactors:
    """Combine the factors of two chunks of columns: ``B`` is summed, for each order.

    ``A`` is the same in both, unless the first chunk did not reach all uses of the parameter.

    Raises:
        StructureError: Together, the chunks reach uses that have no common factors.
    """
    parts = [*(second.parts or [second])]
    for part in first.parts or [first]:
        place = next((k for k, known in enumerate(parts) if _is_like(part, known)), None)
        if place is None:
            parts.append(part)
        else:
            known = parts[place]
            parts[place] = known.with_factors([part[0] + known[0], *known[1:]])
    weight = _larger(first.weight, second.weight)
    combined = parts[0].with_weight(weight) if len(parts) == 1 else both_ways(parts, weight)
    if combined is None:
        forms = " and ".join(sorted({part.structure for part in parts}))
        raise StructureError(
            f"Chunks of columns reach different uses of {second.order}, and their factors "
            f"({forms}) have different forms. Let all columns travel at once (chunk_size=, or "
            "set_memory_budget of backpack_core), freeze the parameter, or use DiagGGNExact, "
            "which needs no structure."
        )
    return combined


def _numbers(factors: KroneckerFactors) -> Tensor:
    """The number of the flattened parameter's entry at each ``[o, i]`` of the factors."""
    positions, (_, *sizes) = factors.order.positions, factors.sizes
    if positions is None:
        positions = torch.arange(factors.order.shape.numel(), device=factors[0].device)
    return positions.reshape(sizes)


def _is_like(part: KroneckerFactors, other: KroneckerFactors) -> bool:
    """Whether two factors belong to uses in the same order."""
    kinds = [[part.is_diagonal(f) for f in part], [other.is_diagonal(f) for f in other]]
    return kinds[0] == kinds[1] and part.sizes == other.sizes and part.order.equals(other.order)


def _larger(first: Number, second: Number) -> Number:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second)
    return first if first > second else second


def _added(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two factors; a diagonal one may be a vector."""
    if first.dim() == second.dim():
        return first + second
    full = [torch.diag_embed(f) if f.dim() == 1 else f for f in (first, second)]
    return full[0] + full[1]


def _diagonal(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.diagonal()
