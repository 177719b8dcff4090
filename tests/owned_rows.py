"""Rows of a cross entropy that are of samples in any order, against sums over the rows of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle


def check_owned_rows(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    logits: Tensor,
    owners: Tensor,
    parameters: Sequence[nn.Parameter],
    is_module: bool,
) -> None:
    """Compare individual gradients and diagonals of the generalised Gauss-Newton matrix.

    Args:
        model: The model, not extended yet.
        x: What it receives, with samples in front.
        y: The class of each row that it returns.
        logits: What it returns, ``[R, C]``, with a graph.
        owners: The sample of each row, ``[R]``.
        parameters: Those that rows depend on.
        is_module: Whether the loss is an extended module, which has a curvature, or a function.
    """
    p = logits.detach().softmax(1)
    hessian = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(y)
    weights = (p - F.one_hot(y, p.shape[1])) / len(y)
    lossfunc = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    extensions = [BatchGrad(), SumGradSquared()]
    extensions += [BatchDiagGGNExact(), DiagGGNExact()] if is_module else []
    with backpack(*extensions, check="always"):
        lossfunc(extend(model)(x), y).backward()
    for parameter in parameters:
        found, zeros = vars(parameter), parameter.new_zeros(len(x), *parameter.shape)
        rows = [torch.autograd.grad(z, parameter, retain_graph=True)[0] for z in logits.flatten()]
        jacobian = torch.stack(rows).view(*p.shape, *parameter.shape)
        gradients = torch.einsum("rc,rc...->r...", weights, jacobian)
        expected = zeros.index_add(0, owners, gradients)
        oracle.assert_close(found["grad_batch"], expected)
        oracle.assert_close(found["sum_grad_squared"], expected.square().sum(0))
        if is_module:
            diagonals = torch.einsum("rc...,rcd,rd...->r...", jacobian, hessian, jacobian)
            expected = zeros.index_add(0, owners, diagonals)
            oracle.assert_close(found["diag_ggn_exact_batch"], expected)
            oracle.assert_close(found["diag_ggn_exact"], expected.sum(0))
