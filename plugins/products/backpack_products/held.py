"""The tensors that an object holds, with their versions, which tell whether one was changed."""

from __future__ import annotations

from abc import ABCMeta

import torch
from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.record.view import View

# Types of attributes that hold no tensors, or whose tensors are found elsewhere. A set of exact
# types is faster than ``isinstance``.
PLAIN = {int, str, bool, type(None), type, ABCMeta, frozenset, list, torch.Size, View}

Versions = list[tuple[Tensor, int]]


def held_by(value: object) -> Versions:
    """The tensors that a reading, or another object, holds, with their versions.

    A reading with a method ``held()`` says so itself. Of other objects, these are the tensors among
    their attributes, and in dicts among these.
    """
    own = getattr(value, "held", None) if isinstance(value, Reading) else None
    if own is not None:
        found: Versions = own()
        return found
    versions: Versions = []
    for item in getattr(value, "__dict__", {}).values():
        kind = type(item)
        if kind in PLAIN or (kind is dict and not item):
            continue
        for part in item.values() if kind is dict else (item,):  # dicts are results and caches
            if Tensor in type(part).__mro__:
                versions += ((part, part._version),)
    return versions
