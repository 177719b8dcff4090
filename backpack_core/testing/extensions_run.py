"""Runs extensions on a small net, and compares what they stored with the table of quantities."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.discovery import choose
from backpack_core.errors import MissingPluginError, OverwrittenInputError, UnsupportedError
from backpack_core.extending import extend
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.record.call import live_calls
from backpack_core.testing.cases import Arguments
from backpack_core.testing.compare import SMALLEST_SCALE, CheckFailure, close, finite, require
from backpack_core.testing.quantities import Needs, Quantity, quantity_of
from backpack_core.testing.reference import Reference

ALL_NEEDS: tuple[str, ...] = get_args(Needs)
# Needs that half precision can meet.
COARSE = ("gradient", "curvature", "sampling")

Values = dict[str, dict[str, Any]]  # save field → parameter → value
Judge = Callable[[Extension, Exception], None]  # raises unless an extension may refuse so


def installed_factories() -> list[Callable[..., Extension]]:
    """Factories of all installed extensions that the kit can build.

    If a constructor has arguments without defaults, the extension needs a row in the table of
    quantities that gives them.
    """
    ensure_loaded()
    factories: list[Callable[..., Extension]] = []
    for name, claims in sorted(registry.extensions.items()):
        kind = choose(claims, name, "extension").value
        known = quantity_of(kind)
        factory = partial(kind, **known.arguments) if known and known.arguments else kind
        found = inspect.signature(factory).parameters.values()
        optional = ("VAR_POSITIONAL", "VAR_KEYWORD")
        if not any(p.default is p.empty and p.kind.name not in optional for p in found):
            factories.append(factory)
    return factories


def installed_extensions(subsampling: Sequence[int] | None = None) -> list[Extension]:
    """An instance of every installed extension.

    Args:
        subsampling: Samples to take; extensions without that argument are left out then.
    """
    factories = installed_factories()
    if subsampling is None:
        return [factory() for factory in factories]
    takes = [f for f in factories if "subsampling" in inspect.signature(f).parameters]
    return [factory(subsampling=list(subsampling)) for factory in takes]


@dataclass
class Problem:
    """A net that can be built again and again, always the same.

    Attributes:
        build: Makes the net, its inputs and its loss in a dtype.
        reference: The oracle for this net.
        may_refuse: Needs that the net may lack; extensions with these may raise.
        quantity: What is expected, where the table does not say.
        whole: Compare where the oracle is a dense Hessian of the readout, too, which does not test
            a layer.
        refused: Why extensions raised, by their names.
    """

    build: Callable[[torch.dtype], tuple[Module, Arguments, Module]]
    reference: Reference
    may_refuse: frozenset[str] = frozenset()
    quantity: Quantity | None = None
    whole: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def extended(self, dtype: torch.dtype = torch.float64) -> tuple[Module, Arguments, Module]:
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
        net, arguments, loss = self.extended(dtype)
        same = [type(copied(module)) is type(module) for module in (net, loss)]
        require(all(same), "The copy has another type.")
        net, loss = copied(net), copied(loss)
        for name, parameter in net.named_parameters():
            if frozen(name):
                parameter.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            value = forward_loss(net, arguments, loss) * scale
        for keep in retains:
            for extension in extensions:  # what is there from before must not stay
                for values in values_of(net, [extension]).values():
                    for name in values:
                        setattr(net.get_parameter(name), extension.savefield, None)
            with backpack(*extensions, retain_graph=keep):
                value.backward(retain_graph=keep)
        return net, values_of(net, extensions)

    def usable(self, extensions: Sequence[Extension]) -> list[Extension]:
        """The extensions that have a value on this net; all others raised for a stated need."""
        return self.run_usable(extensions)[0]

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
        for extension in extensions:
            try:
                self.run([extension])
            except Exception:
                return extension
        raise CheckFailure(f"Extensions fail together only: {error}") from error

    def judge_refusal(self, extension: Extension, error: Exception) -> None:
        """Raises unless an extension refuses this net for a stated need."""
        name = type(extension).__name__
        if not isinstance(error, (UnsupportedError, MissingPluginError, OverwrittenInputError)):
            raise CheckFailure(f"{name} fails: {type(error).__name__}: {error}") from error
        quantity = self.quantity or quantity_of(extension)
        if quantity is not None and quantity.needs not in self.may_refuse:
            raise CheckFailure(f"{name} refuses: {error}") from error
        self.refused[name] = str(error).split("\n", 1)[0]

    def judge(
        self,
        extensions: Sequence[Extension],
        tolerance: float,
        refusals: Judge | None = None,
        reference: Reference | None = None,
        needs: Iterable[str] = ALL_NEEDS,
        coarse: bool = False,
        **how: Any,
    ) -> None:
        """Run, and compare.

        Args:
            extensions: What to compute.
            tolerance: Relative error that is allowed.
            refusals: Whether extensions may refuse; default: none may.
            reference: The oracle, if not this problem's own.
            needs: As of :meth:`compare`.
            coarse: As of :meth:`compare`.
            how: Options of :meth:`run`.
        """
        reference = reference or self.reference
        if refusals is None:
            net, values = self.run(extensions, **how)
            trained = {name for name, p in net.named_parameters() if p.requires_grad}
            reference = reference.trained(n for n in reference.parameters if n in trained)
        else:
            extensions, values = self.run_usable(extensions, refusals)
        self.compare(values, extensions, tolerance, reference, needs, coarse)

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
            missing, extra = _differences(set(reference.parameters), set(stored))
            require(not missing, f"{what} stored nothing on {missing}.")
            require(not extra, f"{what} stored a value on frozen {extra}.")
            known = self.quantity or quantity_of(extension)
            if known is None or known.needs not in needs:
                names = []
            else:
                costly = known.needs == "second derivative" and not self.whole
                names = [name for name in stored if not (costly and name.startswith("readout"))]
            floor = SMALLEST_SCALE
            if coarse and known is not None and names:
                largest = [reference.expected(known, name).abs().max() for name in names]
                floor = float(torch.stack(largest).max())
            for name, value in stored.items():
                label = f"{what} of {name!r}"
                if known is None or name not in names:
                    finite(value, label)
                else:
                    observed = known.observe(value, reference, name)
                    close(observed, reference.expected(known, name), label, tolerance, floor)


def _differences(expected: set[str], found: set[str]) -> tuple[list[str], list[str]]:
    return sorted(expected - found), sorted(found - expected)


def forward_loss(net: Module, arguments: Arguments, loss: Module) -> Tensor:
    """Net and loss, with the random numbers that the reference drew."""
    value: Tensor = loss(arguments.call(net))
    return value


def values_of(net: Module, extensions: Iterable[Extension]) -> Values:
    """The values that extensions stored on the parameters of a net."""
    named = dict(net.named_parameters())
    fields = [extension.savefield for extension in extensions]
    return {f: {name: getattr(p, f) for name, p in named.items() if hasattr(p, f)} for f in fields}


def forget(net: Module) -> None:
    """Delete stored values from the parameters, because a stored function keeps its call alive."""
    for parameter in net.parameters():
        parameter.__dict__.clear()


@contextmanager
def no_calls_left(what: str) -> Iterator[None]:
    """Require that as many calls are alive after the block as before, by reference count alone."""
    enabled, before = gc.isenabled(), live_calls()
    gc.disable()
    try:
        yield
        left = live_calls() - before
        require(left <= 0, f"{what}: {left} records of module calls outlive their graph.")
    finally:
        if enabled:
            gc.enable()
