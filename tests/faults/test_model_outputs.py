"""Models that return several tensors, which meet in the loss only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from backpack_core import backpack, extend, unextend
from tests.faults.problems import KINDS, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")

Function = Callable[..., Any]


class Actor(nn.Module):
    """Mean and logarithm of the deviation, of which the latter is a parameter."""

    def __init__(self, expand: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.log_std = nn.Parameter(torch.randn(2))
        self.expand = expand

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.expand(self.log_std, mean)


class Classifier(nn.Module):
    """Logits and features; with parameters of its own, or with those of its parts only."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.own = own
        if own:
            self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        if self.own == "features":
            features = features * self.scale
        logits = self.head(features)
        return (logits * self.scale[:3] if self.own == "logits" else logits), features


ACTORS: dict[str, Callable[[], nn.Module]] = {
    "expand_as": lambda: Actor(lambda log_std, mean: log_std.expand_as(mean)),
    "expand": lambda: Actor(lambda log_std, mean: log_std.expand(len(mean), -1)),
    "repeat": lambda: Actor(lambda log_std, mean: log_std.repeat(len(mean), 1)),
    "added": lambda: Actor(lambda log_std, mean: log_std + torch.zeros_like(mean)),
}


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "parts": Classifier,
    "own_features": lambda: Classifier("features"),
    "own_logits": lambda: Classifier("logits"),
}


def _as_they_are(*outputs: Tensor) -> tuple[Tensor, ...]:
    return outputs


def compare(model: nn.Module, loss: Function, kind: str, between: Function = _as_they_are) -> None:
    """Compare a model that returns tensors ``[N, *]``, and a loss of all of them.

    Curvature is that of the loss as a function of what lies ``between`` it and the model.
    """
    x = torch.randn(3, 3)
    reference = unextend(copy.deepcopy(model))
    shapes = [output.shape[1:] for output in between(*reference(x))]

    def joined(x: Tensor) -> Tensor:
        return torch.cat([output.flatten(1) for output in between(*reference(x))], 1)

    def of_joined(output: Tensor) -> Tensor:
        parts = output.split([shape.numel() for shape in shapes], 1)
        pairs = zip(parts, shapes, strict=True)
        result: Tensor = loss(*(part.reshape(-1, *shape) for part, shape in pairs))
        return result

    def compute(quantity: Function) -> list[Tensor]:
        found: list[Tensor] = quantity(joined, of_joined, (x,), list(reference.parameters()))
        return found

    expectation = expect(compute, kind)
    value = loss(*between(*extend(model)(x)))
    with backpack(*expectation.extensions):
        value.backward()
    expectation.compare(model.parameters())


def _losses(*terms: Function) -> Sequence[Function]:
    """Their sum, in both orders."""
    return [
        lambda *outputs: sum(term(*outputs) for term in terms),
        lambda *outputs: sum(term(*outputs) for term in reversed(terms)),
    ]


ACTIONS = torch.tensor([[0.3, -1.0], [0.1, 0.7], [-0.4, 0.2]], dtype=torch.float64)


TARGET = torch.tensor([0, 2, 1])


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("actor", ACTORS)
def test_actor_with_two_terms(actor: str, order: int) -> None:
    terms = (lambda mean, _: (mean - ACTIONS).square().sum(), lambda _, log_std: -log_std.sum())
    compare(ACTORS[actor](), _losses(*terms)[order], "gradients")


@pytest.mark.parametrize("actor", ACTORS)
def test_actor_with_a_likelihood(actor: str) -> None:
    def loss(mean: Tensor, log_std: Tensor) -> Tensor:
        return -Normal(mean, log_std.exp()).log_prob(ACTIONS).mean()

    compare(ACTORS[actor](), loss, "gradients")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("actor", ACTORS)
def test_actor_with_an_extended_loss(actor: str, kind: str) -> None:
    lossfunc = extend(nn.MSELoss())

    def scaled(mean: Tensor, log_std: Tensor) -> tuple[Tensor]:
        return (mean * log_std.exp(),)

    compare(ACTORS[actor](), lambda output: lossfunc(output, ACTIONS), kind, scaled)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("model", CLASSIFIERS)
def test_features_in_the_loss(model: str, order: int) -> None:
    """A penalty beside the loss, by functions alone."""
    terms = (
        lambda logits, _: F.cross_entropy(logits, TARGET),
        lambda _, features: 0.1 * features.square().sum(),
    )
    compare(CLASSIFIERS[model](), _losses(*terms)[order], "gradients")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("model", CLASSIFIERS)
def test_features_in_a_loss_of_their_own(model: str, order: int, kind: str) -> None:
    entropy, squares = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    terms = (
        lambda logits, _: entropy(logits, TARGET),
        lambda _, features: 0.3 * squares(features, torch.zeros_like(features)),
    )
    compare(CLASSIFIERS[model](), _losses(*terms)[order], kind)
