"""Checks of a layer inside a small net, with every installed extension, against the reference."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.record.structure import iter_tensors
from backpack_core.record.switch import disable
from backpack_core.testing.cases import FORWARD, SAMPLES, Arguments, RuleCase, seeded
from backpack_core.testing.checks import of_rule
from backpack_core.testing.compare import require
from backpack_core.testing.execution import shared_execution
from backpack_core.testing.extensions_run import (
    ALL_NEEDS,
    Problem,
    Values,
    forget,
    forward_loss,
    installed_extensions,
    no_calls_left,
    values_of,
)
from backpack_core.testing.network import Mix, Readout, SmallNet, SoftmaxLoss
from backpack_core.testing.quantities import quantity_of
from backpack_core.testing.reference import Reference
from backpack_core.testing.traits import traits
from backpack_products.parametric import AffineRule, ParametricRule

# Needs that half precision can meet.
COARSE = ("gradient", "curvature", "sampling")
# Needs without an oracle where autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})


def build_net(
    case: RuleCase, samples: int, dtype: torch.dtype, twice: bool = False, axis: int = 0
) -> tuple[SmallNet, Arguments]:
    """The small net around a case's layer, always the same.

    Args:
        case: The layer.
        samples: Size of the batch.
        dtype: Of parameters and inputs.
        twice: Call the layer on two inputs.
        axis: Which axis of the layer's output holds the samples.
    """
    with disable(), torch.no_grad():
        probe = execute_plainly(case, samples)
    layer, arguments = case.module(), case.arguments(samples)
    tensors = list(iter_tensors((arguments.args, dict(arguments.kwargs))))
    slots = [
        slot
        for slot, tensor in enumerate(tensors)
        if tensor.is_floating_point()
        and slot not in case.constants
        and tensor.dim() > 1
        and len(tensor) == samples
    ]
    features = probe.movedim(axis, 0)[0].numel()

    def make() -> SmallNet:
        mixes = [Mix(tensors[slot].shape[-1]) for slot in slots]
        readout = Readout(features)
        return SmallNet(layer, mixes, slots, readout, case.output_nr, axis, twice)

    return seeded(make, 8).to(dtype), arguments.to(dtype)


def execute_plainly(case: RuleCase, samples: int) -> torch.Tensor:
    """The output of a fresh layer."""
    given = case.arguments(samples)
    result = seeded(lambda: case.module()(*given.args, **given.kwargs), FORWARD)
    return list(iter_tensors(result))[case.output_nr]


@lru_cache(maxsize=8)
def problem(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A case's small net, with its reference."""
    axis = shared_execution(case).batch_axis
    template, arguments = build_net(case, samples, torch.float64, twice, axis)

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        return copy.deepcopy(template).to(dtype), arguments.to(dtype), SoftmaxLoss(reduction)

    reference = Reference(*build(torch.float64))
    return Problem(build, reference, _may_refuse(case))


def _may_refuse(case: RuleCase) -> frozenset[str]:
    rule = shared_execution(case).rule
    may = set()
    own = traits(case)
    declared = rule.linear_in_params if isinstance(rule, ParametricRule) else ()
    linear = set(shared_execution(case).parameters) <= set(declared)
    live = [slot for slot, leaf in enumerate(shared_execution(case).leaves) if leaf is not None]
    known = "second derivative" in own and (rule.hessian_is_zero or not any(live))
    curved = bool(live) and not known
    if not linear or curved or case.overwrites_input:
        may.add("second derivative")
    if not case.twice_differentiable:
        may |= TWICE
    if not isinstance(rule, AffineRule):
        may.add("structure")
    return frozenset(may)


@lru_cache(maxsize=8)
def usable(case: RuleCase) -> tuple[Extension, ...]:
    """The installed extensions that have a value on the case's net."""
    return tuple(problem(case).usable(installed_extensions()))


def representatives(extensions: Sequence[Extension]) -> list[Extension]:
    """One extension for each pair of propagator and needs."""
    found: dict[Any, Extension] = {}
    for extension in extensions:
        quantity = quantity_of(extension.savefield)
        found.setdefault((extension.propagator, quantity and quantity.needs), extension)
    return list(found.values())


def _exact(
    case: RuleCase,
    given: Problem,
    values: Values,
    extensions: Sequence[Extension],
    **options: Any,
) -> None:
    """Compare in double precision, as far as torch gives an oracle."""
    missing = frozenset() if case.twice_differentiable else TWICE
    needs = [need for need in ALL_NEEDS if need not in missing]
    given.compare(values, extensions, case.tolerances.float64, needs=needs, **options)


def _compare(case: RuleCase, given: Problem) -> None:
    extensions = usable(case)
    _, values = given.run(extensions)
    _exact(case, given, values, extensions)


@of_rule("separate")
def extensions_mean(case: RuleCase) -> None:
    """A mean loss."""
    _compare(case, problem(case))


@of_rule("separate")
def extensions_sum(case: RuleCase) -> None:
    """A sum."""
    _compare(case, problem(case, reduction="sum"))


@of_rule("separate")
def batch_of_one(case: RuleCase) -> None:
    """A single sample."""
    _compare(case, problem(case, samples=1))


@of_rule("separate")
def subsampling(case: RuleCase) -> None:
    """Samples 2 and 0, in this order."""
    given, chosen = problem(case), (2, 0)
    names = {type(extension) for extension in usable(case)}
    extensions = [e for e in installed_extensions(chosen) if type(e) in names]
    extensions, values = given.run_usable(extensions, _because_of("subsampling"))
    reference = given.reference.restricted(chosen)
    _exact(case, given, values, extensions, reference=reference)


def _because_of(word: str) -> Callable[[Extension, Exception], None]:
    """Raises unless an extension refuses a net, and says why."""

    def judge(extension: Extension, error: Exception) -> None:
        if not isinstance(error, UnsupportedError):
            raise error
        require(word in str(error), f"{type(extension).__name__} refuses, but: {error}")

    return judge


def _compare_frozen(case: RuleCase, frozen: Callable[[str], bool]) -> None:
    given = problem(case)

    def freeze(net: Module) -> None:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not frozen(name))

    extensions = representatives(usable(case))
    _, values = given.run(extensions, prepare=freeze)
    _exact(case, given, values, extensions, trained=lambda name: not frozen(name))


@of_rule("separate")
def frozen_layer(case: RuleCase) -> None:
    """The layer's parameters are frozen."""
    _compare_frozen(case, lambda name: name.startswith("layer."))


@of_rule("separate")
def frozen_surroundings(case: RuleCase) -> None:
    """What is before the layer is frozen, so that its input requires no gradient."""
    _compare_frozen(case, lambda name: name.startswith("mixes."))


@of_rule("separate", "several parameters")
def partly_frozen(case: RuleCase) -> None:
    """Every other parameter of the layer is frozen, then the remaining ones instead."""
    names = [f"layer.{name}" for name in shared_execution(case).parameters]
    for half in (names[::2], names[1::2]):
        _compare_frozen(case, half.__contains__)


def _compare_precision(
    case: RuleCase, dtype: torch.dtype, tolerance: float, needs: Sequence[str], autocast: bool
) -> None:
    given = problem(case)
    extensions = [
        extension
        for extension in _with_needs(usable(case), needs)
        if tolerance < case.tolerances.bfloat16 or not _cancels(extension)
    ]
    _, values = given.run(extensions, dtype=dtype, autocast=autocast)
    given.compare(values, extensions, tolerance, needs=needs, coarse=True)


def _compare_coarsely(case: RuleCase, dtype: torch.dtype, autocast: bool = False) -> None:
    needs = (*COARSE, *(["double backward"] if case.twice_differentiable else []))
    _compare_precision(case, dtype, case.tolerances.bfloat16, needs, autocast)


def _cancels(extension: Extension) -> bool:
    found = quantity_of(extension.savefield)
    return found is not None and found.cancels


def _with_needs(extensions: Sequence[Extension], needs: Sequence[str]) -> list[Extension]:
    known = [(extension, quantity_of(extension.savefield)) for extension in extensions]
    return [extension for extension, found in known if found and found.needs in needs]


@of_rule("separate")
def float32(case: RuleCase) -> None:
    """Single precision, against the reference in double precision."""
    needs = (*COARSE, *(TWICE if case.twice_differentiable else ()))
    _compare_precision(case, torch.float32, case.tolerances.float32, needs, autocast=False)


@of_rule("separate", "half precision")
def bfloat16(case: RuleCase) -> None:
    """Half precision, against the reference in double precision."""
    _compare_coarsely(case, torch.bfloat16)


@of_rule("separate")
def autocast(case: RuleCase) -> None:
    """Parameters in single precision, operations in half."""
    _compare_coarsely(case, torch.float32, autocast=True)


@of_rule("separate")
def retain_graph(case: RuleCase) -> None:
    """Two backward passes through one graph; the second overwrites, and agrees."""
    given, extensions = problem(case), representatives(usable(case))
    net, arguments, loss = given.extended()
    value = forward_loss(net, arguments, loss)
    for keep in (True, False):
        for parameter in net.parameters():
            for extension in extensions:
                parameter.__dict__.pop(extension.savefield, None)
        with backpack(*extensions, retain_graph=keep):
            value.backward(retain_graph=keep)
        _exact(case, given, values_of(net, extensions), extensions)


@of_rule("separate")
def called_twice(case: RuleCase) -> None:
    """The layer, and the layers around it, are called on two inputs; outputs are added."""
    given = problem(case, twice=True)
    # Some quantities do not exist over branches, or for a parameter with two uses.
    given = replace(given, may_refuse=given.may_refuse | {"structure"})
    extensions, values = given.run_usable(usable(case))
    _exact(case, given, values, extensions)


def _compare_copy(case: RuleCase, duplicate: Callable[[Module], Module]) -> None:
    # What was copied wrongly is missed by all: one of each that every layer has is enough.
    given = problem(case)
    extensions = representatives(_with_needs(usable(case), ("gradient", "curvature")))
    net, arguments, loss = given.extended()
    for original in (net, loss):
        require(type(duplicate(original)) is type(original), "The copy has another type.")
    net, loss = duplicate(net), duplicate(loss)
    with backpack(*extensions):
        forward_loss(net, arguments, loss).backward()
    _exact(case, given, values_of(net, extensions), extensions)


@of_rule("separate")
def deepcopy(case: RuleCase) -> None:
    """By ``copy.deepcopy``."""
    _compare_copy(case, copy.deepcopy)


def _pickled(module: Module) -> Module:
    restored: Module = pickle.loads(pickle.dumps(module))
    return restored


of_rule("separate", name="pickle")(lambda case: _compare_copy(case, _pickled))


@of_rule("separate")
def no_live_calls(case: RuleCase) -> None:
    """Forward only; and forward with backward, and all extensions."""
    given, extensions = problem(case), representatives(usable(case))
    with no_calls_left("After a forward pass alone"):
        given_net = given.extended()
        value = forward_loss(*given_net)
        del value, given_net
    with no_calls_left("After a backward pass"):
        net, values = given.run(extensions)
        forget(net)
        del net, values


@of_rule("mixing")
def mixing_is_refused(case: RuleCase) -> None:
    """Every extension raises SampleMixingError, except those that need no separate samples."""
    given = problem(case)
    for extension in installed_extensions():
        left, values = given.run_usable([extension], _because_of("sample"))
        if left:
            whole = not extension.propagator.per_sample
            require(whole, f"{type(extension).__name__} gave a value, though samples mix.")
            _exact(case, given, values, left)
