r"""
Pruning by curvature
====================

Which weights can go? Usually the smallest are removed. Optimal brain damage (LeCun et al., 1990) asks what this does to
the loss: removing :math:`w` costs :math:`\tfrac12 h w^2`, with the diagonal :math:`h` of the curvature.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

torch.manual_seed(0)
digits = load_digits()
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = torch.randperm(len(X)).split([1200, len(X) - 1200])

layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
model = extend(nn.Sequential(*layers))
lossfunc = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    for batch in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        lossfunc(model(X[batch]), y[batch]).backward()
        optimizer.step()

# %%
# The curvature of all weights, once.
with backpack(DiagGGNExact()):
    lossfunc(model(X[train]), y[train]).backward()
weights = [p for p in model.parameters() if p.ndim == 2]
whole = torch.cat([w.detach().flatten() for w in weights])
curvature = torch.cat([w.diag_ggn_exact.flatten() for w in weights])
scores = {"by magnitude": whole.abs(), "by curvature": curvature * whole.square() / 2}

# %%
# Remove more and more, without training again.
shares, curves = torch.linspace(0, 0.97, 40), {name: [] for name in scores}
for name, curve in curves.items():
    rank = scores[name].argsort().argsort()
    for share in shares:
        nn.utils.vector_to_parameters(whole * (rank >= share * len(rank)), weights)
        curve.append((model(X[test]).argmax(1) == y[test]).float().mean().item())
    print(f"{name}: mean accuracy {sum(curve) / len(curve):.3f}")

# %%
# The weights of the first layer that are kept at 80 %, summed over its units, show why: weights of pixels that are
# black in every image may be large, but mean nothing.
figure, (left, *others) = plt.subplots(1, 3, figsize=(8.6, 3.2), layout="constrained")
for axis, (name, score) in zip(others, scores.items(), strict=True):
    left.plot(100 * shares, curves[name], label=name)
    axis.imshow((score >= score.quantile(0.8))[: 64 * 64].reshape(64, 8, 8).sum(0), vmin=0, vmax=40)
    axis.set(title=f"kept {name}", xticks=[], yticks=[])
left.set(xlabel="weights removed [%]", ylabel="test accuracy", ylim=(0, 1))
left.legend(loc="lower left")
plt.show()
