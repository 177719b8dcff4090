"""Steps that fail, that a scaler takes, or that some samples do not reach."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_core.errors import UsageError
from backpack_privacy import AdaptiveClipping, make_private
from tests.privacy.problems import difference, privately


def _break(*_: Any) -> None:
    raise ZeroDivisionError


def step_that_fails(private: Any, value: Tensor, **options: Any) -> None:
    handle = private.optimizer.register_step_pre_hook(_break)
    with suppress(ZeroDivisionError):
        private.step(value, **options)
    handle.remove()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, eps=1e-2, fused=True)


def test_a_step_that_fails_is_spent() -> None:
    """Its gradients have noise, and may have moved something; the loop goes on."""
    private, model, lossfunc = privately(noise_multiplier=1.0, sampling="shuffled", checks=0)
    batches = iter(private.loader)
    x, y = next(batches)
    step_that_fails(private, lossfunc(model(x), y))
    assert (private.steps, len(private.records), len(private.accountant.spent)) == (1, 1, 1)
    before = deepcopy(model)
    private.optimizer.step()  # the same gradients again
    assert difference(model, before) > 0
    assert private.steps == 1
    x, y = next(batches)
    assert private.step(lossfunc(model(x), y))
    for x, y in private.loader:
        step_that_fails(private, lossfunc(model(x), y))
        break
    for x, y in private.loader:
        assert private.step(lossfunc(model(x), y))
    assert private.steps == 6


def test_parameters_that_were_added_are_refused_before_the_pass() -> None:
    """So the batch still waits after that was mended."""
    private, model, lossfunc = privately(sampling="shuffled")
    for x, y in private.loader:
        private.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        for _ in range(2):
            with pytest.raises(UsageError, match="add_param_group before"):
                private.step(lossfunc(model(x), y))
        private.optimizer.param_groups.pop()
        assert private.step(lossfunc(model(x), y))


def test_a_pass_before_the_step_of_the_last_one() -> None:
    private, model, lossfunc = privately(sampling="shuffled")
    for x, y in private.loader:
        with private:
            lossfunc(model(x), y).backward()
        with pytest.raises(UsageError, match="no step was taken"), private:
            pass
        private.optimizer.step()


class Breaks(torch.optim.SGD):
    """Calls the step of its base class; breaks in the middle, if told so."""

    is_well = True

    def step(self, closure: Any = None) -> Any:
        if not self.is_well:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(0.1)
            raise ZeroDivisionError
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-1.0, 1.0)
        return found


@pytest.mark.parametrize("checks", [0, 5])
def test_a_step_that_fails_in_the_middle(checks: int) -> None:
    """Of an optimizer with hooks of its own and of its base class."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch puts hooks on a class at its first use
    options: dict[str, Any] = {"sampling": "shuffled", "checks": checks}
    private, model, lossfunc = privately(optimizer=lambda p: Breaks(p, lr=0.1), **options)
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 1.0
    for number, (x, y) in enumerate(private.loader):
        private.optimizer.is_well = number != 1
        if number == 1:
            with pytest.raises(ZeroDivisionError):
                private.step(lossfunc(model(x), y))
            lossfunc(model(x), y).backward()
            with pytest.raises(UsageError, match="has no private sum"):
                private.optimizer.step()
        else:
            assert private.step(lossfunc(model(x), y))
    assert private.steps == 3


@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_a_scaler_after_a_step_that_failed(make: Any) -> None:
    """The next gradients are divided by the scale, as always."""
    found = []
    for scale in (1.0, 2.0**10):
        private, model, lossfunc = privately(sampling="shuffled", optimizer=make)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for number, (x, y) in enumerate(private.loader):
            if number:
                assert private.step(lossfunc(model(x), y), scaler=scaler)
            else:
                step_that_fails(private, lossfunc(model(x), y), scaler=scaler)
        for x, y in private.loader:
            private.step(lossfunc(model(x), y))
        found.append(model)
    assert difference(*found) < 1e-12


def test_a_fused_optimizer_and_a_scaler() -> None:
    """The copy that a step is compared with is told the scale, too; and overflow is no step."""
    private, model, lossfunc = privately(sampling="shuffled", optimizer=adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in private.loader:
        assert private.step(lossfunc(model(x), y), scaler=scaler)
    for x, y in private.loader:
        assert not private.step(lossfunc(model(x * torch.inf), y), scaler=scaler)
        break
    assert private.steps == 4


@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_empty_batches_after_a_step_of_a_scaler(make: Any) -> None:
    """They have noise of the size that they have without one."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        private, model, lossfunc = privately(
            size=1, seed=5, noise_multiplier=1.0, optimizer=make, checks=0
        )
        private.ahead = 1
        batches = iter(private.loader)
        batch = next(batches, None)
        while batch is not None:
            following, (x, y) = next(batches, None), batch
            private.step(lossfunc(model(x), y), scaler=scaler)
            batch = following
        assert any(not len(r.norms["all"]) for r in [*private.records][1:])
        found.append(model)
    assert difference(*found) < 1e-12


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_a_scaler_that_steps_by_hand_is_refused(make: Any, is_unscaled: bool) -> None:
    """Nothing is spent; the loop may go on without it, or with ``private.step``."""
    private, model, lossfunc = privately(sampling="shuffled", optimizer=make)
    plain, other, _ = privately(sampling="shuffled", optimizer=make)
    for number, (x, y) in enumerate(private.loader):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        if number == 1:
            assert private.step(lossfunc(model(x), y), scaler=scaler)
            continue
        with private.recording(scaler.get_scale()):
            scaler.scale(lossfunc(model(x), y)).backward()
        if is_unscaled:
            scaler.unscale_(private.optimizer)
        with pytest.raises(UsageError, match=r"private\.step\(loss, scaler=scaler\)"):
            scaler.step(private.optimizer)
        assert private.steps == number
        private.optimizer.step()
    for x, y in plain.loader:
        plain.step(plain.lossfunc(other(x), y))
    assert difference(model, other) < 1e-12
    private.close()
    fresh = make(model.parameters())  # now scalers treat both alike
    names = [vars(each).get("_step_supports_amp_scaling") for each in (fresh, private.optimizer)]
    assert names[0] == names[1]


def test_a_block_in_another_leaves_nothing_to_the_next() -> None:
    private, model, lossfunc = privately(sampling="shuffled")
    plain, other, _ = privately(sampling="shuffled")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in private.loader:
        with pytest.raises(UsageError, match="cannot be nested"), private:
            private.step(lossfunc(model(x), y), scaler=scaler)
        with private:
            lossfunc(model(x), y).backward()
        private.optimizer.step()
    for x, y in plain.loader:
        plain.step(plain.lossfunc(other(x), y))
    assert difference(model, other) < 1e-12


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_a_group_that_no_sample_reaches_has_norms_of_zero() -> None:
    """All samples are within its bound, which follows."""
    model, lossfunc = OneOfTwo(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 5), torch.randint(3, (12,)))
    private = make_private(
        *(model, lossfunc, optimizer, DataLoader(data, batch_size=4)),
        clipping=AdaptiveClipping(2.0**0.5, "per_layer", quantile=0.4, rate=0.3),
        noise_multiplier=0.0,
        sampling="shuffled",
        checks=0,
    )
    x, y = next(iter(private.loader))
    private.step(lossfunc(model(x), y))
    assert torch.equal(private.records[-1].norms["unused"], torch.zeros(4))
    assert private.clipping.bounds["unused"] == pytest.approx(exp(-0.3 * (1.0 - 0.4)))


def test_shuffled_batches_that_do_not_divide_the_data() -> None:
    """Twelve samples make two batches of six, not of five: that is what a sum is divided by."""
    private, *_ = privately(size=5, sampling="shuffled")
    assert (len(private.loader), private.loader.batch_size) == (2, 6)
    assert private.loader.sampler.expected == 6
