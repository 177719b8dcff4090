"""Scores of training samples for queries, with the identities of both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from backpack_attribution.disk import write
from backpack_attribution.identities import Identity, checked, listed, place_of
from backpack_core.errors import ShapeError, UsageError

if TYPE_CHECKING:
    import pandas


class Found(NamedTuple):
    """The training samples with the largest scores, for each query.

    Attributes:
        values: Scores, ``[M, k]``, in falling order (rising, if the smallest were asked for).
        identities: Identities of the training samples, ``M`` lists of ``k``.
    """

    values: Tensor
    identities: list[list[Identity]]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of ``N`` training samples for ``M`` queries.

    A positive score says that the training sample lowers the query's loss.

    Attributes:
        values: ``[N, M]``, on the CPU.
        train: Identities of the training samples.
        queries: Identities of the queries.
        method: How the scores were made, in words.
    """

    values: Tensor
    train: list[Identity]
    queries: list[Identity]
    method: str = ""

    def __post_init__(self) -> None:
        """Check that identities and values fit.

        Raises:
            ShapeError: The numbers of identities are not those of rows and columns.
        """
        wanted = (len(self.train), len(self.queries))
        if tuple(self.values.shape) != wanted:
            raise ShapeError(
                f"Scores of {wanted[0]} training samples for {wanted[1]} queries must be "
                f"{list(wanted)}. Got {list(self.values.shape)}."
            )
        checked(self.train, len(self.train))
        checked(self.queries, len(self.queries))

    def __repr__(self) -> str:
        """Sizes and method."""
        return f"<Scores {list(self.values.shape)} {self.method}>"

    def aligned(
        self, train: Sequence[Identity] | None = None, queries: Sequence[Identity] | None = None
    ) -> Scores:
        """The same scores in another order, or some of them.

        Args:
            train: Identities of the rows; default: all, in their order.
            queries: Identities of the columns; default: all, in their order.

        Raises:
            UsageError: An identity is unknown.
        """
        rows, columns = _places(self.train, train), _places(self.queries, queries)
        return Scores(
            self.values[rows][:, columns],
            [self.train[n] for n in rows],
            [self.queries[m] for m in columns],
            self.method,
        )

    def sorted(self) -> Scores:
        """With training samples in the order of their identities, integers before texts."""
        return self.aligned(sorted(self.train, key=place_of))

    def top(self, k: int = 10, largest: bool = True) -> Found:
        """The ``k`` training samples with the largest scores for each query.

        Args:
            k: How many; fewer if there are fewer samples.
            largest: Whether to return the largest, or the smallest.

        Raises:
            UsageError: A score is NaN.
        """
        require_count(k)
        require_order(self.values)
        values, rows = self.values.T.topk(min(k, len(self.train)), dim=1, largest=largest)
        return Found(values, [[self.train[n] for n in row] for row in rows.tolist()])

    def select(self, count: int, by: Literal["mean", "max"] = "mean") -> list[Identity]:
        """The training samples to keep for the queries: those with the largest scores over them.

        Args:
            count: How many.
            by: ``"mean"`` over queries, for one target distribution, or ``"max"``, if every query
                should find its own samples.

        Raises:
            UsageError: ``by`` is unknown, or a score is NaN.
        """
        require_count(count)
        if by not in ("mean", "max"):
            raise UsageError(f'by must be "mean" or "max" (over queries). Got {by!r}.')
        totals = self.values.mean(1) if by == "mean" else self.values.amax(1)
        require_order(totals)
        order = totals.argsort(descending=True, stable=True)[:count]
        return [self.train[n] for n in order.tolist()]

    def to_pandas(self) -> pandas.DataFrame:
        """A frame with training samples as rows and queries as columns.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError(
                "to_pandas() needs pandas, which is not installed. Run "
                "`pip install 'backpack-attribution[pandas]'`."
            ) from error
        return pandas.DataFrame(
            self.values.numpy(),
            index=pandas.Index(self.train, name="train"),
            columns=pandas.Index(self.queries, name="query"),
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically; :meth:`load` reads it."""
        about = {"train": self.train, "queries": self.queries, "method": self.method}
        write(Path(path), {"values": self.values}, "scores", about)

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """Read what :meth:`save` wrote.

        Raises:
            UsageError: The file holds something else.
        """
        with safe_open(path, "pt") as file:
            header: Any = json.loads((file.metadata() or {}).get("backpack_attribution", "{}"))
            if header.get("kind") != "scores":
                raise UsageError(f"{path} does not hold scores. Give a file that save(...) wrote.")
            values = file.get_tensor("values")
        return cls(values, header["train"], header["queries"], header["method"])

    @classmethod
    def cat(cls, parts: Iterable[Scores]) -> Scores:
        """Scores of several parts of the training data, for the same queries.

        Raises:
            UsageError: ``parts`` is empty, or their queries differ.
        """
        parts = [*parts]
        if not parts or any(part.queries != parts[0].queries for part in parts):
            raise UsageError(
                "Scores can be joined if they are for the same queries, in the same order."
            )
        return cls(
            torch.cat([part.values for part in parts]),
            [name for part in parts for name in part.train],
            parts[0].queries,
            parts[0].method,
        )


def _places(known: Sequence[Identity], wanted: Sequence[Identity] | None) -> list[int]:
    if wanted is None:
        return [*range(len(known))]
    places = {name: place for place, name in enumerate(known)}
    wanted = listed(wanted)
    missing = [name for name in wanted if name not in places]
    if missing:
        raise UsageError(
            f"The scores have none for {missing[0]!r} ({len(missing)} of {len(wanted)} are "
            f"missing). Known are {len(known)} identities, such as {[*known[:2]]}."
        )
    return [places[name] for name in wanted]


def require_order(values: Tensor, what: str = "Scores") -> None:
    """Refuse numbers without an order: torch sorts NaN as the largest, and would find it first.

    Args:
        values: The numbers.
        what: What they are, for the message.

    Raises:
        UsageError: A number is NaN.
    """
    if values.isnan().any():
        raise UsageError(
            f"{what} must be numbers, and some are NaN, which has no place in any order: look at "
            "the samples and models that they come from, or leave them out."
        )


def require_count(*counts: Any) -> None:
    """Check numbers of training samples.

    Raises:
        UsageError: A number is not a positive integer.
    """
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(
                f"The number of training samples must be a positive integer. Got {count!r}."
            )
