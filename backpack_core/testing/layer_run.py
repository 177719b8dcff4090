"""One run of a layer: the view that its rule gets, the graph of the oracle, and the case's traits.

The call is recorded as in use: the layer is extended and run, and the call is read from the graph.
The oracle has its own graph, from the same layer without recording.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule
from backpack_core.extending import extend
from backpack_core.record.call import edge_of, site_at
from backpack_core.record.nested import in_order, iter_tensors
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import Arguments, Case, ExtensionCase, RuleCase, installed
from backpack_core.testing.compare import CheckFailure, require
from backpack_products import derivatives

COLUMNS = 2
# Functions of a run that tell whether it has further traits; those of a library, by its classes.
more_traits: list[Callable[[LayerRun], Mapping[str, bool]]] = []


@dataclass(eq=False)
class LayerRun:
    """One forward pass of a case's layer.

    Attributes:
        case: The case.
        rule: The rule under test.
        view: The view that the rule gets.
        live: The inputs that are differentiated, by position.
        output: The output that is differentiated, with the oracle's graph, and samples on axis 0.
    """

    case: RuleCase
    rule: LayerRule
    view: View
    live: dict[int, Tensor]
    output: Tensor

    @property
    def module(self) -> Module:
        """The layer."""
        return self.view.call.module

    def call(self, method: str, *arguments: Any, view: View | None = None) -> Any:
        """A method of the rule, or a function that follows from it, without gradients."""
        implied = getattr(derivatives, method, None)
        with torch.no_grad():
            if implied is not None:
                return implied(self.rule, view or self.view, *arguments)
            return getattr(self.rule, method)(view or self.view, *arguments)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters that the rule covers, if they exist in this configuration."""
        names = self.rule.parameter_names(self.module)
        existing = dict(self.module.named_parameters(remove_duplicate=False))
        found = {name: existing[name] for name in names if name in existing}
        return {name: theta for name, theta in found.items() if theta.requires_grad}

    @cached_property
    def jacobians(self) -> dict[int | str, Tensor]:
        """Dense Jacobians ``[*out, *target]`` by input position and by parameter name."""
        return oracle.jacobians(self.output, {**self.live, **self.parameters})

    def columns(self, number: int = COLUMNS, seed: int = 3) -> Tensor:
        """Random columns at the output. Shape ``[V, N, *out]``."""
        return oracle.draw((number, *self.output.shape), seed, self.output.dtype)

    def input_columns(self, number: int = COLUMNS) -> Tensor:
        """Random columns at the first input. Shape ``[V, N, *in]``."""
        return oracle.draw((number, *self.view.input_shape), 4, self.output.dtype)


def run_layer(
    case: RuleCase,
    inputs: Arguments | None = None,
    strided: bool = False,
    dtype: torch.dtype = torch.float64,
    module: Module | None = None,
) -> LayerRun:
    """Run a case's layer; its rule must be installed.

    Args:
        case: The case.
        inputs: Inputs to use instead of the case's own.
        strided: Whether each input is every other entry of a larger tensor.
        dtype: The dtype of parameters and inputs.
        module: A module of an earlier run, to be called again.
    """
    inputs, module = inputs or case.arguments(dtype=dtype), module or extended(case, dtype)
    if strided:
        inputs = inputs.map(lambda t: torch.stack([t, t], -1)[..., 0])
    with disable():
        live, output = _forward(case, module, inputs)
    edge = edge_of(_forward(case, module, inputs)[1])
    require(edge is not None, "The output requires no gradient: there is nothing to check.")
    site = None if edge is None else site_at(edge)
    if site is None:
        raise CheckFailure("The layer's forward pass was not recorded on its output.")
    axis = site.call.rule.batch_axis(View(site.call, site.index), site.index)
    with torch.no_grad():
        view = View(site.call, site.index, axis=axis)
    output = output.movedim(axis, 0) if axis else output
    return LayerRun(case, case.resolve(module), view, live, output)


def extended(case: RuleCase, dtype: torch.dtype = torch.float64) -> Module:
    """The case's layer, with a parameter for each name, as a rule has a product for each."""
    module = case.module(dtype)
    named = dict(module.named_parameters(remove_duplicate=False))
    if len({*named.values()}) < len(named):
        module.load_state_dict({n: p.clone() for n, p in named.items()}, False, assign=True)
    return extend(module)


def _forward(case: RuleCase, module: Module, inputs: Arguments) -> tuple[dict[int, Tensor], Tensor]:
    """The inputs as leaves, and the output that is differentiated, with a fixed seed."""
    live: dict[int, Tensor] = {}

    def passed(slot: int, tensor: Tensor) -> Tensor:
        if not case.is_live(slot, tensor):
            return tensor
        live[slot] = leaf = tensor.detach().requires_grad_()
        copy = leaf.clone()  # autograd forbids in-place changes of leaves, and of views of them
        return copy if copy.stride() == leaf.stride() else torch.stack([leaf, leaf], -1)[..., 0]

    # A call has its keyword arguments in the order in which ``forward`` declares them.
    declared = Arguments(inputs.args, in_order(module, dict(inputs.kwargs))).map_numbered(passed)
    outputs = list(iter_tensors(declared.call(module)))
    return live, outputs[case.output_nr]


@lru_cache(maxsize=8)
def shared_run_of(case: RuleCase) -> LayerRun:
    """The run of a case on its own inputs."""
    return run_layer(case)


@cache
def traits(case: Case) -> frozenset[str]:
    """The properties of a case that checks may need. They are declared, never guessed."""
    if isinstance(case, RuleCase):
        with installed(case):
            return frozenset(_of_run(shared_run_of(case)))
    if isinstance(case, ExtensionCase):
        arguments = inspect.signature(case.extension_factory).parameters
        return frozenset({"subsampling", "savefield"} & set(arguments))
    return frozenset()


def _of_run(run: LayerRun) -> set[str]:
    """Each trait, or that it is missing, as in ``"not twice"``."""
    separate = not run.rule.mixes_samples(run.view)
    has_trait = {
        "separate": separate,
        "twice": run.case.twice_differentiable,
        "kept": not run.case.overwrites_input,
        "input": not run.rule.transparent and 0 in run.live,
        "parameters": bool(run.parameters),
        "several parameters": len(run.parameters) > 1,
        "half precision": _runs_in_half(run.case),
        "batch first": separate and run.view.axis == 0,
    }
    has_trait.update(pair for more in more_traits for pair in more(run).items())
    return {name if has else f"not {name}" for name, has in has_trait.items()}


def _runs_in_half(case: RuleCase) -> bool:
    """Whether torch can run the layer in half precision, for which it lacks some operations."""
    try:
        with disable(), torch.no_grad():
            case.arguments(dtype=torch.bfloat16).call(case.module(torch.bfloat16))
    except RuntimeError:
        return False
    return True
