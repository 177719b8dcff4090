r"""
Learning a second task without forgetting the first
===================================================

A net that learns one task after another forgets the first. Elastic weight consolidation (Kirkpatrick et al.,
2017, arXiv:1612.00796) holds on to each weight as firmly as the first task needs it: with a spring of stiffness
:math:`F_i`, the diagonal of the Fisher information, which for this loss is the diagonal of the generalised
Gauss-Newton matrix.
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
train, test = shuffled[:1400], shuffled[1400:]
# The second task: the same digits with their pixels shuffled.
tasks = {"first task": X, "second task": X[:, torch.randperm(64)]}
BATCH = 64


def make_model() -> nn.Sequential:
    """The same start every time."""
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))


lossfunc = extend(nn.CrossEntropyLoss())


def accuracy(model: nn.Module, inputs: Tensor) -> float:
    """On digits that were not trained on."""
    with torch.no_grad():
        return (model(inputs[test]).argmax(1) == y[test]).float().mean().item()


# %%
# What the first task needs: the curvature, summed over its data, at the weights that it ended with.


def stiffness(model: nn.Module, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each parameter: where it was, and how firmly it is held."""
    loss = lossfunc(model(inputs[train]), y[train])
    with backpack(DiagGGNExact()):
        loss.backward()
    return [(p.detach().clone(), p.diag_ggn_exact.clone()) for p in model.parameters()]


def learn(strength: float) -> dict[str, list[float]]:
    """Both tasks in turn; the accuracy on each after every epoch."""
    model, springs = make_model(), []
    curves = {name: [] for name in tasks}
    for inputs in tasks.values():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(25):
            for batch in train[torch.randperm(len(train))].split(BATCH):
                optimizer.zero_grad()
                loss = lossfunc(model(inputs[batch]), y[batch])
                for p, (before, held) in zip(model.parameters(), springs, strict=False):
                    loss = loss + strength / 2 * (held * (p - before).square()).sum()
                loss.backward()
                optimizer.step()
            for name, data in tasks.items():
                curves[name].append(accuracy(model, data))
        springs = stiffness(model, inputs)
    return curves


results = {"without springs": learn(0.0), "with springs": learn(30.0)}
for name, curves in results.items():
    print(f"{name}: " + ", ".join(f"{task} {c[-1]:.1%}" for task, c in curves.items()))
forgot, kept = (results[name]["first task"][-1] for name in results)
assert kept > forgot + 0.1
assert results["with springs"]["second task"][-1] > 0.85

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for axis, (name, curves) in zip(axes, results.items(), strict=True):
    axis.axvspan(0, 24.5, color="#0b6e63", alpha=0.08, lw=0)
    axis.axvspan(24.5, 49, color="#c2571a", alpha=0.08, lw=0)
    for colour, (task, curve) in zip(("#0b6e63", "#c2571a"), curves.items(), strict=True):
        axis.plot(curve, color=colour, label=task, lw=2)
    axis.set(title=name, xlabel="epoch (shaded: the task that is trained)", ylim=(0, 1))
axes[0].set_ylabel("test accuracy")
axes[1].legend(loc="lower right")
plt.show()
