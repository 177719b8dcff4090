"""Gauss-Newton steps against dense matrices."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core.errors import UsageError
from backpack_optimizers import GaussNewton, LevenbergMarquardt
from backpack_secondorder.over_data import GGN
from tests.optimizers.problems import assert_near, net, values

TIGHT: dict[str, Any] = {"rtol": 1e-12, "max_iterations": 500}


def least_squares() -> tuple[nn.Module, nn.Module, list[Any], torch.Tensor]:
    """A linear problem in batches of several sizes, and its solution."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randn(30, 2)
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    solution = torch.linalg.lstsq(ones, y).solution
    wanted = torch.cat([solution[:4].T.flatten(), solution[4]])
    return nn.Linear(4, 2), nn.MSELoss(), [(x[:20], y[:20]), (x[20:], y[20:])], wanted


def test_one_step_solves_linear_least_squares() -> None:
    model, lossfunc, batches, wanted = least_squares()
    optimizer = GaussNewton(model, lossfunc, damping=0.0, **TIGHT)
    before = optimizer.step(batches)
    assert_near(values(model), wanted)
    assert optimizer.step(batches) < before


def test_a_step_is_that_of_the_dense_matrix() -> None:
    """Of micro-batches; the loss is that of all of them, and weights decay."""
    model, x, y = net()
    lossfunc = nn.CrossEntropyLoss()
    ggn = GGN(model, lossfunc, [(x, y)])
    dense = ggn.dense() + 0.1 * torch.eye(ggn.shape[0])
    gradient = torch.cat([g.flatten() for g in ggn.gradient()])
    start, loss = values(model), lossfunc(model(x), y)
    wanted = start * (1 - 0.5 * 0.2) - 0.5 * torch.linalg.solve(dense, gradient)
    optimizer = GaussNewton(model, lossfunc, None, 0.5, 0.1, 0.2, **TIGHT)
    found = optimizer.step([(x[:3], y[:3]), (x[3:], y[3:])])
    assert_near(found, loss.detach())
    assert_near(values(model), wanted)


def test_a_step_is_halved_until_the_loss_falls() -> None:
    model, lossfunc, batches, _ = least_squares()
    start = values(model)
    before = GaussNewton(model, lossfunc, lr=5.0, damping=0.0, **TIGHT).step(batches)
    half = values(model)
    model.load_state_dict(_state(model, start))
    after = GaussNewton(model, lossfunc, lr=1.25, damping=0.0, **TIGHT)
    after.step(batches)
    assert_near(values(model), half)
    assert after.step(batches) < before


def _state(model: nn.Module, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    sizes = [p.numel() for p in model.parameters()]
    parts = zip(model.named_parameters(), flat.split(sizes), strict=True)
    return {name: part.reshape(p.shape) for (name, p), part in parts}


def test_damping_shrinks_where_the_model_is_right() -> None:
    model, lossfunc, batches, wanted = least_squares()
    adapt = LevenbergMarquardt(every=2, shrink=0.1)
    optimizer = GaussNewton(model, lossfunc, damping=1.0, adapt=adapt, **TIGHT)
    for damping in (1.0, 0.1, 0.1, 0.01):
        optimizer.step(batches)
        assert optimizer.damping == pytest.approx(damping)
    assert_near(values(model), wanted, 1e-2)


def test_a_group_of_adam_and_a_start_from_the_last_direction() -> None:
    model, x, y = net()
    twin = copy.deepcopy(model)
    lossfunc = nn.CrossEntropyLoss()
    groups = [
        {"params": model[0].parameters(), "method": "adam"},
        {"params": [*model[1].parameters(), *model[3].parameters()]},
    ]
    optimizer = GaussNewton(
        model, lossfunc, groups, damping=0.1, adam_scale=0.01, warm_start=0.9, **TIGHT
    )
    optimizer.step([(x, y)])
    adam = torch.optim.AdamW(twin[0].parameters(), lr=0.01, weight_decay=0.0)
    lossfunc(twin(x), y).backward()
    adam.step()
    assert_near(values(model[0]), values(twin[0]))
    assert optimizer.solution is not None
    first = optimizer.solution.iterations
    optimizer._solver["rtol"] = 1e-1
    optimizer.step([(x, y)])
    assert optimizer.solution.iterations < first


def test_a_state_goes_on_exactly() -> None:
    def fresh() -> tuple[nn.Module, GaussNewton, Any]:
        model, x, y = net()
        adapt = LevenbergMarquardt(every=1)
        settings: dict[str, Any] = {"max_iterations": 3, "warm_start": 0.9, "adapt": adapt}
        return model, GaussNewton(model, nn.CrossEntropyLoss(), **settings), [(x, y)]

    model, optimizer, batches = fresh()
    for _ in range(2):
        optimizer.step(batches)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    other, second, _ = fresh()
    file.seek(0)
    states = torch.load(file)
    other.load_state_dict(states[0])
    second.load_state_dict(states[1])
    for _ in range(2):
        optimizer.step(batches)
        second.step(batches)
    assert torch.equal(values(model), values(other))


class TwoPrecisions(nn.Module):
    """The first layer is in single precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5).float(), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x.float()).tanh().double())
        return out


def test_a_group_of_adam_may_have_another_precision() -> None:
    _, x, y = net()
    model, lossfunc = TwoPrecisions(), nn.CrossEntropyLoss()
    plain = copy.deepcopy(model)
    groups = [
        {"params": model.first.parameters(), "method": "adam", "adam_scale": 0.1},
        {"params": model.last.parameters()},
    ]
    GaussNewton(model, lossfunc, groups).step([(x, y)])
    adam = torch.optim.AdamW(plain.first.parameters(), lr=0.1, weight_decay=0.0)
    newton = GaussNewton(plain, lossfunc, plain.last.parameters())
    lossfunc(plain(x), y).backward()
    gradients = [p.grad.clone() for p in plain.first.parameters() if p.grad is not None]
    newton.step([(x, y)])
    for p, gradient in zip(plain.first.parameters(), gradients, strict=True):
        p.grad = gradient
    adam.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


class Failing:
    """Batches that cannot be read in one of the passes over them."""

    def __init__(self, batches: list[Any], after: int = 10**9) -> None:
        self.batches, self.left = batches, after

    def __iter__(self) -> Iterator[Any]:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError
        return iter(self.batches)


def test_a_step_that_fails_on_the_way_moves_nothing() -> None:
    model, lossfunc, batches, _ = least_squares()
    whole, before = Failing(batches), values(model)
    GaussNewton(copy.deepcopy(model), lossfunc).step(whole)
    for after in range(10**9 - whole.left):
        with pytest.raises(ZeroDivisionError):
            GaussNewton(model, lossfunc).step(Failing(batches, after))
        assert torch.equal(before, values(model))


def test_a_model_that_is_converted_keeps_its_warm_start() -> None:
    model, lossfunc, batches, _ = least_squares()
    optimizer = GaussNewton(model, lossfunc, warm_start=0.9, rtol=1e-6)
    optimizer.step(batches)
    model.float()
    optimizer.step([(x.float(), y.float()) for x, y in batches])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Rooted(nn.Module):
    """Its value is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.zeros(())), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + self.scale.sqrt()
        return result


class TestRefusals:
    def test_parameters_of_two_precisions(self) -> None:
        _, x, y = net()
        optimizer = GaussNewton(TwoPrecisions(), nn.CrossEntropyLoss())
        with pytest.raises(UsageError, match=r"\(first.weight, last.weight\).*method=\"adam\""):
            optimizer.step([(x, y)])

    def test_parameters_that_were_replaced(self) -> None:
        model, x, y = net()
        optimizer = GaussNewton(model, nn.CrossEntropyLoss())
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        with pytest.raises(UsageError, match="is no longer the model's"):
            optimizer.step([(x, y)])

    @pytest.mark.parametrize("batches", [None, lambda: 0.0, 3])
    def test_no_batches(self, batches: Any) -> None:
        model, lossfunc, _, _ = least_squares()
        with pytest.raises(UsageError, match="takes batches"):
            GaussNewton(model, lossfunc).step(batches)

    def test_a_loss_that_is_not_finite(self) -> None:
        model, lossfunc, batches, _ = least_squares()
        before = values(model)
        with pytest.raises(UsageError, match="no step was made"):
            GaussNewton(model, lossfunc).step([(batches[0][0] * float("nan"), batches[0][1])])
        assert torch.equal(before, values(model))

    @pytest.mark.parametrize("warm_start", [0.0, 0.9])
    def test_a_gradient_that_is_not_finite(self, warm_start: float) -> None:
        """Also that of a parameter that steps by AdamW."""
        _, lossfunc, batches, _ = least_squares()
        model = Rooted()
        groups = [{"params": [model.scale], "method": "adam"}, {"params": model.layer.parameters()}]
        optimizer, before = (
            GaussNewton(model, lossfunc, groups, warm_start=warm_start),
            values(model),
        )
        with pytest.raises(UsageError, match="The gradient of the parameter 'scale' is not finite"):
            optimizer.step(batches)
        assert torch.equal(before, values(model))

    def test_dropout(self) -> None:
        model, lossfunc, batches, _ = least_squares()
        with pytest.raises(UsageError, match=r"call model\.eval"):
            GaussNewton(nn.Sequential(nn.Dropout(), model), lossfunc).step(batches)

    @pytest.mark.parametrize(
        "settings",
        [{"max_iterations": 0}, {"rtol": -1.0}, {"halvings": -1}, {"adam_betas": (1.0, 0.9)}],
    )
    def test_settings(self, settings: Any) -> None:
        model, lossfunc, _, _ = least_squares()
        with pytest.raises(UsageError, match=next(iter(settings)).rstrip("s")):
            GaussNewton(model, lossfunc, **settings)
