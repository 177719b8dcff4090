"""A net, its losses and what is asked of it, as plain data. Knows neither torch nor the library.

Everything that a recipe leaves open (sizes of inputs, values of parameters) follows from it: shapes
from running it, numbers from the seeds. So a recipe without one of its steps is a recipe again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

Settings = Mapping[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """An input of the net.

    Attributes:
        shape: Of one sample.
        tokens: Number of different tokens; zero for real numbers.
        requires_grad: Whether it is a leaf that wants a gradient.
        lengths: Of one tensor for each sample, in a list; empty where samples are on axis 0.
    """

    shape: Shape
    tokens: int = 0
    requires_grad: bool = False
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.lengths:
            return f"a list of numbers, [L, {', '.join(map(str, self.shape))}], L = {self.lengths}"
        what = f"one of {self.tokens} tokens" if self.tokens else "a number"
        leaf = ", requires_grad" if self.requires_grad else ""
        return f"{what}, [N, {', '.join(map(str, self.shape))}]{leaf}"


@dataclass(frozen=True)
class Step:
    """One operation: reads values by name and gives values new names.

    Attributes:
        kind: Name of a :class:`~tests.nets.kinds.Kind`.
        inputs: Names of the values that it reads.
        outputs: Names of the values that it gives.
        settings: Arguments of the kind.
        part: Name of the module in the net; steps with one name call one module.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: Settings = field(default_factory=dict)
    part: str = ""

    def __str__(self) -> str:
        called = f"{self.kind}({_listed(self.settings)})"
        part = f"  # {self.part}" if self.part else ""
        return f"{', '.join(self.outputs)} = {called}({', '.join(self.inputs)}){part}"


@dataclass(frozen=True)
class Term:
    """A loss on a value of the net.

    Attributes:
        value: Name of the value.
        kind: Name of a :class:`~tests.nets.losses.LossKind`.
        settings: Arguments of the loss.
        scale: Factor in the sum of all terms.
        by_hand: How ``reduction="none"`` is reduced afterwards: ``"sum"``, ``"mean"`` or
            ``"weighted"``; empty where the loss reduces.
        part: Name of the loss module; terms with one name call one module.
    """

    value: str
    kind: str
    settings: Settings = field(default_factory=dict)
    scale: float = 1.0
    by_hand: str = ""
    part: str = "loss"

    def __str__(self) -> str:
        by_hand = f".{self.by_hand}()" if self.by_hand else ""
        scale = f"{self.scale} * " if self.scale != 1.0 else ""
        return f"{scale}{self.kind}({_listed(self.settings)})({self.value}){by_hand}"


@dataclass(frozen=True)
class Request:
    """An extension: its name and arguments (see :mod:`tests.nets.quantities`)."""

    name: str
    options: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({_listed(self.options)})"


@dataclass(frozen=True)
class Plan:
    """How the backward pass is run.

    Attributes:
        passes: Name of a function of :mod:`tests.nets.passes`.
        budget: Memory budget in bytes; zero for the default.
        hook_acts_at: The call of the extension hook at which something happens, in some passes.
        outer: A function of the sum of all terms; empty for none.
        is_inside: Whether the model returns its loss, as one module.
    """

    passes: str = "single"
    budget: int = 0
    hook_acts_at: int = 1
    outer: str = ""
    is_inside: bool = False

    def __str__(self) -> str:
        budget = f", budget {self.budget}" if self.budget else ""
        inside = ", loss inside" if self.is_inside else ""
        return f"passes: {self.passes}{budget}{inside}, hook acts at call {self.hook_acts_at}"


@dataclass(frozen=True)
class Recipe:
    """A net and a backward pass through it.

    Attributes:
        seed: Seeds parameters, data and random modules.
        batch: Number of samples.
        sources: Inputs of the net by name.
        steps: Its operations in order.
        terms: Its losses.
        requests: What is computed, in order.
        plan: How.
    """

    seed: int
    batch: int
    sources: Mapping[str, Source]
    steps: tuple[Step, ...] = ()
    terms: tuple[Term, ...] = ()
    requests: tuple[Request, ...] = ()
    plan: Plan = Plan()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"seed {self.seed}, batch {self.batch}"
        for name, source in self.sources.items():
            yield f"{name} = {source}"
        yield from map(str, self.steps)
        terms = " + ".join(map(str, self.terms))
        yield f"loss = {self.plan.outer}({terms})" if self.plan.outer else f"loss = {terms}"
        yield f"extensions: {', '.join(map(str, self.requests))}"
        yield f"{self.plan}"

    @property
    def told(self) -> list[int]:
        """Which sample each row belongs to, where the pass says so; else each is one."""
        random = Random(self.seed)
        samples = random.randint(1, self.batch)
        is_told = self.plan.passes == "told"
        return [random.randrange(samples) if is_told else row for row in range(self.batch)]

    def with_(self, **changes: Any) -> Recipe:
        """A copy with other values in some fields."""
        return replace(self, **changes)


def _listed(settings: Settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
