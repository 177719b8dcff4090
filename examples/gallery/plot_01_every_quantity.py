r"""
Every quantity on one model
===========================

One backward pass computes all quantities. The model reads 8 × 8 digits, so everything with the shape of a
first-layer weight is also an image: one row of pictures per quantity, one column per unit.
"""

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core import extensions as ext

digits = load_digits()
X = torch.tensor(digits.data[:256] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[:256])
model = extend(nn.Sequential(nn.Linear(64, 6), nn.Sigmoid(), nn.Linear(6, 10)))
lossfunc = extend(nn.CrossEntropyLoss())

# %%
# A few hundred steps first, so that there is something to see.
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(150):
    optimizer.zero_grad()
    lossfunc(model(X), y).backward()
    optimizer.step()

# %%
# Now all quantities at once. Extensions that need the same thing share it.
torch.manual_seed(0)
quantities = [
    ext.BatchGrad(),
    ext.BatchL2Grad(),
    ext.BatchDotGrad(),
    ext.SumGradSquared(),
    ext.Variance(),
    ext.ClippedSumGrad(max_norm=0.01),
    ext.DiagGGNExact(),
    ext.DiagGGNMC(mc_samples=100),
    ext.BatchDiagGGNExact(),
    ext.BatchDiagGGNMC(),
    ext.SqrtGGNExact(),
    ext.SqrtGGNMC(),
    ext.DiagHessian(),
    ext.BatchDiagHessian(),
    ext.KFAC(mc_samples=10),
    ext.KFLR(),
    ext.KFRA(),
    ext.EKFAC(mc_samples=10),
    ext.GGNGram(mc_samples=1),
    ext.HMP(),
    ext.GGNMP(),
    ext.PCHMP(),
]
model.zero_grad()
loss = lossfunc(model(X), y)
with backpack(*quantities):
    loss.backward()

weight = model[0].weight
for quantity in quantities:
    value = getattr(weight, quantity.savefield)
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    print(f"{type(quantity).__name__:18} weight.{quantity.savefield:22} {shape}")

# %%
# The claims: the individual gradients sum to the gradient, the norms are their norms, the sampled curvature is
# close to the exact one, and products with basis vectors give the diagonal.
assert torch.allclose(weight.grad_batch.sum(0), weight.grad, atol=1e-6)
assert torch.allclose(weight.grad_batch.flatten(1).square().sum(1), weight.batch_l2, rtol=1e-4)
assert torch.allclose(weight.diag_ggn_exact_batch.sum(0), weight.diag_ggn_exact, rtol=1e-4)
similarity = torch.cosine_similarity(
    weight.diag_ggn_mc.flatten(), weight.diag_ggn_exact.flatten(), dim=0
)
assert similarity > 0.98, similarity
basis = torch.zeros_like(weight)
basis[2, 20] = 1
assert torch.allclose(weight.hmp(basis)[2, 20], weight.diag_h[2, 20], rtol=1e-3, atol=1e-7)

# %%
# The picture. Pixels at the border are always black, so nothing about them can be learned: all
# quantities are zero there.
pictures = {
    "weight": weight.detach(),
    "gradient": weight.grad,
    "gradient of one digit": weight.grad_batch[0],
    "variance": weight.variance,
    "GGN diagonal": weight.diag_ggn_exact,
    "the same, sampled": weight.diag_ggn_mc,
    "Hessian diagonal": weight.diag_h,
    "KFLR, its diagonal": weight.kflr.diagonal().reshape(weight.shape),
}
figure, axes = plt.subplots(len(pictures), 6, figsize=(7, 9.2), layout="constrained")
for row, (name, value) in zip(axes, pictures.items(), strict=True):
    largest = value.abs().max().item()
    signed = bool((value < -1e-3 * largest).any())
    for axis, image in zip(row, value, strict=True):
        axis.imshow(
            image.reshape(8, 8),
            cmap="RdBu_r" if signed else "viridis",
            vmin=-largest if signed else 0,
            vmax=largest,
        )
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    row[0].set_ylabel(name, rotation=0, ha="right", va="center")
figure.suptitle("What one backward pass knows about six units")
plt.show()
