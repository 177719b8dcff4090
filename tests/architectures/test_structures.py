"""Modules that return dictionaries, dataclasses and distributions, or keep parameters in lists."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import oracle

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


@dataclass(frozen=True)
class Found:
    """What a model returns."""

    logits: Tensor
    name: str = ""
    features: Tensor | None = None


class Head(nn.Module):
    """A module with a parameter of its own, whose result is wrapped."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x @ self.weight.T)


STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dictionary": (lambda y: {"logits": y, "n": 3}, lambda found: found["logits"]),
    "ordered": (lambda y: OrderedDict(a=None, logits=y), lambda found: found["logits"]),
    "dataclass": (lambda y: Found(y, "name"), lambda found: found.logits),
    "nested": (lambda y: [{"found": Found(y)}], lambda found: found[0]["found"].logits),
    "normal": (lambda y: Normal(y, 1.0), lambda found: found.loc),
    "categorical": (lambda y: Categorical(logits=y), lambda found: found.logits),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_parameters_have_their_quantities(kind: str) -> None:
    wrap, unwrap = STRUCTURES[kind]
    body, head, x = nn.Linear(5, 4), Head(wrap), torch.randn(3, 5)
    target = torch.randint(3, (3,))
    rows = [unwrap(head(body(row.unsqueeze(0)))) for row in x]
    parameters = [*body.parameters(), *head.parameters()]
    singles = [
        oracle.gradients(nn.functional.cross_entropy(row, target[n : n + 1]), parameters)
        for n, row in enumerate(rows)
    ]
    extend(body), extend(head)
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    result = head(body(x))
    assert type(result) is type(wrap(torch.zeros(3, 3)))
    loss = lossfunc(unwrap(result), target)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for parameter, expected in zip(parameters, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(expected))
        assert parameter.diag_ggn_exact.shape == parameter.shape


def test_a_frozen_dataclass_stays_what_it_is() -> None:
    """A module that returns its input returns another tensor then, in another dataclass."""

    class Same(nn.Module):
        def forward(self, x: Tensor) -> Found:
            return Found(x, "same")

    x = torch.randn(3, 4, requires_grad=True) * 2
    found = extend(Same())(x)
    assert found.name == "same"
    assert found.features is None
    assert torch.equal(found.logits, x)


class Listed(nn.Module):
    """All of its parameters are in a list or a dictionary, which nobody calls."""

    def __init__(self, is_list: bool) -> None:
        super().__init__()
        self.is_list = is_list
        values = {"w": torch.randn(3, 4), "b": torch.randn(3)}
        self.values: Any = (
            nn.ParameterList(values.values()) if is_list else nn.ParameterDict(values)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.values if self.is_list else (self.values["w"], self.values["b"])
        return torch.tanh(F.linear(x, weight, bias))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_list", [True, False])
def test_parameters_in_a_list_alone(is_list: bool, depth: int) -> None:
    model, x = nn.Sequential(Listed(is_list)) if depth else Listed(is_list), torch.randn(5, 4)
    parameters = [*model.parameters()]
    own = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), parameters) for n in range(5)]
    with backpack(BatchGrad()):
        extend(model)(x).square().sum().backward()
    for parameter, *gradients in zip(parameters, *own, strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(gradients))  # type: ignore[attr-defined]
