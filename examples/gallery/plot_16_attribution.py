"""
Which sentences taught it this?
===============================

A small GPT has read, letter by letter, two sentences about each of forty invented countries. We ask it for their capitals
in other words. Which of the hundred sentences does its answer come from? Influence functions say it better than inner
products of gradients.
"""

import torch
from matplotlib import pyplot as plt

from backpack_attribution import Influence, influence
from backpack_attribution.quality import facts, mean_reciprocal_rank, recall_at

torch.manual_seed(0)
task = facts()
for text in (task.texts[0], task.texts[1], task.texts[-1]):
    print(text)
model = task.train()

# %%
# Queries are "the capital of ... is ...". Their loss counts only the letters of the town. Three methods score every
# sentence for every query: inner products of gradients, influence functions with Kronecker factors (EKFAC), and
# influence functions with the exact Gauss-Newton matrix, by conjugate gradients.
methods = {
    "inner product": "dot",
    "cosine": "cosine",
    "EKFAC": "ekfac",
    "conjugate gradients": Influence(refine=10),
}
found = {}
for name, method in methods.items():
    scores = influence(
        model, task.lossfunc, task.train_loader(), task.query_loader(), method, progress=False
    )
    found[name] = scores
    first = mean_reciprocal_rank(scores, task.relevant)
    print(f"{name:20} recall at 2: {recall_at(2, scores, task.relevant)}, reciprocal rank: {first}")
ranks = {name: mean_reciprocal_rank(s, task.relevant) for name, s in found.items()}
assert ranks["conjugate gradients"].mean > ranks["inner product"].mean

# %%
# The sentences with the highest scores for one country.
country = task.texts[0].split()[-1].strip(".")
best = found["conjugate gradients"].top(4)
print(f"the capital of {country}")
for score, place in zip(best.values[0].tolist(), best.identities[0], strict=True):
    print(f"  {score:8.4f}  {task.texts[place]}")

# %%
# The rank of the two sentences that state the fact, for all countries.
figure, (left, right) = plt.subplots(
    1, 2, figsize=(8, 3.4), layout="constrained", width_ratios=[1.1, 1]
)
matrix = found["conjugate gradients"].values[: 2 * 20, :20]
limit = matrix.abs().max().item()
left.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
left.set(xlabel="query: a country", ylabel="sentence", title="scores: two sentences each")
left.grid(visible=False)
names = [*ranks][::-1]
right.barh(
    names,
    [ranks[name].mean for name in names],
    xerr=[ranks[name].standard_error for name in names],
    color="#0b6e63",
)
right.set(xlim=(0, 1), xlabel="mean reciprocal rank", title="higher is better")
plt.show()
