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
    """Gradients by parameter, with the plugins that computed them, and their projection.

    Attributes:
        projection: In the words of :func:`shown`; ``None`` if it is not known.
        weights: The hash of ``Problem.weights``; empty if it is not known.
    """

    def __init__(
        self,
        values: Mapping[str, T],
        plugins: Fingerprint,
        projection: str | None,
        weights: str = "",
    ) -> None:
        """Store the values and their origin."""
        super().__init__(values, plugins)
        self.projection, self.weights = projection, weights


def shown(projection: Projection | None) -> str:
    """The settings of a projection in words; empty for gradients themselves."""
    if projection is None:
        return ""
    dim, seed = int(projection.dim), int(projection.seed)
    return f"Projection(dim={dim}, kind={projection.kind!r}, seed={seed})"


@dataclass(frozen=True)
class Manifest:
    """Settings of a store, as JSON knows them.

    Attributes:
        dtype: Name of the precision.
        rank: The rank of the factors that matrices are stored as; ``None`` for whole matrices.
        about: What the user said about the gradients.
        shapes: The shape of each part for one sample; empty before the first row.
        plugins: Which plugins compute the gradients; empty if that is not known.
        per: Whether rows are those of samples or tokens; empty if that is not known.
        projection: The projection, in the words of :func:`shown`; ``None`` if it is not known.
        weights: The model's weights, see :class:`Projected`.
        loss: The settings of the loss; empty if they are not known.
    """

    dtype: str
    rank: int | None
    about: dict[str, Any]
    shapes: dict[str, list[int]]
    plugins: Fingerprint = field(default_factory=dict)
    per: str = ""
    projection: str | None = None
    weights: str = ""
    loss: str = ""

    @classmethod
    def opened(
        cls,
        folder: Path,
        dtype: torch.dtype | None,
        rank: int | None,
        about: Mapping[str, Any] | None,
    ) -> Manifest:
        """The manifest of the store in a folder; a new store if the folder has none.

        Args:
            folder: Where the store is.
            dtype: The precision asked for; ``None`` for any.
            rank: The rank asked for; ``None`` for any.
            about: What the user says; ``None`` for anything.

        Raises:
            UsageError: The folder is not a store, or has other settings.
        """
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise UsageError(
                f"rank must be a positive number of products for each matrix. Got {rank!r}."
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
                    f"but {value!r} was asked for. Give another folder, or leave out {key}."
                )
        return found

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in a folder; ``None`` for an empty folder.

        Raises:
            UsageError: The folder holds something else.
        """
        path = folder / NAME
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UsageError(
                    f"{path} is damaged ({error}). Copy it from another store of the same run, or "
                    "build the store again."
                ) from error
            if not isinstance(found, dict) or found.pop("version", None) != VERSION:
                raise UsageError(
                    f"Another version of this library wrote {path}: install that, or give another "
                    "folder."
                )
            return cls(**found)
        if not folder.exists():
            if not folder.absolute().parent.is_dir():
                raise UsageError(f"There is no folder {folder.absolute().parent}: make it.")
            return None
        held = [*folder.iterdir()] if folder.is_dir() else [folder]
        if path in held:  # another rank has just written it
            return cls.read(folder)
        strange = [p.name for p in held if not p.name.endswith(UNFINISHED)]
        if strange:
            raise UsageError(
                f"{folder} is not a gradient store: it holds {strange[0]}, but no {NAME}. "
                "Give another folder, or one that does not exist."
            )
        return None

    def write(self, folder: Path) -> None:
        """Put it into the folder."""
        write_json(folder / NAME, {"version": VERSION, **asdict(self)})

    def compare(self, folder: Path, others: Mapping[str, Any], what: str = "the queries") -> None:
        """Refuse gradients that do not belong to the rows; unknown facts are not compared.

        Raises:
            UsageError: Other plugins computed them, or the model had other weights, or they have
                another projection.
        """
        agreed({f"The rows of {folder}": self.plugins, what: fingerprint_of(others)})
        own, other = self.projection, getattr(others, "projection", None)
        if own is not None and other is not None and own != other:
            raise UsageError(
                f"Gradients can be compared if they have one projection, but {what} went through "
                f"{other or 'no projection'}. Use that of the rows of {folder}: {own or 'none'}."
            )
        weights = getattr(others, "weights", "")
        if self.shapes and self.weights and weights and self.weights != weights:
            raise UsageError(
                f"Gradients can be compared if they are of one model, but {what} were computed at "
                f"other weights than the rows of {folder}. Load the checkpoint that the rows are "
                "from, or fill another folder."
            )

    def with_origin(
        self, folder: Path, rows: Projected[Any], per: str, loss: str, is_empty: bool
    ) -> Manifest:
        """The manifest with the origin of the first rows, and so of all later ones.

        Args:
            folder: Where the store is.
            rows: Empty rows with their origin.
            per: Whether a row is a sample or a token.
            loss: The settings of the loss.
            is_empty: Whether no row is stored. Then what an earlier run has said about the rows
                that it was going to store does not count.

        Raises:
            UsageError: The stored rows have another origin or projection, or are of the other kind.
        """
        known = self if self.plugins and self.shapes else Manifest.read(folder) or self
        try:
            known._require_origin(folder, rows, per, loss)
        except UsageError:
            if not is_empty:
                raise
            known = Manifest(self.dtype, self.rank, self.about, {})
        if known.shapes:
            weights, loss = known.weights, known.loss
        else:
            weights = rows.weights
        is_known = known.plugins and known.per and known.projection is not None
        if is_known and (weights, loss) == (known.weights, known.loss):
            return known
        plugins, projection = rows.plugins, rows.projection
        known = replace(known, plugins=plugins, per=per, projection=projection)
        known = replace(known, weights=weights, loss=loss)
        known.write(folder)
        return known

    def _require_origin(self, folder: Path, rows: Projected[Any], per: str, loss: str) -> None:
        self.compare(folder, rows, "those of this process")
        if self.per not in ("", per):
            raise UsageError(
                f"A row of {folder} is a {self.per}, but a row for each {per} was asked for. Give "
                "another folder."
            )
        if self.shapes and self.loss and loss and self.loss != loss:
            raise UsageError(
                f"A store is of one loss: the rows of {folder} are gradients of {self.loss}, but "
                f"this loss is {loss}. Give another folder."
            )

    def with_shapes(self, folder: Path, shapes: dict[str, list[int]], is_empty: bool) -> Manifest:
        """The manifest with the shapes of the first rows, and so of all later ones.

        Args:
            folder: Where the store is.
            shapes: The shape of each part for one sample.
            is_empty: See :meth:`with_origin`.

        Raises:
            ShapeError: The store has other shapes already.
        """
        # Another process may have written them meanwhile.
        known = self if self.shapes else Manifest.read(folder) or self
        if not known.shapes or (is_empty and shapes != known.shapes):
            known = replace(known, shapes=shapes)
            known.write(folder)
        wanted = known.shapes
        if shapes != wanted:
            name = next(n for n in {**shapes, **wanted} if shapes.get(n) != wanted.get(n))
            raise ShapeError(
                f"One store is for one model: its part {name!r} has the shape "
                f"{wanted.get(name, 'of nothing')}, but {shapes.get(name, 'nothing')} was appended."
            )
        return known

    def require_unchanged(self, folder: Path) -> None:
        """Refuse to write rows where another process has meanwhile begun to store other ones.

        Raises:
            UsageError: The folder now says something else about its rows.
        """
        own, found = asdict(self), asdict(Manifest.read(folder) or self)
        other = next((k for k in own if own[k] and found[k] and own[k] != found[k]), None)
        if other is not None:
            raise UsageError(
                f"Another process has begun to store rows in {folder} that do not belong to those "
                f"of this process: their {other} differ. Nothing more was written. Give another "
                "folder."
            )


def _name_of(dtype: torch.dtype) -> str:
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UsageError(f"A store must be in float32, bfloat16 or float64. Got {dtype!r}.")
    return names[dtype]
