"""The sample of each row that the model receives, as ``backpack(..., samples=index)`` says.

A graph does not tell that two records belong to one user, or two answers to one pair. The index
does; from there on, samples are followed through the graph as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core.engine.active import Samples
from backpack_core.errors import UsageError
from backpack_core.record.models import Run


class Told(NamedTuple):
    """The samples of the rows that the model receives, as the user said.

    Attributes:
        rows: The sample of each row, ``[R]``, on the CPU; the rows of several tensors follow each
            other.
        samples: The number of samples.
        items: For each tensor that the model receives, the samples of its rows, or its only sample;
            ``None`` if ``rows`` is one index for every tensor of its length.
        are_numbers: Whether a list of plain numbers was given, which may also be an index of rows.
    """

    rows: Tensor
    samples: int
    items: tuple[Tensor, ...] | None = None
    are_numbers: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the index is ``[0, 1, ..., N - 1]``: each row is a sample, in order."""
        return self.items is None and self.rows.equal(torch.arange(self.samples, device="cpu"))

    @property
    def facts(self) -> tuple[Any, ...]:
        """What decisions about a pass may depend on."""
        lengths = None if self.items is None else tuple(map(len, self.items))
        return torch.Size((self.samples,)), tuple(self.rows.tolist()), lengths, self.are_numbers

    def fitting(self, runs: Iterable[Run]) -> Told:
        """The index, fitted to what models received in a pass.

        Raises:
            UsageError: One received other tensors, or none with as many rows; or there are as many
                tensors as rows, and numbers may be of either.
        """
        fitted = self
        for run in runs:
            if self._may_be_rows(run):
                raise UsageError(
                    f"samples={self.rows.tolist()} may be for the {len(self.rows)} tensors that "
                    "the model received, or for their rows, which are equally many. Give "
                    "torch.tensor(samples) for the rows, or [torch.tensor([n]) for n in samples] "
                    "for the tensors."
                )
            if self.items is not None and not (self.are_numbers and len(run.inputs) < 2):
                fitted = self._of_items(run)
            elif run.sizes and len(self.rows) not in run.sizes:
                raise UsageError(
                    f"samples=... has {len(self.rows)} entries, and the model received "
                    f"{' and '.join(map(str, run.sizes))} rows. Give it one entry for each row: "
                    "the number of the sample that the row belongs to."
                )
            else:
                fitted = fitted._replace(items=None)
        return fitted

    def _may_be_rows(self, run: Run) -> bool:
        """Whether plain numbers may be meant for the arguments, or for their rows, equally many."""
        is_list = all(len(given.path) > 1 for given in run.inputs)
        counts = {len(run.inputs), *run.sizes}
        return (
            self.are_numbers and not is_list and counts == {len(self.rows)} and len(self.rows) > 1
        )

    def _of_items(self, run: Run) -> Told:
        """Expand an entry for each tensor to the rows of all tensors."""
        items, lengths = self.items or (), [(*given.shape, 1)[0] for given in run.inputs]
        fits = [len(rows) in (1, n) for rows, n in zip(items, lengths, strict=False)]
        if len(items) != len(lengths) or not all(fits):
            raise UsageError(
                f"samples=[...] has {len(items)} entries of lengths {[len(r) for r in items]}, one "
                f"for each tensor that the model receives, and it received {len(lengths)} with "
                f"{lengths} rows. An entry is the number of the sample that a whole tensor belongs "
                "to, or an index of its rows; for one index of all rows, give a tensor."
            )
        rows = [own.expand(n) for own, n in zip(items, lengths, strict=True)]
        return self._replace(rows=torch.cat([_NOBODY, *rows]))


def told(samples: Samples) -> Told:
    """Check what the user gave as ``samples=``.

    Args:
        samples: ``index[row] = sample``; or a list with the sample of each tensor that the model
            receives, or an index of its rows.

    Raises:
        UsageError: These are not whole numbers from zero on.
    """
    items, are_numbers = None, False
    if isinstance(samples, (list, tuple)):
        entries = [_index(entry, samples) for entry in samples]
        items, are_numbers = (
            tuple(e.reshape(-1) for e in entries),
            all(not e.dim() for e in entries),
        )
    index = _index(samples, samples) if items is None else torch.cat([*items, _NOBODY])
    if index.dim() != 1:
        raise _no_index(samples)
    return Told(index, int(index.max()) + 1 if len(index) else 0, items, are_numbers)


_NOBODY = torch.zeros(0, dtype=torch.long, device="cpu")


def _index(entry: object, samples: object) -> Tensor:
    """Numbers of samples, on the CPU."""
    try:
        index = torch.as_tensor(entry, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_index(samples) from error
    is_other = index.is_floating_point() or index.is_complex() or index.dtype is torch.bool
    if index.dim() > 1 or (is_other and index.numel()) or bool((index < 0).any()):
        raise _no_index(samples)
    return index.long()


def _no_index(samples: object) -> UsageError:
    return UsageError(
        "samples=index gives the sample of each row that the model receives: whole numbers from "
        "0 on, shape [rows], such as torch.tensor([0, 0, 1]). For several tensors, give a list "
        f"with a number or an index for each. Got {samples!r:.200}."
    )
