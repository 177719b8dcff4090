"""K-FAC and EKFAC against plain formulas with explicit matrices."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.errors import NotExtendedError, UsageError
from backpack_core.extensions import KFAC as FactorsOfBatch
from backpack_firstorder import divisors_of
from backpack_optimizers import EKFAC, KFAC, LevenbergMarquardt
from backpack_optimizers.factored import FIELD
from tests.devices import rng_state, set_rng_state
from tests.optimizers.problems import (
    KINDS,
    assert_near,
    closure_of,
    corrected,
    damped_product,
    factors,
    net,
    problem,
    solved,
    train,
    values,
)

EXACT: dict[str, Any] = {"mc_samples": None, "momentum": 0.0}
BOTH = pytest.mark.parametrize("kind", [KFAC, EKFAC])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("split", ["pi", "equal", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_solves_with_the_kronecker_product(kind: str, split: Any, reduction: str) -> None:
    model, lossfunc, x, y = problem(kind, reduction)
    wanted = []
    for p, f in zip(model.parameters(), factors(model, lossfunc, x, y), strict=True):
        step = solved(damped_product(f, 0.3, split), p.grad)
        wanted.append((p.detach() - 0.7 * step).flatten())
    train(KFAC(model, lr=0.7, damping=0.3, split=split, **EXACT), model, lossfunc, x, y)
    assert_near(values(model), torch.cat(wanted))


def test_factors_are_those_of_plain_formulas() -> None:
    """``[B, A]`` of a linear layer, and the block of its bias, by autograd."""
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    _, x, y = net()
    optimizer = KFAC(model, damping=1e-2, **EXACT)
    chances = model(x).detach().softmax(1)
    hessian = (torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)).sum(0) / 7
    train(optimizer, model, lossfunc, x, y)
    outer, inner = optimizer._averages[model.weight]
    assert_near(outer, hessian)
    assert_near(inner, x.T @ x / 7)
    assert_near(optimizer._averages[model.bias][0], hessian)


def test_drawn_factors_are_those_of_the_extension() -> None:
    model, lossfunc, x, y = problem()
    torch.manual_seed(3)
    with backpack(FactorsOfBatch(2, "expand")):
        lossfunc(model(x), y).backward()
    wanted = [p.kfac for p in model.parameters()]
    optimizer = KFAC(model, mc_samples=2)
    torch.manual_seed(3)
    train(optimizer, model, lossfunc, x, y)
    for average, found in zip(optimizer._averages.values(), wanted, strict=True):
        for a, b in zip(average, found, strict=True):
            assert_near(a, b)


def test_many_steps_against_a_plain_loop() -> None:
    """Averages, intervals, momentum and decay of weights."""
    model, lossfunc, x, y = problem()
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"factors_every": 2, "inverses_every": 3, "factor_decay": 0.6}
    optimizer = KFAC(model, None, 0.2, 0.1, 0.9, 0.05, split="exact", mc_samples=None, **settings)
    train(optimizer, model, lossfunc, x, y, 7)
    averages: list[Any] = []
    inverted: list[Any] = []
    buffers: dict[Any, Any] = {}
    for step in range(7):
        new = factors(twin, lossfunc, x, y)
        if step % 2 == 0:
            keep = min(1 - 1 / (step // 2 + 1), 0.6)
            averages = averages or new
            averages = [
                f.with_factors([keep * a + (1 - keep) * b for a, b in zip(f, n, strict=True)])
                for f, n in zip(averages, new, strict=True)
            ]
        if step % 3 == 0:
            inverted = [damped_product(f, 0.1, "exact") for f in averages]
        with torch.no_grad():
            for p, matrix in zip(twin.parameters(), inverted, strict=True):
                buffers[p] = 0.9 * buffers.get(p, 0.0) + solved(matrix, p.grad)
                p.mul_(1 - 0.2 * 0.05).sub_(0.2 * buffers[p])
    assert_near(values(model), values(twin))


def test_a_step_is_clipped_by_its_norm() -> None:
    model, lossfunc, x, y = problem()
    start = values(model)
    found = factors(model, lossfunc, x, y)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dense = torch.block_diag(*[damped_product(f, 0.1, "exact") for f in found])
    train(
        KFAC(model, lr=2.0, damping=0.1, split="exact", kl_clip=1e-3, **EXACT), *_all(model, x, y)
    )
    step = values(model) - start
    assert_near(step @ dense @ step, torch.tensor(1e-3))
    direction = torch.linalg.solve(dense, gradient)
    assert_near(step / step.norm(), -direction / direction.norm())


def _all(model: nn.Module, x: Any, y: Any) -> Any:
    return model, extend(nn.CrossEntropyLoss()), x, y


@pytest.mark.parametrize("kind", KINDS)
def test_ekfac_has_the_diagonal_in_the_basis(kind: str) -> None:
    """Three steps, with a change of the basis, against dense matrices."""
    model, lossfunc, x, y = problem(kind)
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"inverses_every": 2, "factor_decay": 0.7}
    optimizer = EKFAC(model, lr=0.3, damping=0.2, **EXACT, **settings)
    train(optimizer, model, lossfunc, x, y, 3)
    averages: list[Any] = []
    bases: list[Any] = []
    for step in range(3):
        if step:
            found = corrected(
                twin, lossfunc, x, y, dict(zip(twin.parameters(), bases, strict=True))
            )
            keep = min(1 - 1 / step, 0.7)
            bases = [
                b.with_values(keep * b.values + (1 - keep) * f.values)
                for b, f in zip(bases, found, strict=True)
            ]
        new = factors(twin, lossfunc, x, y)
        keep = min(1 - 1 / (step + 1), 0.7)
        averages = [a.moving_average(n, keep) for a, n in zip(averages or new, new, strict=True)]
        if step % 2 == 0:
            old, bases = bases, [f.eigenbasis() for f in averages]
            if old:
                bases = [_in_basis(b, o.dense()) for b, o in zip(bases, old, strict=True)]
        with torch.no_grad():
            for p, basis in zip(twin.parameters(), bases, strict=True):
                dense = basis.dense() + 0.2 * torch.eye(p.numel())
                p.sub_(0.3 * solved(dense, p.grad))
    assert_near(values(model), values(twin))


def _in_basis(basis: Any, dense: torch.Tensor) -> Any:
    """The diagonal of a matrix in a basis, as its values."""
    size = len(dense)
    eye = torch.eye(size).reshape(size, *basis.order.shape)
    vectors = basis.rotate(eye).T  # [P, P], eigenvectors in rows
    return basis.with_values(
        torch.einsum("ij,jk,ik->i", vectors, dense, vectors).reshape_as(basis.values)
    )


@BOTH
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_are_one_batch(kind: Any, reduction: str) -> None:
    """Of any sizes, one of them empty of a sample for no parameter."""
    model, lossfunc, x, y = problem("mlp", reduction)
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.1, "damping": 0.1, "mc_samples": None, "factors_every": 2}
    one, several = (kind(m, **settings) for m in (model, twin))
    for _ in range(3):
        train(one, model, lossfunc, x, y)
        several.zero_grad()
        for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
            with several.curvature():
                lossfunc(twin(x[part]), y[part]).backward()
        several.step()
    assert_near(values(model), values(twin), 1e-9)


@BOTH
def test_a_scaled_loss_gives_the_same_step(kind: Any) -> None:
    model, lossfunc, x, y = problem()
    twin = copy.deepcopy(model)
    train(kind(model, mc_samples=None), model, lossfunc, x, y)
    optimizer = kind(twin, mc_samples=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with optimizer.curvature(scaler.get_scale()):
        scaler.scale(lossfunc(twin(x), y)).backward()
    scaler.step(optimizer)
    assert_near(values(model), values(twin))


@BOTH
def test_half_precision_has_averages_in_single(kind: Any) -> None:
    model, lossfunc, x, y = problem()
    model, x = model.bfloat16(), x.bfloat16()
    optimizer = kind(model, lr=0.03, kl_clip=1e-3)
    losses = train(optimizer, model, lossfunc, x, y, 12)
    assert losses[-1] < losses[0]
    assert all(f.dtype is torch.float32 for f in optimizer._averages.values())
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())


@BOTH
def test_a_closure_is_the_same_as_a_block(kind: Any) -> None:
    model, lossfunc, x, y = problem()
    twin = copy.deepcopy(model)
    losses = train(kind(model, mc_samples=None), model, lossfunc, x, y, 3)
    optimizer = kind(twin, mc_samples=None)
    closure = closure_of(optimizer, twin, lossfunc, x, y)
    assert [optimizer.step(closure).item() for _ in range(3)] == pytest.approx(losses, abs=1e-12)
    assert_near(values(model), values(twin))


def test_what_has_no_factors_steps_by_adamw() -> None:
    """A group, a parameter that an operation uses, and a factor that would be too large."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))
            self.wide = nn.Linear(4, 30)
            self.last = nn.Linear(30, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.wide(x @ self.table.exp()).tanh())

    _, x, y = net()
    model, lossfunc = extend(Added()), extend(nn.CrossEntropyLoss())
    twin = copy.deepcopy(model)
    rest = [model.table, *model.wide.parameters()]
    groups = [{"params": rest}, {"params": model.last.parameters(), "method": "adam"}]
    optimizer = KFAC(model, groups, lr=0.5, max_size=20, weight_decay=0.1)
    train(optimizer, model, lossfunc, x, y, 4)
    assert optimizer.without_factors == [name for name, _ in twin.named_parameters()]
    adam = torch.optim.AdamW(twin.parameters(), lr=0.005, weight_decay=10.0)
    for _ in range(4):
        adam.zero_grad()
        lossfunc(twin(x), y).backward()
        adam.step()
    assert_near(values(model), values(twin))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(KFAC, {}), (KFAC, {"split": "exact"}), (EKFAC, {}), (KFAC, {"max_size": 4})],
)
def test_a_state_goes_on_exactly(kind: Any, settings: Any) -> None:
    def fresh() -> Any:
        model, lossfunc, x, y = problem()
        optimizer = kind(model, lr=0.1, inverses_every=3, factors_every=2, **settings)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return model, lossfunc, x, y, optimizer, schedule

    def run(model: Any, lossfunc: Any, x: Any, y: Any, optimizer: Any, schedule: Any) -> None:
        for _ in range(4):
            train(optimizer, model, lossfunc, x, y)
            schedule.step()

    first = fresh()
    torch.manual_seed(7)
    run(*first)
    model, *_, optimizer, schedule = first
    file = io.BytesIO()
    states = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
    torch.save([*states, rng_state()], file)
    run(*first)
    second = fresh()
    file.seek(0)
    *states, random = torch.load(file)
    for thing, state in zip((second[0], second[4], second[5]), states, strict=True):
        thing.load_state_dict(state)
    set_rng_state(random)
    run(*second)
    assert torch.equal(values(first[0]), values(second[0]))


@BOTH
def test_a_step_under_autocast_is_the_same(kind: Any) -> None:
    """The precision is chosen for the forward pass."""
    found = []
    for is_on in (False, True):
        model, x, y = net()
        model, x = extend(model.float()), x.float()
        lossfunc = extend(nn.CrossEntropyLoss())
        optimizer = kind(model, lr=0.1, inverses_every=1, **EXACT)
        for part in (slice(0, None, 2), slice(1, None, 2)):
            optimizer.zero_grad()
            with optimizer.curvature():
                lossfunc(model(x[part]), y[part]).backward()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=is_on):
                optimizer.step()
        found.append(values(model))
    assert torch.equal(*found)


def test_damping_adapts_by_how_well_the_model_predicts() -> None:
    rule = LevenbergMarquardt(shrink=0.5, smallest=0.1, largest=8.0)
    assert rule(1.0, -0.9, -1.0) == 0.5
    assert rule(1.0, -0.5, -1.0) == 1.0
    assert rule(1.0, 0.3, -1.0) == 2.0
    assert rule(1.0, float("nan"), -1.0) == 2.0
    assert rule(1.0, -1.0, 0.0) == 2.0
    assert rule(1.0, 0.0, 0.0) == 1.0
    assert rule(0.1, -1.0, -1.0) == 0.1
    assert rule(8.0, 1.0, -1.0) == 8.0


@BOTH
@pytest.mark.parametrize(("lr", "damping"), [(0.01, 0.05), (30.0, 0.2)])
def test_damping_adapts_in_a_step(kind: Any, lr: float, damping: float) -> None:
    """By the quadratic model of plain formulas; the second look has the same dropout."""
    model, x, y = net()
    model = extend(nn.Sequential(nn.Dropout(0.5), *model))
    lossfunc = extend(nn.CrossEntropyLoss())
    rule = LevenbergMarquardt(every=1, shrink=0.5)
    optimizer = kind(model, lr=lr, damping=0.1, adapt=rule, **EXACT)
    start = values(model)
    seen: list[torch.Tensor] = []
    random = rng_state()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen.append(model[0](torch.ones(50)))
        loss = lossfunc(model(x), y)
        loss.backward()
        return loss

    before = float(optimizer.step(closure))
    assert torch.equal(*seen)
    step = values(model) - start
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dense = torch.block_diag(*_dense(optimizer, kind))
    predicted = float(gradient @ step + 0.5 * step @ dense @ step)
    set_rng_state(random)
    change = closure().item() - before
    assert optimizer.damping == rule(0.1, change, predicted)
    assert optimizer.damping == damping


@BOTH
def test_damping_stays_while_the_rate_is_zero(kind: Any) -> None:
    """As at the first steps of a schedule: a step of length zero compares nothing."""
    model, x, y = net()
    extend(model)
    lossfunc = extend(nn.CrossEntropyLoss())
    optimizer = kind(model, lr=0.0, damping=0.1, adapt=LevenbergMarquardt(every=1), **EXACT)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = lossfunc(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.damping == 0.1


def _dense(optimizer: Any, kind: Any) -> list[torch.Tensor]:
    """``F + damping · I`` of each parameter."""
    if kind is KFAC:
        return [damped_product(f, 0.1, "exact") for f in optimizer._averages.values()]
    found = [basis.dense() for basis in optimizer._bases.values()]
    return [dense + 0.1 * torch.eye(len(dense)) for dense in found]


class TestRefusals:
    def test_a_model_that_is_not_extended(self) -> None:
        with pytest.raises(UsageError, match="must be extended first"):
            KFAC(net()[0])

    def test_parameters_in_the_place_of_the_model(self) -> None:
        with pytest.raises(UsageError, match="takes the model"):
            KFAC(net()[0].parameters())  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            *(("lr", -1.0), ("damping", 0.0), ("damping", float("nan")), ("momentum", -0.1)),
            *(("factors_every", 0), ("inverses_every", 1.5), ("split", "Pi"), ("method", "sgd")),
            *(("factor_decay", 1.0), ("factor_decay", -0.1), ("kl_clip", 0.0), ("mc_samples", 0)),
            *(("weight_sharing", "x"), ("adapt", LevenbergMarquardt), ("adapt", 5)),
            ("max_size", "a"),
        ],
    )
    def test_settings(self, setting: str, value: Any) -> None:
        with pytest.raises(UsageError, match=setting):
            KFAC(
                problem()[0],
                **({"adam_betas": (value, 0.9)} if setting == "beta" else {setting: value}),
            )

    @BOTH
    @pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), "a"])
    def test_damping_that_is_set(self, kind: Any, value: Any) -> None:
        optimizer = kind(problem()[0], damping=0.1)
        with pytest.raises(UsageError, match="damping must be a number that is positive"):
            optimizer.damping = value
        assert optimizer.damping == 0.1

    def test_beta(self) -> None:
        with pytest.raises(UsageError, match="adam_betas must be a number below 1"):
            KFAC(problem()[0], adam_betas=(2.0, 0.9))

    def test_a_group_that_is_refused_is_not_added(self) -> None:
        model, *_ = problem()
        first, *others = model.parameters()
        optimizer = KFAC(model, [first])
        model = problem()[0]
        with pytest.raises(UsageError, match="did you mean 'adam_betas'"):
            KFAC(model, [{"params": [*model.parameters()], "betas": (0.9, 0.99)}])
        for wrong in ({"momentum": -1.0}, {"adam_betas": (0.9, 1.0)}, {"adam_eps": -1.0}):
            with pytest.raises(UsageError, match="must be a number"):
                optimizer.add_param_group({"params": others, **wrong})
            assert len(optimizer.param_groups) == 1

    def test_groups_of_modules_that_were_added_since(self) -> None:
        model, lossfunc, x, y = problem()
        first, *_ = model.parameters()
        optimizer = KFAC(model, [first], mc_samples=None)
        train(optimizer, model, lossfunc, x, y)
        model.append(extend(nn.Linear(3, 3)))
        before = values(model)
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.5})
        train(optimizer, model, lossfunc, x, y)
        assert optimizer.name_of(model[4].weight) == "4.weight"
        assert optimizer.without_factors == []
        assert bool((values(model) != before)[-12:].all())

    def test_a_group_between_a_pass_and_its_step(self) -> None:
        """The pass counts; the new parameters have no factors yet, and step by AdamW."""
        first, second = problem()[0], problem()[0]
        _, lossfunc, x, y = problem()
        for model, is_late in ((first, False), (second, True)):
            some = [p for name, p in model.named_parameters() if name.startswith("0")]
            rest = [p for name, p in model.named_parameters() if not name.startswith("0")]
            late = {"params": rest, "method": "adam"}
            optimizer = KFAC(model, [{"params": some}], mc_samples=None)
            if not is_late:
                optimizer.add_param_group(late)
            for part in (slice(0, 2), slice(2, 7)):
                with optimizer.curvature():
                    lossfunc(model(x[part]), y[part]).backward()
                if is_late and len(optimizer.param_groups) == 1:
                    optimizer.add_param_group(late)
            optimizer.step()
        assert_near(values(second), values(first))

    def test_groups_without_parameters(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model, [{"params": []}])
        before = values(model)
        train(optimizer, model, lossfunc, x, y)
        assert torch.equal(values(model), before)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"metod": "adam"}, "did you mean 'method'"),
            ({"damping": 0.1}, "one for all groups"),
            ({"dampng": 0.1}, "did you mean 'damping'"),
            ({"inverses_every": 2}, "one for all groups"),
            ({"split": "exact"}, "one for all groups"),
            ({"maximize": True}, "'maximize' is a setting of optimizers of torch"),
            ({"adam_betas": 0.9}, "must be a pair"),
            ({"adam_betas": (0.9,)}, "must be a pair"),
        ],
    )
    def test_a_setting_that_a_group_has_not(self, wrong: Any, message: str) -> None:
        model, *_ = problem()
        with pytest.raises(UsageError, match=message):
            KFAC(model, [{"params": model.parameters(), **wrong}])

    def test_groups_that_a_schedule_was_at(self) -> None:
        """What it leaves there is no setting, and no misspelt one."""
        model, *_ = problem()
        optimizer = KFAC(model)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        assert "max_momentum" in KFAC(model, optimizer.param_groups).param_groups[0]

    @BOTH
    def test_schedules_cycle_the_momentum(self, kind: Any) -> None:
        """They would rather take betas, which belong to the parameters without factors."""
        optimizer = kind(problem()[0])
        group = optimizer.param_groups[0]
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, base_momentum=0.5, max_momentum=0.95
        )
        assert (group["momentum"], group["adam_betas"]) == (0.95, (0.9, 0.999))
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            schedule.step()
        assert 0.5 < group["momentum"] < 0.95

    def test_divisors_of_parameters_without_factors(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model, [{"params": [*model.parameters()], "method": "adam"}])
        optimizer.step(closure_of(optimizer, model, lossfunc, x, y))
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            square = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
            found = divisors_of(optimizer, model)[name]
            torch.testing.assert_close(found, square.sqrt() + 1e-8)

    @BOTH
    def test_a_block_in_a_closure(self, kind: Any) -> None:
        model, lossfunc, x, y = problem()
        optimizer = kind(model)
        closure = closure_of(optimizer, model, lossfunc, x, y)

        def with_block() -> Any:
            with optimizer.curvature():
                return closure()

        with pytest.raises(UsageError, match="out of the closure"):
            optimizer.step(with_block)
        optimizer.step(closure)

    def test_a_tensor_of_another_model(self) -> None:
        with pytest.raises(UsageError, match="not a parameter of the model"):
            KFAC(problem()[0], net()[0].parameters())

    @BOTH
    def test_a_pass_outside_of_a_block(self, kind: Any) -> None:
        model, lossfunc, x, y = problem()
        optimizer = kind(model)
        lossfunc(model(x), y).backward()
        with pytest.raises(UsageError, match="with optimizer"):
            optimizer.step()

    def test_outside_of_a_block_where_no_factors_are_due(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model, factors_every=2)
        train(optimizer, model, lossfunc, x, y)
        before = values(model)
        lossfunc(model(x), y).backward()
        optimizer.step()
        assert not torch.equal(before, values(model))

    @BOTH
    @pytest.mark.parametrize("every", [1, 2])
    def test_a_loss_that_is_not_finite_changes_nothing(self, kind: Any, every: int) -> None:
        """Also where the next step needs no factors."""
        model, lossfunc, x, y = problem()
        optimizer = kind(model, mc_samples=None, factors_every=every)
        train(optimizer, model, lossfunc, x, y)
        before = values(model)
        with pytest.raises(UsageError, match="is not finite"):
            train(optimizer, model, lossfunc, x * float("inf"), y)
        assert torch.equal(before, values(model))
        train(optimizer, model, lossfunc, x, y)
        assert values(model).isfinite().all()

    def test_no_closure_to_adapt_by(self) -> None:
        with pytest.raises(UsageError, match="pass a closure"):
            KFAC(problem()[0], adapt=LevenbergMarquardt()).step()

    def test_losses_that_do_not_join(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model)
        with optimizer.curvature():
            lossfunc(model(x), y).backward()
        total = extend(nn.CrossEntropyLoss(reduction="sum"))
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(UsageError, match="same extended loss"), optimizer.curvature():
            total(model(x), y).backward()
        with pytest.raises(NotExtendedError), optimizer.curvature():
            sum(p.sum() for p in model.parameters()).backward()
        for p, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad, gradient)
            assert not hasattr(p, FIELD)

    def test_a_pass_that_fails_leaves_gradients(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model)
        with optimizer.curvature():
            lossfunc(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError), optimizer.curvature():
            _ = 1 / 0
        for p, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad, gradient)

    def test_states_of_others(self) -> None:
        model, lossfunc, x, y = problem()
        optimizer = KFAC(model)
        train(optimizer, model, lossfunc, x, y)
        with pytest.raises(UsageError, match="no curvature"):
            EKFAC(model).load_state_dict(optimizer.state_dict())
        with pytest.raises(UsageError, match="no curvature"):
            optimizer.load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())

    @pytest.mark.parametrize("kind", [KFAC, EKFAC])
    @pytest.mark.parametrize("sizes", [(5, 7), (5, 7, 6)])
    def test_a_state_of_another_model_changes_nothing(self, kind: Any, sizes: Any) -> None:
        """The optimizer goes on as if it had not been loaded."""
        torch.manual_seed(0)
        pairs = zip(sizes, [*sizes[1:], 3], strict=True)
        net = extend(nn.Sequential(*[nn.Linear(*pair) for pair in pairs]))
        other, lossfunc, y = kind(net, lr=0.5), extend(nn.CrossEntropyLoss()), torch.tensor([0, 1])
        train(other, net, lossfunc, torch.randn(2, 5), y)
        found = []
        for is_loaded in (False, True):
            model, lossfunc, x, y = problem()
            optimizer = kind(model, mc_samples=None)
            train(optimizer, model, lossfunc, x, y)
            if is_loaded:
                with pytest.raises(UsageError, match="of the same model"):
                    optimizer.load_state_dict(other.state_dict())
            train(optimizer, model, lossfunc, x, y)
            found.append([p.detach() for p in model.parameters()])
        for left, right in zip(*found, strict=True):
            assert torch.equal(left, right)
