"""Nets for second-order quantities, and their explicit matrices by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backpack_core.testing import oracle as kit
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.oracle import Forward, Loss

Made = tuple[nn.Module, tuple[int, ...]]


def _mlp() -> Made:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)), (4,)


def _deep() -> Made:
    """Deep and narrow: columns are collected in a block."""
    layers = [
        nn.Linear(3, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
        nn.Softplus(),
        nn.Linear(3, 3),
        nn.Sigmoid(),
    ]
    return nn.Sequential(*layers, nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), (3,)


def _piecewise() -> Made:
    layers = [
        nn.Linear(4, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 4),
        nn.LeakyReLU(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers), (4,)


def _in_place() -> Made:
    layers = [nn.Linear(4, 3), nn.ELU(inplace=True), nn.Linear(3, 3), nn.SELU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)), (4,)


def _convolutions() -> Made:
    layers = [
        nn.Conv2d(1, 2, 2, padding=1), nn.Sigmoid(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.Tanh(),
        nn.AvgPool2d(2, stride=1), nn.Flatten(), nn.Linear(2, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers), (1, 5, 5)


def _transposed() -> Made:
    layers = [nn.ConvTranspose1d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers), (2, 2)


def _grouped() -> Made:
    layers = [nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers), (2, 3)


def _tokens() -> Made:
    layers = [
        nn.Linear(3, 3),
        nn.Tanh(),
        nn.Linear(3, 2),
        nn.Flatten(),
        nn.Softplus(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers), (2, 3)


def _normalised() -> Made:
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3), nn.Softmax(1)]
    return nn.Sequential(*layers, nn.Linear(3, 3)), (3,)


def _residual() -> Made:
    """Branches by ``+`` and functional reshapes, before and after a nonlinearity."""

    def forward(net: Net, x: Tensor) -> Tensor:
        first = net.t(net.a(x))
        second = first + net.s(net.b(first)).view(len(x), -1)
        third = net.t(second - 0.5 * first)
        return net.last(torch.relu(third + second))

    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "t": nn.Tanh(), "s": nn.Sigmoid()}
    return Net(forward, **parts, last=nn.Linear(3, 3)), (3,)


def _frozen() -> Made:
    net, shape = _mlp()
    net[0].weight.requires_grad_(False)  # type: ignore[index]
    return net, shape


NETS: dict[str, Callable[[], Made]] = {
    "mlp": _mlp,
    "deep": _deep,
    "piecewise": _piecewise,
    "in_place": _in_place,
    "convolutions": _convolutions,
    "transposed": _transposed,
    "grouped": _grouped,
    "tokens": _tokens,
    "normalised": _normalised,
    "residual": _residual,
    "frozen": _frozen,
}
# Every batch size, reduction and loss, but not every combination.
SETTINGS = [(1, "mean", "ce"), (3, "sum", "ce"), (3, "mean", "mse"), (1, "sum", "mse")]
CHAINS = ["mlp", "deep", "piecewise", "convolutions", "transposed", "tokens"]


def make(net: str, batch: int = 4, reduction: str = "mean", loss: str = "ce") -> Problem:
    """A net by name, with random data, and a cross-entropy or mean-squared-error loss."""
    model, shape = NETS[net]()
    problem = classification(model, shape, batch, reduction=reduction)
    if loss == "mse":
        problem.lossfunc = nn.MSELoss(reduction=reduction)
        problem.target = torch.randn(batch, 3)
    return problem


def hessians(
    forward: Forward,
    loss: Loss,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    whole: bool = False,
) -> list[Tensor]:
    """Hessian of each sample's part of the loss, by double backward. Shape ``[N, P, P]``."""
    samples = oracle.rows(forward, inputs, whole)
    result: list[list[Tensor]] = [[] for _ in parameters]
    for n in range(len(samples)):
        alone = torch.stack([s if m == n else s.detach() for m, s in enumerate(samples)])
        slopes = torch.autograd.grad(
            loss(alone), list(parameters), create_graph=True, materialize_grads=True
        )
        for found, slope, p in zip(result, slopes, parameters, strict=True):
            rows = [oracle.gradient(entry, p, torch.ones(())) for entry in slope.flatten().unbind()]
            found.append(torch.stack([row.flatten() for row in rows]))
    return [torch.stack(found) for found in result]


def chain_curvature(
    modules: Sequence[nn.Module], loss: Loss, x: Tensor, modify: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Blocks ``[P, P]`` of all parameters by the recursion over a chain, sample by sample.

    ``H_x = Jᵀ H_y J + modify(Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²)``, with explicit matrices.
    """
    tensors = [x]
    for module in modules:
        tensors.append(module(tensors[-1]))
    output = tensors[-1].detach().requires_grad_()
    (slopes,) = torch.autograd.grad(loss(output), output)
    blocks = oracle.loss_hessians(loss, output)
    parameters = [p for module in modules for p in module.parameters()]
    total = {p: torch.zeros(p.numel(), p.numel()) for p in parameters}
    for n in range(len(x)):
        slope, hessian = slopes[n].flatten(), blocks[n]
        for module, tensor in zip(reversed(modules), reversed(tensors[:-1]), strict=True):
            value = tensor[n : n + 1].detach()
            result = module(value).flatten()
            for p, rows in kit.jacobians(result, {p: p for p in module.parameters()}).items():
                total[p] += rows.flatten(1).T @ hessian @ rows.flatten(1)
            flat = value.flatten()
            jacobian = torch.autograd.functional.jacobian(
                lambda v, m=module, s=value.shape: m(v.reshape(s)).flatten(), flat
            )
            residual = torch.autograd.functional.hessian(
                lambda v, m=module, s=value.shape, g=slope: m(v.reshape(s)).flatten() @ g, flat
            )
            slope = jacobian.T @ slope
            hessian = jacobian.T @ hessian @ jacobian + modify(residual)
    return list(total.values())
