"""Rules for embeddings, whose parameter Jacobians are zero but for the rows that were looked up."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag

from backpack_core import ops
from backpack_core.calls import ModuleCall
from backpack_core.errors import UnsupportedError
from backpack_core.rules import ParametricRule
from backpack_layers.arguments import by_slot, once, optional_tensor, tensor


@dataclass(frozen=True)
class Lookups:
    """All rows that a batch looked up, one entry for each time.

    Attributes:
        sample: Which sample asked. Shape ``[K]``.
        row: Which row of the table it got; a padding row has no columns. Shape ``[K]``.
    """

    sample: Tensor
    row: Tensor


class LookupRule(ParametricRule):
    """``M[v, n] = Σ_{k: sample k = n} e_{row k} ⊗ grads[v, k]`` for a table ``[num, dim]``."""

    params = ("weight",)
    linear_in_params = ("weight",)

    def check(self, call: ModuleCall) -> None:
        """Refuse options that make a sample's gradient depend on the batch, or sparse ones."""
        reasons = {
            "max_norm": "renormalises the table while it is read",
            "scale_grad_by_freq": "divides gradients by counts over the whole batch",
            "sparse": "stores sparse gradients, and quantities here are dense",
        }
        for option, reason in reasons.items():
            if getattr(call.module, option):
                raise UnsupportedError(
                    f"{call.path} has {option} set, which {reason}: leave {option} out."
                )

    @abstractmethod
    def lookups(self, call: ModuleCall) -> Lookups:
        """What was looked up in this call."""

    @abstractmethod
    def lookup_columns(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """Columns at each look-up: ``[V, N, *out] → [V, K, dim]``."""

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        table = call.parameter(name).shape
        found = self.lookups(call)
        grads = self.lookup_columns(call, mat)
        flat = grads.new_zeros(len(mat), mat.shape[1] * table[0], table[1])
        index = found.sample * table[0] + found.row
        return flat.index_add(1, index, grads).reshape(*mat.shape[:2], *table)


def embedding_segments(
    rule: LookupRule, call: ModuleCall, name: str, mat: Tensor
) -> tuple[Tensor, Lookups]:
    """The rows of ``M`` that are not zero: a row that a sample reads twice is summed first.

    Returns:
        Their values ``[V, K', dim]``, and where they belong.
    """
    num = len(call.parameter(name))
    found = rule.lookups(call)
    where, inverse = torch.unique(found.sample * num + found.row, return_inverse=True)
    grads = rule.lookup_columns(call, mat)
    sums = grads.new_zeros(len(mat), len(where), grads.shape[2]).index_add(1, inverse, grads)
    return sums, Lookups(where // num, where % num)


@ops.square_sum.register
def embedding_square_sum(rule: LookupRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_{v, n} M[v, n]²`` without forming ``M``. Shape ``[num, dim]``."""
    sums, found = embedding_segments(rule, call, name, mat)
    zeros = sums.new_zeros(call.parameter(name).shape)
    return zeros.index_add(0, found.row, (sums**2).sum(0))


@ops.squared_norm.register
def embedding_squared_norm(rule: LookupRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_θ M[v, n]²`` without forming ``M``. Shape ``[V, N]``."""
    sums, found = embedding_segments(rule, call, name, mat)
    return sums.new_zeros(mat.shape[:2]).index_add(1, found.sample, (sums**2).sum(2))


@ops.per_sample_sum.register
def embedding_sum(rule: LookupRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_n M[v, n]`` without forming ``M``. Shape ``[V, num, dim]``."""
    grads = rule.lookup_columns(call, mat)
    zeros = grads.new_zeros(len(mat), *call.parameter(name).shape)
    return zeros.index_add(1, rule.lookups(call).row, grads)


def _tokens(call: ModuleCall) -> Tensor:
    return tensor(call, "input")


def _lookups(call: ModuleCall) -> Lookups:
    """One look-up for each entry of the input ``[N, *]``."""
    tokens = _tokens(call)
    sample = torch.arange(len(tokens), device=tokens.device)
    return Lookups(sample.repeat_interleave(tokens.shape[1:].numel()), tokens.flatten())


def _trains(call: ModuleCall) -> Tensor | None:
    """Which entries are no padding, in the shape of the input; ``None`` if all are."""
    padding = cast("Embedding | EmbeddingBag", call.module).padding_idx
    return None if padding is None else torch.ne(_tokens(call), padding)


class EmbeddingRule(LookupRule):
    """``y[n, s] = W[x[n, s]]``. The input is integer and has no derivative."""

    module_types = (Embedding,)

    def lookups(self, call: ModuleCall) -> Lookups:
        """One look-up for each token."""
        return _lookups(call)

    def lookup_columns(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The columns at the position of the token."""
        trains = _trains(call)
        return (mat if trains is None else mat * trains.unsqueeze(-1)).flatten(1, -2)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[None]:
        return (None,)


class EmbeddingBagRule(LookupRule):
    """``y[n] = Σ_k c[n, k] ⊙ W[x[n, k]]``.

    ``c`` holds the weights of a weighted sum, ``1/length`` of a mean, and marks each feature's
    winner of a maximum, the first of equals. Padding counts nowhere.
    """

    module_types = (EmbeddingBag,)

    def check(self, call: ModuleCall) -> None:
        """Refuse also bags given by offsets: their indices have no batch axis."""
        super().check(call)
        if _tokens(call).dim() != 2:
            raise UnsupportedError(
                f"{call.path} received its bags as one axis of indices with offsets, so its input "
                "has no batch axis: pad the bags to one length with padding_idx, and pass them as "
                "[N, length]."
            )

    def lookups(self, call: ModuleCall) -> Lookups:
        """One look-up for each index in a bag."""
        return _lookups(call)

    def lookup_columns(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The columns of the bag, times ``c``."""
        factor = once(call, "factor", lambda: self._factor(call))
        return (mat.unsqueeze(2) * factor).flatten(1, 2)

    def _factor(self, call: ModuleCall) -> Tensor:
        """``c``. Shape ``[N, K, 1]`` or, for a maximum, ``[N, K, dim]``."""
        trains = _trains(call)
        if trains is None:
            trains = torch.ones_like(_tokens(call), dtype=torch.bool)
        counts = trains.unsqueeze(-1)
        if call.module.mode == "max":
            return self._winners(call, counts)
        factor = counts.to(call.dtype)
        if call.module.mode == "mean":
            return factor / factor.sum(1, keepdim=True).clamp(min=1.0)
        weights = optional_tensor(call, "per_sample_weights")
        return factor if weights is None else factor * weights.unsqueeze(-1)

    def _winners(self, call: ModuleCall, counts: Tensor) -> Tensor:
        rows = call.parameter("weight").detach()[_tokens(call)].masked_fill(~counts, float("-inf"))
        largest = rows == rows.amax(1, keepdim=True)
        return (largest & (largest.cumsum(1) == 1) & counts).to(call.dtype)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[Tensor | None, ...]:
        if optional_tensor(call, "per_sample_weights") is None:
            return (None,) * len(call.inputs)
        rows, trains = call.parameter("weight")[_tokens(call)], _trains(call)
        if trains is not None:
            rows = rows * trains.unsqueeze(-1)
        product = torch.einsum("vnd,nkd->vnk", mat, rows)
        return by_slot(call, {"per_sample_weights": (product,)})
