"""What happens between the steps of a private training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backpack_core.errors import UsageError

if TYPE_CHECKING:
    from tests.privacy.test_private_histories import History

HAPPENINGS: dict[str, Callable[[History, Tensor, Tensor], None]] = {}


class Broken(Exception):
    """Raised by the user's own code."""


def happening(function: Callable[[History, Tensor, Tensor], None]) -> Any:
    HAPPENINGS[function.__name__] = function
    return function


def _break(*_: Any) -> None:
    raise Broken


@happening
def other_rate(history: History, x: Tensor, y: Tensor) -> None:
    rate = history.random.choice([0.01, 0.03, 0.2])
    for optimizer in (history.optimizer, history.reference.optimizer):
        optimizer.param_groups[0]["lr"] = rate


@happening
def other_mode(history: History, x: Tensor, y: Tensor) -> None:
    is_training = history.random.random() < 0.5
    has_dropout = any(isinstance(m, torch.nn.Dropout) for m in history.model.modules())
    for model in (history.model, history.reference.model):
        model.train(is_training and not has_dropout)


@happening
def runs_without_step(history: History, x: Tensor, y: Tensor) -> None:
    out = history.model(x)
    if history.random.random() < 0.5:
        with torch.no_grad():
            history.model(x[:1])
    if history.random.random() < 0.5 and x.is_floating_point():
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(history.setting.value(history.model(inputs), y), inputs)
    del out


@happening
def own_backward(history: History, x: Tensor, y: Tensor) -> None:
    history.setting.value(history.model(x), y).backward()
    if history.random.random() < 0.5:
        history.refuses(lambda: history.private.step(history.setting.value(history.model(x), y)))
        history.refuses(history.optimizer.step)
    history.random.choice([history.optimizer, history.model]).zero_grad()


@happening
def steps_without_sums(history: History, x: Tensor, y: Tensor) -> None:
    history.refuses(history.optimizer.step)
    history.refuses(
        lambda: history.optimizer.step(lambda: history.setting.value(history.model(x), y))
    )


@happening
def frozen(history: History, x: Tensor, y: Tensor) -> None:
    parameter = history.random.choice([*history.model.parameters()])
    if sum(p.requires_grad for p in history.model.parameters()) < 2:
        return
    parameter.requires_grad_(not parameter.requires_grad)
    history.refuses(lambda: history.private.step(history.setting.value(history.model(x), y)))
    parameter.requires_grad_(not parameter.requires_grad)


@happening
def two_blocks(history: History, x: Tensor, y: Tensor) -> None:
    """One in the other; the setting of the inner one is that of no other."""

    def nested() -> None:
        with history.private:
            history.private.step(
                history.setting.value(history.model(x), y), scaler=history.scaler, normaliser=3.0
            )

    history.refuses(nested)
    history.ends_if_begun()


@happening
def error_in_forward(history: History, x: Tensor, y: Tensor) -> None:
    handle = history.model.head.register_forward_hook(_break)
    with suppress(Broken):
        history.private.step(history.setting.value(history.model(x), y))
    handle.remove()


@happening
def error_in_backward(history: History, x: Tensor, y: Tensor) -> None:
    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(_break)

    handle = history.model.head.register_forward_hook(hook)
    with suppress(Broken):
        history.private.step(history.setting.value(history.model(x), y))
    handle.remove()
    history.ends_if_begun()


@happening
def error_in_block(history: History, x: Tensor, y: Tensor) -> None:
    with suppress(Broken), history.private:
        history.setting.value(history.model(x), y).backward()
        raise Broken
    history.ends_if_begun()


@happening
def error_in_step(history: History, x: Tensor, y: Tensor) -> None:
    """Before the optimizer moves anything: what it was given is spent, and the batch is used."""
    handle = history.optimizer.register_step_pre_hook(_break)
    history.moves, history.is_used = False, True
    with suppress(Broken):
        history.take(x, y)
        history.moves = True  # not the last part
        history.done += 1
    handle.remove()
    history.is_restarted |= history.setting.ahead > 0  # empty batches that wait come later
    if not history.moves and history.random.random() < 0.5:
        with suppress(UsageError):  # after that of a scaler
            history.optimizer.step()  # the same gradients again
            history.moves = True


@happening
def gradients_set_to_zero(history: History, x: Tensor, y: Tensor) -> None:
    history.random.choice([history.optimizer, history.model]).zero_grad()


@happening
def copied_model(history: History, x: Tensor, y: Tensor) -> None:
    """A copy that is used plainly."""
    model = copy.deepcopy(history.model)
    with suppress(UsageError):  # extended losses are known to copies
        history.setting.value(model(x), y).backward()


@happening
def leaves_the_loop(history: History, x: Tensor, y: Tensor) -> None:
    history.is_restarted = True


@happening
def begins_another_loop(history: History, x: Tensor, y: Tensor) -> None:
    history.is_restarted = True
    history.begins()
    next(iter(history.private.loader), None)
    history.catches_up()


@happening
def asks(history: History, x: Tensor, y: Tensor) -> None:
    history.check_epsilon()
    assert "noise" in repr(history.private)
    history.refuses(lambda: copy.deepcopy(history.private))
    history.refuses(lambda: history.setting.private(history.model, history.optimizer))
    history.private.state_dict()


@happening
def saved_and_loaded(history: History, x: Tensor, y: Tensor) -> None:
    """Into the same objects, into copies, or into fresh ones."""
    state, weights = history.private.state_dict(), history.model.state_dict()
    moments = copy.deepcopy(history.optimizer.state_dict())
    kind = history.random.choice(["same", "copy", "fresh"])
    if kind == "same" or history.random.random() < 0.5:
        history.private.close()
    if kind != "same":
        model = history.model if kind == "copy" else history.fresh
        history.model = copy.deepcopy(model).train(history.model.training)
        history.model.load_state_dict(weights)
        history.optimizer = history.setting.optimizer(history.model)
        history.optimizer.load_state_dict(moments)
    history.make(copy.deepcopy(state))
    history.is_restarted = True
