"""Gradients of samples on disk, found by identity and searched by inner products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from filelock import FileLock, Timeout

from backpack_attribution import forms
from backpack_attribution.disk import UNFINISHED
from backpack_attribution.forms import Gradients, Value
from backpack_attribution.identities import Identity, checked, listed, plain
from backpack_attribution.manifest import DTYPES, Manifest, Projected, shown
from backpack_attribution.scores import Found, Scores, require_count, require_order
from backpack_attribution.shard import Block, Shards, Waiting
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import Projection
from backpack_products.fingerprint import Fingerprint

if TYPE_CHECKING:
    import pyarrow


SECONDS: Final = 60  # after which rows that wait are written: so much work is lost by a kill


class GradientStore:
    """A folder of gradients: rows with identities, in parts (usually one for each parameter).

    Example:
        >>> with GradientStore("gradients", dtype=torch.bfloat16) as store:
        ...     for names, batch in loader:
        ...         if store.missing(names):
        ...             store.append(names, gradients_of(batch))
        >>> store.search(queries, k=10)

    The folder holds ``store.json`` (shapes of the parts, precision, what the user says about them)
    and shards, ``NUMBER-RANK-TOKEN.safetensors``. A shard holds whole samples: their identities in
    its header, and one or several tensors for each part. It is written under another name, flushed,
    and renamed, so it is whole or absent. Samples that are in no shard are ``missing``. So a run
    that was killed can go through its data again and add what is missing.

    Several processes can append to one folder, each with its own shards; a store that is opened
    afterwards has the rows of all. Shards are mapped into memory when they are read.

    Attributes:
        folder: Where the store is.
        dtype: The precision of the stored numbers.
        rank: Rank of the factors that matrices are stored as; ``None`` for whole matrices.
        shapes: The shape of each part for one sample, ``[*θ]``; empty before the first row.
        about: What the user said about the gradients: the model, the projection.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        about: Mapping[str, Any] | None = None,
        shard_bytes: int = 2**28,
        process: int | None = None,
    ) -> None:
        """Open a store, or begin one.

        Args:
            folder: Where it is, or will be. It is made if its parent exists.
            dtype: ``torch.float32`` (the default of a new store), ``bfloat16`` or ``float64``.
            rank: Store a matrix ``[O, I]`` of each sample as its best approximation of this rank,
                ``Σ_c left[:, c] right[:, c]ᵀ``, if that takes less memory.
            about: Facts about the gradients, as JSON. For an existing store, they must be the same
                as before.
            shard_bytes: A shard is written when it has this size, or after a minute; also at the
                end of the block.
            process: Which of several writers this is; default: the rank in ``torch.distributed``.

        Raises:
            UsageError: The folder is not a store, or is one with other settings.
        """
        self.folder = Path(folder)
        self._shard_bytes, self._process = shard_bytes, _rank() if process is None else process
        self._waiting, self._written = Waiting(), monotonic()
        self._lock: Any = None  # once a block was opened; blocks may be nested
        self._manifest = Manifest.opened(self.folder, dtype, rank, about)
        self._shards = Shards(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the stored numbers."""
        return DTYPES[self._manifest.dtype]

    @property
    def rank(self) -> int | None:
        """The rank of the factors that matrices are stored as."""
        return self._manifest.rank

    @property
    def about(self) -> dict[str, Any]:
        """What the user said about the gradients."""
        return self._manifest.about

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each part for one sample, ``[*θ]``."""
        return {name: torch.Size(shape) for name, shape in self._manifest.shapes.items()}

    @property
    def identities(self) -> list[Identity]:
        """Identities of the stored samples, in the order of the rows."""
        return self._shards.identities

    def __len__(self) -> int:
        """Number of stored samples; those that wait for their shard do not count."""
        return len(self._shards)

    @property
    def is_empty(self) -> bool:
        """Whether no row is in the folder, of no process, and none waits here for its shard."""
        return not (self._waiting or any(self.folder.glob("*.safetensors")))

    def __contains__(self, identity: object) -> bool:
        """Whether a sample is stored, or waits for its shard."""
        return identity in self._shards or identity in self._waiting

    def __repr__(self) -> str:
        """Samples, parts and precision."""
        kind = f" of rank {self.rank}" if self.rank else ""
        return (
            f"<GradientStore {len(self)} samples, {len(self.shapes)} parts{kind}, "
            f"{self._manifest.dtype}, {self.folder}>"
        )

    def missing(self, identities: Sequence[Identity]) -> list[int]:
        """Places of the identities that are not stored: empty if a whole batch is stored."""
        return [place for place, name in enumerate(map(plain, identities)) if name not in self]

    def computed_by(
        self,
        plugins: Fingerprint,
        per: str = "sample",
        projection: Projection | None = None,
        weights: str = "",
        loss: str = "",
    ) -> None:
        """Compare the plugins that compute rows now with those that computed the stored rows.

        A store without a fingerprint takes this one. :func:`~backpack_attribution.fill` calls this
        method; call it yourself before you append rows that you computed.

        Args:
            plugins: The result of :func:`backpack_products.fingerprint.fingerprint` for the model.
            per: Whether a row is a ``"sample"`` or a ``"token"``.
            projection: The projection of rows; default: they are the gradients themselves.
            weights: A hash of the model's weights; empty if they are not compared.
            loss: The settings of the loss, likewise.

        Raises:
            UsageError: The plugins differ, or rows of the other kind are stored.
        """
        origin = Projected[Value]({}, plugins, shown(projection), weights)
        place = self.folder, origin, per, loss
        self._manifest = self._manifest.with_origin(*place, self.is_empty)

    def append(self, identities: Sequence[Identity], gradients: Mapping[str, Value]) -> None:
        """Add samples.

        Args:
            identities: One for each sample.
            gradients: A tensor ``[N, *θ]`` or individual gradients as products for each part, with
                the same parts each time.

        Raises:
            ShapeError: The parts or their shapes are not those of the store.
            UsageError: An identity is stored already, or a value is not finite.
        """
        if not gradients:
            raise UsageError("append() got no gradients: give {name: [N, *θ]}.")
        samples = len(next(iter(gradients.values())))
        names = checked(identities, samples)
        known = [name for name in names if name in self]
        if known:
            raise UsageError(
                f"A gradient of {known[0]!r} is in the store already. Leave out what is stored: "
                "store.missing(names) has the places of the others."
            )
        self._check_shapes(gradients, samples)
        if not samples:
            return
        made = {
            name: forms.stored(value, self.dtype, self.rank) for name, value in gradients.items()
        }
        strange = [name for name, value in made.items() if not forms.is_finite(value)]
        if strange:
            raise UsageError(
                f"The gradient of {strange[0]!r} is not finite for some of {names[:3]}...: nothing "
                f"was stored. Look at the loss of these samples, and at the range of {self.dtype}."
            )
        self._waiting.add(names, made)
        is_late = monotonic() - self._written > SECONDS
        if is_late or self._waiting.nbytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the samples that wait as one shard; they are safe afterwards."""
        block = self._waiting.joined()
        if block is not None:
            self._manifest.require_unchanged(self.folder)
            self._shards.write(block, self._manifest.shapes, self._process)
            self._waiting, self._written = Waiting(), monotonic()

    def __enter__(self) -> GradientStore:
        """The store itself; at the end of the block, waiting samples are written.

        Raises:
            UsageError: Another writer of the same number is at work.
        """
        self._lock = self._lock or FileLock(
            self.folder / f".writer-{self._process:04d}{UNFINISHED}", timeout=0, thread_local=False
        )
        is_first = not self._lock.is_locked
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"Another writer is at work in {self.folder}, and both would store the same "
                "samples. Wait until it has finished, or give another folder; processes of one run "
                "need different numbers, GradientStore(..., process=...)."
            ) from error
        except OSError:  # a folder that is only read, or a file system without locks
            return self
        if is_first:
            self._begin_to_write()
        return self

    def _begin_to_write(self) -> None:
        """Read what others have written until now, and remove what a killed run left unfinished."""
        try:
            self._shards.read_new()
            for path in self.folder.glob(f".*-{self._process:04d}-*{UNFINISHED}"):
                path.unlink(missing_ok=True)
        except BaseException:
            self._lock.release()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not inside of a block."""
        return {**vars(self), "_lock": None}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write waiting samples, even after an error: they are complete."""
        try:
            self.flush()
        finally:
            if self._lock is not None:
                self._lock.release()

    def blocks(self, rows: int = 4096) -> Iterator[Block]:
        """All stored samples, some at a time, mapped from disk.

        Args:
            rows: The largest number of samples at a time.
        """
        return self._shards.blocks(rows)

    def __getitem__(self, identities: Identity | Sequence[Identity]) -> Gradients:
        """The gradients of some samples, ``[n, *θ]`` for each part, in the order asked for.

        Raises:
            UsageError: A sample is not stored.
        """
        names = listed(identities)
        if not names:
            raise UsageError("No samples were chosen: give at least one identity.")
        for name in names:
            if name not in self._shards:
                where = "waits for its shard: call flush()" if name in self else "is not stored"
                raise UsageError(f"{name!r} {where}. {self.folder} has {len(self)} samples.")
        known = self._manifest
        rows = self._shards.rows(names)
        return Projected(rows, known.plugins, known.projection, known.weights)

    def scores(
        self,
        queries: Mapping[str, Value],
        names: Sequence[Identity] | None = None,
        cosine: bool = False,
    ) -> Scores:
        """Inner products of all stored samples with queries, summed over parts.

        Args:
            queries: A tensor ``[M, *θ]`` for each part; parts that are left out do not count.
            names: Identities of the queries; default: ``0, 1, 2, ...``.
            cosine: Divide by the norms of both, over the parts of the queries.

        Raises:
            ShapeError: A query does not fit the part.
            UsageError: The queries were computed by other plugins, or projected otherwise.
        """
        count = self.count_of(queries)
        names = checked(range(count) if names is None else names, count)
        product = forms.cosines if cosine else forms.inner
        parts = [product(block.gradients, queries) for block in self.blocks()]
        values = torch.cat(parts) if parts else torch.zeros(0, count, device="cpu")
        kind = "cosines" if cosine else "inner products"
        return Scores(values.cpu(), self.identities, names, kind)

    def search(
        self,
        queries: Mapping[str, Value],
        k: int = 10,
        largest: bool = True,
        cosine: bool = False,
        rows: int = 4096,
    ) -> Found:
        """The ``k`` stored samples with the largest inner products with each query.

        Blocks of rows are multiplied by all queries; memory holds one block, and ``k`` scores for
        each query.

        Args:
            queries: A tensor ``[M, *θ]`` for each part; parts that are left out do not count.
            k: How many; fewer if there are fewer samples.
            largest: Whether to return the largest, or the smallest.
            cosine: Divide by the norms of both, over the parts of the queries.
            rows: The number of samples in a block.

        Raises:
            ShapeError: A query does not fit the part.
            UsageError: A number is not a positive integer, products of large rows and queries are
                NaN, or as for :meth:`scores`.
        """
        count = self.count_of(queries)
        require_count(k, rows)
        values, done = torch.zeros(count, 0, device="cpu"), 0
        places = values.long()
        product = forms.cosines if cosine else forms.inner
        for block in self.blocks(rows):
            scores = product(block.gradients, queries).T.cpu()
            require_order(scores)
            rows_of = done + torch.arange(scores.shape[1], device="cpu").expand_as(scores)
            done += scores.shape[1]
            values = torch.cat([values.to(scores.dtype), scores], 1)
            places = torch.cat([places, rows_of], 1)
            values, kept = values.topk(min(k, values.shape[1]), dim=1, largest=largest)
            places = places.gather(1, kept)
        known = self.identities
        return Found(values, [[known[n] for n in row] for row in places.tolist()])

    def count_of(self, queries: Mapping[str, Value]) -> int:
        """The number of queries, if they fit the rows.

        Args:
            queries: A tensor ``[M, *θ]`` for each part.

        Raises:
            UsageError: The queries have other plugins, weights or another projection.
            ShapeError: The queries have other parts or shapes.
        """
        self._manifest.compare(self.folder, queries)
        if not self.shapes:
            raise UsageError(f"{self.folder} has no rows yet, to compare with queries: fill it.")
        return forms.count_of(queries, self.shapes)

    def index(self) -> dict[str, list[Any]]:
        """Where each sample is: columns ``identity``, ``shard`` (a file name) and ``row``."""
        return self._shards.index()

    def to_arrow(self) -> pyarrow.Table:
        """The :meth:`index` as an Arrow table, identities as texts.

        Raises:
            UsageError: pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError as error:
            raise UsageError(
                "to_arrow() needs pyarrow, which is not installed. Run "
                "`pip install 'backpack-attribution[arrow]'`."
            ) from error
        columns = self.index()
        return pyarrow.table({**columns, "identity": [*map(str, columns["identity"])]})

    def _check_shapes(self, gradients: Mapping[str, Value], samples: int) -> None:
        lengths = {name: len(value) for name, value in gradients.items()}
        if set(lengths.values()) != {samples}:
            raise ShapeError(f"All parts need the samples on axis 0. Got lengths {lengths}.")
        shapes = {name: [*value.shape[1:]] for name, value in gradients.items()}
        self._manifest = self._manifest.with_shapes(self.folder, shapes, self.is_empty)


def _rank() -> int:
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_running else 0
