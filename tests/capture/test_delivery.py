"""Where results of a replay go, and what it may be surrounded by."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CaptureWarning, capture
from backpack_core import backpack, disable, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import KFAC, BatchGrad, ClippedSumGrad, Variance
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense
from tests.capture.nets import NETS, mlp
from tests.capture.twins import Twins, same


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 5), torch.randint(3, (count,))


class LargestEntry(FirstOrderExtension):
    """Somebody's."""

    savefield = "largest"
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        return dense(product).abs().transpose(0, 1).flatten(1).amax(1)


def test_an_extension_of_somebody() -> None:
    twins = Twins(mlp(), [LargestEntry(), Variance()])
    twins.train([batch() for _ in range(8)])
    assert twins.replays == 5


def test_results_of_one_replay_are_not_those_of_the_next() -> None:
    twins = Twins(mlp(), [BatchGrad(), KFAC()])
    twins.train([batch() for _ in range(6)])
    kept = []
    for _ in range(3):
        twins.run(*batch())
        weight = twins.model[0].weight
        kept.append((weight.grad, weight.grad_batch, *weight.kfac))
    copies = [tuple(t.clone() for t in results) for results in kept]
    twins.run(*batch())
    same(kept, copies)
    assert len({t.data_ptr() for results in kept for t in results}) == 12


def test_results_have_their_methods() -> None:
    twins = Twins(mlp(), [KFAC()])
    twins.train([batch() for _ in range(8)])
    ours, right = twins.model[0].weight, twins.other[0].weight
    assert type(ours.kfac) is type(right.kfac)
    vector = torch.rand(ours.shape)
    same(ours.kfac.solve(vector, damping=0.1), right.kfac.solve(vector, damping=0.1))
    values = [(0.5 * p.kfac + p.kfac).eigenbasis().values for p in (ours, right)]
    same(*values)


class Switched(nn.Module):
    """Leaves a layer out, if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.uses_b = nn.Linear(5, 3), nn.Linear(3, 3), True

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)) if self.uses_b else self.a(x)
        return found


def test_stale_results_are_removed() -> None:
    """As the engine does: a parameter that this form gives nothing for has nothing."""
    twins = Twins(Switched(), [BatchGrad()])
    for number in range(24):
        twins.model.uses_b = twins.other.uses_b = number % 2 == 0
        twins.run(*batch())
        assert ("grad_batch" in twins.model.b.weight.__dict__) == (number % 2 == 0)
    assert twins.replays >= 10


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_that_takes_no_part_keeps_its_results(kept: bool) -> None:
    """As with the engine, for two models that are trained in turn."""
    models, lossfunc = (extend(mlp()), extend(mlp())), extend(nn.CrossEntropyLoss())
    step = capture(
        lambda number, x, y: lossfunc(models[number](x), y), *models, lossfunc, BatchGrad()
    )
    for number in (0, 1) * 8:
        trained, other = models[number], models[1 - number]
        if not kept:
            for parameter in other.parameters():
                vars(parameter).pop("grad_batch", None)
        before = [vars(parameter).get("grad_batch") for parameter in other.parameters()]
        step(number, *batch())
        after = [vars(parameter).get("grad_batch") for parameter in other.parameters()]
        assert all(one is two for one, two in zip(before, after, strict=True))
        assert all("grad_batch" in vars(parameter) for parameter in trained.parameters())
    assert step.report().count("5 replays, 3 compared") == 2, step.report()


def test_a_gradient_that_is_not_dense_is_left_to_the_engine() -> None:
    twins = Twins(mlp(), [BatchGrad()])
    twins.train([batch() for _ in range(6)])
    for model in (twins.model, twins.other):
        weight = model[0].weight
        weight.grad = torch.ones_like(weight).requires_grad_()
    replays = twins.replays
    x, y = batch()
    twins.step(x, y), twins.engine(x, y)
    assert twins.replays == replays
    assert torch.equal(twins.model[0].weight.grad, twins.other[0].weight.grad)


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.filterwarnings("ignore")
def test_autocast(place: str) -> None:
    def write(model: nn.Module, lossfunc: nn.Module) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(
                torch.get_default_device().type, torch.bfloat16, enabled=place == "inside"
            ):
                out = model(x)
            return lossfunc(out.float(), y)

        def whole(x: Tensor, y: Tensor) -> Tensor:
            with autocast(False):
                scale = (x @ x.T).mean()
            return lossfunc(model(x).float(), y) * scale

        return step if place == "inside" else whole

    torch.set_default_dtype(torch.float32)
    twins = Twins(mlp(), [BatchGrad(), KFAC()], write)
    for _ in range(8):
        with torch.autocast(
            torch.get_default_device().type, torch.bfloat16, enabled=place == "outside"
        ):
            twins.run(*batch())
        twins.update()
    assert twins.replays == 5
    assert "bfloat16" in twins.step.code


def test_only_some_graphs_are_kept() -> None:
    twins = Twins(mlp(), [BatchGrad()])
    for count in range(2, 14):
        for _ in range(5):
            twins.run(*batch(count))
    lines = twins.step.report().splitlines()[1:]
    assert len(lines) == 8
    assert "float64[13, 5]" in lines[-1]
    twins.run(*batch(6))  # the oldest of those that are there
    for _ in range(5):
        twins.run(*batch(30))
    assert "[6, 5]" in twins.step.report()
    assert "[7, 5]" not in twins.step.report()


def test_threads_take_turns() -> None:
    twins = Twins(mlp(), [BatchGrad()])
    batches = [batch() for _ in range(6)]
    twins.train(batches)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for x, y in batches:
                twins.step(x, y)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    assert twins.replays == 15


def test_inside_of_disable_the_engine_speaks() -> None:
    twins = Twins(mlp(), [BatchGrad()])
    twins.train([batch() for _ in range(6)])
    with disable(), pytest.raises(BackpackError, match="disable"):
        twins.step(*batch())
    twins.run(*batch())


def test_inside_of_another_block() -> None:
    twins = Twins(mlp(), [BatchGrad()])
    with backpack():
        twins.train([batch() for _ in range(8)])
    assert twins.replays == 5


def test_two_steps_of_one_model() -> None:
    """Each stores what it is asked for."""
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    function: Any = lambda x, y: lossfunc(model(x), y)  # noqa: E731
    first = capture(function, model, lossfunc, BatchGrad())
    second = capture(function, model, lossfunc, ClippedSumGrad(0.1))
    for _ in range(9):
        x, y = batch()
        first(x, y), second(x, y)
    weight = model[0].weight
    found = weight.grad_batch, weight.grad_clipped
    for extension in (BatchGrad(), ClippedSumGrad(0.1)):
        with backpack(extension):
            function(x, y).backward()
    same(found, (weight.grad_batch, weight.grad_clipped))


def test_an_optimiser_and_a_copy() -> None:
    """Parameters keep their identity; a copy of the model is another one."""
    make, draw = NETS["residual"]
    twins = Twins(make(), [BatchGrad()])
    optimisers = [torch.optim.Adam(m.parameters()) for m in (twins.model, twins.other)]
    for _ in range(9):
        twins.run(*draw(4))
        for optimiser in optimisers:
            optimiser.step()
    assert twins.replays == 6
    copied = copy.deepcopy(twins.model)
    with backpack(BatchGrad()):
        twins.lossfunc(copied(draw(4)[0]), draw(4)[1]).backward()
    assert copied.a.weight.grad_batch.shape == (4, 5, 5)
    twins.run(*draw(4))


def test_the_engine_removes_what_replays_stored() -> None:
    """Also if its last pass over the model had the same plan."""
    twins = Twins(Switched(), [BatchGrad()])
    model, weight = twins.model, twins.model.b.weight
    twins.train([batch() for _ in range(7)])  # three replays
    model.uses_b = False
    for _ in range(8):
        x, y = batch()
        with backpack(BatchGrad()):
            twins.lossfunc(model(x), y).backward()
        assert "grad_batch" not in weight.__dict__
    model.uses_b = True
    for _ in range(5):
        twins.step(*batch())  # of which some are not compared
        assert "grad_batch" in weight.__dict__
        model.uses_b = False
        with backpack(BatchGrad()):
            twins.lossfunc(model(x), y).backward()
        assert "grad_batch" not in weight.__dict__
        model.uses_b = True


def test_a_step_that_looks_at_gradients() -> None:
    """Those of the step before are there, also while it is recorded."""

    def write(model: nn.Module, lossfunc: nn.Module) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            grad = model[0].weight.grad
            more = 0.0 if grad is None else grad.sum()
            return lossfunc(model(x), y) * (1 + more)

        return step

    twins = Twins(mlp(), [BatchGrad()], write)
    for _ in range(2):
        twins.run(*batch(), keeps=True)
    with pytest.warns(CaptureWarning, match="uses the gradient that an earlier step has left"):
        twins.run(*batch(), keeps=True)
    for _ in range(3):
        twins.run(*batch(), keeps=True)
    assert twins.replays == 0
