"""Extensions that read labels have nets with labels, on which the kit checks them."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.testing import LABELLED, ExtensionCase, LossCase, Quantity, check_case
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense


class PerSample(FirstOrderExtension):
    savefield = "per_sample_of_labels"
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        return dense(product).squeeze(0)


QUANTITY = Quantity(lambda reference, name: reference.gradients(name))


def test_labelled_loss() -> None:
    results = check_case(ExtensionCase(PerSample, QUANTITY, loss=LABELLED))
    assert [result for result in results if not result.ok] == []
    assert len(results) > 10


def test_labels_matter() -> None:
    """Labels of another kind give other values: the loss is not ignored."""
    seen: list[Tensor] = []

    def note(reference: object, name: str) -> Tensor:
        value: Tensor = reference.gradients(name)  # type: ignore[attr-defined]
        seen.append(value)
        return value

    zeros = lambda n: (torch.randn(n, 2), torch.zeros(n, dtype=torch.long))  # noqa: E731
    for labels in (LABELLED, LossCase(LABELLED.loss_factory, zeros)):
        case = ExtensionCase(PerSample, Quantity(note), loss=labels)
        (result,) = check_case(case, ["mean"])
        assert result.ok, result.message
    half = len(seen) // 2
    assert not torch.equal(seen[0], seen[half])


def test_any_loss_will_do() -> None:
    squares = LossCase(torch.nn.MSELoss, lambda n: (torch.randn(n, 3), torch.randn(n, 3)))
    results = check_case(ExtensionCase(PerSample, QUANTITY, loss=squares))
    assert [result for result in results if not result.ok] == []
