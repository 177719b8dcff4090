"""
Mislabelled digits have large gradients
=======================================

Five percent of the labels are wrong, and nobody knows which. Once a model has learned the rule, the examples that
contradict it pull hardest: their individual gradients are the longest.
``BatchL2Grad`` computes the squared norms without forming a single individual gradient.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchL2Grad

digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
truth = torch.tensor(digits.target)

torch.manual_seed(0)
wrong = torch.randperm(len(X))[: len(X) // 20]
y = truth.clone()
y[wrong] = (truth[wrong] + torch.randint(1, 10, (len(wrong),))) % 10
print(f"{len(wrong)} of {len(X)} labels are wrong")

# %%
# A small convolutional net, trained briefly: long enough for the rule, too short to learn by heart.
model = extend(
    nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
)
lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(8):
    for batch in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        (lossfunc(model(X[batch]), y[batch]) / len(batch)).backward()
        optimizer.step()

# %%
# The norms of all 1797 gradients, from one more backward pass. Squared norms add up over parameters.
loss = lossfunc(model(X), y)
with backpack(BatchL2Grad()):
    loss.backward()
norms = sum(p.batch_l2 for p in model.parameters()).sqrt()

# %%
# How many of the longest gradients belong to wrong labels?
order = norms.argsort(descending=True)
is_wrong = torch.zeros(len(X), dtype=torch.bool)
is_wrong[wrong] = True
found = is_wrong[order].cumsum(0)
hits = found[len(wrong) - 1].item()
print(f"among the {len(wrong)} longest gradients, {hits} belong to wrong labels")
assert hits > 0.8 * len(wrong)

# %%
# The digits with the twelve longest gradients: their labels (red if wrong), and what they really are.
figure = plt.figure(figsize=(8, 5.2), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[1.25, 1])
for axis, index in zip(top.subplots(2, 6).flat, order[:12].tolist(), strict=True):
    axis.imshow(X[index, 0], cmap="gray_r")
    colour = "crimson" if is_wrong[index] else "black"
    axis.set_title(f"labelled {y[index]}\nis {truth[index]}", color=colour, fontsize=9)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
left, right = bottom.subplots(1, 2)
bins = torch.logspace(-2, norms.max().log10().item(), 40).tolist()
left.hist(norms[~is_wrong].clamp(min=0.01).tolist(), bins, label="right label", color="#0b6e63")
left.hist(norms[is_wrong].tolist(), bins, label="wrong label", color="crimson", alpha=0.8)
left.set(xscale="log", xlabel="norm of the gradient", ylabel="digits")
left.legend()
right.plot(range(1, len(X) + 1), (found / len(wrong)).tolist(), color="#0b6e63", label="by norm")
right.plot([0, len(X)], [0, 1], "--", color="grey", label="by chance")
right.set(xlim=(0, 400), xlabel="labels looked at", ylabel="wrong ones found")
right.legend()
plt.show()
