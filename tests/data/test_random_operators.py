"""Linear operators over data sets that are drawn, against the matrix of one batch by autograd.

``make test ARGS="--nets=50000 tests/data/test_random_operators.py"`` draws 1,000.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import UsageError
from backpack_core.testing import oracle as kit
from backpack_secondorder.conjugate_gradients import conjugate_gradients
from backpack_secondorder.over_data import GGN, Fisher, Hessian
from tests import oracle
from tests.data.random_sums import Sum
from tests.data.truth import Truth
from tests.drawn import judge

SHARE, LEAST = 50, 12
Change = Callable[[nn.Module], object]


def _whole(truth: Truth, kind: str) -> Tensor:
    """The matrix, ``[P, P]``."""
    output = truth.body(truth.x)
    if kind == "Hessian":
        value, rows = truth.loss(output), list[Tensor]()
        slopes = kit.gradients(value, truth.parameters, again=True)
        for entry in torch.cat([slope.flatten() for slope in slopes]):
            found = kit.gradients(entry, truth.parameters) if entry.requires_grad else slopes
            flat = torch.cat([part.flatten() for part in found])
            rows.append(flat if entry.requires_grad else torch.zeros_like(flat))
        return torch.stack(rows).detach()
    if kind == "Fisher":
        loss, own = truth.loss, lambda output: truth.loss(output, "sum")
        each = oracle.individual_gradients(truth.body, own, [truth.x], truth.parameters)
        flat = torch.cat([rows.flatten(1) for rows in each], 1)
        whole, total = float(loss(output).detach()), float(own(output).detach())
        scale = whole / total if total else 0.0
        return scale * flat.T @ flat
    blocks = oracle.jacobians([*output], truth.parameters)
    jacobian = torch.cat(blocks, 2)
    hessian = oracle.loss_hessians(truth.loss, output.detach())
    return torch.einsum("nca,ncd,ndb->ab", jacobian, hessian, jacobian).detach()


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _exchange(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


CHANGES: list[Change] = [_update, _exchange, lambda model: model.double(), lambda model: None]


def _forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    found = model(**inputs)
    return getattr(found, "logits", found), batch["labels"]


def fault_of(seed: int) -> str:
    """What is wrong with an operator; ``refused`` if there is none."""
    given = Sum(seed)
    if given.is_single:
        return "refused"
    draw, loader = given.random, given.loader()
    kind = draw.choice(["GGN", "GGN", "Hessian", "Fisher"])
    given.told.append(kind)
    options: dict[str, Any] = {"by_parameter": draw.random() < 0.3}
    if given.form == "labels":
        options["forward"] = _forward
    if given.is_twofold:  # a module of two losses has no rule
        given.lossfunc = given.lossfunc.first
        given.is_twofold = False
    if kind == "Fisher":
        options["kind"] = "empirical"
    make: Any = {"GGN": GGN, "Hessian": Hessian, "Fisher": Fisher}[kind]
    operator = make(given.model, given.lossfunc, loader, **options)
    for number in range(2):
        if number:
            draw.choice(CHANGES)(given.model)
        if fault := _compared(given, operator, kind, options["by_parameter"]):
            return f"{given.told}, pass {number}: {fault}"
    return ""


def _compared(given: Sum, operator: Any, kind: str, is_by_parameter: bool) -> str:
    truth = Truth(given)
    right = _whole(truth, kind)
    if is_by_parameter:
        sizes = [p.numel() for p in truth.parameters]
        blocks = [right[a : a + n, a : a + n] for a, n in zip(_starts(sizes), sizes, strict=True)]
        right = torch.block_diag(*blocks)
    size = 1 + float(right.abs().max())
    try:
        found = operator @ torch.eye(len(right))
    except UsageError as error:
        is_empty = "no batch with a sample that counts" in str(error)
        return "" if is_empty and given.kind == "ignored" else str(error)
    if not torch.allclose(found, right, rtol=0.0, atol=1e-9 * size):
        return f"the products are wrong:\n{found}\n{right}"
    vector = torch.randn(len(right))
    parts = operator @ operator.split(vector.unsqueeze(0))
    if not torch.allclose(
        torch.cat([p.flatten() for p in parts]), right @ vector, atol=1e-9 * size
    ):
        return "the product of a list is wrong"
    value = truth.loss(truth.body(truth.x))
    slopes = kit.gradients(value, truth.parameters)
    pairs = zip(operator.gradient(), slopes, strict=True)
    if not all(torch.allclose(a, b, atol=1e-10) for a, b in pairs):
        return "the gradient is wrong"
    if not torch.allclose(operator.loss(), value):
        return "the loss is wrong"
    if kind != "Hessian":
        found = conjugate_gradients(operator, vector, 0.3 * size, rtol=1e-9).x
        wanted = torch.linalg.solve(right + 0.3 * size * torch.eye(len(right)), vector)
        if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-7):
            return "the solution is wrong"
    return ""


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:place]) for place in range(len(sizes))]


def test_random_operators(request: pytest.FixtureRequest) -> None:
    found = judge(request, SHARE, LEAST, fault_of)
    assert found.count("") > len(found) / 2
