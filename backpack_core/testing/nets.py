"""What is run in the kit's nets: all installed extensions around a layer, or one extension."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.testing.cases import SAMPLES, Arguments, ExtensionCase, RuleCase
from backpack_core.testing.compare import close
from backpack_core.testing.execution import draw, shared_execution
from backpack_core.testing.extensions_run import ALL_NEEDS, Judge, Problem, installed_extensions
from backpack_core.testing.network import (
    CLASSES,
    BoundLoss,
    Mix,
    Shrink,
    SoftmaxLoss,
    Squash,
    build_net,
)
from backpack_core.testing.quantities import Quantity, quantity_of
from backpack_core.testing.reference import Reference
from backpack_core.testing.traits import traits
from backpack_products.parametric import AffineRule

# Needs without an oracle where autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})


@dataclass(eq=False)
class Nets:
    """The nets of a case, and the extensions that are run on them.

    Attributes:
        case: The layer or extension.
    """

    case: Any
    quantity: Quantity | None = None

    @cached_property
    def problem(self) -> Problem:
        """The plain net, with a mean loss."""
        return self.problem_with()

    def problem_with(self, **options: Any) -> Problem:
        """The net with options, made once."""
        raise NotImplementedError

    @property
    def needs(self) -> Sequence[str]:
        """The needs that have an oracle."""
        return ALL_NEEDS

    @property
    def names(self) -> list[str]:
        """The parameters that the case is about."""
        return list(self.problem.reference.parameters)

    @cached_property
    def every(self) -> list[Extension]:
        """The extensions that have a value on the plain net."""
        raise NotImplementedError

    def known(self, extension: Extension) -> Quantity | None:
        """What an extension has to compute."""
        return self.quantity or quantity_of(extension.savefield)

    def close(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Compare in double precision."""
        close(found, expected, f"{self.case.label()}, {what}", self.case.tolerances.float64)

    def few(self, needs: Sequence[str] | None = None) -> list[Extension]:
        """One for each pair of propagator and needs, of those with certain needs."""
        found: dict[Any, Extension] = {}
        for extension in self.every:
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
            net: Options of :meth:`problem_with`.
            allowed: Relative error; default: that of double precision.
            refusals: Whether extensions may refuse; default: none may.
            ways: Options of ``Problem.run`` and ``Problem.compare``.
        """
        given = self.problem_with(**net or {})
        ways.setdefault("needs", self.needs)
        allowed = allowed or self.case.tolerances.float64
        given.judge(self.every if extensions is None else extensions, allowed, refusals, **ways)


class RuleNets(Nets):
    """A layer between two others, and every installed extension."""

    case: RuleCase

    def problem_with(self, **options: Any) -> Problem:
        """Options: reduction, samples, and ``twice``, which has a second branch."""
        return _around(self.case, **options)

    @property
    def needs(self) -> Sequence[str]:
        """Torch may not differentiate a layer twice."""
        return [n for n in ALL_NEEDS if self.case.twice_differentiable or n not in TWICE]

    @property
    def names(self) -> list[str]:
        """Those of the layer."""
        return [f"layer.{name}" for name in shared_execution(self.case).parameters]

    @cached_property
    def every(self) -> list[Extension]:
        """All others raised for a stated need."""
        return self.problem.usable(installed_extensions())


@lru_cache(maxsize=8)
def _around(
    case: RuleCase, reduction: str = "mean", samples: int = SAMPLES, twice: bool = False
) -> Problem:
    """A case's small net, with its reference."""
    run = shared_execution(case)
    template, arguments = build_net(case, samples, twice, run.batch_axis)

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        return copy.deepcopy(template).to(dtype), arguments.to(dtype), SoftmaxLoss(reduction)

    linear = set(run.parameters) <= set(getattr(run.rule, "linear_in_params", ()))
    known = "second derivative" in traits(case) and (run.rule.hessian_is_zero or not any(run.live))
    may = set() if case.twice_differentiable else set(TWICE)
    if not linear or (run.live and not known) or case.overwrites_input:
        may.add("second derivative")
    # Some quantities do not exist over branches, or for a parameter with two uses.
    if twice or not isinstance(run.rule, AffineRule):
        may.add("structure")
    return Problem(build, Reference(*build(torch.float64)), frozenset(may))


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


class ExtensionNets(Nets):
    """One extension, on a net that it can do."""

    case: ExtensionCase

    def problem_with(self, **options: Any) -> Problem:
        """Options: reduction, samples, shape, shrink, residual, twice, single."""
        key = tuple(sorted(options.items()))
        if key not in self._known:
            self._known[key] = self._problem(**options)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, Problem]:
        return {}

    def _problem(
        self,
        reduction: str = "mean",
        samples: int = SAMPLES,
        shape: tuple[int, ...] = (2,),
        residual: bool = False,
        twice: bool = False,
        single: bool = False,
        shrink: bool | None = None,
    ) -> Problem:
        use = self._takes_any_layer if shrink is None else shrink
        layer = RuleCase(
            lambda: Block(shape, use, residual, twice, single), lambda n: draw((n, *shape), 1)
        )

        def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
            loss, outputs = self._loss(reduction, samples, dtype)
            net, given = build_net(layer, samples, outputs=outputs)
            return net.to(dtype), given.to(dtype), loss

        may = {"structure"} if residual else {"structure", "second derivative"} if twice else ()
        reference = Reference(*build(torch.float64))
        return Problem(build, reference, frozenset(may), self.quantity, whole=True)

    def _loss(self, reduction: str, samples: int, dtype: torch.dtype) -> tuple[Module, int]:
        """The loss of the prediction, and how many numbers of a sample it takes."""
        if self.case.loss is None:
            return SoftmaxLoss(reduction), CLASSES
        layer = self.case.loss.as_rule_case(reduction)
        given = layer.arguments(samples, dtype)
        return BoundLoss(layer.module(dtype), given), given.args[0].shape[1:].numel()

    @cached_property
    def _takes_any_layer(self) -> bool:
        """Whether the extension does without affine layers."""
        if self.quantity is not None:
            return self.quantity.needs != "structure"
        try:
            self.problem_with(shrink=True).run(self.fresh())
        except UnsupportedError:
            return False
        return True

    @property
    def one(self) -> Extension:
        """A new instance."""
        return self.fresh()[0]

    def fresh(self, **arguments: Any) -> list[Extension]:
        """A new instance."""
        return [self.case.extension_factory(**arguments)]

    @property
    def every(self) -> list[Extension]:
        """A new instance each time."""
        return self.fresh()


@lru_cache(maxsize=8)
def nets_of(case: RuleCase | ExtensionCase) -> Any:
    """The nets of a case."""
    if isinstance(case, RuleCase):
        return RuleNets(case)
    known = case.quantity or quantity_of(case.extension_factory().savefield)
    return ExtensionNets(case, known)
