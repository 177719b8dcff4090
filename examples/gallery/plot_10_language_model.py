"""
Which texts does a language model stumble over?
===============================================

A small Transformer learns simple sentences, letter by letter. A few of its texts do not belong there:
random letters, a sentence backwards, one in Latin, one in Esperanto. The norms of the texts' gradients find them.
The causal attention below uses plain functions. The model was not prepared for this.
"""

import random
import warnings

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from backpack_core import backpack, extend
from backpack_core.errors import AutodiffFallbackWarning
from backpack_core.extensions import BatchL2Grad

torch.manual_seed(0)
LENGTH, WIDTH, HEADS = 32, 48, 4
ALPHABET = " abcdefghijklmnopqrstuvwxyz."

# %%
# 240 sentences, and 8 other texts.
random.seed(0)
subjects = ("the cat", "the dog", "a bird", "the child", "my friend", "the old man")
verbs = ("sees", "likes", "follows", "hears", "finds")
objects = ("the moon", "a red ball", "the river", "a small fish", "the house", "some bread")
usual = [" ".join(map(random.choice, (subjects, verbs, objects))) + "." for _ in range(240)]
odd = [
    *("".join(random.choices(ALPHABET, k=26)) for _ in range(4)),
    *(text[::-1] for text in usual[:2]),
    "errare humanum est perseverare.",
    "mi birdo vidas la lunon kaj kantas.",
]
texts = usual + odd
codes = torch.tensor([[ALPHABET.index(c) for c in t.ljust(LENGTH)[:LENGTH]] for t in texts])
inputs, targets = codes[:, :-1], codes[:, 1:]


class Block(nn.Module):
    """Causal attention and a feed-forward part, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Letters in, scores for the next letter out, ``[N, letters, S]``."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH - 1, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.blocks(self.letters(codes) + self.places)
        return self.head(x).transpose(1, 2)


model, lossfunc = extend(Model()), extend(nn.CrossEntropyLoss(reduction="sum"))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(6):
    for batch in torch.randperm(len(texts)).split(31):
        optimizer.zero_grad()
        loss = lossfunc(model(inputs[batch]), targets[batch]) / targets[batch].numel()
        loss.backward()
        optimizer.step()
print(f"loss per letter: {loss.item():.2f}")

# %%
# The norm of each text's gradient. The model itself has a parameter, ``places``, but no layer rule. The library reads
# this parameter where operations use it, which is exact. A warning would say that a rule may be faster.
warnings.simplefilter("ignore", AutodiffFallbackWarning)
loss = lossfunc(model(inputs), targets)
with backpack(BatchL2Grad()):
    loss.backward()
norms = sum(p.batch_l2 for p in model.parameters()).sqrt()

# %%
# Checked against autograd, one text at a time.
for index in (0, 100, 244):
    single = lossfunc(model(inputs[index : index + 1]), targets[index : index + 1])
    by_hand = sum(
        g.square().sum() for g in torch.autograd.grad(single, list(model.parameters()))
    ).sqrt()
    assert torch.allclose(norms[index], by_hand, rtol=1e-3)

order = norms.argsort(descending=True).tolist()
found = sum(index >= len(usual) for index in order[: len(odd)])
print(f"of the {len(odd)} texts with the longest gradients, {found} do not belong")
assert found >= len(odd) - 1

# %%
shown = order[:11] + order[len(order) // 2 :: 45]
figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
colours = ["crimson" if index >= len(usual) else "#0b6e63" for index in shown]
axis.barh(range(len(shown)), norms[shown].tolist(), color=colours)
labels = [texts[index] for index in shown]
axis.set_yticks(range(len(shown)), labels, family="monospace", fontsize=9)
axis.invert_yaxis()
axis.set(xlabel="norm of the text's gradient", title="Red: texts that do not belong")
axis.grid(visible=False, axis="y")
plt.show()
