"""Norms against those in double precision, far beyond the range of their squares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backpack_firstorder import contractions, scaled
from backpack_firstorder.products import norm
from backpack_firstorder.single import in_single
from backpack_products.affine import AffineProduct
from backpack_products.lookup import LookupProduct
from backpack_products.product import sum_of
from backpack_products.rows import Rows
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.contract.test_contractions import SHAPES, Lazy, products
from tests.oracle import assert_close

# Factors in front of columns and inputs, and the precision of both.
RANGES = {
    "double": (1.0, 1.0, torch.float64, 1e-12),
    "double-large": (1e200, 1e100, torch.float64, 1e-12),
    "single": (1.0, 1.0, torch.float32, 1e-5),
    "single-large": (1e22, 1.0, torch.float32, 1e-5),
    "single-larger": (1e30, 1e-10, torch.float32, 1e-5),
    "single-tiny": (1e-25, 1.0, torch.float32, 1e-5),
    "single-tinier": (1e-20, 1e-15, torch.float32, 1e-5),
    "half-large": (1e3, 1.0, torch.float16, 1e-5),
    "half-tiny": (1e-4, 1e-3, torch.float16, 1e-5),
    "bfloat16": (1e20, 1e-3, torch.bfloat16, 1e-5),
}


@pytest.fixture(params=["double", "looked at", "scaled"], autouse=True)
def has_double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is double precision for the squares of numbers that have less.

    With it, squares of few numbers are not tried in single precision first; here they may be.
    """
    if request.param == "scaled":
        monkeypatch.setattr(scaled, "wider", lambda like: None)
    elif request.param == "looked at":
        monkeypatch.setattr(scaled, "_FEW", 1)
    return bool(request.param != "scaled")


def product_norm(out: Tensor, inp: Rows) -> Tensor:
    shape = torch.Size((*out.shape[3:], inp.shape[3]))
    return norm(in_single(AffineProduct(out, inp, shape))).value()


def vector_norm(mat: Tensor, lead: int) -> Tensor:
    return scaled.vector_norm(mat, lead).value()


def _factors(shape: tuple[int, ...], place: str) -> tuple[Tensor, Tensor]:
    columns, samples, positions, groups, features, size = shape
    left, right, dtype, _ = RANGES[place]
    sizes = torch.logspace(-1, 1, samples).reshape(-1, 1, 1, 1)  # samples differ in theirs
    out = torch.randn(columns, samples, positions, groups, features) * left * sizes
    return out.to(dtype), (torch.randn(samples, positions, groups, size) * right).to(dtype)


@pytest.mark.grid(4)
@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", RANGES)
def test_norm_of_products(
    place: str, shape: tuple[int, ...], budget: int | None, lazy: bool, has_double: bool
) -> None:
    out, inp = _factors(shape, place)
    exact = products(out.double(), inp.double()).flatten(2)
    scale = exact.abs().max()
    before = memory_budget()
    set_memory_budget(budget or before)
    try:
        found = product_norm(out, Lazy(inp) if lazy else inp)
    finally:
        set_memory_budget(before)
    least = torch.promote_types(out.dtype, torch.float32)
    assert found.dtype == (torch.float64 if has_double else least)
    assert_close(found.double() / scale, (exact / scale).norm(dim=2), RANGES[place][3])


@pytest.mark.parametrize("place", RANGES)
def test_norm_of_vectors(place: str) -> None:
    mat, _ = _factors((2, 3, 4, 1, 5, 1), place)
    exact = mat.double().flatten(2)
    scale = exact.abs().max()
    found = vector_norm(mat, 2).double() / scale
    assert_close(found, (exact / scale).norm(dim=2), RANGES[place][3])


def test_zeros() -> None:
    out, inp = torch.randn(2, 3, 4, 1, 5), torch.randn(3, 4, 1, 6)
    out[0, 1], inp[2] = 0, 0
    norms = product_norm(out, inp)
    assert norms[0, 1] == 0
    assert not norms[:, 2].any()
    assert norms[1, 1] > 0
    assert not vector_norm(torch.zeros(2, 3), 1).any()


def test_positions_that_cancel() -> None:
    """Rounding of a sum of pairs may be negative, which no square is."""
    out, inp = torch.randn(3, 50, 2, 1, 5), torch.randn(50, 1, 1, 6).expand(-1, 3, -1, -1)
    out = torch.cat([out, -out.sum(2, keepdim=True)], 2)
    scale = (out.square().sum((2, 3, 4)) * inp.square().sum((1, 2, 3))).sqrt()
    norms, squares = product_norm(out, inp), contractions.norm(out, inp).squared()
    assert bool((squares >= 0).all())
    assert bool((norms <= 1e-7 * scale).all())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays(value: float) -> None:
    out, inp = torch.randn(1, 3, 4, 1, 5), torch.randn(3, 4, 1, 6)
    out[0, 1, 2, 0, 3] = value
    norms = product_norm(out, inp)
    assert not norms[0, 1].isfinite()
    assert norms[0, [0, 2]].isfinite().all()
    assert not vector_norm(out, 2)[0, 1].isfinite()


@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 1, 4, 5), (2, 0, 2, 1, 4, 5), (2, 3, 0, 1, 4, 5), (2, 3, 2, 1, 0, 5)]
)
def test_of_nothing(shape: tuple[int, ...]) -> None:
    columns, samples, positions, groups, features, size = shape
    out = torch.randn(columns, samples, positions, groups, features)
    norms = product_norm(out, torch.randn(samples, positions, groups, size))
    assert norms.shape == (columns, samples)
    assert not norms.any()
    assert vector_norm(out, 2).shape == (columns, samples)


def test_scale_is_a_constant() -> None:
    """The derivative is that of the norm itself."""
    out = torch.randn(1, 3, 4, 1, 5, requires_grad=True)
    inp = torch.randn(3, 4, 1, 6, requires_grad=True)
    assert torch.autograd.gradcheck(product_norm, (out, inp))


def _single(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32)


def test_groups_far_apart() -> None:
    """A group whose factors lie at the ends of single precision, beside one whose do not."""
    for positions in (1, 3):
        out, inp = _single(2, 4, positions, 3, 5), _single(4, positions, 3, 6)
        out[:, :, :, 0], inp[:, :, 0] = 1e20 * out[:, :, :, 0], 1e-23 * inp[:, :, 0]
        out[:, :, :, 1:] *= 1e-5
        exact = products(out.double(), inp.double()).flatten(2).norm(dim=2)
        for some in (inp, Lazy(inp)):
            assert_close(product_norm(out, some).double() / exact, torch.ones_like(exact), 1e-5)


def test_positions_far_apart() -> None:
    """Gram matrices lose the digits of the one position, and of the other."""
    out, inp = _single(2, 4, 2, 2, 50), _single(4, 2, 2, 60)
    out[:, :, 0], inp[:, 0] = 1e-24 * out[:, :, 0], 1e2 * inp[:, 0]
    inp[:, 1] *= 1e-22
    exact = products(out.double(), inp.double()).flatten(2).norm(dim=2)
    for some in (inp, Lazy(inp)):
        assert_close(product_norm(out, some).double() / exact, torch.ones_like(exact), 1e-5)


def test_zeros_beside_tiny_inputs() -> None:
    """What a position or a group of zeros is scaled by says nothing about the others."""
    out, inp = _single(1, 3, 3, 2, 5), 1e-25 * _single(3, 3, 2, 6)
    inp[:, 1], inp[1, :, 1] = 0, 0
    out[0, 0, :, 1], out[:, 2] = 0, 1e-10 * out[:, 2]
    exact = products(out.double(), inp.double()).flatten(2).norm(dim=2)
    assert_close(product_norm(out, inp).double() / exact, torch.ones_like(exact), 1e-5)


def test_derivative_beside_a_group_of_zeros() -> None:
    out = torch.randn(1, 3, 1, 2, 5, dtype=torch.float64)
    inp = torch.randn(3, 1, 2, 6, dtype=torch.float64)
    out[:, :, :, 1] = 0
    out.requires_grad_()
    (found,) = torch.autograd.grad(product_norm(out, inp).sum(), out)
    expected = products(out, inp).flatten(2).square().sum(2).sqrt().sum()
    assert_close(found, torch.autograd.grad(expected, out)[0])


@pytest.mark.parametrize(("table", "head"), [(1e-25, 1e-22), (1e25, 1e22), (1e-24, 1e24)])
def test_sums_of_two_forms(table: float, head: float) -> None:
    """A table that is looked up and gives the logits: neither part hides the other."""
    row, shape = torch.randint(0, 5, (4, 3)), torch.Size((5, 2))
    looked_up = table * torch.randn(1, 4, 3, 2)
    out, inp = 1e-10 * head * torch.randn(1, 4, 6, 1, 5), 1e10 * torch.randn(4, 6, 1, 2)
    norms = {}
    for dtype in (torch.float32, torch.float64):
        parts = [
            LookupProduct(looked_up.to(dtype), row, shape),
            AffineProduct(out.to(dtype), inp.to(dtype), shape),
        ]
        with torch.no_grad():
            norms[dtype] = norm(sum_of(parts)).value().double()
            exact = sum(part.part(slice(0, 1), slice(0, 4)).double() for part in parts)
        scale = exact.abs().max()
        assert_close(norms[dtype] / scale, (exact / scale).flatten(2).norm(dim=2), 1e-5)


def test_parts_that_lie_apart_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mat = torch.randn(2, 7, 3)
    whole = vector_norm(mat, 2)
    for size in (1, 40, 10**6):
        monkeypatch.setattr(scaled, "CACHE", size)
        assert_close(vector_norm(mat.float(), 2), whole, 1e-6)


@pytest.mark.parametrize("positions", [63, 64, 70, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_matrices_in_bands(positions: int, dtype: torch.dtype) -> None:
    """Of many positions, half of each symmetric matrix is formed, also where autograd records."""
    out, inp = torch.randn(2, 3, positions, 2, 2), torch.randn(3, positions, 2, 3)
    wanted = products(out, inp).flatten(2).norm(dim=2)
    some = out.to(dtype), inp.to(dtype)
    with torch.no_grad():
        assert_close(contractions.norm_by_gram(*some).value().double(), wanted, rtol=1e-5)
    left, again = some[0].clone().requires_grad_(), out.clone().requires_grad_()
    contractions.norm_by_gram(left, some[1]).value().sum().backward()
    products(again, inp).flatten(2).norm(dim=2).sum().backward()
    assert_close(left.grad.double(), again.grad, rtol=1e-4)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rest", [1e-1, 1e-3, 1e-5])
def test_positions_that_nearly_cancel(
    rest: float, groups: int, records: bool, has_double: bool
) -> None:
    """Rounding in inner products is larger than what is left, which may seem to be nothing."""
    signs = torch.tensor([1.0, -1.0] * 4).reshape(8, 1, 1)
    out = (torch.randn(1, 5, 1, groups, 64) * signs).float()
    inp = (torch.randn(5, 1, groups, 64) + rest * torch.randn(5, 8, groups, 64)).float()
    exact = products(out.double(), inp.double()).flatten(2).norm(dim=2)
    with torch.set_grad_enabled(records):
        found = contractions.norm(out, inp).value().double()
    assert bool((found > 0.97 * exact).all())
    if has_double and not records:
        assert_close(found / exact, torch.ones_like(exact), 2e-3)


@pytest.mark.parametrize("rest", [1e-2, 1e-4])
def test_forms_that_nearly_cancel(rest: float) -> None:
    """A sum is not taken for less than it is."""
    row, shape = torch.arange(4).expand(5, 4), torch.Size((4, 6))
    looked_up = torch.randn(1, 5, 4, 6)
    inp = (looked_up[0] + rest * torch.randn(5, 4, 6)).unsqueeze(2).float()
    out = -torch.eye(4).expand(1, 5, 4, 4).unsqueeze(3).float()
    parts = [LookupProduct(looked_up.float(), row, shape), AffineProduct(out, inp, shape)]
    with torch.no_grad():
        found = norm(sum_of(parts)).value().double()
    exact = (looked_up.float().double() - inp.squeeze(2).double()).flatten(2).norm(dim=2)
    assert bool((found > 0.97 * exact).all())
    if found.is_cpu:
        assert_close(found / exact, torch.ones_like(exact), 2e-3)
