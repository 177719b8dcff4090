"""Checks what a plugin's class declares, before it is used.

The base classes are the table: an attribute with a value is a declaration, and its default shows
its type. An author's class may add attributes of its own. A name that resembles a known one raises,
since it is a misspelling that nobody would notice. Imports no plugin.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from types import FunctionType, NoneType
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import parametrizations_of
from backpack_core.contract.bases import BASES, ITEMS, JUDGES, declared
from backpack_core.contract.operation import Operation
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import PluginError, nearest


def is_module_type(item: Any) -> bool:
    """Whether something names a module class: the class, or its qualified name."""
    if isinstance(item, str):
        return "." in item and all(part.isidentifier() for part in item.split("."))
    return isinstance(item, type) and issubclass(item, Module)


_TYPES = "torch.nn.Module classes or their qualified names ('package.module.Class')"
ITEMS["module_types"] = _TYPES, is_module_type
ITEMS["needs"] = "operations", lambda item: isinstance(item, Operation)


def faults(cls: type) -> list[str]:
    """What is wrong with the declarations of a rule, extension or propagator.

    Args:
        cls: A class derived from one of core's base classes.

    Returns:
        A sentence for each fault; none if all is well.
    """
    found = [text for name, value in declared(cls).items() for text in _fault(cls, name, value)]
    if issubclass(cls, LayerRule) and not getattr(cls, "module_types", ()):
        found.append(f"module_types must name {_TYPES}. Got ()")
    if issubclass(cls, LayerRule) and (fault := _call_fault(cls, 0)):
        found.append(f"a rule is made without arguments, as {cls.__name__}(): {fault}")
    return [*found, *(text for judge in JUDGES for text in judge(cls))]


def refuse(cls: type) -> None:
    """Raise if a rule, extension or propagator cannot be used as it is declared.

    Raises:
        PluginError: It is abstract, or has :func:`faults`.
    """
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        near = nearest(min(missing), vars(cls)) or "."
        raise PluginError(f"{cls.__name__} does not implement {', '.join(sorted(missing))}{near}")
    found = faults(cls)
    if found:
        raise PluginError(f"{described(cls)}: {'; '.join(found)}.".replace("?.", "?"))


def described(cls: type) -> str:
    """A class, with the line where it is written if Python knows that."""
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} of {cls.__module__}"


def missing_params(rule: LayerRule, module: Module) -> str:
    """What is wrong with the ``params`` of a rule at a module, or an empty string.

    A rule may serve several types, and some may lack a bias. So a missing parameter is a fault only
    if the module has others that the rule leaves out: it may have meant one of those.
    """
    if type(rule).parameter_names is not LayerRule.parameter_names:
        return ""
    params = rule.parameter_names(module)
    missing = [name for name in params if not _has(module, name)]
    left_out = [name for name, _ in module.named_parameters() if name not in params]
    if not missing or not left_out:
        return ""
    near = [name for name in missing if get_close_matches(name, left_out, 1, 0.6)]
    if not near and len(missing) < len(params):
        return ""
    name = (near or missing)[0]
    return (
        f"params names {name!r}, which a {type(module).__qualname__} does not have; it has "
        f"{', '.join(left_out)}{nearest(name, left_out)}"
    )


def missing_types(rule: type[LayerRule]) -> Iterator[str]:
    """Names in ``module_types`` of classes that a package does not have; it has to be imported.

    Args:
        rule: The class of the rule.

    Yields:
        What is wrong with each. Of what is not imported, nothing is known.
    """
    for name in rule.module_types:
        package, _, attribute = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        module = sys.modules.get(package)
        is_whole = module and not getattr(module.__spec__, "_initializing", False)
        if is_whole and not hasattr(module, attribute):
            near = nearest(attribute, dir(module))
            yield (
                f"module_types names {name!r}: module {package} is importable and has no such "
                f"class{near}"
            )


def _has(module: Module, name: str) -> bool:
    """Whether a module has a parameter; one that is computed is not computed for this."""
    path, _, last = name.rpartition(".")
    try:
        owner = attrgetter(path)(module) if path else module
    except AttributeError:
        return False
    return last in parametrizations_of(owner) or hasattr(owner, last)


@cache
def _known(bases: tuple[type, ...]) -> dict[str, Any]:
    """Every attribute of every base class, with its default."""
    return {n: v for base in bases for cls in base.__mro__[-2::-1] for n, v in vars(cls).items()}


def _fault(cls: type, name: str, value: Any) -> Iterator[str]:
    kinds = (property, classmethod, staticmethod, *(() if name in ITEMS else (type,)))
    if name == "_abc_impl" or isinstance(value, kinds):
        return
    known = _known((*BASES,))
    if name not in known:
        is_method = isinstance(value, FunctionType)
        # `_factor` and `factors` are not misspellings of `factor`.
        alike = [other for other in known if (other[0] == "_") == (name[0] == "_")]
        alike = [other for other in alike if other.rstrip("s") != name.rstrip("s")]
        close = get_close_matches(name, alike, 1, 0.92 if is_method else 0.8)
        if close:
            what = f"{name}()" if is_method else f"{name} = {value!r}"
            yield f"{what} is known to no base class: did you mean {close[0]!r}?"
        return
    bases = [c for c in cls.__mro__ if c in BASES]
    if not any(name in vars(c) for c in bases) and not isinstance(value, FunctionType):
        has = next(base for base in BASES if name in dir(base))
        yield f"{name} = {value!r} means nothing here: it is a declaration of {has.__name__}"
        return
    overridden = next((vars(c)[name] for c in bases if name in vars(c)), None)
    if isinstance(value, FunctionType) and isinstance(overridden, FunctionType):
        asked = inspect.signature(overridden)
        if fault := _call_fault(value, len(asked.parameters)):
            yield f"{name} is called as {name}{asked}: {fault}"
    yield from _wrong_kind(name, value, known[name])


def _call_fault(function: Callable[..., Any], count: int) -> str:
    """Why a function cannot be called with so many arguments, or an empty string."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


def _wrong_kind(name: str, value: Any, default: Any) -> Iterator[str]:
    if name in ITEMS:
        what, accepts = ITEMS[name]
        wrong = [v for v in value if not accepts(v)] if isinstance(value, tuple) else [value]
        one = value.__name__ if isinstance(value, type) else repr(value)
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
