"""Private training by captured steps: that of the engine, at a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from backpack_capture import capture
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad
from backpack_privacy import AdaptiveClipping, Clipping, make_private
from backpack_privacy.captured import _Copies
from tests.privacy.problems import difference, privately

EPOCHS = 6


def trained(is_captured: bool, net: str = "perceptron", **options: Any) -> Any:
    private, model, lossfunc = privately(net, noise_multiplier=0.7, **options)
    step = capture(lambda x, y: lossfunc(model(x), y), private)
    took = []
    for _ in range(EPOCHS):
        for x, y in private.loader:
            took.append(step(x, y) if is_captured else private.step(lossfunc(model(x), y)))
    return private, model, took, step


def replays(step: Any) -> int:
    forms = [f for s in step._steps for fs in s._forms.values() for f in fs]
    return sum(f.graph.replays for f in forms if f.graph)


def mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def bounded(norms: Tensor, bound: float) -> Tensor:
    return bound / (bound + norms)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "sum": lambda: {"lossfunc": nn.CrossEntropyLoss(reduction="sum")},
    "layers": lambda: {"clipping": Clipping(0.5, "per_layer", "automatic")},
    "own weights": lambda: {"clipping": Clipping(0.5, weights=bounded)},
    "adaptive": lambda: {"clipping": AdaptiveClipping(0.5, count_noise=5.0)},
    "function": lambda: {"lossfunc": mean, "normaliser": "samples"},
}


LONG = {"sum", "own weights"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in OPTIONS]
)
def test_equal_batches_are_those_of_the_engine(name: str) -> None:
    """Bit by bit: parameters, norms, bounds, and what was spent."""
    right, other, took, _ = trained(False, sampling="shuffled", **OPTIONS[name]())
    ours, model, found, step = trained(True, sampling="shuffled", **OPTIONS[name]())
    assert found == took
    assert difference(model, other) == 0
    same(ours, right, 0.0)
    assert replays(step) >= 10, step.report()


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 3},
        *(pytest.param(o, marks=pytest.mark.long) for o in ({}, {"normaliser": "samples"})),
    ],
)
def test_batches_of_other_sizes_are_filled_up(options: dict[str, Any]) -> None:
    """By copies, which are not in the sums: equal to rounding, with a few graphs."""
    more = {"lossfunc": mean} if "normaliser" in options else {}
    right, other, took, _ = trained(False, **options, **more)
    ours, model, found, step = trained(True, **options, **more)
    assert found == took
    assert difference(model, other) < 1e-12
    same(ours, right, 1e-12)
    assert replays(step) >= 4, step.report()


def test_batches_are_not_filled_up_beyond_max_rows() -> None:
    private, model, lossfunc = privately(max_rows=2, noise_multiplier=0.7)
    sizes = set()

    def function(x: Tensor, y: Tensor) -> Tensor:
        sizes.add(len(x))
        return lossfunc(model(x), y)

    step = capture(function, private)
    for x, y in private.loader:
        step(x, y)
    assert sizes == {2}


def test_arguments_that_are_as_long_as_a_batch_by_chance() -> None:
    x, weights = torch.rand(5, 3), torch.rand(4)
    copies = _Copies()
    for _ in range(2):
        found, other = copies.behind((x, {"weights": weights}), 5, 6)
        assert len(found) == 6
        assert torch.equal(found[5], x[4])
        assert other["weights"] is weights
        found, other = copies.behind((x[:4], {"weights": weights}), 4, 6)
        assert len(found) == 6
        assert other["weights"] is weights
    copies = _Copies()
    assert len(copies.behind((x[:4], weights), 4, 6)[1]) == 6
    with pytest.raises(UsageError, match=r"shape \[4\] came with 5 rows"):
        copies.behind((x, weights), 5, 6)
    copies = _Copies()
    for rows in (4, 5):  # nothing is filled up
        assert copies.behind((x[:rows], weights), rows, rows)[1] is weights


class _Bags(nn.Module):
    """A sample is a bag of rows, which a layer weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, bags: Sequence[Tensor]) -> Tensor:
        result: Tensor = self.last(torch.stack([self.first(b).tanh().sum(0) for b in bags]))
        return result


def _of_bags(is_captured: bool) -> nn.Module:
    torch.manual_seed(0)
    data: Any = [(torch.randn(1 + n % 4, 2).double(), torch.tensor(n % 2)) for n in range(9)]
    model, lossfunc = _Bags().double(), nn.CrossEntropyLoss()
    loader = DataLoader(
        data,
        batch_size=4,
        collate_fn=lambda rows: ([bag for bag, _ in rows], torch.stack([y for _, y in rows])),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        *(model, lossfunc, optimizer, loader), noise_multiplier=0.5, max_norm=0.5, seed=1
    )
    step = capture(lambda bags, y: lossfunc(model(bags), y), private)
    for _ in range(EPOCHS):
        for bags, y in private.loader:
            step(bags, y) if is_captured else private.step(lossfunc(model(bags), y))
    return model


def test_lists_with_a_tensor_for_each_sample() -> None:
    """They are not filled up; a bag that is as long as the batch keeps its rows."""
    assert difference(_of_bags(True), _of_bags(False)) < 1e-12


def same(ours: Any, right: Any, bound: float) -> None:
    assert ours.epsilon(1e-3) == right.epsilon(1e-3)
    assert ours.clipping.bounds == pytest.approx(right.clipping.bounds, rel=bound, abs=0.0)
    for record, wanted in zip(ours.records, right.records, strict=True):
        for name, norms in wanted.norms.items():
            torch.testing.assert_close(record.norms[name], norms, rtol=bound, atol=0.0)


def test_what_captured_training_refuses() -> None:
    private, model, lossfunc = privately(users=[*range(6)] * 2)
    with pytest.raises(UsageError, match="users= says for each batch which rows belong to whom"):
        capture(lambda x, y: lossfunc(model(x), y), private)
    private, model, lossfunc = privately()
    with pytest.raises(UsageError, match="Private decides what its passes compute"):
        capture(lambda x, y: lossfunc(model(x), y), private, BatchGrad())
    step = capture(lambda x, y: lossfunc(model(x), y), private)
    with pytest.raises(UsageError, match=r"No batch of private\.loader is waiting"):
        step(torch.rand(4, 5), torch.randint(3, (4,)))


@pytest.mark.filterwarnings("ignore:A captured step runs by the engine")
def test_what_is_checked_is_checked_in_captured_steps() -> None:
    """Runs of the model, rows that were left out, and buffers that change."""

    def twice(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x), y) + lossfunc(model(x), y)

    def less(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x[1:]), y[1:])

    for function, message in ((twice, "2 runs of the model"), (less, "took part in the backward")):
        private, model, lossfunc = privately(sampling="shuffled")
        step, batch = capture(function, private), next(iter(private.loader))
        with pytest.raises(UsageError, match=message):
            step(*batch)


def test_what_losses_divide_by_is_compared_in_graphs() -> None:
    """Ignored targets change what a mean divides by, and so what every sample gives."""
    private, model, lossfunc = privately(sampling="shuffled", normaliser="samples", checks=0)
    step = capture(lambda x, y: lossfunc(model(x), y), private)
    for number in range(EPOCHS):
        for x, y in private.loader:
            if number < EPOCHS - 1:
                step(x, y)
                continue
            assert replays(step)
            y[0] = -100
            with pytest.raises(UsageError, match="divides by 4, but CrossEntropyLoss divides by 3"):
                step(x, y)
            break


class Steps(nn.Module):
    """Layers on each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(128, 512),
            nn.Linear(512, 128),
            nn.Linear(128, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean over steps."""
        return self.last(self.second(self.first(x).tanh()).mean(1))  # type: ignore[no-any-return]


def test_norms_of_single_precision() -> None:
    """They are stored in double precision, but are no more precise than the parameters."""
    torch.manual_seed(0)
    model, lossfunc = Steps().float(), nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(4, 64, 128, dtype=torch.float32), torch.randint(5, (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        model, lossfunc, optimizer, DataLoader(data, batch_size=4), noise_multiplier=1.0,
        max_norm=1.0, sampling="shuffled",
    )  # fmt: skip
    step = capture(lambda x, y: lossfunc(model(x), y), private)
    for _ in range(12):
        for x, y in private.loader:
            step(x, y)
    assert replays(step), step.report()
