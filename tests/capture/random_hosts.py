"""Training loops in the blocks of other objects, drawn, in two worlds: one captures its steps.

The objects are optimizers with Kronecker factors, and sums over micro-batches.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import backpack_core.extensions as known
from backpack_capture import capture
from backpack_core import extend
from backpack_data import combined
from backpack_optimizers import EKFAC, KFAC

Change = Callable[["HostWorld", Random], None]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


class Scaled(nn.Module):
    """A layer with a setting."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer, self.k = nn.Linear(size, size), 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.layer(x) * self.k).tanh()
        return result


class HostWorld:
    """A model, a loss and a host."""

    def __init__(self, random: Random, is_captured: bool) -> None:
        self.is_captured, self.samples, self.fails = is_captured, 3, False
        self.kind = random.choice(["kfac", "ekfac", "combined", "combined"])
        self.names = random.sample(["KFAC", "Variance", "BatchGrad", "DiagGGNExact"], 2)
        self.factors_every, self.inverses_every = random.choice([1, 2]), random.choice([1, 3])
        self.split = random.choice(["pi", "exact"])
        self.reduction = random.choice(["mean", "sum"])
        parts = [Scaled(4) for _ in range(random.randint(1, 2))]
        self.net: Any = extend(nn.Sequential(*parts, nn.LayerNorm(4), nn.Linear(4, 3)))
        self.lossfunc = extend(nn.CrossEntropyLoss(reduction=self.reduction))
        self.told = [self.kind, self.names, self.factors_every, self.inverses_every, self.split]
        self.make()

    def make(self) -> None:
        """The host, and its step."""
        settings: Any = {"lr": 0.02, "damping": 0.1, "inverses_every": self.inverses_every}
        settings["factors_every"] = self.factors_every
        if self.kind == "kfac":
            self.host: Any = KFAC(self.net, split=self.split, **settings)
        elif self.kind == "ekfac":
            self.host = EKFAC(self.net, **settings)
        else:
            self.host = combined(self.net, *[getattr(known, name)() for name in self.names])

        def function(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.lossfunc(self.net(x), y)
            if self.fails:
                raise ZeroDivisionError
            return loss

        self.function = function
        self.step = capture(function, self.net, self.lossfunc, self.host)

    def block(self) -> Any:
        return self.host if self.kind == "combined" else self.host.curvature()

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        if self.is_captured:
            found: Tensor = self.step(x, y)
            return found
        loss = self.function(x, y)
        with self.block():
            loss.backward()
        return loss.detach()

    def go_on(self, seed: int) -> dict[str, Any]:
        """One step; returns everything that can be seen afterwards."""
        torch.manual_seed(seed)
        x, y = torch.randn(self.samples, 4), torch.randint(3, (self.samples,))
        found: dict[str, Any] = {}
        self.net.zero_grad()
        try:
            found["loss"] = self.run(x, y).clone()
            if self.kind != "combined":
                self.host.step()
        except Exception as error:
            found["error"] = type(error).__name__
        for name, parameter in self.net.named_parameters():
            found[name] = parameter.detach().clone()
            found[f"{name} grad"] = None if parameter.grad is None else parameter.grad.clone()
            for key, value in vars(parameter).items():
                if not key.startswith("_"):
                    tensors = [value] if isinstance(value, Tensor) else [*value]
                    found[f"{name} {key}"] = [tensor.clone() for tensor in tensors]
        found["generator"] = torch.get_rng_state()
        return found


@change
def samples(world: HostWorld, random: Random) -> None:
    world.samples = random.choice([1, 2, 5])


@change
def setting(world: HostWorld, random: Random) -> None:
    world.net[0].k = random.choice([1.0, 2.0])


@change
def rate(world: HostWorld, random: Random) -> None:
    if world.kind != "combined":
        world.host.param_groups[0]["lr"] *= 0.9
        world.host.damping = random.choice([0.1, 0.3])


@change
def failing(world: HostWorld, random: Random) -> None:
    world.fails = not world.fails


@change
def freeze(world: HostWorld, random: Random) -> None:
    parameter = random.choice([*world.net.parameters()][:-1])
    parameter.requires_grad_(not parameter.requires_grad)


@change
def reset(world: HostWorld, random: Random) -> None:
    if world.kind == "combined":
        world.host.reset()
    else:
        world.host.load_state_dict(copy.deepcopy(world.host.state_dict()))


@change
def made_again(world: HostWorld, random: Random) -> None:
    world.make()


@change
def other_pass(world: HostWorld, random: Random) -> None:
    """By the engine in both worlds, in the same block, perhaps without its end."""
    x, y = torch.randn(2, 4), torch.randint(3, (2,))
    is_failing = random.random() < 0.4
    with contextlib.suppress(Exception), world.block():
        world.lossfunc(world.net(x), y).backward()
        if is_failing:
            raise ZeroDivisionError


@change
def loaded(world: HostWorld, random: Random) -> None:
    world.net.load_state_dict({n: v * 0.95 for n, v in world.net.state_dict().items()})


@change
def other_loss(world: HostWorld, random: Random) -> None:
    world.lossfunc.reduction = random.choice(["mean", "sum"])  # type: ignore[assignment]
