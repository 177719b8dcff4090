"""Per-token gradients: every position of every sample is treated as a sample.

The gradient of a parameter that positions share is a sum over them. A token's share is the term of
its position, at every use of the parameter: the gradient of a copy that only this position uses.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from torch import Tensor

from backpack_core.errors import UnsupportedError, UsageError
from backpack_products.factors import FactorProduct
from backpack_products.product import SampleProduct, SumProduct
from backpack_products.rows import whole

Per: TypeAlias = Literal["sample", "token"]


def as_per(value: Any) -> Per:
    """Check an argument ``per`` and return it.

    Raises:
        UsageError: The value is unknown.
    """
    if value not in get_args(Per):
        raise UsageError(f"per must be one of {get_args(Per)}. Got {value!r}.")
    per: Per = value
    return per


def entries_of(product: SampleProduct, per: Per) -> tuple[SampleProduct, tuple[int, ...]]:
    """The product of samples or of tokens, and the shape ``[N]`` or ``[N, T]`` of its entries.

    Positions are counted along the axes of the module's input (for a convolution, of its output)
    that do not hold samples or features; several axes are counted in the order of memory. Several
    uses of a parameter add up token by token.

    Args:
        product: The product of all samples, ``[1, N, *θ]``.
        per: For ``"token"``, the product returned is ``[1, N · T, *θ]``.

    Raises:
        UnsupportedError: The product is not known as a sum over positions, or the uses of the
            parameter have different numbers of positions.
    """
    if per == "sample":
        return product, (product.samples,)
    entries, tokens = _split(product, product)
    entries.placed_as(product).needs = frozenset()  # others need whole samples
    return entries, (product.samples, tokens)


@singledispatch
def _split(product: Any, of: SampleProduct) -> tuple[SampleProduct, int]:
    """The product of tokens, and how many a sample has."""
    _refuse(
        of,
        "its gradient is not known as a sum over tokens: an operation uses it outside a module "
        "with a rule, or it is computed from others, or its rule forms gradients",
    )


@_split.register
def _split_factors(product: FactorProduct, of: SampleProduct) -> tuple[SampleProduct, int]:
    uses = product.uses or (product.out.shape[2],)
    if product.is_own is not None:
        _refuse(of, "its module received rows that were picked from the samples, and it is not "
                "known which token each row belongs to")  # fmt: skip
    if len({*uses}) > 1:
        _refuse(of, f"its uses have different numbers of positions, {', '.join(map(str, uses))}")
    count, tokens = len(uses), uses[0]

    def cut(factor: Tensor, axis: int) -> Tensor:  # [.., N, U · T, ..] → [.., N · T, U, ..]
        parts = factor.unflatten(axis + 1, (count, tokens))
        split: Tensor = parts.movedim(axis + 1, axis + 2).flatten(axis, axis + 1)
        return split

    other = None if product.other is None else cut(whole(product.other), 0)
    return product.with_factors(cut(product.out, 1), other, None), tokens


@_split.register
def _split_sum(product: SumProduct, of: SampleProduct) -> tuple[SampleProduct, int]:
    parts, counts = zip(*(_split(part, of) for part in product.parts), strict=True)
    if len({*counts}) > 1:
        _refuse(of, f"its uses have different numbers of positions, {', '.join(map(str, counts))}")
    return SumProduct(parts), counts[0]


def _refuse(product: SampleProduct, why: str) -> NoReturn:
    raise UnsupportedError(
        f'per="token" has no meaning for the parameter {product.name!r} of {product.path}: {why}. '
        "Freeze it, leave it out, or take whole samples."
    )
