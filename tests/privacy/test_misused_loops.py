"""A loop that is not private raises, before a step is taken or after the first ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core.errors import BackpackError, NotExtendedError, UnsupportedError
from backpack_privacy import Clipping
from backpack_privacy.sums import FIELD
from tests.privacy.loops import (
    DATA,
    Casts,
    Differentiates,
    HalfFrozen,
    Loop,
    Mixes,
    Ours,
    Remembers,
    RemembersLater,
    Replaces,
    ReturnsLogits,
    Unused,
    another_optimizer,
    backward_twice,
    begins_another,
    caught,
    caught_part,
    check_refused,
    frozen_later,
    grows,
    halved_later,
    last_left_out,
    left_over,
    nested,
    normalised,
    ours,
    penalty,
    plain,
    pushed,
    put_back,
    recorded,
    stepping,
    twice,
    two_backwards,
    two_of,
    unfrozen_later,
    well,
    with_closure,
)
from tests.privacy.problems import perceptron, privately


def hooked(loop: Loop, x: Tensor, y: Tensor) -> None:
    next(loop.model.parameters()).register_hook(lambda gradient: 0 * gradient)
    loop.private.step(loop.loss(x, y))


def some_ignored(target: Tensor) -> Tensor:
    """Every third target."""
    return torch.where(torch.arange(len(target)) % 3 == 1, -100, target)


class Inside(nn.Module):
    """A loss module that calls another."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside = nn.CrossEntropyLoss(**options)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inside(output, target)


DURING: dict[str, tuple[Callable[[], Any], str]] = {
    "the old loader": (
        lambda: Loop().private.step(torch.zeros((), requires_grad=True)),
        "Loop over private.loader",
    ),
    "a copy": (lambda: deepcopy(Loop().private), "cannot be copied"),
    "a pickle": (lambda: pickle.dumps(Loop().private), "Save private.state_dict()"),
    "a copy of the optimizer": (
        lambda: deepcopy([Loop().optimizer]),
        "cannot be copied or pickled: a copy would take plain gradients",
    ),
    "a copy of the optimizer, with the same parameters": (
        lambda: copy(Loop().optimizer),
        "call make_private(...) for it",
    ),
    "a pickle of the optimizer": (
        lambda: pickle.dumps(Loop().optimizer),
        "Save optimizer.state_dict()",
    ),
    "a loss with company": (
        lambda: Loop().each(lambda loop, x, y: loop.private.step((loop.loss(x, y), x))),
        "Got tuple",
    ),
    "a loss of each sample": (
        lambda: Loop().each(
            stepping(lambda loop, x, y: F.cross_entropy(loop.model(x), y, reduction="none"))
        ),
        "add it up",
    ),
    "a loss without a graph": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.loss(x, y).detach())),
        "no graph",
    ),
    "unfrozen later": (
        lambda: Loop(nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3))).each(
            unfrozen_later
        ),
        "Other parameters require a gradient",
    ),
    "a copy is trained": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.lossfunc(deepcopy(loop.model)(x), y))),
        "was not trained when make_private",
    ),
    "plain backward": (lambda: Loop().each(plain), "plain gradient"),
    "zero_grad forgotten": (lambda: Loop().each(left_over), "zero_grad()"),
    "step without backward": (lambda: Loop().optimizer.step(), "no private sum"),
    "step forgotten": (lambda: Loop().each(recorded), "no step was taken"),
    "closure": (lambda: Loop().each(with_closure), "optimizer.step(closure)"),
    "two steps for a batch": (lambda: Loop().each(twice), "No batch of private.loader"),
    "batch left out": (lambda: Loop().each(lambda *_: None), "drawn but not used"),
    "nested": (lambda: Loop().each(nested), "cannot be nested"),
    "frozen later": (lambda: Loop().each(frozen_later), "Other parameters require"),
    "batch normalisation later": (lambda: Loop().each(normalised), "replace_batch_norm"),
    "mixes samples": (lambda: Loop(Mixes()).each(well), "samples of the batch influence"),
    "data in a buffer": (lambda: Loop(Remembers()).each(well), "public_buffers=['mean']"),
    "penalty": (lambda: Loop().each(stepping(penalty)), "beside the loss"),
    "no sum over samples": (
        lambda: Loop(normaliser="samples").each(
            stepping(lambda loop, x, y: loop.model(x).mean(0).square().sum())
        ),
        "influence each other",
    ),
    "another loss": (
        lambda: Loop().each(stepping(lambda loop, x, y: ours(loop.model(x), y))),
        "what the loss divides by",
    ),
    "derivatives inside of the block": (
        lambda: Loop(Differentiates()).each(recorded),
        "run it before `with private:`",
    ),
    "a loss module of one's own": (
        lambda: Loop(lossfunc=Ours()).each(well),
        'make_private(..., normaliser="samples")',
    ),
    "targets that broadcast": (
        lambda: Loop(nn.Linear(5, 1), lossfunc=nn.PoissonNLLLoss(), normaliser="samples").each(
            well
        ),
        "samples would share terms",
    ),
    "two forward passes": (
        lambda: Loop(lossfunc=nn.CrossEntropyLoss(reduction="sum")).each(
            stepping(lambda loop, x, y: loop.loss(x, y) + loop.loss(x.flip(0), y.flip(0)))
        ),
        "through 2 runs of the model",
    ),
    "two forward passes, in dataclasses": (
        lambda: two_of(lambda model, x: model(x).logits, ReturnsLogits()),
        "through 2 runs of the model",
    ),
    "passes through layers": (
        lambda: two_of(lambda model, x: model[4](model[2](model[0](x))), perceptron()),
        "through no run of the model",
    ),
    "a mean in autocast": (lambda: Loop(Casts()).each(well), 'Use a sum, reduction="sum"'),
    "a mean that is told, in autocast": (
        lambda: Loop(Casts()).each(
            lambda loop, x, y: loop.private.step(loop.loss(x, y), normaliser=float(len(x)))
        ),
        'Use a sum, reduction="sum"',
    ),
    "a mean over half precision": (
        lambda: Loop(
            HalfFrozen(),
            normaliser="samples",
            optimizer=lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1),
        ).each(well),
        "normaliser=None",
    ),
    "a mean over other rows": (
        lambda: Loop(lossfunc=Inside(), normaliser="samples", sampling="shuffled").each(
            stepping(lambda loop, x, y: loop.loss(x, some_ignored(y)))
        ),
        "but CrossEntropyLoss 'inside' divides by",
    ),
    "a mean over weights": (
        lambda: Loop(
            lossfunc=Inside(weight=torch.tensor([1.1, 2.3, 3.7])), normaliser="samples"
        ).each(well),
        "but CrossEntropyLoss 'inside' divides by",
    ),
    "backward twice": (lambda: Loop().each(backward_twice), "Two backward passes"),
    "two losses in a block": (lambda: Loop().each(two_backwards), "Two backward passes"),
    "left out by an error": (lambda: Loop().each(caught), "the batch would be left out"),
    "a part left out by an error": (
        lambda: Loop(max_rows=1).each(caught_part),
        "a part of the batch raised",
    ),
    "two loops at once": (lambda: Loop(sampling="shuffled").each(begins_another), "one loop after"),
    "a hook on a gradient": (
        lambda: Loop().each(hooked),
        "parametrize",
    ),
    "half of the batch": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.loss(x[1:], y[1:]))),
        "samples were drawn",
    ),
    "samples repeated": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.loss(x.repeat(2, 1), y.repeat(2)))),
        "samples were drawn",
    ),
    "not a number": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.loss(x * torch.nan, y))),
        "not a number",
    ),
    "weights beyond the bound": (
        lambda: Loop(
            max_norm=None, clipping=Clipping(0.1, weights=lambda norms, c: norms * 0 + 1)
        ).each(well),
        "more than the bound",
    ),
    "weights of another shape": (
        lambda: Loop(
            max_norm=None, clipping=Clipping(0.1, weights=lambda norms, c: norms.sum())
        ).each(well),
        "one weight for each sample",
    ),
}


@pytest.mark.parametrize("misuse", DURING)
def test_refused_in_the_loop(misuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no parameter has moved."""
    loops: list[Loop] = []
    init = Loop.__init__

    def watched(loop: Loop, *args: Any, **kwargs: Any) -> None:
        init(loop, *args, **kwargs)
        loops.append(loop)

    monkeypatch.setattr(Loop, "__init__", watched)
    check_refused(DURING[misuse], RuntimeError)
    (loop,) = loops
    if misuse != "two steps for a batch":
        assert loop.private.steps == 0
        for old, new in zip(loop.start, loop.model.parameters(), strict=False):
            assert torch.equal(old, new)


AFTER: dict[str, tuple[Callable[[], Any], str]] = {
    "in half precision later": (
        lambda: Loop(lossfunc=nn.CrossEntropyLoss(reduction="sum")).each(halved_later),
        "is in bfloat16",
    ),
    "the last batch of an epoch left out": (
        lambda: Loop().each(last_left_out),
        "drawn but not used",
    ),
    "rate of zero": (
        lambda: Loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).each(well, 3),
        "has not moved in 5 steps",
    ),
    "steps too small for the precision": (
        lambda: Loop(
            perceptron().float(),
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-15),
        ).each(stepping(lambda loop, x, y: loop.loss(x.float(), y)), 3),
        "too small for the precision of float32",
    ),
    "an adapter that is not used": (lambda: Loop(Unused()).each(well, 3), "only noise"),
    "an adapter that is not used, without noise": (
        lambda: Loop(Unused(), noise_multiplier=0.0).each(well, 3),
        "has not moved in 5 steps: no sample's loss depends on it",
    ),
    "values put back": (lambda: Loop().each(put_back), "between two steps"),
    "moved by something else": (lambda: Loop().each(pushed), "moved differently"),
    "another optimizer, later": (lambda: Loop().each(another_optimizer, 4), "between two steps"),
    "parameters added": (lambda: Loop().each(grows, 4), "add_param_group before"),
    "data in a buffer, later": (
        lambda: Loop(RemembersLater()).each(well, 4),
        "public_buffers=['mean']",
    ),
    "a mean that is said to be a sum": (
        lambda: Loop(lossfunc=Inside(), normaliser=None).each(well, 3),
        "has another ratio in other batches",
    ),
    "a mean over rows with a divisor of another number": (
        lambda: Loop().each(
            lambda loop, x, y: loop.private.step(loop.loss(x, y), normaliser=7.0), 3
        ),
        "has another ratio in other batches",
    ),
    "budget": (lambda: Loop(epochs=1, target_delta=1e-3).each(well, 2), "that were planned"),
}


@pytest.mark.parametrize("misuse", AFTER)
def test_refused_after_the_first_steps(misuse: str) -> None:
    check_refused(AFTER[misuse])


def test_buffers_that_keep_their_values_may_be_written() -> None:
    loop = Loop(Replaces())
    loop.each(well, 2)
    assert loop.private.steps == 4


def test_checkpoints_may_be_loaded_once_it_is_private() -> None:
    """What buffers have when the first epoch begins is what they have to keep."""
    loop = Loop(Remembers())
    loop.model.forward = loop.model.layer.forward  # type: ignore[method-assign,operator]
    state = {name: found + 1 for name, found in loop.model.state_dict().items()}
    loop.model.load_state_dict(state)
    loop.each(well)
    assert loop.private.steps == 2


def test_the_number_of_targets_that_count_may_be_said() -> None:
    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        target = some_ignored(y)
        loop.private.step(loop.loss(x, target), normaliser=float((target >= 0).sum()))

    loop = Loop(lossfunc=Inside(), sampling="shuffled")
    loop.each(step, 3)
    assert loop.private.steps == 6


class Undone(Inside):
    """A mean over the targets that count, times their number, and another."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        counted = (target >= 0).sum()
        return super().forward(output, target) * counted + 0.3 * self.inside(2 * output, target) * (
            counted
        )


def test_a_mean_may_be_multiplied_by_what_it_divides_by() -> None:
    loop = Loop(lossfunc=Undone(), normaliser=None, sampling="shuffled")
    loop.each(stepping(lambda loop, x, y: loop.loss(x, some_ignored(y))), 3)
    assert loop.private.steps == 6


def test_weights_of_losses_may_follow_a_schedule() -> None:
    lossfunc, weights = Inside(reduction="sum"), iter([0.0, 0.5, 0.25, 0.2, 0.1, 0.05])
    loop = Loop(lossfunc=lossfunc, normaliser=None, sampling="shuffled")

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        output = loop.model(x)
        loop.private.step(lossfunc(output, y) + next(weights) * lossfunc(2 * output, y))

    loop.each(step, 3)
    assert loop.private.steps == 6


def test_an_epoch_closes_the_pass_that_was_left_open() -> None:
    """As that of a Trainer which was stopped, and begins anew."""
    loop = Loop()
    next(iter(loop.private.loader))
    loop.private.__enter__()
    loop.each(well)
    assert loop.private.steps == 2
    loop.loss(*DATA[:3]).backward()
    assert all(type(p.grad) is Tensor and not hasattr(p, FIELD) for p in loop.model.parameters())


def test_a_failed_batch_leaves_nothing_behind() -> None:
    """The next one is as if it had not been."""
    inner, _, lossfunc = privately()
    assert inner.steps == 0
    for _ in inner.loader:
        with pytest.raises(RuntimeError, match="stop"), inner:
            raise RuntimeError("stop")
        assert all(p.grad is None for p in inner.model.parameters())
        break
    for x, y in inner.loader:
        inner.step(lossfunc(inner.model(x), y))
    assert inner.steps == 3


def test_errors_name_what_users_know() -> None:
    error = UnsupportedError("Not here.\n[PrivateSum, after Linear '0']")
    for _ in (private := Loop().private).loader:
        with pytest.raises(UnsupportedError, match=r"\[Private training, after"), private:
            raise error
        with pytest.raises(NotExtendedError, match=r"\(Private training\)") as caught, private:
            pass
        assert "Here, that block is `with private:`." in caught.value.__notes__
        break


def test_a_failed_batch_can_be_gone_through_again() -> None:
    """Also where the loop asks for batches ahead of time."""
    plain, again = Loop(), Loop()
    plain.each(well)

    def retried(loop: Loop, x: Tensor, y: Tensor) -> None:
        caught(loop, x, y)
        well(loop, x, y)

    again.private.ahead = 1
    again.each(retried)
    assert again.private.steps == plain.private.steps == 2
    with pytest.raises(BackpackError, match="the batch would be left out"):
        again.each(caught, 2)


def test_there_are_enough() -> None:
    assert len(DURING) + len(AFTER) >= 50
