"""What is run in the kit's nets: all installed extensions around a layer, or one extension."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.testing import network
from backpack_core.testing.cases import SAMPLES, Arguments, ExtensionCase, RuleCase
from backpack_core.testing.compare import close
from backpack_core.testing.execution import draw, shared_execution
from backpack_core.testing.extensions_run import ALL_NEEDS, Judge, Problem, installed_extensions
from backpack_core.testing.quantities import Quantity, quantity_of
from backpack_core.testing.reference import Reference
from backpack_core.testing.traits import traits
from backpack_products.derivatives import second_order
from backpack_products.parametric import AffineRule

# Needs without an oracle where autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})


@dataclass(eq=False)
class Nets:
    """The nets of a case, and the extensions that are run on them.

    Attributes:
        case: The layer or extension.
        problem: Makes the net, with options; each is made once.
        fresh: The extensions that have a value on the plain net. Takes arguments of extensions.
        needs: The needs that have an oracle.
        prefix: Of the names of the parameters that the case is about.
    """

    case: Any
    problem: Callable[..., Problem]
    fresh: Callable[..., list[Extension]]
    needs: Sequence[str] = ALL_NEEDS
    prefix: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether one extension is checked, not a layer."""
        return isinstance(self.case, ExtensionCase)

    def known(self, extension: Extension) -> Quantity | None:
        """What an extension has to compute."""
        return self.problem().quantity or quantity_of(extension)

    def close(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Compare in double precision."""
        close(found, expected, f"{self.case.label()}, {what}", self.case.tolerances.float64)

    def few(self, needs: Sequence[str] | None = None) -> list[Extension]:
        """One for each pair of propagator and needs, of those with certain needs."""
        found: dict[Any, Extension] = {}
        for extension in self.fresh():
            known = self.known(extension)
            if needs is None or (known and known.needs in needs):
                found.setdefault((extension.propagator, known and known.needs), extension)
        return list(found.values())

    def judge(
        self,
        extensions: Sequence[Extension] | None = None,
        net: dict[str, Any] | None = None,
        allowed: float = 0.0,
        refusals: Judge | None = None,
        **ways: Any,
    ) -> None:
        """Run extensions, and compare, as far as there is an oracle.

        Args:
            extensions: What to compute; default: all that have a value.
            net: Options of the net.
            allowed: Relative error; default: that of double precision.
            refusals: Whether extensions may refuse; default: none may.
            ways: Options of ``Problem.judge`` and ``Problem.run``.
        """
        ways.setdefault("needs", self.needs)
        allowed = allowed or self.case.tolerances.float64
        extensions = self.fresh() if extensions is None else extensions
        self.problem(**net or {}).judge(extensions, allowed, refusals, **ways)


@lru_cache(maxsize=8)
def _around(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A layer between two others; ``twice`` has a second branch."""
    run = shared_execution(case)
    template, arguments = network.build_net(case, samples, twice, run.batch_axis)

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
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
    return Problem(build, Reference(*build(torch.float64)), frozenset(may))


@lru_cache(maxsize=8)
def _usable(case: RuleCase) -> list[Extension]:
    return _around(case).usable(installed_extensions())


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
        self.shrink = network.Shrink(() if single else shape) if shrink else None
        self.squash, self.residual = network.Squash(), residual
        self.again = network.Mix(shape[-1]) if twice else None

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *shape] → [N, *shape]``."""
        hidden: Tensor = self.squash(x if self.shrink is None else self.shrink(x))
        hidden = hidden + x if self.residual else hidden
        return hidden if self.again is None else self.again(self.again(hidden))


@lru_cache(maxsize=16)
def _alone(
    case: ExtensionCase,
    reduction: str = "mean",
    samples: int = SAMPLES,
    shape: tuple[int, ...] = (2,),
    residual: bool = False,
    twice: bool = False,
    single: bool = False,
    shrink: bool | None = None,
) -> Problem:
    """A net for one extension; ``shrink`` has a layer that is not affine."""
    quantity = case.quantity or quantity_of(case.extension_factory())
    use = _takes_any_layer(case, quantity) if shrink is None else shrink
    layer = RuleCase(
        lambda: Block(shape, use, residual, twice, single), lambda n: draw((n, *shape), 1)
    )

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        loss: Module = network.SoftmaxLoss(reduction)
        outputs = network.CLASSES
        if case.loss is not None:
            of = case.loss.as_rule_case(reduction)
            given = of.arguments(samples, dtype)
            loss = network.BoundLoss(of.module(dtype), given)
            outputs = given.args[0].shape[1:].numel()
        net, arguments = network.build_net(layer, samples, outputs=outputs)
        return net.to(dtype), arguments.to(dtype), loss

    may = {"structure"} if residual else {"structure", "second derivative"} if twice else ()
    return Problem(build, Reference(*build(torch.float64)), frozenset(may), quantity, whole=True)


def _takes_any_layer(case: ExtensionCase, quantity: Quantity | None) -> bool:
    """Whether an extension does without affine layers."""
    if quantity is not None:
        return quantity.needs != "structure"
    try:
        _alone(case, shrink=True).run([case.extension_factory()])
    except UnsupportedError:
        return False
    return True


def nets_of(case: Any) -> Nets:
    """The nets of a layer or an extension."""
    if isinstance(case, RuleCase):
        needs = [n for n in ALL_NEEDS if case.twice_differentiable or n not in TWICE]
        return Nets(case, partial(_around, case), partial(_usable, case), needs, "layer.")
    return Nets(case, partial(_alone, case), lambda **given: [case.extension_factory(**given)])
