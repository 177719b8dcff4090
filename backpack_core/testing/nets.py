"""Runs extensions on small nets, and compares what they store with the oracles of quantities.

A net is built around a layer, and all installed extensions are run on it; or it is built for one
extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.errors import MissingPluginError, OverwrittenInputError, UnsupportedError
from backpack_core.extending import extend
from backpack_core.record.nested import iter_tensors
from backpack_core.testing import network, oracle, quantities
from backpack_core.testing.cases import SAMPLES, Arguments, ExtensionCase, RuleCase
from backpack_core.testing.compare import SMALLEST_SCALE, CheckFailure, close, finite, require
from backpack_core.testing.layer_run import shared_run_of, traits
from backpack_core.testing.oracle import Reference, draw
from backpack_core.testing.quantities import ALL_NEEDS, Quantity, installed_extensions, quantity_of

Values = dict[str, dict[str, Any]]  # save field → parameter → value
RefusalCheck = Callable[[Extension, Exception], None]  # raises unless an extension may refuse so
Made = tuple[Module, Arguments, Module]  # net, inputs, loss


@dataclass
class Problem:
    """A net that can be built again and again, always the same.

    Attributes:
        build: Makes the net, its inputs and its loss in a dtype.
        may_refuse: Needs that the net may not meet; extensions with these needs may raise.
        quantity: The expected quantity, if it is not to be looked up.
        whole: Whether dense Hessians with respect to the readout are compared, too. They are
            expensive, and do not test a layer.
        refused: Why extensions raised, by their names.
    """

    build: Callable[[torch.dtype], Made]
    may_refuse: frozenset[str] = frozenset()
    quantity: Quantity | None = None
    whole: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def reference(self) -> Reference:
        """The oracle of this net."""
        return Reference(*self.build(torch.float64))

    def quantity_for(self, extension: Extension) -> Quantity | None:
        """The quantity that an extension must compute."""
        return self.quantity or quantity_of(extension)

    def extended(self, dtype: torch.dtype = torch.float64) -> Made:
        """A fresh net, extended."""
        net, arguments, loss = self.build(dtype)
        return extend(net), arguments, extend(loss)

    def run(
        self,
        extensions: Sequence[Extension],
        dtype: torch.dtype = torch.float64,
        frozen: Callable[[str], bool] = lambda name: False,
        autocast: bool = False,
        retains: Sequence[bool] = (False,),
        copied: Callable[[Any], Any] = lambda module: module,
    ) -> tuple[Module, Values]:
        """Run a forward pass and some backward passes.

        Args:
            extensions: What to compute.
            dtype: Of parameters and inputs.
            frozen: Whether a parameter is frozen, by its name.
            autocast: Whether to run the forward pass under autocast to bfloat16.
            retains: For each backward pass, whether it retains the graph.
            copied: Makes the copies of net and loss that are run.

        Returns:
            The net, and the values that its parameters have.
        """
        original, arguments, original_loss = self.extended(dtype)
        net, loss = copied(original), copied(original_loss)
        same = type(net) is type(original) and type(loss) is type(original_loss)
        require(same, "The copy has another type.")
        for name, parameter in net.named_parameters():
            if frozen(name):
                parameter.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            value = loss(arguments.call(net))
        for keep in retains:
            for p in net.parameters():  # values of the pass before must not pass for new ones
                vars(p).update((e.savefield, None) for e in extensions if e.savefield in vars(p))
            with backpack(*extensions, retain_graph=keep):
                value.backward(retain_graph=keep)
        named = [(name, vars(p)) for name, p in net.named_parameters()]
        fields = [extension.savefield for extension in extensions]
        return net, {f: {name: values[f] for name, values in named if f in values} for f in fields}

    def run_usable(
        self, extensions: Sequence[Extension], refusals: RefusalCheck | None = None
    ) -> tuple[list[Extension], Values]:
        """Run the extensions that have a value on this net.

        Args:
            extensions: What to compute.
            refusals: Raises unless an extension may refuse with an error; default:
                :meth:`require_reason`.

        Returns:
            The extensions that have a value, and what they stored.

        Raises:
            CheckFailure: An extension fails, or refuses although the net meets its needs.
        """
        usable = list(extensions)
        while usable:
            try:
                return usable, self.run(usable)[1]
            except Exception as error:
                culprit = self._culprit(error, usable)
                (refusals or self.require_reason)(culprit, error)
                usable.remove(culprit)
        return usable, {}

    def differentiate(self, extension: Extension, allowed: float) -> None:
        """Compare how values change as parameters grow, by autograd, with difference quotients.

        Args:
            extension: What to compute.
            allowed: The relative error of values, by which their differences are rounded.
        """
        step = allowed**0.5

        def grown(factor: float) -> tuple[Tensor, list[Tensor]]:
            net, arguments, loss = self.extended()
            parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
            torch._foreach_mul_([p.data for p in parameters], factor)
            value = loss(arguments.call(net))
            with backpack(extension):
                torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
            stored = iter_tensors([vars(p).pop(extension.savefield, None) for p in parameters])
            terms = [(t * draw(tuple(t.shape), 13)).sum() for t in stored if t.is_floating_point()]
            return sum(terms, 0 * value), parameters

        found, thetas = grown(1.0)
        slope = sum(t.sum() for t in torch._foreach_mul(thetas, oracle.gradients(found, thetas)))
        quotient = (grown(1 + step)[0] - grown(1 - step)[0]) / (2 * step)
        what = f"{type(extension).__name__} after create_graph=True, differentiated by parameters"
        close(torch.as_tensor(slope), quotient, f"{what} (without detach, .data, no_grad)", step)

    def _culprit(self, error: Exception, extensions: Sequence[Extension]) -> Extension:
        """The extension that raised an error."""
        context = getattr(error, "backpack_context", "")
        named = [e for e in extensions if f"[{type(e).__name__} of" in context]
        for extension in named or extensions:
            try:
                self.run([extension])
            except Exception:
                return extension
        raise CheckFailure(f"Together with others: {error}") from error

    def require_reason(self, extension: Extension, error: Exception) -> None:
        """Raise unless an extension refuses this net for a need that the net may not meet."""
        name, quantity = type(extension).__name__, self.quantity_for(extension)
        if not isinstance(error, (UnsupportedError, MissingPluginError, OverwrittenInputError)):
            raise CheckFailure(f"{name} fails: {type(error).__name__}: {error}") from error
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
        coarse: bool = False,
    ) -> None:
        """Compare every value with its oracle; if it has none, it must be finite.

        Args:
            values: What was stored.
            extensions: What was computed.
            tolerance: The relative error that is allowed.
            reference: The oracle, if not this problem's own; its parameters are those with values.
            needs: Quantities with other needs must only be finite.
            coarse: Whether errors are relative to the largest value in the net, not at the
                parameter. For values that are zero by cancellation, which rounding disturbs.
        """
        reference = reference or self.reference
        for extension in extensions:
            stored, what = values[extension.savefield], type(extension).__name__
            missing = sorted(reference.parameters.keys() - stored)
            extra = sorted(stored.keys() - reference.parameters)
            require(not missing, f"{what} stored nothing on {missing}.")
            require(not extra, f"{what} stored a value on frozen {extra}.")
            expected, quantity = {}, self.quantity_for(extension)
            if quantity is not None and quantity.needs in needs:
                costly = quantity.needs == "second derivative" and not self.whole
                names = [n for n in stored if not (costly and n.startswith("readout"))]
                expected = {name: reference.once(quantity.expected, name) for name in names}
            largest = [float(tensor.abs().max()) for tensor in expected.values() if coarse]
            floor = max(largest, default=SMALLEST_SCALE)
            for name, value in stored.items():
                label = f"{what} of {name!r}"
                if quantity is None or name not in expected:
                    finite(value, label)
                else:
                    observed = quantity.observe(value, reference, name)
                    close(observed, expected[name], label, tolerance, floor)


@dataclass(eq=False)
class Nets:
    """The nets of a case, and the extensions that are run on them.

    Attributes:
        case: The layer or extension.
        problem: Makes a net with some options; each is made once.
        make_extensions: Makes the extensions that have a value on the plain net, with some options.
        needs: The needs for which there is an oracle.
    """

    case: RuleCase | ExtensionCase
    problem: Callable[..., Problem]
    make_extensions: Callable[..., list[Extension]]
    needs: Sequence[str] = ALL_NEEDS

    @property
    def is_alone(self) -> bool:
        """Whether the case is an extension, not a layer."""
        return isinstance(self.case, ExtensionCase)

    def few(self, needs: Sequence[str] | None = None) -> list[Extension]:
        """One extension for each pair of propagator and needs, of those with certain needs."""
        chosen: dict[Any, Extension] = {}
        for extension in self.make_extensions():
            quantity = self.problem().quantity_for(extension)
            if needs is None or (quantity and quantity.needs in needs):
                chosen.setdefault((extension.propagator, quantity and quantity.needs), extension)
        return list(chosen.values())

    def check(
        self,
        extensions: Sequence[Extension] | None = None,
        net: dict[str, Any] | None = None,
        allowed: float = 0.0,
        refusals: RefusalCheck | None = None,
        reference: Reference | None = None,
        needs: Iterable[str] | None = None,
        coarse: bool = False,
        **how: Any,
    ) -> None:
        """Run extensions and compare their values with the oracle, if there is one.

        Args:
            extensions: What to compute; default: all that have a value.
            net: Options of the net.
            allowed: Relative error; default: that of double precision.
            refusals: Raises unless an extension may refuse; default: none may.
            reference: The oracle, if not that of the net.
            needs: As in ``Problem.compare``; default: those with an oracle.
            coarse: As in ``Problem.compare``.
            how: Options of ``Problem.run``.
        """
        problem = self.problem(**net or {})
        extensions = self.make_extensions() if extensions is None else extensions
        reference = reference or problem.reference
        if refusals is None:
            trained_net, values = problem.run(extensions, **how)
            trained = {name: p for name, p in trained_net.named_parameters() if p.requires_grad}
            # With other parameters frozen, an output may depend on none of the layer's.
            used = {n for n, p in trained.items() if p.grad is not None}.union(*values.values())
            reference = reference.trained(n for n in reference.parameters if n in used & {*trained})
        else:
            extensions, values = problem.run_usable(extensions, refusals)
        needs = self.needs if needs is None else needs
        allowed = allowed or self.case.tolerances.float64
        problem.compare(values, extensions, allowed, reference, needs, coarse)


@lru_cache(maxsize=8)
def _around(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A net around a layer; ``twice`` calls the layer on a second branch."""
    run = shared_run_of(case)
    options: dict[str, Any] = {"twice": twice, "axis": run.view.axis}

    def build(dtype: torch.dtype) -> Made:  # holds no run, whose graph would live as long
        net, arguments = network.build_net(case, samples, **options)
        return net.to(dtype), arguments.to(dtype), network.SoftmaxLoss(reduction)

    may_refuse = set() if case.twice_differentiable else set(quantities.TWICE)
    if traits(case) & {"not every second derivative", "not kept"}:
        may_refuse.add("second derivative")
    # Some quantities do not exist over branches, or for a parameter with two uses.
    if twice or "not affine" in traits(case):
        may_refuse.add("structure")
    return Problem(build, frozenset(may_refuse))


@lru_cache(maxsize=8)
def _with_defaults(case: RuleCase) -> list[Extension]:
    return _around(case).run_usable(installed_extensions())[0]


def _usable(case: RuleCase, **given: Any) -> list[Extension]:
    """The installed extensions that take some arguments and have a value around a layer."""
    usable = _with_defaults(case)
    kinds = {type(extension) for extension in usable}
    return [e for e in installed_extensions(**given) if type(e) in kinds] if given else usable


@lru_cache(maxsize=16)
def _alone(
    case: ExtensionCase,
    reduction: str = "mean",
    samples: int = SAMPLES,
    shape: tuple[int, ...] = (2,),
    shrink: bool | None = None,
    scale: float = 1.0,
    **branches: bool,
) -> Problem:
    """A net around a :func:`~network.block`, for one extension."""
    quantity = case.quantity or quantity_of(case.make())
    shrink = _takes_any_layer(case, quantity) if shrink is None else shrink
    block = partial(network.block, shape, shrink, **branches)
    layer = RuleCase(block, lambda n: draw((n, *shape), 1))

    def build(dtype: torch.dtype) -> Made:
        loss: Module = network.SoftmaxLoss(reduction)
        outputs = network.CLASSES
        if case.loss is not None:
            loss_case = case.loss.as_rule_case(reduction)
            loss_arguments = loss_case.arguments(samples, dtype)
            loss = network.BoundLoss(loss_case.module(dtype), loss_arguments)
            outputs = loss_arguments.args[0].shape[1:].numel()
        if scale != 1.0:
            loss = network.ScaledLoss(loss, scale)
        net, arguments = network.build_net(layer, samples, outputs=outputs)
        return net.to(dtype), arguments.to(dtype), loss

    lacks = {"residual": ["structure"], "twice": ["structure", "second derivative"]}
    may_refuse = frozenset(need for branch in branches for need in lacks.get(branch, ()))
    return Problem(build, may_refuse, quantity, whole=True)


def _takes_any_layer(case: ExtensionCase, quantity: Quantity | None) -> bool:
    """Whether an extension has values at layers that are not affine."""
    if quantity is not None:
        return quantity.needs != "structure"
    try:
        _alone(case, shrink=True).run([case.make()])
    except UnsupportedError:
        return False
    return True


def nets_of(case: RuleCase | ExtensionCase) -> Nets:
    """The nets for a layer or an extension."""
    if isinstance(case, RuleCase):
        needs = [n for n in ALL_NEEDS if case.twice_differentiable or n not in quantities.TWICE]
        return Nets(case, partial(_around, case), partial(_usable, case), needs)
    return Nets(case, partial(_alone, case), lambda **given: [case.extension_factory(**given)])
