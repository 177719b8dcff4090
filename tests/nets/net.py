"""A recipe becomes a module and data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.nets.catalogue import KINDS
from tests.nets.kinds import Part, Run
from tests.nets.own_functions import Silent
from tests.nets.recipe import Recipe, Step

Values = dict[str, Tensor]


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of a value, or of each of several, without axis 0."""
    return tuple((value if isinstance(value, Tensor) else value[0]).shape[1:])


def by_sample(value: Tensor, batch: int) -> Tensor:
    """A value with samples in front, ``[N · T, *]`` as ``[N, T, *]``."""
    return value if len(value) == batch else value.unflatten(0, (batch, -1))


def generator(seed: int, name: str) -> torch.Generator:
    """Random numbers that depend on a seed and a name alone."""
    return torch.Generator().manual_seed((seed * 1_000_003 + crc32(name.encode())) % 2**62)


def data(recipe: Recipe, variant: int = 0, more: int = 0) -> list[Any]:
    """The inputs of the net. Other variants are other numbers; there may be more samples."""
    inputs = list[Any]()
    for name, source in recipe.sources.items():
        random = generator(recipe.seed + variant, name)
        shape = (recipe.batch + more, *source.shape)
        if source.lengths:
            lengths = [source.lengths[n % len(source.lengths)] for n in range(shape[0])]
            items = [
                torch.randn(length, *source.shape, generator=random, dtype=torch.float64)
                for length in lengths
            ]
            inputs.append(items)
        elif source.tokens:
            inputs.append(torch.randint(0, source.tokens, shape, generator=random))
        else:
            x = torch.randn(shape, generator=random, dtype=torch.float64)
            inputs.append(x.requires_grad_(source.requires_grad))
    return inputs


class DrawnNet(nn.Module):
    """Runs the steps of a recipe; returns the values that its terms read."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.sources = tuple(recipe.sources)
        self.steps = recipe.steps
        self.results = tuple(dict.fromkeys(term.value for term in recipe.terms if term.value))
        self.parts = nn.ModuleDict()
        # What steps with one of these traits read and gave.
        self.watches: frozenset[str] = frozenset()
        self.watched: list[tuple[Step, Tensor, Tensor]] = []
        self.has_shared = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.sources, inputs, strict=True))
        for step in self.steps:
            is_watched = bool(self.watches & KINDS[step.kind].traits)
            before = values[step.inputs[0]]
            if is_watched and step.part and not before.requires_grad:
                before = before.detach().requires_grad_()  # so that it can be asked what reaches it
            values.update(self.execute(step, {**values, step.inputs[0]: before}))
            if is_watched:
                after = values[step.outputs[0]]
                self.watched.append((step, before, after))
                self.has_shared |= after is before and sum(v is before for v in values.values()) > 2
        return tuple(values[name] for name in self.results)

    def part(self, step: Step) -> Part:
        """The module or parameter of a step."""
        if step.part in self.parts:
            return self.parts[step.part]
        return self._parameters.get(step.part)

    def execute(self, step: Step, values: Mapping[str, Tensor]) -> Values:
        """What a step gives."""
        inputs = [values[name] for name in step.inputs]
        run = partial(KINDS[step.kind].run, self.part(step), step.settings)
        if step.settings.get("silent"):
            run = partial(_with_silent_use, run, self.part(step), step.settings["silent"])
        with torch.no_grad() if step.settings.get("no_grad") else nullcontext():
            if step.settings.get("checkpoint"):
                found: Any = checkpoint(run, *inputs, use_reentrant=False)
            else:
                found = run(*inputs)
        outputs = (found,) if isinstance(found, Tensor) else found
        return dict(zip(step.outputs, outputs, strict=False))  # a draft does not know how many

    def make_part(self, step: Step, seed: int, values: Mapping[str, Tensor]) -> None:
        """Make the module of a step, unless an earlier step has made it."""
        make = KINDS[step.kind].make
        if make is None or self.part(step) is not None:
            return
        shapes = tuple(shape_of(values[name]) for name in step.inputs)
        part = make(step.settings, shapes)
        if isinstance(part, nn.Parameter):
            self.register_parameter(step.part, part)
        else:
            assert part is not None
            self.parts[step.part] = part
        fill(part, generator(seed, step.part))
        self._tie(step)
        self._freeze(step)

    def _tie(self, step: Step) -> None:
        """Give a layer the weight of another one, where it fits."""
        parts = dict(self.parts.items())
        part, other = parts.get(step.part), parts.get(step.settings.get("tie", ""))
        if not isinstance(part, nn.Linear) or not isinstance(other, nn.Linear):
            return
        if part.weight.shape == other.weight.shape:
            part.weight = other.weight

    def _freeze(self, step: Step) -> None:
        frozen = step.settings.get("frozen")
        part = self.part(step)
        if not frozen or part is None:
            return
        named = part.named_parameters() if isinstance(part, nn.Module) else [("", part)]
        for name, parameter in named:
            if frozen == "all" or ("bias" in name) == (frozen == "bias"):
                parameter.requires_grad_(False)


def _with_silent_use(run: Run, part: Any, place: str, *inputs: Tensor) -> Any:
    """Run a step, and use one of its parameters in a function that sends it no gradient."""
    own = [part] if isinstance(part, Tensor) else [*part.parameters()]
    weight = own[-1 if place.endswith("last") else 0]
    first, *others = inputs
    if place.startswith("before") and first.is_floating_point():
        return run(Silent.apply(first, weight), *others)  # type: ignore[no-untyped-call]
    found = run(*inputs)
    if isinstance(found, Tensor):
        return Silent.apply(found, weight)  # type: ignore[no-untyped-call]
    return Silent.apply(found[0], weight), *found[1:]  # type: ignore[no-untyped-call]


def fill(part: nn.Module | nn.Parameter, random: torch.Generator) -> None:
    """Draw the parameters and statistics of a module, of moderate size."""
    with torch.no_grad():
        if isinstance(part, nn.Parameter):
            part.copy_(1 + 0.4 * torch.randn(part.shape, generator=random))
            return
        for name, parameter in part.named_parameters():
            numbers = torch.randn(parameter.shape, generator=random)
            if parameter.dim() > 1:
                parameter.copy_(numbers / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.4 * numbers)
        for name, statistics in part.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                statistics.copy_(0.5 + torch.rand(statistics.shape, generator=random))


def build(recipe: Recipe) -> DrawnNet:
    """The net of a recipe; every part is made when its inputs are known."""
    net = DrawnNet(recipe)
    values: Values = dict(zip(recipe.sources, data(recipe), strict=True))
    with torch.no_grad(), torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in recipe.steps:
            net.make_part(step, recipe.seed, values)
            values.update(net.execute(step, values))
    return net
