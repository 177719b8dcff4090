"""What a store says about all its samples: ``store.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from backpack_attribution.disk import UNFINISHED, VERSION, write_json
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import Projection
from backpack_products.fingerprint import Fingerprint, Marked, agreed, fingerprint_of

NAME = "store.json"
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Projected(Marked[T]):
    """Gradients by parameter, with what computed them, and the projection that they went through.

    Attributes:
        projection: As :func:`shown` says it; ``None`` if it is not known.
    """

    def __init__(
        self, values: Mapping[str, T], plugins: Fingerprint, projection: str | None
    ) -> None:
        """Store the values and where they are from."""
        super().__init__(values, plugins)
        self.projection = projection


def shown(projection: Projection | None) -> str:
    """The settings of a projection; empty for gradients themselves."""
    if projection is None:
        return ""
    dim, seed = int(projection.dim), int(projection.seed)
    return f"Projection(dim={dim}, kind={projection.kind!r}, seed={seed})"


@dataclass(frozen=True)
class Manifest:
    """Settings of a store, as JSON knows them.

    Attributes:
        dtype: Name of the precision.
        rank: Of the factors that matrices are stored as; ``None`` where they are stored whole.
        about: What the user said about the gradients.
        shapes: The shape of each part for one sample; empty before the first row.
        plugins: Which plugins compute the gradients; empty if that is not known.
        per: Whether rows are those of samples or tokens; empty if that is not known.
        projection: Of the gradients, as :func:`shown` says it; ``None`` if that is not known.
    """

    dtype: str
    rank: int | None
    about: dict[str, Any]
    shapes: dict[str, list[int]]
    plugins: Fingerprint = field(default_factory=dict)
    per: str = ""
    projection: str | None = None

    @classmethod
    def opened(
        cls,
        folder: Path,
        dtype: torch.dtype | None,
        rank: int | None,
        about: Mapping[str, Any] | None,
    ) -> Manifest:
        """Of the store in a folder, which is begun if there is none.

        Args:
            folder: Where the store is.
            dtype: The precision asked for; ``None`` for any.
            rank: The rank asked for; ``None`` for any.
            about: What the user says; ``None`` for anything.

        Raises:
            UsageError: The folder is something else, or its settings are others.
        """
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise UsageError(
                f"rank is a positive number of products for each matrix. Got {rank!r}."
            )
        asked: dict[str, Any] = {
            "dtype": None if dtype is None else _name_of(dtype),
            "rank": rank,
            "about": None if about is None else json.loads(json.dumps(dict(about))),
        }
        found = cls.read(folder)
        if found is None:
            made = cls(asked["dtype"] or "float32", rank, asked["about"] or {}, {})
            folder.mkdir(exist_ok=True)
            made.write(folder)
            return made
        for key, value in asked.items():
            if value is not None and value != getattr(found, key):
                raise UsageError(
                    f"{folder} is the store of another run: its {key} is {getattr(found, key)!r}, "
                    f"and {value!r} was asked for. Give another folder, or leave {key} out."
                )
        return found

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """What is in the folder; ``None`` where nothing is.

        Raises:
            UsageError: The folder holds something else.
        """
        path = folder / NAME
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("version", None) != VERSION:
                raise UsageError(f"{path} was written by another version of this library.")
            return cls(**found)
        if folder.is_dir():
            strange = [p for p in folder.iterdir() if not p.name.endswith(UNFINISHED)]
        else:
            strange = [folder] if folder.exists() else []
            if not folder.absolute().parent.is_dir():
                raise UsageError(f"There is no folder {folder.absolute().parent}: make it.")
        if strange:
            raise UsageError(
                f"{folder} is not a gradient store: it holds {strange[0].name} and no {NAME}. Give "
                "another folder, or one that does not exist."
            )
        return None

    def write(self, folder: Path) -> None:
        """Put it into the folder."""
        write_json(folder / NAME, {"version": VERSION, **asdict(self)})

    def compare(self, folder: Path, others: Mapping[str, Any], what: str = "the queries") -> None:
        """Refuse gradients that do not belong to the rows; what is not known is not compared.

        Raises:
            UsageError: They were computed by other plugins, or are projected otherwise.
        """
        agreed({f"The rows of {folder}": self.plugins, what: fingerprint_of(others)})
        own, other = self.projection, getattr(others, "projection", None)
        if own is not None and other is not None and own != other:
            raise UsageError(
                f"Gradients are compared if one map projects both, and {what} went through "
                f"{other or 'no projection'}. Use that of the rows of {folder}: {own or 'none'}."
            )

    def with_origin(self, folder: Path, rows: Projected[Any], per: str) -> Manifest:
        """With what computes and projects the first rows, and so all that follow.

        Raises:
            UsageError: The rows that are stored were computed or projected otherwise, or are of the
                other kind.
        """
        known = self if self.plugins else Manifest.read(folder) or self
        known.compare(folder, rows, "those of this process")
        if known.per not in ("", per):
            raise UsageError(
                f"A row of {folder} is a {known.per}, and a row for each {per} was asked for. Give "
                "another folder."
            )
        if known.plugins and known.per and known.projection is not None:
            return known
        known = replace(known, plugins=rows.plugins, per=per, projection=rows.projection)
        known.write(folder)
        return known

    def with_shapes(self, folder: Path, shapes: dict[str, list[int]]) -> Manifest:
        """With the shapes of the first rows, which are those of all that follow.

        Raises:
            ShapeError: They are fixed, and others.
        """
        # Another process may have fixed them meanwhile.
        known = self if self.shapes else Manifest.read(folder) or self
        if not known.shapes:
            known = replace(known, shapes=shapes)
            known.write(folder)
        wanted = known.shapes
        if shapes != wanted:
            name = next(n for n in {**shapes, **wanted} if shapes.get(n) != wanted.get(n))
            raise ShapeError(
                f"One store is for one model: its part {name!r} has the shape "
                f"{wanted.get(name, 'of nothing')}, and {shapes.get(name, 'nothing')} was appended."
            )
        return known


def _name_of(dtype: torch.dtype) -> str:
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UsageError(f"A store is in float32, bfloat16 or float64. Got {dtype!r}.")
    return names[dtype]
