"""Prints the core's log inside a block with ``debug=True``."""

from __future__ import annotations

import logging
import threading


class Printer(logging.Handler):
    """Prints what the core logs; blocks that overlap share one."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.INFO)
        self._logger = logger
        self._level = logging.NOTSET
        self._blocks = 0
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        print("[DEBUG]", record.getMessage())

    def begin(self) -> None:
        """Print from now on."""
        with self._turn:
            self._blocks += 1
            if self._blocks == 1:
                self._level = self._logger.level
                self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
                self._logger.addHandler(self)

    def end(self) -> None:
        """Stop, unless another block is open."""
        with self._turn:
            self._blocks -= 1
            if not self._blocks:
                self._logger.removeHandler(self)
                self._logger.setLevel(self._level)
