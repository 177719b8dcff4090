"""For what may be refused, but not be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backpack_core.errors import UnsupportedError


@contextmanager
def right_or_refused(
    *words: str, error: type[Exception] = UnsupportedError, may_refuse: bool = True
) -> Iterator[None]:
    """What is checked in the block is right, or it raises an error that says all the words.

    Args:
        words: Parts of the message.
        error: The kind of error.
        may_refuse: Whether an error is as good.
    """
    try:
        yield
    except error as refusal:
        missing = [word for word in words if word not in str(refusal)]
        if missing or not may_refuse:
            raise AssertionError(f"refused, and without saying {missing}") from refusal
