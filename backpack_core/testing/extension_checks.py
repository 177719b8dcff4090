"""Checks of an extension against the oracle that its author states, on the kit's own nets."""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.plugins.declarations import refuse
from backpack_core.testing.cases import SAMPLES, Arguments, ExtensionCase, RuleCase
from backpack_core.testing.compare import close, finite, require
from backpack_core.testing.execution import draw
from backpack_core.testing.extensions_run import (
    COARSE,
    Problem,
    Values,
    forget,
    forward_loss,
    installed_extensions,
    no_calls_left,
)
from backpack_core.testing.network import (
    CLASSES,
    BoundLoss,
    Mix,
    ScaledLoss,
    Shrink,
    SoftmaxLoss,
    Squash,
    build_net,
)
from backpack_core.testing.quantities import Quantity, quantity_of
from backpack_core.testing.reference import Reference

FEATURES = 2


class Block(Module):
    """``Squash`` after ``Shrink``, with branches as asked for.

    Attributes:
        residual: Add the input, by a functional sum.
        twice: Call a ``Mix`` on the output, and on its own.
    """

    def __init__(
        self, shape: tuple[int, ...], shrink: bool, residual: bool, twice: bool, single: bool
    ) -> None:
        super().__init__()
        self.shrink = Shrink(() if single else shape) if shrink else None
        self.squash, self.residual = Squash(), residual
        self.again = Mix(shape[-1]) if twice else None

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *shape] → [N, *shape]``."""
        hidden: Tensor = self.squash(x if self.shrink is None else self.shrink(x))
        hidden = hidden + x if self.residual else hidden
        return hidden if self.again is None else self.again(self.again(hidden))


def quantity_for(case: ExtensionCase) -> Quantity | None:
    """The oracle that the author states, or the row of the table."""
    return case.quantity or quantity_of(case.extension_factory().savefield)


@lru_cache(maxsize=16)
def problem_of(
    case: ExtensionCase,
    reduction: str = "mean",
    samples: int = SAMPLES,
    shape: tuple[int, ...] = (FEATURES,),
    shrink: bool | None = None,
    residual: bool = False,
    twice: bool = False,
    single: bool = False,
) -> Problem:
    """The kit's net for an extension; ``shrink`` has a layer that is not affine."""
    use = _takes_any_layer(case) if shrink is None else shrink
    layer = RuleCase(
        lambda: Block(shape, use, residual, twice, single), lambda n: draw((n, *shape), 1)
    )

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        loss, outputs = _loss(case, reduction, samples, dtype)
        net, given = build_net(layer, samples, outputs=outputs)
        return net.to(dtype), given.to(dtype), loss

    return Problem(build, Reference(*build(torch.float64)))


def _takes_any_layer(case: ExtensionCase) -> bool:
    """Whether the extension does without affine layers."""
    quantity = quantity_for(case)
    if quantity is not None:
        return quantity.needs != "structure"
    try:
        problem_of(case, shrink=True).run([case.extension_factory()])
    except UnsupportedError:
        return False
    return True


def _loss(
    case: ExtensionCase, reduction: str, samples: int, dtype: torch.dtype
) -> tuple[Module, int]:
    """The loss as a function of the prediction, and how many numbers of a sample it takes."""
    if case.loss is None:
        return SoftmaxLoss(reduction), CLASSES
    layer = case.loss.as_rule_case(reduction)
    given = layer.arguments(samples, dtype)
    return BoundLoss(layer.module(dtype), given), given.args[0].shape[1:].numel()


def value(
    case: ExtensionCase,
    extension: Extension | None = None,
    allowed: float | None = None,
    reference: Reference | None = None,
    may: tuple[str, ...] = (),
    net: dict[str, Any] | None = None,
    **run: Any,
) -> None:
    """Run the extension on a net; each value against the oracle, or finite without one.

    Args:
        case: The extension.
        extension: The instance to run.
        allowed: Relative error that is allowed.
        reference: The oracle, if not that of the net.
        may: Extensions with these needs, or without an oracle, may raise ``UnsupportedError``.
        net: Options of :func:`problem_of`.
        run: Options of ``Problem.run``.
    """
    given, quantity = problem_of(case, **net or {}), quantity_for(case)
    ways: dict[str, Any] = {"quantity": quantity, "whole": True, "reference": reference}
    instance = extension or case.extension_factory()
    try:
        given.judge([instance], allowed or case.tolerances.float64, run, **ways)
    except UnsupportedError:
        if not may or (quantity is not None and quantity.needs not in may):
            raise


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


# How a net or a pass differs from the plain one.
SETTINGS: dict[str, dict[str, Any]] = {
    "value_sum": {"net": {"reduction": "sum"}},
    "value_batch_of_one": {"net": {"samples": 1}},
    "value_shared_positions": {"net": {"shape": (2, FEATURES)}},  # an input [N, S, F]
    "value_single_number": {"net": {"single": True}},  # a parameter that has no axes
    # A functional sum between modules; an extension of chains may refuse.
    "value_residual": {"net": {"residual": True}, "may": ("structure",)},
    # A module on its own output: the net is not linear in its parameters.
    "value_called_twice": {"net": {"twice": True}, "may": ("structure", "second derivative")},
    "value_frozen": {"frozen": lambda name: name.startswith("mixes.")},
}


def value_partly_frozen(case: ExtensionCase) -> None:
    """Biases are frozen, and then all the rest."""
    value(case, frozen=_is_bias)
    value(case, frozen=lambda name: not _is_bias(name))


def value_loss_scaled(case: ExtensionCase) -> None:
    """``0.25 * loss``: everything scales as the loss does."""
    whole = problem_of(case).reference
    scaled = Reference(whole.net, whole.arguments, ScaledLoss(whole.loss, 0.25))
    value(case, reference=scaled, scale=0.25)


def value_float32(case: ExtensionCase) -> None:
    """Single precision, against the reference in double precision."""
    value(case, dtype=torch.float32, allowed=case.tolerances.float32)


def value_bfloat16(case: ExtensionCase) -> None:
    """Half precision, against the reference; values that it cannot resolve must be finite."""
    given, quantity = problem_of(case), quantity_for(case)
    needs = () if quantity is None or quantity.cancels else COARSE
    ways: dict[str, Any] = {"quantity": quantity, "needs": needs, "whole": True, "coarse": True}
    options = {"dtype": torch.bfloat16}
    given.judge([case.extension_factory()], case.tolerances.bfloat16, options, **ways)


def value_of_no_samples(case: ExtensionCase) -> None:
    """A batch of none, as Poisson sampling draws them: a value that is finite, or a refusal."""
    extension = case.extension_factory()
    try:
        _, values = problem_of(case, reduction="sum", samples=0).run([extension])
    except UnsupportedError:
        return
    finite(values[extension.savefield], case.label())


def value_in_chunks(case: ExtensionCase) -> None:
    """``columns_add`` is declared: columns go through the net one by one, as with little memory."""
    extension = case.extension_factory()
    extension.chunk_size = 1
    value(case, extension)


def value_overwritten(case: ExtensionCase) -> None:
    """Two passes through one graph, and one of another loss: nothing is kept from before."""
    extension = case.extension_factory()
    value(case, extension, retains=(True, False))
    value(case, extension, net={"reduction": "sum"})


def value_subsampling(case: ExtensionCase) -> None:
    """Samples 2 and 0, in this order."""
    extension = case.extension_factory(subsampling=[2, 0])
    require(extension.subsampling == (2, 0), "subsampling is not what was asked for.")
    value(case, extension, reference=problem_of(case).reference.restricted((2, 0)))


def savefield(case: ExtensionCase) -> None:
    """Under another name."""
    value(case, case.extension_factory(savefield="another_name"))


def pickle_extension(case: ExtensionCase) -> None:
    """The copy is an extension of the same kind that gives the same value."""
    extension = case.extension_factory()
    restored = pickle.loads(pickle.dumps(extension))
    require(type(restored) is type(extension), "The restored extension has another type.")
    require(restored.propagator == extension.propagator, "The propagators differ: make it a value.")
    value(case, restored)


def beside_others(case: ExtensionCase) -> None:
    """All installed extensions in one pass."""
    given, extension = problem_of(case), case.extension_factory()
    others = [e for e in installed_extensions() if e.savefield != extension.savefield]

    def judge(refusing: Extension, error: Exception) -> None:
        if refusing is extension or not isinstance(error, UnsupportedError):
            raise error

    _, values = given.run_usable([*others, extension], judge)
    compare(case, given, values, extension)


def compare(case: ExtensionCase, given: Problem, values: Values, extension: Extension) -> None:
    """The values of one extension against the oracle, or finite without one."""
    ways: dict[str, Any] = {"quantity": quantity_for(case), "whole": True}
    given.compare(values, [extension], case.tolerances.float64, **ways)


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


def extension_no_live_calls(case: ExtensionCase) -> None:
    """After a backward pass, by reference count alone."""
    given = problem_of(case)
    with no_calls_left("After a backward pass"):
        net, values = given.run([case.extension_factory()])
        del values
        forget(net)
        del net


def declarations(case: ExtensionCase) -> None:
    """Every class attribute that extension and propagator set is one that their bases know."""
    extension = case.extension_factory()
    refuse(type(extension))
    refuse(type(extension.propagator))
