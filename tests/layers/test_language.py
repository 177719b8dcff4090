"""The loss of causal language models, beside torch's cross entropy and plain autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import KFLR, BatchGrad, DiagGGNExact
from backpack_layers.language import CausalLMLoss
from tests.cases import Problem


def tokens() -> Tensor:
    found = torch.randint(0, 5, (3, 4))
    found[1, 2:] = -100
    return found


def by_hand(logits: Tensor, target: Tensor, average: str, shift: bool) -> list[Tensor]:
    """One loss for each sequence, by a loop."""
    losses = []
    for row, labels in zip(logits, target, strict=True):
        pairs = zip(row[:-1], labels[1:], strict=True) if shift else zip(row, labels, strict=True)
        terms = [F.cross_entropy(x[None], y[None]) for x, y in pairs if y != -100]
        total = torch.stack(terms).sum()
        losses.append(total / len(terms) if average == "sequence" else total)
    return losses


@pytest.mark.parametrize(
    ("average", "shift"), list(itertools.product(("token", "sequence"), (True, False)))
)
def test_value(average: str, shift: bool) -> None:
    logits, target = torch.randn(3, 4, 5), tokens()
    expected = torch.stack(by_hand(logits, target, average, shift))
    make = {"average": average, "shift": shift}
    torch.testing.assert_close(CausalLMLoss("none", **make)(logits, target), expected)
    torch.testing.assert_close(CausalLMLoss("sum", **make)(logits, target), expected.sum())
    counted = (target[:, 1:] if shift else target).ne(-100).sum()
    mean = expected.sum() / (counted if average == "token" else 3)
    torch.testing.assert_close(CausalLMLoss("mean", **make)(logits, target), mean)


@pytest.mark.parametrize("average", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_quantities(reduction: str, average: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    Problem(model, (torch.randn(3, 4, 3),), CausalLMLoss(reduction, average), tokens()).check()


def test_without_a_reduction() -> None:
    """What arrives at each sequence weighs it."""
    model, lossfunc = extend(nn.Linear(3, 5)), extend(CausalLMLoss("none"))
    x, target, factors = torch.randn(3, 4, 3), tokens(), torch.tensor([1.0, 2.0, 3.0])
    found = []
    for weights in (torch.ones(3), factors):
        loss = (lossfunc(model(x), target) * weights).sum()
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        found.append((model.weight.grad_batch.clone(), model.weight.diag_ggn_exact.clone()))
    torch.testing.assert_close(found[1][0], found[0][0] * factors[:, None, None])
    # One sequence has no more than its first target, the others have all of them.
    singles = []
    for n in range(3):
        single = extend(CausalLMLoss("sum"))(model(x[n : n + 1]), target[n : n + 1])
        with backpack(DiagGGNExact()):
            single.backward()
        singles.append(model.weight.diag_ggn_exact * factors[n])
    torch.testing.assert_close(found[1][1], torch.stack(singles).sum(0))


def test_subsampling_keeps_the_scale_of_the_batch() -> None:
    model, lossfunc = extend(nn.Linear(3, 5)), extend(CausalLMLoss())
    x, target = torch.randn(3, 4, 3), tokens()
    total = 0
    for n in range(3):
        loss = lossfunc(model(x), target)
        with backpack(DiagGGNExact(subsampling=[n])):
            loss.backward()
        total = total + model.weight.diag_ggn_exact
    loss = lossfunc(model(x), target)
    with backpack(DiagGGNExact(), KFLR()):
        loss.backward()
    torch.testing.assert_close(total, model.weight.diag_ggn_exact)
    assert [list(factor.shape) for factor in model.weight.kflr] == [[5, 5], [3, 3]]


def test_nothing_counts() -> None:
    loss = CausalLMLoss()(torch.randn(2, 3, 4), torch.full((2, 3), -100))
    assert loss == 0


@pytest.mark.parametrize(
    ("settings", "match"), [({"reduction": "max"}, "reduction"), ({"average": "batch"}, "average")]
)
def test_unknown_settings(settings: dict[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        CausalLMLoss(**settings)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"\[N, T, C\]"):
        CausalLMLoss()(torch.randn(2, 4, 3), torch.zeros(2, 3, dtype=torch.long))
