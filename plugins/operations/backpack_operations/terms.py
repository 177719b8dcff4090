"""Refuses terms beside extended losses, for quantities that start at extended losses."""

from __future__ import annotations

from collections.abc import Sequence

from backpack_core import errors
from backpack_core.contract.extension import Extension
from backpack_core.engine.location import nothing_arrived, place_between
from backpack_core.graph import described
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Edge
from backpack_core.record.view import View
from backpack_operations.paths import nonlinear_above, reached_past_losses
from backpack_operations.survey import GraphSurvey


def refuse_other_terms(
    survey: GraphSurvey, roots: Sequence[Edge], extensions: Sequence[Extension], is_inside: bool
) -> None:
    """Raise an error unless ``backward()`` is called on a weighted sum of extended losses only.

    Args:
        survey: What is known about the graph.
        roots: What ``backward()`` is called on.
        extensions: Extensions whose quantity starts at the extended losses.
        is_inside: Whether it was called in a hook of another pass.

    Raises:
        NotExtendedError: There is no extended loss.
        UnsupportedError: A term depends on the net other than by an extended loss, or a nonlinear
            operation is applied to one.
    """
    if not extensions:
        return
    node = nonlinear_above(survey, roots)
    if node is not None:
        raise errors.UnsupportedError(
            f"The operation {described(node)!r} is applied to an extended loss before "
            "backward() is called, and is not known to be linear: curvature would need its second "
            "derivative. Call backward() on the loss itself, or on a weighted sum of losses. The "
            "weights must be constants: write weight.detach() if they are trained."
        )
    site = reached_past_losses(survey, roots)
    if site is None:
        return
    if not any(call.rule.is_loss for call, _ in survey.sites):
        name = type(extensions[0]).__name__
        error = nothing_arrived(View(*next(iter(survey.sites))), name)
        if is_inside:
            error = errors.UnsupportedError(
                f"{name} does not go through a hook or a function's own backward() that calls "
                "autograd, as implicit layers, solvers and re-entrant checkpoints do. Write "
                "checkpoint(..., use_reentrant=False), and differentiate the steps of a solver "
                "(odeint, not odeint_adjoint); first-order extensions follow a hook."
            )
        place_between(error, survey, extensions[0])
        raise error
    raise errors.UnsupportedError(
        f"{registry.describe(extensions[0])} belongs to the extended losses, and what backward() "
        f"is called on depends on the output of {site.call.path} by a term beside them, which no "
        "loss rule knows. Extend the loss as a whole, or call backward() on the other term outside "
        "of the block."
    )


def refuse_unknown_normaliser(
    survey: GraphSurvey, roots: Sequence[Edge], extensions: Sequence[Extension]
) -> None:
    """Raise an error unless extended losses alone tell the divisor of what is differentiated.

    Args:
        survey: What is known about the graph.
        roots: What ``backward()`` is called on.
        extensions: Extensions that need to know the divisor.

    Raises:
        UsageError: It is not a weighted sum of extended losses.
    """
    if not extensions:
        return
    if not any(call.rule.is_loss for call, _ in survey.sites):
        why = "no extended loss took part"
    elif (node := nonlinear_above(survey, roots)) is not None:
        why = f"the operation {described(node)!r}, applied to one, is not known to be linear"
    elif (site := reached_past_losses(survey, roots)) is not None:
        why = f"a term beside extended losses depends on the output of {site.call.path}"
    else:
        return
    raise errors.UsageError(
        f"{registry.describe(extensions[0])} needs to know what the loss divides by, and {why}. "
        f"{extensions[0].unless_told}"
    )
