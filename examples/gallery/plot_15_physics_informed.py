r"""
A physics-informed net, by Gauss-Newton
=======================================

A net learns to solve :math:`u'' = f` on the unit interval with :math:`u(0) = u(1) = 0`. Adam needs thousands of steps to
get roughly right. Steps with the Gauss-Newton matrix of the residuals are far more exact
(Müller and Zeinhofer, 2023, arXiv:2302.13163). One backward pass gives the square root of that matrix.
"""

import time
from itertools import pairwise

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import SqrtGGNExact

torch.set_num_threads(1)  # everything is small
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
pi = torch.pi


def solution(x: Tensor) -> Tensor:
    """The exact solution."""
    return torch.sin(pi * x) + 0.3 * torch.sin(5 * pi * x)


def right_hand_side(x: Tensor) -> Tensor:
    """Its second derivative."""
    return -(pi**2) * torch.sin(pi * x) - 0.3 * (5 * pi) ** 2 * torch.sin(5 * pi * x)


# %%
# The net carries a value and its first two derivatives in the point, as three positions
# ``[N, 3, width]``. A linear layer treats all three alike, but its bias belongs to the value only. This is Taylor-mode
# differentiation with plain functions between modules. The library knows nothing about it.


class Net(nn.Module):
    """``x`` to the residual's left side, ``u''(x)``, with ``u = x (1 - x) net(x)``."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        sizes = [1, width, width, 1]
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def taylor(self, x: Tensor) -> Tensor:
        """Value, first and second derivative of the net, ``[N, 3]``."""
        jet = torch.stack([x, torch.ones_like(x), torch.zeros_like(x)], dim=1)
        for i, layer in enumerate(self.layers):
            if i:
                t = torch.tanh(jet[:, 0])
                first, second = 1 - t**2, -2 * t * (1 - t**2)
                rest = [first * jet[:, 1], second * jet[:, 1] ** 2 + first * jet[:, 2]]
                jet = torch.stack([t, *rest], dim=1)
            bias = layer(torch.zeros_like(jet[:, :1]))  # derivatives have none
            jet = layer(jet) - torch.cat([torch.zeros_like(bias), bias, bias], dim=1)
        return jet.squeeze(2)

    def forward(self, x: Tensor) -> Tensor:
        value, first, second = self.taylor(x).unbind(1)
        x = x.squeeze(1)
        return (x * (1 - x) * second + 2 * (1 - 2 * x) * first - 2 * value)[:, None]


points = torch.linspace(0.005, 0.995, 120)[:, None]
target = right_hand_side(points)
lossfunc = extend(nn.MSELoss())
fine = torch.linspace(0, 1, 500)[:, None]


def error(net: Net) -> float:
    """Largest distance to the solution."""
    with torch.no_grad():
        u = fine.squeeze(1) * (1 - fine.squeeze(1)) * net.taylor(fine)[:, 0]
        return (u - solution(fine.squeeze(1))).abs().max().item()


# %%
# Levenberg-Marquardt: the step solves ``(G + λ) d = g``, and λ falls after a good step and rises after a bad one.


def gauss_newton(net: Net, steps: int) -> list[tuple[float, float]]:
    """Seconds and error after each step."""
    parameters, damping = list(net.parameters()), 1.0
    history, start = [], time.perf_counter()
    for _ in range(steps):
        net.zero_grad()
        loss = lossfunc(net(points), target)
        with backpack(SqrtGGNExact()):
            loss.backward()
        root = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in parameters], dim=2).flatten(0, 1)
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        before = nn.utils.parameters_to_vector(parameters).detach()
        for _ in range(12):
            matrix = root.T @ root + damping * torch.eye(len(gradient))
            step = torch.linalg.solve(matrix, gradient)
            nn.utils.vector_to_parameters(before - step, parameters)
            with torch.no_grad():
                if lossfunc(net(points), target) < loss:
                    damping = max(damping / 4, 1e-12)
                    break
            damping *= 4
        history.append((time.perf_counter() - start, error(net)))
    return history


def adam(net: Net, steps: int) -> list[tuple[float, float]]:
    """The same, by Adam."""
    optimizer, plain = torch.optim.Adam(net.parameters(), lr=3e-3), nn.MSELoss()
    history, start = [], time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        plain(net(points), target).backward()
        optimizer.step()
        history.append((time.perf_counter() - start, error(net)))
    return history


def fresh() -> Net:
    """The same start."""
    torch.manual_seed(1)
    return Net()


nets = {"Adam, 2000 steps": fresh(), "Gauss-Newton, 150 steps": extend(fresh())}
histories = {
    "Adam, 2000 steps": adam(nets["Adam, 2000 steps"], 2000),
    "Gauss-Newton, 150 steps": gauss_newton(nets["Gauss-Newton, 150 steps"], 150),
}
for name, history in histories.items():
    print(f"{name:24} {history[-1][0]:5.1f} s, largest error {history[-1][1]:.1e}")
assert histories["Gauss-Newton, 150 steps"][-1][1] < histories["Adam, 2000 steps"][-1][1] / 5

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
x = fine.squeeze(1)
left.plot(x, solution(x), color="black", lw=4, alpha=0.25, label="solution")
for colour, (name, history) in zip(("#c2571a", "#0b6e63"), histories.items(), strict=True):
    with torch.no_grad():
        left.plot(x, x * (1 - x) * nets[name].taylor(fine)[:, 0], color=colour, label=name)
    right.semilogy(*zip(*history, strict=True), color=colour, label=name)
left.set(xlabel="x", title="u(x)")
left.legend()
right.set(xlabel="seconds", title="largest error")
plt.show()
