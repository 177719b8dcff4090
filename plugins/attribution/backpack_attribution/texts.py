"""Texts on disk as batches for a causal language model of the transformers package."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_attribution.identities import ByContent, Identity, content_hash, repeated
from backpack_core.errors import UsageError

Record = Mapping[str, Any]
_ENCODING = "utf-8-sig"  # spreadsheets begin their csv with a mark


def read_records(path: str | Path) -> Sequence[Record]:
    """The records of a file or a folder.

    Args:
        path: ``.jsonl`` (an object on each line), ``.json`` (a list of objects), ``.csv`` (with a
            header), ``.txt`` (a text on each line, as ``"text"``), or a folder that ``datasets``
            has saved. Empty lines do not count.

    Raises:
        UsageError: The file does not exist or has another kind, or ``datasets`` is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"There is no data at {path}: give a file or a folder.")
    if path.is_dir():
        return _saved(path)
    readers = {".jsonl": _lines, ".json": _list, ".csv": _table, ".txt": _plain}
    if path.suffix not in readers:
        raise UsageError(
            f"{path} is not one of {', '.join(readers)}, or a folder of datasets: convert it."
        )
    try:
        found = [*readers[path.suffix](path)]
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not found or not all(isinstance(record, Mapping) for record in found):
        raise UsageError(f"{path} has no records, or has some that are not objects with fields.")
    return found


def _read_lines(path: Path) -> Iterator[str]:
    """The lines; unlike in ``splitlines``, form feeds and paragraph separators do not end one."""
    with path.open(encoding=_ENCODING) as file:
        for line in file:
            yield line.removesuffix("\n")


def _lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error})") from error


def _list(path: Path) -> Iterator[Any]:
    found = json.loads(path.read_text(encoding=_ENCODING))
    yield from found if isinstance(found, list) else ()


def _table(path: Path) -> Iterator[Any]:
    with path.open(encoding=_ENCODING, newline="") as file:
        yield from csv.DictReader(file)


def _plain(path: Path) -> Iterator[Any]:
    for line in _read_lines(path):
        if line.strip():
            yield {"text": line}


def _saved(path: Path) -> Sequence[Record]:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{path} is a folder, which needs datasets, and datasets is not installed. Run "
            "`pip install 'backpack-attribution[datasets]'`, or give json lines or csv."
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(path))
    except OSError as error:
        raise UsageError(
            f"{path} is a folder, but datasets did not save it with save_to_disk: give a folder of "
            "this kind, or a file."
        ) from error
    if isinstance(found, Mapping):
        raise UsageError(f"{path} has the splits {[*found]}: give the folder of one of them.")
    records: Sequence[Record] = found
    return records


@dataclass(frozen=True)
class Texts:
    """Records as tokens, in batches.

    Iterating gives dictionaries ``input_ids``, ``attention_mask`` and ``labels``; padding, and
    prompts, have the label -100.

    Attributes:
        records: The records.
        tokenizer: A tokenizer of the transformers package.
        text: The field with the text, or with the completion if records have a prompt.
        prompt: The field before it, which does not count in the loss; ``None`` for none.
        id: The field that names a record; ``"row"`` for its place, ``"content"`` for a hash.
        size: The number of records in a batch.
        length: The largest number of tokens of a text; the rest is cut off.
    """

    records: Sequence[Record]
    tokenizer: Any
    text: str = "text"
    prompt: str | None = None
    id: str = "row"
    size: int = 8
    length: int = 512

    def __post_init__(self) -> None:
        """Check that all records have the fields.

        Raises:
            UsageError: A record lacks a field, or has none of texts there.
        """
        shown = [self.text, *([self.prompt] if self.prompt else [])]
        own = shown + ([self.id] if self.id not in ("row", "content") else [])
        for field in own:
            missing = [n for n, record in enumerate(self.records) if record.get(field) is None]
            if missing:
                raise UsageError(
                    f"Record {missing[0]} has no field {field!r}. It has "
                    f"{[*self.records[missing[0]]]}: name the fields with --text, --prompt, --id."
                )
        for field in shown:
            nested = (isinstance(record[field], (list, Mapping)) for record in self.records)
            place = next((n for n, is_nested in enumerate(nested) if is_nested), None)
            if place is not None:
                raise UsageError(
                    f"The field {field!r} of record {place} is a "
                    f"{type(self.records[place][field]).__name__}, not a text. Write its parts as "
                    "one text first, such as messages by the template of the chat."
                )

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.records) // self.size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches, each padded to its longest text."""
        for first in range(0, len(self.records), self.size):
            rows = range(first, min(first + self.size, len(self.records)))
            yield self._batch([self._tokens(n) for n in rows])

    def identities(self) -> list[Identity]:
        """Names of all records; by content, equal records have different suffixes.

        Raises:
            UsageError: Two records have the same name.
        """
        if self.id == "row":
            return [*range(len(self.records))]
        if self.id == "content":
            names, fields = ByContent(), [field for field in (self.prompt, self.text) if field]
            each = ([str(record[field]) for field in fields] for record in self.records)
            return [names.named(content_hash(own)) for own in each]
        found: list[Identity] = [str(record[self.id]) for record in self.records]
        twice = repeated(found)
        if twice is not None:
            raise UsageError(
                f"Two records have {twice!r} in the field {self.id!r}: name records by another "
                "field, by --id row, or by --id content."
            )
        return found

    def shown(self, record: Record) -> str:
        """The text of a record, after its prompt."""
        return f"{record[self.prompt] if self.prompt else ''}{record[self.text]}"

    def _tokens(self, number: int) -> tuple[list[int], int]:
        """Tokens of a record, and how many of them are the prompt."""
        record = self.records[number]
        first, own, last = self._parts(record[self.text])
        if self.prompt:  # what a tokenizer puts around a text goes around both
            _, before, _ = self._parts(record[self.prompt])
            first = [*first, *before]
        found = [*first, *own, *last][: self.length]
        count = len(first) if self.prompt else 0
        if not own or len(found) < 2 or len(found) <= count:
            raise UsageError(
                f"The text of record {number}, {self.shown(record)!r:.60}, has no token to predict "
                f"within {self.length} tokens: leave it out, or allow more with --length."
            )
        return found, count

    def _parts(self, text: Any) -> tuple[list[int], list[int], list[int]]:
        """What the tokenizer puts before a text, the tokens of the text, and what it puts after."""
        found = self.tokenizer(str(text), return_special_tokens_mask=True)
        ids, mask = found["input_ids"], found["special_tokens_mask"]
        start = next((n for n, is_added in enumerate(mask) if not is_added), len(ids))
        end = next((len(ids) - n for n, is_added in enumerate(mask[::-1]) if not is_added), start)
        return ids[:start], ids[start:end], ids[end:]

    def _batch(self, rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        width = max(len(tokens) for tokens, _ in rows)
        padding = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(rows), width), padding)
        labels = torch.full((len(rows), width), -100)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (tokens, before) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, before : len(tokens)] = torch.tensor(tokens[before:])
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def load_model(folder: str | Path, parameters: str | None = None) -> tuple[Module, Any]:
    """A causal language model and its tokenizer, from a folder, in evaluation mode.

    Args:
        folder: A folder that ``save_pretrained`` wrote.
        parameters: A regular expression: parameters are frozen unless their names contain it.

    Raises:
        UsageError: The folder holds no model, transformers is not installed, or no parameter fits.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "To read models, transformers is needed, which is not installed. Run "
            "`pip install 'backpack-attribution[transformers]'`."
        ) from error
    if not Path(folder).is_dir():
        raise UsageError(f"There is no folder {folder}: models are read from disk.")
    try:
        models: Any = AutoModelForCausalLM
        model: Any = models.from_pretrained(folder, local_files_only=True).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no causal language model: {error}") from error
    model.config.use_cache = False
    try:
        wanted = re.compile(parameters or "")
    except re.error as error:
        raise UsageError(
            f"--parameters must be a regular expression. Got {parameters!r}: {error}."
        ) from error
    for name, p in model.named_parameters():
        p.requires_grad_(wanted.search(name) is not None)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"No parameter has {parameters!r} in its name.")
    return model, tokenizer


def longest(model: Module, length: int) -> int:
    """How many tokens of a text are taken: as asked for, but at most the model's positions."""
    config: Any = model.config
    places = getattr(config, "max_position_embeddings", None)
    return length if places is None else min(length, places)


def coverage(model: Module, covered: Sequence[str]) -> str:
    """A text that counts the parameters that take part, and names the others.

    Args:
        model: The model.
        covered: Names of the parameters that have a gradient.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    unused = [name for name in sizes if name not in covered and name not in frozen]
    entries = sum(sizes[name] for name in covered)
    parts = [f"{len(covered)} of {len(sizes)} parameters take part, {entries:,} numbers."]
    for names, why in ((frozen, "Frozen"), (unused, "Without influence on the loss")):
        if names:
            parts.append(f"{why}: {', '.join(names)}.")
    return " ".join(parts)
