"""Embedding rules against autograd, and their reductions against the dense Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import assert_equal, check_input, check_parameters, columns, draw, make_view
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.embedding import EmbeddingBagRule, EmbeddingRule, LookupRule
from backpack_products import LookupProduct
from backpack_products.operations import batch_sum, dense, square_sum, squared_norm
from backpack_products.some_samples import subsample

NUM, DIM = 5, 3


def tokens(*shape: int) -> Tensor:
    """Few rows for many tokens, so that rows repeat within a sample."""
    return torch.randint(NUM, shape)


def check_reductions(rule: LookupRule, view: View) -> None:
    product = rule.param_product(view, "weight", columns(view))
    assert isinstance(product, LookupProduct)
    formed = dense(product)
    assert_equal(square_sum(product), (formed**2).sum((0, 1)))
    assert_equal(squared_norm(product), (formed**2).sum((2, 3)))
    assert_equal(batch_sum(product), formed.sum(1))


def check_view(rule: LookupRule, view: View) -> None:
    """A view of some samples gives these samples of the whole."""
    mat, chosen = columns(view), [2, -3]
    part = subsample(view, chosen)
    whole = rule.param_jac_t_mat_prod(view, "weight", mat)
    assert_equal(rule.param_jac_t_mat_prod(part, "weight", mat[:, chosen]), whole[:, chosen])
    check_reductions(rule, part)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(), (6,), (2, 4)])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding(batch: int, shape: tuple[int, ...], padding: int | None) -> None:
    rule = EmbeddingRule()
    view = make_view(nn.Embedding(NUM, DIM, padding_idx=padding).double(), tokens(batch, *shape))
    check_input(rule, view)
    check_parameters(rule, view)
    check_reductions(rule, view)
    if batch == 3:
        check_view(rule, view)


def bag(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(NUM, DIM, **options).double()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bag(batch: int, mode: str, padding: int | None) -> None:
    rule = EmbeddingBagRule()
    view = make_view(bag(mode=mode, padding_idx=padding), tokens(batch, 6))
    check_input(rule, view)
    check_parameters(rule, view)
    check_reductions(rule, view)
    if batch == 3:
        check_view(rule, view)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("keyword", [False, True])
def test_embedding_bag_weights(padding: int | None, keyword: bool) -> None:
    rule = EmbeddingBagRule()
    module = bag(mode="sum", padding_idx=padding)
    if keyword:
        view = make_view(module, tokens(3, 4), per_sample_weights=draw(3, 4))
    else:
        view = make_view(module, tokens(3, 4), None, draw(3, 4))
    check_input(rule, view)
    check_parameters(rule, view)
    check_reductions(rule, view)
    check_view(rule, view)


def test_embedding_bag_of_padding_only() -> None:
    for mode in ("sum", "mean", "max"):
        view = make_view(bag(mode=mode, padding_idx=1), torch.tensor([[1, 1], [0, 1]]))
        check_parameters(EmbeddingBagRule(), view)


def test_embedding_bag_first_maximum_wins() -> None:
    module = bag(mode="max")
    with torch.no_grad():
        module.weight[1] = module.weight[3]
    view = make_view(module, torch.tensor([[3, 1, 3], [1, 3, 0], [2, 2, 2]]))
    check_parameters(EmbeddingBagRule(), view)
    check_reductions(EmbeddingBagRule(), view)


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (EmbeddingRule(), nn.Embedding(NUM, DIM, max_norm=1.0)),
        (EmbeddingRule(), nn.Embedding(NUM, DIM, sparse=True)),
        (EmbeddingRule(), nn.Embedding(NUM, DIM, scale_grad_by_freq=True)),
        (EmbeddingBagRule(), nn.EmbeddingBag(NUM, DIM, max_norm=1.0)),
        (EmbeddingBagRule(), nn.EmbeddingBag(NUM, DIM, sparse=True)),
        (EmbeddingBagRule(), nn.EmbeddingBag(NUM, DIM, scale_grad_by_freq=True)),
    ],
)
def test_refused_options(rule: LookupRule, module: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"has (max_norm|sparse|scale_grad_by_freq) set"):
        rule.check(make_view(module, tokens(2, 3)))


def test_embedding_bag_refuses_offsets() -> None:
    view = make_view(bag(mode="sum"), tokens(4), torch.tensor([0, 2]))
    with pytest.raises(UnsupportedError, match="no batch axis"):
        EmbeddingBagRule().check(view)
