"""Checks of a layer inside a small net, with every installed extension, against the reference."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.testing.cases import SAMPLES, Arguments, RuleCase
from backpack_core.testing.compare import require
from backpack_core.testing.execution import Execution, shared_execution
from backpack_core.testing.extensions_run import (
    ALL_NEEDS,
    COARSE,
    Judge,
    Problem,
    forget,
    forward_loss,
    installed_extensions,
    no_calls_left,
)
from backpack_core.testing.network import SoftmaxLoss, build_net
from backpack_core.testing.quantities import quantity_of
from backpack_core.testing.reference import Reference
from backpack_core.testing.traits import traits
from backpack_products.parametric import AffineRule

# Needs without an oracle where autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})


@lru_cache(maxsize=8)
def problem(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A case's small net, with its reference."""
    template, arguments = build_net(case, samples, twice, shared_execution(case).batch_axis)

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        return copy.deepcopy(template).to(dtype), arguments.to(dtype), SoftmaxLoss(reduction)

    may = _may_refuse(shared_execution(case))
    # Some quantities do not exist over branches, or for a parameter with two uses.
    may |= {"structure"} if twice else set()
    return Problem(build, Reference(*build(torch.float64)), may)


def _may_refuse(run: Execution) -> frozenset[str]:
    rule, case = run.rule, run.case
    linear = set(run.parameters) <= set(getattr(rule, "linear_in_params", ()))
    known = "second derivative" in traits(case) and (rule.hessian_is_zero or not any(run.live))
    may = set() if case.twice_differentiable else set(TWICE)
    if not linear or (run.live and not known) or case.overwrites_input:
        may.add("second derivative")
    if not isinstance(rule, AffineRule):
        may.add("structure")
    return frozenset(may)


@lru_cache(maxsize=8)
def usable(case: RuleCase) -> tuple[Extension, ...]:
    """The installed extensions that have a value on the case's net."""
    return tuple(problem(case).usable(installed_extensions()))


def few(case: RuleCase, needs: Sequence[str] | None = None) -> list[Extension]:
    """One extension for each pair of propagator and needs, of those with certain needs."""
    found: dict[Any, Extension] = {}
    for extension in usable(case) if needs is None else with_needs(case, needs):
        quantity = quantity_of(extension.savefield)
        found.setdefault((extension.propagator, quantity and quantity.needs), extension)
    return list(found.values())


def with_needs(case: RuleCase, needs: Sequence[str], cancels: bool = True) -> list[Extension]:
    """The usable extensions with certain needs; those that cancel may be left out."""
    known = [(extension, quantity_of(extension.savefield)) for extension in usable(case)]
    return [e for e, found in known if found and found.needs in needs and cancels >= found.cancels]


def exact(
    run: Execution,
    extensions: Sequence[Extension] | None = None,
    net: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run extensions, and compare in double precision, as far as torch gives an oracle.

    Args:
        run: The layer.
        extensions: What to compute; default: all that have a value.
        net: Options of :func:`problem`.
        options: Options of ``Problem.judge``.
    """
    case = run.case
    needs = [need for need in ALL_NEEDS if case.twice_differentiable or need not in TWICE]
    extensions = usable(case) if extensions is None else extensions
    problem(case, **net or {}).judge(extensions, run.allowed, needs=needs, **options)


def subsampling(run: Execution) -> None:
    """Samples 2 and 0, in this order."""
    chosen, names = (2, 0), {type(extension) for extension in usable(run.case)}
    extensions = [e for e in installed_extensions(chosen) if type(e) in names]
    reference = problem(run.case).reference.restricted(chosen)
    exact(run, extensions, refusals=_because_of("subsampling"), reference=reference)


def _because_of(word: str) -> Judge:
    """Raises unless an extension refuses a net, and says why."""

    def judge(extension: Extension, error: Exception) -> None:
        if not isinstance(error, UnsupportedError):
            raise error
        require(word in str(error), f"{type(extension).__name__} refuses, but: {error}")

    return judge


def called_twice(run: Execution) -> None:
    """The layer, and the layers around it, are called on two inputs; outputs are added."""
    given = problem(run.case, twice=True)
    exact(run, net={"twice": True}, refusals=given.judge_refusal)


def frozen(run: Execution, *which: Callable[[str], bool]) -> None:
    """Some parameters are frozen, then others."""
    for chosen in which:
        exact(run, few(run.case), how={"frozen": chosen})


def frozen_layer(run: Execution) -> None:
    """The layer's parameters are frozen."""
    frozen(run, lambda name: name.startswith("layer."))


def frozen_surroundings(run: Execution) -> None:
    """What is before the layer is frozen, so that its input requires no gradient."""
    frozen(run, lambda name: name.startswith("mixes."))


def partly_frozen(run: Execution) -> None:
    """Every other parameter of the layer is frozen, then the remaining ones instead."""
    names = [f"layer.{name}" for name in run.parameters]
    frozen(run, names[::2].__contains__, names[1::2].__contains__)


def float32(run: Execution) -> None:
    """Single precision, against the reference in double precision."""
    needs = (*COARSE, *(TWICE if run.case.twice_differentiable else ()))
    allowed, options = run.case.tolerances.float32, {"dtype": torch.float32}
    extensions = with_needs(run.case, needs)
    problem(run.case).judge(extensions, allowed, options, needs=needs, coarse=True)


def bfloat16(run: Execution, **options: Any) -> None:
    """Half precision, against the reference in double precision."""
    case, options = run.case, options or {"dtype": torch.bfloat16}
    needs = (*COARSE, *(["double backward"] if case.twice_differentiable else []))
    extensions = with_needs(case, needs, cancels=False)
    problem(case).judge(extensions, case.tolerances.bfloat16, options, needs=needs, coarse=True)


def autocast(run: Execution) -> None:
    """Parameters in single precision, operations in half."""
    bfloat16(run, dtype=torch.float32, autocast=True)


def retain_graph(run: Execution) -> None:
    """Two backward passes through one graph; the second overwrites, and agrees."""
    for passes in ((True,), (True, False)):
        exact(run, few(run.case), how={"retains": passes})


def deepcopy(run: Execution, copied: Callable[[Any], Any] = copy.deepcopy) -> None:
    """By ``copy.deepcopy``."""
    # What was copied wrongly is missed by all: one of each that every layer has is enough.
    exact(run, few(run.case, ("gradient", "curvature")), how={"copied": copied})


def by_pickle(run: Execution) -> None:
    """By ``pickle``."""
    deepcopy(run, lambda module: pickle.loads(pickle.dumps(module)))


def no_live_calls(run: Execution) -> None:
    """Forward only; and forward with backward, and all extensions."""
    given, extensions = problem(run.case), few(run.case)
    with no_calls_left("After a forward pass alone"):
        given_net = given.extended()
        value = forward_loss(*given_net)
        del value, given_net
    with no_calls_left("After a backward pass"):
        net, values = given.run(extensions)
        forget(net)
        del net, values


def mixing_is_refused(run: Execution) -> None:
    """Every extension raises SampleMixingError, except those that need no separate samples."""
    judge = _because_of("sample")
    for extension in installed_extensions():
        if problem(run.case).run_usable([extension], judge)[0]:
            whole = not extension.propagator.per_sample
            require(whole, f"{type(extension).__name__} gave a value, though samples mix.")
            exact(run, [extension])
