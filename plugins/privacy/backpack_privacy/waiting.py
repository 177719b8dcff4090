"""Batches that were drawn, and wait for their backward pass."""

from __future__ import annotations

from collections import deque

from backpack_core.errors import UsageError
from backpack_privacy.sampling import Draw
from backpack_privacy.sums import Sums


class Waiting:
    """A queue of draws, in the order in which their batches are shown.

    Attributes:
        ahead: How many may wait while another one is drawn.
    """

    def __init__(self) -> None:
        """Nothing waits."""
        self.ahead = 0
        self._drawn, self._empty = deque[Draw](), 0
        self._is_failed = False  # the pass of the first one raised
        self._is_begun = False  # parts of its batch are through

    def forget(self) -> None:
        """An epoch begins; what was left of the last one does not count."""
        self._drawn.clear()
        self._empty, self._is_failed, self._is_begun = 0, False, False

    def add(self, draw: Draw, sums: Sums) -> bool:
        """A batch, or a part of one, is about to be shown.

        Args:
            draw: What is in it.
            sums: Those of the batch that is worked on.

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
        """Refuse to go on while a batch is not used, beyond those that may wait.

        Args:
            sums: Those of the batch that is worked on.

        Raises:
            UsageError: One is not.
        """
        if self._is_failed:
            raise UsageError(
                "The backward pass of the batch before raised, and the batch would be left out, "
                "which could tell about its samples. Mend what raised, or go backward again "
                "before the next batch comes; a new loop over private.loader begins anew."
            )
        if sums.is_complete:
            raise UsageError(
                "The sums of the last batch are complete, and no step was taken. Call "
                "optimizer.step() after `with private:`, or use private.step(loss)."
            )
        if len(self._drawn) > self.ahead:
            raise UsageError(
                "The batch before was drawn and not used. A step has to be taken for every batch: "
                "which ones are left out could tell about their samples, and the others' order "
                "would be lost. To stop early, leave the loop."
            )

    def take(self) -> Draw:
        """The draw whose backward pass begins; it waits on until :meth:`done` is told.

        Raises:
            UsageError: None waits, or another part of its batch is lost.
        """
        if self._is_failed and self._is_begun:
            raise UsageError(
                "The backward pass of a part of the batch raised, and the parts before are lost. "
                "Mend what raised, and begin a new loop over private.loader."
            )
        if not self._drawn:
            raise UsageError(
                "No batch of private.loader is waiting for a backward pass. Loop over "
                "private.loader, not over the loader that was given to make_private(...), and go "
                "backward once for each batch: what is spent depends on how batches are drawn."
            )
        return self._drawn[0]

    def failed(self) -> None:
        """The pass of the draw that was taken raised."""
        self._is_failed = True

    def done(self) -> None:
        """The pass of the draw that was taken is through."""
        self._is_begun, self._is_failed = not self._drawn.popleft().is_last, False

    def take_empty(self) -> int:
        """How many steps without samples are due, now that a step was taken."""
        found, self._empty = self._empty, 0
        return found
