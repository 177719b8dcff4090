"""Refuses copies of a private optimizer: they would lack its hooks, and take plain gradients."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any, NoReturn, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from backpack_core.errors import UsageError

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)
_NAME = "__reduce_ex__"  # copy.copy, copy.deepcopy and pickle ask an object for it


def refuse_copies(optimizer: Optimizer) -> None:
    """Let copies and pickles of an optimizer raise an error."""
    vars(optimizer)[_NAME] = _refuse


def allow_copies(optimizer: Optimizer) -> None:
    """Let an optimizer be copied as before."""
    vars(optimizer).pop(_NAME, None)


def twin_of(optimizer: _Optimizer) -> _Optimizer:
    """A copy of an optimizer and its parameters, which takes plain gradients.

    Attributes of a user's class, which torch leaves out of copies, are copied as well. Functions
    are not: schedulers put one in the place of ``step()``.
    """
    allow_copies(optimizer)
    try:
        known: dict[int, Any] = {}
        twin = deepcopy(optimizer, known)
        for name in vars(optimizer).keys() - vars(twin).keys():
            value = vars(optimizer)[name]
            if isinstance(value, Module) or not callable(value):
                with suppress(Exception):  # locks and files have no copy; few steps need them
                    vars(twin)[name] = deepcopy(value, known)
        return twin
    finally:
        refuse_copies(optimizer)


def _refuse(protocol: Any) -> NoReturn:
    raise UsageError(
        "The optimizer is private, and cannot be copied or pickled: a copy would take plain "
        "gradients. Save optimizer.state_dict() and private.state_dict(). To train a copy of the "
        "model, make an optimizer for it, load both, and call make_private(...) for it."
    )
