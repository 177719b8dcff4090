"""Runs a module once and keeps both what a rule sees and what autograd needs as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule
from backpack_core.record.nested import iter_tensors
from backpack_core.record.view import View
from backpack_products import derivatives
from backpack_products.affine import AffineProduct
from backpack_products.parametric import AffineRule, ParametricRule
from backpack_products.some_samples import subsample
from tests.layers.handmade import make_call

TOLERANCE = 1e-10
COLUMNS = 3


@dataclass
class Execution:
    """What a rule sees, the output, and the input as a leaf, even where the module overwrote it."""

    view: View
    leaf: Tensor
    output: Tensor


def record(module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Execution:
    """Run ``module(x, *args, **kwargs)`` and build the call by hand."""
    module.to(x.dtype)
    leaf = x.clone().requires_grad_()
    call, result = make_call(module, leaf.clone(), *args, **kwargs)
    with torch.no_grad():  # as in a backward pass
        return Execution(View(call), leaf, next(iter_tensors(result)))


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Assert equal shape, and a relative error below the tolerance."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)} != {list(expected.shape)}"
    scale = expected.abs().max().clamp_min(1e-3) if expected.numel() else 1.0
    error = ((found - expected).abs().max() / scale).item()
    assert error < tolerance, f"{what}: relative error {error:.1e}"


def pullback(run: Execution, target: Tensor, mat: Tensor) -> Tensor:
    """``Jᵀ mat`` column by column."""
    columns = [
        torch.autograd.grad(run.output, target, m, retain_graph=True, materialize_grads=True)[0]
        for m in mat
    ]
    return torch.stack(columns)


def per_sample(products: Tensor) -> Tensor:
    """Sum ``[V, N, *]`` to ``[V, N]``."""
    return products.reshape(*products.shape[:2], -1).sum(2)


def check_rule(
    rule: LayerRule, run: Execution, twice: bool = True, tolerance: float = TOLERANCE
) -> None:
    """Compare everything a rule says with autograd.

    Args:
        rule: The rule.
        run: An execution of a module it speaks for.
        twice: Whether torch differentiates the module twice.
        tolerance: Relative error that is allowed.
    """
    view = run.view
    rule.check(view)
    assert not rule.mixes_samples(view)
    generator = torch.Generator().manual_seed(3)
    mat = torch.randn(COLUMNS, *run.output.shape, dtype=run.leaf.dtype, generator=generator)
    mat_in = torch.randn(COLUMNS, *run.leaf.shape, dtype=run.leaf.dtype, generator=generator)
    with torch.no_grad():
        first = rule.jac_t_mat_prod(view, mat)[0]
    assert first is not None
    close(first, pullback(run, run.leaf, mat), "jac_t_mat_prod", tolerance)
    if twice:
        _check_jac(rule, run, mat_in, tolerance)
        _check_second(rule, run, mat[0], mat_in)
    with torch.no_grad():
        image = derivatives.jac_mat_prod(rule, view, mat_in)
    close(per_sample(image * mat), per_sample(first * mat_in), "adjointness", tolerance)
    _check_subsampled(rule, run, mat, first)
    if isinstance(rule, ParametricRule):
        for name in rule.params:
            if getattr(view.module, name) is not None:
                _check_parameter(rule, run, name, mat)
    if isinstance(rule, AffineRule):
        _check_affine(rule, run)


def _check_subsampled(rule: LayerRule, run: Execution, mat: Tensor, whole: Tensor) -> None:
    last = [run.view.batch_size - 1]
    view = subsample(run.view, last)
    with torch.no_grad():
        alone = rule.jac_t_mat_prod(view, mat[:, last])[0]
    assert alone is not None
    close(alone, whole[:, last], "one sample alone")


def _check_jac(rule: LayerRule, run: Execution, mat: Tensor, tolerance: float) -> None:
    with torch.no_grad():
        found = derivatives.jac_mat_prod(rule, run.view, mat)
    dummy = torch.zeros_like(run.output, requires_grad=True)
    (product,) = torch.autograd.grad(
        run.output, run.leaf, dummy, create_graph=True, materialize_grads=True
    )
    if not product.requires_grad:
        close(found, torch.zeros_like(found), "jac_mat_prod")
        return
    expected = [
        torch.autograd.grad(product, dummy, m, retain_graph=True, materialize_grads=True)[0]
        for m in mat
    ]
    close(found, torch.stack(expected), "jac_mat_prod", tolerance)


def _check_second(rule: LayerRule, run: Execution, grad_output: Tensor, mat: Tensor) -> None:
    with torch.no_grad():
        found = derivatives.second_derivative_mat_prod(rule, run.view, grad_output, mat)
    (gradient,) = torch.autograd.grad(
        run.output, run.leaf, grad_output, create_graph=True, materialize_grads=True
    )
    expected = torch.zeros_like(found)
    if gradient.requires_grad:
        rows = [
            torch.autograd.grad(gradient, run.leaf, m, retain_graph=True, materialize_grads=True)[0]
            for m in mat
        ]
        expected = torch.stack(rows)
    close(found, expected, "second_derivative_mat_prod")


def _check_parameter(rule: ParametricRule, run: Execution, name: str, mat: Tensor) -> None:
    parameter = getattr(run.view.module, name)
    with torch.no_grad():
        found = rule.param_jac_t_mat_prod(run.view, name, mat)
    samples = range(run.view.batch_size)
    expected = torch.zeros_like(found)
    for n in samples:
        alone = torch.zeros_like(mat)
        alone[:, n] = mat[:, n]
        expected[:, n] = pullback(run, parameter, alone)
    close(found, expected, f"param_jac_t_mat_prod({name})")

    directions = torch.randn(len(mat), *parameter.shape, dtype=mat.dtype)
    with torch.no_grad():
        image = rule.param_jac_mat_prod(run.view, name, directions)
    # Adjointness, sample by sample; the first product is already known to be right.
    right = per_sample(directions.unsqueeze(1) * expected)
    close(per_sample(image * mat), right, f"param_jac_mat_prod({name})")


def _check_affine(rule: AffineRule, run: Execution) -> None:
    view = run.view
    with torch.no_grad():
        inputs = rule.affine_input(view)[0 : view.batch_size]
        rows = torch.einsum("goi,nsgi->nsgo", _matrix(rule, view, "weight"), inputs)
        if view.module.bias is not None:
            rows = rows + _matrix(rule, view, "bias")
        close(rows, rule.affine_output(view, view.output[None])[0], "the affine form")


def _matrix(rule: AffineRule, view: View, name: str) -> Tensor:
    """The parameter as ``[G, O, I]``, or ``[G, O]``: the arrangement of products, undone."""
    product = rule.param_product(view, name, torch.zeros(1, *view.output_shape).to(view.dtype))
    assert isinstance(product, AffineProduct)
    numbers = torch.arange(product.shape.numel()).reshape(product.sizes)
    arranged = product.to_parameter(numbers)
    several = product.to_parameter(torch.stack([numbers, 2 * numbers])[None])
    assert torch.equal(several, torch.stack([arranged, 2 * arranged])[None])
    matrix = torch.empty(product.shape.numel(), dtype=view.dtype)
    matrix[arranged.flatten()] = torch.arange(product.shape.numel(), dtype=view.dtype)
    order = matrix.long()
    assert torch.equal(arranged.flatten()[order], torch.arange(len(order)))
    return view.parameter(name).flatten()[order].reshape(product.sizes)
