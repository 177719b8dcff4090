"""Checks of an extension against the oracle that its author states, on the kit's own nets."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.context import backpack
from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.record.structure import iter_tensors
from backpack_core.testing.cases import SAMPLES, Arguments, ExtensionCase, seeded
from backpack_core.testing.checks import of_extension
from backpack_core.testing.compare import close, require
from backpack_core.testing.execution import draw
from backpack_core.testing.extensions_run import (
    Problem,
    compare_stored,
    forget,
    forward_loss,
    installed_extensions,
    no_calls_left,
    values_of,
)
from backpack_core.testing.network import (
    CLASSES,
    BoundLoss,
    Mix,
    Readout,
    Shrink,
    SoftmaxLoss,
    Squash,
)
from backpack_core.testing.quantities import Quantity, quantity_of
from backpack_core.testing.reference import Reference

FEATURES = 2


class ExtensionNet(Module):
    """``Mix``, ``Shrink``, ``Squash``, ``Readout``, with branches as asked for.

    Attributes:
        residual: Add the output of ``Mix`` after ``Squash``, by a functional sum.
        twice: Apply ``Mix`` a second time.
        single: The parameter of ``Shrink`` is one number.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        shrink: bool,
        residual: bool = False,
        twice: bool = False,
        single: bool = False,
        outputs: int = CLASSES,
    ) -> None:
        super().__init__()
        self.mix = Mix(shape[-1])
        self.shrink = Shrink(() if single else shape) if shrink else torch.nn.Identity()
        self.squash = Squash()
        self.readout = Readout(torch.Size(shape).numel(), outputs)
        self.residual, self.twice = residual, twice

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *shape] → [N, CLASSES]``."""
        first = self.mix(x)
        hidden = self.squash(self.shrink(first) if isinstance(self.shrink, Shrink) else first)
        if self.residual:
            hidden = hidden + first
        if self.twice:
            hidden = self.mix(hidden)
        result: Tensor = self.readout(hidden)
        return result


def quantity_for(case: ExtensionCase) -> Quantity | None:
    """The oracle that the author states, or the row of the table."""
    return case.quantity or quantity_of(case.extension_factory().savefield)


def _is_structural(case: ExtensionCase) -> bool:
    """Whether the extension needs affine layers: then the net has no others."""
    quantity = quantity_for(case)
    if quantity is not None:
        return quantity.needs == "structure"
    try:
        _build(case, shrink=True).run([case.extension_factory()])
    except UnsupportedError:
        return True
    return False


def _build(
    case: ExtensionCase,
    shrink: bool,
    reduction: str = "mean",
    samples: int = SAMPLES,
    shape: tuple[int, ...] = (FEATURES,),
    **options: bool,
) -> Problem:
    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        loss, outputs = _loss(case, reduction, samples, dtype)
        net = seeded(lambda: ExtensionNet(shape, shrink, outputs=outputs, **options), 8).to(dtype)
        return net, Arguments((draw((samples, *shape), 1).to(dtype),)), loss

    return Problem(build, Reference(*build(torch.float64)))


def _loss(
    case: ExtensionCase, reduction: str, samples: int, dtype: torch.dtype
) -> tuple[Module, int]:
    """The loss as a function of the prediction, and how many numbers of a sample it takes."""
    if case.loss is None:
        return SoftmaxLoss(reduction), CLASSES
    layer = case.loss.as_rule_case(reduction)
    given = layer.arguments(samples, dtype)
    return BoundLoss(layer.module(dtype), given), given.args[0].shape[1:].numel()


@lru_cache(maxsize=16)
def _cached_problem(case: ExtensionCase, options: tuple[tuple[str, Any], ...]) -> Problem:
    return _build(case, not _is_structural(case), **dict(options))


def problem_of(case: ExtensionCase, **options: Any) -> Problem:
    """The kit's net for an extension, with a reduction, samples, a shape, and branches."""
    return _cached_problem(case, tuple(sorted(options.items())))


def _compare(
    case: ExtensionCase,
    given: Problem,
    extension: Extension | None = None,
    reference: Reference | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Run the extension on a net; each value against the oracle, or finite without one."""
    extension = extension or case.extension_factory()
    net, values = given.run([extension], **options)
    compare_values(case, net, values[extension.savefield], reference or given.reference, tolerance)


def compare_values(
    case: ExtensionCase,
    net: Module,
    values: dict[str, Any],
    reference: Reference,
    tolerance: float | None = None,
) -> None:
    """The values of one extension against the oracle, or finite without one."""
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    reference = reference.trained(name for name in reference.parameters if name in trained)
    allowed = tolerance or case.tolerances.float64
    compare_stored(case.label(), values, quantity_for(case), reference, allowed)


@of_extension()
def value_mean(case: ExtensionCase) -> None:
    """A mean loss."""
    _compare(case, problem_of(case))


@of_extension()
def value_sum(case: ExtensionCase) -> None:
    """A sum."""
    _compare(case, problem_of(case, reduction="sum"))


@of_extension()
def value_batch_of_one(case: ExtensionCase) -> None:
    """A single sample."""
    _compare(case, problem_of(case, samples=1))


@of_extension()
def value_of_no_samples(case: ExtensionCase) -> None:
    """A batch of none, as Poisson sampling draws them: a value that is finite, or a refusal."""
    try:
        _, values = problem_of(case, reduction="sum", samples=0).run([case.extension_factory()])
    except UnsupportedError:
        return
    for name, value in values[case.extension_factory().savefield].items():
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in iter_tensors(value))
        require(finite, f"{case.label()} of {name!r}: not all values are finite.")


@of_extension()
def value_in_chunks(case: ExtensionCase) -> None:
    """``columns_add`` is declared: columns go through the net one by one, as with little memory."""
    extension = case.extension_factory()
    extension.chunk_size = 1
    _compare(case, problem_of(case), extension)


class _Scaled(Module):
    def __init__(self, loss: Module, factor: float) -> None:
        super().__init__()
        self.loss, self.factor, self.reduction = loss, factor, loss.reduction

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.loss(x) * self.factor
        return value


@of_extension()
def value_loss_scaled(case: ExtensionCase) -> None:
    """``0.25 * loss``: everything scales as the loss does."""
    given = problem_of(case)
    whole = given.reference
    reference = Reference(whole.net, whole.arguments, _Scaled(whole.loss, 0.25))
    _compare(case, given, reference=reference, scale=0.25)


@of_extension()
def value_residual(case: ExtensionCase) -> None:
    """A functional sum between modules; an extension of chains may refuse."""
    _value_or_refusal(case, problem_of(case, residual=True), "structure")


@of_extension()
def value_shared_positions(case: ExtensionCase) -> None:
    """An input ``[N, S, F]``."""
    _compare(case, problem_of(case, shape=(2, FEATURES)))


@of_extension()
def value_single_number(case: ExtensionCase) -> None:
    """A parameter that has no axes."""
    _compare(case, problem_of(case, single=True))


@of_extension()
def value_overwritten(case: ExtensionCase) -> None:
    """Two passes through one graph, and one of another loss: nothing is kept from before."""
    given, extension = problem_of(case), case.extension_factory()
    net, arguments, loss = given.extended()
    value = forward_loss(net, arguments, loss)
    for keep in (True, False):
        with backpack(extension, retain_graph=keep):
            value.backward(retain_graph=keep)
    stored = values_of(net, [extension])[extension.savefield]
    compare_values(case, net, stored, given.reference)
    _compare(case, problem_of(case, reduction="sum"), extension)


@of_extension()
def value_frozen(case: ExtensionCase) -> None:
    """The first layer is frozen."""

    def freeze(net: Module) -> None:
        net.get_submodule("mix").requires_grad_(False)

    _compare(case, problem_of(case), prepare=freeze)


@of_extension()
def value_called_twice(case: ExtensionCase) -> None:
    """A module that is called on its own output: the net is not linear in its parameters."""
    _value_or_refusal(case, problem_of(case, twice=True), "structure", "second derivative")


def _value_or_refusal(case: ExtensionCase, given: Problem, *may: str) -> None:
    """Compare; extensions with certain needs, or without an oracle, may raise UnsupportedError."""
    quantity = quantity_for(case)
    try:
        _compare(case, given)
    except UnsupportedError:
        if quantity is not None and quantity.needs not in may:
            raise


@of_extension()
def value_float32(case: ExtensionCase) -> None:
    """Single precision, against the reference in double precision."""
    _compare(case, problem_of(case), dtype=torch.float32, tolerance=case.tolerances.float32)


@of_extension("subsampling")
def value_subsampling(case: ExtensionCase) -> None:
    """Samples 2 and 0, in this order."""
    given = problem_of(case)
    extension = case.extension_factory(subsampling=[2, 0])
    require(extension.subsampling == (2, 0), "subsampling is not what was asked for.")
    _compare(case, given, extension, given.reference.restricted((2, 0)))


@of_extension()
def beside_others(case: ExtensionCase) -> None:
    """All installed extensions in one pass."""
    given, extension = problem_of(case), case.extension_factory()
    others = [e for e in installed_extensions() if e.savefield != extension.savefield]

    def judge(refusing: Extension, error: Exception) -> None:
        if refusing is extension or not isinstance(error, UnsupportedError):
            raise error

    _, values = given.run_usable([*others, extension], judge)
    compare_values(case, given.reference.net, values[extension.savefield], given.reference)


@of_extension("savefield")
def savefield(case: ExtensionCase) -> None:
    """Under another name."""
    extension = case.extension_factory(savefield="another_name")
    _compare(case, problem_of(case), extension)


@of_extension()
def leaves_gradient_alone(case: ExtensionCase) -> None:
    """``.grad`` is the same with and without; parameters get the stored values and nothing else."""
    given, extension = problem_of(case), case.extension_factory()
    net, _ = given.run([extension])
    plain, arguments, loss = given.build(torch.float64)
    forward_loss(plain, arguments, loss).backward()
    for (name, with_it), without in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert with_it.grad is not None
        assert without.grad is not None
        close(with_it.grad, without.grad, f".grad of {name!r}", case.tolerances.float64)
        added = sorted(set(vars(with_it)) - {extension.savefield})
        require(not added, f"{added} on {name!r}: only the engine writes to parameters.")


@of_extension()
def pickle_extension(case: ExtensionCase) -> None:
    """The copy is an extension of the same kind that gives the same value."""
    extension = case.extension_factory()
    restored = pickle.loads(pickle.dumps(extension))
    require(type(restored) is type(extension), "The restored extension has another type.")
    require(restored.propagator == extension.propagator, "The propagators differ: make it a value.")
    _compare(case, problem_of(case), restored)


@of_extension()
def extension_no_live_calls(case: ExtensionCase) -> None:
    """After a backward pass, by reference count alone."""
    given: Problem = problem_of(case)
    with no_calls_left("After a backward pass"):
        net, values = given.run([case.extension_factory()])
        del values
        forget(net)
        del net
