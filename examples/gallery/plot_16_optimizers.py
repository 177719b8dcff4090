"""
Second-order optimizers against AdamW
=====================================

``backpack_optimizers`` has K-FAC, EKFAC and Gauss-Newton as optimizers of torch (Martens and Grosse, 2015,
arXiv:1503.05671; George et al., 2018, arXiv:1806.03884; Martens, 2010). Each of them, and AdamW, gets the best of
several learning rates, on two nets that classify digits.
"""

import time

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import extend
from backpack_optimizers import EKFAC, KFAC, GaussNewton

digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32)
Y = torch.tensor(digits.target)
BATCH, STEPS = 256, 100


def problem(name: str):
    """Model and inputs; the same start every time."""
    torch.manual_seed(0)
    if name == "convolutions":
        body = (nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Flatten())
        return nn.Sequential(*body, nn.Linear(256, 10)), X.view(-1, 1, 8, 8)
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(*layers), X


# %%
# K-FAC and EKFAC compute their factors in the backward pass of an extended model. Gauss-Newton takes batches.


def train(name: str, make, lr: float):
    """Losses over all data, and seconds so far."""
    model, x = problem(name)
    lossfunc = extend(nn.CrossEntropyLoss())
    optimizer, losses, seconds, spent = make(model, lossfunc, lr), [], [], 0.0
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,))
        start = time.perf_counter()
        if isinstance(optimizer, GaussNewton):
            optimizer.step([(x[rows], Y[rows])])
        else:

            def closure(rows=rows):
                optimizer.zero_grad()
                loss = lossfunc(model(x[rows]), Y[rows])
                loss.backward()
                return loss

            optimizer.step(closure)
        spent += time.perf_counter() - start
        seconds.append(spent)
        with torch.no_grad():
            losses.append(lossfunc(model(x), Y).item())
    return losses, seconds


# %%
# The best rate of each, by the last loss. ``kl_clip`` bounds early steps, when factors are poor.
DAMPING = 1e-2
settings = {"damping": DAMPING, "kl_clip": 1e-3, "inverses_every": 5}
kinds = {
    "AdamW": (
        lambda model, loss, lr: torch.optim.AdamW(model.parameters(), lr),
        (1e-2, 3e-2, 1e-1),
    ),
    "KFAC": (lambda model, loss, lr: KFAC(extend(model), lr=lr, **settings), (0.03, 0.1, 0.3)),
    "EKFAC": (lambda model, loss, lr: EKFAC(extend(model), lr=lr, **settings), (0.03, 0.1, 0.3)),
    "GaussNewton": (
        lambda model, loss, lr: GaussNewton(model, loss, lr=lr, damping=DAMPING, max_iterations=10),
        (0.5, 1.0),
    ),
}
figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
for name, row in zip(("fully connected", "convolutions"), axes, strict=True):
    last = {}
    for kind, (make, rates) in kinds.items():
        runs = {lr: train(name, make, lr) for lr in rates}
        lr = min(runs, key=lambda lr: runs[lr][0][-1])
        losses, seconds = runs[lr]
        last[kind] = losses[-1]
        print(f"{name:15} {kind:12} lr {lr:<6g} loss {losses[-1]:.1e} after {seconds[-1]:.1f} s")
        row[0].plot(losses, label=kind)
        row[1].plot(seconds, losses)
    # Between draws of the batches, the loss of EKFAC varies by a factor of eight, of KFAC by two.
    assert last["KFAC"] < last["AdamW"] / 2
    row[0].set(yscale="log", ylabel=f"loss, {name}")
    row[1].set(yscale="log")
axes[0, 0].legend()
axes[1, 0].set(xlabel="step")
axes[1, 1].set(xlabel="seconds of training", xscale="log")
plt.show()
