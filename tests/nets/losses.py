"""Losses: how they are drawn and made, their targets, and the sum of all terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isclose
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import need
from tests.nets.net import generator
from tests.nets.recipe import Recipe, Settings, Shape, Term
from tests.nets.terms import BESIDE, OwnTerm


@dataclass(frozen=True)
class LossKind:
    """A kind of loss.

    Attributes:
        make: ``make(settings, shape)`` for a value of this shape, without the batch axis.
        target: ``target(settings, value, random)``.
        draw: Draws the settings for a shape, or raises :class:`~tests.nets.kinds.Unfit`.
        before: What has to be applied to a value first; name and settings of a step.
        weight: How often it is drawn.
        has_curvature: Whether quantities of second order know it.
    """

    make: Callable[[Settings, Shape], nn.Module]
    target: Callable[[Settings, Tensor, torch.Generator], Tensor]
    draw: Callable[[Random, Shape], dict[str, Any]] = lambda random, shape: {}
    before: tuple[str, Settings] | None = None
    weight: float = 1.0
    has_curvature: bool = True


class OwnLoss(nn.Module):
    """A loss of the user's, with a reduction of its own."""

    def __init__(self, reduction: str, name: str = "squares") -> None:
        super().__init__()
        self.reduction, self.name = reduction, name

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        each = EACH[self.name](value, target)
        if self.reduction == "none":
            return each
        return each.mean() if self.reduction == "mean" else each.sum()


def _by_angle(value: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(value.flatten(1) + 0.1, target.flatten(1), dim=1)


def _by_ratio(value: Tensor, target: Tensor) -> Tensor:
    far = (value - target).square().flatten(1).sum(1)
    return far / (1 + value.square().flatten(1).sum(1))


# Losses of each sample that no module of torch has.
EACH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda value, target: (value - target).square().flatten(1).sum(1),
    "angle": _by_angle,
    "ratio": _by_ratio,
    "norm": lambda value, target: (value - target).flatten(1).norm(dim=1),
    "focal": lambda value, target: (
        -(value.flatten(1).log_softmax(1) * (1 - value.flatten(1).softmax(1)) ** 2)[:, 0]
    ),
    "log_cosh": lambda value, target: (value - target).cosh().log().flatten(1).mean(1),
}


class FunctionalLoss(OwnLoss):
    """Stands for a loss without a module: it is never extended."""


def _simple(name: str, **options: Any) -> Callable[[Settings, Shape], nn.Module]:
    kind: Any = getattr(nn, name)
    return lambda settings, shape: kind(reduction=settings["reduction"], **options)


def _near(settings: Settings, value: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=random)


def _probabilities(settings: Settings, value: Tensor, random: torch.Generator) -> Tensor:
    return torch.rand(value.shape, generator=random)


def _labels(settings: Settings, value: Tensor, random: torch.Generator) -> Tensor:
    return torch.randint(0, 2, value.shape, generator=random).to(value.dtype)


def _signs(settings: Settings, value: Tensor, random: torch.Generator) -> Tensor:
    return 2 * _labels(settings, value, random) - 1


def _classes(settings: Settings, value: Tensor, random: torch.Generator) -> Tensor:
    shape = (len(value), *value.shape[2:])
    if settings.get("soft"):
        return torch.rand(value.shape, generator=random).softmax(1)
    target = torch.randint(0, value.shape[1], shape, generator=random)
    if settings.get("ignored"):
        target[torch.rand(shape, generator=random) < 0.4] = settings["ignored"]
        target.view(-1)[0] = 0
    return target


def _draw_classes(random: Random, shape: Shape) -> dict[str, Any]:
    need(shape[0] > 1)
    settings: dict[str, Any] = {}
    if random.random() < 0.25:
        settings["soft"] = True
    elif random.random() < 0.3:
        settings["ignored"] = random.choice([1, -100])
    if random.random() < 0.25:
        settings["weights"] = True
    if random.random() < 0.2:
        settings["smoothing"] = 0.2
    return settings


def _weights(settings: Settings, shape: Shape) -> Tensor | None:
    return torch.arange(shape[0]) / 2.0 + 0.5 if settings.get("weights") else None


def _cross_entropy(settings: Settings, shape: Shape) -> nn.Module:
    return nn.CrossEntropyLoss(
        weight=_weights(settings, shape),
        ignore_index=settings.get("ignored") or -100,
        label_smoothing=settings.get("smoothing", 0.0),
        reduction=settings["reduction"],
    )


def _nll(settings: Settings, shape: Shape) -> nn.Module:
    return nn.NLLLoss(
        weight=_weights(settings, shape),
        ignore_index=settings.get("ignored") or -100,
        reduction=settings["reduction"],
    )


def _draw_plain_classes(random: Random, shape: Shape) -> dict[str, Any]:
    settings = _draw_classes(random, shape)
    return {k: v for k, v in settings.items() if k in {"ignored", "weights"}}


def _draw_flat_classes(random: Random, shape: Shape) -> dict[str, Any]:
    need(len(shape) == 1 and shape[0] > 1)
    return {}


def _bce(settings: Settings, shape: Shape) -> nn.Module:
    weight = torch.arange(shape[-1]) / 2.0 + 0.5 if settings.get("weights") else None
    return nn.BCEWithLogitsLoss(weight=weight, pos_weight=weight, reduction=settings["reduction"])


def _draw_bce(random: Random, shape: Shape) -> dict[str, Any]:
    return {"weights": True} if random.random() < 0.3 else {}


LOSSES: dict[str, LossKind] = {
    "CrossEntropy": LossKind(_cross_entropy, _classes, _draw_classes, weight=8),
    "MSE": LossKind(_simple("MSELoss"), _near, weight=4),
    "BCEWithLogits": LossKind(_bce, _labels, _draw_bce, weight=2),
    "Huber": LossKind(_simple("HuberLoss"), _near, weight=0.5),
    "SmoothL1": LossKind(_simple("SmoothL1Loss"), _near, weight=0.5),
    "L1": LossKind(_simple("L1Loss"), _near, weight=0.3),
    "PoissonNLL": LossKind(_simple("PoissonNLLLoss"), _labels, weight=0.5),
    "SoftMargin": LossKind(_simple("SoftMarginLoss"), _signs, weight=0.5),
    "MultiLabelSoftMargin": LossKind(
        _simple("MultiLabelSoftMarginLoss"), _labels, _draw_flat_classes, weight=0.5
    ),
    "NLL": LossKind(
        _nll, _classes, _draw_plain_classes, ("along", {"name": "log_softmax", "axis": 1}), 0.7
    ),
    "BCE": LossKind(
        _simple("BCELoss"), _probabilities, before=("elementwise", {"name": "sigmoid"}), weight=0.5
    ),
    "MultiMargin": LossKind(
        _simple("MultiMarginLoss"), _classes, _draw_flat_classes, None, 0.4, has_curvature=False
    ),
    "Own": LossKind(
        lambda s, shape: OwnLoss(s["reduction"], s.get("name", "squares")),
        _near,
        lambda random, shape: {"name": random.choice(sorted(EACH))},
        weight=1.2,
        has_curvature=False,
    ),
    "functional": LossKind(
        lambda s, shape: FunctionalLoss(s["reduction"]), _near, weight=0.7, has_curvature=False
    ),
}


OUTER: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda loss: loss,
    "sqrt": lambda loss: (loss.abs() + 0.1).sqrt(),
    "square": torch.square,
    "exp": lambda loss: (-loss).exp(),
    "log1p": lambda loss: loss.abs().log1p(),
}


class Losses(nn.Module):
    """The loss modules of a recipe, and the sum of its terms."""

    def __init__(self, recipe: Recipe, shapes: Mapping[str, Shape]) -> None:
        """Make the modules.

        Args:
            recipe: The recipe.
            shapes: Shapes of the values without the batch axis, by name.
        """
        super().__init__()
        self.terms = recipe.terms
        self.outer = recipe.plan.outer
        self.is_nonlinear = bool(self.outer)  # in the losses of samples; known when it has run
        self.divided: dict[int, float | None] = {}  # what terms divide by; known when it has run
        self.seed = recipe.seed
        self.parts = nn.ModuleDict()
        for term in self.terms:
            if term.kind in LOSSES and term.part not in self.parts:
                made = LOSSES[term.kind].make(term.settings, shapes[term.value])
                self.parts[term.part] = made
            elif term.settings.get("module"):
                self.parts[term.part] = OwnTerm(BESIDE[term.kind])

    def extendable(self) -> list[nn.Module]:
        """The modules, without what stands for a function."""
        return [m for m in self.parts.values() if not isinstance(m, FunctionalLoss)]

    def forward(self, values: Mapping[str, Tensor], weights: Iterable[Tensor] = ()) -> Tensor:
        """The loss.

        Args:
            values: Outputs of the net by name.
            weights: The trained parameters of the net, for penalties.
        """
        weights = list(weights)
        parts = [self.term(number, values, weights) for number in range(len(self.terms))]
        total = torch.stack(parts).sum() if len(parts) > 2 else sum(parts[1:], parts[0])
        return OUTER[self.outer](total)

    def term(self, number: int, values: Mapping[str, Tensor], weights: list[Tensor]) -> Tensor:
        """One term, reduced and scaled."""
        term, value = self.terms[number], values[self.terms[number].value]
        if value.requires_grad:
            self.divided[number] = None
        if term.kind in BESIDE:
            part = self.parts[term.part] if term.settings.get("module") else None
            found = BESIDE[term.kind].function(value, weights) if part is None else part(value)
            if found.requires_grad:  # not of data alone
                self.divided[number] = None
            return term.scale * found
        random = generator(self.seed, f"target {number}")
        target = LOSSES[term.kind].target(term.settings, value.detach(), random)
        if term.settings.get("merged"):
            value, target = value.movedim(1, -1).flatten(0, -2), target.flatten()
        if way := term.settings.get("picked"):
            value, target = _picked(way, value.movedim(1, -1), target, random)
        result: Tensor = self.parts[term.part](value, target)
        if value.requires_grad and not (term.by_hand or isinstance(self.parts[term.part], OwnLoss)):
            self.divided[number] = self._divisor(term, value, target)
        is_nonlinear = term.by_hand == "logsumexp" and result.numel() > 1
        self.is_nonlinear |= is_nonlinear and result.requires_grad
        reduced = reduce(term, result, random)
        return reduced if term.scale == 1 else term.scale * reduced

    def _divisor(self, term: Term, value: Tensor, target: Tensor) -> float:
        """What a loss divides by; not a number where that cannot be seen."""
        if term.settings["reduction"] == "sum":
            return 1.0
        lossfunc: Any = copy.deepcopy(self.parts[term.part])
        found = []
        for lossfunc.reduction in ("sum", term.settings["reduction"]):
            with torch.no_grad():
                found.append(lossfunc(value, target).item())
        return found[0] / found[1] if found[1] else float("nan")

    @property
    def normaliser(self) -> float | None:
        """What the sum of all terms divides by; ``None`` where there is no such number."""
        found = [*self.divided.values()]
        first = found[0] if found else None
        if first is None or self.outer or None in found:
            return None
        close = all(isclose(first, other or 0.0, rel_tol=1e-6) for other in found[1:])
        return first if close else None


def _picked(
    way: str, value: Tensor, target: Tensor, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Some entries, often as many as there are samples, or twice as many."""
    samples, every = len(target), target.numel()
    counts = [samples, 2 * samples, int(torch.randint(1, every + 1, (), generator=random))]
    count = min(every, counts[int(torch.randint(3, (), generator=random))])
    order = torch.randperm(every, generator=random)[:count]
    owners = order * samples // every
    if owners.sort()[0].equal(torch.arange(samples)):
        order = order[owners.argsort()]  # all samples in another order are not followed
    if way == "flat":
        return value.flatten(0, -2)[order], target.flatten()[order]
    index: Any = torch.unravel_index(order, target.shape)
    if way == "mask":
        mask = torch.zeros(target.shape, dtype=torch.bool)
        mask[index] = True
        index = mask
    return value[index], target[index]


def reduce(term: Term, loss: Tensor, random: torch.Generator) -> Tensor:
    """What the user does with a loss that is not reduced."""
    if not term.by_hand:
        return loss
    if term.by_hand == "sum":
        return loss.sum()
    if term.by_hand == "mean":
        return loss.mean()
    if term.by_hand == "logsumexp":
        return loss.flatten().logsumexp(0)
    weights = torch.rand(len(loss), generator=random).view(-1, *[1] * (loss.dim() - 1))
    return (weights * loss).sum()
