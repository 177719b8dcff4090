"""Names of samples: given by the user, by place in the data, or by content."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UsageError

Identity: TypeAlias = str | int
Identify: TypeAlias = Callable[[Any], Sequence[Identity]]


def content_hash(sample: Any) -> str:
    """A name for a sample that depends only on its content: 32 hexadecimal digits of SHA-256.

    It is the same on every machine, in every batch and at every place in the data. Dictionaries
    are read in the order of their keys. If one has an ``"attention_mask"``, positions outside the
    mask do not count, so padding does not change the name.

    Args:
        sample: A tensor, a number, a text, or a nested list, tuple or dictionary of these.
    """
    return _name_of(_pieces(sample))


def content_hashes(batch: Any, samples: int) -> list[str]:
    """:func:`content_hash` of each sample of a batch; tensors are read as a whole.

    Args:
        batch: An item of a loader.
        samples: How many samples it has.
    """
    if _has_mask(batch):  # samples have different positions
        return [content_hash(sample_of(batch, n, samples)) for n in range(samples)]
    return [_name_of(pieces) for pieces in zip(*_pieces_of_samples(batch, samples), strict=True)]


def _name_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces_of_samples(batch: Any, samples: int) -> Iterator[Iterable[bytes]]:
    """The pieces of all samples: the first of each, then the second of each, and so on."""
    if isinstance(batch, Tensor) and batch.dim() and len(batch) == samples:
        rows = batch.detach().cpu().reshape(samples, batch.shape[1:].numel())
        rows = rows.clone(memory_format=torch.contiguous_format)
        yield repeat(_kind(batch.dtype, batch.shape[1:]), samples)
        yield (row.tobytes() for row in rows.view(torch.uint8).numpy())
    elif isinstance(batch, Mapping):
        for key, part in sorted(batch.items()):
            yield repeat(repr(key).encode(), samples)
            yield from _pieces_of_samples(part, samples)
    elif isinstance(batch, (list, tuple)) and not _has_entries(batch, samples):
        yield repeat(f"{len(batch)} parts".encode(), samples)
        for part in batch:
            yield from _pieces_of_samples(part, samples)
    elif isinstance(batch, (list, tuple)):
        yield (repr(value).encode() for value in batch)
    else:
        for piece in _pieces(batch):
            yield repeat(piece, samples)


def _has_mask(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        is_masked = isinstance(batch.get("attention_mask"), Tensor)
        return is_masked or any(map(_has_mask, batch.values()))
    return isinstance(batch, (list, tuple)) and any(map(_has_mask, batch))


def _kind(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype} {list(shape)}".encode()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield _kind(value.dtype, value.shape)
        yield bytes_of(value)
    elif isinstance(value, Mapping):
        for key, part in sorted(_unpadded(value).items()):
            yield repr(key).encode()
            yield from _pieces(part)
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)} parts".encode()
        for part in value:
            yield from _pieces(part)
    else:
        yield repr(value).encode()


def _unpadded(sample: Mapping[str, Any]) -> dict[str, Any]:
    mask = sample.get("attention_mask")
    if not isinstance(mask, Tensor):
        return dict(sample)
    kept = mask.bool()
    return {
        key: part[kept] if isinstance(part, Tensor) and part.shape == mask.shape else part
        for key, part in sample.items()
    }


def sample_of(batch: Any, index: int, samples: int) -> Any:
    """One sample of a batch: entry ``index`` of every tensor and list with ``samples`` entries."""
    if isinstance(batch, Tensor):
        return batch[index] if batch.dim() and len(batch) == samples else batch
    if isinstance(batch, Mapping):
        return {key: sample_of(part, index, samples) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _has_entries(batch, samples):
            return batch[index]
        return [sample_of(part, index, samples) for part in batch]
    return batch


def _has_entries(batch: Sequence[Any], samples: int) -> bool:
    """Whether a list has an entry for each sample (texts, for example) and not columns."""
    is_nested = any(isinstance(part, (Tensor, Mapping, list, tuple)) for part in batch)
    return len(batch) == samples and not is_nested


class ByContent:
    """Names samples by their content. Repeated samples get the suffixes ``-1``, ``-2``, ....

    So all rows of the data have a name. It is the same in every run that goes through the data in
    the same order. A shuffled order only exchanges the names of equal samples.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self._seen: Counter[str] = Counter()

    def __call__(self, batch: Any, samples: int) -> list[Identity]:
        """The names of a batch's samples."""
        return [self.named(name) for name in content_hashes(batch, samples)]

    def named(self, name: str) -> Identity:
        """The name of a sample with a hash."""
        times = self._seen[name]
        self._seen[name] += 1
        return f"{name}-{times}" if times else name


class ByPlace:
    """Names samples by their place in the data: ``0, 1, 2, ...``.

    With several processes, each has every ``ranks``-th sample, as dealt by a
    ``DistributedSampler`` without shuffling.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        """Begin at the first sample of a process."""
        self._next, self._step = rank, ranks

    def __call__(self, batch: Any, samples: int) -> list[Identity]:
        """The places of a batch's samples."""
        first = self._next
        self._next += samples * self._step
        return list(range(first, self._next, self._step))


def tokens_of(name: Identity, tokens: int) -> list[Identity]:
    """The names of a sample's tokens: ``"name:0"``, ``"name:1"``, ..."""
    return [f"{name}:{number}" for number in range(tokens)]


def place_of(name: Identity) -> tuple[bool, Any, int]:
    """The sort key of identities: integers before texts, and the tokens of a sample in order."""
    text, mark, number = str(name).rpartition(":")
    if not mark or not number.isdecimal():
        return isinstance(name, str), name, -1
    is_place = text.isdecimal()
    return not is_place, int(text) if is_place else text, int(number)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of all entries, in their order."""
    flat = tensor.detach().cpu().flatten()
    # A copy: one entry may have any stride otherwise.
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def plain(identity: Any) -> Identity:
    """An identity as Python has it: a number of NumPy or of torch becomes an ``int``.

    Raises:
        UsageError: It is neither a text nor an integer, such as an entry of a mask.
    """
    found: Any = identity.item() if hasattr(identity, "item") else identity
    if type(found) not in (str, int):
        raise UsageError(
            f"An identity must be a text or an integer. Got {found!r:.80} of type "
            f"{type(found).__name__}: convert it with str(...). To pick rows by their place, or by "
            "a mask, write [names[n] for n in places] with names = store.identities."
        )
    return found  # type: ignore[no-any-return]


def listed(identities: Any) -> list[Identity]:
    """One identity, or several, as a list."""
    is_one = isinstance(identities, str) or not hasattr(identities, "__len__")
    return [*map(plain, [identities] if is_one else identities)]


def repeated(identities: Iterable[Identity]) -> Identity | None:
    """An identity that several samples have; ``None`` if there is none."""
    return next((name for name, times in Counter(identities).items() if times > 1), None)


def checked(identities: Sequence[Any], samples: int) -> list[Identity]:
    """Identities as strings and integers, one for each sample.

    Raises:
        UsageError: Their number is not that of the samples, one has another type, or two are
            equal.
    """
    if isinstance(identities, (str, Mapping, Set)):
        raise UsageError(f"Identities must be a list, one for each sample. Got {identities!r:.40}.")
    found = [*map(plain, identities)]
    if len(found) != samples:
        raise UsageError(
            f"Got {len(found)} identities for {samples} samples: give one for each sample."
        )
    twice = repeated(found)
    if twice is not None:
        raise UsageError(
            f"Two samples have the identity {twice!r}: number them, or name them by content "
            '(identities="content"), which also gives equal samples different names.'
        )
    return found
