"""Second derivatives of bags of looked-up rows, which torch does not have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, HMP, JMP, PCHMP

ROWS = torch.tensor([3, 1, 1, 0, 5, 1, 6, 3, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])  # one bag is empty
LABELS = torch.tensor([0, 3, 1, 2])
NUMBERS, ENDS = ROWS.tolist(), [*OFFSETS.tolist(), len(ROWS)]  # torch.func may not read them
# Options of the bag, and whether each row has a weight, which is trained.
BAGS: dict[str, tuple[dict[str, Any], bool]] = {
    "sum": ({"mode": "sum"}, False),
    "mean": ({"mode": "mean"}, False),
    "max": ({"mode": "max"}, False),
    "sum-padded": ({"mode": "sum", "padding_idx": 1}, False),
    "mean-padded": ({"mode": "mean", "padding_idx": 1}, False),
    "max-padded": ({"mode": "max", "padding_idx": 1}, False),
    "weights": ({"mode": "sum"}, True),
    "weights-padded": ({"mode": "sum", "padding_idx": 1}, True),
    "last offset": ({"mode": "mean", "include_last_offset": True}, False),
}


class Net(nn.Module):
    def __init__(self, options: dict[str, Any], is_weighted: bool) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 3, **options), nn.Linear(3, 4)
        self.row = nn.Parameter(torch.rand(len(ROWS))) if is_weighted else None

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.bag(rows, offsets, per_sample_weights=self.row)))
        return found


def plain(bag: nn.EmbeddingBag, parameters: dict[str, Tensor]) -> Tensor:
    """The loss, with bags as sums, means and maxima of rows."""
    table, bags = parameters["bag.weight"], []
    weights = parameters.get("row", torch.ones(len(ROWS)))
    for begin, end in pairwise(ENDS):
        kept = [n for n in range(begin, end) if NUMBERS[n] != bag.padding_idx]
        rows = [table[ROWS[n]] * weights[n] for n in kept] or [torch.zeros(3)]
        mat = torch.stack(rows)
        bags.append({"sum": mat.sum(0), "mean": mat.mean(0), "max": mat.max(0).values}[bag.mode])
    logits = F.linear(torch.tanh(torch.stack(bags)), *[parameters[f"head.{n}"] for n in _HEAD])
    return F.cross_entropy(logits, LABELS)


_HEAD = "weight", "bias"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.int64) for name in BAGS), ("mean", torch.int32), ("max", torch.int32)],
)
def test_hessian_products(name: str, dtype: torch.dtype) -> None:
    model, lossfunc = extend(Net(*BAGS[name])), extend(nn.CrossEntropyLoss())
    is_last = model.bag.include_last_offset
    offsets = torch.cat([OFFSETS, torch.tensor([len(ROWS)])]) if is_last else OFFSETS
    with backpack(HMP()):
        lossfunc(model(ROWS.to(dtype), offsets.to(dtype)), LABELS).backward()
    values = {key: p.detach() for key, p in model.named_parameters()}
    for key, parameter in model.named_parameters():
        vector = torch.randn_like(parameter)

        def slope(value: Tensor, key: str = key) -> Tensor:
            return grad(lambda all_: plain(model.bag, all_))({**values, key: value})[key]

        _, expected = jvp(slope, (values[key],), (vector,))
        torch.testing.assert_close(parameter.hmp(vector), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("extension", [GGNMP, JMP])
def test_other_products(extension: Any) -> None:
    """Of a table, as of a layer that looks up by a matrix of counts."""
    torch.manual_seed(1)
    model, lossfunc = extend(Net({"mode": "sum"}, False)), extend(nn.CrossEntropyLoss())
    counts = torch.stack([F.one_hot(part, 7).sum(0) for part in ROWS.tensor_split(OFFSETS[1:])])
    other = extend(nn.Sequential(nn.Linear(7, 3, bias=False), nn.Tanh(), model.head))
    other[0].weight.data = model.bag.weight.detach().T.clone()
    vector = torch.randn(7, 3)
    with backpack(extension()):
        lossfunc(model(ROWS, OFFSETS), LABELS).backward()
    found = getattr(model.bag.weight, extension.savefield)(vector)
    extend(other)
    with backpack(extension()):
        lossfunc(other(counts.to(vector)), LABELS).backward()
    expected = getattr(other[0].weight, extension.savefield)(vector.T)
    torch.testing.assert_close(found, expected.T if extension is GGNMP else expected)


def _divided_by_counts(kind: Any, extension: Any) -> Any:
    """The block of a table whose gradients are divided by counts."""
    look_up = kind(5, 3, scale_grad_by_freq=True)
    model = extend(nn.Sequential(look_up, nn.Tanh(), nn.Flatten(), nn.LazyLinear(4)))
    lossfunc, rows = extend(nn.CrossEntropyLoss()), torch.tensor([[0, 1], [1, 1], [2, 4]])
    model(rows)  # of the lazy layer
    with backpack(extension()):
        lossfunc(model(rows), LABELS[:3]).backward()
    return getattr(look_up.weight, extension.savefield)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_divided_by_counts_are_not_derivatives(kind: Any) -> None:
    for extension in (HMP, GGNMP, PCHMP, JMP):
        with pytest.raises(UnsupportedError, match=r"counts.*: leave scale_grad_by_freq out"):
            _divided_by_counts(kind, extension)(torch.ones(5, 3))
    with pytest.raises(UnsupportedError, match=r"counts.*: leave scale_grad_by_freq out"):
        _divided_by_counts(kind, JMP).transposed(torch.ones(3, 4))
