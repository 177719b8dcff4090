"""Attention reads what torch's fused kernels saved, and runs again only where there is nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import backpack_layers.attention as rule
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from tests.cases import Net
from tests.oracle import assert_close

CAUSAL = torch.ones(5, 5, dtype=torch.bool, device="cpu").triu(1)
PADDING = torch.tensor(
    [[False] * 5, [False] * 3 + [True] * 2, [False] * 5, [True] + [False] * 4], device="cpu"
)
# Options of the module, and of its call.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "mask": ({}, {"attn_mask": torch.linspace(-1, 1, 25, device="cpu").reshape(5, 5)}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "more positions": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "one head": ({"num_heads": 1}, {}),
    "other widths": ({"kdim": 3, "vdim": 2}, {}),
}


def net(module: dict[str, Any], call: dict[str, Any], need_weights: bool = False) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)  # its node is the next one of attention's kind, from the second on
        for name in ("one", "two"):
            layer, at = net.get_submodule(name), dict(call)
            if "key_padding_mask" in at:
                at["key_padding_mask"] = at["key_padding_mask"][: len(x)]
            key, value = x[..., : layer.kdim], x[..., : layer.vdim]
            if name == "one" and layer._qkv_same_embed_dim:  # the very same tensor
                key = value = x
            x = x + layer(x, key, value, need_weights=need_weights, **at)[0]
        return net.last(x.mean(1))

    def attention() -> nn.Module:
        return nn.MultiheadAttention(4, **{"num_heads": 2, "batch_first": True, **module})

    parts = {"first": nn.Linear(4, 4), "one": attention(), "two": attention()}
    return Net(forward, **parts, last=nn.Linear(4, 3))


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Individual gradients against a loop over samples; how often attention ran again."""
    again = []
    original = rule._attend_again

    def watched(view: Any) -> Any:
        again.append(view.path)
        return original(view)

    monkeypatch.setattr(rule, "_attend_again", watched)
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    x, y = torch.randn(1, 5, 4).expand(4, 5, 4) + 0.3 * torch.randn(4, 5, 4), torch.arange(4) % 3
    expected = [
        torch.autograd.grad(lossfunc(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
        for n in range(4)
        if "key_padding_mask" not in options
    ]
    loss = extend(lossfunc)(extend(model)(x), y)
    with backpack(BatchGrad()):
        loss.backward()
    for position, parameter in enumerate(model.parameters()):
        found: Any = parameter
        total = found.grad_batch.sum(0)
        assert_close(total, parameter.grad)
        for sample, gradients in enumerate(expected):
            assert_close(found.grad_batch[sample], gradients[position])
    return len(again)


@pytest.mark.host("no kernel of a GPU takes double precision")
@pytest.mark.parametrize("case", CASES)
def test_what_was_saved(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CASES[case]
    assert compare(net(module, call), monkeypatch, **call) == 0


@pytest.mark.host("no kernel of a GPU takes double precision")
@pytest.mark.parametrize("case", CASES)
def test_one_column_goes_through_the_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no mask has to be looked at; also for some samples, in any order."""
    found, by_kernel = [], rule._by_kernel

    def watched(view: Any, context: Tensor) -> Any:
        found.append(by_kernel(view, context))
        return found[-1]

    monkeypatch.setattr(rule, "_by_kernel", watched)
    module, call = CASES[case]
    model, lossfunc = extend(net(module, call)), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 5, 4), torch.arange(4) % 3
    with backpack(BatchGrad(), BatchGrad(subsampling=[2, -4], savefield="some")):
        lossfunc(model(x), y).backward()
    # The first layer's projections are one, of which autograd brings the gradient of all samples.
    assert len(found) == (4 if case in {"more positions", "other widths"} else 3)
    assert {taken is None for taken in found} == {case in {"mask", "padding"}}
    for parameter in model.parameters():
        chosen: Any = parameter
        assert_close(chosen.some, chosen.grad_batch[[2, 0]])


@pytest.mark.host("no kernel of a GPU takes double precision")
def test_without_the_kernel_the_formula_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "KERNEL_BACKWARD", "_no_such_operation")
    module, call = CASES["plain"]
    assert compare(net(module, call), monkeypatch, **call) == 0


@pytest.mark.host("no kernel of a GPU takes double precision")
@pytest.mark.parametrize("case", CASES)
def test_zeros_behind_the_features_of_a_head(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels for half precision on a GPU save them, which take eight features and more."""
    kept = rule.kept_by_kernel

    def padded(view: Any, names: Any, kernel: str = "") -> Any:
        saved = None if kernel else kept(view, names, kernel)
        return (
            None if saved is None else [nn.functional.pad(x, (0, 8 - x.shape[-1])) for x in saved]
        )

    monkeypatch.setattr(rule, "kept_by_kernel", padded)
    module, call = CASES[case]
    assert compare(net(module, call), monkeypatch, **call) == 0


@pytest.mark.parametrize("way", ["weights are asked for", "no fused kernel"])
def test_runs_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was saved in one piece, and never with what an earlier layer saved."""
    kernel = SDPBackend.MATH if way == "no fused kernel" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(kernel):
        assert compare(net({}, {}, way == "weights are asked for"), monkeypatch) == 2


@pytest.mark.host("no kernel of a GPU takes double precision")
def test_an_earlier_layer_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer saves, the second does not: it must not take the first one's."""
    model = net({}, {})
    model.get_submodule("two").register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "need_weights": True}), with_kwargs=True
    )
    assert compare(model, monkeypatch) == 1
