"""One file of a store: some samples, whole, with their identities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from backpack_attribution import forms
from backpack_attribution.disk import VERSION
from backpack_attribution.forms import Gradients
from backpack_attribution.identities import Identity
from backpack_core.errors import UsageError


@dataclass(frozen=True, eq=False)
class Shard:
    """What the header of a shard says; its tensors stay on disk until they are asked for.

    Attributes:
        path: Of the file.
        identities: Of its samples.
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
            UsageError: The file is not a shard, or a damaged one.
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

    def blocks(self, rows: int) -> Iterator[tuple[list[Identity], Gradients]]:
        """The samples, some at a time, as views of the file that is mapped into memory.

        Args:
            rows: How many at most.
        """
        whole = self._mapped()
        for first in range(0, len(self.identities), rows):
            part = slice(first, first + rows)
            yield self.identities[part], {name: value[part] for name, value in whole.items()}

    def rows(self, rows: list[int]) -> Gradients:
        """The gradients of some samples, ``[n, *θ]`` for each part."""
        return {name: value[rows] for name, value in self._mapped().items()}

    def _mapped(self) -> Gradients:
        found: dict[str, dict[str, Any]] = {name: {} for name in self.shapes}
        with safe_open(self.path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                part, _, form = key.rpartition("|")
                found[part][form] = file.get_tensor(key)
        return {name: forms.from_tensors(tensors) for name, tensors in found.items()}
