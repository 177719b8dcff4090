"""Which quantities have an exact value in a net with a trap, and which can only be refused.

Traps of a recipe, after what its steps and terms do:

- ``"mixing"``: samples influence each other behind a parameter. What belongs to one sample does not
  exist; derivatives of the whole loss do.
- ``"coupled"``: the loss has a functional term that couples samples.
- ``"weights"``: it has one that depends on parameters alone.
- ``"beside"``: it has one that is a sum over samples.
- ``"outer"``: it is a nonlinear function of the extended losses.
- ``"table"``: a module receives what was made of the data by others. Where few entries come out, it
  is taken for a table, and mixing behind it goes unnoticed (docs/checks.md).
- ``"hook"``: a hook changes the gradient behind a parameter. Curvature has no meaning then.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.nets.catalogue import KINDS
from tests.nets.losses import Losses
from tests.nets.net import DrawnNet
from tests.nets.recipe import Recipe, Settings
from tests.nets.terms import BESIDE

# Traits whose effect depends on what lies before and behind a step.
WATCHED = frozenset({"mixing", "hook"})
# What one sample sends to another, in parts of what it sends to itself, is noticed from here on.
NOTICED = 1e-8
# And in parts of the largest entry of all.
ROUNDING = 1e-13
# Steps whose samples cannot be computed alone.
NEED_BATCH = frozenset({"random", "mixing", "whole"})


def trained(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that want a gradient."""
    return [p for p in net.parameters() if p.requires_grad]


def traps(recipe: Recipe, net: DrawnNet, losses: Losses, loss: Tensor) -> frozenset[str]:
    """The traps of a recipe.

    Args:
        recipe: The recipe.
        net: Its net, which has just run and watched.
        losses: Its losses, which have just run.
        loss: What became of it.
    """
    # A term of the data alone is a constant.
    data = {name for name, source in recipe.sources.items() if not source.requires_grad}
    found = set()
    for step in recipe.steps:
        part = net.parts[step.part] if step.part in net.parts else nn.Identity()
        if data.issuperset(step.inputs) and not trained(part):
            data.update(step.outputs)
        elif data.intersection(step.inputs) - recipe.sources.keys():
            found.add("table")
    terms = [term for term in recipe.terms if term.value not in data]
    beside = [BESIDE[term.kind] for term in terms if term.kind in BESIDE]
    found |= {term.trap if recipe.batch > 1 else term.trap_of_one for term in beside} - {""}
    if any(term.kind == "functional" for term in recipe.terms):
        found.add("beside")
    if losses.is_nonlinear:
        found.add("outer")
    for step, before, after in net.watched:
        part = net.parts[step.part] if step.part in net.parts else nn.Identity()
        if _depends(loss, [after]) and (trained(part) or _depends(before, trained(net))):
            traits = WATCHED & KINDS[step.kind].traits
            found |= traits if "mixing" not in traits or _mixes(loss, before, after) else set()
    found -= {"mixing"} if recipe.batch == 1 else set()
    return frozenset(found if "mixing" in found else found - {"table"})


def _mixes(loss: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether the loss of a sample reaches another: of those that are ignored, nothing does."""
    (arrived,) = torch.autograd.grad(loss.sum(), [after], retain_graph=True)
    for sample in range(len(after) if len(after) > 1 else 0):
        own = torch.zeros_like(arrived)
        own[sample] = arrived[sample]
        (sent,) = torch.autograd.grad(after, [before], own, retain_graph=True)
        sizes = sent.abs()
        others = sizes[torch.arange(len(sent)) != sample].amax(0)
        if bool((others > NOTICED * sizes.amax(0) + ROUNDING * sizes.max()).any()):
            return True
    return False


def _depends(value: Tensor, on: list[Tensor] | list[nn.Parameter]) -> bool:
    wanted = [tensor for tensor in on if tensor.requires_grad]
    if not value.requires_grad or not wanted:
        return False
    found = torch.autograd.grad(value.sum(), wanted, retain_graph=True, allow_unused=True)
    # A branch that ``where`` never takes has no part in anything.
    return any(g is not None and bool(g.any()) for g in found)


def has_value(family: str, is_sum: bool, options: Settings, traps: frozenset[str]) -> bool:
    """Whether a quantity exists in spite of traps.

    Args:
        family: ``"first"``, ``"ggn"`` or ``"hessian"``.
        is_sum: Whether it is a derivative of the whole loss.
        options: Those of the request.
        traps: The traps of the recipe.
    """
    is_whole = is_sum and "subsampling" not in options
    if family == "first":
        return not traps & {"mixing", "coupled", "weights"}
    if family == "ggn":
        return not traps or (traps == {"mixing"} and is_whole)
    return "hook" not in traps and (not traps - {"beside"} or is_whole)


def trap_name(recipe: Recipe) -> str:
    """What the trap of a recipe is called in summaries."""
    names = [
        f"{step.kind} {step.settings.get('name', '')}".strip()
        for step in recipe.steps
        if "trap" in KINDS[step.kind].traits
    ]
    names += [term.kind for term in recipe.terms if term.kind in BESIDE]
    names += ["merged loss" for term in recipe.terms if term.settings.get("merged")]
    names += ["logsumexp" for term in recipe.terms if term.by_hand == "logsumexp"]
    names += [f"outer {recipe.plan.outer}"] if recipe.plan.outer else []
    return ", ".join(names)


def rewrites_aside(recipe: Recipe) -> bool:
    """Whether something is overwritten that no loss depends on.

    The input of a module that is overwritten afterwards may hold its own future, which the backward
    pass lets go of: none gets there.
    """
    wanted = {term.value for term in recipe.terms}
    for step in reversed(recipe.steps):
        if not wanted.isdisjoint(step.outputs):
            wanted.update(step.inputs)
        elif "in_place" in KINDS[step.kind].traits:
            return True
    return False
