"""Checks a plugin's class before it is used. Imports no plugin.

Libraries add judges of what classes declare: see ``contract/bases.py``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from operator import attrgetter

from torch.nn import Module

from backpack_core._torch import parametrizations_of
from backpack_core.contract.bases import JUDGES, call_fault
from backpack_core.contract.rules import MODULE_TYPES, LayerRule
from backpack_core.errors import PluginError, nearest


def faults(cls: type) -> list[str]:
    """What is wrong with a rule, extension or propagator.

    Args:
        cls: A class derived from one of core's base classes.

    Returns:
        A sentence for each fault; none if all is well.
    """
    found = [text for judge in JUDGES for text in judge(cls)]
    if issubclass(cls, LayerRule):
        if not getattr(cls, "module_types", ()):
            found.append(f"module_types must name {MODULE_TYPES}. Got ()")
        if fault := call_fault(cls, 0):
            found.append(f"a rule is made without arguments, as {cls.__name__}(): {fault}")
    return found


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
