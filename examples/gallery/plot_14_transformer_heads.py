r"""
Curvature of a Transformer, layer by layer and head by head
===========================================================

Which heads does a small Transformer rely on? The generalised Gauss-Newton diagonal :math:`h` of its projections,
summed head by head, shows it: :math:`\tfrac12 \sum h w^2` estimates how much the loss would rise without
a head. Then we really switch off each head.
"""

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

torch.manual_seed(0)
SYMBOLS, LENGTH, WIDTH, HEADS, LAYERS = 8, 12, 32, 4, 3


class Block(nn.Module):
    """Attention and a feed-forward part, written with plain functions between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        q, k, v = (
            layer(normal).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


# %%
# The task: which symbol follows the marker? The model needs attention to find out. Symbols and their places are
# one-hot vectors.


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Sequences with one marker (the last symbol), and the symbols behind it."""
    codes = torch.randint(SYMBOLS, (count, LENGTH))
    place = torch.randint(LENGTH - 1, (count,))
    rows = torch.arange(count)
    codes[rows, place] = SYMBOLS
    symbols = nn.functional.one_hot(codes, SYMBOLS + 1)
    places = torch.eye(LENGTH).expand(count, LENGTH, LENGTH)
    return torch.cat([symbols, places], dim=2).float(), codes[rows, place + 1]


class Readout(nn.Module):
    """Mean over places, then scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))


blocks = [Block() for _ in range(LAYERS)]
model = extend(nn.Sequential(nn.Linear(SYMBOLS + 1 + LENGTH, WIDTH), *blocks, Readout()))
lossfunc = extend(nn.CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(400):
    X, y = draw(128)
    optimizer.zero_grad()
    lossfunc(model(X), y).backward()
    optimizer.step()
X, y = draw(256)
with torch.no_grad():
    print(f"accuracy {(model(X).argmax(1) == y).float().mean():.1%}")

# %%
# One backward pass, all projections. The rows of a projection belong to heads, in turn.
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact()):
    loss.backward()


def by_head(values: Tensor) -> Tensor:
    """Sum of ``[WIDTH, WIDTH]`` over the rows of each head, ``[HEADS]``."""
    return values.unflatten(0, (HEADS, -1)).sum((1, 2))


projections = ("query", "key", "value")
curvature = {
    name: torch.stack([by_head(getattr(b, name).weight.diag_ggn_exact) for b in blocks])
    for name in projections
}
estimate = torch.stack(
    [by_head(b.value.weight.diag_ggn_exact * b.value.weight.detach().square()) / 2 for b in blocks]
)

# %%
# Switch off each head by its values.
actual = torch.zeros(LAYERS, HEADS)
with torch.no_grad():
    before = lossfunc(model(X), y)
    for i, block in enumerate(blocks):
        for head in range(HEADS):
            rows = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            weight, bias = block.value.weight, block.value.bias
            kept = weight[rows].clone(), bias[rows].clone()
            weight[rows], bias[rows] = 0, 0
            actual[i, head] = lossfunc(model(X), y) - before
            weight[rows], bias[rows] = kept

ranks = torch.stack([t.flatten().argsort().argsort().double() for t in (estimate, actual)])
agreement = torch.corrcoef(ranks)[0, 1].item()
print(f"rank correlation of estimate and truth: {agreement:.2f}")
assert agreement > 0.6

# %%
figure, axes = plt.subplots(
    1, 4, figsize=(9, 2.9), width_ratios=[1, 1, 1, 1.3], layout="constrained"
)
logs = {name: values.log10() for name, values in curvature.items()}
low, high = min(v.min() for v in logs.values()), max(v.max() for v in logs.values())
for axis, (name, values) in zip(axes, logs.items(), strict=False):
    image = axis.imshow(values, vmin=low, vmax=high)
    axis.set(title=name, xlabel="head", xticks=range(HEADS), yticks=range(LAYERS))
    axis.grid(visible=False)
axes[0].set_ylabel("layer")
figure.colorbar(image, ax=axes[:3].tolist(), label="log₁₀ of the trace", shrink=0.9)
axes[3].scatter(estimate.flatten().tolist(), actual.flatten().tolist(), color="#0b6e63")
axes[3].set(
    xscale="log",
    yscale="symlog",
    xlabel="estimated cost",
    ylabel="true cost",
    title="heads switched off",
)
axes[3].set_yscale("symlog", linthresh=0.01)
plt.show()
