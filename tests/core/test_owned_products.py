"""Products of samples with several rows equal those with rows as positions, in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backpack_products.owned as owned_products
from backpack_core import backpack, extend
from backpack_core.extensions import ClippedSumGrad
from backpack_firstorder.clipping import is_cheaper_kept
from backpack_firstorder.products import norm
from backpack_products.affine import AffineProduct
from backpack_products.operations import batch_sum, dense, squared_norm, weighted_sum
from backpack_products.owned import OwnedAffine, gathered
from backpack_products.product import sum_of

OWNERS = {"uneven": [0, 2, 0, 0, 2, 1], "by nobody": [1, -1, 0, 1, 3, -1], "of one": [0] * 6}


class Made:
    """Inputs that are made for some rows at a time, as patches are."""

    def __init__(self, inp: Tensor) -> None:
        self._inp, self.shape = inp, inp.shape

    def __getitem__(self, rows: slice) -> Tensor:
        return self._inp[rows].clone()


def product(columns: int, positions: int, size: int | None, is_made: bool) -> AffineProduct:
    groups, features = 2, 3
    out = torch.randn(columns, 6, positions, groups, features)
    if size is None:
        return AffineProduct(out, None, torch.Size([groups * features]))
    inp: Any = torch.randn(6, positions, groups, size)
    shape = torch.Size([groups * features, size])
    return AffineProduct(out, Made(inp) if is_made else inp, shape)


@pytest.fixture(params=[0, 2**17], autouse=True)
def _padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_products, "PADDED", request.param)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("positions", [1, 7])
@pytest.mark.parametrize("size", [None, 2, 60])
@pytest.mark.parametrize("is_made", [False, True])
def test_equals_rows_as_positions(
    owner: str, columns: int, positions: int, size: int | None, is_made: bool
) -> None:
    torch.manual_seed(0)
    rows = product(columns, positions, size, is_made)
    owned = torch.tensor(OWNERS[owner]) == torch.arange(4).unsqueeze(1)

    def both(operation: Any, *more: Any) -> tuple[Any, Any]:
        return operation(OwnedAffine(rows, owned), *more), operation(gathered(rows, owned), *more)

    weights = torch.randn(3, columns, 4)
    for found, expected in (
        both(dense),
        both(batch_sum),
        both(squared_norm),
        both(weighted_sum, weights),
        both(lambda p: norm(p).value()),
        both(lambda p: torch.cat([part for *_, part in p.pieces()])),
        both(lambda p: p.part(slice(0, 1), slice(1, 3))),
        both(lambda p: dense(sum_of([p, OwnedAffine(rows, owned)]))),
    ):
        torch.testing.assert_close(found, expected)
    assert isinstance(is_cheaper_kept(OwnedAffine(rows, owned)), bool)


def test_a_weight_that_is_small_does_not_spread_what_is_no_number() -> None:
    """A sample whose rows are infinite changes no other one's share."""
    rows = product(1, 1, 2, is_made=False)
    rows.out[0, 0] = torch.inf
    owned = torch.tensor([0, 1, 1, 1, 1, 1]) == torch.arange(2).unsqueeze(1)
    assert norm(OwnedAffine(rows, owned)).value().isfinite().tolist() == [[False, True]]


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, groups=1)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )


@pytest.mark.parametrize("owner", [[0, 0, 1, 1, 2, 2], [0, 2, 0, 0, 2, 1]])
@pytest.mark.parametrize("max_norm", [0.3, 100.0])
def test_clipped_sums_of_users(owner: list[int], max_norm: float) -> None:
    """Of images, in order and in none."""
    torch.manual_seed(0)
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    x, y, users = torch.randn(6, 2, 5, 5), torch.randint(3, (6,)), torch.tensor(owner)
    with backpack(ClippedSumGrad(max_norm), samples=users):
        lossfunc(model(x), y).backward()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for user in range(3):
        loss = nn.functional.cross_entropy(
            model(x[users == user]), y[users == user], reduction="sum"
        )
        grads = torch.autograd.grad(loss, [*model.parameters()])
        total = torch.cat([grad.flatten() for grad in grads]).norm()
        for sum_, grad in zip(expected, grads, strict=True):
            sum_ += grad * min(1.0, max_norm / total)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(vars(p)["grad_clipped"], value)
