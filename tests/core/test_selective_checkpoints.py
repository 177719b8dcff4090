"""Checkpoints that keep the results of some operations, and compute the others again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backpack_core import backpack
from backpack_core.extensions import (
    GGNMP,
    HMP,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    DiagHMP,
)
from tests import oracle
from tests.cases import Net, Problem, classification

KEPT: list[Any] = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


def _problem(is_checkpointed: bool) -> Problem:
    def block(net: Any, x: Tensor) -> Tensor:
        return net.b(torch.sin(net.a(x)).tanh())  # type: ignore[no-any-return]

    def forward(net: Any, x: Tensor) -> Tensor:
        if not is_checkpointed:
            return block(net, net.first(x))
        context = partial(create_selective_checkpoint_contexts, KEPT)
        result: Tensor = checkpoint(
            partial(block, net), net.first(x), use_reentrant=False, context_fn=context
        )
        return result

    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 3)}
    return classification(Net(forward, **layers), (3,))


def _compare(found: list[list[Tensor]]) -> None:
    for ours, reference in zip(*found, strict=True):
        oracle.assert_close(ours, reference)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian, DiagHMP])
def test_values(extension: Any) -> None:
    """Second derivatives need what the checkpoint computes in a pass of their own."""
    found = []
    for is_checkpointed in (True, False):
        problem = _problem(is_checkpointed)
        problem.run(extension())
        found.append(problem.fields(extension().savefield))
    _compare(found)


@pytest.mark.parametrize("extension", [HMP, GGNMP])
def test_products(extension: Any) -> None:
    """Behind the block, any number of times."""
    found = []
    for is_checkpointed in (True, False):
        problem = _problem(is_checkpointed)
        problem.run(extension())
        products = problem.fields(extension().savefield)
        pairs = [*zip(products, problem.parameters, strict=True)]
        found.append([p(torch.ones(1, *q.shape)) for p, q in pairs for _ in range(2)])
    _compare(found)


def test_quantities_that_are_differentiated() -> None:
    found = []
    for is_checkpointed in (True, False):
        problem = _problem(is_checkpointed)
        loss = problem.loss()
        with backpack(BatchGrad()):
            torch.autograd.grad(loss, problem.parameters, create_graph=True)
        square = torch.stack([g.square().sum() for g in problem.fields("grad_batch")]).sum()
        found.append([*torch.autograd.grad(square, problem.parameters)])
        for parameter in problem.parameters:
            parameter.__dict__.clear()
    _compare(found)


def test_nothing_changes_without_a_block() -> None:
    """The results that are kept are dropped when the others are computed again."""
    loss = _problem(True).loss()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="extra time"):
        loss.backward()
