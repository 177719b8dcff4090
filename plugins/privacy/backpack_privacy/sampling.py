"""Which samples are in a batch: drawn at random, as the accounting supposes."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from backpack_core.errors import UsageError
from backpack_privacy.randomness import Source

Sampling: TypeAlias = Literal["poisson", "shuffled"]


@dataclass(frozen=True)
class Draw:
    """What is known about a batch, or a part of one.

    Attributes:
        rows: Indices of records in the data set, in order.
        units: How many samples (or users) these belong to.
        is_last: Whether the step is taken after it.
        owners: With users: the user of each row, counted from zero; shape ``[R]``.

    Rows without a unit only run the model, and do not count.
    """

    rows: Sequence[int]
    units: int
    is_last: bool = True
    owners: Tensor | None = None


class Sampler(ABC):
    """Draws units (samples or users) for one epoch.

    Attributes:
        units: The number of units, over all processes.
        expected: How many of them a batch has on average, over all processes.
        steps: How many batches an epoch has.
        rate: For the accounting, see :class:`~backpack_privacy.accounting.Spent`.
    """

    rate: float | None = None

    def __init__(self, units: int, expected: float, rank: int = 0, world: int = 1) -> None:
        """Store the sizes, and the share of a process: every ``world``-th unit."""
        self.units, self.expected = units, expected
        self.steps = max(1, round(units / expected))
        self._rank, self._world = rank, world

    @abstractmethod
    def epoch(self, source: Source) -> Iterator[list[int]]:
        """The units of each batch that belong to this process."""


class Poisson(Sampler):
    """Each unit is in a batch with the same probability, independently of the others.

    So batches differ in size, and may be empty. The amplification of privacy by sampling supposes
    this (Abadi et al., 2016).
    """

    def __init__(self, units: int, expected: float, rank: int = 0, world: int = 1) -> None:
        """See the base class."""
        super().__init__(units, expected, rank, world)
        self.rate = expected / units

    def epoch(self, source: Source) -> Iterator[list[int]]:
        """See the base class."""
        for _ in range(self.steps):
            # All units are drawn, so that with one seed the ranks' shares make up one batch.
            drawn = (source.uniform(self.units) < self.expected / self.units).nonzero().flatten()
            yield drawn[drawn % self._world == self._rank].tolist()


class Shuffled(Sampler):
    """Each unit is in one batch of every epoch, in random order.

    The accounting treats the order as known, so an epoch costs one Gaussian mechanism. Shuffling
    adds less privacy than Poisson sampling (Chua et al., 2024, arXiv:2403.17673).
    """

    def __init__(self, units: int, expected: float, rank: int = 0, world: int = 1) -> None:
        """See the base class; the size of batches follows from their number."""
        super().__init__(units, expected, rank, world)
        self.expected = units / self.steps

    def epoch(self, source: Source) -> Iterator[list[int]]:
        """See the base class."""
        share = torch.arange(self._rank, self.units, self._world)
        order = share[source.uniform(len(share)).argsort()]
        for part in order.tensor_split(self.steps):
            yield part.tolist()


SAMPLERS: dict[str, type[Sampler]] = {"poisson": Poisson, "shuffled": Shuffled}


class Units:
    """Which records belong to each unit, and how they are split into parts of a batch."""

    def __init__(
        self,
        records: int,
        users: Sequence[Hashable] | Tensor | None = None,
        max_records: int | None = None,
    ) -> None:
        """Group records by user.

        Args:
            records: The number of records.
            users: The user of each record; without users, each record is a unit.
            max_records: The largest number of records of a user in a batch, drawn anew each time.

        Raises:
            UsageError: ``users`` does not name one user for each record, one cannot be a key of a
                dictionary, or one is NaN.
        """
        self._of: list[list[int]] | None = None
        self.has_users = users is not None
        self._max_records = max_records
        if users is None:
            self.count = records
            return
        if isinstance(users, (Mapping, Set)):
            raise UsageError(
                f"users= takes a list with the user of each record. Got a {type(users).__name__}: "
                "write a list in the order of the data set, such as "
                "[user_of[record] for record in range(len(dataset))]."
            )
        named = users.tolist() if isinstance(users, Tensor) else [*users]
        if not all(isinstance(user, Hashable) for user in named):
            raise UsageError(
                "users= takes one user for each record, in one list. Got an entry that is not a "
                "name or a number: for an array with several axes, write users.ravel()."
            )
        if len(named) != records:
            raise UsageError(
                f"users= names the user of each record of the data set, {records} in all. "
                f"Got {len(named)}."
            )
        if any(user != user for user in named):  # tables have NaN where a value is missing
            raise UsageError(
                "users= has 'not a number' for some record. Each of these would count as a "
                "separate user, so a user with several records would not be hidden. Name the user, "
                "or leave the record out of the data set."
            )
        found: dict[Hashable, list[int]] = {}
        for record, user in enumerate(named):
            found.setdefault(user, []).append(record)
        self._of = [*found.values()]
        self.count = len(self._of)

    @property
    def checksum(self) -> str:
        """Tells apart which records belong to which user; empty without users."""
        return "" if self._of is None else f"{zlib.crc32(repr(self._of).encode()):08x}"

    def rows(self, unit: int, source: Source) -> list[int]:
        """The records of a unit."""
        if self._of is None:
            return [unit]
        every = self._of[unit]
        if self._max_records is None or len(every) <= self._max_records:
            return every
        chosen = source.uniform(len(every)).argsort()[: self._max_records]
        return [every[place] for place in chosen.tolist()]

    def parts(self, units: Sequence[int], most: int | None, source: Source) -> list[Draw]:
        """A batch, in parts of at most ``most`` rows; an empty one if it has no unit."""
        parts: list[list[list[int]]] = [[]]
        for unit in units:
            rows = self.rows(unit, source)
            size = sum(map(len, parts[-1]))
            if parts[-1] and most is not None and size + len(rows) > most:
                parts.append([])
            parts[-1].append(rows)
        last = len(parts) - 1
        return [self._draw(part, number == last) for number, part in enumerate(parts)]

    def stand_in(self) -> Draw:
        """A record that belongs to no unit, for a model that must run."""
        return Draw([0], 0, owners=None if self._of is None else torch.zeros(1).long())

    def _draw(self, part: list[list[int]], is_last: bool) -> Draw:
        rows = [row for unit in part for row in unit]
        owners = None
        if self._of is not None:
            owners = torch.tensor([n for n, unit in enumerate(part) for _ in unit]).long()
        return Draw(rows, len(part), is_last, owners)


class PrivateLoader:
    """The batches of a user's loader, drawn anew: one pass is one epoch.

    An empty batch is not shown: its step, of only noise, is taken before the next batch comes.

    Attributes:
        dataset: The data set of the user's loader.
        sampler: How batches are drawn.
        most: How many rows are shown at once; ``None`` for all of a batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: Sampler,
        units: Units,
        source: Source,
        most: int | None,
        draws: Callable[[Draw], None],
        begins: Callable[[], None],
        ends: Callable[[], None],
        always_runs: bool = False,
    ) -> None:
        """Take over the settings of a loader.

        Args:
            loader: The user's loader.
            sampler: How to draw.
            units: What is drawn.
            source: The source of random numbers.
            most: How many rows to show at once; ``None`` for all of a batch.
            draws: Called with each draw before its rows are shown, or if it has none.
            begins: Called when an epoch begins.
            ends: Called when all of an epoch was shown.
            always_runs: Whether to show some record instead of an empty batch, because other
                processes wait for the model to run.
        """
        self._always_runs = always_runs
        self.dataset, self.sampler = loader.dataset, sampler
        self._loader, self._units, self._source, self.most = loader, units, source, most
        self._draws, self._begins, self._ends = draws, begins, ends
        self._epochs = 0  # epochs that have begun

    @property
    def has_users(self) -> bool:
        """Whether users are drawn, each with several records."""
        return self._units.has_users

    @property
    def batch_size(self) -> int:
        """The expected number of samples in a batch, rounded."""
        return round(self.sampler.expected)

    def __len__(self) -> int:
        """How many steps an epoch has."""
        return self.sampler.steps

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, each in one or more parts.

        Raises:
            UsageError: Another epoch was begun before this one ended.
        """
        self._begins()
        self._epochs += 1
        epoch = self._epochs
        ahead: deque[Draw] = deque()  # workers load batches before they are shown
        for batch in self._loading(ahead):
            while not ahead[0].rows:
                self._draws(ahead.popleft())
            self._draws(ahead.popleft())
            yield batch
            self._check_last(epoch)
        for draw in ahead:
            self._draws(draw)
        self._ends()

    def _check_last(self, epoch: int) -> None:
        if epoch != self._epochs:
            raise UsageError(
                "Another loop over private.loader began before this one ended, so samples of both "
                "would be used for the price of one epoch. Write one loop after the other."
            )

    def _loading(self, ahead: deque[Draw]) -> DataLoader[Any]:
        """A loader of the draws, with the settings of the user's loader."""
        old = self._loader
        names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
        names += ["multiprocessing_context", "prefetch_factor"]
        kept: dict[str, Any] = {name: getattr(old, name) for name in names}
        return DataLoader(old.dataset, batch_sampler=_Rows(self._drawn(ahead)), **kept)

    def _drawn(self, ahead: deque[Draw]) -> Iterator[list[int]]:
        for units in self.sampler.epoch(self._source):
            for draw in self._units.parts(units, self.most, self._source):
                if self._always_runs and not draw.rows:
                    draw = self._units.stand_in()
                ahead.append(draw)
                if draw.rows:
                    yield [*draw.rows]


class _Rows:
    """A batch sampler for torch that can be read once."""

    def __init__(self, rows: Iterator[list[int]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[list[int]]:
        return self._rows


def check_loader(loader: Any) -> None:
    """Refuse loaders with batches that cannot be drawn anew.

    Raises:
        UsageError: The argument is not a loader with a data set of known length, or its sampler's
            choices would be lost.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "make_private(...) takes a torch.utils.data.DataLoader, and draws its batches anew. "
            f"Got {type(loader).__name__}: wrap the data, DataLoader(dataset, batch_size=...)."
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UsageError(
            "The data set has no length, so the probability that a sample is in a batch is not "
            "known. Use a data set with __len__ and __getitem__."
        )
    if loader.batch_size is None:
        raise UsageError(
            "The loader has no batch_size, which is the average number of samples in a batch. "
            "Write DataLoader(dataset, batch_size=...), without a batch_sampler. If "
            "accelerator.prepare(...) has replaced it, call make_private(...) first."
        )
    usual = (RandomSampler, SequentialSampler, DistributedSampler)
    if not isinstance(loader.sampler, usual):
        raise UsageError(
            f"The loader has a {type(loader.sampler).__name__}, but its choices would be lost: "
            "batches are drawn anew, each sample with the same probability, as the accounting "
            "supposes. Leave the sampler out."
        )
    if getattr(loader.sampler, "replacement", False):
        raise UsageError(
            "The loader's RandomSampler draws with replacement, which is a different mechanism "
            'from sampling="poisson" and "shuffled". Leave the sampler out.'
        )


def check_order(loader: DataLoader[Any]) -> None:
    """Refuse batches that may have rows in another order than they were drawn.

    Raises:
        UsageError: The loader puts batches together by a function of the user's.
    """
    if loader.collate_fn is not default_collate:
        raise UsageError(
            "The loader has a collate_fn, which may change the order of rows, and users= finds the "
            "user of each row by that order. Leave out collate_fn, and do its work in the data "
            "set's __getitem__ or in the model."
        )
