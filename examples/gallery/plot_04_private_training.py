r"""
Differentially private training
===============================

DP-SGD (Abadi et al., 2016, arXiv:1607.00133) clips the gradient of every example, adds these up, and adds noise.
``ClippedSumGrad`` computes the clipped sum without forming individual gradients. Opacus draws the batches,
counts the budget :math:`\varepsilon`, and trains a second copy for comparison.
"""

import warnings

import torch
from matplotlib import pyplot as plt
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer
from sklearn.datasets import load_digits
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import ClippedSumGrad

torch.manual_seed(0)
digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
y = torch.tensor(digits.target)
shuffled = torch.randperm(len(X))
train, test = shuffled[:1400], shuffled[1400:]

RATE = 128 / len(train)  # each example takes part in a step with this probability
BOUND, LR, STEPS, DELTA = 1.0, 0.5, 120, 1e-4


def make_model() -> nn.Sequential:
    """The same start every time."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def draw(step: int) -> Tensor:
    """A Poisson sample: what the privacy accounting supposes."""
    generator = torch.Generator().manual_seed(step)
    return train[torch.rand(len(train), generator=generator) < RATE]


# %%
# Our step. ``max_norm`` bounds the gradient of each example's own loss. The clipped sum has that scale, whether
# the loss is a mean or a sum. We add noise to it and divide by the expected number of examples.


def clipped_sum(model: nn.Module, lossfunc: nn.Module, batch: Tensor) -> list[Tensor]:
    """The sum of the clipped gradients."""
    loss = lossfunc(model(X[batch]), y[batch])
    with backpack(ClippedSumGrad(max_norm=BOUND)):
        loss.backward()
    return [p.grad_clipped for p in model.parameters()]


def accuracy(model: nn.Module) -> float:
    """The share of right answers on digits that training never saw."""
    with torch.no_grad():
        return (model(X[test]).argmax(1) == y[test]).float().mean().item()


def train_with_ours(noise: float) -> tuple[list[float], list[float]]:
    """Budget and accuracy along the way."""
    model, lossfunc = extend(make_model()), extend(nn.CrossEntropyLoss())
    accountant = RDPAccountant()
    budget, accuracies = [], []
    for step in range(STEPS):
        batch = draw(step)
        sums = clipped_sum(model, lossfunc, batch)
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), sums, strict=True):
                noisy = total + noise * BOUND * torch.randn_like(total)
                parameter -= LR * noisy / (RATE * len(train))
        accountant.step(noise_multiplier=noise, sample_rate=RATE)
        if step % 8 == 7:
            budget.append(accountant.get_epsilon(DELTA))
            accuracies.append(accuracy(model))
    return budget, accuracies


def train_with_opacus(noise: float) -> list[float]:
    """The accuracy with per-sample gradients of Opacus and its optimizer."""
    model = GradSampleModule(make_model(), loss_reduction="sum")
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        noise_multiplier=noise,
        max_grad_norm=BOUND,
        expected_batch_size=round(RATE * len(train)),
    )
    accuracies = []
    for step in range(STEPS):
        batch = draw(step)
        optimizer.zero_grad()
        lossfunc(model(X[batch]), y[batch]).backward()
        optimizer.step()
        if step % 8 == 7:
            accuracies.append(accuracy(model))
    return accuracies


# %%
# First the claim: without noise, both steps are the same, number by number.
warnings.simplefilter("ignore")  # Opacus: hooks on modules whose inputs need no gradient
first, second = extend(make_model()), GradSampleModule(make_model(), loss_reduction="sum")
batch = draw(0)
ours = clipped_sum(first, extend(nn.CrossEntropyLoss()), batch)
optimizer = DPOptimizer(
    torch.optim.SGD(second.parameters(), lr=1.0),
    noise_multiplier=0.0,
    max_grad_norm=BOUND,
    expected_batch_size=1,
)
nn.CrossEntropyLoss(reduction="sum")(second(X[batch]), y[batch]).backward()
optimizer.pre_step()
for total, parameter in zip(ours, second.parameters(), strict=True):
    assert torch.allclose(total, parameter.grad, rtol=1e-3, atol=1e-4)
print(f"the clipped sums of {len(batch)} gradients agree")

# %%
# Then training, with much and with little noise. Both start with the same seed, so even the noise is the same,
# and the circles of Opacus lie on our curves.
curves = {}
for noise in (0.8, 1.5, 4.0):
    budget, ours = train_with_ours(noise)
    theirs = train_with_opacus(noise)
    curves[noise] = budget, ours, theirs
    print(f"noise {noise}: ε = {budget[-1]:.1f}, accuracy {ours[-1]:.1%}, Opacus {theirs[-1]:.1%}")
    assert abs(ours[-1] - theirs[-1]) < 0.1

# %%
figure, axis = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
for colour, (noise, (budget, ours, theirs)) in zip(
    ("#0b6e63", "#c2571a", "#5b4b9a"), curves.items(), strict=True
):
    axis.plot(budget, ours, ".-", color=colour, label=f"noise {noise}")
    axis.plot(budget, theirs, "o", ms=8, mfc="none", color=colour)
axis.plot([], [], "o", ms=8, mfc="none", color="grey", label="Opacus")
axis.set(xscale="log", xlabel=f"privacy budget ε spent (δ = {DELTA:g})", ylabel="test accuracy")
axis.set(ylim=(0, 1), title="Less noise learns more, and costs more privacy")
figure.legend(loc="outside right upper")
plt.show()
