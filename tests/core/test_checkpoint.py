"""Activations that are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core.errors import BridgeError, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, classification


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), block, nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        result: Tensor = self.last(h)
        return result


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(inplace=True))


def test_checkpoint() -> None:
    classification(Checkpointed(block(), reentrant=False), (3,)).check()


def test_max_pooling_inside_checkpoint() -> None:
    """Its rule reads what autograd saved, where that can be read twice."""
    pool = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(2, 4)
    )
    classification(Checkpointed(pool, reentrant=False), (3,)).check()


def test_function_inside_checkpoint() -> None:
    """Such a checkpoint gives each saved tensor once, and autograd itself wants it."""
    classification(Checkpointed(Net(lambda _, x: torch.sin(x)), reentrant=False), (3,)).check()


def test_reentrant_checkpoint_first_order() -> None:
    model = Checkpointed(block(), reentrant=False)
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    model.reentrant = True
    problem.run(BatchGrad())
    problem.compare("grad_batch", expected)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_reentrant_checkpoint_of_a_shared_layer(extension: Any) -> None:
    """What lies inside is a graph of its own, so that the other use is not seen from there."""
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant=True)
    model.last = nn.Sequential(model.block[0], nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        classification(model, (3,)).run(extension())


def test_reentrant_checkpoint_second_order() -> None:
    with pytest.raises(BridgeError, match="use_reentrant=False"):
        classification(Checkpointed(block(), reentrant=True), (3,)).run(DiagGGNExact())
