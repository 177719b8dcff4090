"""Rules for embeddings: parameter Jacobians are zero except in the rows that were looked up."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import by_slot, optional_tensor, tensor
from backpack_products import LookupProduct
from backpack_products.parametric import ProductRule


class LookupRule(ProductRule):
    """``M[v, n] = Σ_{k: sample k = n} e_{row k} ⊗ grads[v, k]`` for a table ``[num, dim]``."""

    params = ("weight",)
    linear_in_params = ("weight",)

    def check(self, view: View) -> None:
        """Refuse sparse gradients, and options that make samples depend on the batch."""
        reasons = {
            "max_norm": "renormalises the table while it is read",
            "scale_grad_by_freq": "divides gradients by counts over the whole batch",
            "sparse": "makes gradients sparse, but quantities are dense",
        }
        for option, reason in reasons.items():
            if getattr(view.module, option):
                raise UnsupportedError(
                    f"{view.path} has {option} set, which {reason}: leave {option} out."
                )

    @abstractmethod
    def lookup_columns(self, view: View, mat: Tensor) -> Tensor:
        """Columns at each look-up: ``[V, N, *out] → [V, N, K, dim]``. Padding has none."""

    def _param_product(self, view: View, name: str, mat: Tensor) -> LookupProduct:
        out, tokens = self.lookup_columns(view, mat), _tokens(view)
        row = tokens.reshape(tokens.shape[0], tokens.shape[1:].numel())
        return LookupProduct(out, row, view.parameter_itself(name).shape)


def _tokens(view: View) -> Tensor:
    return tensor(view, "input")


def _trains(view: View) -> Tensor | None:
    """Which entries are not padding, in the shape of the input; ``None`` if there is no padding."""
    padding = cast("Embedding | EmbeddingBag", view.module).padding_idx
    return None if padding is None else torch.ne(_tokens(view), padding)


class EmbeddingRule(LookupRule):
    """``y[n, s] = W[x[n, s]]``. The input is integer and has no derivative."""

    module_types = (Embedding,)
    hessian_is_zero = True

    def lookup_columns(self, view: View, mat: Tensor) -> Tensor:
        """The columns at the position of the token."""
        trains = _trains(view)
        columns = mat if trains is None else mat * trains.unsqueeze(-1)
        return columns.reshape(*mat.shape[:2], mat.shape[2:-1].numel(), mat.shape[-1])

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[None]:
        return (None,)


class EmbeddingBagRule(LookupRule):
    """``y[n] = Σ_k c[n, k] ⊙ W[x[n, k]]``.

    ``c`` holds the weights of a weighted sum, or ``1/length`` for a mean. For a maximum, it is one
    at each feature's largest entry (the first of equals), else zero. Padding has ``c = 0``.
    """

    module_types = (EmbeddingBag,)

    def check(self, view: View) -> None:
        """Refuse bags given by offsets, too: their indices have no batch axis."""
        super().check(view)
        if _tokens(view).dim() != 2:
            raise UnsupportedError(
                f"{view.path} received its bags as one axis of indices with offsets, so its input "
                "has no batch axis: pad the bags to one length with padding_idx, and pass them as "
                "[N, length]."
            )

    def lookup_columns(self, view: View, mat: Tensor) -> Tensor:
        """The columns of the bag, times ``c``."""
        factor = view.once("factor", lambda: self._factor(view))
        return mat.unsqueeze(2) * factor

    def _factor(self, view: View) -> Tensor:
        """``c``. Shape ``[N, K, 1]`` or, for a maximum, ``[N, K, dim]``."""
        trains = _trains(view)
        if trains is None:
            trains = torch.ones_like(_tokens(view), dtype=torch.bool)
        counts = trains.unsqueeze(-1)
        if view.module.mode == "max":
            return self._winners(view, counts)
        factor = counts.to(view.dtype)
        if view.module.mode == "mean":
            return factor / factor.sum(1, keepdim=True).clamp(min=1.0)
        weights = optional_tensor(view, "per_sample_weights")
        return factor if weights is None else factor * weights.unsqueeze(-1)

    def _winners(self, view: View, counts: Tensor) -> Tensor:
        rows = view.parameter("weight").detach()[_tokens(view)].masked_fill(~counts, float("-inf"))
        largest = rows == rows.amax(1, keepdim=True)
        return (largest & (largest.cumsum(1) == 1) & counts).to(view.dtype)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        if optional_tensor(view, "per_sample_weights") is None:
            return (None,) * len(view.stored.inputs)
        rows, trains = view.parameter("weight")[_tokens(view)], _trains(view)
        if trains is not None:
            rows = rows * trains.unsqueeze(-1)
        product = torch.einsum("vnd,nkd->vnk", mat, rows)
        return by_slot(view, {"per_sample_weights": (product,)})
