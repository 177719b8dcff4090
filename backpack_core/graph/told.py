"""Which sample each row belongs to, where the user says so: ``backpack(..., samples=index)``.

Nothing in a graph tells that two records are one user's, or two answers one pair. Everything else
that is known of samples follows from this as it does from what the model received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UsageError

Samples: TypeAlias = Tensor | Sequence[int]


class Told(NamedTuple):
    """What was said of the rows that the model receives.

    Attributes:
        rows: The sample of each row, ``[R]``, on the CPU.
        samples: How many there are.
        is_said: Whether the user says so; else sums in the model do.
    """

    rows: Tensor
    samples: int
    is_said: bool = True

    @property
    def is_usual(self) -> bool:
        """Whether each row is a sample, in order."""
        return self.rows.equal(torch.arange(self.samples, device="cpu"))

    def require(self, received: Iterable[tuple[int, ...]]) -> None:
        """See that models received as many rows.

        Args:
            received: For each run of a model, how many rows its input tensors had.

        Raises:
            UsageError: One received none with as many.
        """
        for sizes in received if self.is_said else ():
            if sizes and len(self.rows) not in sizes:
                raise UsageError(
                    f"samples=... has {len(self.rows)} entries, and the model received "
                    f"{' and '.join(map(str, sizes))} rows. Give it one entry for each row: the "
                    "number of the sample that the row belongs to."
                )


def told(samples: Samples) -> Told:
    """Check what was said.

    Args:
        samples: ``index[row] = sample``.

    Raises:
        UsageError: These are no whole numbers from zero on.
    """
    try:
        index = torch.as_tensor(samples).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_index(samples) from error
    is_whole = not (index.is_floating_point() or index.is_complex() or index.dtype is torch.bool)
    if index.dim() != 1 or not (is_whole or not index.numel()):
        raise _no_index(samples)
    index = index.long()
    if bool((index < 0).any()):
        raise _no_index(samples)
    return Told(index, int(index.max()) + 1 if len(index) else 0)


def _no_index(samples: object) -> UsageError:
    return UsageError(
        "samples=index says to which sample each row belongs that the model receives: whole "
        f"numbers from 0 on, shape [rows], as torch.tensor([0, 0, 1]). Got {samples!r:.200}."
    )
