"""Norms where their squares leave the range of numbers: half precision, and far ends of single."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackWarning
from backpack_core.extensions import BatchGrad, BatchL2Grad, ClippedSumGrad
from tests import oracle
from tests.cases import Net
from tests.firstorder.problems import NETS

# Precision, factor in front of the loss, error that rounding of the gradients themselves leaves.
RANGES: dict[str, tuple[torch.dtype, float, float]] = {
    "half-large": (torch.float16, 2.0**14, 0.02),
    "half-tiny": (torch.float16, 2.0**-9, 0.1),
    "bfloat16": (torch.bfloat16, 1.0, 0.05),
    "single-large": (torch.float32, 1e22, 1e-5),
    "single-tiny": (torch.float32, 1e-25, 1e-5),
}
MODELS = {
    **{name: NETS[name] for name in NETS if name != "frozen"},
    "normalised": lambda: (
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)),
        (4,),
    ),
    "no_rule": lambda: (nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3)), (4,)),
    "embedding": lambda: (
        Net(lambda n, x: n.last(n.table((x[:, :3] > 0).long()).flatten(1)),
            table=nn.Embedding(2, 4), last=nn.Linear(12, 3)),
        (4,),
    ),
}  # fmt: skip


class Scaled(nn.Module):
    """Has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.scale)


class Case:
    """A model in a precision, data, and individual gradients by autograd in double precision."""

    def __init__(self, name: str, dtype: torch.dtype, factor: float) -> None:
        model, shape = MODELS[name]()
        self.model = model.to(dtype)
        self.x = torch.randn(5, *shape).to(dtype)
        self.y = torch.randint(0, 3, (5,))
        self.factor = factor
        exact = copy.deepcopy(self.model).double()
        lossfunc = nn.CrossEntropyLoss()
        self.gradients = oracle.individual_gradients(
            exact,
            lambda out: factor * lossfunc(out, self.y),
            [self.x.double()],
            list(exact.parameters()),
        )

    @property
    def norms(self) -> Tensor:
        """Over all parameters. Shape ``[N]``."""
        return torch.cat([g.flatten(1) for g in self.gradients], 1).norm(dim=1)

    def clipped(self, bound: float) -> list[Tensor]:
        weights = (bound / self.norms).clamp(max=1)
        return [torch.einsum("n,n...->...", weights, g) for g in self.gradients]

    def run(self, *extensions: Any) -> None:
        extend(self.model)
        lossfunc = extend(nn.CrossEntropyLoss())
        with backpack(*extensions):
            (lossfunc(self.model(self.x), self.y) * self.factor).backward()

    def compare(self, expected: list[Tensor], rtol: float) -> None:
        for p, reference in zip(self.model.parameters(), expected, strict=True):
            assert p.grad_clipped.dtype == p.dtype
            oracle.assert_close(p.grad_clipped.double(), reference, rtol)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("place", RANGES)
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sum(name: str, place: str) -> None:
    dtype, factor, rtol = RANGES[place]
    case = Case(name, dtype, factor)
    bound = float(case.norms.median())
    case.run(ClippedSumGrad(bound, normaliser=None))
    case.compare(case.clipped(bound), rtol)


@pytest.mark.parametrize("bound", [1.0, 1e-4])
def test_bound_far_below_the_norms_in_half_precision(bound: float) -> None:
    """Factors of 1e-9 are smaller than any number in half precision."""
    case = Case("mlp", torch.float16, 2.0**14)
    case.run(ClippedSumGrad(bound, normaliser=None))
    case.compare(case.clipped(bound), 0.05)


@pytest.mark.parametrize("name", ["mlp", "tokens", "convolutions", "tied"])
def test_gradient_scaler_at_its_first_scale(name: str) -> None:
    case = Case(name, torch.float32, 2.0**16)
    extend(case.model)
    lossfunc = extend(nn.CrossEntropyLoss())
    scaler = torch.amp.GradScaler("cpu")
    bound = float(case.norms.median())
    with torch.autocast("cpu", torch.float16):
        loss = lossfunc(case.model(case.x), case.y)
    with backpack(ClippedSumGrad(bound, normaliser=None)):
        scaler.scale(loss).backward()
    case.compare(case.clipped(bound), 0.02)


def test_per_layer() -> None:
    case = Case("mlp", torch.float16, 2.0**14)
    layers = [case.gradients[:2], case.gradients[2:]]
    norms = [torch.cat([g.flatten(1) for g in layer], 1).norm(dim=1) for layer in layers]
    bound = float(torch.cat(norms).median())
    expected = [
        torch.einsum("n,n...->...", (bound / norm).clamp(max=1), g)
        for layer, norm in zip(layers, norms, strict=True)
        for g in layer
    ]
    case.run(ClippedSumGrad(bound, clipping="per_layer", normaliser=None))
    case.compare(expected, 0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_that_are_not_finite_stay_visible(dtype: torch.dtype) -> None:
    """A gradient scaler looks for them to leave a step out."""
    case = Case("mlp", dtype, 1.0)
    case.factor = float("inf")
    case.run(ClippedSumGrad(1.0, normaliser=None))
    assert all(not p.grad_clipped.isfinite().all() for p in case.model.parameters())


@pytest.mark.parametrize("place", RANGES)
def test_squared_norms(place: str) -> None:
    """Single precision at least, and one warning where that is not enough."""
    dtype, factor, rtol = RANGES[place]
    case = Case("tokens", dtype, factor)
    expected = [g.flatten(1).square().sum(1) for g in case.gradients]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.run(BatchL2Grad())
        case.run(BatchL2Grad())
    assert len(caught) == (dtype == torch.float32)
    if caught:
        assert issubclass(caught[0].category, BackpackWarning)
        assert "batch_l2" in str(caught[0].message)
        return
    for p, squares in zip(case.model.parameters(), expected, strict=True):
        assert p.batch_l2.dtype == torch.float32
        oracle.assert_close(p.batch_l2.double(), squares, 2 * rtol)


def test_zero_gradients_leave_no_range() -> None:
    """Nothing to warn about: dead units, and targets that are ignored."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).float())
    with torch.no_grad():
        model[0].bias.fill_(-100)
    lossfunc = extend(nn.CrossEntropyLoss(ignore_index=1))
    x, y = torch.randn(4, 3).float(), torch.tensor([0, 1, 2, 1])
    with backpack(BatchL2Grad(), ClippedSumGrad(1.0, normaliser=None), BatchGrad()):
        lossfunc(model(x), y).backward()
    assert not model[0].weight.batch_l2.any()
    assert not model[2].weight.batch_l2.any()
    assert model[2].bias.batch_l2.tolist()[1::2] == [0.0, 0.0]
    oracle.assert_close(model[2].bias.grad_clipped, model[2].bias.grad, 1e-6)
