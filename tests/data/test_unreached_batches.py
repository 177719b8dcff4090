"""Batches that do not reach a parameter, as an expert that gets no sample: zeros, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    Jacobians,
    SqrtGGNExact,
    Variance,
)
from backpack_data import accumulate, combined
from tests.oracle import assert_close


class Mixture(nn.Module):
    """Each sample goes to the expert that its first number names; others are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 3) for _ in range(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            if len(rows := torch.where(x[:, 0] == number)[0]):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows, 1:])))
        result: Tensor = self.last(out)
        return result


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Mixture().double()


# The first expert is reached by all batches, the second by one in the middle, the third at the end.
NUMBERS = ([0, 0, 0], [0], [1, 0, 1, 0, 1], [0, 2])
EXTENSIONS = [BatchGrad, BatchL2Grad, Variance, BatchDiagGGNExact, SqrtGGNExact, Jacobians]


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    numbers = [torch.tensor(each).double().unsqueeze(1) for each in NUMBERS]
    return [(torch.cat([n, torch.randn(len(n), 2).double()], 1), torch.arange(len(n)) % 2)
            for n in numbers]  # fmt: skip


def _expected(extension: Extension, reduction: str) -> dict[str, Any]:
    model, lossfunc = extend(_model()), extend(nn.CrossEntropyLoss(reduction=reduction))
    x, y = (torch.cat(parts) for parts in zip(*_batches(), strict=True))
    with backpack(extension):
        lossfunc(model(x), y).backward()
    return {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}


def _require_equal(found: Any, expected: dict[str, Any]) -> None:
    assert {*found} == {*expected}
    for name, value in expected.items():
        assert_close(found[name], value)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_as_of_one_batch(kind: type[Extension], reduction: str) -> None:
    extension, lossfunc = kind(), nn.CrossEntropyLoss(reduction=reduction)
    found = accumulate(_model(), lossfunc, _batches(), extension, progress=False)
    _require_equal(found.field(extension.savefield), _expected(kind(), reduction))


@pytest.mark.parametrize("kind", [BatchGrad, Variance])
def test_micro_batches(kind: type[Extension]) -> None:
    model, lossfunc = extend(_model()), extend(nn.CrossEntropyLoss())
    extension = kind()
    total = combined(model, extension)
    for x, y in _batches():
        with total:
            lossfunc(model(x), y).backward()
    found = {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}
    _require_equal(found, _expected(kind(), "mean"))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_resumed_runs(first: int, tmp_path: Path) -> None:
    """The number of samples before a parameter is reached is in the file."""
    batches = _batches()

    class Stops(list[Any]):
        def __iter__(self) -> Any:
            yield from batches[:first]
            raise KeyboardInterrupt

    settings: Any = {"progress": False, "state_file": tmp_path / "state", "every": 1}
    with pytest.raises(KeyboardInterrupt):
        accumulate(_model(), nn.CrossEntropyLoss(), Stops(batches), BatchGrad(), **settings)
    found = accumulate(_model(), nn.CrossEntropyLoss(), batches, BatchGrad(), **settings)
    _require_equal(found.field("grad_batch"), _expected(BatchGrad(), "mean"))


@pytest.mark.parametrize("extension", [KFLR(), BatchGrad(fail_mode="silent")], ids=["A", "silent"])
def test_what_is_not_known_is_refused(extension: Extension) -> None:
    """Factors are averages over samples that arrive; values may be left out silently."""
    with pytest.raises(UnsupportedError, match="batches reached the parameter 'experts"):
        accumulate(_model(), nn.CrossEntropyLoss(), _batches(), extension, progress=False)
