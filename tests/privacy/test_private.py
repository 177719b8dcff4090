"""The loop, the accountant, checkpoints, scalers, precision: what surrounds the sums."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp
from torch import nn

from backpack_core.errors import UsageError
from backpack_privacy import Accountant, Clipping, make_private, replace_batch_norm
from tests.privacy.problems import NETS, difference, loader_of, make, perceptron, privately, run


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_epsilon_is_that_of_the_library(kind: Any) -> None:
    private, model, lossfunc = privately(accountant=kind, noise_multiplier=1.5)
    run(private, model, lossfunc, 6)
    by_hand = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[kind]()
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    by_hand.compose(dp_accounting.PoissonSampledDpEvent(4 / 12, gaussian), 6)
    assert private.epsilon(1e-3) == by_hand.get_epsilon(1e-3)


def test_shuffled_batches_cost_a_mechanism_for_each_epoch() -> None:
    private, model, lossfunc = privately(sampling="shuffled", noise_multiplier=1.5)
    run(private, model, lossfunc, 7)  # two epochs, and one step of the third
    by_hand = pld.PLDAccountant()
    by_hand.compose(dp_accounting.GaussianDpEvent(1.5), 3)
    assert private.epsilon(1e-3) == by_hand.get_epsilon(1e-3)


def test_noise_for_a_target() -> None:
    private, model, lossfunc = privately(
        noise_multiplier=None, target_epsilon=0.3, target_delta=1e-3, epochs=2
    )
    with pytest.raises(UsageError, match="steps that were planned"):
        run(private, model, lossfunc, 7)
    assert 0.29 < private.epsilon() <= 0.3


def test_another_accountant() -> None:
    class Counts:
        def compose(self, event: Any, count: int) -> None:
            self.count = count

        def get_epsilon(self, delta: float) -> float:
            return self.count / delta

    private, model, lossfunc = privately(accountant=Counts, noise_multiplier=1.0)
    run(private, model, lossfunc, 3)
    assert private.epsilon(0.5) == 6.0


class Logs:
    """An accountant that logs as those of dp-accounting do."""

    message = ""

    def compose(self, event: Any, count: int) -> None:
        logging.getLogger("absl").warning(self.message, -1e-9)

    def get_epsilon(self, delta: float) -> float:
        return 0.5


def test_what_the_accountant_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs tightness is dropped, what makes numbers wrong raises, and the rest is shown."""
    logger, shown = logging.getLogger("absl"), list[str]()
    monkeypatch.setattr(logger, "callHandlers", lambda record: shown.append(record.getMessage()))
    accountant = Accountant(Logs)
    accountant.add(1.0, 0.1)
    Logs.message = "failed to converge, %s. Excluding this order from the epsilon computation."
    assert accountant.epsilon(1e-3) == 0.5
    assert not shown
    Logs.message = "something else, %s"
    assert accountant.epsilon(1e-3) == 0.5
    assert shown == ["something else, -1e-09"]
    Logs.message = "Negative Renyi divergence of %s, returning an epsilon of zero."
    with pytest.raises(UsageError, match=r"lost all digits.*pld"):
        accountant.epsilon(1e-3)
    assert len(shown) == 1
    assert not logger.filters


def test_without_noise_nothing_is_private() -> None:
    private, model, lossfunc = privately()
    assert private.epsilon(1e-3) == 0
    run(private, model, lossfunc, 1)
    assert private.epsilon(1e-3) == float("inf")
    with pytest.raises(UsageError, match="delta"):
        private.epsilon()


def test_two_loops_cannot_share_an_epoch() -> None:
    """Each step is of the loop that was begun last."""
    private, model, lossfunc = privately(sampling="shuffled", noise_multiplier=1.0)
    first = iter(private.loader)
    x, y = next(first)
    private.step(lossfunc(model(x), y))
    for x, y in private.loader:
        private.step(lossfunc(model(x), y))
    assert private.accountant.spent[0].count == 2
    with pytest.raises(UsageError, match="one loop after the other"):
        next(first)


@pytest.mark.parametrize("name", ["accountant", "noise_multiplier", "clipping"])
def test_what_was_set_cannot_be_replaced(name: str) -> None:
    """Steps would go on with the old one."""
    private, _, _ = privately(noise_multiplier=1.0)
    with pytest.raises(AttributeError, match=name):
        setattr(private, name, getattr(private, name))


def test_names_and_objects_stay() -> None:
    model, data = make("images")
    names, optimizer = [*model.state_dict()], torch.optim.Adam(model.parameters())
    lossfunc = nn.CrossEntropyLoss()
    private = make_private(
        model, lossfunc, optimizer, loader_of(data), noise_multiplier=1.0, max_norm=1.0
    )
    assert (private.model, private.lossfunc, private.optimizer) == (model, lossfunc, optimizer)
    for x, y in private.loader:
        private.step(lossfunc(model(x), y))
    assert [*model.state_dict()] == names
    assert all(p.grad is None and not vars(p) for p in model.parameters())


def test_the_loop_of_the_user_is_the_same() -> None:
    first, model, lossfunc = privately(noise_multiplier=0.5, max_rows=2)
    run(first, model, lossfunc, 3)
    second, other, lossfunc = privately(noise_multiplier=0.5, max_rows=2)
    for x, y in second.loader:
        with second:
            lossfunc(other(x), y).backward()
        if second.is_complete:
            second.optimizer.step()
            second.optimizer.zero_grad()
    assert difference(model, other) == 0


class Averages(torch.optim.SGD):
    """An optimizer of one's own: it counts its steps, holds parameters, and centres gradients."""

    def __init__(self, params: Any) -> None:
        params = [*params]
        super().__init__(params, lr=0.1)
        self.count, self.held = 0, nn.ParameterList(params)
        self.lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        with torch.no_grad():
            for p in self.held:
                p.sub_(p.grad, alpha=0.1 / self.count)
                p.grad = p.grad - p.grad.mean()
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        Averages,
    ],
)
def test_any_optimizer(optimizer: Any) -> None:
    """Their movement is found to be right, with schedules, too."""
    private, model, lossfunc = privately(optimizer=optimizer, noise_multiplier=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(private.optimizer, 1e-3, 1.0, 4)
    for _ in range(3):
        for x, y in private.loader:
            private.step(lossfunc(model(x), y))
            schedule.step()
    assert private.steps == 9


@pytest.mark.parametrize("net", NETS)
def test_functions_and_normalisers(net: str) -> None:
    """A mean by a function, with its normaliser said, is the module."""
    first, model, lossfunc = privately(net)
    run(first, model, lossfunc, 3)
    for normaliser, reduction in (("samples", "mean"), (None, "sum")):

        def function(x: Any, y: Any, how: str = reduction) -> Any:
            return nn.functional.cross_entropy(x, y, reduction=how)

        second, other, _ = privately(net, lossfunc=function, normaliser=normaliser)
        run(second, other, function, 3)
        assert difference(model, other) < 1e-12


def test_a_normaliser_of_each_batch() -> None:
    first, model, lossfunc = privately()
    run(first, model, lossfunc, 3)
    second, other, lossfunc = privately(normaliser="samples")
    for x, y in second.loader:
        loss = nn.functional.cross_entropy(other(x), y, reduction="sum") / 7
        second.step(loss, normaliser=7.0)
    assert difference(model, other) < 1e-12


def test_a_gradient_scaler() -> None:
    """Its factor is not a part of the gradients; a step that overflows is left out, and counted."""
    first, model, lossfunc = privately()
    run(first, model, lossfunc, 3)
    second, other, lossfunc = privately(checks=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in second.loader:
        assert second.step(lossfunc(other(x), y), scaler=scaler)
    assert difference(model, other) < 1e-12
    before = [p.detach().clone() for p in other.parameters()]
    for x, y in second.loader:
        assert not second.step(lossfunc(other(x * torch.inf), y), scaler=scaler)
        break
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert second.accountant.spent[0].count == second.steps == 4
    assert scaler.get_scale() == 2.0**9


class Stopped(torch.optim.SGD):
    """Its first step runs out of memory."""

    is_done = False

    def step(self, closure: Any = None) -> Any:
        if not self.is_done:
            self.is_done = True
            raise torch.OutOfMemoryError
        return super().step(closure)


def test_after_a_step_that_failed_in_a_scaler_plain_gradients_are_refused() -> None:
    private, model, lossfunc = privately(optimizer=lambda p: Stopped(p, lr=0.1), checks=0)
    x, y = next(iter(private.loader))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        private.step(lossfunc(model(x), y), scaler=torch.amp.GradScaler("cpu"))
    private.optimizer.zero_grad()
    lossfunc(model(x), y).backward()
    with pytest.raises(UsageError, match="plain gradient"):
        private.optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_empty_batches_have_their_steps_after_one_that_a_scaler_left_out() -> None:
    """Also where they wait for it, since the loop asks for batches ahead of time."""
    private, model, lossfunc = privately(size=1, noise_multiplier=1.0, checks=0)
    private.ahead, scaler = 1, torch.amp.GradScaler("cpu")
    batches = iter(private.loader)
    batch = next(batches, None)
    while batch is not None:
        following, (x, y) = next(batches, None), batch
        assert not private.step(lossfunc(model(x * torch.inf), y), scaler=scaler)
        batch = following
    assert private.steps == len(private.loader)


def test_half_precision() -> None:
    """Autocast computes in it; parameters, and so the clipped sums, are in single precision."""
    model, lossfunc = perceptron().float(), nn.CrossEntropyLoss(reduction="sum")
    _, data = make("perceptron")
    private = make_private(
        model,
        lossfunc,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loader_of(data),
        noise_multiplier=1.0,
        max_norm=1.0,
    )
    for _ in range(3):
        for x, y in private.loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = lossfunc(model(x.float()), y)
            private.step(loss)
    assert private.steps == 9


def test_a_pass_that_failed_to_begin_leaves_nothing_behind() -> None:
    """Neither a factor for the next one, nor a block that is open."""
    first, model, lossfunc = privately()
    run(first, model, lossfunc, 3)
    second, other, lossfunc = privately()
    for x, y in second.loader:
        with pytest.raises(UsageError, match="normaliser must be what the loss divides by"):
            second.step(lossfunc(other(x), y), normaliser=-1.0)
        weight = next(other.parameters())
        weight.grad = torch.zeros_like(weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with pytest.raises(UsageError, match="plain gradient"):
            second.step(lossfunc(other(x), y), scaler=scaler)
        weight.grad = None
        with second:
            lossfunc(other(x), y).backward()
        second.optimizer.step()
    assert difference(model, other) == 0


def test_gradients_of_inputs_elsewhere_are_not_a_second_pass() -> None:
    private, model, lossfunc = privately()
    for x, y in private.loader:
        image = x.clone().requires_grad_()
        torch.autograd.grad(model(image).sum(), image)
        private.step(lossfunc(model(x), y))
    assert private.steps == 3


def test_records_of_clipping() -> None:
    private, model, lossfunc = privately(clipping=Clipping({"0.*": 1e-6, "*": 1e6}))
    run(private, model, lossfunc, 2)
    record = private.records[-1]
    assert record.clipped == {"0.*": 1.0, "*": 0.0}
    assert record.bounds == {"0.*": 1e-6, "*": 1e6}
    assert record.norms["*"].dim() == 1


def test_batch_normalisation_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Sequential(nn.BatchNorm2d(6)))
    model[1].weight.data.fill_(3.0)
    assert replace_batch_norm(model) is model
    assert isinstance(model[1], nn.GroupNorm)
    assert isinstance(model[2][0], nn.GroupNorm)
    assert (model[1].weight == 3).all()
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(4)), nn.GroupNorm)
    other = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    replace_batch_norm(other, lambda old: nn.LayerNorm(old.num_features))
    assert isinstance(other[0], nn.LayerNorm)


def test_closed_it_is_an_ordinary_optimizer() -> None:
    private, model, lossfunc = privately()
    run(private, model, lossfunc, 1)
    private.close()
    copy.deepcopy(private.optimizer).step()
    x, y = next(iter(loader_of(make("perceptron")[1])))
    lossfunc(model(x), y).backward()
    private.optimizer.step()
    assert private.steps == 1
    with pytest.raises(UsageError, match="close"):
        private.step(lossfunc(model(x), y))


def test_workers_and_collate() -> None:
    """A loader's own settings are kept."""
    model, data = make("perceptron")
    pairs = [(x, y) for x, y in zip(*data.tensors, strict=True)]
    seen: list[int] = []

    def collate(rows: list[Any]) -> Any:
        seen.append(len(rows))
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    loader, lossfunc = loader_of(pairs, collate_fn=collate), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, lossfunc, optimizer, loader, noise_multiplier=1.0, max_norm=1.0)
    assert len(private.loader) == 3
    assert private.loader.batch_size == 4
    for x, y in private.loader:
        assert len(x) == seen[-1]
        private.step(lossfunc(model(x), y))
    assert "3 steps taken" in repr(private)
