r"""
Which classes pull against each other?
======================================

Gradients of two tasks conflict if their inner product is negative (Yu et al., 2020, arXiv:2001.06782).
``BatchDotGrad`` computes the inner products of all examples without their gradients. Averages of these are the inner
products of classes.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDotGrad

torch.manual_seed(0)
digits = load_digits()
X, Y = torch.tensor(digits.data / 16, dtype=torch.float32)[:800], torch.tensor(digits.target)[:800]
model = extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
lossfunc = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = nn.functional.one_hot(Y).T.float()
average = average / average.sum(1, keepdim=True)  # [10, N]
pictures = {}
for step in range(31):
    optimizer.zero_grad()
    with backpack(BatchDotGrad()):
        lossfunc(model(X), Y).backward()
    gram = average @ sum(p.batch_dot for p in model.parameters()) @ average.T
    norms = gram.diagonal().sqrt()
    if step in (0, 5, 30):
        pictures[step] = gram / norms / norms.unsqueeze(1)  # cosines
    optimizer.step()
assert (pictures[0] < -0.3).sum() < (pictures[30] < -0.3).sum()

# %%
# Classes that agree at first, when any progress helps all, are rivals later.
figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for axis, (step, cosines) in zip(axes, pictures.items(), strict=True):
    image = axis.imshow(cosines, cmap="RdBu", vmin=-1, vmax=1)
    axis.set(title=f"step {step}", xlabel="class", xticks=range(10), yticks=range(10))
figure.colorbar(image, label="cosine of gradients")
plt.show()
