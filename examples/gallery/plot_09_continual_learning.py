r"""
Learning a second task without forgetting the first
===================================================

A net that learns one task after another forgets the first. Elastic weight consolidation (Kirkpatrick et al.,
2017, arXiv:1612.00796) holds each weight as firmly as the first task needs it, with a spring of stiffness
:math:`F_i`. These are the diagonal of the Fisher information, averaged over the data of the task at the weights
after its training. For this loss, it is the diagonal of the generalised Gauss-Newton matrix.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

torch.manual_seed(0)
digits, lossfunc = load_digits(), extend(nn.CrossEntropyLoss())
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = torch.randperm(len(X)).split(1400)
# The second task: the same digits with their pixels shuffled.
tasks = {"first task": X, "second task": X[:, torch.randperm(64)]}
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
results = []
for axis, strength in zip(axes, (0.0, 30.0), strict=True):
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    optimizer, springs = torch.optim.SGD(model.parameters(), lr=0.1), []
    curves = {name: [] for name in tasks}
    for inputs in tasks.values():
        for batch in [rows for _ in range(25) for rows in train[torch.randperm(1400)].split(64)]:
            optimizer.zero_grad()
            loss = lossfunc(model(inputs[batch]), y[batch])
            for p, before, held in springs:
                loss = loss + strength / 2 * (held * (p - before).square()).sum()
            loss.backward()
            optimizer.step()
            for name, data in tasks.items():
                is_right = model(data[test]).argmax(1) == y[test]
                curves[name].append(is_right.float().mean().item())
        with backpack(DiagGGNExact()):
            lossfunc(model(inputs[train]), y[train]).backward()
        springs = [(p, p.detach().clone(), p.diag_ggn_exact.clone()) for p in model.parameters()]
    axis.plot(torch.tensor([*curves.values()]).T, label=[*curves])
    axis.set(title=f"springs of strength {strength:.0f}", xlabel="step (the tasks in turn)")
    results.append([curve[-1] for curve in curves.values()])
assert results[1][0] > results[0][0] + 0.1
assert results[1][1] > 0.85
axes[0].set_ylabel("test accuracy")
axes[1].legend(loc="lower right")
plt.show()
