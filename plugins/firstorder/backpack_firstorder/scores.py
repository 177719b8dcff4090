"""Inner products of individual gradients with queries, in one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_core.errors import UnsupportedError, UsageError, nearest
from backpack_firstorder.blocks import Block, pairs_by_block, see_blocks
from backpack_firstorder.divisors import Divisors, divided_by, see_divisors
from backpack_firstorder.names import name_of
from backpack_firstorder.pairs import Pairing, as_pairing, pairs
from backpack_firstorder.sample_gradients import SampleGradients, as_gradients
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension
from backpack_firstorder.tokens import Per, as_per, entries_of
from backpack_products import SampleProduct

Query: TypeAlias = "SampleGradients | Tensor | None"
Queries: TypeAlias = "Mapping[str, Query] | Callable[[str, torch.Size], Query]"


class _Met(NamedTuple):
    """What one parameter adds to the scores; ``None`` if it is left out."""

    name: str
    inner: Tensor | None


class GradInner(SquaresExtension):
    """Inner products of the individual gradients with those of queries.

    Stored in ``grad_inner``, shape ``[N, M]``: ``⟨g_n, q_m⟩`` with the gradients ``g_n`` of
    :class:`BatchGrad` and the queries' ``q_m``, at least in single precision. After the backward
    pass, the extension's attribute ``scores``, ``[N, M]``, has the sum over all parameters: the
    score of every training sample for every query. Nothing else is kept. With ``per="token"``, both
    are ``[N, T, M]``: a sample's score is the sum over its tokens, see :class:`BatchGrad`.

    If ``blocks`` asks for scores by head, by expert, or by other blocks of a parameter along one of
    its axes, its ``grad_inner`` is ``[N, M, B]``. The sum over blocks is the parameter's part.

    Queries are what ``BatchGrad(form="product")`` left in an earlier pass, or tensors ``[M, *θ]``,
    such as preconditioned gradients. A low rank makes them cheaper (``SampleGradients.low_rank``).
    Each pair of forms takes the way with fewer multiply-adds, and only some gradients are formed at
    a time. Weights that are tied or used several times are exact, cross terms included.

    Example:
        >>> with backpack(BatchGrad(form="product")):
        ...     query_loss.backward()
        >>> queries = {n: p.grad_batch for n, p in model.named_parameters()}
        >>> inner = GradInner(queries)
        >>> with backpack(inner, gradient="none"):
        ...     train_loss.backward()
        >>> inner.scores  # [N, M]

    Attributes:
        scores: The sums of the last backward pass; ``None`` before the first.
    """

    savefield = "grad_inner"
    degree = 1
    over_batches = "concatenate"
    is_deferred = True
    needs_every_parameter = True

    def __init__(
        self,
        queries: Queries,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        divisors: Divisors | None = None,
        per: Per = "sample",
        form: Pairing | None = None,
        blocks: Mapping[str, Block] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            queries: Gradients, or directions ``[M, *θ]``, by parameter name; ``None`` leaves a
                parameter out. Or a function of name and shape ``[*θ]`` that returns them when they
                are needed, for instance from a disk.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`Extension`.
            divisors: What the individual gradients, not the queries, are divided by first, by
                parameter name, see :func:`~backpack_firstorder.divisors_of`.
            per: ``"sample"``, or ``"token"`` for the share of each position.
            form: See :meth:`SampleGradients.inner <backpack_firstorder.SampleGradients.inner>`.
            blocks: ``(axis, B)`` by parameter name: that axis has ``B`` consecutive blocks of one
                length.

        Raises:
            UsageError: ``queries`` is empty, parameters have different numbers of queries, or the
                form is unknown.
        """
        super().__init__(subsampling, savefield, fail_mode)
        if not callable(queries):
            _see_queries(queries)
        self.queries, self.divisors, self.per = queries, see_divisors(divisors), as_per(per)
        self.form, self.blocks = as_pairing(form), see_blocks(blocks)
        self.scores: Tensor | None = None

    def read(self, product: SampleProduct) -> _Met:
        """``⟨g_n, q_m⟩``, with the name of the parameter."""
        name = name_of(product)
        query = self._query(name, product.shape)
        if query is None:
            return _Met(name, None)
        entries, lead = entries_of(product, self.per)
        single = in_single(entries)
        met = as_gradients(query, single.shape).to(single.like.device, single.like.dtype)
        found = self._pairs(divided_by(self.divisors, single, name), met.product(), name)
        return _Met(name, found.reshape(*lead, *found.shape[1:]))

    def _pairs(self, product: SampleProduct, query: SampleProduct, name: str) -> Tensor:
        """``[N, M]``, or ``[N, M, B]`` for a parameter with blocks."""
        if name in self.blocks:
            return pairs_by_block(product, query, name, self.blocks[name], self.form)
        return pairs(product, query, self.form)

    def _query(self, name: str, shape: torch.Size) -> Query:
        if callable(self.queries):
            return self.queries(name, shape)
        if name not in self.queries:
            near = nearest(name, self.queries) or "."
            raise UsageError(
                f"The parameter {name!r} has no query{near} Give one for every trained parameter, "
                "or None to leave it out of the scores."
            )
        return self.queries[name]

    def finish(
        self, values: Mapping[Tensor, _Met], normalisers: Sequence[Any]
    ) -> dict[Tensor, Tensor]:
        """The sum over parameters."""
        met = {value.name for value in values.values()}
        given = {} if callable(self.queries) else self.queries
        unmet = [n for n, q in given.items() if q is not None and n not in met]
        if unmet:
            raise UsageError(
                f"The backward pass met no trained parameter {unmet[0]!r}, but the queries have "
                "it: the scores would lack its part. Use the names of model.named_parameters(). "
                "If it is frozen, or the loss does not depend on it, give None as its query."
            )
        strange = next((name for name in self.blocks if name not in met), None)
        if strange is not None:
            raise UsageError(
                f"The backward pass met no trained parameter {strange!r}, but blocks asks for it"
                f"{nearest(strange, met) or '.'} Use the names of model.named_parameters()."
            )
        counts = {v.name: v.inner.shape[1] for v in values.values() if v.inner is not None}
        _see_tokens(counts, self.per)
        scores = {
            parameter: self.as_stored(value.inner, parameter)
            for parameter, value in values.items()
            if value.inner is not None
        }
        totals = [
            value.sum(-1) if values[parameter].name in self.blocks else value
            for parameter, value in scores.items()
        ]
        self.scores = reduce(torch.add, totals) if totals else None
        return scores


def _see_tokens(counts: Mapping[str, int], per: Per) -> None:
    """Compare the numbers of tokens of parameters whose scores are added up.

    Raises:
        UnsupportedError: The numbers differ.
    """
    if per == "token" and len({*counts.values()}) > 1:
        first = next(iter(counts.items()))
        other = next(item for item in counts.items() if item[1] != first[1])
        raise UnsupportedError(
            f"Scores by token are sums over parameters, but {first[0]!r} has {first[1]} positions "
            f"and {other[0]!r} has {other[1]}, as behind a pooling. Leave one of them out: give "
            "None as its query."
        )


def _see_queries(queries: Any) -> None:
    """Check that all parameters have the same number of queries.

    Raises:
        UsageError: There are no queries, or parameters have different numbers of them.
    """
    if not isinstance(queries, Mapping) or all(query is None for query in queries.values()):
        raise UsageError(
            "GradInner takes queries by parameter name, as {name: p.grad_batch for name, p in "
            f"model.named_parameters()}}. Got {queries!r:.80}."
        )
    counts = {name: len(query) for name, query in queries.items() if query is not None}
    if len({*counts.values()}) > 1:
        raise UsageError(f"Every parameter needs the same number of queries. Got {counts}.")
