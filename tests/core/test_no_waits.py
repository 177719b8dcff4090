"""A backward pass that is not measured reads no value of a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import backpack_core.extensions
from backpack_checks.dye import DyePropagator
from backpack_core import backpack, extend
from backpack_operations.passes import GraphPass
from tests.cases import Net, names_of_extensions
from tests.test_models import Classifier, Tagger, trained_statistics
from tests.waits import Reads

Problem = tuple[nn.Module, nn.Module, Tensor, Tensor]


def _labels(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape)


def _dense(lossfunc: nn.Module, target: Tensor) -> Problem:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, lossfunc, torch.randn(4, 4), target


def _convolutions() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(2), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip
    return trained_statistics(model), nn.CrossEntropyLoss(), torch.randn(4, 1, 6, 6), _labels(4)


def _embedding() -> Problem:
    model = Net(lambda net, x: net.b(net.a(x)).mT, a=nn.Embedding(7, 5), b=nn.Linear(5, 3))
    target = _labels(4, 3)
    target[0, 1] = -100
    return model, nn.CrossEntropyLoss(), torch.randint(0, 7, (4, 3)), target


def _tagger() -> Problem:
    return Tagger(), nn.CrossEntropyLoss(), torch.randint(0, 7, (4, 3)), _labels(4, 3)


def _random() -> Problem:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Unflatten(1, (2, 3)), nn.Dropout1d(0.5),
        nn.SELU(), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5), nn.Flatten(), nn.Linear(6, 5),
        nn.RReLU(), nn.Linear(5, 3),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), torch.randn(4, 4), _labels(4)


def _encoder() -> Problem:
    tokens = torch.randint(0, 7, (3, 4))
    return Classifier(norm_first=True), nn.CrossEntropyLoss(), tokens, _labels(3)


def _language() -> Problem:
    """All samples look up the same rows of a table, and the loss gets several rows of each."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = (net.a(x) + net.c(torch.arange(x.shape[1]).unsqueeze(0))).tanh()
        logits: Tensor = net.b(h[:, :])  # makes an alias
        return logits[:, :-1].reshape(-1, 3)

    model = Net(forward, a=nn.Embedding(7, 5), b=nn.Linear(5, 3), c=nn.Embedding(6, 5))
    return model, nn.CrossEntropyLoss(), torch.randint(0, 7, (4, 3)), _labels(8)


MODELS: dict[str, Callable[[], Problem]] = {
    "language": _language,
    "classes": lambda: _dense(nn.CrossEntropyLoss(), _labels(4)),
    "regression": lambda: _dense(nn.MSELoss(), torch.randn(4, 3)),
    "convolutions": _convolutions,
    "embedding": _embedding,
    "recurrent": _tagger,
    "encoder": _encoder,
    "random": _random,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ClippedSumGrad": {"max_norm": 0.1},
    "AggregatedGrad": {"weighting": torch.diag},
    "GradInner": {"queries": lambda name, shape: torch.ones(2, *shape)},
    "ProjectedGrad": {"dim": 3},
    **{name: {"fail_mode": "block"} for name in ("KFAC", "KFLR", "EKFAC")},
}
# What these ask for, some models do not have.
WITHOUT_HESSIAN = {"convolutions", "embedding", "recurrent", "encoder", "language"}
MISSING = {
    "PCHMP": {"recurrent", "encoder", "language"},
    **dict.fromkeys(("KFRA", "DiagHessian", "BatchDiagHessian"), WITHOUT_HESSIAN),
}
CASES = [
    (model, name)
    for model in MODELS
    for name in names_of_extensions()
    if model not in MISSING.get(name, ())
]
# Whose samples a copy of the model's input holds is seen by comparing it: where quantities are kept
# apart, shapes depend on it. The samples of the rows at a loss are known on the host.
ALLOWED = {"data.py:_of_copy", "columns.py:_turns"}


SEEN: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "index": lambda t: range(3)[t[0].long()],
    "list": lambda t: t.tolist(),
    "array": lambda t: t.numpy(),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "equal": lambda t: torch.equal(t, t),
    "all close": lambda t: torch.allclose(t, t),
    "unique": lambda t: t.unique(),
    "unique rows": lambda t: t.unique(dim=0),
    "neighbours": lambda t: t.unique_consecutive(),
    "bincount": lambda t: t.long().bincount(),
    "mask": lambda t: t[t > 0],
    "mask that is written to": lambda t: t.index_put_((t > 0,), torch.ones(2)),
    "masked select": lambda t: t.masked_select(t > 0),
    "repeats": lambda t: t.repeat_interleave(t.long()),
}


@pytest.mark.host("numpy is one of the ways")
@pytest.mark.parametrize("name", SEEN)
def test_a_read_is_seen(name: str) -> None:
    with Reads() as found:
        SEEN[name](torch.tensor([1.0, 0.0, 1.0]))
    assert found.found


def test_what_is_no_read_is_not_counted() -> None:
    t, where = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 2])
    with Reads() as found:
        torch.where(t > 0, t[where].sum(), 0.0).sort()[0].masked_fill(t > 0, 1.0)
        t.repeat_interleave(2).cumsum(0).scatter_add(0, where, t[:2])
    assert not found.found


def reads(
    problem: Problem, kind: str, check: Any, is_meant: Callable[[int], bool]
) -> Counter[tuple[str, str]]:
    """What a pass reads inside ``backward()``: the first that is meant, by how many there were."""
    model, lossfunc, x, target = problem
    model, lossfunc = extend(model), extend(lossfunc)
    extension = getattr(backpack_core.extensions, kind)(**OPTIONS.get(kind, {}))
    for passes in range(1, 20):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = lossfunc(model(x), target)
        with backpack(extension, check=check), Reads() as found:
            loss.backward()
        if is_meant(passes):
            return Counter(read for read in found.found if read[1] not in ALLOWED)
    raise AssertionError("none of the passes was meant")


@pytest.mark.plans
@pytest.mark.grid(8)
@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_pass_that_is_never_measured_reads_no_values(name: str, kind: str) -> None:
    # Whether vmap is right at operations, which rows are whose, and whether samples share them, is
    # looked at once.
    once = kind == "DiagHMP" or name == "language"
    assert not reads(MODELS[name](), kind, "never", lambda passes: passes > once)


@pytest.mark.plans
@pytest.mark.grid(8)
@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_pass_of_a_trusted_structure_reads_no_values(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bool] = []
    begin = GraphPass.__init__

    def noted(self: GraphPass, *given: Any) -> None:
        begin(self, *given)
        measured.append(any(isinstance(g.propagator, DyePropagator) for g in self.groups))

    monkeypatch.setattr(GraphPass, "__init__", noted)
    # The passes 1, 2 and 4 are measured, and more where masks hide a part of the net.
    assert not reads(MODELS[name](), kind, "first", lambda passes: not measured[-1])
    assert measured[:2] == [True] * 2
