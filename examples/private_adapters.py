"""A small GPT learns a private text by low-rank adapters alone, each author hidden as a whole.

Run: ``python examples/private_adapters.py``

The model is first trained on public text, without noise: names and verbs in any order. 600 authors
wrote the private text, four lines each. All of them share one habit. So the loss on lines of unseen
authors shows what the model learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from backpack_privacy import make_private

WORDS, LENGTH, WIDTH, RANK = 24, 12, 32, 4
AUTHORS, LINES, EPOCHS, DELTA = 600, 4, 4, 1e-4


class Adapted(nn.Module):
    """A frozen linear layer, plus a product of two small matrices that is zero at first."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the frozen layer and the product."""
        found: Tensor = self.layer(x) + 4 * self.up(self.down(x))
        return found


class Block(nn.Module):
    """Attention and a perceptron, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states ``[N, T, D]`` to hidden states."""
        heads = self.qkv(self.before(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.second(F.gelu(self.first(self.behind(x))))
        return found


class GPT(nn.Module):
    """Logits of the next word, ``[N, C, T]``, as ``CrossEntropyLoss`` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Take words, ``[N, T]``."""
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        hidden = self.blocks(self.words(x) + self.places(places))
        found: Tensor = self.head(self.norm(hidden)).transpose(1, 2)
        return found


def lines(count: int, step: int, generator: torch.Generator) -> Tensor:
    """Each word follows the one before by a step, with errors now and then; ``[count, T + 1]``."""
    start = torch.randint(WORDS, (count, 1), generator=generator)
    wrong = torch.rand(count, LENGTH + 1, generator=generator) < 0.1
    errors = torch.randint(WORDS, (count, LENGTH + 1), generator=generator)
    right = (start + step * torch.arange(LENGTH + 1)) % WORDS
    return torch.where(wrong, errors, right)


def public(model: nn.Module, generator: torch.Generator) -> None:
    """Train on public text, where words follow by other steps."""
    optimizer, lossfunc = torch.optim.Adam(model.parameters(), lr=3e-3), nn.CrossEntropyLoss()
    for number in range(150):
        text = lines(64, (1, 2, 5)[number % 3], generator)
        optimizer.zero_grad()
        lossfunc(model(text[:, :-1]), text[:, 1:]).backward()
        optimizer.step()


def adapt(model: nn.Module) -> list[nn.Parameter]:
    """Freeze everything, and add adapters to the layers of each block."""
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name in ("qkv", "out", "first", "second"):
            setattr(block, name, Adapted(block.get_submodule(name)))  # type: ignore[arg-type]
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model: nn.Module, text: Tensor) -> float:
    """The loss for each word, on unseen lines."""
    with torch.no_grad():
        return float(F.cross_entropy(model(text[:, :-1]), text[:, 1:]))


def train(noise: float) -> tuple[float, float]:
    """The loss before and after private training."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = GPT()
    public(model, generator)
    trained = adapt(model)  # before the optimizer, which steps on them
    text, unseen = lines(AUTHORS * LINES, 7, generator), lines(256, 7, generator)
    lossfunc, optimizer = nn.CrossEntropyLoss(reduction="sum"), torch.optim.Adam(trained, lr=0.02)
    private = make_private(  # a line's loss is a sum over its words, an author's one over lines
        model,
        lossfunc,
        optimizer,
        DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=60),
        noise_multiplier=noise,
        max_norm=1.0,
        max_rows=24,  # passes with users cost as much as users times rows
        users=torch.arange(AUTHORS).repeat_interleave(LINES),
    )
    before = loss_of(model, unseen)
    for _ in range(EPOCHS):
        for x, y in private.loader:
            private.step(lossfunc(model(x), y))
    after, spent = loss_of(model, unseen), private.epsilon(DELTA)
    numbers = sum(p.numel() for p in trained)
    print(
        f"ε = {spent:.2f} for each author: loss {before:.2f} before, {after:.2f} after "
        f"{private.steps} steps of {numbers} numbers (noise {noise:g})"
    )
    return before, after


def main() -> None:
    """Train with different noise: with less noise, the model learns more of the habit."""
    before, little = train(2.0)
    _, much = train(0.8)
    _, without = train(0.0)
    assert without < much < before
    assert little < before


if __name__ == "__main__":
    main()
