r"""
Pruning with a surgeon
======================

Optimal brain damage only removes weights. Optimal brain surgeon (Hassibi and Stork, 1992) lets the others make up for it.
Removing weights :math:`S` of a layer costs :math:`\tfrac12 w_S^T (H^{-1}_{SS})^{-1} w_S`, and the rest moves by
:math:`-H^{-1}_{:S} (H^{-1}_{SS})^{-1} w_S`. The blocks :math:`H` are Kronecker products, one for each layer.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR

torch.manual_seed(0)
digits = load_digits()
X, Y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
model = extend(nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)))
lossfunc = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(150):
    optimizer.zero_grad()
    lossfunc(model(X), Y).backward()
    optimizer.step()
with backpack(KFLR()):
    lossfunc(model(X), Y).backward()
layers = [(p, p.detach().clone()) for p in model.parameters() if p.ndim == 2]
inverses = [p.kflr.eigenbasis().inverse(1e-4).dense() for p, _ in layers]
shares, losses = torch.linspace(0, 0.9, 19), {"magnitude": [], "damage": [], "surgeon": []}
for (name, found), share in ((pair, share) for pair in losses.items() for share in shares):
    for (parameter, before), inverse in zip(layers, inverses, strict=True):
        w = before.flatten()
        stiffness = {"magnitude": 1.0, "damage": parameter.kflr.diagonal().flatten()}
        score = w.square() * stiffness.get(name, 1 / inverse.diagonal())
        gone = score.argsort()[: int(share * len(w))]
        change = inverse[:, gone] @ torch.linalg.solve(inverse[gone][:, gone], w[gone])
        kept = w - change if name == "surgeon" else w.clone()
        parameter.data = kept.index_fill(0, gone, 0.0).reshape(before.shape)
    found.append(lossfunc(model(X), Y).item())
for name, found in losses.items():
    plt.plot(100 * shares, found, label=name)
assert losses["surgeon"][12] < 0.5 * min(losses["damage"][12], losses["magnitude"][12])
plt.gca().set(xlabel="% of weights removed", ylabel="loss", yscale="log")
plt.legend()
plt.show()
