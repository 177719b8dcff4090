"""Whatever cannot be private raises, before a step is taken, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from backpack_core.errors import BackpackError
from backpack_privacy import AdaptiveClipping, Clipping, make_private
from backpack_privacy.sums import FIELD
from tests.privacy.problems import loader_of, make, perceptron, privately

DATA = TensorDataset(torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,)))


def private(model: Any = None, lossfunc: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """Make something private, and everything that is not given well."""
    model = perceptron() if model is None else model
    lossfunc = nn.CrossEntropyLoss() if lossfunc is None else lossfunc
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = options.pop("loader") if "loader" in options else loader_of(DATA)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_norm": 1.0, **options}
    return make_private(model, lossfunc, optimizer, loader, **settings)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def frozen() -> nn.Module:
    return perceptron().requires_grad_(False)


def grown() -> Any:
    """The optimizer was made before the last layer was replaced."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[4] = nn.Linear(6, 3)
    return private(model, optimizer=optimizer)


def partly(trained: str, stepped: str) -> Any:
    model = perceptron()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(trained))
    chosen = [p for n, p in model.named_parameters() if n.startswith(stepped)]
    return private(model, optimizer=torch.optim.SGD(chosen, lr=0.1))


def several() -> Any:
    model = perceptron()
    private(model, clipping=(clipping := Clipping(1.0)), max_norm=None)
    return private(perceptron(), clipping=clipping, max_norm=None)


def private_again() -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private(model, optimizer=optimizer).close()
    private(model, optimizer=optimizer)
    return private(model, optimizer=optimizer)


def of_opacus() -> nn.Module:
    class GradSampleModule(nn.Sequential):
        pass

    return GradSampleModule(nn.Linear(5, 3))


BEFORE: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: private(model=3, optimizer=3), "first argument is the model"),
    "DataParallel": (lambda: private(nn.DataParallel(perceptron())), "DataParallel splits"),
    "wrapped by Opacus": (lambda: private(of_opacus()), "by Opacus already"),
    "batch normalisation": (
        lambda: private(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
        "replace_batch_norm",
    ),
    "running statistics": (
        lambda: private(
            nn.Sequential(nn.Linear(5, 3), nn.InstanceNorm1d(3, track_running_stats=True))
        ),
        "track_running_stats=False",
    ),
    "nothing trained": (
        lambda: private(frozen(), optimizer=torch.optim.SGD(perceptron().parameters(), lr=0.1)),
        "requires_grad_",
    ),
    "changed after the optimizer": (grown, "make the optimizer again"),
    "trained, not stepped on": (lambda: partly("", "0"), "does not step on it"),
    "stepped on, not trained": (lambda: partly("0", ""), "leave it out of the optimizer"),
    "private already": (private_again, "private already"),
    "no optimizer": (lambda: private(optimizer=3), "third argument"),
    "LBFGS": (
        lambda: private(m := perceptron(), optimizer=torch.optim.LBFGS(m.parameters())),
        "several times in a step",
    ),
    "trained in bfloat16": (lambda: private(perceptron().bfloat16()), "is in bfloat16"),
    "one layer in float16": (
        lambda: private(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).half())),
        "The parameter 1.weight is in float16",
    ),
    "no loss": (lambda: private(lossfunc=3), "second argument"),
    "losses not added up": (
        lambda: private(lossfunc=nn.CrossEntropyLoss(reduction="none")),
        'reduction="none"',
    ),
    "a mean that nobody knows": (lambda: private(lossfunc=F.cross_entropy), "normaliser="),
    "unknown normaliser": (lambda: private(normaliser="batch"), "normaliser is"),
    "a list for a loader": (lambda: private(loader=[1, 2]), "DataLoader"),
    "a stream": (lambda: private(loader=loader_of(Stream())), "no length"),
    "no batch size": (
        lambda: private(loader=loader_of(DATA, None)),  # type: ignore[arg-type]
        "no batch_size",
    ),
    "weighted samples": (
        lambda: private(loader=loader_of(DATA, sampler=WeightedRandomSampler([1.0] * 12, 12))),
        "choices would be lost",
    ),
    "with replacement": (
        lambda: private(
            loader=loader_of(DATA, sampler=torch.utils.data.RandomSampler(DATA, replacement=True))
        ),
        "with replacement",
    ),
    "a batch larger than the data": (lambda: private(loader=loader_of(DATA, 13)), "1 at most"),
    "more users than there are": (lambda: private(users=[0, 1] * 6), "of 2 samples"),
    "users of other data": (lambda: private(users=[0, 1]), "12 in all"),
    "users that are missing": (
        lambda: private(loader=loader_of(DATA, 1), users=torch.tensor([0.0, torch.nan] * 6)),
        "'not a number'",
    ),
    "checks that never end": (lambda: private(checks=-1), "checks is a whole number from 0"),
    "users of rows in another order": (
        lambda: private(
            loader=loader_of(DATA, collate_fn=lambda rows: default_collate(rows[::-1])),
            users=[*range(6)] * 2,
        ),
        "the order of rows",
    ),
    "no bound": (lambda: private(max_norm=None), "Give max_norm="),
    "two bounds": (lambda: private(clipping=Clipping(1.0)), "Give max_norm="),
    "bound of zero": (lambda: private(max_norm=0.0), "positive and finite"),
    "bound without end": (lambda: private(max_norm=float("inf")), "positive and finite"),
    "no clipping": (lambda: private(max_norm=None, clipping="flat"), "clipping is a Clipping"),
    "clipping used twice": (several, "a new one for each"),
    "pattern for nothing": (lambda: private(max_norm={"*": 1.0, "head": 1.0}), "'head'"),
    "parameter without a bound": (lambda: private(max_norm={"0.*": 1.0}), "fits no pattern"),
    "patterns and groups": (lambda: Clipping({"*": 1.0}, "per_layer"), "leave groups="),
    "unknown groups": (lambda: Clipping(1.0, "layers"), "groups is"),  # type: ignore[arg-type]
    "unknown weights": (
        lambda: Clipping(1.0, weights="auto"),  # type: ignore[arg-type]
        "weights is",
    ),
    "quantile of one": (lambda: AdaptiveClipping(quantile=1.0), "between 0 and 1"),
    "counts spend everything": (
        lambda: private(max_norm=None, clipping=AdaptiveClipping(count_noise=0.4)),
        "Give count_noise more than 0.5",
    ),
    "no noise said": (lambda: private(noise_multiplier=None), "either noise_multiplier"),
    "noise and target": (lambda: private(target_epsilon=1.0), "either noise_multiplier"),
    "negative noise": (lambda: private(noise_multiplier=-1.0), "zero (not private) or more"),
    "target without delta": (
        lambda: private(noise_multiplier=None, target_epsilon=1.0, epochs=1),
        "target_delta=",
    ),
    "delta of one": (lambda: private(target_delta=1.0), "delta is a probability"),
    "target of zero": (
        lambda: private(noise_multiplier=None, target_epsilon=0.0, target_delta=1e-3, epochs=1),
        "target_epsilon is",
    ),
    "no epoch": (lambda: private(epochs=0), "epochs is a whole number"),
    "unknown sampling": (lambda: private(sampling="uniform"), "sampling is one of"),
    "unknown accountant": (lambda: private(accountant="prv"), "accountant is"),
    "seed that is none": (lambda: private(seed="now"), "seed is a whole number"),
}


@pytest.mark.parametrize("misuse", BEFORE)
def test_refused_when_made(misuse: str) -> None:
    call, message = BEFORE[misuse]
    with pytest.raises(BackpackError) as caught:
        call()
    assert message in str(caught.value)


class Loop:
    """What a script has, and how it goes wrong."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or perceptron()
        torch.manual_seed(0)
        self.lossfunc = options.pop("lossfunc", None) or nn.CrossEntropyLoss()
        make_optimizer = options.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
        self.optimizer = make_optimizer(self.model.parameters())
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


DURING: dict[str, tuple[Callable[[], Any], str]] = {
    "the old loader": (
        lambda: Loop().private.step(torch.zeros((), requires_grad=True)),
        "Loop over private.loader",
    ),
    "plain backward": (lambda: Loop().each(plain), "plain gradient"),
    "zero_grad forgotten": (lambda: Loop().each(left_over), "zero_grad()"),
    "step without backward": (lambda: Loop().optimizer.step(), "no private sum"),
    "step forgotten": (lambda: Loop().each(recorded), "no step was taken"),
    "closure": (lambda: Loop().each(with_closure), "optimizer.step(closure)"),
    "two steps for a batch": (lambda: Loop().each(twice), "No batch of private.loader"),
    "batch left out": (lambda: Loop().each(lambda *_: None), "drawn and not used"),
    "nested": (lambda: Loop().each(nested), "cannot be nested"),
    "frozen later": (lambda: Loop().each(frozen_later), "Other parameters want"),
    "batch normalisation later": (lambda: Loop().each(normalised), "replace_batch_norm"),
    "mixes samples": (lambda: Loop(Mixes()).each(well), "samples of the batch influence"),
    "data in a buffer": (lambda: Loop(Remembers()).each(well), "public_buffers=['mean']"),
    "a buffer whose name is a part of another's": (
        lambda: Loop(Remembers(), public_buffers="means").each(well),
        "public_buffers=['mean']",
    ),
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
    "a loss module of one's own": (
        lambda: Loop(lossfunc=Ours()).each(well),
        'make_private(..., normaliser="samples")',
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
        lambda: Loop(Casts(), normaliser=None).each(
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
    "backward twice": (lambda: Loop().each(backward_twice), "two backward passes"),
    "two losses in a block": (lambda: Loop().each(two_backwards), "two backward passes"),
    "left out by an error": (lambda: Loop().each(caught), "the batch would be left out"),
    "a part left out by an error": (
        lambda: Loop(max_rows=1).each(caught_part),
        "a part of the batch raised",
    ),
    "two loops at once": (lambda: Loop(sampling="shuffled").each(begins_another), "one loop after"),
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
    "no gradient": (
        lambda: Loop().each(stepping(lambda loop, x, y: loop.loss(x, y).detach())),
        "does not require grad",
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
    call, message = DURING[misuse]
    with pytest.raises((BackpackError, RuntimeError)) as caught:
        call()
    assert message in str(caught.value)
    (loop,) = loops
    if misuse != "two steps for a batch":
        assert loop.private.steps == 0
        for old, new in zip(loop.start, loop.model.parameters(), strict=False):
            assert torch.equal(old, new)


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


AFTER: dict[str, tuple[Callable[[], Any], str]] = {
    "in half precision later": (
        lambda: Loop(lossfunc=nn.CrossEntropyLoss(reduction="sum")).each(halved_later),
        "is in bfloat16",
    ),
    "the last batch of an epoch left out": (
        lambda: Loop().each(last_left_out),
        "drawn and not used",
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
        "smaller than what float32",
    ),
    "an adapter that is not used": (lambda: Loop(Unused()).each(well, 3), "noise alone"),
    "values put back": (lambda: Loop().each(put_back), "between two steps"),
    "moved by something else": (lambda: Loop().each(pushed), "moved otherwise"),
    "another optimizer, later": (lambda: Loop().each(another_optimizer, 4), "between two steps"),
    "parameters added": (lambda: Loop().each(grows, 4), "add_param_group before"),
    "data in a buffer, later": (
        lambda: Loop(RemembersLater()).each(well, 4),
        "public_buffers=['mean']",
    ),
    "budget": (lambda: Loop(epochs=1, target_delta=1e-3).each(well, 2), "that were planned"),
}


@pytest.mark.parametrize("misuse", AFTER)
def test_refused_after_the_first_steps(misuse: str) -> None:
    call, message = AFTER[misuse]
    with pytest.raises(BackpackError) as caught:
        call()
    assert message in str(caught.value)


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
    model, data = make("perceptron")
    inner, _, lossfunc = privately()
    del model, data
    assert inner.steps == 0
    for _ in inner.loader:
        with pytest.raises(RuntimeError, match="stop"), inner:
            raise RuntimeError("stop")
        assert all(p.grad is None for p in inner.model.parameters())
        break
    for x, y in inner.loader:
        inner.step(lossfunc(inner.model(x), y))
    assert inner.steps == 3


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
    assert len(BEFORE) + len(DURING) + len(AFTER) >= 70
