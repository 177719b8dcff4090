"""Calls of modules with several inputs or outputs, made by hand, and what autograd says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule, NoRule
from backpack_core.record.call import Call, Stored
from backpack_core.record.nested import iter_tensors
from backpack_core.record.view import View
from backpack_products.parametric import ParametricRule

TOLERANCE = 1e-10


def make_call(module: Module, *args: Any, **kwargs: Any) -> tuple[Call, Any]:
    """Run ``module`` without hooks and note what it received and returned.

    Returns:
        The call, and the module's result with its graph.
    """
    inputs = (*iter_tensors(args), *iter_tensors(kwargs))
    versions = [t._version for t in inputs]
    result = module(*args, **kwargs)
    outputs = tuple(t.detach() for t in iter_tensors(result))
    owned = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    parameters = tuple(owned)
    owned.update(module.named_buffers(recurse=False))
    stored = Stored(
        args=args,
        kwargs=kwargs,
        inputs=inputs,
        outputs=outputs,
        versions=(*versions, *(t._version for t in (*outputs, *owned.values()))),
        tensors=owned,
        named=parameters,
    )
    call = Call(
        module=module,
        rule=NoRule(),
        provenance=None,
        edges=(None,) * len(inputs),
        stored=stored,
        thread=threading.get_ident(),
        training=module.training,
        settings=((), ()),
        is_rewired=False,
        is_readable=False,
    )
    return call, result


def make_view(module: Module, *args: Any, index: int = 0, axis: int = 0, **kwargs: Any) -> View:
    """Run ``module``: what a rule sees of it in a backward pass without ``create_graph``."""
    call, _ = make_call(module, *args, **kwargs)
    with torch.no_grad():
        return View(call, index, axis=axis)


def differentiable(view: View) -> View:
    """What a rule sees of the same call in a backward pass with ``create_graph``."""
    with torch.enable_grad():
        return View(view.call, view.index, view.grad_output, axis=view.axis)


def with_gradient(view: View, gradient: Tensor) -> View:
    """The same when a gradient has arrived at the output."""
    with torch.set_grad_enabled(view.is_differentiable):
        return View(view.call, view.index, gradient, axis=view.axis)


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """The largest difference is small in units of the largest expected entry."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    if found.numel() == 0:
        return
    found, expected = found.detach(), expected.detach()
    scale = max(float(expected.abs().max()), 1e-12)
    error = float((found - expected).abs().max()) / scale
    assert error < tolerance, f"relative error {error:.1e}"


def draw(*shape: int) -> Tensor:
    """Random numbers in double precision."""
    return torch.randn(*shape, dtype=torch.float64)


def columns(view: View, count: int = 3) -> Tensor:
    """Random columns at the output. Shape ``[V, N, *out]``."""
    return draw(count, *view.output_shape)


def rerun(view: View) -> tuple[tuple[Tensor, ...], Tensor]:
    """Run the module again on leaves.

    Returns:
        The leaves that stand for the inputs, and the output with its graph.
    """
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            fresh = value.detach().clone()
            leaves.append(fresh.requires_grad_(fresh.is_floating_point()))
            return fresh
        if isinstance(value, (tuple, list)):
            return type(value)([leaf(item) for item in value])
        if isinstance(value, dict):
            return {key: leaf(item) for key, item in value.items()}
        return value

    args, kwargs = leaf(view.args), leaf(view.kwargs)
    result = view.module(*args, **kwargs)
    return tuple(leaves), list(iter_tensors(result))[view.index]


def input_oracle(view: View, mat: Tensor) -> list[Tensor | None]:
    """For every input, ``J_xᵀ mat`` by autograd, column by column."""
    leaves, output = rerun(view)
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        return [None] * len(leaves)
    rows = [
        torch.autograd.grad(output, wanted, column, retain_graph=True, materialize_grads=True)
        for column in mat
    ]
    products = iter([torch.stack(grads) for grads in zip(*rows, strict=True)])
    return [next(products) if t.requires_grad else None for t in leaves]


def parameter_oracle(view: View, name: str, mat: Tensor, axis: int = 0) -> Tensor:
    """``J_θ[n]ᵀ mat[v, n]`` by autograd: one sample of one column at a time.

    Args:
        view: The call.
        name: Which parameter ``θ``.
        mat: Columns at the output.
        axis: The batch axis of the output.
    """
    _, output = rerun(view)
    theta = view.module.get_parameter(name)

    def gradient(column: Tensor, sample: int) -> Tensor:
        single = torch.zeros_like(column)
        single.select(axis, sample).copy_(column.select(axis, sample))
        return torch.autograd.grad(
            output, theta, single, retain_graph=True, materialize_grads=True
        )[0]

    samples = range(output.shape[axis])
    return torch.stack([torch.stack([gradient(c, n) for n in samples]) for c in mat])


def check_input(rule: LayerRule, view: View, constant: tuple[int, ...] = ()) -> None:
    """``jac_t_mat_prod`` against autograd, for every input that takes a gradient.

    Args:
        rule: The rule.
        view: The call.
        constant: Inputs to which the rule passes nothing although autograd would.
    """
    rule.check(view)
    mat = columns(view)
    expected = input_oracle(view, mat)
    found = rule.jac_t_mat_prod(view, mat)
    assert len(found) == len(expected)
    for slot, (product, reference) in enumerate(zip(found, expected, strict=True)):
        if product is None:
            assert reference is None or slot in constant or not bool(reference.abs().sum())
        else:
            assert reference is not None
            assert_equal(product, reference)


def check_parameters(rule: ParametricRule, view: View) -> None:
    """``param_jac_t_mat_prod`` against autograd, for every trained parameter of the module."""
    rule.check(view)
    mat = columns(view)
    trained = [name for name, theta in view.module.named_parameters() if theta.requires_grad]
    assert trained
    for name in trained:
        assert name in rule.parameter_names(view.module)
        found = rule.param_jac_t_mat_prod(view, name, mat)
        assert_equal(found, parameter_oracle(view, name, mat))


def check_adjoint(rule: LayerRule, view: View, forward: Callable[..., Tensor]) -> None:
    """``⟨J u, w⟩ = ⟨u, Jᵀ w⟩`` for the first input, with ``forward(view, u) = J u``."""
    w, u = columns(view, 2), draw(2, *view.input_shape)
    back = rule.jac_t_mat_prod(view, w)[0]
    assert back is not None
    left = float((forward(view, u) * w).sum().detach())
    right = float((u * back).sum().detach())
    assert abs(left - right) < TOLERANCE * max(1.0, abs(left))
