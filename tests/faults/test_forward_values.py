"""Changes between a forward pass and its backward pass: the values of the forward pass count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from backpack_core import backpack, extend, unextend
from backpack_core.errors import BackpackError, UncoveredParameterWarning, UnsupportedError
from backpack_core.extensions import GGNMP, HMP, BatchGrad, GGNGram
from tests import oracle
from tests.cases import Problem, classification
from tests.faults.changes import CHANGED, REPLACED, SETTINGS, Change, deep, step
from tests.faults.problems import KINDS, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def check_change(problem: Problem, kind: str, change: Change, on_loss: bool = False) -> None:
    """A change between the passes makes no difference; what came in gets nothing."""
    expectation = expect(problem.expected, kind)
    used = problem.parameters
    loss = problem.loss()
    change(problem.lossfunc if on_loss else problem.model)
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(used, problem.rtol)
    known = {id(p) for p in used}
    expectation.absent(p for p in problem.model.parameters() if id(p) not in known)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REPLACED)
def test_replaced(name: str, kind: str) -> None:
    make, shape, change = REPLACED[name]
    check_change(classification(make(), shape), kind, change)


def test_replaced_before_a_later_pass() -> None:
    """Results of an earlier pass do not stay on a parameter that the model has lost since."""
    make, shape, change = REPLACED["of_parts_never_called"]
    problem = classification(make(), shape)
    problem.run(BatchGrad())
    expectation, used = expect(problem.expected, "gradients"), problem.parameters
    problem.model.zero_grad()
    loss = problem.loss()
    change(problem.model)
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(used, problem.rtol)


def test_a_model_that_is_not_extended_any_more_has_no_parameters() -> None:
    """So a function that uses one is no use in a model."""
    other, problem = extend(nn.Linear(3, 3)), classification(deep(), (3,))
    other(problem.inputs[0])
    unextend(other)
    problem.loss()
    loss = problem.lossfunc(problem.model(*problem.inputs) @ other.weight, problem.target)
    with pytest.warns(UncoveredParameterWarning), backpack(BatchGrad()):
        loss.backward()
    assert not hasattr(other.weight, "grad_batch")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, kind: str) -> None:
    make, shape, change = SETTINGS[name]
    problem = classification(make(), shape)
    if name == "celu":  # autograd computes it with 1 / alpha in single precision
        problem.rtol = 1e-7
    check_change(problem, kind, change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d])
def test_probability_of_dropout(layer: Any, p: float, kind: str) -> None:
    layers = [nn.Conv1d(2, 4, 1), nn.Tanh(), layer(0.4), nn.Flatten(), nn.Linear(8, 3)]
    problem = classification(nn.Sequential(*layers), (2, 2))
    problem.whole = True
    check_change(problem, kind, lambda model: setattr(model[2], "p", p))


def _weighted(reduction: str = "mean") -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0]), reduction=reduction)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "reduction": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "reduction", "sum")),
    "weight": (_weighted, lambda loss: setattr(loss, "weight", torch.ones(3))),
    "label_smoothing": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda loss: setattr(loss, "label_smoothing", 0.0),
    ),
    "ignore_index": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        lambda loss: setattr(loss, "ignore_index", -100),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_the_loss(name: str, kind: str) -> None:
    make, change = LOSSES[name]
    problem = classification(deep(), (3,))
    problem.lossfunc, problem.target = make(), torch.tensor([0, 1, 2])
    check_change(problem, kind, change, on_loss=True)


@pytest.mark.parametrize("kind", KINDS)
def test_squares_summed_or_averaged(kind: str) -> None:
    problem = classification(deep(), (3,))
    problem.lossfunc, problem.target = nn.MSELoss(), torch.randn(3, 3)
    check_change(problem, kind, lambda loss: setattr(loss, "reduction", "sum"), on_loss=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGED)
def test_exact_or_refused(name: str, kind: str) -> None:
    make, shape, change = CHANGED[name]
    with suppress(BackpackError, RuntimeError):
        check_change(classification(make(), shape), kind, change)


# Products and eigenvectors that are asked for after the pass.


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("name", REPLACED)
def test_products_after_a_replacement(name: str) -> None:
    make, shape, change = REPLACED[name]
    problem = classification(make(), shape)
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        problem.run(GGNMP())
    used = problem.parameters
    change(problem.model)
    for p, block in zip(used, blocks, strict=True):
        vectors = torch.randn(2, *p.shape)
        expected = (vectors.flatten(1) @ block).reshape(vectors.shape)
        oracle.assert_close(p.ggnmp(vectors), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "softplus", "elu"])
def test_products_after_a_change_of_settings(name: str) -> None:
    make, shape, change = SETTINGS[name]
    problem = classification(make(), shape)
    problem.run(GGNMP(), HMP())
    pairs = [(p, torch.randn(2, *p.shape)) for p in problem.parameters]
    before = [(p.ggnmp(v), p.hmp(v)) for p, v in pairs]  # type: ignore[attr-defined]
    change(problem.model)
    for (p, vectors), (ggn, hessian) in zip(pairs, before, strict=True):
        oracle.assert_close(p.ggnmp(vectors), ggn)  # type: ignore[attr-defined]
        oracle.assert_close(p.hmp(vectors), hessian)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["step", "lstm", "attention", "layer_norm", "own"])
def test_eigenvectors_after_a_step(name: str) -> None:
    """Exact, or an error."""
    make, shape, _ = CHANGED[name]
    problem = classification(make(), shape)
    problem.run(GGNGram())
    with torch.no_grad():
        before = [p.ggn_gram.eigenvectors(2) for p in problem.parameters]  # type: ignore[attr-defined]
        step()(problem.model)
        for p, expected in zip(problem.parameters, before, strict=True):
            try:
                found = p.ggn_gram.eigenvectors(2)  # type: ignore[attr-defined]
            except (BackpackError, RuntimeError):
                continue
            oracle.assert_close(found, expected)


# Weights that are drawn anew whenever they are read.


class Noise(nn.Module):
    """Scales every entry at random."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.rand_like(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_random_parametrization(index: int, trained: bool, kind: str) -> None:
    """Exact, or refused."""
    model = deep()
    parametrize.register_parametrization(model[index], "weight", Noise())
    model[index].parametrizations.weight.original.requires_grad_(trained)
    problem = classification(model, (3,))
    problem.whole = True
    expectation = expect(problem.expected, kind)
    try:
        problem.run(*expectation.extensions)
    except UnsupportedError:
        return
    expectation.compare(problem.parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_spectral_norm_in_train_mode(kind: str) -> None:
    """Each reading takes a step of its power iteration."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    layer.parametrizations.weight.original.requires_grad_(False)
    problem = classification(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)), (3,))
    problem.whole = True
    expectation = expect(problem.expected, kind)
    try:
        problem.run(*expectation.extensions)
    except UnsupportedError:
        return
    expectation.compare(problem.parameters)
