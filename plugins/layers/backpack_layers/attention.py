"""The rule of multi-head attention: softmax Jacobians in closed form, all columns at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import cast

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import MultiheadAttention
from torch.nn import functional as F

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import arguments, by_slot, slots, tensor, whole_call
from backpack_layers.attention_nodes import kept_by_kernel, projection
from backpack_layers.once import once_per_columns
from backpack_products.parametric import AffinePairsRule

NAMES = ("query", "key", "value")
SAVED = (*NAMES, "output")
KERNEL = "ScaledDotProductFlashAttentionForCpu"
# A private operation of torch. If it does not exist, the formula is used.
KERNEL_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclass(frozen=True)
class Heads:
    """The tensors of one forward pass, split into ``H`` heads of ``D`` features.

    Attributes:
        query: Scaled by ``1/√D``. Shape ``[N, H, L, D]``.
        key: Shape ``[N, H, S', D]``, where ``S'`` counts the extra positions that the module adds.
        value: Shape ``[N, H, S', D]``.
        weights: The softmax. Shape ``[N, H, L, S']``.
        context: ``weights @ value``. Shape ``[N, H, L, D]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    context: Tensor


class MultiheadAttentionRule(AffinePairsRule):
    """``y = concat_h(softmax(q_h k_hᵀ / √D + mask) v_h) W_oᵀ + b_o``; ``q``, ``k``, ``v`` affine.

    With ``P`` the softmax and ``c`` the columns at ``concat_h``, the columns at the scores are
    ``P ⊙ (c vᵀ − rowsum(P ⊙ c vᵀ))``.
    """

    module_types = (MultiheadAttention,)
    params = (
        "in_proj_weight",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_bias",
        "bias_k",
        "bias_v",
        "out_proj.weight",
        "out_proj.bias",
    )
    linear_in_params = ("out_proj.weight", "out_proj.bias")
    reads_inside = ("in_proj_weight", "in_proj_bias")

    def check(self, view: View) -> None:
        """Refuse layouts without a leading batch axis, dropout, and the weights as an output."""
        module = _module(view)
        if not module.batch_first:
            raise UnsupportedError(
                f"{view.path} has batch_first=False, so axis 0 holds positions, not samples: build "
                "it with batch_first=True and pass [N, L, E], or extend(model, batch_axis=1) if "
                "the model has its samples there."
            )
        if tensor(view, "query").dim() != 3:
            raise UnsupportedError(
                f"{view.path} received a query without a batch axis: pass [N, L, E], with N = 1 "
                "for one sample."
            )
        if view.training and module.dropout > 0:
            raise UnsupportedError(
                f"{view.path} drops attention weights at random (dropout={module.dropout}), and "
                "does not store what it dropped: call eval() on it, or set dropout to 0."
            )
        given = arguments(view)
        for name in ("attn_mask", "key_padding_mask"):
            mask = given[name]
            if mask is not None and mask.requires_grad:
                raise UnsupportedError(
                    f"{view.path} received a {name} that requires a gradient, and this rule sends "
                    "no columns to masks: detach it."
                )
        if view.index != 0:
            raise UnsupportedError(
                f"The loss depends on the attention weights that {view.path} returns, and only "
                "its first output can be differentiated: detach the weights."
            )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        at_inputs = zip(NAMES, self._at_inputs(view, mat), _projections(view), strict=True)
        return by_slot(view, {name: (columns @ weight,) for name, columns, weight in at_inputs})

    def affine_pair(self, view: View, name: str, mat: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output projection, or the input projections behind the softmax Jacobian."""
        if name.startswith("out_proj"):
            inp = None if name == "out_proj.bias" else _merge(_context(view)).unsqueeze(2)
            return mat.unsqueeze(3), inp
        if name in {"bias_k", "bias_v"}:
            extra = self._columns(view, mat)["qkv".index(name[-1])]
            position = tensor(view, "key").shape[1]
            return extra[:, :, position : position + 1].unsqueeze(3), None
        if name == "in_proj_weight":
            return self._packed(view, mat), _packed_inputs(view)
        if name == "in_proj_bias":
            return self._packed(view, mat), None
        which = "qkv".index(name[0])
        inp = tensor(view, NAMES[which]).unsqueeze(2)
        return self._at_inputs(view, mat)[which].unsqueeze(3), inp

    def node_inside(self, view: View) -> Node | None:
        """The node of the product that made query, key and value, if a single one did."""
        return projection(view, *self.reads_inside) if _is_self_attention(view) else None

    def _packed(self, view: View, mat: Tensor) -> Tensor:
        """Columns at the three projections as groups. Shape ``[V, N, S, 3, E]``."""
        if view.inner is not None:  # inside the module, positions are in front
            samples, length, _ = view.output_shape
            size = view.inner.shape[-1] // 3
            return view.inner.reshape(1, length, samples, 3, size).transpose(1, 2)

        def pack() -> Tensor:
            # Query and key may differ in length: positions that one lacks hold zeros.
            cut = self._at_inputs(view, mat)
            if _is_self_attention(view):  # one product with the input that they share
                whole = torch.cat(cut, -1)
                return whole.view(*whole.shape[:-1], 3, cut[0].shape[-1])
            # Each is contiguous, so its product needs no copy.
            return torch.stack(_to_one_length(cut), 2).transpose(2, 3)

        return once_per_columns(view, "packed", mat, pack)

    def _at_inputs(self, view: View, mat: Tensor) -> list[Tensor]:
        """Columns at the three projections, without the positions that the module adds."""
        lengths = [tensor(view, name).shape[1] for name in NAMES]
        columns = self._columns(view, mat)
        return [c[:, :, :length] for c, length in zip(columns, lengths, strict=True)]

    def _columns(self, view: View, mat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns at the projected query, key and value, ``[V, N, L or S', E]`` each."""
        return once_per_columns(view, "columns", mat, lambda: self._carry_back(view, mat))

    def _carry_back(self, view: View, mat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        context = _split(mat @ view.parameter("out_proj.weight"), _module(view).num_heads)
        if len(mat) == 1:
            found = _by_kernel(view, context[0])
            if found is not None:
                query, key, value = (_merge(x).unsqueeze(0) for x in found)
                return query, key, value
        heads = _heads(view)
        along = context @ heads.value.transpose(-1, -2)
        # rowsum(P ⊙ c vᵀ) = rowsum(c ⊙ (P v)), which is the shorter sum.
        scores = heads.weights * (along - (context * heads.context).sum(-1, keepdim=True))
        query = (scores @ heads.key) * (1 / sqrt(heads.key.shape[-1]))
        key = scores.transpose(-1, -2) @ heads.query
        value = heads.weights.transpose(-1, -2) @ context
        return _merge(query), _merge(key), _merge(value)


def _module(view: View) -> MultiheadAttention:
    return cast(MultiheadAttention, view.module)


def _split(x: Tensor, heads: int) -> Tensor:
    """``[*, L, H·D] → [*, H, L, D]``."""
    return rearrange(x, "... l (h d) -> ... h l d", h=heads)


def _merge(x: Tensor) -> Tensor:
    """``[*, H, L, D] → [*, L, H·D]``."""
    return rearrange(x, "... h l d -> ... l (h d)")


def _to_one_length(tensors: list[Tensor]) -> list[Tensor]:
    """Fill up the positions, the last axis but one, with zeros."""
    lengths = {t.shape[-2] for t in tensors}
    if len(lengths) == 1:
        return tensors
    longest = max(lengths)
    return [F.pad(t, (0, 0, 0, longest - t.shape[-2])) for t in tensors]


def _is_self_attention(view: View) -> bool:
    """Whether query, key and value are one tensor."""
    query, *others = (view.stored.inputs[slots(view)[name][0]] for name in NAMES)
    return all(other is query for other in others)


def _packed_inputs(view: View) -> Tensor:
    """Inputs of the three projections as groups, ``[N, S, 3, E]``; a view if all are one tensor."""
    inputs = [tensor(view, name) for name in NAMES]
    if _is_self_attention(view):
        return inputs[0].unsqueeze(2).expand(-1, -1, 3, -1)
    return torch.stack(_to_one_length(inputs), 1).transpose(1, 2)


def _projections(view: View) -> list[Tensor]:
    """The weights of query, key and value."""
    if _module(view)._qkv_same_embed_dim:
        return list(view.parameter("in_proj_weight").chunk(3))
    return [view.parameter(f"{letter}_proj_weight") for letter in "qkv"]


def _by_kernel(view: View, context: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Send one column through torch's fused backward kernel.

    It takes half to two thirds of the time of the formula. It applies if the fused kernel made the
    output, without a mask.

    Args:
        view: The forward execution.
        context: The column at the context. Shape ``[N, H, L, D]``.

    Returns:
        The column at query, key and value, ``[N, H, L or S', D]`` each; ``None`` if the kernel
        does not apply.
    """
    given = arguments(view)
    hinted = given["is_causal"]  # with the hint, torch does not pass the mask to the kernel
    masks = ("key_padding_mask",) if hinted else ("key_padding_mask", "attn_mask")
    if view.is_differentiable or any(given[mask] is not None for mask in masks):
        return None
    kernel = getattr(torch.ops.aten, KERNEL_BACKWARD, None)
    saved = kept_by_kernel(view, (*SAVED, "logsumexp"), KERNEL)
    if kernel is None or saved is None or saved[0].dtype != context.dtype:
        return None
    query, key, value = kernel(context, *saved, 0.0, hinted)
    return query, key, value


def _context(view: View) -> Tensor:
    """The context, without running the attention again if a kernel saved it. ``[N, H, L, D]``."""
    saved = _kept(view, ("output",))
    return _heads(view).context if saved is None else saved[0].to(view.dtype)


def _kept(view: View, names: tuple[str, ...]) -> list[Tensor] | None:
    """What a fused kernel saved, without the zeros that some append to the features of a head."""
    saved = kept_by_kernel(view, names)
    return None if saved is None else [x[..., : _module(view).head_dim] for x in saved]


def _heads(view: View) -> Heads:
    return view.once("heads", lambda: _attend(view))


def _attend(view: View) -> Heads:
    """The heads: as saved by torch's fused kernels, or from running the attention again."""
    saved = _kept(view, SAVED)
    if saved is None:
        return _attend_again(view)
    query, key, value, context = [x.to(view.dtype) for x in saved]
    query = query * (1 / sqrt(query.shape[-1]))
    attention = _softmax(query @ key.transpose(-1, -2), _mask(view, key.shape[2]))
    return Heads(query, key, value, attention, context)


def _attend_again(view: View) -> Heads:
    """Run the attention again, up to the output projection."""
    module = _module(view)
    weights = _projections(view)
    biases: list[Tensor | None] = [None] * 3
    if module.in_proj_bias is not None:
        biases = list(view.parameter("in_proj_bias").chunk(3))
    inputs = [tensor(view, name) for name in NAMES]
    query, key, value = map(F.linear, inputs, weights, biases)
    if module.bias_k is not None:
        extra = [view.parameter(name).expand(len(key), 1, -1) for name in ("bias_k", "bias_v")]
        key, value = torch.cat([key, extra[0]], 1), torch.cat([value, extra[1]], 1)
    if module.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    query, key, value = (_split(x, module.num_heads) for x in (query, key, value))
    query = query * (1 / sqrt(query.shape[-1]))
    attention = _softmax(query @ key.transpose(-1, -2), _mask(view, key.shape[2]))
    return Heads(query, key, value, attention, attention @ value)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    # If all keys of a query are masked, the fused kernels give zeros, not 0/0.
    nowhere = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)


def _mask(view: View, keys: int) -> Tensor | None:
    """What the module adds to the scores, broadcastable to ``[N, H, L, S']``."""
    given = arguments(view)
    if given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]:
        # With is_causal, torch uses the causal mask instead of the one that was passed.
        queries = tensor(view, "query").shape[1]
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=view.inputs[0].device)
        return _additive(view, ~allowed.tril(), 0)
    total = None
    for name in ("attn_mask", "key_padding_mask"):
        if given[name] is None:
            continue
        mask = _per_sample(view, name)
        mask = _additive(view, mask, keys - mask.shape[-1])
        total = mask if total is None else total + mask
    return total


def _per_sample(view: View, name: str) -> Tensor:
    """A mask of this view, as it was passed, with axes ``[N or 1, H or 1, L or 1, S]``."""
    whole, chosen = whole_call(view)
    mask: Tensor = arguments(whole)[name]
    if name == "key_padding_mask":
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask.unflatten(0, (-1, _module(view).num_heads))
    else:
        return mask[None, None]
    return mask if chosen is None else mask[chosen]


def _additive(view: View, mask: Tensor, extra: int) -> Tensor:
    """A mask as numbers to add, with zeros for the positions that the module adds behind."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=view.dtype, device=mask.device)
        mask = zeros.masked_fill(mask, float("-inf"))
    return F.pad(mask.to(view.dtype), (0, extra))
