"""Calls of modules with several inputs or outputs, made by hand, and what autograd says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule, ParametricRule
from backpack_core.record.structure import iter_tensors
from backpack_core.record.view import View

TOLERANCE = 1e-10


def make_call(module: Module, *args: Any, output_nr: int = 0, **kwargs: Any) -> ModuleCall:
    """Run ``module`` without hooks and note what it received and returned."""
    result = module(*args, **kwargs)
    inputs = (*iter_tensors(args), *iter_tensors(kwargs))
    outputs = tuple(t.detach() for t in iter_tensors(result))
    return ModuleCall(
        module=module,
        args=args,
        kwargs=kwargs,
        inputs=inputs,
        edges=(None,) * len(inputs),
        outputs=outputs,
        frame=None,
        thread=threading.get_ident(),
        training=module.training,
        output_nr=output_nr,
        _versions=tuple(t._version for t in (*inputs, *outputs)),
    )


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


def columns(call: ModuleCall, count: int = 3) -> Tensor:
    """Random columns at the output. Shape ``[V, N, *out]``."""
    return draw(count, *call.output_shape)


def rerun(call: ModuleCall) -> tuple[tuple[Tensor, ...], Tensor]:
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

    args, kwargs = leaf(call.args), leaf(call.kwargs)
    result = call.module(*args, **kwargs)
    return tuple(leaves), list(iter_tensors(result))[call.output_nr]


def input_oracle(call: ModuleCall, mat: Tensor) -> list[Tensor | None]:
    """For every input, ``J_xᵀ mat`` by autograd, column by column."""
    leaves, output = rerun(call)
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        return [None] * len(leaves)
    rows = [
        torch.autograd.grad(output, wanted, column, retain_graph=True, materialize_grads=True)
        for column in mat
    ]
    products = iter([torch.stack(grads) for grads in zip(*rows, strict=True)])
    return [next(products) if t.requires_grad else None for t in leaves]


def parameter_oracle(call: ModuleCall, name: str, mat: Tensor, axis: int = 0) -> Tensor:
    """``J_θ[n]ᵀ mat[v, n]`` by autograd: one sample of one column at a time.

    Args:
        call: The call.
        name: Which parameter ``θ``.
        mat: Columns at the output.
        axis: The batch axis of the output.
    """
    _, output = rerun(call)
    theta = call.module.get_parameter(name)

    def gradient(column: Tensor, sample: int) -> Tensor:
        single = torch.zeros_like(column)
        single.select(axis, sample).copy_(column.select(axis, sample))
        return torch.autograd.grad(
            output, theta, single, retain_graph=True, materialize_grads=True
        )[0]

    samples = range(output.shape[axis])
    return torch.stack([torch.stack([gradient(c, n) for n in samples]) for c in mat])


def check_input(rule: LayerRule, call: ModuleCall, constant: tuple[int, ...] = ()) -> None:
    """``jac_t_mat_prod`` against autograd, for every input that takes a gradient.

    Args:
        rule: The rule.
        call: The call.
        constant: Inputs to which the rule passes nothing although autograd would.
    """
    rule.check(call)
    mat = columns(call)
    expected = input_oracle(call, mat)
    found = rule.jac_t_mat_prod(call, mat)
    assert len(found) == len(expected)
    for slot, (product, reference) in enumerate(zip(found, expected, strict=True)):
        if product is None:
            assert reference is None or slot in constant or not bool(reference.abs().sum())
        else:
            assert reference is not None
            assert_equal(product, reference)


def check_parameters(rule: ParametricRule, call: ModuleCall) -> None:
    """``param_jac_t_mat_prod`` against autograd, for every trained parameter of the module."""
    rule.check(call)
    mat = columns(call)
    trained = [name for name, theta in call.module.named_parameters() if theta.requires_grad]
    assert trained
    for name in trained:
        assert name in rule.parameter_names(call.module)
        found = rule.param_jac_t_mat_prod(call, name, mat)
        assert_equal(found, parameter_oracle(call, name, mat))


def check_adjoint(rule: LayerRule, call: ModuleCall, forward: Callable[..., Tensor]) -> None:
    """``⟨J u, w⟩ = ⟨u, Jᵀ w⟩`` for the first input, with ``forward(call, u) = J u``."""
    w, u = columns(call, 2), draw(2, *call.input_shape)
    back = rule.jac_t_mat_prod(call, w)[0]
    assert back is not None
    left = float((forward(call, u) * w).sum().detach())
    right = float((u * back).sum().detach())
    assert abs(left - right) < TOLERANCE * max(1.0, abs(left))
