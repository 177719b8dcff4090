"""Checks the class attributes that a plugin's class declares, before the class is used.

The base classes serve as the table: their attributes are the possible declarations, and a default
value shows the type. An author's class may add attributes of its own, but not a name that resembles
a declaration, which is probably a misspelling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache
from types import FunctionType, NoneType
from typing import Any, Final

from torch import Tensor

from backpack_core.contract.bases import BASES, Candidate, judge
from backpack_core.contract.rules import MODULE_TYPES, LayerRule, is_module_type
from backpack_products.open_functions import Operation

_STARS: Final = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_NAMES = "names of parameters", lambda item: isinstance(item, str) and bool(item)
# Declarations that are tuples: what the entries are, in words, and a function that accepts one.
_ITEMS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "module_types": (MODULE_TYPES, is_module_type),
    "params": _NAMES,
    "linear_in_params": _NAMES,
    "needs": ("operations", lambda item: isinstance(item, Operation)),
}


@judge
def faults(candidate: Candidate) -> Iterator[str]:
    """Yields a sentence for each fault in the declarations of a class."""
    cls = candidate.cls
    if candidate.module is not None:  # the class was checked before; the module does not matter
        return
    for name, value in declared(cls).items():
        yield from _fault(cls, name, value)
    made = {getattr(cls, name) is getattr(object, name) for name in ("__init__", "__new__")}
    if issubclass(cls, LayerRule) and False in made and (fault := _call_fault(cls, 0)):
        yield f"a rule is made without arguments, as {cls.__name__}(): {fault}"


def declared(cls: type) -> dict[str, Any]:
    """The attributes of an author's class and of its bases, without those of our bases."""
    own = [c for c in cls.__mro__[::-1] if c not in BASES]
    return {name: value for c in own for name, value in vars(c).items() if name[:2] != "__"}


@cache
def _declarations(bases: tuple[type, ...]) -> dict[str, Any]:
    """All attributes of our base classes, with their defaults."""
    return {n: v for base in bases for cls in base.__mro__[-2::-1] for n, v in vars(cls).items()}


def _fault(cls: type, name: str, value: Any) -> Iterator[str]:
    """Yields what is wrong with one attribute of a class."""
    kinds = (property, classmethod, staticmethod, *(() if name in _ITEMS else (type,)))
    if name == "_abc_impl" or isinstance(value, kinds):
        return
    known = _declarations((*BASES,))
    if name not in known:
        is_method = isinstance(value, FunctionType)
        least = 0.92 if is_method else 0.8
        alike = [other for other in _near(name, least) if _is_meant(cls, name, other)]
        if alike and (close := get_close_matches(name, alike, 1, least)):
            what = f"{name}()" if is_method else f"{name} = {value!r}"
            yield f"{what} is not known to any base class: did you mean {close[0]!r}?"
        return
    bases = [c for c in cls.__mro__ if c in BASES]
    if not any(name in vars(c) for c in bases) and not isinstance(value, FunctionType):
        has = next(base for base in BASES if name in dir(base))
        yield f"{name} = {value!r} means nothing here: it is a declaration of {has.__name__}"
        return
    overridden: Any = next((vars(c)[name] for c in bases if name in vars(c)), None)
    are_functions = isinstance(value, FunctionType) and isinstance(overridden, FunctionType)
    if are_functions and not _takes_the_same(value, overridden):  # signatures would take long
        asked = inspect.signature(overridden)
        if fault := _call_fault(value, len(asked.parameters)):
            yield f"{name} is called as {name}{asked}: {fault}"
    yield from _wrong_kind(name, value, known[name])


def _near(name: str, least: float) -> list[str]:
    """Known names for which ``difflib`` may find a ratio; nearly every name has none.

    The ratio is ``2 M / (m + n)`` for ``M`` letters in common of ``m`` and ``n``.
    """
    size, letters = len(name), set(name)
    least -= 1e-9  # for rounding
    low, high = size * least / (2 - least), size * (2 - least) / least
    alike = [other for other in _declarations((*BASES,)) if low <= len(other) <= high]
    return [o for o in alike if 2 * (size - len(letters.difference(o))) >= least * (size + len(o))]


def _is_meant(cls: type, name: str, other: str) -> bool:
    """Whether a name may be a misspelling of another.

    ``_factor`` and ``factors`` are not misspellings of ``factor``, but ``module_type`` is one of
    ``module_types`` if there is none: nearly every class declares its tuples.
    """
    if (other[0] == "_") != (name[0] == "_"):
        return False
    is_absent = other in _ITEMS and not getattr(cls, other, ())
    return is_absent or other.rstrip("s") != name.rstrip("s")


def _takes_the_same(function: Any, other: Any) -> bool:
    """Whether two plain functions have as many arguments, all of them by position."""
    codes = function.__code__, other.__code__
    counts = {(code.co_argcount, code.co_kwonlyargcount) for code in codes}
    is_plain = not any(code.co_flags & _STARS for code in codes)
    return is_plain and len(counts) == 1 and not codes[0].co_kwonlyargcount


def _call_fault(function: Callable[..., Any], count: int) -> str:
    """Why a function cannot be called with so many arguments, or an empty string."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


def _wrong_kind(name: str, value: Any, default: Any) -> Iterator[str]:
    """Yields a sentence if a declaration has a value of the wrong type."""
    if name in _ITEMS:
        what, accepts = _ITEMS[name]
        wrong = [v for v in value if not accepts(v)] if isinstance(value, tuple) else [value]
        one = getattr(value, "__name__", repr(value))  # of a class or an operation
        if isinstance(value, tuple) and wrong:
            yield f"{name} must be a tuple of {what}. Got {value!r}, with {wrong[0]!r}"
        elif wrong:
            alone = f": write {name} = ({one},)" if accepts(value) else ""
            yield f"{name} must be a tuple of {what}. Got {value!r}{alone}"
    elif isinstance(default, (bool, str)) and not isinstance(value, type(default)):
        yield f"{name} must be a {type(default).__name__}. Got {value!r}"
    elif name == "degree" and not isinstance(value, (int, float, NoneType)):
        yield f"degree must be a number, or None. Got {value!r}"
    elif name == "savefield" and value and not value.isidentifier():
        yield f"savefield must be a Python identifier. Got {value!r}"
    elif name == "savefield" and hasattr(Tensor, value or "-"):
        yield f"savefield {value!r} would hide torch.Tensor.{value} of the parameters"
