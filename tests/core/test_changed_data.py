"""Data that were changed before the first layer: rows behind it are followed all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UsageError
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, SumGradSquared
from backpack_products.values import rounding_unit
from tests import oracle

D, C = 6, 2
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 2 * x,
    "exponential": torch.exp,
    "turned": lambda x: x.rot90(2, (1, 2)),
    "copied": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).contiguous(),
}


class Net(nn.Module):
    """A narrow layer, whose output is smaller than a table may be, on changed data."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.head = CHANGES[change], nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(x))  # type: ignore[no-any-return]


def _picked(change: str, rows: list[int], samples: int, steps: int, check: str = "first") -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(Net(change).double()), nn.MSELoss(reduction="sum")
    X, y = torch.randn(samples, steps, D).double(), torch.randn(samples * steps, C).double()
    loss = extend(lossfunc)(model(X).reshape(-1, C)[torch.tensor(rows)], y[torch.tensor(rows)])
    extensions = BatchGrad(), BatchL2Grad(), SumGradSquared()
    with backpack(*extensions, check=check):
        loss.backward()
    for parameter in model.parameters():
        found = vars(parameter)["grad_batch"].clone()
        for n in range(samples):
            own = [row for row in rows if row // steps == n]
            expected = torch.zeros_like(parameter)
            if own:
                each = lossfunc(model(X).reshape(-1, C)[own], y[own])
                (expected,) = torch.autograd.grad(each, parameter)
            oracle.assert_close(found[n], expected)
        oracle.assert_close(vars(parameter)["batch_l2"], found.flatten(1).square().sum(1))


@pytest.mark.parametrize("rows", ["of one", "one of each", "the last of all"])
@pytest.mark.parametrize(("samples", "steps"), [(2, 3), (3, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_picked_rows(change: str, samples: int, steps: int, rows: str) -> None:
    """As many as samples, but not one of each: they were taken for one of each."""
    picked = {
        "of one": [*range(min(samples, steps))],
        "one of each": [n * steps + n % steps for n in range(samples)],
        "the last of all": [samples * steps - 1 - n for n in reversed(range(samples))],
    }[rows]
    _picked(change, picked, samples, steps)
    _picked(change, picked, samples, steps, check="never")


@pytest.mark.parametrize(("samples", "steps"), [(2, 3), (3, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_time_first(change: str, samples: int, steps: int) -> None:
    """Steps in front of samples, behind the layer."""
    torch.manual_seed(0)
    model, lossfunc = extend(Net(change).double()), nn.MSELoss(reduction="sum")
    X, y = torch.randn(samples, steps, D).double(), torch.randn(samples, steps, C).double()
    turned = model(X).transpose(0, 1).reshape(-1, C), y.transpose(0, 1).reshape(-1, C)
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(lossfunc)(*turned).backward()
    for parameter in model.parameters():
        for n in range(samples):
            (own,) = torch.autograd.grad(lossfunc(model(X[n : n + 1]), y[n : n + 1]), parameter)
            oracle.assert_close(vars(parameter)["grad_batch"][n], own)


@pytest.mark.parametrize("turn", [lambda h: h.flip(0), lambda h: h.roll(1, 0)])
def test_samples_in_another_order_are_refused(turn: Callable[[Tensor], Tensor]) -> None:
    model, lossfunc = extend(Net("scaled")), extend(nn.MSELoss())
    loss = lossfunc(turn(model(torch.randn(3, 2, D))), torch.randn(3, 2, C))
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        loss.backward()


def test_two_arguments_of_one_sample() -> None:
    """Rows of a frozen body are those of its one sample, not one of each argument."""
    torch.manual_seed(0)
    body, head = nn.Conv1d(1, 2, 1).double().requires_grad_(False), nn.Linear(2, 1).double()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            weight = self.body.weight - self.body.weight.mean()
            return self.head(nn.functional.conv1d(x, weight).flatten(0, 1))  # type: ignore[no-any-return]

    model, lossfunc = extend(Two()), extend(nn.MSELoss(reduction="sum"))
    arguments = torch.randn(1, 1, 2).double(), torch.randn(1, 1, 1).double()
    with backpack(BatchGrad()):
        lossfunc(model(*arguments), torch.randn(2, 1).double()).backward()
    assert vars(head.weight)["grad_batch"].shape == (1, 1, 2)
    oracle.assert_close(vars(head.weight)["grad_batch"][0], head.weight.grad)
    model.zero_grad()
    with backpack(BatchGrad(subsampling=[0])):
        lossfunc(model(*arguments), torch.randn(2, 1).double()).backward()
    oracle.assert_close(vars(head.weight)["grad_batch"][0], head.weight.grad)


def test_numbers_for_several_arguments_that_are_as_long() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(D, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(x + y)  # type: ignore[no-any-return]

    model = extend(Sum())
    X, other = torch.randn(2, 2, D).unbind()
    refused = pytest.raises(UsageError, match=r"torch\.tensor\(samples\) for the rows")
    with refused, backpack(BatchGrad(), samples=[1, 0]):
        model(X, other).sum().backward()
    model.zero_grad()
    with backpack(BatchGrad(), samples=torch.tensor([1, 0])):
        model(X, other).sum().backward()
    oracle.assert_close(vars(model.head.weight)["grad_batch"].squeeze(1), (X + other).flip(0))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_a_parameter_for_each_item_of_a_list() -> None:
    """No layer receives any of the items: the loss alone tells how many there are."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2).double())

        def forward(self, items: list[Tensor]) -> Tensor:
            return self.scale.expand(len(items), 2)

    model, lossfunc = extend(Spread()), extend(nn.MSELoss(reduction="sum"))
    y = torch.randn(2, 2).double()
    with backpack(BatchGrad()):
        lossfunc(model([torch.randn(1, 3), torch.randn(1, 3)]), y).backward()
    oracle.assert_close(vars(model.scale)["grad_batch"], 2 * (model.scale.detach() - y))


@pytest.mark.parametrize("chosen", [[0], [1, 0], [2, 2]])
def test_chosen_samples_of_a_view_that_was_overwritten(chosen: list[int]) -> None:
    torch.manual_seed(0)
    layer, lossfunc = extend(nn.Linear(1, 1).double()), extend(nn.MSELoss(reduction="sum"))
    X, y = torch.randn(3, 1, 2, 1).double(), torch.randn(3, 1, 2, 1).double()

    def loss(some: slice) -> Tensor:
        h = layer(X[some])
        h[:, :, :1] = (3 * h[:, :, :1]).clone()
        return lossfunc(h, y[some])  # type: ignore[no-any-return]

    with backpack(BatchGrad(subsampling=chosen)):
        loss(slice(None)).backward()
    for found, n in zip(vars(layer.weight)["grad_batch"], chosen, strict=True):
        (own,) = torch.autograd.grad(loss(slice(n, n + 1)), layer.weight)
        oracle.assert_close(found, own)


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("rows", [[36, 6, 24, 18], [12, 1, 26, 39], [0, 13, 26, 39]])
def test_a_pixel_of_each_sample(rows: list[int], check: str) -> None:
    """In another order than the samples, targets may be in either: of pixels in a copy, too."""
    torch.manual_seed(0)
    head, lossfunc = nn.Linear(2, 2).double(), nn.MSELoss(reduction="sum")

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.permute(0, 2, 3, 1).reshape(-1, 2))  # type: ignore[no-any-return]

    model, X, y = extend(Pixels()), torch.randn(4, 2, 3, 4).double(), torch.randn(48, 2).double()
    loss = extend(lossfunc)(model(X)[torch.tensor(rows)], y[torch.tensor(rows)])
    if rows[0]:
        refused = pytest.raises(SampleMixingError, match="in another order")
        with refused, backpack(BatchGrad(), check=check):
            loss.backward()
        return
    with backpack(BatchGrad(), check=check):
        loss.backward()
    found = vars(head.weight)["grad_batch"].clone()
    for n, row in enumerate(rows):
        (own,) = torch.autograd.grad(lossfunc(model(X)[row], y[row]), head.weight)
        oracle.assert_close(found[n], own)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 2), (3, 3, 1), (2, 4)])
def test_padded_items_of_a_model_that_returns_a_number(sizes: tuple[int, ...]) -> None:
    """Rows of the padded tensor are samples, however long it is."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, items: list[Tensor]) -> Tensor:
            return self.layer(pad_sequence(items, batch_first=True)).tanh().sum(1).square().sum()

    model, items = extend(Padded()), [torch.randn(size, 2) for size in sizes]
    for _ in range(2):
        with backpack(BatchGrad()):
            model(items).backward()
        for n, item in enumerate(items):
            padded = torch.zeros(max(sizes), 2).index_add(0, torch.arange(len(item)), item)
            expected = torch.autograd.grad(model([padded]), [*model.parameters()])
            for parameter, own in zip(model.parameters(), expected, strict=True):
                oracle.assert_close(vars(parameter)["grad_batch"][n], own)


@pytest.mark.parametrize("samples", [2, 3, 5])
@pytest.mark.parametrize("merge", [lambda h: h[-1], lambda h: h.tanh().mean(0)])
def test_as_many_variants_as_samples_in_front_are_not_the_samples(
    merge: Callable[[Tensor], Tensor], samples: int
) -> None:
    class Variants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(merge(self.layer(torch.stack([x, 2 * x, x.sin()]))))  # type: ignore[no-any-return]

    model, lossfunc = extend(Variants()), extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(samples, 4), torch.randn(samples, C)
    loss, is_doubtful = lossfunc(model(x), y), samples == 3
    with pytest.raises(SampleMixingError) if is_doubtful else nullcontext(), backpack(BatchGrad()):
        loss.backward()
    for n in range(0 if is_doubtful else samples):
        expected = torch.autograd.grad(lossfunc(model(x[[n]]), y[[n]]), [*model.parameters()])
        for parameter, own in zip(model.parameters(), expected, strict=True):
            oracle.assert_close(vars(parameter)["grad_batch"][n], own)


def test_single_precision_on_a_gpu_keeps_ten_bits_in_products() -> None:
    """The device is named only; a machine without one has the same answer."""
    unit = rounding_unit(SimpleNamespace(dtype=torch.float32, device=torch.device("cuda")))
    assert unit == 2.0**-10 > rounding_unit(torch.zeros(1))
    half = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    assert rounding_unit(half) == torch.finfo(torch.bfloat16).eps


class Unpadded(nn.Module):
    """A layer for the rows that count, which are then split by sample and averaged."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths, self.head = lengths, nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(torch.cat([2 * row[:n] for row, n in zip(x, self.lengths, strict=True)]))
        return torch.stack([part.mean(0) for part in found.split(self.lengths)])


@pytest.mark.parametrize("check", ["always", "never"])
@pytest.mark.parametrize("lengths", [[3, 2], [1, 2], [2, 4, 3]])
def test_a_part_with_as_many_rows_as_samples(lengths: list[int], check: str) -> None:
    """``split`` gives parts of single samples, of which one is as long as the batch by chance."""
    torch.manual_seed(0)
    model, lossfunc = extend(Unpadded(lengths).double()), extend(nn.MSELoss(reduction="sum"))
    X, y = torch.randn(len(lengths), 4, D).double(), torch.randn(len(lengths), C).double()
    with backpack(BatchGrad(), check=check):
        lossfunc(model(X), y).backward()
    for parameter in model.parameters():
        found = vars(parameter)["grad_batch"].clone()
        for n in range(len(lengths)):
            own = (model(X)[n] - y[n]).square().sum()
            oracle.assert_close(found[n], *torch.autograd.grad(own, parameter))
