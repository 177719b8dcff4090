r"""
Which training digits are to blame?
===================================

A test digit is misclassified. The influence function (Koh and Liang, 2017, arXiv:1703.04730) estimates how its
loss would change if one training digit were left out: :math:`\Delta \approx g_\text{test}^\top H^{-1} g_n`, with
individual gradients :math:`g_n` and the curvature :math:`H`. Then we really leave out those digits.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, SqrtGGNExact

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
digits = load_digits()
X, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
shuffled = torch.randperm(len(X))
train, test = shuffled[:600], shuffled[600:]
DECAY = 3.0

# %%
# A linear classifier with weight decay, trained until the gradient is zero, since influence functions assume a
# minimum. For this model, the generalised Gauss-Newton matrix is the Hessian.


def fit(indices: Tensor) -> nn.Linear:
    """The minimum over some training digits."""
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=400, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        decay = DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        value = nn.functional.cross_entropy(model(X[indices]), y[indices], reduction="sum") + decay
        value.backward()
        return value

    optimizer.step(objective)
    return model


model = extend(fit(train))
lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
with torch.no_grad():
    probabilities = model(X[test]).softmax(1)
    missed = test[probabilities.argmax(1) != y[test]]
    losses = nn.functional.cross_entropy(model(X[missed]), y[missed], reduction="none")
case = missed[losses.argsort()[len(losses) // 2]]  # neither the worst nor a close call
said = model(X[case]).argmax().item()
print(
    f"{len(missed)} of {len(test)} test digits are missed; this one is a {y[case]}, called a {said}"
)

# %%
# Individual gradients and the root of the curvature, from one backward pass.
loss = lossfunc(model(X[train]), y[train])
with backpack(BatchGrad(), SqrtGGNExact()):
    loss.backward()
parameters = list(model.parameters())
gradients = torch.cat([p.grad_batch.flatten(1) for p in parameters], dim=1)
root = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in parameters], dim=2).flatten(0, 1)
hessian = root.T @ root + DECAY * torch.eye(root.shape[1])

test_loss = nn.functional.cross_entropy(model(X[case]), y[case])
g_test = torch.cat([g.flatten() for g in torch.autograd.grad(test_loss, parameters)])
influence = gradients @ torch.linalg.solve(hessian, g_test)
order = influence.argsort()
harmful, helpful = order[:6], order.flip(0)[:6]  # leaving out the first lowers the loss

# %%
# The check: train again without each of these digits, and without some that should not matter.
chosen = torch.cat([harmful, helpful, order[100:500:80]])
actual = []
for index in chosen.tolist():
    without = fit(torch.cat([train[:index], train[index + 1 :]]))
    with torch.no_grad():
        changed = nn.functional.cross_entropy(without(X[case]), y[case])
    actual.append((changed - test_loss.detach()).item())
predicted = influence[chosen]
correlation = torch.corrcoef(torch.stack([predicted, torch.tensor(actual)]))[0, 1].item()
print(f"correlation of predicted and true change: {correlation:.3f}")
assert correlation > 0.95

# %%
figure = plt.figure(figsize=(8, 4.2), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1.5, 1])
axes = left.subplots(3, 6)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
for axis in axes[0, 1:]:
    axis.axis("off")
axes[0, 0].imshow(X[case].reshape(8, 8), cmap="gray_r")
axes[0, 0].set_title(f"{y[case]}, called {said}", fontsize=9, color="crimson")
for row, group, name in zip(axes[1:], (harmful, helpful), ("harmful", "helpful"), strict=True):
    row[0].set_ylabel(f"most {name}")
    for axis, index in zip(row, group.tolist(), strict=True):
        axis.imshow(X[train[index]].reshape(8, 8), cmap="gray_r")
        axis.set_title(f"a {y[train[index]]}", fontsize=9)
axis = right.subplots()
axis.scatter(predicted.tolist(), actual, color="#0b6e63", s=18)
ends = [min(actual), max(actual)]
axis.plot(ends, ends, "--", color="grey", zorder=0)
axis.set(xlabel="predicted change of the loss", ylabel="true change, when left out")
plt.show()
