"""States of several processes: how they are combined, and how a lost process is noticed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from backpack_core.contract.merging import declaration
from backpack_core.errors import BackpackError, UsageError
from backpack_data.shards import largest_of
from backpack_data.state import LINEAR, State
from backpack_data.states import Place, States
from backpack_data.weights import require_proportional

T = TypeVar("T")
Name = tuple[Place, str]  # place, and part of the value
_runs = itertools.count()
ENDS, FAILED = ("done", "lost"), "failed: "
PAUSE, SELDOM = 0.05, 1.0  # seconds between two looks at the others: of who waits, of who computes
NONE_LEFT, HAS_BATCH, HAS_FAILED = range(3)  # what processes in step say before each batch


class LostProcessError(BackpackError, RuntimeError):
    """Another process has failed, ended or hangs before it was through its part of the data."""


class Heartbeat:
    """Writes to the default group's store that this process is alive, and reads it of the others.

    Without it, a collective operation whose partner has died ends with a broken connection, or
    waits for half an hour, and does not say which rank died.
    """

    def __init__(self, group: distributed.ProcessGroup | None, timeout: float) -> None:
        """Begin. Runs are numbered, so every rank has to begin its runs in the same order."""
        self._group, self._timeout = group, timeout
        self._looked = time.monotonic()
        if group is None:
            return
        self._name = f"backpack_data/{next(_runs)}"
        self._store: Any = distributed.distributed_c10d._get_default_store()
        self._rank = distributed.get_rank()
        self._ranks = distributed.get_process_group_ranks(group)
        self.beat(-1)

    def beat(self, place: int) -> None:
        """Report that this process has finished a batch, and see that no other one has failed.

        Raises:
            LostProcessError: Another one has.
        """
        if self._group is None:
            return
        self._say(str(place))
        if time.monotonic() - self._looked > SELDOM:
            for rank in self._ranks:
                self._hear(rank)
            self._looked = time.monotonic()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Reports what is raised inside the block, so that nobody waits for this process."""
        try:
            yield
        except BaseException as error:
            if self._group is not None and not isinstance(error, LostProcessError):
                with suppress(LostProcessError):
                    self._say(f"{FAILED}{type(error).__name__}: {error}")
            raise

    def wait(self, word: str = "done") -> None:
        """Wait until all processes are through.

        Args:
            word: What this process reports: that it is done, or that it has lost another one.

        Raises:
            LostProcessError: A process has failed, or has reported nothing for too long.
        """
        if self._group is None:
            return
        self._say(word)
        heard = {rank: ("", time.monotonic()) for rank in self._ranks}
        while True:
            for rank, (before, _) in heard.items():
                now = self._hear(rank)
                if now != before:
                    heard[rank] = now, time.monotonic()
            waiting = {rank: since for rank, (said, since) in heard.items() if said not in ENDS}
            if not waiting:
                return
            late = [r for r, since in waiting.items() if time.monotonic() - since > self._timeout]
            if late:
                raise self._lost(late)
            time.sleep(PAUSE)

    def _say(self, word: str) -> None:
        try:
            self._store.set(f"{self._name}/{self._rank}", word)
        except (RuntimeError, ValueError) as error:
            raise _store_lost() from error

    def _hear(self, rank: int) -> str:
        key = f"{self._name}/{rank}"
        try:
            if not self._store.check([key]):
                return ""
            said: bytes = self._store.get(key)
        except (RuntimeError, ValueError) as error:
            raise _store_lost() from error
        found = said.decode()
        if found.startswith(FAILED) and rank != self._rank:
            raise failed(rank, found.removeprefix(FAILED))
        return found

    def _lost(self, ranks: Sequence[int]) -> LostProcessError:
        names = ", ".join(map(str, ranks))
        return LostProcessError(
            f"Rank {names} has not been through with a batch for {self._timeout} seconds, so it "
            "was killed or stands still. Start all processes again: with state_file, they go on "
            "from the last batches that were written. If batches take longer, increase timeout."
        )


def failed(rank: int, error: str) -> LostProcessError:
    """The error on all other ranks where one has failed."""
    return LostProcessError(
        f"Rank {rank} has failed, so there is no result for all. Mend what it says, and start all "
        f"processes again. It says: {error}"
    )


def _store_lost() -> LostProcessError:
    return LostProcessError(
        "The store of the default process group does not answer: the process that holds it, which "
        "is rank 0 unless it was given another one, has ended. Start all processes again: with "
        "state_file, they go on from the last batches that were written."
    )


class InStep:
    """Makes all processes run equally many batches: a sharded model's pass needs all of them."""

    def __init__(self, group: distributed.ProcessGroup | None, heartbeat: Heartbeat) -> None:
        """Begin.

        Args:
            group: The processes; ``None`` if each runs by itself.
            heartbeat: Tells which of them are alive.
        """
        self._group, self._heartbeat = group, heartbeat
        self._is_between = True  # batches, where all of them say what they have

    def __call__(self, run: Callable[[], T]) -> T:
        """Run a batch together with the other processes.

        Raises:
            LostProcessError: One of them has ended.
        """
        if self._group is None:
            return run()
        with self._watched():
            self._meet(HAS_BATCH)
            self._is_between = False
            found = run()
            self._is_between = True
        return found

    def _meet(self, said: int) -> bool:
        """Whether any process has a batch; all say what they have."""
        assert self._group is not None
        found = largest_of(said, self._group)
        if found == HAS_FAILED and said != HAS_FAILED:
            self._heartbeat.wait("lost")  # hears which it was
        return found == HAS_BATCH

    @contextmanager
    def told(self) -> Iterator[None]:
        """Has the others learn of an error between two batches; in one, they are elsewhere."""
        try:
            yield
        except Exception as error:
            if self._group and self._is_between and not isinstance(error, LostProcessError):
                with suppress(RuntimeError):
                    self._meet(HAS_FAILED)
            raise

    def end(self, again: Callable[[], object] | None) -> None:
        """Repeat the last batch, without counting it, as long as other processes have batches.

        Raises:
            UsageError: This process had no batch.
            LostProcessError: Another process has ended.
        """
        if self._group is None:
            return
        if again is None:
            raise UsageError(
                "The loader of this process gave no batch, and the model is sharded, so that all "
                "processes run batches together: give every process at least one."
            )
        with self._watched():
            self._is_between = False
            while self._meet(NONE_LEFT):
                again()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, BackpackError) or not _is_of_processes(error):
                raise
            self._heartbeat.wait("lost")
            raise LostProcessError(
                f"What processes exchange for a sharded model has failed: {error}"
            ) from error


def _is_of_processes(error: RuntimeError) -> bool:
    found = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in found or "nccl" in found


def reduce(states: States, group: distributed.ProcessGroup, gather: bool) -> States:
    """Combine the states of all ranks of a group; every rank gets the result.

    Sums and averages go in one buffer for each dtype.

    Args:
        states: Those of this rank; they are not changed.
        group: The processes.
        gather: Whether values per sample are gathered, or stay on their rank.

    Raises:
        LostProcessError: Another process has ended.
        UsageError: Ranks differ in extensions, parameters or shapes.
    """
    try:
        return _reduce(states, group, gather)
    except (RuntimeError, distributed.DistBackendError) as error:
        if isinstance(error, BackpackError):
            raise
        raise LostProcessError(
            f"A process of the group has ended while results were exchanged: {error}"
        ) from error


def _reduce(states: States, group: distributed.ProcessGroup, gather: bool) -> States:
    found = _told((states.numbers(), _described(states)), group)
    total = States(states.extensions, states.shapes)
    for numbers, _ in found:
        if not numbers["batches"]:
            continue
        if total.batches:
            if (numbers["normaliser"] is None) != (total.normaliser is None):
                raise UsageError("The loss of one rank is a sum and that of another is a mean.")
            require_proportional(total.ratios, numbers["ratios"])
        total.batches, total.ratios = total.batches + numbers["batches"], numbers["ratios"]
        if numbers["normaliser"] is not None:
            total.normaliser = (total.normaliser or 0.0) + numbers["normaliser"]
        for path, name, seen, samples, _ in numbers["places"]:
            place = path, name
            if place not in total.table:
                extension = next(e for e in states.extensions if e.savefield == name)
                total.table[place] = State(extension)
            total.seen[place] = total.seen.get(place, 0) + seen
            total.table[place].samples += samples
    for state in total.table.values():
        state.normaliser = total.normaliser
    kinds = {name: kind for _, described in found for name, kind in described.items()}
    _add_up(states, total, kinds, group)
    _put_beside(states, total, kinds, group, gather)
    return total


@contextmanager
def reported(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Has the others, which wait in :func:`reduce`, learn what is raised inside the block."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with suppress(RuntimeError):
                _objects(f"{FAILED}{type(error).__name__}: {error}", group)
        raise


def _told(mine: Any, group: distributed.ProcessGroup) -> list[Any]:
    """What all ranks say.

    Raises:
        LostProcessError: One of them says that it has failed.
    """
    found = _objects(mine, group)
    ranks = distributed.get_process_group_ranks(group)
    for rank, said in zip(ranks, found, strict=True):
        if isinstance(said, str):
            raise failed(rank, said.removeprefix(FAILED))
    return found


def _described(states: States) -> dict[Name, tuple[Any, torch.Size, torch.dtype]]:
    """How each tensor combines, its shape and dtype."""
    found = {}
    for place, state in states.table.items():
        over = declaration(state.extension)
        for key, tensors in state.tensors.items():
            way = over.part(key).way
            word = way if isinstance(way, str) else "function"
            found[place, key] = word, tensors[0].shape, tensors[0].dtype
    return found


def _add_up(states: States, total: States, kinds: dict[Name, Any], group: Any) -> None:
    """All-reduce sums, in one buffer for each dtype; a rank without a value adds zero."""
    names = sorted(name for name, kind in kinds.items() if kind[0] in LINEAR)
    for dtype in dict.fromkeys(kinds[name][2] for name in names):
        own = [name for name in names if kinds[name][2] == dtype]
        device = _device(states, group)
        parts = [_tensor(states, name, kinds[name], device).flatten() for name in own]
        buffer = torch.cat(parts)
        distributed.all_reduce(buffer, group=group)
        pieces = buffer.split([len(part) for part in parts])
        for (place, key), piece in zip(own, pieces, strict=True):
            shape = kinds[place, key][1]
            total.table[place].tensors[key] = [piece.reshape(shape).clone()]


def _put_beside(
    states: States, total: States, kinds: dict[Name, Any], group: Any, gather: bool
) -> None:
    """Combine everything that is no sum: gather values per sample, compare what must agree."""
    for name in sorted(name for name, kind in kinds.items() if kind[0] not in LINEAR):
        (place, key), (way, *_) = name, kinds[name]
        own = states.table[place].tensors.get(key, []) if place in states.table else []
        if way == "concatenate" and not gather:
            _stay(total, place, key, own)
            continue
        every = [
            tensor for tensors in _objects([t.cpu() for t in own], group) for tensor in tensors
        ]
        every = [tensor.to(_device(states, group)) for tensor in every]
        if way == "same":
            every = every[:1]
        elif way == "function":
            function: Any = declaration(total.table[place].extension).part(key).way
            first, *others = every
            for other in others:
                first = function(first, other)
            every = [first]
        total.table[place].tensors[key] = every


def _stay(total: States, place: Place, key: str, own: list[Tensor]) -> None:
    if own:
        total.table[place].tensors[key] = own
    else:  # no sample on this rank
        total.table.pop(place, None)


def _tensor(states: States, name: Name, kind: Any, device: torch.device) -> Tensor:
    place, key = name
    if place in states.table:
        return states.table[place].tensors[key][0]
    return torch.zeros(kind[1], dtype=kind[2], device=device)


def _device(states: States, group: Any) -> torch.device:
    for state in states.table.values():
        for tensors in state.tensors.values():
            return tensors[0].device
    is_nccl = distributed.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _objects(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found
