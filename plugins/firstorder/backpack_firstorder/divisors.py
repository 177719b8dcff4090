"""Divides per-sample gradients entry by entry, as an optimiser's preconditioner does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from backpack_core.errors import ShapeError, UsageError, nearest
from backpack_firstorder.plain import plain_terms
from backpack_firstorder.single import in_single
from backpack_products.affine import AffineProduct
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct, SampleProduct, sum_of
from backpack_products.rows import whole

Divisor: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
Divisors: TypeAlias = Mapping[str, Divisor]


def divided(product: SampleProduct, divisor: Divisor) -> SampleProduct:
    """A product ``[1, N, *θ]`` divided by a divisor, in factors where these allow it.

    At least in single precision, because a small divisor would underflow in half precision.

    Args:
        product: The gradients.
        divisor: Shape ``[*θ]``, or rows ``[R]`` and columns ``[C]`` of ``rows ⊗ columns``. The
            parameter's first axis has the rows, all others the columns.

    Raises:
        ShapeError: The divisor does not fit the parameter.
    """
    single = in_single(product)
    shape, like = single.shape, single.like
    parts: tuple[Tensor, ...]
    if isinstance(divisor, Tensor):
        sizes, expected = [*divisor.shape], [*shape]
        parts = (divisor.detach().to(like.device, like.dtype),)
    else:
        sizes = [part.numel() for part in divisor]
        expected = [shape[0], shape[1:].numel()] if shape else [1, 1]
        parts = tuple(p.detach().flatten().to(like.device, like.dtype) for p in divisor)
    if sizes != expected:
        raise ShapeError(
            f"Gradients {[product.samples, *shape]} need a divisor {expected}. Got {sizes}."
        )
    return sum_of([_divided(term, *parts) for term in plain_terms(single)]).placed_as(product)


def _divided(term: SampleProduct, *parts: Tensor) -> SampleProduct:
    if len(parts) == 2:
        rows, columns = parts
        if isinstance(term, LookupProduct):
            out = term.out / rows[term.row].unsqueeze(-1) / columns
            return LookupProduct(out, term.row, term.shape)
        if isinstance(term, AffineProduct) and term.inp is not None and term.has_rows:
            out = term.out / rows.view(term.out.shape[3:])
            return AffineProduct(out, whole(term.inp) / columns, term.shape)
    by = parts[0] if len(parts) == 1 else torch.outer(*parts).reshape(term.shape)
    if isinstance(term, LookupProduct):
        return LookupProduct(term.out / by[term.row], term.row, term.shape)
    if isinstance(term, DenseProduct) and term.values is not None:
        return DenseProduct(term.values / by)
    mat = term.new_zeros(1).expand(1, term.samples)
    return DenseProduct(form=lambda v, n: term.part(v, n) / by, mat=mat, shape=term.shape)


def divided_by(divisors: Divisors | None, product: SampleProduct, name: str) -> SampleProduct:
    """A product divided by the divisor of its parameter; unchanged if there are no divisors.

    Raises:
        UsageError: The divisors have none for this parameter.
    """
    if divisors is None:
        return product
    if name not in divisors:
        raise UsageError(
            f"There is no divisor for the parameter {name!r}{nearest(name, divisors) or '.'} Give "
            "one for every trained parameter: divisors_of(optimizer, model) makes them."
        )
    return divided(product, divisors[name])


def see_divisors(divisors: Any) -> Divisors | None:
    """Check an argument ``divisors`` and return it.

    Raises:
        UsageError: It is not a mapping from names to divisors.
    """
    if divisors is not None and not isinstance(divisors, Mapping):
        raise UsageError(
            "divisors must map names of parameters to tensors; divisors_of(optimizer, model) does. "
            f"Got {divisors!r:.80}."
        )
    return divisors


# Of optimisers ------------------------------------------------------------------------------------


def divisors_of(optimizer: Optimizer, model: Module) -> dict[str, Divisor]:
    """The divisors by which an optimiser divides gradients, from its state.

    For Adam, AdamW and NAdam: ``√(v / (1 - β₂ᵗ)) + ε``, with ``amsgrad=True`` of the largest ``v``.
    For RAdam: ``(√v + ε) / √(1 - β₂ᵗ) / r`` with its rectification ``r``, and one in the first
    steps, which do not divide. For RMSprop and Adagrad: ``√v + ε``, with ``centered=True``
    ``√(v - ḡ²) + ε`` of the mean gradient ``ḡ``. For Adafactor (of torch, or of ``transformers``):
    the root of its estimate ``r ⊗ c / mean(r)``. For a matrix this is a pair of rows and columns,
    which divide gradients in their factors.

    Args:
        optimizer: The optimiser, after at least one step.
        model: The model, which names the parameters.

    Returns:
        Divisors by parameter name, for ``SampleGradients.divide`` and ``divisors=...`` of
        extensions.

    Raises:
        UsageError: The optimiser has no state for a trained parameter, or is of an unknown kind.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    divisors: dict[str, Divisor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state.get(parameter)
        if not state:
            raise UsageError(
                f"{type(optimizer).__name__} has no state for the parameter {name!r}, and divisors "
                "are made of state: make a step first, or freeze the parameter. Plain SGD never "
                "has state, since it does not divide."
            )
        makers = [make for kind, make in _KINDS.items() if isinstance(optimizer, kind)]
        makers += [make for key, make in _STATES.items() if state.get(key) is not None]
        make = makers[0] if makers else None
        if make is None:
            keys = ", ".join(map(str, state))
            raise UsageError(
                f"The state of {type(optimizer).__name__} ({keys}) does not show what it divides "
                f"{name!r} by. Give divisors yourself, as tensors by parameter name."
            )
        divisors[name] = make(state, groups[id(parameter)])
    return divisors


def _adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    largest = state.get("max_exp_avg_sq")
    square = state["exp_avg_sq"] if largest is None else largest
    prefix = "adam_" if "adam_betas" in group else ""  # K-FAC's, of a parameter without factors
    if f"{prefix}betas" not in group:  # an Adafactor's, of a vector
        return square.sqrt()  # type: ignore[no-any-return]
    correction = 1 - group[f"{prefix}betas"][1] ** float(state["step"])
    return (square / correction).sqrt() + group[f"{prefix}eps"]  # type: ignore[no-any-return]


def _radam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    beta, steps, square = group["betas"][1], float(state["step"]), state["exp_avg_sq"]
    most, correction = 2 / (1 - beta) - 1, 1 - beta**steps
    length = most - 2 * steps * beta**steps / correction
    if length <= 5:
        return torch.ones_like(square)
    share = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
    return (square.sqrt() + group["eps"]) / (correction * share) ** 0.5  # type: ignore[no-any-return]


def _adagrad(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    return state["sum"].sqrt() + group["eps"]  # type: ignore[no-any-return]


def _rmsprop(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    square = state["square_avg"]
    if group.get("centered"):
        square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1).clamp(min=0)
    return square.sqrt() + group["eps"]  # type: ignore[no-any-return]


def _factored(row: Tensor, column: Tensor, least: float) -> Divisor:
    """The root of ``r ⊗ c / mean(r)``, ``[.., R, 1]`` and ``[.., 1, C]``; a matrix's as factors."""
    row = row / row.mean(-2, keepdim=True)
    is_above = bool(row.min() * column.min() >= least)
    if row.dim() == 2 and is_above:
        return row.flatten().sqrt(), column.flatten().sqrt()
    return (row * column).clamp(min=least).sqrt()


def _torch_adafactor(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    least = (group["eps"][0] or torch.finfo(state["row_var"].dtype).eps) ** 2
    return _factored(state["row_var"], state["col_var"], least)


def _torch_adafactor_vector(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    least = group["eps"][0] or torch.finfo(state["variance"].dtype).eps
    return state["variance"].sqrt().clamp(min=least)  # type: ignore[no-any-return]


def _transformers_adafactor(state: Mapping[str, Any], group: Mapping[str, Any]) -> Divisor:
    row, column = state["exp_avg_sq_row"].unsqueeze(-1), state["exp_avg_sq_col"].unsqueeze(-2)
    return _factored(row, column, 0.0)


_Make: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Divisor]
_STATES: dict[str, _Make] = {
    "row_var": _torch_adafactor,
    "variance": _torch_adafactor_vector,
    "exp_avg_sq_row": _transformers_adafactor,
    "exp_avg_sq": _adam,
    "square_avg": _rmsprop,
    "sum": _adagrad,
}
# Optimisers whose state has the names of another's. The divisor of Adadelta has the size of earlier
# steps in it, so there is none.
_KINDS: dict[type[Optimizer], _Make | None] = {
    torch.optim.RAdam: _radam,
    torch.optim.Adadelta: None,
}
