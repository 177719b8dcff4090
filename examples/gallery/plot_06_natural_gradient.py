"""
A natural-gradient step with Kronecker factors
==============================================

Steps along ``(curvature + damping)⁻¹ gradient`` suit badly scaled problems, such as a deep auto-encoder
(Martens and Grosse, 2015, arXiv:1503.05671). ``param.kfac`` has a solver, so the optimizer is a few lines.
SGD with momentum and Adam get the best of several learning rates.
"""

import time
from itertools import pairwise

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFAC

torch.manual_seed(0)
X = torch.tensor(load_digits().data / 16, dtype=torch.float32)
STEPS, BATCH = 300, 256


def make_model() -> nn.Sequential:
    """64 numbers through a bottleneck of 6, with the same start every time."""
    torch.manual_seed(0)
    sizes = [64, 48, 24, 6, 24, 48, 64]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


# %%
# The optimizer. It averages the factors over steps. It damps the product of the factors exactly, not each
# factor separately.


class NaturalGradient:
    """Kronecker-factored natural gradient with averaged factors."""

    def __init__(self, model: nn.Module, lr: float, damping: float, keep: float = 0.9) -> None:
        self.parameters = list(model.parameters())
        self.lr, self.damping, self.keep = lr, damping, keep
        self.factors, self.weight = {}, 0.0

    def step(self) -> None:
        """Take a step, after a backward pass with ``KFAC``."""
        self.weight = self.keep * self.weight + 1 - self.keep  # the average starts at nothing
        for p in self.parameters:
            old = self.factors.get(p, [torch.zeros_like(f) for f in p.kfac])
            self.factors[p] = [
                self.keep * o + (1 - self.keep) * f for o, f in zip(old, p.kfac, strict=True)
            ]
            curvature = p.kfac.with_factors([f / self.weight for f in self.factors[p]])
            p.data -= self.lr * curvature.solve(p.grad, damping=self.damping)


def train(kind: str, lr: float) -> tuple[list[float], list[float]]:
    """Squared error per image over all data after each step, and the seconds so far."""
    model, lossfunc = extend(make_model()), extend(nn.MSELoss())
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(model.parameters(), lr=lr),
        "natural gradient": lambda: NaturalGradient(model, lr, damping=3e-4),
    }[kind]()
    errors, seconds, spent = [], [], 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        images = X[torch.randint(len(X), (BATCH,))]
        model.zero_grad()
        loss = lossfunc(model(images), images)
        with backpack(*([KFAC()] if kind == "natural gradient" else [])):
            loss.backward()
        optimizer.step()
        spent += time.perf_counter() - start
        seconds.append(spent)
        with torch.no_grad():
            errors.append((model(X) - X).square().sum(1).mean().item())
    return errors, seconds


# %%
# The best learning rate for each optimizer.
rates = {"SGD": (0.3, 1.0, 3.0), "Adam": (1e-3, 3e-3, 1e-2), "natural gradient": (0.1, 0.3)}
best = {}
for kind, choices in rates.items():
    runs = {lr: train(kind, lr) for lr in choices}
    runs = {lr: run for lr, run in runs.items() if run[0][-1] == run[0][-1]}  # no NaN
    lr = min(runs, key=lambda lr: runs[lr][0][-1])
    best[f"{kind}, {lr:g}"] = runs[lr]
    print(f"{kind:17} lr {lr:<6g} error {runs[lr][0][-1]:.3f} after {runs[lr][1][-1]:.1f} s")
sgd, adam, natural = (errors[-1] for errors, _ in best.values())
assert natural < adam < sgd

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for colour, (name, (errors, seconds)) in zip(
    ("grey", "#c2571a", "#0b6e63"), best.items(), strict=True
):
    left.plot(errors, color=colour, label=name)
    right.plot(seconds, errors, color=colour)
left.set(yscale="log", xlabel="step", ylabel="squared error per image")
right.set(xlabel="seconds of training")
left.legend()
plt.show()
