r"""
Signal, noise, and the batch size they suggest
==============================================

Early in training, all examples pull in one direction. Later they disagree, and only a larger batch shows
the signal. The *simple noise scale* :math:`B = \operatorname{tr}\Sigma / \|\bar g\|^2`
(McCandlish et al., 2018, arXiv:1812.06162) is the batch size that makes the noise of a gradient as large as
the gradient. ``Variance`` gives the diagonal of :math:`\Sigma`.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchL2Grad, Variance

torch.manual_seed(0)
digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
N = len(X)
model = extend(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
lossfunc = extend(nn.CrossEntropyLoss())

# %%
# The loss is a mean, so each gradient that arrives carries ``1/N``, and the variance ``1/N²``.


def noise_scale() -> tuple[float, float]:
    """The simple noise scale of the whole data, and the share of parameters above the noise."""
    model.zero_grad()
    loss = lossfunc(model(X), y)
    with backpack(Variance(), BatchL2Grad()):
        loss.backward()
    parameters = list(model.parameters())
    variance = N**2 * sum(p.variance.sum() for p in parameters)
    signal = sum(p.grad.square().sum() for p in parameters)
    second_moment = N * sum(p.batch_l2.sum() for p in parameters)
    assert torch.allclose(variance + signal, second_moment, rtol=1e-3)  # E g² = Var g + (E g)²
    ratio = torch.cat([(p.grad.square() / (N * p.variance + 1e-12)).flatten() for p in parameters])
    return (variance / signal).item(), (ratio > 1).float().mean().item()


# %%
# Train with batches of 32, and look every few steps.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps, losses, scales, shares = [], [], [], []
for step in range(801):
    if step % 20 == 0:
        scale, share = noise_scale()
        steps.append(step)
        scales.append(scale)
        shares.append(share)
        with torch.no_grad():
            losses.append(lossfunc(model(X), y).item())
    batch = torch.randint(N, (32,))
    optimizer.zero_grad()
    lossfunc(model(X[batch]), y[batch]).backward()
    optimizer.step()
print(f"noise scale: {scales[0]:.0f} at the start, {scales[-1]:.0f} at the end")
assert scales[-1] > 3 * scales[0]

# %%
# Is the scale right? Take random batches of that size at the end of training. The squared error of their gradient
# must be as large as the squared gradient.
size = max(2, round(noise_scale()[0]))
parameters = list(model.parameters())
whole = torch.autograd.grad(lossfunc(model(X), y), parameters)
errors = []
for _ in range(200):
    batch = torch.randint(N, (size,))
    part = torch.autograd.grad(lossfunc(model(X[batch]), y[batch]), parameters)
    errors.append(sum((a - b).square().sum() for a, b in zip(part, whole, strict=True)))
ratio = (torch.stack(errors).mean() / sum(g.square().sum() for g in whole)).item()
print(f"batches of {size}: noise / signal = {ratio:.2f}")
assert 0.8 < ratio < 1.25

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.semilogy(steps, scales, color="#0b6e63")
left.axhline(32, ls="--", color="grey")
left.annotate("batch size in use", (steps[-1], 32), (0, 4), textcoords="offset points", ha="right")
left.set(xlabel="step", title="batch size at which noise equals signal")
right.plot(steps, losses, color="black", label="loss")
right.plot(steps, shares, color="#c2571a", label="share of parameters\nabove the noise of the mean")
right.set(xlabel="step", ylim=(0, None))
right.legend()
plt.show()
