"""
The trace of the Hessian, layer by layer, while it is freed
===========================================================

``backpack`` calls ``extension_hook`` with every module as soon as its quantities exist. The hook can reduce and
free them at once, so that only the diagonals of one module exist at a time. Here it follows the trace of the
Hessian of every layer through training, together with the trace of the generalised Gauss-Newton matrix.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact, DiagHessian

torch.manual_seed(0)
digits = load_digits()
X, y = torch.tensor(digits.data[:256] / 16, dtype=torch.float32), torch.tensor(digits.target[:256])
model = extend(
    nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
)
lossfunc = extend(nn.CrossEntropyLoss())
layers = {module: f"layer {i + 1}" for i, module in enumerate(model[::2])}


class Traces:
    """Sums diagonals by layer, frees them, and counts how many ever existed at once."""

    def __init__(self) -> None:
        self.values = {}
        self.most = 0

    def __call__(self, module: nn.Module) -> None:
        """Reduce the quantities of one module; called by ``backpack``."""
        alive = [p for p in model.parameters() if hasattr(p, "diag_h")]
        self.most = max(self.most, len(alive))
        for p in module.parameters(recurse=False):
            for field in ("diag_h", "diag_ggn_exact"):
                key = layers[module], field
                self.values[key] = self.values.get(key, 0.0) + getattr(p, field).sum().item()
                delattr(p, field)


def traces() -> Traces:
    """One pass."""
    hook = Traces()
    model.zero_grad()
    loss = lossfunc(model(X), y)
    with backpack(DiagHessian(), DiagGGNExact(), extension_hook=hook):
        loss.backward()
    return hook


# %%
# Checked: a trace is a sum of products with basis vectors, by autograd.
hook = traces()
last = model[-1].bias
loss = lossfunc(model(X), y)
(gradient,) = torch.autograd.grad(loss, last, create_graph=True)
by_hand = sum(torch.autograd.grad(g, last, retain_graph=True)[0][i] for i, g in enumerate(gradient))
loss = lossfunc(model(X), y)
with backpack(DiagHessian()):
    loss.backward()
assert torch.allclose(last.diag_h.sum(), by_hand, rtol=1e-4)
print(f"at most {hook.most} of {len(list(model.parameters()))} diagonals existed at once")
assert hook.most == 2  # a weight and a bias

# %%
history = []
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for step in range(200):
    if step % 5 == 0:
        history.append((step, traces().values))
    optimizer.zero_grad()
    loss = lossfunc(model(X), y)
    loss.backward()
    optimizer.step()

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
steps = [step for step, _ in history]
for colour, name in zip(("#0b6e63", "#c2571a", "#5b4b9a"), layers.values(), strict=True):
    axis.plot(steps, [v[name, "diag_h"] for _, v in history], color=colour, label=name)
    axis.plot(steps, [v[name, "diag_ggn_exact"] for _, v in history], ":", color=colour)
axis.plot([], [], ":", color="grey", label="Gauss-Newton")
axis.set(xlabel="step", ylabel="trace of the Hessian", yscale="symlog")
axis.legend(ncols=2)
plt.show()
