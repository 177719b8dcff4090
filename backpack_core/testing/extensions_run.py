"""Runs extensions on a small net, and compares what they stored with the table of quantities."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from backpack_core.record.structure import iter_tensors
from backpack_core.testing.cases import FORWARD, Arguments, seeded
from backpack_core.testing.compare import SMALLEST_SCALE, CheckFailure, close, require
from backpack_core.testing.quantities import Needs, Quantity, quantity_of
from backpack_core.testing.reference import Reference

ALL_NEEDS: tuple[str, ...] = get_args(Needs)

Values = dict[str, dict[str, Any]]  # save field → parameter → value


def installed_factories() -> list[Callable[..., Extension]]:
    """Factories of all installed extensions that the kit can build.

    If a constructor has arguments without defaults, the extension needs a row in the table of
    quantities that gives them.
    """
    ensure_loaded()
    factories: list[Callable[..., Extension]] = []
    for name, claims in sorted(registry.extensions.items()):
        kind = choose(claims, name, "extension").value
        known = quantity_of(kind.savefield)
        factory = partial(kind, **known.arguments) if known and known.arguments else kind
        if not _required(factory):
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
    return [
        factory(subsampling=list(subsampling))
        for factory in factories
        if "subsampling" in inspect.signature(factory).parameters
    ]


def _required(factory: Callable[..., Extension]) -> list[str]:
    """Arguments without a default."""
    return [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


@dataclass
class Problem:
    """A net that can be built again and again, always the same.

    Attributes:
        build: Makes the net, its inputs and its loss in a dtype.
        reference: The oracle for this net.
        may_refuse: Needs that the net may lack; extensions with these may raise.
    """

    build: Callable[[torch.dtype], tuple[Module, Arguments, Module]]
    reference: Reference
    may_refuse: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)

    def extended(self, dtype: torch.dtype = torch.float64) -> tuple[Module, Arguments, Module]:
        """A fresh net, ready to be run."""
        net, arguments, loss = self.build(dtype)
        return extend(net), arguments, extend(loss)

    def run(
        self,
        extensions: Sequence[Extension],
        dtype: torch.dtype = torch.float64,
        prepare: Callable[[Module], object] = lambda net: None,
        autocast: bool = False,
        scale: float = 1.0,
    ) -> tuple[Module, Values]:
        """One forward and backward pass.

        Args:
            extensions: What to compute.
            dtype: Of parameters and inputs.
            prepare: Changes the net before the forward pass, for example to freeze parameters.
            autocast: Run the forward pass under autocast to bfloat16.
            scale: A factor on the loss.

        Returns:
            The net, and what its parameters hold.
        """
        net, arguments, loss = self.extended(dtype)
        prepare(net)
        cast = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
        with cast:
            value = forward_loss(net, arguments, loss) * scale
        with backpack(*extensions):
            value.backward()
        return net, values_of(net, extensions)

    def usable(self, extensions: Sequence[Extension]) -> list[Extension]:
        """The extensions that have a value on this net; all others raised for a stated need."""
        return self.run_usable(extensions)[0]

    def run_usable(
        self,
        extensions: Sequence[Extension],
        judge: Callable[[Extension, Exception], None] | None = None,
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
                (judge or self._judge)(culprit, error)
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

    def _judge(self, extension: Extension, error: Exception) -> None:
        name = type(extension).__name__
        if not isinstance(error, (UnsupportedError, MissingPluginError, OverwrittenInputError)):
            raise CheckFailure(f"{name} fails: {type(error).__name__}: {error}") from error
        quantity = quantity_of(extension.savefield)
        if quantity is not None and quantity.needs not in self.may_refuse:
            raise CheckFailure(f"{name} refuses: {error}") from error
        self.refused[name] = str(error).split("\n", 1)[0]

    def compare(
        self,
        values: Values,
        extensions: Iterable[Extension],
        tolerance: float,
        reference: Reference | None = None,
        needs: Iterable[str] = ALL_NEEDS,
        trained: Callable[[str], bool] = lambda name: True,
        coarse: bool = False,
    ) -> None:
        """Every value against its oracle; where there is none, it must be finite.

        Args:
            values: What was stored.
            extensions: What was computed.
            tolerance: Relative error that is allowed.
            reference: The oracle, if not this problem's own.
            needs: Quantities with other needs are only checked to be finite.
            trained: Whether a parameter was to get a value.
            coarse: Errors are relative to the largest value in the net, not at the parameter. For
                values that are zero only by cancellation, which rounding disturbs.
        """
        reference = reference or self.reference
        reference = reference.trained(filter(trained, reference.parameters))
        for extension in extensions:
            quantity = quantity_of(extension.savefield)
            if quantity is not None and quantity.needs not in needs:
                quantity = None
            floor = largest_expected(quantity, reference) if coarse and quantity else SMALLEST_SCALE
            stored, what = values[extension.savefield], type(extension).__name__
            compare_stored(what, stored, quantity, reference, tolerance, floor, _is_costly)


def compare_stored(
    what: str,
    stored: Mapping[str, Any],
    quantity: Quantity | None,
    reference: Reference,
    tolerance: float,
    floor: float = SMALLEST_SCALE,
    skip: Callable[[Quantity, str], bool] = lambda quantity, name: False,
) -> None:
    """Require that an extension stored the right value on each parameter of the reference.

    Args:
        what: Name of the extension, for messages.
        stored: Its values, by parameter.
        quantity: What they should be; without it, and where ``skip`` says so, they must be finite.
        reference: The oracle.
        tolerance: Relative error that is allowed.
        floor: Errors are relative to no less than this.
        skip: Whether a parameter is left out.
    """
    found, expected = set(stored), set(reference.parameters)
    require(not expected - found, f"{what} stored nothing on {sorted(expected - found)}.")
    require(not found - expected, f"{what} stored a value on frozen {sorted(found - expected)}.")
    for name, value in stored.items():
        label = f"{what} of {name!r}"
        if quantity is None or skip(quantity, name):
            for tensor in iter_tensors(value):
                finite = bool(torch.isfinite(tensor).all())
                require(finite, f"{label}: not all values are finite.")
        else:
            observed = quantity.observe(value, reference, name)
            close(observed, reference.expected(quantity, name), label, tolerance, floor)


def largest_expected(quantity: Quantity, reference: Reference) -> float:
    """The largest entry of a quantity over the parameters of a net, for the scale of errors."""
    names = [name for name in reference.parameters if not _is_costly(quantity, name)]
    return max(float(reference.expected(quantity, name).abs().max()) for name in names)


def forward_loss(net: Module, arguments: Arguments, loss: Module) -> Tensor:
    """Net and loss, with the random numbers that the reference drew."""
    output = seeded(lambda: net(*arguments.args, **arguments.kwargs), FORWARD)
    value: Tensor = loss(output)
    return value


def values_of(net: Module, extensions: Iterable[Extension]) -> Values:
    """The values that extensions stored on the parameters of a net."""
    return {
        extension.savefield: {
            name: getattr(parameter, extension.savefield)
            for name, parameter in net.named_parameters()
            if hasattr(parameter, extension.savefield)
        }
        for extension in extensions
    }


def forget(net: Module) -> None:
    """Delete stored values from the parameters, because a stored function keeps its call alive."""
    for parameter in net.parameters():
        parameter.__dict__.clear()


def _is_costly(quantity: Quantity, name: str) -> bool:
    """Whether the oracle is a dense Hessian of the readout, which does not test the layer."""
    return quantity.needs == "second derivative" and name.startswith("readout")


@contextmanager
def no_calls_left(what: str) -> Iterator[None]:
    """Require that as many calls are alive after the block as before, by reference count alone."""
    import gc

    from backpack_core.record.call import live_calls

    enabled, before = gc.isenabled(), live_calls()
    gc.disable()
    try:
        yield
        left = live_calls() - before
        require(left <= 0, f"{what}: {left} records of module calls outlive their graph.")
    finally:
        if enabled:
            gc.enable()
