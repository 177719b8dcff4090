"""Products of large matrices by another library of torch, where that is faster."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import forward_ad

from backpack_products import contractions
from backpack_products import multiply as module
from backpack_products._torch import dense, onednn_linear
from backpack_products.multiply import add_product, multiply, multiply_each
from backpack_products.tuning import EACH, WHOLE, unsplit


def large(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of what oneDNN is given; it counts as faster on any machine."""
    found = []

    def linear(rows, weight):
        found.append((tuple(rows.shape), tuple(weight.shape)))
        return onednn_linear(rows, weight)

    try:
        onednn_linear(large(1, 1), large(1, 1))
    except (AttributeError, RuntimeError):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(module, "onednn_linear", linear)
    monkeypatch.setattr(module, "_is_faster", lambda: True)
    return found


def near(found, wanted) -> None:
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_products_are_the_same(calls) -> None:
    left, right = large(300, 128).T, large(300, 130)
    assert left.shape[0] * right.numel() >= WHOLE
    wanted = left.double() @ right.double()
    near(multiply(left, right), wanted)
    near(multiply(left, right.T.contiguous().T), wanted)
    near(multiply(left[:, ::2], right[::2]), left[:, ::2].double() @ right[::2].double())
    assert len(calls) == 2, "the last product is too small"
    for beta in (0.0, 1.0, 0.5):
        total = large(130, 128).T
        before = total.double()
        if not beta:
            total.fill_(torch.nan)  # is not read
            before.zero_()
        add_product(total, left, right, beta, 0.25)
        near(total, beta * before + 0.25 * wanted)
    assert len(calls) == 5


@torch.no_grad()
def test_products_of_batches_are_the_same(calls) -> None:
    left, right = large(2, 256, 128).mT, large(2, 256, 136)
    assert left[0].shape[0] * right[0].numel() >= EACH
    wanted = left.double() @ right.double()
    near(multiply_each(left, right), wanted)
    place = torch.empty(2, 128, 136, dtype=torch.float32)
    assert multiply_each(left, right, place) is place
    near(place, wanted)
    assert len(calls) == 4
    near(multiply_each(left[:, :3], right), wanted[:, :3])
    assert len(calls) == 4


@torch.no_grad()
def test_parts_of_matrices(calls) -> None:
    """The library would take a thousand times as long for a right matrix with gaps."""
    left, right = large(128, 300)[:, :128], large(128, 300)
    for part in (right[:, :260], right.T[:260].T, right[:, ::2].repeat(1, 2)[:, :260]):
        near(multiply(left, part), left.double() @ part.double())
        for matrix in (part, part.T):
            assert dense(matrix).is_contiguous() or dense(matrix).mT.is_contiguous()
            assert torch.equal(dense(matrix), matrix)
    assert len(calls) == 3
    assert dense(right) is right
    assert dense(right.T).data_ptr() == right.data_ptr()


@torch.no_grad()
def test_columns_of_a_sample_are_joined(calls) -> None:
    out, inp = large(6, 3, 24, 1, 128), large(3, 24, 1, 132)
    assert out[:, 0].numel() * inp.shape[3] >= EACH > out[0, 0].numel() * inp.shape[3]
    exact = out.double(), inp.double()
    near(contractions.products(out, inp), torch.einsum("vnsgo,nsgi->vngoi", *exact))
    assert len(calls) == 3
    out, inp = large(4, 256, 2, 1, 64), large(256, 2, 1, 72)
    near(contractions.sums(out, inp), torch.einsum("vnsgo,nsgi->vgoi", out.double(), inp.double()))
    assert len(calls) == 3 + 4


def test_what_torch_multiplies_itself(calls) -> None:
    left, right = large(256, 256), large(256, 256)
    with torch.no_grad():
        multiply(left.double(), right.double())
        multiply(left.half(), right.half())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about other settings
            with torch.backends.mkldnn.flags(enabled=False):
                multiply(left, right)
        torch.use_deterministic_algorithms(True)
        try:
            multiply(left, right)
        finally:
            torch.use_deterministic_algorithms(False)
        with unsplit():
            multiply(left, right)
        torch.func.vmap(multiply)(left.expand(2, -1, -1), right.expand(2, -1, -1))
        multiply(left.to("meta"), right.to("meta"))
    left.requires_grad_()
    multiply(left, right).sum().backward()
    assert torch.allclose(left.grad, right.sum(1).expand(256, -1), atol=1e-3)
    assert not calls
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(multiply(forward_ad.make_dual(right, right), right))
    assert torch.allclose(found.tangent, right @ right, atol=1e-3)
    assert not calls
    multiply(left.detach(), right)  # though autograd is on
    with torch.no_grad():
        multiply(left, right)
        multiply(right, torch.nn.Parameter(right))
    assert len(calls) == 3


@torch.no_grad()
def test_the_smaller_matrix_is_copied(calls) -> None:
    """The first must lie by rows; columns of a large one may be those of the second."""
    large_one, small = large(512, 300).T, large(512, 64)  # [300, 512] and [512, 64]
    found = multiply(large_one, small)
    near(found, large_one.double() @ small.double())
    assert found.is_contiguous()
    assert calls == [((64, 512), (300, 512))]
    near(multiply(large_one.contiguous(), small), large_one.double() @ small.double())
    near(multiply(small.T, large_one.T), small.T.double() @ large_one.T.double())
    assert calls[1:] == [((300, 512), (64, 512)), ((64, 512), (300, 512))]
    many = torch.stack([large_one, large_one.flip(0)])
    total = large(300, 64)
    before = total.double()
    add_product(total, large_one, small, 0.5, 2.0)
    near(total, before * 0.5 + 2 * (large_one.double() @ small.double()))
    both = small.expand(2, -1, -1)
    near(multiply_each(many.mT.contiguous().mT, both), many.double() @ both.double())


def test_a_build_without_the_library(monkeypatch) -> None:
    def missing(*args):
        raise AttributeError("'mkldnn' has no '_linear_pointwise'")

    monkeypatch.setattr(module, "onednn_linear", missing)
    module._is_faster.cache_clear()
    try:
        left = large(256, 256)
        with torch.no_grad():
            assert torch.equal(multiply(left, left), left @ left)
    finally:
        module._is_faster.cache_clear()
