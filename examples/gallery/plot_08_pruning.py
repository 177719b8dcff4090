r"""
Pruning by curvature
====================

Which weights can go? Usually the smallest are removed. Optimal brain damage (LeCun et al., 1990) asks what this does to
the loss: removing :math:`w` costs :math:`\tfrac12 h w^2`, with the diagonal :math:`h` of the curvature.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

torch.manual_seed(0)
digits = load_digits()
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
shuffled = torch.randperm(len(X))
train, test = shuffled[:1200], shuffled[1200:]

model = extend(
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
)
lossfunc = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    for batch in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        lossfunc(model(X[batch]), y[batch]).backward()
        optimizer.step()

# %%
# The curvature of all weights, once.
loss = lossfunc(model(X[train]), y[train])
with backpack(DiagGGNExact()):
    loss.backward()
weights = [p for p in model.parameters() if p.ndim == 2]
values = torch.cat([w.detach().flatten() for w in weights])
scores = {
    "by magnitude": values.abs(),
    "by curvature": torch.cat([w.diag_ggn_exact.flatten() for w in weights]) * values.square() / 2,
}

# %%
# Remove more and more, without training again.
whole = [w.detach().clone() for w in weights]


def keep(mask: Tensor) -> None:
    """Set all other weights to zero."""
    sizes = [w.numel() for w in whole]
    for weight, before, part in zip(weights, whole, mask.split(sizes), strict=True):
        weight.data = before * part.reshape(before.shape)


shares = torch.linspace(0, 0.97, 40)
accuracies = {}
for name, score in scores.items():
    rank = score.argsort().argsort()
    accuracies[name] = []
    for share in shares:
        keep(rank >= share * len(rank))
        with torch.no_grad():
            right = (model(X[test]).argmax(1) == y[test]).float().mean().item()
        accuracies[name].append(right)
    mean = sum(accuracies[name]) / len(shares)
    last = max(s for s, a in zip(shares, accuracies[name], strict=True) if a > 0.9)
    print(f"{name}: above 90 % accuracy up to {last:.0%} removed; mean accuracy {mean:.3f}")
assert sum(accuracies["by curvature"]) > sum(accuracies["by magnitude"])

# %%
# The weights of the first layer that are kept at 80 %, summed over its units, show why: weights of pixels that are
# black in every image may be large, but mean nothing.
figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(8.6, 3.2), width_ratios=[1.7, 1, 1], layout="constrained"
)
for colour, (name, curve) in zip(("grey", "#0b6e63"), accuracies.items(), strict=True):
    left.plot(100 * shares, curve, color=colour, label=name)
left.set(xlabel="weights removed [%]", ylabel="test accuracy", ylim=(0, 1))
left.legend(loc="lower left")
for axis, (name, score) in zip((middle, right), scores.items(), strict=True):
    kept = (score >= score.quantile(0.8))[: 64 * 64].reshape(64, 8, 8).sum(0)
    image = axis.imshow(kept, vmin=0, vmax=40)
    axis.set(title=f"kept {name}", xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
figure.colorbar(image, ax=right, label="weights per pixel", shrink=0.8)
plt.show()
