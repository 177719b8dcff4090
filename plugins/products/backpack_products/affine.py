"""Affine products ``Σ_s out[v, n, s] ⊗ inp[n, s]``, and operations that contract their factors.

Linear layers, convolutions, recurrent cells and attention have such products. Contracting the
factors avoids tensors ``[V, N, *θ]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from backpack_products import contractions
from backpack_products.factors import FactorProduct
from backpack_products.operations import (
    as_formed,
    batch_sum,
    gram,
    is_formed,
    read_together,
    square_sum,
    weighted_sum,
)
from backpack_products.product import DenseProduct, Piece, SampleProduct, misfit
from backpack_products.rows import JoinedRows, Rows
from backpack_products.values import is_same_memory

R = TypeVar("R")


class AffineProduct(FactorProduct):
    """The product of an affine map's weight or bias: ``Σ_s out[v, n, s, g] ⊗ inp[n, s, g]``.

    Attributes:
        out: Columns at the output of the map. Shape ``[V, N, S, G, O]``.
        inp: What the weight multiplies, ``[N, S, G, I]``; ``None`` for a bias.
    """

    def __init__(
        self,
        out: Tensor,
        inp: Rows | None,
        shape: torch.Size,
        arrange: Callable[[Tensor], Tensor] | None = None,
        is_own: Tensor | None = None,
    ) -> None:
        """Store the factors.

        Args:
            out: See the class.
            inp: See the class.
            shape: Shape of the parameter.
            arrange: ``[*lead, G, O, I] ↦ [*lead, *θ]`` (for a bias from ``[*lead, G, O]``), if a
                reshape is not enough.
            is_own: See the class.
        """
        axes, size = out.shape, 1 if inp is None else inp.shape[-1]
        fits = len(axes) == 5 and (inp is None or inp.shape[:-1] == axes[1:4])
        if not fits or (arrange is None and axes[3] * axes[4] * size != shape.numel()):
            of = f", of a parameter {list(shape)}"
            raise misfit(self, f"[V, N, S, G, O] and [N, S, G, I]{of}", out, inp)
        super().__init__(axes[0], axes[1], shape, out)
        self.out, self.inp, self.arrange, self.is_own = out, inp, arrange, is_own

    @property
    def other(self) -> Rows | None:
        """The inputs ``inp``."""
        return self.inp

    def with_factors(self, out: Tensor, other: Any, is_own: Tensor | None) -> AffineProduct:
        """A product of the same parameter with other factors."""
        return AffineProduct(out, other, self.shape, self.arrange, is_own)

    @property
    def positions(self) -> int:
        """The number of shared positions, ``S``."""
        return self.out.shape[2]

    @property
    def sizes(self) -> tuple[int, ...]:
        """``(G, O, I)``, for a bias ``(G, O)``."""
        width = () if self.inp is None else (self.inp.shape[3],)
        return (*self.out.shape[3:], *width)

    @property
    def has_rows(self) -> bool:
        """Whether outputs are rows of the parameter, and inputs its columns.

        If rows are multiplied by a vector (``x @ v``), its entries are inputs.
        """
        is_weight = self.inp is not None and self.arrange is None
        return is_weight and self.sizes[0] * self.sizes[1] == self.shape[:1].numel()

    def factors(self, inp: Rows) -> tuple[Tensor, Rows]:
        """``out`` and ``inp``; as one group if all groups multiply the same input."""
        is_free = self.out.shape[3] > 1 and self.arrange is None
        if is_free and isinstance(inp, Tensor) and not inp.stride(2):
            return self.out.flatten(3).unsqueeze(3), inp[:, :, :1]
        return self.out, inp

    def to_parameter(self, mat: Tensor) -> Tensor:
        """``[*lead, G, O, I] → [*lead, *θ]``, for a bias from ``[*lead, G, O]``."""
        if self.arrange is not None:
            return self.arrange(mat)
        width = 2 if self.inp is None else 3
        return mat.reshape(*mat.shape[:-width], *self.shape)

    def shared(self, function: Callable[[Tensor], R], out: Tensor) -> R | None:
        """A function of the columns at a single position, computed once for weight and bias.

        Args:
            function: The function.
            out: The columns that :meth:`factors` returned. For others than those of the product, or
                for several positions, nothing is shared, and the result is ``None``.
        """
        if out is not self.out or self.positions != 1:
            return None
        known: tuple[Tensor, R] | None = self.column_cache.get(function)
        if known is None or known[0] is not out:
            known = self.column_cache[function] = out, function(out)
        return known[1]

    @property
    def is_in_order(self) -> bool:
        """Whether the entries of the parameter are in the order of the factors."""
        if self.arrange is None:
            return True
        seen = self.arranged_view()
        return self.has_order(lambda numbers: numbers) if seen is None else seen.is_contiguous()

    def arranged_view(self) -> Tensor | None:
        """What the arrangement makes of memory in the layout of the factors, if that is a view.

        Its strides tell the order of the entries without a look at values.
        """
        blank = torch.empty(self.sizes, dtype=torch.int8, device=self.like.device)
        seen = self.to_parameter(blank)
        return seen if blank.numel() and is_same_memory(seen, blank) else None

    def has_order(self, order: Callable[[Tensor], Tensor]) -> bool:
        """Whether the entries have the order of a function; reads values."""
        if self.shape.numel() != torch.Size(self.sizes).numel():
            return False
        numbers = torch.arange(self.shape.numel(), device=self.like.device).reshape(self.sizes)
        return torch.equal(self.to_parameter(numbers).flatten(), order(numbers).flatten())

    def whole(self) -> Tensor:
        """``M`` for all columns and samples."""
        if self.inp is None:
            return self.to_parameter(_over_positions(self.out))
        return self.to_parameter(contractions.products(*self.factors(self.inp)))

    def part(self, columns: slice, samples: slice) -> Tensor:
        """``M`` of some columns and samples, by a batched matrix product."""
        if (columns, samples) == (slice(0, self.columns), slice(0, self.samples)):
            return self.whole()
        if self.inp is None:
            return self.to_parameter(_over_positions(self.out[columns, samples]))
        out, inp = self.factors(self.inp)
        return self.to_parameter(contractions.products(out[columns, samples], inp[samples]))

    def pieces(self) -> Iterator[Piece]:
        """Yields ``M`` piece by piece, all in one buffer."""
        if self.inp is None:
            whole = self.to_parameter(_over_positions(self.out))
            yield slice(0, self.columns), slice(0, self.samples), whole
            return
        pieces = contractions.pieces(*self.factors(self.inp))
        for some, rows, piece in pieces:  # [n, G, v, O, I]
            yield some, rows, self.to_parameter(piece.permute(2, 0, 1, 3, 4))

    def joined(self, others: Sequence[Any]) -> Rows:
        """The inputs of several products, concatenated along positions when they are needed."""
        return JoinedRows(*others)

    def has_form_of(self, other: SampleProduct) -> bool:
        """Whether both arrange the entries of the factors in the parameter in the same order."""
        if not isinstance(other, AffineProduct) or self.sizes != other.sizes:
            return False
        if self.arrange is other.arrange:
            return True
        # On the host, so that no device is waited for.
        entries = torch.arange(prod(self.sizes), device="cpu").reshape(self.sizes)
        return bool(torch.equal(self.to_parameter(entries), other.to_parameter(entries)))


def _over_positions(out: Tensor) -> Tensor:
    """The sum over positions; of a single position a copy, which is faster than a sum."""
    return out.squeeze(2).clone() if out.shape[2] == 1 else out.sum(2)


def reads_formed(product: AffineProduct) -> bool:
    """Whether an operation should read the formed ``M`` instead of the factors.

    For a bias, ``M`` is the sum over positions, which is cheapest to read. For a weight with a
    single position, contracting the factors costs less even if ``M`` has been formed.
    """
    return product.inp is None or (product.out.shape[2] > 1 and is_formed(product))


def _formed(product: AffineProduct) -> DenseProduct:
    """The product with ``M`` formed; for a bias with a single position, a view of the columns."""
    if product.inp is None and product.positions == 1 and not is_formed(product):
        return DenseProduct(product.to_parameter(product.out.squeeze(2)))
    return as_formed(product)


def for_weights(
    operation: Any, of_bias: Callable[..., Any] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Register an operation's version for weights, ``(product, inp, *arguments)``.

    The version contracts both factors. It is not called if :func:`reads_formed` is true (the
    operation's definition then reads ``M``), or if :func:`read_together` computes the result.

    Args:
        operation: The operation.
        of_bias: The version for a bias with a single position; ``None`` for the definition.
    """

    def register(contract: Callable[..., R]) -> Callable[..., R]:
        def version(product: AffineProduct, *arguments: Any) -> R:
            result: R
            if of_bias is not None and product.inp is None and product.positions == 1:
                result = of_bias(product, *arguments)
                return result
            if product.inp is None or reads_formed(product):
                formed = _formed(product)
                known = None if arguments else product.results.get((operation,))
                result = operation(formed, *arguments) if known is None else known
                return result
            if product.out.shape[2] > 1 and operation in product.needs:
                shared = read_together(product).get(operation)
                if shared is not None:
                    return shared  # type: ignore[return-value]
            return contract(product, product.inp, *arguments)

        version.__module__ = contract.__module__
        operation.register(version)
        return contract

    return register


def _square_sum_of_bias(product: AffineProduct) -> Tensor:
    squares = product.shared(contractions.squares, product.out)
    assert squares is not None
    return product.to_parameter(squares.sum(0))


@for_weights(square_sum, _square_sum_of_bias)
def square_sum_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """See :func:`contractions.square_sum`."""
    out, inp = product.factors(inp)
    known = product.shared(contractions.squares, out)
    return product.to_parameter(contractions.square_sum(out, inp, known))


@for_weights(batch_sum)
def batch_sum_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """See :func:`contractions.sums`."""
    return product.to_parameter(contractions.sums(*product.factors(inp)))


@for_weights(gram)
def gram_affine(product: AffineProduct, inp: Rows) -> Tensor:
    """See :func:`contractions.gram`."""
    return contractions.gram(*product.factors(inp))


@for_weights(weighted_sum)
def weighted_sum_affine(product: AffineProduct, inp: Rows, weights: Tensor) -> Tensor:
    """The weight gradient of weighted columns, as autograd computes it."""
    out, inp = product.factors(inp)
    if len(weights) == product.columns == 1:
        each = weights[0, 0, :, None, None, None]
        if isinstance(inp, Tensor) and inp.numel() < out.numel():  # weigh the smaller one
            inp = inp * each
        else:
            out = out * each
    else:
        out = torch.einsum("kvn,vnsgo->knsgo", weights, out)
    return product.to_parameter(contractions.sums(out, inp))
