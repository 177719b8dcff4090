"""Embedding rules against autograd, and their reductions against the dense Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import assert_equal, check_input, check_parameters, columns, draw, make_call
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.embedding import (
    EmbeddingBagRule,
    EmbeddingRule,
    LookupRule,
    embedding_square_sum,
    embedding_squared_norm,
    embedding_sum,
)

NUM, DIM = 5, 3


def tokens(*shape: int) -> Tensor:
    """Few rows for many tokens, so that rows repeat within a sample."""
    return torch.randint(NUM, shape)


def check_reductions(rule: LookupRule, call: ModuleCall) -> None:
    mat = columns(call)
    dense = rule.param_jac_t_mat_prod(call, "weight", mat)
    assert_equal(embedding_square_sum(rule, call, "weight", mat), (dense**2).sum((0, 1)))
    assert_equal(embedding_squared_norm(rule, call, "weight", mat), (dense**2).sum((2, 3)))
    assert_equal(embedding_sum(rule, call, "weight", mat), dense.sum(1))


def check_view(rule: LookupRule, call: ModuleCall) -> None:
    """A view of some samples gives these samples of the whole."""
    mat, chosen = columns(call), [2, -3]
    view = call.subsample(chosen)
    whole = rule.param_jac_t_mat_prod(call, "weight", mat)
    assert_equal(rule.param_jac_t_mat_prod(view, "weight", mat[:, chosen]), whole[:, chosen])
    check_reductions(rule, view)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(), (6,), (2, 4)])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding(batch: int, shape: tuple[int, ...], padding: int | None) -> None:
    rule = EmbeddingRule()
    call = make_call(nn.Embedding(NUM, DIM, padding_idx=padding).double(), tokens(batch, *shape))
    check_input(rule, call)
    check_parameters(rule, call)
    check_reductions(rule, call)
    if batch == 3:
        check_view(rule, call)


def bag(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(NUM, DIM, **options).double()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bag(batch: int, mode: str, padding: int | None) -> None:
    rule = EmbeddingBagRule()
    call = make_call(bag(mode=mode, padding_idx=padding), tokens(batch, 6))
    check_input(rule, call)
    check_parameters(rule, call)
    check_reductions(rule, call)
    if batch == 3:
        check_view(rule, call)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("keyword", [False, True])
def test_embedding_bag_weights(padding: int | None, keyword: bool) -> None:
    rule = EmbeddingBagRule()
    module = bag(mode="sum", padding_idx=padding)
    if keyword:
        call = make_call(module, tokens(3, 4), per_sample_weights=draw(3, 4))
    else:
        call = make_call(module, tokens(3, 4), None, draw(3, 4))
    check_input(rule, call)
    check_parameters(rule, call)
    check_reductions(rule, call)
    check_view(rule, call)


def test_embedding_bag_of_padding_only() -> None:
    for mode in ("sum", "mean", "max"):
        call = make_call(bag(mode=mode, padding_idx=1), torch.tensor([[1, 1], [0, 1]]))
        check_parameters(EmbeddingBagRule(), call)


def test_embedding_bag_first_maximum_wins() -> None:
    module = bag(mode="max")
    with torch.no_grad():
        module.weight[1] = module.weight[3]
    call = make_call(module, torch.tensor([[3, 1, 3], [1, 3, 0], [2, 2, 2]]))
    check_parameters(EmbeddingBagRule(), call)
    check_reductions(EmbeddingBagRule(), call)


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
        rule.check(make_call(module, tokens(2, 3)))


def test_embedding_bag_refuses_offsets() -> None:
    call = make_call(bag(mode="sum"), tokens(4), torch.tensor([0, 2]))
    with pytest.raises(UnsupportedError, match="no batch axis"):
        EmbeddingBagRule().check(call)
