"""Loops that go wrong, and nets that cannot be private."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from backpack_core.errors import BackpackError
from backpack_privacy import make_private
from tests.privacy.problems import loader_of, perceptron

DATA = TensorDataset(torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,)))


class Loop:
    """What a script has, and how it goes wrong."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or perceptron()
        torch.manual_seed(0)
        self.lossfunc = options.pop("lossfunc", None) or nn.CrossEntropyLoss()
        make_optimizer = options.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        settings: dict[str, Any] = {"seed": 1, "noise_multiplier": 1.0, "max_norm": 1.0, **options}
        self.private = make_private(
            self.model, self.lossfunc, self.optimizer, loader_of(DATA, 6), **settings
        )
        self.start = [p.detach().clone() for p in self.model.parameters()]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.lossfunc(self.model(x), y)

    def each(self, what: Callable[[Loop, Tensor, Tensor], Any], epochs: int = 1) -> None:
        for _ in range(epochs):
            for x, y in self.private.loader:
                what(self, x, y)


def stepping(
    loss: Callable[[Loop, Tensor, Tensor], Tensor],
) -> Callable[[Loop, Tensor, Tensor], Any]:
    return lambda loop, x, y: loop.private.step(loss(loop, x, y))


def check_refused(misuse: tuple[Callable[[], Any], str], *more: type[Exception]) -> None:
    """It raises, and the message has what is said beside it."""
    call, message = misuse
    with pytest.raises((BackpackError, *more)) as caught:
        call()
    assert message in str(caught.value)


well = stepping(Loop.loss)


def plain(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.loss(x, y).backward()
    loop.optimizer.step()


def recorded(loop: Loop, x: Tensor, y: Tensor) -> None:
    with loop.private:
        loop.loss(x, y).backward()


def left_over(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.loss(x, y).backward()
    loop.private.step(loop.loss(x, y))


def with_closure(loop: Loop, x: Tensor, y: Tensor) -> None:
    recorded(loop, x, y)
    loop.optimizer.step(lambda: loop.loss(x, y))


def twice(loop: Loop, x: Tensor, y: Tensor) -> None:
    well(loop, x, y)
    well(loop, x, y)


def nested(loop: Loop, x: Tensor, y: Tensor) -> None:
    with loop.private, loop.private:
        pass


def backward_twice(loop: Loop, x: Tensor, y: Tensor) -> None:
    with loop.private:
        loss = loop.loss(x, y)
        loss.backward(retain_graph=True)
        loss.backward()


def two_backwards(loop: Loop, x: Tensor, y: Tensor) -> None:
    """Of two losses of one forward pass."""
    with loop.private:
        out = loop.model(x)
        loop.lossfunc(out, y).backward(retain_graph=True)
        loop.lossfunc(2 * out, y).backward()


def caught(loop: Loop, x: Tensor, y: Tensor) -> None:
    with suppress(ValueError), loop.private:
        loop.loss(x, y).backward()
        raise ValueError


def caught_part(loop: Loop, x: Tensor, y: Tensor) -> None:
    """The second part of a batch: going backward again does not bring the first one back."""
    if loop.private._sums.is_partial:
        caught(loop, x, y)
    well(loop, x, y)


def begins_another(loop: Loop, x: Tensor, y: Tensor) -> None:
    next(iter(loop.private.loader))


def frozen_later(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.model.get_parameter("0.bias").requires_grad_(False)
    well(loop, x, y)


def unfrozen_later(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.model.requires_grad_(True)
    well(loop, x, y)


def halved_later(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.model.bfloat16()
    loop.private.step(loop.loss(x.bfloat16(), y))


def last_left_out(loop: Loop, x: Tensor, y: Tensor) -> None:
    """By an error in the forward pass."""
    if not loop.private.steps:
        well(loop, x, y)


def penalty(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    return loop.loss(x, y) + sum(p.square().sum() for p in loop.model.parameters())


def normalised(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.model.append(nn.BatchNorm1d(3, affine=False))
    well(loop, x, y)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x)


class Differentiates(nn.Module):
    """Has its own derivative for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        total = torch.tanh(self.first(x)).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return self.second(slope)


class Casts(nn.Module):
    """Turns autocast on by itself, and returns single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).float()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x.float()).float()


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(5, 4).bfloat16(), nn.Linear(4, 3).float()
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x.bfloat16()).float())


@dataclass
class Logits:
    logits: Tensor


class ReturnsLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return Logits(self.layer(x))


def two_of(logits: Callable[[Any, Tensor], Tensor], model: nn.Module) -> None:
    """Each row's loss has another sample in it."""
    Loop(model, lossfunc=nn.CrossEntropyLoss(reduction="sum")).each(
        stepping(
            lambda loop, x, y: (
                loop.lossfunc(logits(loop.model, x), y)
                + loop.lossfunc(logits(loop.model, x.flip(0)), y.flip(0))
            )
        )
    )


def ours(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y)


class Ours(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adapter = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def put_back(loop: Loop, x: Tensor, y: Tensor) -> None:
    """Training does not last, as with a stale copy of the weights."""
    well(loop, x, y)
    with torch.no_grad():
        for p, old in zip(loop.model.parameters(), loop.start, strict=True):
            p.copy_(old)


def pushed(loop: Loop, x: Tensor, y: Tensor) -> None:
    """Something else steps, too."""

    def push(*_: Any) -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.add_(0.1)

    hook = loop.optimizer.register_step_pre_hook(push)
    well(loop, x, y)
    hook.remove()


def another_optimizer(loop: Loop, x: Tensor, y: Tensor) -> None:
    """Plain steps on one layer, once the first steps were looked at."""
    well(loop, x, y)
    if loop.private.steps > 5:
        other = torch.optim.SGD(loop.model.get_submodule("0").parameters(), lr=0.1)
        loop.model.get_submodule("0")(x).mean().backward()
        other.step()
        other.zero_grad()


def grows(loop: Loop, x: Tensor, y: Tensor) -> None:
    well(loop, x, y)
    if loop.private.steps > 5:
        loop.optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})


class RemembersLater(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 4:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x)


class Replaces(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        """The same values, in a new tensor."""
        self.mean = self.mean.clone()
        self.mean.zero_()
        return self.layer(x)
