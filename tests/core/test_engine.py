"""Scales, losses, frozen parts, shapes, and a clean pass after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import LayerRule, View, backpack, extend
from backpack_core.errors import (
    PluginCodeError,
    ShapeError,
    UnsupportedError,
)
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import temporary_plugin
from tests import oracle
from tests.cases import Net, Problem, classification, mlp


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_scaled_loss(factor: float) -> None:
    problem = classification(mlp(), (3,))
    scaled = Problem(
        problem.model,
        problem.inputs,
        Net(lambda net, out, y: factor * F.cross_entropy(out, y)),
        problem.target,
    )
    gradients = scaled.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in scaled.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        (factor * loss).backward()
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


def test_negative_loss_has_no_square_root() -> None:
    loss = classification(mlp(), (3,)).loss()
    with pytest.raises(UnsupportedError, match="negative"), backpack(DiagGGNExact()):
        (-loss).backward()


def test_gradient_accumulation() -> None:
    model = mlp()
    parts = [classification(model, (3,), batch) for batch in (2, 4)]
    gradients = [p.expected(oracle.individual_gradients) for p in parts]
    model.zero_grad()
    for part, expected in zip(parts, gradients, strict=True):
        loss = part.loss()
        with backpack(BatchGrad()):
            (loss / 2).backward()
        part.compare("grad_batch", [g / 2 for g in expected])
    total = [(a.sum(0) + b.sum(0)) / 2 for a, b in zip(*gradients, strict=True)]
    parts[0].compare("grad", total)


def test_frozen_first_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3))
    for p in model[:3].parameters():
        p.requires_grad_(False)
    classification(model, (3,)).check()


def test_frozen_layer_in_the_middle() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[1].requires_grad_(False)
    classification(model, (3,)).check()


@pytest.mark.parametrize("leaf", [True, False])
def test_input_that_requires_a_gradient(leaf: bool) -> None:
    problem = classification(nn.Sequential(nn.Identity(), *mlp()), (3,))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    x = problem.inputs[0].requires_grad_()
    problem.inputs = (x if leaf else torch.sin(torch.asin(x / 10)) * 10,)
    problem.run(DiagGGNExact(), BatchGrad())
    problem.compare("diag_ggn_exact", expected)
    assert x.grad is not None


def test_scalar_weights_and_other_shapes() -> None:
    """A classifier of two inputs of different shapes."""
    model = Net(
        lambda net, x, image: net.head(torch.cat([net.a(x), net.conv(image).flatten(1)], 1)),
        a=nn.Linear(3, 2),
        conv=nn.Conv2d(1, 2, 2),
        head=nn.Linear(10, 3),
    )
    problem = classification(model, (3,))
    problem.inputs = (*problem.inputs, torch.randn(3, 1, 3, 3))
    problem.check()


def test_positions_merged_into_the_batch() -> None:
    """[N, T, C] flattened to [N*T, C], and something of which nobody knows whose it is."""
    model, lossfunc = extend(nn.Linear(3, 4)), extend(nn.CrossEntropyLoss())
    logits = model(torch.randn(2, 5, 3)).flatten(0, 1)
    loss = lossfunc(logits.view(-1).sort()[0][:36].view(9, 4), torch.randint(0, 4, (9,)))
    with (
        pytest.raises(ShapeError, match=r"CrossEntropyLoss received 9 .* received 2 samples"),
        backpack(BatchGrad()),
    ):
        loss.backward()


def test_module_that_merges_the_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0, 1), nn.Linear(4, 3))
    problem = classification(model, (2, 3))
    problem.target = torch.randint(0, 3, (6,))
    problem.run(BatchGrad())
    (x,), targets = problem.inputs, problem.target.view(3, 2)
    for n in range(3):
        term = nn.functional.cross_entropy(model(x[n : n + 1]), targets[n], reduction="sum") / 6
        slopes = torch.autograd.grad(term, problem.parameters)
        for found, expected in zip(problem.fields("grad_batch"), slopes, strict=True):
            torch.testing.assert_close(found[n], expected)


def test_batch_of_another_size_in_the_next_iteration() -> None:
    model = mlp()
    for batch in (5, 2):
        classification(model, (3,), batch).check()


class Picky(nn.Module):
    """A layer whose rule can be told to fail."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class PickyRule(LayerRule):
    module_types = (Picky,)
    failing = True
    shape: tuple[int, ...] | None = None

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        if type(self).failing:
            raise KeyError("on purpose")
        return 2 * mat if self.shape is None else mat.new_zeros(self.shape)


@pytest.mark.parametrize("retain", [True, False])
def test_exception_in_a_rule_then_a_clean_pass(retain: bool, monkeypatch: Any) -> None:
    between = Net(lambda _, x: torch.sin(x))
    model = nn.Sequential(nn.Linear(3, 4), Picky(), between, nn.Linear(4, 3))
    with temporary_plugin(PickyRule):
        problem = classification(model, (3,))
        loss = problem.loss()
        with (
            pytest.raises(PluginCodeError, match="on purpose") as caught,
            backpack(DiagGGNExact(), retain_graph=retain),
        ):
            loss.backward(retain_graph=retain)
        notes = str(caught.value)
        assert "Picky '1'" in notes
        assert "PickyRule" in notes
        assert "DiagGGNExact" in notes
        monkeypatch.setattr(PickyRule, "failing", False)
        if retain:
            expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
            with backpack(DiagGGNExact()):
                loss.backward()
            problem.compare("diag_ggn_exact", expected)
        problem.check()


def test_exception_inside_the_block_then_a_clean_pass_in_the_same_block() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss, other = problem.loss(), problem.loss()
    calls: list[nn.Module] = []

    def fail_once(module: nn.Module) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise KeyError("on purpose")

    with backpack(BatchGrad(), extension_hook=fail_once):
        with pytest.raises(KeyError):
            loss.backward()
        other.backward()
    problem.compare("grad_batch", expected)


def test_wrong_shape_from_a_rule(monkeypatch: Any) -> None:
    monkeypatch.setattr(PickyRule, "failing", False)
    monkeypatch.setattr(PickyRule, "shape", (1, 1))
    model = nn.Sequential(nn.Linear(3, 4), Picky(), nn.Linear(4, 3))
    with temporary_plugin(PickyRule), pytest.raises(ShapeError) as caught:
        classification(model, (3,)).run(DiagGGNExact())
    message = str(caught.value)
    for word in ("PickyRule._jac_t_mat_prod returned shape [1, 1]", "Picky '1'", "[2, 3, 4]"):
        assert word in message
    assert "DiagGGNExact of backpack-plugin-secondorder" in message
    assert "registered by hand" in message
