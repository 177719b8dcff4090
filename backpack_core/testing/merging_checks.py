"""Checks of what an extension declares of its scale, and of values of several batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.contract.merging import State, declaration
from backpack_core.record.structure import iter_tensors
from backpack_core.testing.cases import ExtensionCase
from backpack_core.testing.checks import of_extension
from backpack_core.testing.compare import close, require
from backpack_core.testing.extension_checks import compare_values, problem_of
from backpack_core.testing.extensions_run import Problem, forget

HALVES = slice(0, 1), slice(1, None)


@of_extension()
def degree(case: ExtensionCase) -> None:
    """A quarter of the loss has values that are smaller by the declared powers of it."""
    given, extension = problem_of(case), case.extension_factory()
    over = declaration(extension)
    if extension.degree is None or (over.refusal and getattr(over, "scaled_as", None) is None):
        return
    whole = given.run([extension])[1][extension.savefield]
    part = given.run([case.extension_factory()], scale=0.25)[1][extension.savefield]
    for name, value in whole.items():
        found = over.take_apart(part[name])
        for key, tensor in over.take_apart(value).items():
            own = over.part(key).degree
            factor = 0.25 ** (extension.degree if own is None else own)
            what = f"{case.label()} of {name!r}, {key or 'value'} of a quarter of the loss"
            if key.startswith("vectors"):  # of no sign
                found[key], tensor = found[key].abs(), tensor.abs()
            close(found[key], tensor * factor, what, case.tolerances.float64)


@of_extension()
def two_halves_mean(case: ExtensionCase) -> None:
    """Two batches, combined by the declaration, are the whole batch, for a mean."""
    _two_halves(case, "mean")


@of_extension()
def two_halves_sum(case: ExtensionCase) -> None:
    """Two batches, combined by the declaration, are the whole batch, for a sum."""
    _two_halves(case, "sum")


def _two_halves(case: ExtensionCase, reduction: str) -> None:
    given, extension = problem_of(case, reduction=reduction), case.extension_factory()
    over = declaration(extension)
    if over.refusal:
        require(len(over.refusal.split()) > 5, f"{case.label()} refuses without a reason.")
        return
    if extension.degree is None and reduction == "mean":
        return
    net, arguments, loss = given.extended()
    x = arguments.args[0]
    first = over.first_pass(extension)
    known = {} if first is None else _combined(net, loss, x, first, reduction)
    combined = _combined(net, loss, x, over.second_pass(extension, known), reduction)
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    values = {names[parameter]: value for parameter, value in combined.items()}
    compare_values(case, net, values, given.reference)
    if first is None:
        _require_equal(case, given, extension, values)
    forget(net)


def _combined(
    net: Module, loss: Module, x: Tensor, extension: Extension, reduction: str
) -> dict[Tensor, Any]:
    """The values of two halves, combined, by parameter."""
    reader = declaration(extension).reader(extension)
    states: dict[Tensor, State] = {}
    for half in HALVES:
        with backpack(reader):
            loss(net(x[half])).backward()
        samples = len(x[half])
        normaliser = samples if reduction == "mean" else None
        for parameter in net.parameters():
            value = getattr(parameter, reader.savefield, None)
            if value is None:
                continue
            state = State.of(reader, value, normaliser, samples)
            if parameter in states:
                states[parameter].add(state)
            else:
                states[parameter] = state
    return {parameter: state.value(parameter.shape) for parameter, state in states.items()}


def _require_equal(
    case: ExtensionCase, given: Problem, extension: Extension, values: dict[str, Any]
) -> None:
    """Tensor by tensor, also where there is no oracle."""
    _, whole = given.run([extension])
    for name, value in whole[extension.savefield].items():
        pairs = zip(iter_tensors(value), iter_tensors(values[name]), strict=True)
        for expected, found in pairs:
            what = f"{case.label()} of {name!r}, two halves"
            close(found, expected, what, case.tolerances.float64)
