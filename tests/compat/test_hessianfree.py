"""Products by double backward, with Jacobians and Hessians of whole graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from backpack_secondorder.hessianfree import (
    ggn_vector_product,
    ggn_vector_product_from_plist,
    hessian_vector_product,
    jacobian_vector_product,
    transposed_jacobian_vector_product,
)
from tests import oracle
from tests.secondorder.problems import make


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.sin() @ y, (x * x).sum() * y[0], y.sum() ** 3])


def test_jacobians() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    full = torch.cat(jacobian(function, (x, y)), 1)
    f = function(x, y)
    v, w = torch.randn(6), torch.randn(3)
    (forward,) = jacobian_vector_product(f, [x, y], [v[:3], v[3:]])
    oracle.assert_close(forward, full @ v)
    backward = transposed_jacobian_vector_product(f, [x, y], w)
    oracle.assert_close(torch.cat(backward), full.T @ w)
    (single,) = jacobian_vector_product([f], x, v[:3])
    oracle.assert_close(single, full[:, :3] @ v[:3])


def test_hessian() -> None:
    x = torch.randn(4, requires_grad=True)

    def value(x: Tensor) -> Tensor:
        return x.exp().sum() * x.prod()

    full, v = hessian(value, x), torch.randn(4)
    (product,) = hessian_vector_product(value(x), x, v)
    oracle.assert_close(product, full @ v)
    f = value(x)
    gradient = torch.autograd.grad(f, x, create_graph=True)
    oracle.assert_close(hessian_vector_product(f, [x], [v], grad_params=gradient)[0], full @ v)
    (attached,) = hessian_vector_product(value(x), x, v, detach=False)
    assert attached.requires_grad
    assert not product.requires_grad


def test_independent_input_and_constant_gradient() -> None:
    x, y = torch.randn(2, requires_grad=True), torch.randn(3, requires_grad=True)
    products = hessian_vector_product(x.sum(), [x, y], [torch.ones(2), torch.ones(3)])
    assert [p.tolist() for p in products] == [[0.0] * 2, [0.0] * 3]


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("net", ["mlp", "frozen", "convolutions", "residual"])
def test_ggn(net: str, extended: bool) -> None:
    problem = make(net)
    blocks = [b.sum(0) for b in problem.expected(oracle.ggn)]
    if extended:
        extend(problem.model), extend(problem.lossfunc)
    output = problem.model(*problem.inputs)
    loss = problem.lossfunc(output, problem.target)
    for i, (p, block) in enumerate(zip(problem.parameters, blocks, strict=True)):
        vector = [torch.zeros_like(q) for q in problem.parameters]
        vector[i] = torch.randn_like(p)
        expected = (block @ vector[i].flatten()).reshape(p.shape)
        oracle.assert_close(ggn_vector_product(loss, output, problem.model, vector)[i], expected)
        (own,) = ggn_vector_product_from_plist(loss, output, [p], [vector[i]])
        oracle.assert_close(own, expected)


def test_extensions_take_no_part() -> None:
    """Neither do they run, nor are their inputs freed."""
    problem = make("mlp")
    expected = problem.expected(oracle.individual_gradients)
    extend(problem.model), extend(problem.lossfunc)
    output = problem.model(*problem.inputs)
    loss = problem.lossfunc(output, problem.target)
    vector = [torch.randn_like(p) for p in problem.parameters]
    ggn_vector_product(loss, output, problem.model, vector)
    with backpack(BatchGrad()):
        ggn_vector_product(loss, output, problem.model, vector)
        assert not hasattr(problem.parameters[0], "grad_batch")
        loss.backward()
    problem.compare("grad_batch", expected)


def test_sequential_of_linear() -> None:
    model = nn.Linear(3, 1)
    x = torch.randn(5, 3)
    loss = model(x).square().sum()
    products = hessian_vector_product(
        loss, list(model.parameters()), [torch.ones(1, 3), torch.ones(1)]
    )
    wide = torch.cat([x, torch.ones(5, 1)], 1)
    oracle.assert_close(torch.cat([products[0].flatten(), products[1]]), 2 * wide.T @ wide.sum(1))
