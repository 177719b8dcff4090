"""What a sample is called: by its user, by its place in the data, or by its content."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UsageError

Identity: TypeAlias = str | int
Identify: TypeAlias = Callable[[Any], Sequence[Identity]]


def content_hash(sample: Any) -> str:
    """A name for a sample that depends on its content alone: 32 hexadecimal digits of SHA-256.

    It is the same on every machine, in every batch and at every place in the data. Dictionaries
    count in the order of their keys; where one has an ``"attention_mask"``, positions that the mask
    leaves out do not count, so that padding does not change the name.

    Args:
        sample: A tensor, a number, a text, or a nested list, tuple or dictionary of those.
    """
    digest = hashlib.sha256()
    for piece in _pieces(sample):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        yield f"{flat.dtype} {list(flat.shape)}".encode()
        yield flat.flatten().view(torch.uint8).numpy().tobytes()
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
        if len(batch) == samples and not any(_holds_tensors(part) for part in batch):
            return batch[index]
        return [sample_of(part, index, samples) for part in batch]
    return batch


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple))


class ByContent:
    """Names samples by their content. A sample that occurs again gets ``-1``, ``-2``, ... behind.

    So all rows of the data have a name, and the same one in every run that goes through the data in
    the same order. A shuffled order changes only which of two equal samples is which.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self._seen: Counter[str] = Counter()

    def __call__(self, batch: Any, samples: int) -> list[Identity]:
        """The names of a batch's samples."""
        return [self._next(content_hash(sample_of(batch, n, samples))) for n in range(samples)]

    def _next(self, name: str) -> Identity:
        times = self._seen[name]
        self._seen[name] += 1
        return f"{name}-{times}" if times else name


class ByPlace:
    """Names samples by their place in the data: ``0, 1, 2, ...``.

    Of several processes, each has every ``ranks``-th sample, as a ``DistributedSampler`` without
    shuffling deals them.
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
    """What identities are sorted by: integers before texts, and the tokens of a sample in order."""
    text, mark, number = str(name).rpartition(":")
    if not mark or not number.isdecimal():
        return isinstance(name, str), name, -1
    is_place = text.isdecimal()
    return not is_place, int(text) if is_place else text, int(number)


def checked(identities: Sequence[Any], samples: int) -> list[Identity]:
    """Identities as strings and integers, one for each sample.

    Raises:
        UsageError: There are more or fewer, one is of another type, or two are equal.
    """
    if isinstance(identities, str):
        raise UsageError(
            f"Identities are a list with one for each sample. Got the text {identities!r:.40}."
        )
    found = [value.item() if hasattr(value, "item") else value for value in identities]
    strange = [value for value in found if type(value) not in (str, int)]
    if strange:
        raise UsageError(
            f"An identity is a text or an integer. Got {strange[0]!r:.80} of type "
            f"{type(strange[0]).__name__}: give str(...) of it."
        )
    if len(found) != samples:
        raise UsageError(
            f"There are {len(found)} identities for {samples} samples: give one for each sample."
        )
    twice = [name for name, times in Counter(found).items() if times > 1]
    if twice:
        raise UsageError(
            f"Two samples have the identity {twice[0]!r}: number them, or name them by content "
            '(identities="content"), which tells equal samples apart.'
        )
    return found
