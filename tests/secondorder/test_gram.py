"""Spectrum of the generalised Gauss-Newton matrix over all parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import OverwrittenInputError, UsageError
from backpack_core.extensions import GGNGram, SqrtGGNExact, SqrtGGNMC
from tests.cases import Net, Problem, classification
from tests.oracle import assert_close
from tests.secondorder.problems import NETS, make


def whole(problem: Problem, field: str = "sqrt_ggn_exact") -> Tensor:
    """``M`` over all parameters, ``[V·N, P]``."""
    return torch.cat([root.flatten(2).flatten(0, 1) for root in problem.fields(field)], 1)


@pytest.mark.parametrize("net", NETS)
def test_spectrum(net: str) -> None:
    problem = make(net, 3)
    problem.run(GGNGram(), SqrtGGNExact())
    rows = whole(problem)
    blocks = problem.fields("ggn_gram")
    spectrum = blocks[0].spectrum
    assert all(block.spectrum is spectrum for block in blocks)
    assert_close(spectrum.gram.reshape(6, 6), rows @ rows.T)
    for p, block in zip(problem.parameters, blocks, strict=True):
        own = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
        assert_close(block.gram.reshape(6, 6), own @ own.T)
    assert_close(spectrum.eigenvalues, torch.linalg.eigvalsh(rows @ rows.T).flip(0))
    vectors = torch.cat([block.eigenvectors(2).flatten(1) for block in blocks], 1)
    assert_close(vectors @ vectors.T, torch.eye(2), 1e-8)
    ggn = rows.T @ rows
    assert_close(vectors @ ggn, spectrum.eigenvalues[:2, None] * vectors, 1e-8)


def test_sampled_and_subsampled() -> None:
    problem = make("mlp", 4)
    problem.run(GGNGram(5, subsampling=[2, 0]), SqrtGGNMC(5, subsampling=[2, 0]))
    rows = whole(problem, "sqrt_ggn_mc")
    assert_close(problem.fields("ggn_gram")[0].spectrum.gram.reshape(10, 10), rows @ rows.T)


def test_shared_parameter() -> None:
    layer = nn.Linear(3, 3)
    problem = classification(Net(lambda net, x: net.a(net.t(net.a(x))), a=layer, t=nn.Tanh()), (3,))
    problem.run(GGNGram(), SqrtGGNExact())
    rows = whole(problem)
    blocks = problem.fields("ggn_gram")
    assert_close(blocks[0].spectrum.gram.reshape(6, 6), rows @ rows.T)
    vectors = torch.cat([block.eigenvectors(1).flatten(1) for block in blocks], 1)
    assert_close(vectors @ rows.T @ rows, blocks[0].spectrum.eigenvalues[:1, None] * vectors, 1e-8)


def test_two_heads() -> None:
    """Columns of one head's loss never reach the other head."""
    parts = {"body": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)}
    net = extend(Net(lambda net, x: (net.left(net.body(x)), net.right(net.body(x))), **parts))
    body_once = extend(Net(lambda net, x: net.body(x), body=parts["body"]))
    first, second = extend(nn.MSELoss()), extend(nn.MSELoss())
    x, target = torch.randn(3, 3), torch.randn(3, 2)
    with backpack(GGNGram(), SqrtGGNExact()):
        hidden = body_once(x)
        loss = first(net.left(hidden), target) + 3 * second(net.right(hidden), target)
        loss.backward()
    # By hand: rows of both losses, zero where a head does not take part.
    spectrum = net.left.weight.ggn_gram.spectrum
    total = torch.zeros(12, 12)
    for head in (net.left, net.right):
        for p in head.parameters():
            own = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
            start = int(p.ggn_gram._places[0]) * 3
            total[start : start + 6, start : start + 6] += own @ own.T
    order = net.body.weight.ggn_gram._places
    for p in net.body.parameters():
        own = p.sqrt_ggn_exact[order.argsort()].flatten(2).flatten(0, 1)
        total += own @ own.T
    assert_close(spectrum.gram.reshape(12, 12), total)
    assert spectrum.gram[:2, :, 2:].abs().max() > 0  # by the body
    assert {int(h.weight.ggn_gram._places[0]) for h in (net.left, net.right)} == {0, 2}


@pytest.mark.parametrize("count", [0, 13, 100])
def test_too_many_eigenvectors(count: int) -> None:
    problem = make("mlp", 4)  # cross-entropy: rank two for each sample
    problem.run(GGNGram())
    with pytest.raises(UsageError, match="has rank 8: ask for 1 to 8"):
        problem.parameters[0].ggn_gram.eigenvectors(count)


@pytest.mark.parametrize("net", ["affine", "convolution", "twice"])
def test_inputs_that_were_overwritten(net: str) -> None:
    """Eigenvectors are computed later: not of what the next batch has written there."""
    layer: nn.Module = nn.Linear(4, 4)
    if net == "convolution":
        layer = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten())
    both = [layer, nn.Sigmoid(), *([layer] if net == "twice" else [])]
    model, lossfunc, x = extend(nn.Sequential(*both)), extend(nn.MSELoss()), torch.randn(3, 4)
    loss = lossfunc(model(x), torch.zeros(3, 4))
    with backpack(GGNGram()):
        loss.backward()
    first = next(model.parameters())
    block: Any = first.ggn_gram  # type: ignore[attr-defined]
    with torch.no_grad():
        first.add_(1.0)
    before, copied = block.eigenvectors(2), copy.deepcopy(block)
    x.zero_()
    with pytest.raises(OverwrittenInputError, match="compute them first"):
        block.eigenvectors(2)
    assert torch.equal(copied.eigenvectors(2), before)
