"""Advice for authors of plugins: probable slips in classes, and what was probably meant.

A class is checked when it is registered by hand, and a rule also at the first module of each type.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from difflib import get_close_matches
from operator import attrgetter

from torch.nn import Module

from backpack_core._torch import parametrizations_of
from backpack_core.contract.bases import Candidate, judge, with_line
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import PluginConflictError, nearest
from backpack_core.plugins.registry import registry
from backpack_core.preferences import Claim


@judge
def probable_slips(candidate: Candidate) -> Iterator[str]:
    """Yields a sentence for each probable slip in a class.

    Raises:
        PluginConflictError: An extension uses the ``savefield`` of another.
    """
    cls, module, is_new = candidate
    if issubclass(cls, LayerRule) and module is not None:
        yield from missing_params(cls(), module)
    elif issubclass(cls, LayerRule) and is_new:
        yield from missing_types(cls)
    elif issubclass(cls, Extension) and is_new:
        _refuse_taken_field(cls)


def _refuse_taken_field(kind: type[Extension]) -> None:
    """Raise an error if an unrelated extension has the same ``savefield``."""
    other = _saves_under(kind)
    if other is not None:
        raise PluginConflictError(
            f"{with_line(kind)}: savefield {kind.savefield!r} is that of {other.value.__name__} of "
            f"{other.provenance} already: choose another name."
        )


def _saves_under(kind: type[Extension]) -> Claim[type[Extension]] | None:
    """Another extension with the same ``savefield`` that is not related by inheritance."""
    for claim in (c for claims in registry.extensions.values() for c in claims):
        is_relative = issubclass(kind, claim.value) or issubclass(claim.value, kind)
        if claim.value.savefield == kind.savefield and kind.savefield and not is_relative:
            return claim
    return None


def missing_types(rule: type[LayerRule]) -> Iterator[str]:
    """Yields a sentence for each name in ``module_types`` that an imported package does not have.

    Packages that are not imported are not checked.

    Args:
        rule: The class of the rule.
    """
    # Another judge refuses what is not a tuple.
    for name in rule.module_types if isinstance(rule.module_types, tuple) else ():
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
    """Yields a sentence if ``params`` of a rule probably misspells a parameter of a module.

    A rule may serve several types, and some may lack a bias. So a missing parameter is a slip only
    if the module has parameters that the rule leaves out: the author may have meant one of them.
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
    """Whether a module has a parameter; parametrizations are not run for this."""
    path, _, last = name.rpartition(".")
    try:
        owner = attrgetter(path)(module) if path else module
    except AttributeError:
        return False
    return last in parametrizations_of(owner) or hasattr(owner, last)
