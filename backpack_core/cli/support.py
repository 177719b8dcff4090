"""What is supported: in one model, module by module, before any backward. Imports core."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.nn import Module, Parameter

from backpack_core import plugins
from backpack_core._torch import ModuleHooks
from backpack_core.contract.affine import AffineProduct
from backpack_core.contract.extension import Extension, FirstOrderExtension
from backpack_core.contract.graph_extension import GraphExtension
from backpack_core.contract.loss import LossRule
from backpack_core.contract.parametric import ParametricRule
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import BackpackError, UsageError
from backpack_core.extending import extend
from backpack_core.plugins.registry import Resolved, registry
from backpack_core.testing.watch import declared_form, is_fast

Rows = tuple[list[str], list[list[str]]]

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def matrix() -> Rows:
    """Every rule against every extension, as the conformance kit finds it.

    Raises:
        BackpackError: The kit is not installed.
    """
    try:
        kit = importlib.import_module("backpack_core.testing.support")
    except ImportError as error:
        raise BackpackError(
            f"The support matrix comes from the conformance kit, which needs {error.name}. Run "
            "`pip install 'backpack-core[testing]'`, or name a model: "
            "`backpack support MODULE:FACTORY`."
        ) from error
    header, rows = kit.support_matrix()
    return list(header), [list(row) for row in rows]


def model_report(target: str, chosen: tuple[str, ...] = ()) -> Rows:
    """A row for each module that is an operation.

    Args:
        target: ``"module:factory"``; the factory takes no arguments and returns a model, or several
            modules (a model and its loss).
        chosen: Names of extensions; default: all that are installed.

    Returns:
        Header and rows: path, type, rule, plugin, and for each extension one of ``rule``, ``fast``
        (the rule, by contractions), ``autodiff``, ``graph`` (from the graph of the loss),
        ``refused``; ``-`` where there is nothing to compute.

    Raises:
        UsageError: An extension is not installed.
    """
    plugins.ensure_loaded()
    unknown = [name for name in chosen if name not in registry.extensions]
    if unknown:
        raise UsageError(
            f"No extension {unknown[0]!r} is installed: {sorted(registry.extensions)}."
        )
    names = list(chosen) or sorted(registry.extensions)
    extensions = [
        registry.choose(registry.extensions[name], name, "extension").value for name in names
    ]
    rows = []
    for path, module in _operations(_build(target)):
        resolved = registry.resolve(module)
        rule = "automatic" if resolved.is_fallback else type(resolved.rule).__name__
        cells = [status(module, resolved, extension) for extension in extensions]
        rows.append([path, type(module).__name__, rule, str(resolved.provenance), *cells])
    return ["module", "type", "rule", "plugin", *names], rows


def _build(target: str) -> tuple[Module, ...]:
    """Import and call the user's factory.

    Raises:
        UsageError: The target is misspelled, or returns no module.
    """
    if not _TARGET.fullmatch(target):
        raise UsageError(f"Name a factory as 'package.module:function'. Got {target!r}.")
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as python -m does; a console script does not
        sys.path.insert(0, here)
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target!r} cannot be imported: {error}") from error
    made = factory if isinstance(factory, Module) else factory()
    modules = made if isinstance(made, tuple) else (made,)
    if not modules or not all(isinstance(module, Module) for module in modules):
        raise UsageError(f"{target} must return modules of torch.nn. Got {made!r}.")
    return modules


def _operations(modules: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
    """The modules that ``extend`` treats as operations, with their paths."""
    for module in modules:
        extend(module)
        for path, part in module.named_modules():
            if ModuleHooks.are_installed(part):
                yield path or type(part).__name__, part


def status(module: Module, resolved: Resolved, extension: type[Extension]) -> str:
    """How one extension is computed at one module, as far as that is known without data."""
    rule, needs = resolved.rule, _needs(extension)
    if issubclass(extension, GraphExtension):
        return "graph" if _has_residual(resolved, module, needs) else "refused"
    if _mixes_samples(rule, module):
        return "refused"
    parameters = {n for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    if isinstance(rule, LossRule):
        return "-" if issubclass(extension, FirstOrderExtension) else "rule"
    if needs == "second derivative" and not _has_second_derivative(resolved):
        return "refused"
    names = rule.parameter_names(module) if isinstance(rule, ParametricRule) else ()
    covered = {name for name in names if _is_trained(module, name)}
    if not parameters and not covered:
        if issubclass(extension, FirstOrderExtension):
            return "-"
        return "autodiff" if resolved.is_fallback else "rule"
    if needs == "structure" and not _has_structure(rule, module, parameters | covered):
        return "refused"
    if parameters - covered:
        return "autodiff"
    return "fast" if is_fast(extension, declared_form(type(rule))) else "rule"


def _is_trained(module: Module, name: str) -> bool:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, Parameter) and value.requires_grad


def _needs(extension: type[Extension]) -> str:
    """What a layer must offer, from the conformance kit's table of quantities."""
    try:
        from backpack_core.testing.quantities import quantity_of
    except ImportError:
        known = None
    else:
        known = quantity_of(extension.savefield)
    if known is not None:
        return known.needs
    return "gradient" if issubclass(extension, FirstOrderExtension) else "curvature"


def _mixes_samples(rule: LayerRule, module: Module) -> bool:
    view: Any = SimpleNamespace(module=module, training=module.training, path="")
    try:
        return rule.mixes_samples(view)
    except AttributeError:  # it depends on the data
        return False


def _has_residual(resolved: Resolved, module: Module, needs: str) -> bool:
    """Whether what is read from the graph finds what it needs of single modules, if anything."""
    rule = resolved.rule
    if needs != "second derivative" or resolved.is_fallback or rule.is_loss:
        return True
    return _has_second_derivative(resolved) and not _mixes_samples(rule, module)


def _has_second_derivative(resolved: Resolved) -> bool:
    rule = resolved.rule
    if resolved.is_fallback:
        return False
    methods = ("_second_derivative_mat_prod", "second_derivative")
    own = [getattr(type(rule), name, None) for name in methods]
    inherited = [
        getattr(base, name, None)
        for base in type(rule).__mro__
        if base.__module__ == LayerRule.__module__
        for name in methods
    ]
    return rule.hessian_is_zero or any(m is not None and m not in inherited for m in own)


def _has_structure(rule: LayerRule, module: Module, names: set[str]) -> bool:
    if issubclass(declared_form(type(rule)), AffineProduct):
        return True
    linear = set(rule.linear_in_params) if isinstance(rule, ParametricRule) else set()
    return all(name in linear and module.get_parameter(name).dim() == 1 for name in names)
