"""Where tensors are made: on the device of what is differentiated, or on the host, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backpack_core.extensions
from backpack_checks.dyed import Weights
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from tests import oracle
from tests.cases import Net, names_of_extensions
from tests.devices import DrawnOnHost, usable


@pytest.mark.parametrize(
    ("name", "message"), [("meta", "no numbers"), ("nowhere", "--device nowhere: Expected one of")]
)
def test_a_device_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        usable(name)


def test_the_device_that_is_asked_for_is_the_default(pytestconfig: pytest.Config) -> None:
    assert torch.empty(0).device.type == torch.device(pytestconfig.getoption("--device")).type


def test_a_generator_of_the_host_draws_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # With torch 2.6, it is only what set_default_device() says.
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("meta"))
    with torch.device("meta"), DrawnOnHost():
        drawn = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        assert drawn.is_meta
        assert torch.randn(3, device="cpu").device.type == "cpu"


def test_weights_of_the_dye_are_drawn_on_the_host() -> None:
    with torch.device("meta"):
        weights = Weights(6, seed=0, guesses=1)
        assert weights.along(torch.ones(6, 1, device="cpu")).device.type == "cpu"


class Scaled(nn.Module):
    """Has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.scale)


class Attention(nn.Module):
    """Functions between modules, a table of positions, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Embedding(6, 4)
        self.norm, self.attend = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.recur, self.last = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        h = h + self.attend(*[self.norm(h)] * 3, need_weights=False)[0]
        result: Tensor = self.last(self.recur(h)[0].mean(1))
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.Sigmoid(), nn.BatchNorm2d(4).eval(), nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3), Scaled(),
        ),
        lambda: torch.randn(4, 2, 3, 3),
    ),
    "dense": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        lambda: torch.randn(4, 4),
    ),
    "attention": (Attention, lambda: torch.randint(5, (4, 6))),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "ClippedSumGrad": {"max_norm": 0.1},
    "AggregatedGrad": {"weighting": torch.diag},
    "GradInner": {"queries": lambda name, shape: torch.ones(2, *shape)},
    "ProjectedGrad": {"dim": 3},
    **{name: {"fail_mode": "block"} for name in ("KFAC", "KFLR", "EKFAC")},
}
# What these ask for, some models do not have.
DENSE_ONLY = {"KFRA", "DiagHessian", "BatchDiagHessian", "HMP", "DiagHMP", "PCHMP", "GGNMP", "JMP"}
CASES = [
    (model, name)
    for model in MODELS
    for name in names_of_extensions()
    if model == "dense" or name not in DENSE_ONLY
]


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_results_do_not_depend_on_the_default_device(name: str, kind: str) -> None:
    """Nothing is made there by chance: a model on the host, under another default device."""
    make, draw = MODELS[name]
    model, lossfunc = extend(make()), extend(nn.CrossEntropyLoss())
    x, y = draw(), torch.tensor([0, 1, 2, 1])
    vectors = [torch.randn(2, *p.shape) for p in model.parameters()]
    default, found = torch.get_default_device(), []
    for device in (default, torch.device("meta")):
        torch.manual_seed(0)
        extension = getattr(backpack_core.extensions, kind)(**OPTIONS.get(kind, {}))
        # The forward pass is the user's, and so may be what it makes.
        loss = lossfunc(model(x), y)
        with torch.device(device), backpack(extension):
            loss.backward()
            values = [getattr(p, extension.savefield) for p in model.parameters()]
            found.append([numbers(v, u) for v, u in zip(values, vectors, strict=True)])
    for ours, reference in zip(*found, strict=True):
        assert ours.device.type == default.type
        oracle.assert_close(ours, reference)


@pytest.mark.parametrize("samples", [None, [0, 1, 1], [torch.tensor([0, 0]), 1, 1]])
def test_lists_do_not_depend_on_the_default_device(samples: Any) -> None:
    items = [torch.randn(rows, 3) for rows in (2, 1, 4)]

    def run(net: Any, items: list[Tensor]) -> Tensor:
        hidden = net.a(torch.cat(items)).tanh().split([len(item) for item in items])
        return torch.stack([part.sum(0) for part in hidden])

    net, found = extend(Net(run, a=nn.Linear(3, 2))), []
    for device in (torch.get_default_device(), torch.device("meta")):
        z = net(items)
        loss = extend(nn.MSELoss(reduction="sum"))(z, torch.zeros_like(z))
        with torch.device(device), backpack(BatchGrad(), samples=samples):
            loss.backward()
        found.append(net.a.weight.grad_batch)
    assert len(found[0]) == (3 if samples is None else 2)
    oracle.assert_close(*found)


def numbers(value: Any, vectors: Tensor) -> Tensor:
    """A result as one tensor."""
    if hasattr(value, "dense"):
        value = value.dense()
    elif hasattr(value, "gram"):
        value = value.gram
    elif not isinstance(value, Tensor):
        value = value(vectors)
    assert isinstance(value, Tensor)
    return value
