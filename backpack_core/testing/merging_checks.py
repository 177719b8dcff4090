"""Checks of an extension's declared degree, and of how it combines values of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.record.structure import iter_tensors
from backpack_core.testing.cases import Arguments
from backpack_core.testing.compare import require
from backpack_core.testing.extensions_run import forget
from backpack_core.testing.nets import Nets
from backpack_products.merging import Part, Refused, declaration

HALVES = slice(0, 1), slice(1, None)

Made = tuple[Module, Arguments, Module]  # net, inputs, loss


def degree(nets: Nets) -> None:
    """A quarter of the loss has values that are smaller by ``4 ** degree``."""
    given, extension = nets.problem(), nets.fresh()[0]
    over = declaration(extension)
    if extension.degree is None or isinstance(over, Refused):
        return
    whole = given.run([extension])[1][extension.savefield]
    part = given.run([nets.fresh()[0]], scale=0.25)[1][extension.savefield]
    for name, stored in whole.items():
        found = over.take_apart(part[name])
        for key, tensor in over.take_apart(stored).items():
            own = over.part(key).degree
            factor = 0.25 ** (extension.degree if own is None else own)
            what = f"{name!r}, {key or 'value'} of a quarter of the loss"
            pair = found[key], tensor * factor
            if key.startswith("vectors"):  # their signs are arbitrary
                pair = pair[0].abs(), pair[1].abs()
            nets.close(*pair, what)


def _parts(
    made: Made, extension: Extension, batches: tuple[slice, ...], taken: Callable[[Any], Any]
) -> dict[str, list[Any]]:
    """The value of an extension for each of some batches, by parameter."""
    net, arguments, loss = made
    found: dict[str, list[Any]] = {}
    for batch in batches:
        with backpack(extension):
            loss(net(arguments.args[0][batch])).backward()
        for name, parameter in net.named_parameters():
            if getattr(parameter, extension.savefield, None) is not None:
                found.setdefault(name, []).append(taken(getattr(parameter, extension.savefield)))
    forget(net)
    return found


def samples_add(nets: Nets) -> None:
    """Where ``sums_samples`` is declared, values of two batches add up to that of both."""
    extension = nets.fresh()[0]
    if extension.sums_samples:
        made, batches = nets.problem(reduction="sum").extended(), (slice(None), *HALVES)
        found = _parts(made, extension, batches, lambda stored: list(iter_tensors(stored)))
        for name, values in found.items():
            for whole, *halves in zip(*values, strict=True):
                what = f"sums_samples is declared: {name!r}, two halves"
                nets.close(torch.stack(halves).sum(0), whole, what)


def two_halves(nets: Nets, reduction: str) -> None:
    """Values of two batches combine to that of the whole batch."""
    given, extension = nets.problem(reduction=reduction), nets.fresh()[0]
    over = declaration(extension)
    if over.refusal:
        require(len(over.refusal.split()) > 5, f"{nets.case.label()} refuses without a reason.")
        return
    if extension.degree is None and reduction == "mean":
        return
    made, first = given.extended(), over.first_pass(extension)
    known = {} if first is None else _combined(made, first, reduction)
    of_first: dict[Tensor, Any] = {
        made[0].get_parameter(name): stored for name, stored in known.items()
    }
    values = _combined(made, over.second_pass(extension, of_first), reduction)
    given.compare({extension.savefield: values}, [extension], nets.case.tolerances.float64)
    if first is None:  # tensor by tensor, also where there is no oracle
        whole = given.run([extension])[1][extension.savefield]
        for name, stored in whole.items():
            pairs = zip(iter_tensors(values[name]), iter_tensors(stored), strict=True)
            for found, expected in pairs:
                nets.close(found, expected, f"{name!r}, two halves")


def _combined(made: Made, extension: Extension, reduction: str) -> dict[str, Any]:
    """The values of two halves, combined by the definition, by parameter."""
    reader = declaration(extension).reader(extension)
    over, (net, arguments, _) = declaration(reader), made
    sizes = [len(arguments.args[0][half]) for half in HALVES]
    general = (reader.degree or 0) if reduction == "mean" else None
    combined = {}
    for name, halves in _parts(made, reader, HALVES, over.take_apart).items():
        tensors = {
            key: _whole(over.part(key), general, [half[key] for half in halves], sizes)
            for key in halves[0]
        }
        combined[name] = over.put_together(tensors, net.get_parameter(name).shape)
    return combined


def _whole(part: Part, degree: float | None, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """One part of a value; a degree of ``None`` is a loss without normalisers."""
    power = 0 if degree is None else degree if part.degree is None else part.degree
    power += part.way == "mean"
    scaled = [tensor * size**power for tensor, size in zip(tensors, sizes, strict=False)]
    if part.way == "concatenate":
        whole = torch.cat(scaled, part.axis)
    elif part.way == "same":
        whole = scaled[0]
    elif isinstance(part.way, str):
        shapes = [list(tensor.shape) for tensor in tensors]
        said = f"over_batches adds values of two batches, and they have the shapes {shapes}."
        require(shapes[0] == shapes[1], said)
        whole = torch.stack(scaled).sum(0)
    else:
        whole = part.way(*scaled)
    found: Tensor = whole / sum(sizes) ** power
    return found
