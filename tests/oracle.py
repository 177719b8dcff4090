"""What the extensions should give, by plain autograd: loops over samples, explicit matrices.

Derivatives are those of the kit's oracle. A *forward* maps input tensors ``[N, *]`` to an output
``[N, *out]``, a *loss* maps the output to a number.
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
    forward: Forward, loss: Loss, inputs: Sequence[Tensor], parameter: Tensor, whole: bool = False
) -> Tensor:
    """Gradient of each sample's part of the loss. Shape ``[N, *θ]``."""
    samples = rows(forward, inputs, whole)
    output = torch.stack(samples).detach().requires_grad_()
    (weights,) = torch.autograd.grad(loss(output), output)
    pairs = zip(samples, weights, strict=True)
    return torch.stack([gradient(sample, parameter, weight) for sample, weight in pairs])


def jacobians(
    forward: Forward, inputs: Sequence[Tensor], parameter: Tensor, whole: bool = False
) -> Tensor:
    """Jacobian of each sample's output. Shape ``[N, D, P]``; output and parameter flattened."""
    found = [(y, kit.jacobians(y, {0: parameter})[0]) for y in rows(forward, inputs, whole)]
    return torch.stack([mat.reshape(y.numel(), parameter.numel()) for y, mat in found])


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
    forward: Forward, loss: Loss, inputs: Sequence[Tensor], parameter: Tensor, whole: bool = False
) -> Tensor:
    """Generalised Gauss-Newton matrix of each sample, ``J_nᵀ ∇²ℓ_n J_n``. Shape ``[N, P, P]``."""
    jacobian = jacobians(forward, inputs, parameter, whole)
    hessian = loss_hessians(loss, torch.stack(rows(forward, inputs, whole)))
    return torch.einsum("nca,ncd,ndb->nab", jacobian, hessian, jacobian)


def ggn_diagonals(
    forward: Forward, loss: Loss, inputs: Sequence[Tensor], parameter: Tensor, whole: bool = False
) -> Tensor:
    """Diagonal of each sample's generalised Gauss-Newton matrix. Shape ``[N, *θ]``."""
    jacobian = jacobians(forward, inputs, parameter, whole)
    hessian = loss_hessians(loss, torch.stack(rows(forward, inputs, whole)))
    jacobian = jacobian.to(hessian.dtype)
    diagonal = torch.einsum("ncp,ncd,ndp->np", jacobian, hessian, jacobian)
    return diagonal.reshape(len(diagonal), *parameter.shape).to(parameter.dtype)
