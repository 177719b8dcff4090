"""Several processes: notices one that is lost or failed, and keeps all in step."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import distributed

from backpack_core.errors import BackpackError, UsageError
from backpack_products.fingerprint import Fingerprint, agreed
from backpack_products.ranks import largest_of, require_equal

T = TypeVar("T")
# By group: processes may have begun different numbers of runs in other groups, or before this one.
_runs: WeakKeyDictionary[distributed.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
ENDS, FAILED = ("done", "lost"), "failed: "
PAUSE, SELDOM = 0.05, 1.0  # seconds between two looks at the others: while waiting, while computing
ADVICE = (
    "Sums over them would belong to no model: give all of them the same model and extensions, by "
    "DistributedDataParallel, for example, or from the same seed or checkpoint."
)
NONE_LEFT, HAS_BATCH, HAS_FAILED = range(3)  # what processes in step say before each batch


class LostProcessError(BackpackError, RuntimeError):
    """Another process failed, ended or hung before it was through its part of the data."""

    in_manual = True


class Heartbeat:
    """Writes to the default group's store that this process is alive, and reads it of the others.

    Without it, if a process dies during a collective operation, the others end with a broken
    connection, or wait for half an hour. They do not say which rank died.
    """

    def __init__(self, group: distributed.ProcessGroup | None, timeout: float) -> None:
        """Begin. The runs of a group are numbered: its ranks must begin them in the same order."""
        self._group, self._timeout = group, timeout
        self._looked = time.monotonic()
        if group is None:
            return
        number = next(_runs.setdefault(group, itertools.count()))
        self._name = f"backpack_data/{group.group_name}/{number}"
        self._store: Any = distributed.distributed_c10d._get_default_store()
        self._rank = distributed.get_rank()
        self._ranks = distributed.get_process_group_ranks(group)
        self.beat(-1)

    def beat(self, place: int) -> None:
        """Report that this process finished a batch, and check that no other one failed.

        Raises:
            LostProcessError: Another one failed.
        """
        if self._group is None:
            return
        self._say(str(place))
        if time.monotonic() - self._looked > SELDOM:
            for rank in self._ranks:
                self._hear(rank)
            self._looked = time.monotonic()

    def compare(self, plugins: Fingerprint, model: Mapping[str, str]) -> None:
        """Check that all processes compute the same of the same model with the same plugins.

        Args:
            plugins: Those of this process.
            model: What else must agree, by its name in the message.

        Raises:
            UsageError: The first process computes something else, or with other plugins.
        """
        if self._group is None:
            return
        first = self._ranks[0]
        key = f"{self._name}/compared"
        if self._rank == first:
            self._store.set(key, json.dumps([plugins, dict(model)]))
            return
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
            said, other = json.loads(self._store.get(key))
        except (RuntimeError, ValueError) as error:
            raise self._lost([first]) from error
        agreed({f"The results of rank {first}": said, f"those of rank {self._rank}": plugins})
        require_equal(other, model, f"rank {first}", f"rank {self._rank}", ADVICE)

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
            LostProcessError: A process failed, or reported nothing for too long.
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
            f"Rank {names} has not finished a batch for {self._timeout} seconds, so it was killed "
            "or hangs. Start all processes again: with state_file, they go on from the last "
            "batches that were written. If batches take longer, increase timeout."
        )


def failed(rank: int, error: str) -> LostProcessError:
    """The error on all other ranks where one has failed."""
    return LostProcessError(
        f"Rank {rank} failed, so no rank has a result. Remove the cause that it names, and start "
        f"all processes again. It says: {error}"
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
            group: The processes; ``None`` if each runs alone.
            heartbeat: Tells which of them are alive.
        """
        self._group, self._heartbeat = group, heartbeat
        self._is_between = True  # batches, where all of them say what they have

    def __call__(self, run: Callable[[], T]) -> T:
        """Run a batch together with the other processes.

        Raises:
            LostProcessError: One of them ended.
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
        (found,) = largest_of([said], self._group)
        if found == HAS_FAILED and said != HAS_FAILED:
            self._heartbeat.wait("lost")  # learns which one it was
        return found == HAS_BATCH

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the others of an error between two batches; within a batch, they do not listen."""
        try:
            yield
        except Exception as error:
            if self._group and self._is_between and not isinstance(error, LostProcessError):
                with suppress(RuntimeError):
                    self._meet(HAS_FAILED)
            raise

    def end(self, again: Callable[[], object] | None) -> None:
        """Repeat the last batch, without counting it, while other processes have batches.

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
                f"The exchange between processes for a sharded model failed: {error}"
            ) from error


def _is_of_processes(error: RuntimeError) -> bool:
    found = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in found or "nccl" in found
