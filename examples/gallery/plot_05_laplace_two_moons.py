r"""
Laplace: knowing what one does not know
=======================================

A trained classifier is sure of itself everywhere, even far from all data. The Laplace approximation
takes the curvature at the trained weights as the precision of a Gaussian over weights
(MacKay, 1992; Daxberger et al., 2021, arXiv:2106.14806). This example compares three forms of the curvature: its
diagonal, Kronecker factors, and the whole matrix.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import make_moons
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR, BatchGrad, DiagGGNExact, SqrtGGNExact

torch.manual_seed(0)
points, labels = make_moons(200, noise=0.12, random_state=0)
X, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)[:, None]
PRIOR = 0.1  # precision of the prior on weights

model = extend(
    nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
)
lossfunc = extend(nn.BCEWithLogitsLoss(reduction="sum"))
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, lr=0.02)
for _ in range(800):
    optimizer.zero_grad()
    penalty = PRIOR / 2 * sum(p.square().sum() for p in parameters)
    (lossfunc(model(X), y) + penalty).backward()
    optimizer.step()

# %%
# One backward pass gives all three. The whole matrix is the square of its root.
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact(), KFLR(), SqrtGGNExact()):
    loss.backward()

root = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in parameters], dim=2).flatten(0, 1)
full = root.T @ root
diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in parameters])
assert torch.allclose(full.diagonal(), diagonal, rtol=1e-3, atol=1e-4)
print(f"{len(diagonal)} parameters, {len(X)} points")

# %%
# The variance of the output at a point is :math:`J \Sigma J^\top`, with the gradient :math:`J` of the output in
# the weights. That is an individual gradient if the "loss" is the sum of outputs.


def jacobians(inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and their gradient in each parameter, ``[N, *θ]``."""
    output = model(inputs)
    with backpack(BatchGrad()):
        output.sum().backward()
    return output.detach().squeeze(1), [p.grad_batch for p in parameters]


def variances(rows: list[Tensor]) -> dict[str, Tensor]:
    """The variance of the output, for the three forms."""
    flat = torch.cat([row.flatten(1) for row in rows], dim=1)
    kron = [p.kflr.solve(row, damping=PRIOR) for p, row in zip(parameters, rows, strict=True)]
    solved = torch.linalg.solve(full + PRIOR * torch.eye(len(full)), flat.T).T
    return {
        "diagonal": (flat.square() / (diagonal + PRIOR)).sum(1),
        "Kronecker factors": sum(
            (row * k).flatten(1).sum(1) for row, k in zip(rows, kron, strict=True)
        ),
        "whole matrix": (flat * solved).sum(1),
    }


side = torch.linspace(-4, 5, 90), torch.linspace(-4, 4.5, 90)
grid = torch.cartesian_prod(*side)
output, rows = jacobians(grid)
confidence = {"trained weights alone": output.sigmoid()}
for name, variance in variances(rows).items():
    confidence[name] = (output / (1 + torch.pi / 8 * variance).sqrt()).sigmoid()

# %%
# Far from the data, the model with trained weights alone is certain. With any form of the curvature, it is not.
distance = torch.cdist(grid, X).amin(1)
sure = {name: (p - 0.5).abs().mul(2)[distance > 2].mean().item() for name, p in confidence.items()}
for name, value in sure.items():
    print(f"{name:22} mean confidence far away: {value:.2f}")
assert all(value < sure["trained weights alone"] - 0.05 for value in list(sure.values())[1:])
on_data, _ = jacobians(X)
assert ((on_data > 0) == y.squeeze(1).bool()).float().mean() > 0.97

# %%
figure, axes = plt.subplots(2, 2, figsize=(8, 6.6), sharex=True, sharey=True, layout="constrained")
for axis, (name, p) in zip(axes.flat, confidence.items(), strict=True):
    image = axis.contourf(
        *side, p.reshape(90, 90).T, levels=torch.linspace(0, 1, 21).tolist(), cmap="RdBu_r"
    )
    axis.contour(*side, p.reshape(90, 90).T, levels=[0.5], colors="black", linewidths=1)
    axis.scatter(
        *X.T, c=["#08306b" if v else "#67000d" for v in (1 - y.squeeze()).tolist()], s=8, lw=0
    )
    axis.set(title=name, xticks=[], yticks=[])
    axis.grid(visible=False)
figure.colorbar(image, ax=axes, label="probability of one moon", ticks=[0, 0.5, 1], shrink=0.7)
plt.show()
