"""What is refused in the middle of a pass: calls and uses that no walk from the loss met."""

from __future__ import annotations

from collections.abc import Set

from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.graph import Survey
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call


def refuse_unmet(call: Call, extension: Extension) -> None:
    """Raise an error because autograd reached a call that the survey does not contain.

    Args:
        call: The call; a freed one is ignored.
        extension: An extension that was asked for, for the message.

    Raises:
        UnsupportedError: A parameter was computed with the output of this call.
    """
    if call.is_released:
        return
    raise UnsupportedError(
        f"{registry.describe(extension)} is read at the weights that calls used, and some of them "
        f"were computed with the output of {call.path}, which backward() therefore reaches: by a "
        "gradient that was made with create_graph=True (the inner step of MAML, and "
        "torch.func.functional_call with its result), or by another model that makes weights. "
        "It is not known which sample owns what there. Cut the graph: call "
        "torch.autograd.grad(...) without create_graph=True, or give functional_call "
        "weight.detach().requires_grad_(); the quantities are stored on the weights that it "
        "gets."
    )


def refuse_late_uses(survey: Survey, stored: Set[int]) -> None:
    """Raise an error if a parameter with a stored result turns out to have a further use.

    Args:
        survey: What is known about the graph.
        stored: The parameters with results of this pass, by ``id``.

    Raises:
        UnsupportedError: A later branch uses such a parameter.
    """
    counts = [(key, use.count) for key, use in survey.uses.items() if key in stored and use.count]
    if any(count > 1 or key in survey.bare for key, count in counts):
        raise UnsupportedError(
            "A second forward pass, or a second branch, shares parameters with the first and "
            "meets it only behind the losses, and the first was finished before this one was "
            "seen. Call backward() inside the block on one tensor that both lead to, or on "
            "each loss separately."
        )
