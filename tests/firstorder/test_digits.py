"""Digits that single precision loses where gradients nearly agree, or positions nearly cancel.

The factors are exact in single precision. Results are compared with those of the individual
gradients in double precision, relative to what they are compared with in use: a variance with
itself, an inner product with the norms.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import RangeWarning
from backpack_core.extensions import BatchDotGrad, BatchGrad, BatchL2Grad, GradInner, Variance
from backpack_data import combined
from backpack_firstorder import SampleGradients
from backpack_firstorder.agreement import Agreement, agreement
from backpack_products import contractions

NEAR = [1e-1, 1e-2, 1e-3, 1e-5]


def alike(samples: int, positions: int, spread: float) -> tuple[Tensor, Tensor]:
    """Factors of gradients with a spread about their mean."""
    lead = (samples, positions) if positions > 1 else (samples,)
    out, inp = ((1 + spread * torch.randn(*lead, n)) * torch.randn(n) for n in (4, 5))
    return out.float(), inp.float()


def cancelling(samples: int, positions: int, rest: float) -> tuple[Tensor, Tensor]:
    """Factors whose positions cancel except for a rest."""
    signs = torch.tensor([1.0, -1.0]).repeat(positions // 2).unsqueeze(1)
    out = torch.randn(samples, 1, 16) * signs
    inp = torch.randn(samples, 1, 16) + rest * torch.randn(samples, positions, 16)
    return out.float(), inp.float()


def formed(out: Tensor, inp: Tensor) -> Tensor:
    """Individual gradients in double precision, ``[N, O, I]``."""
    return torch.einsum("n...o,n...i->noi", out.double(), inp.double())


def run(extension: Extension, out: Tensor, inp: Tensor, field: str) -> Tensor:
    model = extend(nn.Linear(inp.shape[-1], out.shape[-1], bias=False)).to(inp.dtype)
    with backpack(extension):
        (model(inp) * out).sum().backward()
    found: Tensor = getattr(model.weight, field)
    return found


def cosines_of(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products of formed gradients, and the products of their norms."""
    one, other = left.flatten(1), right.flatten(1)
    return one @ other.T, one.norm(dim=1)[:, None] * other.norm(dim=1)


@pytest.mark.parametrize("spread", NEAR)
@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("samples", [8, 512])
def test_variance_of_gradients_that_nearly_agree(
    samples: int, positions: int, spread: float
) -> None:
    out, inp = alike(samples, positions, spread)
    found = run(Variance(), out, inp, "variance")
    expected = formed(out, inp).var(0, correction=0)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("positions", [1, 6])
def test_variance_is_not_negative(positions: int) -> None:
    for samples in (1, 3):
        out, inp = (f[:1].expand(samples, *f.shape[1:]) for f in alike(1, positions, 1.0))
        found = run(Variance(), out, inp, "variance")
        assert bool((found >= 0).all())
        assert bool((found < 1e-14 * formed(out, inp).square().amax(0)).all())


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("size", [1, 7, 32])  # of size 1, most passes repeat a recording
def test_variance_over_batches_that_nearly_agree(size: int, spread: float) -> None:
    out, inp = alike(64, 1, spread)
    model = extend(nn.Linear(5, 4, bias=False)).to(inp.dtype)
    total = combined(model, Variance(), normaliser=None)
    for some in torch.arange(64).split(size):
        with total:
            (model(inp[some]) * out[some]).sum().backward()
    found = model.weight.variance
    assert found.dtype is torch.float32
    expected = formed(out, inp).var(0, correction=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def gram(out: Tensor, inp: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return run(BatchDotGrad(), out, inp, "batch_dot")


def by_positions(out: Tensor, inp: Tensor, other: Tensor, seen: Tensor) -> Tensor:
    queries = SampleGradients.from_factors(other, seen)
    return SampleGradients.from_factors(out, inp).inner(queries, form="positions")


def scores(out: Tensor, inp: Tensor, other: Tensor, seen: Tensor) -> Tensor:
    queries = {"weight": SampleGradients.from_factors(other, seen)}
    return run(GradInner(queries, form="positions"), out, inp, "grad_inner")


@pytest.mark.parametrize("function", [gram, by_positions, scores])
@pytest.mark.parametrize("positions", [4, 64])
@pytest.mark.parametrize("rest", [1.0, *NEAR])
def test_inner_products_where_positions_cancel(
    rest: float, positions: int, function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contractions, "is_gram_of_positions_cheaper", lambda out, inp: True)
    torch.manual_seed(1)
    out, inp = cancelling(5, positions, rest)
    other = (out, inp) if function is gram else cancelling(3, positions, rest)
    if function is not gram:  # and those that are alike: so they must have cosines near one
        other = tuple(
            torch.cat([mine[:2], its]) for mine, its in zip((out, inp), other, strict=True)
        )
    found = function(out, inp, *other).double()
    expected, norms = cosines_of(formed(out, inp), formed(*other))
    torch.testing.assert_close(found / norms, expected / norms, rtol=0, atol=1e-3)


def test_gradients_whose_squares_leave_the_range() -> None:
    """Their cosines would be zero, as if they were orthogonal."""
    out, inp = torch.randn(3, 4).float(), 1e-25 * torch.randn(3, 5).float()
    with pytest.warns(RangeWarning, match="batch_dot.*squares are infinite or zero"):
        run(BatchDotGrad(), out, inp, "batch_dot")


def test_noise_that_rounding_hides() -> None:
    model = extend(nn.Linear(5, 4)).to(torch.float32)
    out, inp = alike(9, 1, 1e-6)
    with backpack(BatchDotGrad(), BatchGrad()):
        (model(inp) * out).sum().backward()
    scale = agreement(model).noise_scale
    assert 0 <= float(scale) < 1e-6
    below = torch.full((2, 2), 1.0000001)
    assert Agreement(below - 2e-7 * torch.eye(2)).noise_scale == 0


@pytest.mark.parametrize("rest", [1e-1, 1e-3])
def test_passes_that_are_repeated(rest: float) -> None:
    """What a recording does is what a pass does, also where digits are lost in patches."""
    model = extend(nn.Conv1d(32, 64, 3, bias=False)).to(torch.float32)
    inp = (torch.randn(8, 32, 1) + rest * torch.randn(8, 32, 10)).float()
    out = (torch.randn(8, 64, 1) * torch.tensor([1.0, -1.0]).repeat(4)).float()
    found = []
    for kind in (BatchL2Grad, Variance):
        values = []
        for _ in range(20):
            with backpack(kind()):
                (model(inp) * out).sum().backward()
            values.append(getattr(model.weight, kind.savefield).clone())
        for value in values:
            torch.testing.assert_close(value, values[0])
        found.append(values[0].double())
    each = formed(out.mT, inp.unfold(2, 3, 1).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found[0], each.square().sum((1, 2)), rtol=2e-3, atol=0)
    expected = each.var(0, correction=0)
    scale = expected.mean()
    torch.testing.assert_close(found[1].flatten(1) / scale, expected / scale, rtol=0, atol=1e-3)


@pytest.mark.plans
def test_recordings_keep_no_layer_alive() -> None:
    """Patches refer to their convolution, of which a recording needs the settings only."""
    model = extend(nn.Conv1d(32, 64, 3, bias=False)).to(torch.float32)
    for _ in range(20):
        with backpack(BatchL2Grad()) as block:
            model(torch.randn(8, 32, 10, dtype=torch.float32)).sum().backward()
    assert "repeated" in str(block.summary())
    layer = weakref.ref(model)
    del model, block
    gc.collect()
    assert layer() is None
