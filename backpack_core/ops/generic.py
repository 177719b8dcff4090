"""The generic definition of every operation, through ``M[v, n] = J_θᵀ mat``. Imports rules only.

Nothing here holds ``[V, N, *θ]`` only to reduce it: the work goes in chunks of columns, and of
samples where one column is too large, whose products fit into the memory budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import singledispatch
from math import prod
from typing import TypeAlias

from torch import Tensor

from backpack_core.budget import memory_budget as memory_budget
from backpack_core.budget import set_memory_budget as set_memory_budget
from backpack_core.calls import ModuleCall
from backpack_core.contractions import CACHE, add_squares
from backpack_core.rules import LayerRule, ParametricRule

Operation: TypeAlias = Callable[[LayerRule, ModuleCall, str, Tensor], Tensor]


class MaterializedRule(ParametricRule):
    """Stands for a product that exists already: the sum over the calls that share a parameter."""

    transparent = True

    def __init__(self, product: Tensor) -> None:
        """Store ``M``, of shape ``[V, N, *θ]``."""
        self.product = product

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        raise AssertionError("a materialized product is never propagated")

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        return self.product

    def param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """The stored product, whatever ``mat`` is."""
        return self.product


@singledispatch
def per_sample(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``M[v, n] = J_θ[n]ᵀ mat[v, n]``, formed once per call for all extensions that ask.

    Args:
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter ``θ``.
        mat: Columns at the output. Shape ``[V, N, *out]``.

    Returns:
        Shape ``[V, N, *θ]``.
    """
    assert isinstance(rule, ParametricRule)
    key = (per_sample, name, id(mat))
    if key not in call.memo:
        call.memo[key] = (rule.param_jac_t_mat_prod(call, name, mat), mat)
    product: Tensor = call.memo[key][0]
    return product


@per_sample.register
def per_sample_materialized(
    rule: MaterializedRule, call: ModuleCall, name: str, mat: Tensor
) -> Tensor:
    """It exists already."""
    return rule.product


def formed(call: ModuleCall, name: str, mat: Tensor) -> Tensor | None:
    """``M`` if an extension had it formed for this call already."""
    return known(per_sample, call, name, mat)


def known(operation: Operation, call: ModuleCall, name: str, mat: Tensor) -> Tensor | None:
    """The result of an operation that an extension asked for by :func:`shared` already."""
    found = call.memo.get((operation, name, id(mat)))
    return None if found is None else found[0]


def shared(
    operation: Operation,
    rule: LayerRule,
    call: ModuleCall,
    name: str,
    mat: Tensor,
) -> Tensor:
    """The result of an operation, computed once per call for all extensions that ask.

    Args:
        operation: A function of this package, or one like it.
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter.
        mat: Columns at the output. Shape ``[V, N, *out]``.

    Returns:
        What the operation returns; not to be changed in place.
    """
    key = (operation, name, id(mat))
    if key not in call.memo:
        call.memo[key] = (operation(rule, call, name, mat), mat)
    result: Tensor = call.memo[key][0]
    return result


def shared_moments(
    rule: LayerRule, call: ModuleCall, name: str, mat: Tensor
) -> tuple[Tensor, Tensor]:
    """Both :func:`moments`, which :func:`shared` then knows as the two operations, too."""
    keys = [(operation, name, id(mat)) for operation in (per_sample_sum, square_sum)]
    if not all(key in call.memo for key in keys):
        for key, value in zip(keys, moments(rule, call, name, mat), strict=True):
            call.memo[key] = (value, mat)
    total, squares = (call.memo[key][0] for key in keys)
    return total, squares


@singledispatch
def square_sum(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_v Σ_n M[v, n]²``. Shape ``[*θ]``. Arguments as in :func:`per_sample`."""
    result: Tensor | None = None
    for _, _, part in chunks(rule, call, name, mat):
        if result is None:
            result = part.new_zeros(part.shape[2:])
        result = add_squares(result, part.flatten(0, 1))
    assert result is not None
    return result


@singledispatch
def per_sample_square_sum(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_v M[v, n]²``. Shape ``[N, *θ]``. Arguments as in :func:`per_sample`."""
    result: Tensor | None = None
    for _, samples, part in chunks(rule, call, name, mat):
        if result is None:
            result = part.new_zeros(mat.shape[1], *part.shape[2:])
        result[samples] += part.square().sum(0)
    assert result is not None
    return result


@singledispatch
def squared_norm(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``‖M[v, n]‖²``. Shape ``[V, N]``. Arguments as in :func:`per_sample`."""
    result: Tensor | None = None
    for columns, samples, part in chunks(rule, call, name, mat):
        if result is None:
            result = part.new_empty(mat.shape[:2])
        result[columns, samples] = part.flatten(2).square().sum(2)
    assert result is not None
    return result


@singledispatch
def per_sample_sum(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_n M[v, n]``. Shape ``[V, *θ]``. Arguments as in :func:`per_sample`."""
    result: Tensor | None = None
    for columns, _, part in chunks(rule, call, name, mat):
        if result is None:
            result = part.new_zeros(len(mat), *part.shape[2:])
        result[columns] += part.sum(1)
    assert result is not None
    return result


@singledispatch
def moments(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_n M[v, n]`` and ``Σ_v Σ_n M[v, n]²``. Arguments as in :func:`per_sample`."""
    return per_sample_sum(rule, call, name, mat), square_sum(rule, call, name, mat)


@singledispatch
def gram(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``⟨M[v, n], M[w, m]⟩``. Shape ``[V, N, V, N]``. Arguments as in :func:`per_sample`."""
    product = rule.product if isinstance(rule, MaterializedRule) else formed(call, name, mat)
    if product is None:
        assert isinstance(rule, ParametricRule)
        product = rule.param_jac_t_mat_prod(call, name, mat)
    flat = product.flatten(2).flatten(0, 1)
    lead = mat.shape[:2]
    return (flat @ flat.T).reshape(*lead, *lead)


def chunks(
    rule: LayerRule, call: ModuleCall, name: str, mat: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """``M`` piece by piece.

    Yields:
        ``(columns, samples, M[columns, samples])``, each product within the memory budget as far
        as one column of one sample allows.
    """
    whole = slice(None)
    existing = rule.product if isinstance(rule, MaterializedRule) else formed(call, name, mat)
    if existing is not None:
        step = max(1, CACHE // max(1, existing[:, :1].nbytes))
        for start in range(0, existing.shape[1], step):
            rows = slice(start, start + step)
            yield whole, rows, existing[:, rows]
        return
    assert isinstance(rule, ParametricRule)
    size = prod(call.parameter(name).shape) * mat.element_size()
    samples = mat.shape[1]
    fitting = max(1, memory_budget() // max(1, size * samples))
    if fitting >= len(mat):
        yield whole, whole, rule.param_jac_t_mat_prod(call, name, mat)
        return
    few = min(samples, max(1, memory_budget() // max(1, size)))
    for start in range(0, samples, few):
        rows = slice(start, start + few)
        part = call if few == samples else call.subsample(range(samples)[rows])
        for first in range(0, len(mat), fitting):
            columns = slice(first, first + fitting)
            yield columns, rows, rule.param_jac_t_mat_prod(part, name, mat[columns, rows])
