"""Runs extensions on small nets, and compares what they stored with the table of quantities.

A net is around a layer, and all installed extensions are run; or it is for one extension alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.errors import MissingPluginError, OverwrittenInputError, UnsupportedError
from backpack_core.extending import extend
from backpack_core.testing import network
from backpack_core.testing.cases import (
    SAMPLES,
    Arguments,
    ExtensionCase,
    RuleCase,
)
from backpack_core.testing.compare import SMALLEST_SCALE, CheckFailure, close, finite, require
from backpack_core.testing.execution import shared_execution, traits
from backpack_core.testing.oracle import Reference, draw
from backpack_core.testing.quantities import ALL_NEEDS, Quantity, installed_extensions, quantity_of
from backpack_products.derivatives import second_order
from backpack_products.parametric import AffineRule

# Needs without an oracle where autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})

Values = dict[str, dict[str, Any]]  # save field → parameter → value
Judge = Callable[[Extension, Exception], None]  # raises unless an extension may refuse so
Made = tuple[Module, Arguments, Module]  # net, inputs, loss


@dataclass
class Problem:
    """A net that can be built again and again, always the same.

    Attributes:
        build: Makes the net, its inputs and its loss in a dtype.
        may_refuse: Needs that the net may lack; extensions with these may raise.
        quantity: What is expected, where the table does not say.
        whole: Compare where the oracle is a dense Hessian of the readout, too, which does not test
            a layer.
        refused: Why extensions raised, by their names.
    """

    build: Callable[[torch.dtype], Made]
    may_refuse: frozenset[str] = frozenset()
    quantity: Quantity | None = None
    whole: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def reference(self) -> Reference:
        """The oracle for this net."""
        return Reference(*self.build(torch.float64))

    def known(self, extension: Extension) -> Quantity | None:
        """What an extension has to compute."""
        return self.quantity or quantity_of(extension)

    def extended(self, dtype: torch.dtype = torch.float64) -> Made:
        """A fresh net, ready to be run."""
        net, arguments, loss = self.build(dtype)
        return extend(net), arguments, extend(loss)

    def run(
        self,
        extensions: Sequence[Extension],
        dtype: torch.dtype = torch.float64,
        frozen: Callable[[str], bool] = lambda name: False,
        autocast: bool = False,
        scale: float = 1.0,
        retains: Sequence[bool] = (False,),
        copied: Callable[[Any], Any] = lambda module: module,
    ) -> tuple[Module, Values]:
        """A forward pass, and backward passes.

        Args:
            extensions: What to compute.
            dtype: Of parameters and inputs.
            frozen: Whether a parameter is frozen.
            autocast: Run the forward pass under autocast to bfloat16.
            scale: A factor on the loss.
            retains: For each backward pass, whether it keeps the graph.
            copied: Makes copies of net and loss, which are run.

        Returns:
            The net, and what its parameters hold.
        """
        original, arguments, of = self.extended(dtype)
        net, loss = copied(original), copied(of)
        same = type(net) is type(original) and type(loss) is type(of)
        require(same, "The copy has another type.")
        for name, parameter in net.named_parameters():
            if frozen(name):
                parameter.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            value = loss(arguments.call(net)) * scale
        for keep in retains:
            for p in net.parameters():  # what is there from before must not stay
                vars(p).update((e.savefield, None) for e in extensions if e.savefield in vars(p))
            with backpack(*extensions, retain_graph=keep):
                value.backward(retain_graph=keep)
        named = [(name, vars(p)) for name, p in net.named_parameters()]
        fields = [extension.savefield for extension in extensions]
        return net, {f: {name: own[f] for name, own in named if f in own} for f in fields}

    def run_usable(
        self, extensions: Sequence[Extension], judge: Judge | None = None
    ) -> tuple[list[Extension], Values]:
        """The extensions that have a value on this net, and what they stored.

        Args:
            extensions: What to compute.
            judge: Raises unless an extension may refuse with an error; default: for a stated need.

        Raises:
            CheckFailure: One fails, or refuses although the net has what it needs.
        """
        left = list(extensions)
        while left:
            try:
                return left, self.run(left)[1]
            except Exception as error:
                culprit = self._culprit(error, left)
                (judge or self.judge_refusal)(culprit, error)
                left.remove(culprit)
        return left, {}

    def _culprit(self, error: Exception, extensions: Sequence[Extension]) -> Extension:
        """The extension that an error came from."""
        context = getattr(error, "backpack_context", "")
        for extension in extensions:
            if f"[{type(extension).__name__} of" in context:
                return extension
        for extension in extensions:  # the error does not say
            try:
                self.run([extension])
            except Exception:
                return extension
        raise CheckFailure(f"Extensions fail together only: {error}") from error

    def judge_refusal(self, extension: Extension, error: Exception) -> None:
        """Raises unless an extension refuses this net for a stated need."""
        name, known = type(extension).__name__, self.known(extension)
        if not isinstance(error, (UnsupportedError, MissingPluginError, OverwrittenInputError)):
            raise CheckFailure(f"{name} fails: {type(error).__name__}: {error}") from error
        if known is not None and known.needs not in self.may_refuse:
            raise CheckFailure(f"{name} refuses: {error}") from error
        self.refused[name] = str(error).split("\n", 1)[0]

    def compare(
        self,
        values: Values,
        extensions: Iterable[Extension],
        tolerance: float,
        reference: Reference | None = None,
        needs: Iterable[str] = ALL_NEEDS,
        coarse: bool = False,
    ) -> None:
        """Every value against its oracle; where there is none, it must be finite.

        Args:
            values: What was stored.
            extensions: What was computed.
            tolerance: Relative error that is allowed.
            reference: The oracle, if not this problem's own; its parameters were to get values.
            needs: Quantities with other needs are only checked to be finite.
            coarse: Errors are relative to the largest value in the net, not at the parameter. For
                values that are zero only by cancellation, which rounding disturbs.
        """
        reference = reference or self.reference
        for extension in extensions:
            stored, what = values[extension.savefield], type(extension).__name__
            missing = sorted(reference.parameters.keys() - stored)
            extra = sorted(stored.keys() - reference.parameters)
            require(not missing, f"{what} stored nothing on {missing}.")
            require(not extra, f"{what} stored a value on frozen {extra}.")
            expected, known = {}, self.known(extension)
            if known is not None and known.needs in needs:
                costly = known.needs == "second derivative" and not self.whole
                names = [n for n in stored if not (costly and n.startswith("readout"))]
                expected = {name: reference.expected(known, name) for name in names}
            largest = [float(tensor.abs().max()) for tensor in expected.values() if coarse]
            floor = max(largest, default=SMALLEST_SCALE)
            for name, value in stored.items():
                label = f"{what} of {name!r}"
                if known is None or name not in expected:
                    finite(value, label)
                else:
                    observed = known.observe(value, reference, name)
                    close(observed, expected[name], label, tolerance, floor)


@dataclass(eq=False)
class Nets:
    """The nets of a case, and the extensions that are run on them.

    Attributes:
        case: The layer or extension.
        problem: Makes the net, with options; each is made once.
        fresh: The extensions that have a value on the plain net. Takes arguments of extensions.
        needs: The needs that have an oracle.
    """

    case: RuleCase | ExtensionCase
    problem: Callable[..., Problem]
    fresh: Callable[..., list[Extension]]
    needs: Sequence[str] = ALL_NEEDS

    @property
    def is_alone(self) -> bool:
        """Whether one extension is checked, not a layer."""
        return isinstance(self.case, ExtensionCase)

    def few(self, needs: Sequence[str] | None = None) -> list[Extension]:
        """One for each pair of propagator and needs, of those with certain needs."""
        found: dict[Any, Extension] = {}
        for extension in self.fresh():
            known = self.problem().known(extension)
            if needs is None or (known and known.needs in needs):
                found.setdefault((extension.propagator, known and known.needs), extension)
        return list(found.values())

    def judge(
        self,
        extensions: Sequence[Extension] | None = None,
        net: dict[str, Any] | None = None,
        allowed: float = 0.0,
        refusals: Judge | None = None,
        reference: Reference | None = None,
        needs: Iterable[str] | None = None,
        coarse: bool = False,
        **how: Any,
    ) -> None:
        """Run extensions, and compare, as far as there is an oracle.

        Args:
            extensions: What to compute; default: all that have a value.
            net: Options of the net.
            allowed: Relative error; default: that of double precision.
            refusals: Whether extensions may refuse; default: none may.
            reference: The oracle, if not that of the net.
            needs: As of ``Problem.compare``; default: those that have an oracle.
            coarse: As of ``Problem.compare``.
            how: Options of ``Problem.run``.
        """
        given = self.problem(**net or {})
        extensions = self.fresh() if extensions is None else extensions
        reference = reference or given.reference
        if refusals is None:
            run, values = given.run(extensions, **how)
            trained = {name for name, p in run.named_parameters() if p.requires_grad}
            reference = reference.trained(n for n in reference.parameters if n in trained)
        else:
            extensions, values = given.run_usable(extensions, refusals)
        needs = self.needs if needs is None else needs
        allowed = allowed or self.case.tolerances.float64
        given.compare(values, extensions, allowed, reference, needs, coarse)


@lru_cache(maxsize=8)
def _around(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A layer between two others; ``twice`` has a second branch."""
    run = shared_execution(case)
    template, arguments = network.build_net(case, samples, twice=twice, axis=run.batch_axis)

    def build(dtype: torch.dtype) -> Made:
        net, loss = copy.deepcopy(template).to(dtype), network.SoftmaxLoss(reduction)
        return net, arguments.to(dtype), loss

    linear = set(run.parameters) <= set(getattr(run.rule, "linear_in_params", ()))
    is_linear = second_order(run.rule).hessian_is_zero or not any(run.live)
    known = "second derivative" in traits(case) and is_linear
    may = set() if case.twice_differentiable else set(TWICE)
    if not linear or (run.live and not known) or case.overwrites_input:
        may.add("second derivative")
    # Some quantities do not exist over branches, or for a parameter with two uses.
    if twice or not isinstance(run.rule, AffineRule):
        may.add("structure")
    return Problem(build, frozenset(may))


@lru_cache(maxsize=8)
def _usable(case: RuleCase) -> list[Extension]:
    return _around(case).run_usable(installed_extensions())[0]


@lru_cache(maxsize=16)
def _alone(
    case: ExtensionCase,
    reduction: str = "mean",
    samples: int = SAMPLES,
    shape: tuple[int, ...] = (2,),
    shrink: bool | None = None,
    **branches: bool,
) -> Problem:
    """A net for one extension, with a ``Block``."""
    quantity = case.quantity or quantity_of(case.made())
    shrink = _takes_any_layer(case, quantity) if shrink is None else shrink
    block = partial(network.Block, shape, shrink, **branches)
    layer = RuleCase(block, lambda n: draw((n, *shape), 1))

    def build(dtype: torch.dtype) -> Made:
        loss: Module = network.SoftmaxLoss(reduction)
        outputs = network.CLASSES
        if case.loss is not None:
            of = case.loss.as_rule_case(reduction)
            given = of.arguments(samples, dtype)
            loss = network.BoundLoss(of.module(dtype), given)
            outputs = given.args[0].shape[1:].numel()
        net, arguments = network.build_net(layer, samples, outputs=outputs)
        return net.to(dtype), arguments.to(dtype), loss

    may = {"residual": ["structure"], "twice": ["structure", "second derivative"]}
    refused = frozenset(need for branch in branches for need in may.get(branch, ()))
    return Problem(build, refused, quantity, whole=True)


def _takes_any_layer(case: ExtensionCase, quantity: Quantity | None) -> bool:
    """Whether an extension does without affine layers."""
    if quantity is not None:
        return quantity.needs != "structure"
    try:
        _alone(case, shrink=True).run([case.made()])
    except UnsupportedError:
        return False
    return True


def nets_of(case: RuleCase | ExtensionCase) -> Nets:
    """The nets of a layer or an extension."""
    if isinstance(case, RuleCase):
        needs = [n for n in ALL_NEEDS if case.twice_differentiable or n not in TWICE]
        return Nets(case, partial(_around, case), partial(_usable, case), needs)
    return Nets(case, partial(_alone, case), lambda **given: [case.extension_factory(**given)])
