"""What a method can use: the problem, both loaders, names of samples, progress, processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from tqdm import tqdm

from backpack_attribution.identities import (
    ByContent,
    ByPlace,
    Identify,
    Identity,
    checked,
    content_hash,
    tokens_of,
)
from backpack_attribution.problem import Problem, samples_in
from backpack_attribution.scores import Scores
from backpack_core.errors import UsageError

Identities: TypeAlias = Sequence[Identity] | Identify | Literal["place", "content"]


@dataclass(frozen=True)
class Run:
    """One computation of scores.

    Attributes:
        problem: The model with the loss of the training samples.
        query: The model with the loss, or the other function, to predict a change of.
        train_loader: Batches of training samples, the same in every pass over it.
        query_loader: Batches of queries; every process has all queries.
        progress: Whether bars are shown, if the output is a terminal.
        process_group: Processes that have a part of the training samples each.
    """

    problem: Problem
    query: Problem
    train_loader: Iterable[Any]
    query_loader: Iterable[Any]
    progress: bool = True
    process_group: distributed.ProcessGroup | None = None
    _seen: dict[int, list[str]] = field(default_factory=dict, repr=False)
    _sizes: dict[int, list[int]] = field(default_factory=dict, repr=False)  # of the batches
    _rows: list[int] = field(default_factory=list, repr=False)

    def batches(self, loader: Iterable[Any], what: str) -> Iterator[Any]:
        """The batches of a loader, with a bar.

        Raises:
            UsageError: They differ from those of the first pass, which named the samples.
        """
        bar = tqdm(loader, what, disable=None if self.progress else True, leave=False)
        known = self._seen.get(id(loader), [])
        seen: list[str] = []
        for batch in bar:
            seen.append(content_hash(batch))
            if seen != known[: len(seen)]:
                break
            yield batch
        if seen != known:
            raise UsageError(
                "The loader gave other batches than in the pass before, so samples cannot be "
                "identified: give one that does not shuffle, drop or change samples."
            )

    def samples(self, batch: Any) -> int:
        """Number of samples of a batch."""
        return samples_in(self.problem.split(batch))

    def names(self, loader: Iterable[Any], given: Identities, is_shared: bool) -> list[Identity]:
        """Identities of all samples of a loader.

        Args:
            loader: Gives batches.
            given: ``"place"``, ``"content"``, all identities, or a function of a batch.
            is_shared: Whether processes have a part of the data each.

        Raises:
            UsageError: The loader gives no samples, or single samples instead of batches,
                identities do not fit, or all processes have the same samples.
        """
        if isinstance(given, str) and given not in ("place", "content"):
            raise UsageError(
                f'identities must be "place", "content", a list, or a function. Got {given!r}.'
            )
        _require_batches(loader)
        _require_own_samples(loader)
        group = self.process_group if is_shared else None
        place = (
            ByPlace()
            if group is None
            else ByPlace(distributed.get_rank(group), distributed.get_world_size(group))
        )
        content = ByContent()
        found: list[Identity] = []
        count, seen = 0, self._seen.setdefault(id(loader), [])
        sizes = self._sizes[id(loader)] = []
        seen.clear()
        for batch in loader:
            seen.append(content_hash(batch))
            samples = self.samples(batch)
            count += samples
            sizes.append(samples)
            if callable(given):
                found += checked(given(batch), samples)
            elif isinstance(given, str):  # an array would be compared entry by entry
                found += (content if given == "content" else place)(batch, samples)
        if group is not None:
            _require_parts(self.of_all(seen))
        if not count:
            raise UsageError(
                "A loader gave no sample. Give something that can be iterated several times, such "
                "as a DataLoader or a list, not an iterator or a generator."
            )
        is_list = not callable(given) and not isinstance(given, str)
        return checked(given if is_list else found, count)  # type: ignore[arg-type]

    def of_training(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of all batches of training samples, on the CPU, one for each sample or token."""
        self._rows[:] = map(len, parts)
        return on_cpu(parts)

    def names_of_rows(self, names: Sequence[Identity]) -> list[Identity]:
        """Identities of the rows of the last pass over training samples; by token, ``"name:t"``.

        Args:
            names: The names of the samples.
        """
        if self.problem.per == "sample":
            return [*names]
        found, waiting = list[Identity](), iter(names)
        for samples, rows in zip(self._sizes[id(self.train_loader)], self._rows, strict=True):
            for _ in range(samples):
                found += tokens_of(next(waiting), rows // samples)
        return found

    def gathered(self, scores: Scores) -> Scores:
        """Scores of the training samples of all processes, sorted by identity, on each of them."""
        if self.process_group is None:
            return scores
        return Scores.cat(self.of_all(scores)).sorted()

    def of_all(self, value: Any) -> list[Any]:
        """What each process has, in the order of ranks."""
        found: list[Any] = [None] * distributed.get_world_size(self.process_group)
        distributed.all_gather_object(found, value, group=self.process_group)
        return found

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a tensor over processes."""
        if self.process_group is not None:
            value = value.clone()
            distributed.all_reduce(value, group=self.process_group)
        return value

    def total(self, numbers: Iterable[float]) -> float:
        """The sum of the numbers of all batches, over processes."""
        return float(self.summed(torch.tensor(sum(numbers), dtype=torch.float64, device="cpu")))

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows bars."""
        return self.process_group is None or distributed.get_rank(self.process_group) == 0


def _require_batches(loader: Any) -> None:
    """Refuse a data set, which gives single samples, and what cannot be gone through twice."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(
            "A loader must give batches, as a DataLoader does, or a list of (inputs, targets). Got "
            f"{loader!r:.80}."
        )
    if isinstance(loader, Iterator):
        raise UsageError(
            f"{type(loader).__name__} can be gone through only once, and samples are first named "
            "and then read: give a DataLoader or a list."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"{type(loader).__name__} gives single samples, but batches are needed: give "
            "DataLoader(dataset, batch_size=...), with None if its items are batches."
        )


def _require_own_samples(loader: Iterable[Any]) -> None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    if sampler.shuffle:
        raise UsageError(
            "The DistributedSampler shuffles, so a place does not name a sample: give "
            "shuffle=False."
        )
    samples: Any = sampler.dataset
    if not sampler.drop_last and len(samples) % sampler.num_replicas:
        raise UsageError(
            f"The DistributedSampler repeats samples, since {len(samples)} is not a multiple of "
            f"{sampler.num_replicas} processes, and repeated samples would count twice: give each "
            "process Subset(dataset, range(rank, len(dataset), ranks))."
        )


def _require_parts(batches: list[list[str]]) -> None:
    """Refuse the same data in every process, of which each sample would count several times.

    Args:
        batches: The hashes of the batches of each process.
    """
    ranks = len(batches)
    if ranks > 1 and batches[0] and all(found == batches[0] for found in batches):
        raise UsageError(
            f"All {ranks} processes got the same training samples, and each would count {ranks} "
            "times: give each process its part, "
            "DataLoader(Subset(dataset, range(rank, len(dataset), ranks)), ...)."
        )


def on_cpu(values: Sequence[Tensor]) -> Tensor:
    """Rows of several batches, on the CPU."""
    return torch.cat([value.detach().cpu() for value in values])
