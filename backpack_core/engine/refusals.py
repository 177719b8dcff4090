"""What a backward pass refuses, or warns of, before it computes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import ModuleHooks
from backpack_core.contract.extension import Extension
from backpack_core.errors import (
    NotExtendedError,
    UncoveredParameterWarning,
    UnsupportedError,
    warn_once,
)
from backpack_core.graph import nodes
from backpack_core.graph.above import nonlinear_above
from backpack_core.graph.survey import Survey
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Edge
from backpack_core.record.owner import name_of_parameter, owners_of
from backpack_core.record.view import View


def report_bare(survey: Survey, known: Iterable[int], extensions: Sequence[Extension]) -> None:
    """Warn of parameters that plain functions use, and no module that owns them.

    Args:
        survey: What is known about the graph.
        known: Those that were reported, by ``id``.
        extensions: What was asked for.

    Raises:
        UnsupportedError: An extension means nothing without one of them.
    """
    for key in survey.bare.keys() - {*known} - survey.uses.keys():
        parameter, node = survey.bare[key]
        operation = nodes.name_of(node)
        for extension in extensions:
            if extension.needs_every_parameter:
                raise UnsupportedError(
                    f"A parameter of shape {list(parameter.shape)} is used by the operation "
                    f"{operation!r} outside of any extended module that owns it, and "
                    f"{registry.describe(extension)} means nothing without it. Extend the module "
                    "that it belongs to, make it a parameter of the module whose forward() uses "
                    "it, or freeze it."
                )
        _warn_of_bare(parameter, operation, [call.module for call, _ in survey.sites])


def _warn_of_bare(parameter: Tensor, operation: str, modules: list[Module]) -> None:
    lost = _not_extended(parameter, modules)
    if lost:
        warn_once(
            (id(modules[0]), lost),
            f"{lost} is no extended part of its model, so its parameters get no quantity: it was "
            "put there, or wrapped, after extend(model), or unextended. Call extend(model) again.",
            UncoveredParameterWarning,
        )
        return
    name = name_of_parameter(modules, parameter)
    which = "A parameter" if name is None else f"The parameter {name}"
    warn_once(
        (id(parameter), name, tuple(parameter.shape), operation),
        f"{which} of shape {list(parameter.shape)} is used by the operation {operation!r} "
        "outside of any module that owns it: it gets no quantity. Make it a parameter of "
        "the module whose forward() uses it.",
        UncoveredParameterWarning,
    )


def _not_extended(parameter: Tensor, modules: list[Module]) -> str:
    """The module that owns a parameter inside an extended model and does not report itself."""
    for model in owners_of(modules):
        for path, part in model.named_modules():
            own = any(parameter is other for other in part._parameters.values())
            if own and not ModuleHooks.are_installed(part):
                return f"{type(part).__name__} {path!r}"
    return ""


def refuse_loss_alone(survey: Survey, extensions: Sequence[Extension]) -> None:
    """Raise where losses are all that is extended, and parameters are trained behind them.

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.

    Raises:
        NotExtendedError: There would be no quantity at all.
    """
    calls = [call for call, _ in survey.sites]
    if survey.bare and not survey.uses and all(call.rule.is_loss for call in calls):
        losses = ", ".join(dict.fromkeys(call.path for call in calls))
        names = ", ".join(type(extension).__name__ for extension in extensions)
        raise NotExtendedError(
            f"Only the loss ({losses}) is extended, and {len(survey.bare)} trained parameters "
            f"behind it belong to no extended module: {names} would compute nothing. Call "
            "model = extend(model) before the forward pass."
        )


def refuse_function_of_loss(survey: Survey, roots: Sequence[Edge]) -> None:
    """Raise where curvature would need that of a function of the extended losses.

    Args:
        survey: What is known about the graph.
        roots: What ``backward()`` is called on.

    Raises:
        UnsupportedError: Something nonlinear lies between.
    """
    node = nonlinear_above(survey, roots)
    if node is not None:
        raise UnsupportedError(
            f"The operation {nodes.described(node)!r} is applied to an extended loss before "
            "backward() is called, and is not known to be linear: curvature would need its second "
            "derivative. Call backward() on the loss itself, or on a weighted sum of losses."
        )


def changed_gradient(view: View, changed_by: Sequence[Any]) -> UnsupportedError:
    """The error where hooks change what curvature would be the curvature of.

    Args:
        view: Where.
        changed_by: Hooks on the tensor; none if they are on its node.
    """
    names = [getattr(hook, "__qualname__", repr(hook)) for hook in changed_by]
    where = f"that tensor ({', '.join(names)})" if names else "its autograd node"
    return UnsupportedError(
        f"The gradient of the output of {view.path} is changed by a hook on {where}, so "
        "curvature of the loss is not that of what backward() differentiates. Remove the hook, "
        "or leave second-order extensions out."
    )
