"""Which extensions a model supports, module by module, without running backward."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.nn import Module

from backpack_core import _hooks, extensions
from backpack_core.cli import output
from backpack_core.cli.table import Cell, Row
from backpack_core.cli.watch import declared_form, is_fast
from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule, LossRule
from backpack_core.errors import BackpackError, MissingPluginError, UsageError, nearest
from backpack_core.extending import extend
from backpack_core.plugins.registry import Resolved, registry
from backpack_core.testing.quantities import needs_arguments, quantity_of
from backpack_products.affine import AffineProduct
from backpack_products.elementwise import has_second_derivative
from backpack_products.extensions import FirstOrderExtension
from backpack_products.parametric import ParametricRule

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def table_of_rules(chosen: tuple[str, ...] = ()) -> list[Row]:
    """A row for each layer of the catalogue, from small nets, as the conformance kit runs them.

    Args:
        chosen: Names of extensions; default: all that are installed.

    Raises:
        UsageError: An extension is not installed.
    """
    from backpack_core.cli import catalogue, matrix  # their import takes long

    classes(chosen)
    number = len(catalogue.LAYERS) + 1
    families = output.track(matrix.matrix(chosen), "Trying every layer", number)
    return [row for _, family in families for row in family]


def classes(chosen: tuple[str, ...] = ()) -> dict[str, type[Extension]]:
    """The classes of extensions, by name.

    Args:
        chosen: Names; default: all that are installed.

    Raises:
        UsageError: One is not installed.
    """
    names = chosen or dir(extensions) or ("BatchGrad",)
    try:
        return {name: getattr(extensions, name) for name in names}
    except (MissingPluginError, AttributeError) as error:
        raise UsageError(str(error)) from error


def table_of_model(target: str, chosen: tuple[str, ...] = ()) -> list[Row]:
    """A row for each module of a model that is an operation.

    Args:
        target: ``"module:factory"``. The factory takes no arguments. It returns a model, or a model
            and its loss, or these with the model's inputs and a target. With inputs, every
            extension is run, and the table says which the run refuses.
        chosen: Names of extensions; default: all that are installed.

    Returns:
        The rows, with path, type, rule and plugin.

    Raises:
        UsageError: An extension is not installed.
    """
    asked = classes(chosen)
    given = build(target)
    kinds = output.track(asked.items(), "Trying every extension", len(asked))
    tried = {name: trial(given, kind) for name, kind in kinds}
    rows = []
    for path, module in _operations(given.modules):
        resolved = registry.resolve(module)
        rule = "automatic" if resolved.is_fallback else type(resolved.rule).__name__
        labels = {"module": path, "type": type(module).__name__, "rule": rule}
        labels["plugin"] = str(resolved.provenance)
        cells = {n: judge(module, kind, tried[n]) for n, kind in asked.items()}
        rows.append(Row(labels, cells))
    return rows


class Given(NamedTuple):
    """What a factory returned.

    Attributes:
        modules: A model, and possibly its loss.
        inputs: The model's inputs; may be empty.
        target: What the loss compares with; ``None`` if no backward pass can be run.
    """

    modules: tuple[Module, ...]
    inputs: tuple[Tensor, ...] = ()
    target: Tensor | None = None


def build(target: str) -> Given:
    """Import and call the user's factory.

    Raises:
        UsageError: The target is misspelled, cannot be called, raises, or returns no module.
    """
    if not _TARGET.fullmatch(target):
        raise UsageError(f"Name a factory as 'package.module:function'. Got {target!r}.")
    if target.partition(":")[0].endswith(".py"):
        raise UsageError(f"Name the module, not its file: {target.replace('.py:', ':')}.")
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # ``python -m`` puts it there, a console script does not
        sys.path.insert(0, here)
    factory: Any = None
    try:
        factory = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except Exception as error:  # the user's module may raise anything
        near = nearest(attribute, vars(factory)) if isinstance(factory, ModuleType) else ""
        near = near or nearest(module_name, (path.stem for path in Path().glob("*.py")))
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"{target!r} cannot be imported: {said}{near}") from error
    returned = factory if isinstance(factory, Module) else _made(target, factory)
    parts = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    modules = tuple(part for part in parts if isinstance(part, Module))
    data = tuple(part for part in parts if isinstance(part, Tensor))
    if not modules or [*map(id, parts)] != [*map(id, (*modules, *data))]:
        raise UsageError(
            f"{target} must return a model, possibly its loss (a module: nn.MSELoss(), not "
            "F.mse_loss), and then tensors: the model's inputs, and a target. Got "
            f"{', '.join(type(part).__name__ for part in parts)}."
        )
    is_whole = len(modules) > 1 and len(data) > 1
    given = Given(modules, data[:-1], data[-1]) if is_whole else Given(modules, data)
    try:  # whether they fit is seen without a quantity
        output = modules[0](*given.inputs) if data else None
        if given.target is not None:
            modules[1](output, given.target).backward()
    except Exception as error:
        said = f"{type(error).__name__}: {error}{_line(error, module_name)}"
        needed = "By itself, loss(model(*inputs), target).backward() must work."
        raise UsageError(f"What {target} returns does not run: {said}\n{needed}") from error
    return given


def _made(target: str, factory: Any) -> Any:
    """The return value of a factory."""
    try:
        signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{target} cannot be called without arguments ({type(error).__name__}: {error}). Name "
            "a function without arguments that returns a model, or a model and its loss."
        ) from error
    try:
        return factory()
    except Exception as error:
        module, _, attribute = target.partition(":")
        raise UsageError(
            f"{target} was called and raised {type(error).__name__}: {error}"
            f"{_line(error, module)}\nIt must run without anything else, as in python -c "
            f"'import {module} as m; m.{attribute}()'."
        ) from error


def _line(error: BaseException, module: str) -> str:
    """The innermost line of a module in an error's traceback."""
    file = getattr(sys.modules[module], "__file__", None)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""


def trial(given: Given, *kinds: type[Extension]) -> str | None:
    """Why a run of extensions is refused; empty if it is not, ``None`` if it cannot be run."""
    if any(map(needs_arguments, kinds)) or given.target is None:
        return None
    model, lossfunc = map(extend, given.modules[:2])
    try:
        loss = lossfunc(model(*given.inputs), given.target)
        with warnings.catch_warnings(), backpack(*(cast(Any, kind)() for kind in kinds)):
            warnings.simplefilter("ignore")
            loss.backward()
    except (BackpackError, TypeError) as error:
        return str(error).partition("\n[")[0]
    return ""


def _operations(modules: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
    """The modules that ``extend`` treats as operations, with their paths."""
    for module in modules:
        extend(module)
        for path, part in module.named_modules():
            if _hooks.are_installed(part):
                yield path or type(part).__name__, part


_MIXING = "samples of the batch influence each other here, so it has no value (use eval mode)"
_NO_SECOND = "it needs a second derivative, and the rule has none"
_UNKNOWN = "it needs Kronecker structure, which operations may have: run it, or write an AffineRule"
_NONLINEAR = "it needs a second derivative in a parameter, and the rule has none"
_NO_STRUCTURE = "it needs Kronecker structure, and the rule declares none: take AffineRule"


def judge(module: Module, extension: type[Extension], tried: str | None = None) -> Cell:
    """How an extension is computed at a module.

    Args:
        module: The module.
        extension: The extension.
        tried: What :func:`trial` says of it. What ran is not refused, and what the run refused is.
    """
    resolved = registry.resolve(module)
    cell = Cell("refused", tried) if tried else _declared(module, resolved, extension)
    if cell.reason and tried == "":
        return Cell("autodiff" if resolved.is_fallback else "rule")
    return cell


def _declared(module: Module, resolved: Resolved, extension: type[Extension]) -> Cell:
    """How an extension is computed at a module, as far as that is known without data."""
    rule, needs = resolved.rule, _needs(extension)
    if extension.is_whole:
        has = _has_residual(resolved, module, needs)
        return Cell("graph") if has else Cell("refused", _NO_SECOND)
    if _mixes_samples(rule, module):
        return Cell("refused", _MIXING)
    named = module.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in named if parameter.requires_grad}
    parameters = {name for name in trained if "." not in name}
    if isinstance(rule, LossRule):
        return Cell("-" if issubclass(extension, FirstOrderExtension) else "rule")
    if needs == "second derivative" and not has_second_derivative(rule):
        return Cell("refused", _NO_SECOND)
    names = rule.parameter_names(module) if isinstance(rule, ParametricRule) else ()
    covered = trained.intersection(names)
    if not parameters and not covered:
        is_first = issubclass(extension, FirstOrderExtension)
        return Cell("-" if is_first else "autodiff" if resolved.is_fallback else "rule")
    if needs == "second derivative" and not covered <= {*getattr(rule, "linear_in_params", ())}:
        return Cell("refused", _NONLINEAR)
    if needs == "structure" and not _has_structure(rule, module, parameters | covered):
        return Cell("refused", _UNKNOWN if resolved.is_fallback else _NO_STRUCTURE)
    if parameters - covered:
        return Cell("autodiff")
    return Cell("fast" if is_fast(extension, declared_form(type(rule))) else "rule")


def _needs(extension: type[Extension]) -> str:
    """What a layer must have for an extension, from the kit's quantities."""
    if (quantity := quantity_of(extension)) is not None:
        return quantity.needs
    return "gradient" if issubclass(extension, FirstOrderExtension) else "curvature"


def _mixes_samples(rule: LayerRule, module: Module) -> bool:
    view: Any = SimpleNamespace(module=module, training=module.training, path="")
    try:
        return rule.mixes_samples(view)
    except AttributeError:  # the answer depends on the data, which the stand-in does not have
        return False


def _has_residual(resolved: Resolved, module: Module, needs: str) -> bool:
    """Whether an extension that is read from the graph finds what it needs at a module."""
    rule = resolved.rule
    if needs != "second derivative" or resolved.is_fallback or rule.is_loss:
        return True
    return has_second_derivative(rule) and not _mixes_samples(rule, module)


def _has_structure(rule: LayerRule, module: Module, names: set[str]) -> bool:
    if issubclass(declared_form(type(rule)), AffineProduct):
        return True
    linear = set(rule.linear_in_params) if isinstance(rule, ParametricRule) else set()
    return all(name in linear and module.get_parameter(name).dim() == 1 for name in names)
