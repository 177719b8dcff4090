"""Tells authors of plugins what they probably meant.

Every class is looked at when it is registered, and a rule once more at the first module of a type
that it speaks for. The base classes are the table: a name that resembles a known one is a
misspelling that nobody would notice. Core itself refuses values of the wrong kind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch.nn import Module

from backpack_core import hookimpl
from backpack_core._torch import parametrizations_of
from backpack_core.contract.bases import BASES, ITEMS, declared
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import PluginConflictError, nearest
from backpack_core.plugins.declarations import described, known
from backpack_core.plugins.registry import registry
from backpack_products.merging import OverBatches
from backpack_products.parametric import ParametricRule


@hookimpl
def backpack_validate(kind: type, module: Module | None, by_hand: bool) -> list[str]:
    """What is probably a slip in a class, a sentence for each.

    Raises:
        PluginConflictError: An extension that is registered by hand saves under the name of
            another.
    """
    if module is not None:
        return [*missing_params(kind(), module)]
    found = [text for name, value in declared(kind).items() for text in _slips(kind, name, value)]
    if issubclass(kind, LayerRule):
        found += [*_of_rule(kind), *(missing_types(kind) if by_hand else ())]
    if issubclass(kind, Extension):
        found += _no_way_to_combine(kind)
        if by_hand:
            _see_that_field_is_free(kind)
    return found


def _slips(cls: type, name: str, value: Any) -> Iterator[str]:
    """Of a name that resembles a known one, belongs elsewhere, or is called in another way."""
    kinds = (property, classmethod, staticmethod, *(() if name in ITEMS else (type,)))
    if name == "_abc_impl" or isinstance(value, kinds):
        return
    is_method, bases = isinstance(value, FunctionType), [c for c in cls.__mro__ if c in BASES]
    if name not in known():
        if near := _near(name, is_method):
            what = f"{name}()" if is_method else f"{name} = {value!r}"
            yield f"{what} is known to no base class: did you mean {near!r}?"
    elif not is_method:
        if not any(name in vars(c) for c in bases):
            has = next(base for base in BASES if name in dir(base))
            yield f"{name} = {value!r} means nothing here: it is a declaration of {has.__name__}"
    else:
        overridden = next((vars(c)[name] for c in bases if name in vars(c)), None)
        if isinstance(overridden, FunctionType):
            asked = inspect.signature(overridden)
            if fault := _call_fault(value, len(asked.parameters)):
                yield f"{name} is called as {name}{asked}: {fault}"


def _near(name: str, is_method: bool) -> str | None:
    """The known name that another one resembles."""
    # `_factor` and `factors` are not misspellings of `factor`.
    alike = [other for other in known() if (other[0] == "_") == (name[0] == "_")]
    alike = [other for other in alike if other.rstrip("s") != name.rstrip("s")]
    return next(iter(get_close_matches(name, alike, 1, 0.92 if is_method else 0.8)), None)


def _call_fault(function: Callable[..., Any], count: int) -> str:
    """Why a function cannot be called with so many arguments, or an empty string."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    return ""


def _of_rule(cls: type[LayerRule]) -> Iterator[str]:
    """That it wants arguments, or is linear in what ``params``, where that is all, lacks."""
    if fault := _call_fault(cls, 0):
        yield f"a rule is made without arguments, as {cls.__name__}(): {fault}"
    own, params = vars(cls).get("linear_in_params", ()), cls.params
    is_fixed = cls.parameter_names is LayerRule.parameter_names
    if issubclass(cls, ParametricRule) and is_fixed and type(own) is type(params) is tuple:
        for name in own:
            if name not in params:
                near = nearest(name, params)
                yield f"linear_in_params names {name!r}, which is not in params{near}"


def _no_way_to_combine(cls: type[Extension]) -> Iterator[str]:
    """That ``over_batches`` says nothing."""
    value = declared(cls).get("over_batches", "sum")
    is_known = isinstance(value, OverBatches) or callable(value)
    if not is_known and value not in ("sum", "concatenate"):
        what = "'sum', 'concatenate', a function of two tensors, or an OverBatches"
        yield f"over_batches must be {what}. Got {value!r}"


def _see_that_field_is_free(kind: type[Extension]) -> None:
    other = registry.saves_under(kind)
    if other is not None:
        raise PluginConflictError(
            f"{described(kind)}: savefield {kind.savefield!r} is that of {other.value.__name__} of "
            f"{other.provenance} already: choose another name."
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


def missing_params(rule: LayerRule, module: Module) -> Iterator[str]:
    """What is wrong with the ``params`` of a rule at a module.

    A rule may serve several types, and some may lack a bias. So a missing parameter is a fault only
    if the module has others that the rule leaves out: it may have meant one of those.
    """
    if type(rule).parameter_names is not LayerRule.parameter_names:
        return
    params = rule.parameter_names(module)
    missing = [name for name in params if not _has(module, name)]
    left_out = [name for name, _ in module.named_parameters() if name not in params]
    if not missing or not left_out:
        return
    near = [name for name in missing if get_close_matches(name, left_out, 1, 0.6)]
    if near or len(missing) == len(params):
        name = (near or missing)[0]
        yield (
            f"params names {name!r}, which a {type(module).__qualname__} does not have; it has "
            f"{', '.join(left_out)}{nearest(name, left_out)}"
        )


def _has(module: Module, name: str) -> bool:
    """Whether a module has a parameter; one that is computed is not computed for this."""
    path, _, last = name.rpartition(".")
    try:
        owner = attrgetter(path)(module) if path else module
    except AttributeError:
        return False
    return last in parametrizations_of(owner) or hasattr(owner, last)
