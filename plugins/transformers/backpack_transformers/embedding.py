"""Rule of embeddings that scale what they look up, or find the rows themselves."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import Embedding

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_products import LookupProduct
from backpack_products.parametric import ProductRule
from backpack_transformers.names import EMBEDDINGS
from backpack_transformers.probe import output_with


class EmbeddingRule(ProductRule):
    """``y[n, k] = c W[row[n, k]]`` with one number ``c``.

    Some modules compute the row themselves (positions counted from a mask, or with an offset). The
    rows are found by running the module with a table of row numbers.
    """

    module_types = EMBEDDINGS
    params = ("weight",)
    linear_in_params = params
    hessian_is_zero = True

    def check(self, view: View) -> None:
        """Refuse options that make a sample's gradient depend on the batch, and a wrong layout."""
        module = cast(Embedding, view.module)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise UnsupportedError(f"{view.path} has {option} set: leave {option} out.")
        if len(view.output_shape) < 2:
            raise UnsupportedError(
                f"{view.path} returned a tensor of shape {list(view.output_shape)}, which has no "
                "batch axis, so it has no samples: look up rows [N, ...]."
            )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * len(view.stored.inputs)  # row numbers, masks, or only a shape

    def _param_product(self, view: View, name: str, mat: Tensor) -> LookupProduct:
        row, scale = view.once("rows", lambda: _rows(view))
        out = mat.reshape(*mat.shape[:2], mat.shape[2:-1].numel(), mat.shape[-1]) * scale
        padding = cast(Embedding, view.module).padding_idx
        if padding is not None:  # torch gives the padding row no gradient
            out = out * (row != padding).unsqueeze(-1)
        return LookupProduct(out, row, view.parameter_itself(name).shape)


def _rows(view: View) -> tuple[Tensor, Tensor]:
    """Which rows were looked up, ``[N, K]``, and what they are multiplied by."""
    table = view.parameter_itself("weight")
    numbers = torch.arange(len(table), dtype=torch.float64, device=table.device).unsqueeze(1)
    with torch.no_grad():
        scaled = output_with(view, weight=1 + numbers).squeeze(-1)
        scale = _first(output_with(view, weight=torch.ones_like(numbers)))
    rows = (scaled / scale).round().long() - 1
    # In the precision of the table: many modules round the number to it.
    exact = _first(output_with(view, weight=torch.ones_like(table[:, :1])).detach())
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1), exact.to(view.dtype)


def _first(output: Tensor) -> Tensor:
    """One of the equal entries, ``[1]``; one, if there is none."""
    entries = output.flatten()[:1]
    return entries if len(entries) else entries.new_ones(1)
