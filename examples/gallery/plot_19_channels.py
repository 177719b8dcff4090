r"""
Saliency, and channels to prune
===============================

``perturb`` reads quantities at the inputs of modules. The curvature in the input shows which pixels a net is sensitive to.
The curvature in activations says what removing a channel costs: :math:`\tfrac12 a^T G a`.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagGGNExact, SqrtGGNExact
from backpack_layers.perturbation import perturb

torch.manual_seed(0)
digits = load_digits()
X, Y = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.Flatten()]
model, lossfunc = extend(nn.Sequential(*layers, nn.Linear(64, 10))), extend(nn.CrossEntropyLoss())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for rows in [rows for _ in range(4) for rows in torch.randperm(len(X)).split(64)]:
    optimizer.zero_grad()
    lossfunc(model(X[rows]), Y[rows]).backward()
    optimizer.step()
with perturb(model, "", "2", alone=True) as received:
    loss = lossfunc(model(X[:500]), Y[:500])
with backpack(BatchDiagGGNExact(), SqrtGGNExact()):
    loss.backward()
a, root = model[:2](X[:500]).detach(), received["2"].sqrt_ggn_exact
costs = {"curvature": (root * a).sum((3, 4)).square().sum((0, 1)) / 2, "size": a.mean((0, 2, 3))}
figure, axes = plt.subplot_mosaic("ABCLL;DEFLL", figsize=(8.6, 3.4), layout="constrained")
for n, (image, below) in enumerate(("AD", "BE", "CF")):
    axes[image].imshow(X[n, 0], cmap="Greys")
    axes[below].imshow(received[""].diag_ggn_exact_batch[n, 0].sqrt())
curves = {}
for name, cost in costs.items():
    masks = [(cost.argsort().argsort() >= k).float().view(16, 1, 1) for k in range(13)]
    curves[name] = [lossfunc(model[2:](model[:2](X) * m), Y).item() for m in masks]
    axes["L"].plot(curves[name], label=f"by {name}")
assert sum(curves["curvature"]) < sum(curves["size"])
axes["L"].set(xlabel="channels removed, of 16", ylabel="loss", yscale="log")
axes["L"].legend()
plt.show()
