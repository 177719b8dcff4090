"""Products through fused attention against those through its plain formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, HMP, DiagHMP
from backpack_products.tuning import memory_budget, set_memory_budget
from backpack_secondorder.over_data import GGN, Hessian
from tests.oracle import assert_close


class Attention(nn.Module):
    """Two heads of two numbers; with ``shared``, one key for both."""

    def __init__(self, shared: bool = False, **settings: Any) -> None:
        super().__init__()
        self.query, self.other = nn.Linear(4, 4), nn.Linear(4, 4 if shared else 8)
        self.last, self.settings = nn.Linear(4, 2), settings
        if shared:
            self.settings = {**settings, "enable_gqa": True}

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query(x), *self.other(x).chunk(2, -1)
        heads = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        found = scaled_dot_product_attention(*heads, **self.settings)
        return self.last(found.transpose(1, 2).flatten(2).mean(1))


def _mask() -> Tensor:
    """For each sample, with a row that sees nothing."""
    mask = torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, 0, 2] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5).double()},
    "mask": {"attn_mask": _mask()},
    "scale": {"scale": 0.3},
    "shared": {"shared": True},
}


def problem(case: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    data = torch.randn(3, 5, 4), torch.tensor([0, 1, 0])
    return Attention(**CASES[case]), nn.CrossEntropyLoss(), *data


def both(function: Any) -> tuple[Any, Any]:
    """With the kernel that torch takes by itself, and with the plain formula."""
    found = function()
    with sdpa_kernel(SDPBackend.MATH):
        return found, function()


@pytest.mark.host("no kernel of a GPU takes double precision")
def test_the_kernel_is_fused() -> None:
    x = torch.randn(2, 2, 5, 2, requires_grad=True)
    found = scaled_dot_product_attention(x, x, x)
    assert found.grad_fn is not None
    assert "Flash" in found.grad_fn.name()


@pytest.mark.parametrize("operator", [GGN, Hessian])
@pytest.mark.parametrize("case", CASES)
def test_matrices_over_data(case: str, operator: Any) -> None:
    model, lossfunc, x, y = problem(case)
    assert_close(*both(operator(model, lossfunc, [(x, y)]).dense))


@pytest.mark.parametrize("case", ["mask", "shared"])
def test_sample_by_sample_where_memory_is_short(case: str) -> None:
    model, lossfunc, x, y = problem(case)
    ample = memory_budget()
    with sdpa_kernel(SDPBackend.MATH):
        expected = Hessian(model, lossfunc, [(x, y)]).dense()
    set_memory_budget(1)
    try:
        assert_close(Hessian(model, lossfunc, [(x, y)]).dense(), expected)
    finally:
        set_memory_budget(ample)


def of_extensions(case: str, model_of: Any = lambda model: model) -> list[Tensor]:
    model, lossfunc, x, y = problem(case)
    model = model_of(model)
    extend(model), extend(lossfunc)
    with backpack(GGNMP(), HMP(), DiagHMP()):
        lossfunc(model(x), y).backward()
    results = []
    for p in model.parameters():
        vectors = torch.linspace(-1, 1, 4 * p.numel()).reshape(4, *p.shape)
        results += [p.ggnmp(vectors), p.hmp(vectors), p.diag_hmp]
    return results


@pytest.mark.parametrize("case", ["plain", "causal", "mask"])
def test_extensions(case: str) -> None:
    for fused, plain in zip(*both(lambda: of_extensions(case)), strict=True):
        assert_close(fused, plain)


class Recomputed(nn.Module):
    """A model inside of a checkpoint, or of two."""

    def __init__(self, model: nn.Module, depth: int = 1) -> None:
        super().__init__()
        self.model, self.depth = model, depth

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        depth = self.depth if depth is None else depth
        run = self.model if depth == 1 else partial(self.forward, depth=depth - 1)
        return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", ["bias", "mask", "shared"])
def test_extensions_inside_of_a_checkpoint(case: str, depth: int) -> None:
    found = of_extensions(case, partial(Recomputed, depth=depth))
    with sdpa_kernel(SDPBackend.MATH):
        expected = of_extensions(case)
    for fused, plain in zip(found, expected, strict=True):
        assert_close(fused, plain)


@pytest.mark.parametrize("budget", [1, 10**9])
@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_matrices_inside_of_a_checkpoint(operator: Any, budget: int) -> None:
    model, lossfunc, x, y = problem("mask")
    with sdpa_kernel(SDPBackend.MATH):
        expected = operator(model, lossfunc, [(x, y)]).dense()
    ample = memory_budget()
    set_memory_budget(budget)
    try:
        assert_close(operator(Recomputed(model), lossfunc, [(x, y)]).dense(), expected)
    finally:
        set_memory_budget(ample)


def test_an_encoder_layer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(20, 2))
    data = [(torch.randn(3, 5, 4), torch.tensor([0, 1, 0]))]
    assert_close(*both(Hessian(model, nn.CrossEntropyLoss(), data).dense))


def test_dropout_inside_of_a_kernel_is_refused() -> None:
    from types import SimpleNamespace

    from backpack_secondorder.fused_attention import of_fused_attention

    node = SimpleNamespace(next_functions=(None,) * 3, _saved_dropout_p=0.1)
    with pytest.raises(UnsupportedError, match="attention dropout 0"):
        of_fused_attention(node, torch.ones(1))
