"""The files of a store: each has some samples, whole, with their identities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from safetensors import SafetensorError, safe_open

from backpack_attribution import forms
from backpack_attribution.disk import VERSION, write
from backpack_attribution.forms import Gradients
from backpack_attribution.identities import Identity
from backpack_core.errors import UsageError


class Block(NamedTuple):
    """Some samples of a store, in the order of its rows.

    Attributes:
        identities: One for each sample.
        gradients: A tensor ``[n, *θ]`` or products for each part (a parameter, or its projection).
    """

    identities: list[Identity]
    gradients: Gradients


class Waiting:
    """Samples that wait until they fill a shard.

    Attributes:
        nbytes: How many bytes they take.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self.nbytes = 0
        self._blocks: list[Block] = []
        self._names: set[Identity] = set()

    def __len__(self) -> int:
        """How many samples wait."""
        return len(self._names)

    def __contains__(self, identity: object) -> bool:
        """Whether a sample waits."""
        return identity in self._names

    def add(self, identities: list[Identity], gradients: Gradients) -> None:
        """Add some samples."""
        self._names.update(identities)
        self._blocks.append(Block(identities, gradients))
        self.nbytes += sum(value.nbytes for value in gradients.values())

    def joined(self) -> Block | None:
        """All samples that wait; ``None`` if none do."""
        if not self._blocks:
            return None
        names = [name for block in self._blocks for name in block.identities]
        parts = {
            part: forms.cat([block.gradients[part] for block in self._blocks])
            for part in self._blocks[0].gradients
        }
        return Block(names, parts)


@dataclass(frozen=True, eq=False)
class Shard:
    """The header of a shard; its tensors stay on disk until they are needed.

    Attributes:
        path: The file.
        identities: The identities of its samples.
        shapes: The shape of each part for one sample.
        number: Its place in the order of writing.
    """

    path: Path
    identities: list[Identity]
    shapes: dict[str, list[int]]
    number: int

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read the header.

        Raises:
            UsageError: The file is not a shard, or is damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                header: Any = json.loads((file.metadata() or {}).get("backpack_attribution", "{}"))
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged ({error}): remove it.") from error
        if header.get("kind") != "shard" or header.get("version") != VERSION:
            raise UsageError(f"{path} is not a shard of a gradient store: move it elsewhere.")
        number = int(path.name.partition("-")[0])
        return cls(path, header["identities"], header["shapes"], number)

    def blocks(self, rows: int) -> Iterator[Block]:
        """The samples, some at a time, as views of the memory-mapped file.

        Args:
            rows: The largest number of samples at a time.
        """
        whole = self._mapped()
        for first in range(0, len(self.identities), rows):
            part = slice(first, first + rows)
            yield Block(self.identities[part], {n: value[part] for n, value in whole.items()})

    def rows(self, rows: Sequence[int]) -> Gradients:
        """The gradients of some samples, ``[n, *θ]`` for each part."""
        return {name: value[[*rows]] for name, value in self._mapped().items()}

    def _mapped(self) -> Gradients:
        found: dict[str, dict[str, Any]] = {name: {} for name in self.shapes}
        with safe_open(self.path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                part, _, form = key.rpartition("|")
                found[part][form] = file.get_tensor(key)
        return {name: forms.from_tensors(tensors) for name, tensors in found.items()}


class Shards:
    """All shards in a folder, in the order of writing; a sample is in only one of them."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the shards in a folder.

        Raises:
            UsageError: A file is damaged, or a sample is in two of them.
        """
        self._folder, self._shards = folder, list[Shard]()
        self._places: dict[Identity, tuple[int, int]] = {}
        self._others: dict[Path, frozenset[Identity]] = {}  # shards that others wrote since
        self.read_new()

    def read_new(self) -> None:
        """Read the headers of shards that others have written since.

        Raises:
            UsageError: A file is damaged, or a sample is in two of them.
        """
        known = {shard.path for shard in self._shards}
        for path in sorted({*self._folder.glob("*.safetensors")} - known):
            self.add(path)

    def add(self, path: Path) -> None:
        """Add one more shard.

        Raises:
            UsageError: The file is damaged, or has a sample of another shard.
        """
        shard = Shard.open(path)
        twice = next((name for name in shard.identities if name in self._places), None)
        if twice is not None:
            raise UsageError(
                f"{twice!r} is in {path.name} and in an earlier shard: two processes stored the "
                "same samples. Remove one of the files."
            )
        places = ((len(self._shards), row) for row in range(len(shard.identities)))
        self._places.update(zip(shard.identities, places, strict=True))
        self._shards.append(shard)

    def _require_new(self, identities: Sequence[Identity]) -> None:
        """Refuse samples that another writer has stored since this store was opened.

        Raises:
            UsageError: One of them is in another writer's shard.
        """
        known = {shard.path for shard in self._shards} | self._others.keys()
        for path in {*self._folder.glob("*.safetensors")} - known:
            self._others[path] = frozenset(Shard.open(path).identities)
        stored = {name: path for path, theirs in self._others.items() for name in theirs}
        stored |= {name: self._shards[shard].path for name, (shard, _) in self._places.items()}
        twice = next((name for name in identities if name in stored), None)
        if twice is not None:
            raise UsageError(
                f"{twice!r} is in {stored[twice].name} already, which another process, or a copy "
                "of this store, has written since it was opened. Nothing was written: open the "
                "store again, and append what is missing then."
            )

    def write(self, block: Block, shapes: dict[str, list[int]], process: int) -> None:
        """Write some samples as one more shard, which is whole or absent.

        Args:
            block: The samples.
            shapes: The shape of each part for one sample.
            process: Which of several writers this is.

        Raises:
            UsageError: Another writer has stored one of the samples.
        """
        self._require_new(block.identities)
        number = 1 + max((shard.number for shard in self._shards), default=-1)
        path = self._folder / f"{number:06d}-{process:04d}-{uuid4().hex[:8]}.safetensors"
        tensors = {
            f"{part}|{key}": tensor
            for part, value in block.gradients.items()
            for key, tensor in forms.tensors(value).items()
        }
        write(path, tensors, "shard", {"identities": block.identities, "shapes": shapes})
        self.add(path)

    @property
    def identities(self) -> list[Identity]:
        """The identities of all samples, in order."""
        return [*self._places]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._places)

    def __contains__(self, identity: object) -> bool:
        """Whether a sample is in a shard."""
        return identity in self._places

    def blocks(self, rows: int) -> Iterator[Block]:
        """All samples, some of one shard at a time."""
        for shard in self._shards:
            yield from shard.blocks(rows)

    def rows(self, identities: Sequence[Identity]) -> Gradients:
        """The gradients of some samples, in the order asked for."""
        by_shard: dict[int, list[tuple[int, int]]] = {}
        for position, name in enumerate(identities):
            shard, row = self._places[name]
            by_shard.setdefault(shard, []).append((row, position))
        parts = [self._shards[s].rows([row for row, _ in found]) for s, found in by_shard.items()]
        came = [position for found in by_shard.values() for _, position in found]
        order = sorted(range(len(came)), key=came.__getitem__)
        return {name: forms.cat([part[name] for part in parts])[order] for name in parts[0]}

    def index(self) -> dict[str, list[Any]]:
        """Columns ``identity``, ``shard`` (a file name) and ``row``."""
        places = self._places.values()
        return {
            "identity": [*self._places],
            "shard": [self._shards[shard].path.name for shard, _ in places],
            "row": [row for _, row in places],
        }
