"""What ``docs/migration.md`` says is exact here and refused by the incumbent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.core.derivatives.adaptive_avg_pool_nd import AdaptiveAvgPool2dDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def run(
    extension: Any,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    finish: Callable[[Tensor], Tensor] = lambda loss: loss,
    **options: Any,
) -> nn.Module:
    model, lossfunc = extend(model), extend(nn.CrossEntropyLoss(**options))
    loss = finish(lossfunc(model(x), y))
    with backpack(extension):
        loss.backward()
    return model


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3), torch.randint(3, (4,))


def diagonal(finish: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
    x, y = data()
    torch.manual_seed(1)
    model = run(DiagGGNExact(), nn.Sequential(nn.Linear(3, 3)), x, y, finish, **options)
    found: Tensor = model[0].weight.diag_ggn_exact  # type: ignore[index]
    return found


def test_a_scaled_loss() -> None:
    torch.testing.assert_close(
        diagonal(lambda loss: 0.25 * loss), 0.25 * diagonal(lambda loss: loss)
    )


def test_a_sum_by_hand() -> None:
    by_hand = diagonal(lambda loss: loss.sum(), reduction="none")
    torch.testing.assert_close(by_hand, diagonal(lambda loss: loss, reduction="sum"))


@pytest.mark.parametrize("extension", [KFAC, KFLR])
def test_factors_of_groups(extension: Any) -> None:
    _, y = data()
    net = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3))
    model = run(extension(), net, torch.randn(4, 2, 3, 3), y)
    factors = getattr(model[0].weight, extension().savefield)  # type: ignore[index]
    assert [list(factor.shape) for factor in factors] == [[2, 2, 2], [2, 4, 4]]


@pytest.mark.parametrize("extension", [KFAC, KFLR])
def test_factors_of_shared_positions(extension: Any) -> None:
    _, y = data()
    net = nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(10, 3))
    model = run(extension(), net, torch.randn(4, 5, 3), y)
    factors = getattr(model[0].weight, extension().savefield)  # type: ignore[index]
    assert [list(factor.shape) for factor in factors] == [[2, 2], [3, 3]]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) + x


def test_a_class_of_ones_own_and_class_weights() -> None:
    x, y = data()
    weight = torch.tensor([0.5, 1.0, 2.0])
    model = run(KFAC(), run(DiagGGNExact(), Residual(), x, y, weight=weight), x, y)
    assert [list(factor.shape) for factor in model.a.weight.kfac] == [[3, 3], [3, 3]]  # type: ignore[union-attr]

    first, second = (
        [p.detach() for p in layer.parameters()]
        for layer in (model.a, model.b)  # type: ignore[union-attr]
    )

    def scores(matrix: Tensor) -> Tensor:
        hidden = torch.relu(nn.functional.linear(x, matrix, first[1]))
        return nn.functional.linear(hidden, *second) + x

    def loss(out: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y, weight)

    jac = torch.func.jacrev(scores)(first[0]).reshape(12, 9)
    hessian = torch.func.hessian(loss)(scores(first[0])).reshape(12, 12)
    expected = torch.einsum("ai,ab,bi->i", jac, hessian, jac).reshape(3, 3)
    torch.testing.assert_close(model.a.weight.diag_ggn_exact, expected)  # type: ignore[union-attr]


def test_hooks_of_containers() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    model[1].register_forward_hook(lambda module, inputs, output: None)
    model[1].register_full_backward_hook(lambda module, grad_inputs, grad_outputs: None)
    run(BatchGrad(), model, x, y)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


def test_derivatives_of_ones_own_find_what_they_override() -> None:
    assert callable(MSELossDerivatives()._make_distribution)
    assert callable(CrossEntropyLossDerivatives()._make_distribution)
    assert callable(AdaptiveAvgPool2dDerivatives().check_parameters)


def test_the_page_has_a_line_for_each() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("### What BackPACK refuses")[2]
    rows = [line for line in table.partition("##")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == 6
