"""Checks of an extension's declared degree, and of how its values of batches combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.record.nested import iter_tensors
from backpack_core.testing.compare import Entries, require
from backpack_core.testing.net_checks import forget
from backpack_core.testing.nets import Made, Nets
from backpack_core.testing.network import BoundLoss
from backpack_products.merging import Part, Refused, declaration

HALVES = slice(0, 1), slice(1, None)


def degree(nets: Nets) -> Entries:
    """Check that values for a quarter of the loss are smaller by ``4 ** degree``."""
    problem, (extension,) = nets.problem(), nets.make_extensions()
    over = declaration(extension)
    if extension.degree is None or isinstance(over, Refused):
        return
    whole = problem.run([extension])[1][extension.savefield]
    part = nets.problem(scale=0.25).run(nets.make_extensions())[1][extension.savefield]
    for name, stored in whole.items():
        found = over.take_apart(part[name])
        for key, tensor in over.take_apart(stored).items():
            told = f"{name!r}: a {type(tensor).__name__} has no degree: return a tensor, or derive"
            advice = f"{told} over_batches from backpack_products.merging.OverBatches."
            require(isinstance(tensor, Tensor), advice)
            own_degree = over.part(key).degree
            expected = tensor * 0.25 ** (extension.degree if own_degree is None else own_degree)
            # The signs of vectors are arbitrary.
            size = torch.abs if key.startswith("vectors") else torch.clone
            what = f"{name!r}, {key or 'value'} of a quarter of the loss"
            yield what, size(found[key]), size(expected)


def _of_batches(
    made: Made, extension: Extension, batches: tuple[slice, ...], take: Callable[[Any], Any]
) -> dict[str, list[Any]]:
    """The values of an extension for each of several batches, by parameter."""
    net, arguments, loss = made
    values: dict[str, list[Any]] = {}
    for batch in batches:
        batch_loss = loss.of(batch) if isinstance(loss, BoundLoss) else loss
        with backpack(extension):
            batch_loss(net(arguments.args[0][batch])).backward()
        for name, parameter in net.named_parameters():
            if getattr(parameter, extension.savefield, None) is not None:
                values.setdefault(name, []).append(take(getattr(parameter, extension.savefield)))
    forget(net)
    return values


def samples_add(nets: Nets) -> Entries:
    """Check that values of two batches add up, where ``sums_samples`` is declared."""
    (extension,) = nets.make_extensions()
    if extension.sums_samples:
        made, batches = nets.problem(reduction="sum").extended(), (slice(None), *HALVES)
        by_name = _of_batches(made, extension, batches, lambda stored: list(iter_tensors(stored)))
        for name, values in by_name.items():
            for whole, *halves in zip(*values, strict=True):
                message = f"sums_samples is declared: {name!r}, two halves"
                yield message, sum(halves), whole


def two_halves(nets: Nets, reduction: str) -> Entries:
    """Check that values of two batches combine to the value of the whole batch."""
    problem, (extension,) = nets.problem(reduction=reduction), nets.make_extensions()
    over = declaration(extension)
    if over.refusal:
        require(len(over.refusal.split()) > 5, f"{nets.case.label()} refuses without a reason.")
        return
    if extension.degree is None and reduction == "mean":
        return
    made, first = problem.extended(), over.first_pass(extension)
    of_first: dict[Tensor, Any] = {}
    if first is not None:
        first_values = _combined(made, first, reduction)
        of_first = {made[0].get_parameter(name): stored for name, stored in first_values.items()}
    values = _combined(made, over.second_pass(extension, of_first), reduction)
    problem.compare({extension.savefield: values}, [extension], nets.case.tolerances.float64)
    if first is None:  # tensor by tensor, even without an oracle
        for name, stored in problem.run([extension])[1][extension.savefield].items():
            pairs = zip(iter_tensors(values[name]), iter_tensors(stored), strict=True)
            for found, expected in pairs:
                yield f"{name!r}, two halves", found, expected


def _combined(made: Made, extension: Extension, reduction: str) -> dict[str, Any]:
    """The values of two halves, combined as declared, by parameter."""
    reader = declaration(extension).reader(extension)
    over, (net, arguments, _) = declaration(reader), made
    sizes = [len(arguments.args[0][half]) for half in HALVES]
    combined = {}
    for name, halves in _of_batches(made, reader, HALVES, over.take_apart).items():
        tensors = {}
        for key in halves[0]:
            part = over.part(key)
            own_degree = (reader.degree or 0) if part.degree is None else part.degree
            # A sum is a loss without normalisers.
            power = (own_degree if reduction == "mean" else 0) + (part.way == "mean")
            tensors[key] = _whole(part, power, [half[key] for half in halves], sizes)
        combined[name] = over.put_together(tensors, net.get_parameter(name).shape)
    return combined


def _whole(part: Part, power: float, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """One part of the combined value, with its power of the normaliser."""
    scaled = [tensor * size**power for tensor, size in zip(tensors, sizes, strict=True)]
    if part.way == "concatenate":
        whole = torch.cat(scaled, part.axis)
    elif part.way == "same":
        whole = scaled[0]
    elif isinstance(part.way, str):
        shapes = [list(tensor.shape) for tensor in tensors]
        message = f"over_batches adds values of two batches, but they have the shapes {shapes}."
        require(shapes[0] == shapes[1], message)
        whole = torch.stack(scaled).sum(0)
    else:
        whole = part.way(*scaled)
    found: Tensor = whole / sum(sizes) ** power
    return found
