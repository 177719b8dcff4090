"""Batches that were drawn and wait for their backward pass."""

from __future__ import annotations

from collections import deque

from backpack_core.errors import UsageError
from backpack_privacy.sampling import Draw
from backpack_privacy.sums import Sums


class Waiting:
    """A queue of draws, in the order of their batches.

    Attributes:
        ahead: How many draws may wait while another one is drawn.
    """

    def __init__(self) -> None:
        """Nothing waits."""
        self.ahead = 0
        self._drawn, self._empty = deque[Draw](), 0
        self._is_failed = False  # the pass of the first one raised an error
        self._is_begun = False  # parts of its batch have finished

    def forget(self) -> None:
        """An epoch begins; the rest of the last one does not count."""
        self._drawn.clear()
        self._empty, self._is_failed, self._is_begun = 0, False, False

    def add(self, draw: Draw, sums: Sums) -> bool:
        """A batch, or a part of one, is about to be shown.

        Args:
            draw: What is in it.
            sums: The sums of the present batch.

        Returns:
            Whether a step without samples is due now.

        Raises:
            UsageError: The batch before was not used.
        """
        self.check(sums)
        if draw.rows:
            self._drawn.append(draw)
            return False
        if self._drawn or sums.is_partial:
            self._empty += 1  # after the step that is due first
            return False
        return True

    def check(self, sums: Sums) -> None:
        """Refuse to continue while more batches are unused than may wait.

        Args:
            sums: The sums of the present batch.

        Raises:
            UsageError: A batch was not used.
        """
        if self._is_failed:
            raise UsageError(
                "The backward pass of the batch before raised an error, so the batch would be left "
                "out, which could reveal something about its samples. Mend the error, or go "
                "backward again before the next batch comes; a new loop over private.loader starts "
                "again."
            )
        _check_due(sums)
        if len(self._drawn) > self.ahead:
            raise UsageError(
                "The batch before was drawn but not used. Take a step for every batch: the choice "
                "of those left out could reveal something about their samples, and the order of "
                "the others would be lost. To stop early, leave the loop."
            )

    def take(self, sums: Sums) -> Draw:
        """The draw for the next backward pass; it stays in the queue until :meth:`done`.

        Args:
            sums: The sums of the present batch.

        Raises:
            UsageError: No draw waits, another part of its batch is lost, or a step is due.
        """
        _check_due(sums)
        if self._is_failed and self._is_begun:
            raise UsageError(
                "The backward pass of a part of the batch raised an error, and the parts before "
                "are lost. Mend the error, and begin a new loop over private.loader."
            )
        if not self._drawn:
            raise UsageError(
                "No batch of private.loader is waiting for a backward pass. Loop over "
                "private.loader, not over the loader that was passed to make_private(...), and go "
                "backward once for each batch: the privacy cost depends on how batches are drawn."
            )
        return self._drawn[0]

    def failed(self) -> None:
        """The pass of the draw that was taken raised an error."""
        self._is_failed = True

    def done(self) -> None:
        """The pass of the draw that was taken has finished."""
        self._is_begun, self._is_failed = not self._drawn.popleft().is_last, False

    def take_empty(self) -> int:
        """How many steps without samples are due after a step."""
        found, self._empty = self._empty, 0
        return found


def _check_due(sums: Sums) -> None:
    """Refuse to continue before the step of a batch that has gone backward."""
    if sums.is_complete:
        raise UsageError(
            "The sums of the last batch are complete, but no step was taken. Call "
            "optimizer.step() after `with private:`, or use private.step(loss). If that raised "
            "an error, mend it and call optimizer.step(), or begin a new loop over private.loader."
        )
