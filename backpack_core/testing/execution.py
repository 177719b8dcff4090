"""One execution of a layer: the call that a rule sees, and the graph that the oracle uses.

The call is recorded as in use: the layer is extended and run, and the call is read from the graph.
The oracle has a graph of its own, from the same layer without hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule
from backpack_core.extending import extend
from backpack_core.record.call import edge_of, site_at
from backpack_core.record.structure import in_order, iter_tensors
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import SAMPLES, Arguments, RuleCase
from backpack_core.testing.compare import CheckFailure, require
from backpack_products import derivatives

COLUMNS = 2

P = ParamSpec("P")
T = TypeVar("T")

_SHARED: list[Any] = []


@dataclass(eq=False)
class Execution:
    """The call and the tensors of one forward pass of a case.

    Attributes:
        case: The case.
        rule: The rule under test.
        view: What the rule sees.
        leaves: The inputs to differentiate with respect to, by position; ``None`` for constants.
        output: The output that is differentiated, with its graph.
    """

    case: RuleCase
    rule: LayerRule
    view: View
    leaves: tuple[Tensor | None, ...]
    output: Tensor

    @property
    def allowed(self) -> float:
        """The relative error that is allowed."""
        return self.case.tolerances.float64

    @property
    def module(self) -> Module:
        """The layer."""
        return self.view.call.module

    def call(self, method: str, *arguments: Any, view: View | None = None) -> Any:
        """A method of the rule, or what follows from it, without gradients."""
        implied = getattr(derivatives, method, None)
        with torch.no_grad():
            if implied is not None:
                return implied(self.rule, view or self.view, *arguments)
            return getattr(self.rule, method)(view or self.view, *arguments)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters that the rule covers, and that exist in this configuration."""
        names = self.rule.parameter_names(self.module)
        own = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: own[name] for name in names if name in own}

    @cached_property
    def jacobians(self) -> dict[int | str, Tensor]:
        """Dense Jacobians ``[*out, *target]`` by input position and by parameter name."""
        return oracle.jacobians(self.output, {**self.live, **self.parameters})

    @cached_property
    def live(self) -> dict[int, Tensor]:
        """The inputs that are differentiated, by position."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if leaf is not None}

    @property
    def batch_axis(self) -> int:
        """Which axis of the output holds the samples."""
        return self.rule.batch_axis(self.view, self.case.output_nr)

    def columns(self, seed: int = 3) -> Tensor:
        """Random columns at the output. Shape ``[V, N, *out]``."""
        return draw((COLUMNS, *self.output.shape), seed, self.output.dtype)

    def input_columns(self, seed: int = 4) -> Tensor:
        """Random columns at the first input. Shape ``[V, N, *in]``."""
        return draw((COLUMNS, *self.view.input_shape), seed, self.output.dtype)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers from a fixed seed."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def execute(
    case: RuleCase,
    arguments: Arguments | None = None,
    samples: int = SAMPLES,
    dtype: torch.dtype = torch.float64,
) -> Execution:
    """Run a case's layer. The case's rule has to be installed.

    Args:
        case: The case.
        arguments: What to pass instead of the case's own inputs.
        samples: Size of the batch.
        dtype: Of parameters and inputs.
    """
    given = arguments or case.arguments(samples, dtype)
    module = extend(case.module(dtype))
    with disable():
        leaves, outputs = _forward(case, module, given)
    view = recorded(_forward(case, module, given)[1][case.output_nr])
    return Execution(case, case.resolve(module), view, leaves, outputs[case.output_nr])


def recorded(output: Tensor) -> View:
    """What a rule sees of the call that returned a tensor."""
    edge = edge_of(output)
    require(edge is not None, "The output requires no gradient: there is nothing to check.")
    site = None if edge is None else site_at(edge)
    if site is None:
        raise CheckFailure("The layer's forward pass was not recorded on its output.")
    axis = site.call.rule.batch_axis(View(site.call, site.index), site.index)
    with torch.no_grad():
        return View(site.call, site.index, axis=axis)


def _forward(
    case: RuleCase, module: Module, given: Arguments
) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """The inputs as leaves, and the outputs, with a fixed seed."""
    leaves: list[Tensor | None] = []
    # A module may overwrite its input, which autograd forbids for a leaf.
    overwrites = any(getattr(part, "inplace", False) for part in module.modules())

    def passed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or len(leaves) in case.constants:
            leaves.append(None)
            return tensor
        leaf = tensor.detach().requires_grad_()
        leaves.append(leaf)
        return leaf.clone() if overwrites else leaf.view_as(leaf)

    # Keywords in the order of the call that a rule sees.
    declared = Arguments(given.args, in_order(module, dict(given.kwargs))).map(passed)
    result = declared.call(module)
    return tuple(leaves), list(iter_tensors(result))


def shared(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the last executions: several checks of a case read one, and none changes it."""
    kept = lru_cache(maxsize=8)(function)
    _SHARED.append(kept)
    return kept  # type: ignore[return-value] # the arguments are those of the function


def forget_executions() -> None:
    """Clear the cache, and so free the calls in it."""
    for kept in _SHARED:
        kept.cache_clear()


@shared
def shared_execution(case: RuleCase) -> Execution:
    """The execution of a case on its own inputs."""
    return execute(case)
