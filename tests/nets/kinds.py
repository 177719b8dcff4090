"""What a step can be: how its settings are drawn, how its module is made, how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import Tensor, nn

from tests.nets.recipe import Settings, Shape

Shapes = tuple[Shape, ...]
Part = nn.Module | nn.Parameter | None
Draw = Callable[[Random, Shapes], dict[str, Any]]
Make = Callable[[Settings, Shapes], Part]
Run = Callable[..., Any]


class Unfit(Exception):
    """A kind makes no sense for the shapes at hand."""


@dataclass(frozen=True)
class Kind:
    """A kind of step.

    Shapes are those of one sample, without the batch axis.

    Attributes:
        name: Its name in recipes.
        run: ``run(part, settings, *values)``: a tensor, or a tuple of them.
        draw: Draws the settings for inputs of given shapes, or raises :class:`Unfit`.
        make: Makes the module or parameter; ``None`` for functions.
        arity: Number of values that it reads.
        weight: How often it is drawn.
        traits: ``"tokens"`` reads indices; ``"items"`` reads a list with a tensor for
            each sample; ``"matching"`` reads values of one shape; ``"in_place"`` writes into its
            first input; ``"random"`` draws random numbers in the forward pass;
            ``"hessian"`` may have second derivatives; ``"mixing"`` lets samples influence each
            other; ``"trap"`` is drawn only where a trap is asked for; ``"source"`` reads an input
            of the net as often as another value; ``"head"`` is drawn for losses only, and may give
            several entries of axis 0 for each sample.
    """

    name: str
    run: Run
    draw: Draw
    make: Make | None = None
    arity: int = 1
    weight: float = 1.0
    traits: frozenset[str] = frozenset()

    @property
    def is_tame(self) -> bool:
        """Whether it is ordinary: neither random nor in place."""
        return self.name in TAME or ("hessian" in self.traits and not self.traits & WILD)


TAME = frozenset({"LayerNorm", "GroupNorm", "Dense", "Attention", "Recurrent", "along", "pair"})
TAME |= {"of_sequences", "Counting", "Turned"}
WILD = frozenset({"in_place", "random", "trap"})
KINDS: dict[str, Kind] = {}


def no_settings(random: Random, shapes: Shapes) -> dict[str, Any]:
    """Nothing to draw."""
    return {}


def call(part: nn.Module, settings: Settings, *values: Tensor) -> Any:
    """The module applied to all values."""
    return part(*values)


def register(kind: Kind) -> None:
    """Add a kind to the table."""
    assert kind.name not in KINDS, kind.name
    KINDS[kind.name] = kind


def module(
    name: str,
    make: Make,
    draw: Draw = no_settings,
    run: Run = call,
    arity: int = 1,
    weight: float = 1.0,
    traits: str = "",
) -> None:
    """Register a kind that has a module."""
    register(Kind(name, run, draw, make, arity, weight, frozenset(traits.split())))


def function(
    name: str,
    run: Callable[..., Any],
    draw: Draw = no_settings,
    arity: int = 1,
    weight: float = 1.0,
    traits: str = "",
) -> None:
    """Register a kind without a module; ``run(settings, *values)``."""

    def without_part(part: None, settings: Settings, *values: Tensor) -> Any:
        return run(settings, *values)

    register(Kind(name, without_part, draw, None, arity, weight, frozenset(traits.split())))


def need(condition: object) -> None:
    """Refuse shapes.

    Raises:
        Unfit: The condition does not hold.
    """
    if not condition:
        raise Unfit


def axes(shape: Shape, *numbers: int) -> None:
    """Refuse a sample that does not have one of these numbers of axes."""
    need(len(shape) in numbers)


def on_axes(*numbers: int) -> Draw:
    """Nothing to draw, for samples with one of these numbers of axes."""

    def draw(random: Random, shapes: Shapes) -> dict[str, Any]:
        axes(shapes[0], *numbers)
        return {}

    return draw


def divisor(random: Random, number: int) -> int:
    """A divisor of a number."""
    return random.choice([d for d in range(1, number + 1) if number % d == 0])
