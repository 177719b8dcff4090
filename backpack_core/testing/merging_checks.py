"""Checks of an extension's declared degree, and of how it combines values of batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.record.structure import iter_tensors
from backpack_core.testing.cases import ExtensionCase
from backpack_core.testing.checks import of_extension
from backpack_core.testing.compare import close, require
from backpack_core.testing.extension_checks import compare_values, problem_of
from backpack_core.testing.extensions_run import Problem, forget
from backpack_products.merging import Part, Refused, declaration

HALVES = slice(0, 1), slice(1, None)


@of_extension()
def degree(case: ExtensionCase) -> None:
    """A quarter of the loss has values that are smaller by ``4 ** degree``."""
    given, extension = problem_of(case), case.extension_factory()
    over = declaration(extension)
    if extension.degree is None or isinstance(over, Refused):
        return
    whole = given.run([extension])[1][extension.savefield]
    part = given.run([case.extension_factory()], scale=0.25)[1][extension.savefield]
    for name, value in whole.items():
        found = over.take_apart(part[name])
        for key, tensor in over.take_apart(value).items():
            own = over.part(key).degree
            factor = 0.25 ** (extension.degree if own is None else own)
            what = f"{case.label()} of {name!r}, {key or 'value'} of a quarter of the loss"
            if key.startswith("vectors"):  # their signs are arbitrary
                found[key], tensor = found[key].abs(), tensor.abs()
            close(found[key], tensor * factor, what, case.tolerances.float64)


@of_extension()
def two_halves_mean(case: ExtensionCase) -> None:
    """Values of two batches combine to that of the whole batch, for a mean."""
    _two_halves(case, "mean")


@of_extension()
def two_halves_sum(case: ExtensionCase) -> None:
    """Values of two batches combine to that of the whole batch, for a sum."""
    _two_halves(case, "sum")


@of_extension()
def samples_add(case: ExtensionCase) -> None:
    """Where ``sums_samples`` is declared, values of two batches add up to that of both."""
    given, extension = problem_of(case, reduction="sum"), case.extension_factory()
    if not extension.sums_samples:
        return
    net, arguments, loss = given.extended()
    x, found = arguments.args[0], list[list[Tensor]]()
    for part in (slice(None), *HALVES):
        with backpack(extension):
            loss(net(x[part])).backward()
        values = [getattr(parameter, extension.savefield) for parameter in net.parameters()]
        found.append(list(iter_tensors(values)))
    for whole, *halves in zip(*found, strict=True):
        what = f"sums_samples is declared: {case.label()}, two halves"
        close(torch.stack(halves).sum(0), whole, what, case.tolerances.float64)
    forget(net)


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
    """The values of two halves, combined by the definition, by parameter."""
    reader = declaration(extension).reader(extension)
    over, values = declaration(reader), dict[Tensor, list[dict[str, Tensor]]]()
    for half in HALVES:
        with backpack(reader):
            loss(net(x[half])).backward()
        for parameter in net.parameters():
            value = getattr(parameter, reader.savefield, None)
            if value is not None:
                values.setdefault(parameter, []).append(over.take_apart(value))
    sizes = [len(x[half]) for half in HALVES]
    degree = (reader.degree or 0) if reduction == "mean" else None
    combined: dict[Tensor, Any] = {}
    for place, halves in values.items():
        tensors = {
            name: _whole(over.part(name), degree, [half[name] for half in halves], sizes)
            for name in halves[0]
        }
        combined[place] = over.put_together(tensors, place.shape)
    return combined


def _whole(part: Part, degree: float | None, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """One part of a value; a degree of ``None`` is a loss without normalisers."""
    power = 0 if degree is None else degree if part.degree is None else part.degree
    power += part.way == "mean"
    scaled = [tensor * size**power for tensor, size in zip(tensors, sizes, strict=False)]
    if part.way == "concatenate":
        whole = torch.cat(scaled, part.axis)
    elif isinstance(part.way, str):
        shapes = [list(tensor.shape) for tensor in tensors]
        require(
            part.way == "same" or shapes[0] == shapes[1],
            f"over_batches adds values of two batches, and they have the shapes {shapes}.",
        )
        whole = scaled[0] if part.way == "same" else torch.stack(scaled).sum(0)
    else:
        whole = part.way(*scaled)
    found: Tensor = whole / sum(sizes) ** power
    return found


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
