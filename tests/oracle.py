"""What the extensions should give, by plain autograd: loops over samples, explicit matrices.

Derivatives are those of the kit's oracle. A *forward* maps input tensors ``[N, *]`` to an output
``[N, *out]``, a *loss* maps the output to a number. A quantity is that of several parameters, which
share all forward passes, and each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backpack_core.testing import oracle as kit
from backpack_core.testing.compare import close

Forward = Callable[..., Tensor]
Loss = Callable[[Tensor], Tensor]


def assert_close(ours: Tensor, oracle: Tensor, rtol: float = 1e-10) -> None:
    """Assert equal shapes, and a largest difference below ``rtol`` times the largest entry."""
    close(ours, oracle, "the value", rtol, floor=0.0)


def rows(forward: Forward, inputs: Sequence[Tensor], whole: bool = False) -> list[Tensor]:
    """The output of each sample, ``[*out]``, computed alone.

    Args:
        forward: The model.
        inputs: Its input tensors.
        whole: Run the batch once instead, for models that draw random numbers.
    """
    if whole:
        return list(forward(*inputs))
    return [forward(*(x[n : n + 1] for x in inputs))[0] for n in range(len(inputs[0]))]


def gradient(outputs: Tensor, parameter: Tensor, weights: Tensor) -> Tensor:
    """``J_θᵀ weights``; zero where the output does not depend on the parameter."""
    return kit.gradients(outputs, [parameter], weights)[0]


def individual_gradients(
    forward: Forward,
    loss: Loss,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    whole: bool = False,
) -> list[Tensor]:
    """Gradient of each sample's part of the loss. Shape ``[N, *θ]``."""
    samples = rows(forward, inputs, whole)
    output = torch.stack(samples).detach().requires_grad_()
    (weights,) = torch.autograd.grad(loss(output), output)
    pairs = zip(samples, weights, strict=True)
    found = [kit.gradients(sample, list(parameters), weight) for sample, weight in pairs]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def jacobians(samples: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Jacobian of each sample's output. Shape ``[N, D, P]``; output and parameter flattened."""
    found = [(y.numel(), kit.jacobians(y, dict(enumerate(parameters)))) for y in samples]
    return [
        torch.stack([mats[i].reshape(size, p.numel()) for size, mats in found])
        for i, p in enumerate(parameters)
    ]


def loss_hessians(loss: Loss, output: Tensor) -> Tensor:
    """Hessian of the loss in each sample's output. Shape ``[N, D, D]``.

    Raises:
        ValueError: The loss couples samples.
    """
    samples = len(output)
    leaf = output.detach().requires_grad_()
    full = (
        kit.hessian(loss(leaf), leaf)
        .detach()
        .reshape(samples, output[0].numel(), samples, output[0].numel())
    )
    blocks = torch.stack([full[n, :, n] for n in range(samples)])
    if not torch.isclose(blocks.abs().sum(), full.abs().sum()):
        raise ValueError("The loss couples samples.")
    return blocks


def ggn(
    forward: Forward,
    loss: Loss,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    whole: bool = False,
) -> list[Tensor]:
    """Generalised Gauss-Newton matrix of each sample, ``J_nᵀ ∇²ℓ_n J_n``. Shape ``[N, P, P]``."""
    samples = rows(forward, inputs, whole)
    hessian = loss_hessians(loss, torch.stack(samples))
    return [
        torch.einsum("nca,ncd,ndb->nab", jacobian, hessian, jacobian)
        for jacobian in jacobians(samples, parameters)
    ]


def ggn_diagonals(
    forward: Forward,
    loss: Loss,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    whole: bool = False,
) -> list[Tensor]:
    """Diagonal of each sample's generalised Gauss-Newton matrix. Shape ``[N, *θ]``."""
    samples, found = rows(forward, inputs, whole), []
    hessian = loss_hessians(loss, torch.stack(samples))
    for parameter, own in zip(parameters, jacobians(samples, parameters), strict=True):
        jacobian = own.to(hessian.dtype)
        diagonal = torch.einsum("ncp,ncd,ndp->np", jacobian, hessian, jacobian)
        found.append(diagonal.reshape(len(diagonal), *parameter.shape).to(parameter.dtype))
    return found
