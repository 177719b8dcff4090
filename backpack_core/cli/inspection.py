"""Describes what a loaded plugin provides, and what is wrong with it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from backpack_core.cli.provides import class_named, contributions, untrue
from backpack_core.cli.reports import Provided, Report
from backpack_core.contract.bases import Candidate, faults_of, with_line
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.discovery import Plugin
from backpack_core.preferences import qualified_name
from backpack_products.derivatives import second_order
from backpack_products.elementwise import ElementwiseRule, has_second_derivative
from backpack_products.loss import HessianLossRule


def report(plugin: Plugin) -> Report:
    """The report on a plugin, whether it is loaded or failed."""
    result = Report.of(plugin)
    if plugin.error is not None:
        _describe_error(result, plugin.error)
    if plugin.state == "loaded":
        found = [*contributions(plugin)]
        result.provides = [_described(*each) for each in found]
        values = list({id(value): value for *_, value in found}.values())
        result.broken_promises = [text for value in values for text in _broken(value)]
        rules = [type(value) for value in values if isinstance(value, LayerRule)]
        result.broken_promises += [
            f"{with_line(rule)}: {text}" for rule in rules for text in _missing_types(rule, result)
        ]
        result.broken_promises += untrue(plugin)
    return result


def _missing_types(rule: type[LayerRule], result: Report) -> Iterator[str]:
    """The faults of ``module_types``, after importing the packages that it names.

    A library that is not installed is not a fault; it is noted in ``result.absent``.
    """
    for name in rule.module_types:
        package = name.rpartition(".")[0] if isinstance(name, str) else ""
        library = package.partition(".")[0]
        try:
            import_module(package or __name__)
        except ImportError as error:
            if find_spec(library):
                yield f"module_types names {name!r}: {error}"
            else:
                result.absent.setdefault(library, str(name))
    yield from faults_of(Candidate(rule, is_new=True))


def _describe_error(result: Report, error: BaseException) -> None:
    result.error, result.message = type(error).__name__, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        result.where = f"{frames[-1].filename}:{frames[-1].lineno}"
    result.traceback = "".join(traceback.format_exception(error))
    wanted = result.value.partition(":")[0]
    if isinstance(error, ModuleNotFoundError) and error.name:
        result.module_found = not f"{wanted}.".startswith(f"{error.name}.")


def _described(kind: str, key: Any, value: Any) -> Provided:
    """The description of what the registry has from a plugin."""
    is_pair = kind == "pair override"
    name = f"{key[0].__name__}/{qualified_name(key[1])}" if is_pair else qualified_name(key)
    field = value.savefield if kind == "extension" else ""
    return Provided(kind, name, class_named(value), field)


def _broken(value: Any) -> Iterator[str]:
    """What a rule or extension declares but does not implement."""
    name = class_named(value).rpartition(":")[2]
    if isinstance(value, type) and issubclass(value, Extension) and not value.savefield:
        yield f"{name} has no savefield: its quantity cannot be stored by default"
    if isinstance(value, LayerRule) and not has_second_derivative(value):
        if isinstance(value, ElementwiseRule):
            yield f"{name} is an ElementwiseRule without second_derivative or hessian_is_zero"
        elif second_order(value).hessian_is_diagonal:
            yield f"{name} declares hessian_is_diagonal but has no _second_derivative_mat_prod"
    if isinstance(value, HessianLossRule):
        samples = type(value)._sqrt_hessian_sampled is not HessianLossRule._sqrt_hessian_sampled
        if value.likelihood and not samples:
            yield f"{name} declares the likelihood {value.likelihood!r} but cannot sample from it"
