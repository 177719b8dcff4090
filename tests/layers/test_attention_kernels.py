"""Multi-head attention against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import (
    assert_equal,
    check_input,
    check_parameters,
    columns,
    differentiable,
    draw,
    make_view,
    parameter_oracle,
)
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.attention import MultiheadAttentionRule
from backpack_products.some_samples import subsample

EMBED, HEADS, QUERIES, KEYS = 4, 2, 3, 5
RULE = MultiheadAttentionRule()
BATCHES = pytest.mark.parametrize("batch", [1, 3])


def attention(num_heads: int = HEADS, **options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(EMBED, num_heads, **{"batch_first": True, **options}).double()
    for theta in module.parameters():  # biases start at zero
        nn.init.normal_(theta, std=0.7)
    return module


def check(view: View) -> None:
    check_input(RULE, view, constant=tuple(range(3, len(view.inputs))))
    check_parameters(RULE, view)
    if view.batch_size > 1:
        check_view(view)


def check_view(view: View) -> None:
    """A view shows the samples it should, whatever the shape of the masks."""
    chosen, mat = [-1, 0], columns(view)
    part = subsample(view, chosen)
    for found, whole in zip(
        RULE.jac_t_mat_prod(part, mat[:, chosen]), RULE.jac_t_mat_prod(view, mat), strict=True
    ):
        if whole is not None:
            assert found is not None
            assert_equal(found, whole[:, chosen])
    for name, _ in view.module.named_parameters():
        product = RULE.param_jac_t_mat_prod(view, name, mat)
        assert_equal(RULE.param_jac_t_mat_prod(part, name, mat[:, chosen]), product[:, chosen])


@BATCHES
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention(batch: int, need_weights: bool, bias: bool) -> None:
    x = draw(batch, QUERIES, EMBED)
    check(make_view(attention(bias=bias), x, x, x, need_weights=need_weights))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 3, "vdim": 2},
    "other sizes, no bias": {"kdim": 3, "vdim": 2, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both, other sizes": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3},
    "one head": {"num_heads": 1},
}


def boolean(*shape: int) -> Tensor:
    """A mask that leaves every query something to look at."""
    mask = torch.rand(*shape) < 0.4
    mask[..., 0] = False
    return mask


@BATCHES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention(batch: int, options: dict[str, Any], need_weights: bool) -> None:
    module = attention(**options)
    view = make_view(
        module,
        draw(batch, QUERIES, EMBED),
        draw(batch, KEYS, module.kdim),
        draw(batch, KEYS, module.vdim),
        key_padding_mask=boolean(batch, KEYS),
        attn_mask=boolean(QUERIES, KEYS),
        need_weights=need_weights,
    )
    check(view)


@BATCHES
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["bool 3d", "2d", "3d", "padding bool", "padding"])
def test_masks(batch: int, need_weights: bool, average: bool, kind: str) -> None:
    masks: dict[str, Tensor] = {
        "bool 3d": boolean(batch * HEADS, QUERIES, KEYS),
        "2d": draw(QUERIES, KEYS),
        "3d": draw(batch * HEADS, QUERIES, KEYS),
        "padding bool": boolean(batch, KEYS),
        "padding": draw(batch, KEYS),
    }
    name = "key_padding_mask" if kind.startswith("padding") else "attn_mask"
    source = draw(batch, KEYS, EMBED)
    check(
        make_view(
            attention(),
            draw(batch, QUERIES, EMBED),
            source,
            source,
            need_weights=need_weights,
            average_attn_weights=average,
            **{name: masks[kind]},
        )
    )


@BATCHES
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}])
def test_causal(batch: int, need_weights: bool, padding: bool, options: dict[str, Any]) -> None:
    x = draw(batch, QUERIES, EMBED)
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    given = {"key_padding_mask": torch.zeros(batch, QUERIES).double()} if padding else {}
    module = attention(**options)
    check(
        make_view(
            module, x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights, **given
        )
    )


def test_queries_that_may_look_nowhere() -> None:
    mask = boolean(QUERIES, KEYS)
    mask[1] = True
    source = draw(2, KEYS, EMBED)
    view = make_view(
        attention(), draw(2, QUERIES, EMBED), source, source, attn_mask=mask, need_weights=False
    )
    assert bool(view.output.isfinite().all())
    check_input(RULE, view, constant=(3,))
    check_parameters(RULE, view)


def test_keywords_in_any_order() -> None:
    view = make_view(
        attention(kdim=3, vdim=2),
        value=draw(2, KEYS, 2),
        query=draw(2, QUERIES, EMBED),
        key=draw(2, KEYS, 3),
    )
    check_input(RULE, view)
    check_parameters(RULE, view)


def test_view_of_a_view() -> None:
    source = draw(4, KEYS, EMBED)
    mask = draw(4 * HEADS, QUERIES, KEYS)
    view = make_view(attention(), draw(4, QUERIES, EMBED), source, source, attn_mask=mask)
    mat = columns(view)
    part = subsample(subsample(view, [3, 1, 2]), [2, 0])
    found = RULE.param_jac_t_mat_prod(part, "in_proj_weight", mat[:, [2, 3]])
    assert_equal(found, RULE.param_jac_t_mat_prod(view, "in_proj_weight", mat)[:, [2, 3]])


def test_frozen_dropout() -> None:
    x = draw(2, QUERIES, EMBED)
    check(make_view(attention(dropout=0.5).eval(), x, x, x))


def test_one_backward_step_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2, QUERIES, EMBED)
    view = make_view(attention(), x, x, x)
    mat = columns(view)
    runs: list[Tensor] = []
    carry_back = RULE._carry_back

    def counted(view: View, mat: Tensor) -> Any:
        runs.append(mat)
        return carry_back(view, mat)

    monkeypatch.setattr(RULE, "_carry_back", counted)
    RULE.jac_t_mat_prod(view, mat)
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        RULE.param_jac_t_mat_prod(view, name, mat)
    assert len(runs) == 1
    RULE.jac_t_mat_prod(view, mat.clone())
    assert len(runs) == 2


def test_differentiable() -> None:
    """Under ``create_graph`` the products depend on inputs and parameters."""
    x = draw(2, QUERIES, EMBED).requires_grad_()
    module = attention()
    view = differentiable(make_view(module, x, x, x))
    mat = columns(view, 1)
    product = RULE.jac_t_mat_prod(view, mat)[0]
    assert product is not None
    found = torch.autograd.grad(product.sum(), [x, module.in_proj_weight])
    fresh = [t.detach().clone().requires_grad_() for t in (x, x, x)]
    output = module(*fresh)[0]
    (first,) = torch.autograd.grad(output, fresh[0], mat[0], create_graph=True)
    second = torch.autograd.grad(first.sum(), [*fresh, module.in_proj_weight])
    assert_equal(found[0], second[0] + second[1] + second[2])
    assert_equal(found[1], second[3])


def test_oracle_sees_a_wrong_sample() -> None:
    x = draw(3, QUERIES, EMBED)
    view = make_view(attention(), x, x, x)
    mat = columns(view)
    swapped = mat.flip(1)
    found = RULE.param_jac_t_mat_prod(view, "in_proj_weight", swapped)
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(found, parameter_oracle(view, "in_proj_weight", mat))


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (attention(batch_first=False), (2, 3, EMBED), "batch_first=True"),
        (attention(), (3, EMBED), "without a batch axis"),
        (attention(dropout=0.1), (2, 3, EMBED), "drops attention weights"),
    ],
    ids=["batch second", "unbatched", "dropout"],
)
def test_refused(module: nn.Module, shape: tuple[int, ...], message: str) -> None:
    x = draw(*shape)
    with pytest.raises(UnsupportedError, match=message):
        RULE.check(make_view(module, x, x, x))


def test_refuses_weights_and_learned_masks() -> None:
    x = draw(2, QUERIES, EMBED)
    with pytest.raises(UnsupportedError, match="attention weights"):
        RULE.check(make_view(attention(), x, x, x, index=1))
    mask = draw(QUERIES, QUERIES).requires_grad_()
    with pytest.raises(UnsupportedError, match="detach it"):
        RULE.check(make_view(attention(), x, x, x, attn_mask=mask))
