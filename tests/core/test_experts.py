"""Mixtures of experts: tokens are handed out in no order, as many as there are samples or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import KFAC, BatchDiagGGNExact, BatchGrad, DiagGGNExact
from tests import oracle

N, T, D, E, C = 3, 3, 4, 3, 3


class Mixture(nn.Module):
    """Each token goes to one expert."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed: nn.Module
        self.embed, self.gate = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.tables = nn.Parameter(torch.randn(E, D, D))
        self.head = nn.Linear(D, C)

    def expert(self, number: int, tokens: Tensor, which: Tensor) -> Tensor:
        if self.way == "parameters":
            return torch.tanh(F.linear(tokens[which], self.tables[number]))
        picked = tokens.index_select(0, which) if self.way == "select" else tokens[which]
        return torch.tanh(self.experts[number](picked))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        tokens = hidden.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number in range(E):
            which = torch.where(shares.argmax(-1) == number)[0]
            found = self.expert(number, tokens, which) * shares[which, number, None]
            if self.way == "put":
                out = out.index_put((which,), found)
            else:
                out.index_add_(0, which, found)
        result: Tensor = self.head(torch.tanh(hidden + out.view_as(hidden)).mean(1))
        return result


def counts(model: Mixture, x: Tensor) -> list[int]:
    """How many tokens each expert gets."""
    chosen = model.gate(model.embed(x).flatten(0, 1)).argmax(-1)
    return torch.bincount(chosen, minlength=E).tolist()  # type: ignore[no-any-return]


def problem(way: str, is_chance: bool) -> tuple[Mixture, Tensor, Tensor]:
    """One in which an expert gets as many tokens as there are samples, or in which none does."""
    for seed in range(1000):
        torch.manual_seed(seed)
        model, x = Mixture(way), torch.randn(N, T, D)
        if (N in counts(model, x)) == is_chance:
            return model, x, torch.randint(0, C, (N,))
    raise AssertionError("there are such seeds")


@pytest.mark.parametrize("is_chance", [True, False])
@pytest.mark.parametrize("way", ["index", "select", "put", "parameters"])
def test_individual_gradients_and_diagonals(way: str, is_chance: bool) -> None:
    model, x, y = problem(way, is_chance)
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    parameters = [*model.parameters()]
    gradients, diagonals = [], []
    for n in range(N):
        output = model(x[n : n + 1])
        loss = lossfunc(output, y[n : n + 1])
        zeros: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        gradients.append(torch.autograd.grad(loss, parameters, **zeros))
        root = torch.linalg.cholesky(_hessian(output.detach()[0]))
        columns = [torch.autograd.grad(output[0] @ c, parameters, **zeros) for c in root.mT]
        diagonals.append([sum(c[i].square() for c in columns) for i in range(len(parameters))])
    extensions: list[Any] = [BatchGrad(), BatchDiagGGNExact(), DiagGGNExact()]
    if way != "parameters":  # those have no Kronecker factors
        extensions.append(KFAC())
    with backpack(*extensions):
        extend(lossfunc)(extend(model)(x), y).backward()
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:  # no expert of these has a token
            continue
        oracle.assert_close(parameter.grad_batch, torch.stack([g[i] for g in gradients]))
        expected = torch.stack([d[i] for d in diagonals])
        oracle.assert_close(parameter.diag_ggn_exact_batch, expected)
        oracle.assert_close(parameter.diag_ggn_exact, expected.sum(0))


@pytest.mark.parametrize("way", ["index", "select", "put", "parameters"])
def test_a_loss_that_is_a_function(way: str) -> None:
    """Two samples, and experts of two and of four tokens: as many as samples are handed out."""
    for seed in range(1000):
        torch.manual_seed(seed)
        model, x = Mixture(way), torch.randn(2, T, D)
        model.embed = nn.Identity()  # so that the gate receives data, with samples merged
        if sorted(counts(model, x)) == [0, 2, 4]:
            break
    own, parameters = [], [*model.parameters()]
    for n in range(2):
        loss = model(x[n : n + 1]).square().sum()
        own.append(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
    with backpack(BatchGrad()):
        extend(model)(x).square().sum().backward()
    for parameter, *gradients in zip(parameters, *own, strict=True):
        if parameter.grad is not None:
            oracle.assert_close(parameter.grad_batch, torch.stack(gradients))  # type: ignore[attr-defined]


def _hessian(logits: Tensor) -> Tensor:
    p = logits.softmax(0)
    return p.diag() - p[:, None] * p + 1e-12 * torch.eye(C)


MASKS = [
    ([0, 0, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1]),
    ([1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0]),
    ([1, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1]),
    ([0, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 1]),
]


@pytest.mark.parametrize("masks", MASKS)
def test_rows_that_are_added_where_masks_say(masks: tuple[list[int], ...]) -> None:
    """A mask reads rows that the expert before has written, among zeros, which are nobody's yet."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in masks)
            self.head = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            out = torch.zeros_like(tokens)
            for expert, mask in zip(self.experts, masks, strict=True):
                own = torch.tensor(mask).bool()
                out[own] += expert(tokens[own])
            result: Tensor = self.head(out.view_as(x).mean(1))
            return result

    model, x = Masked(), torch.randn(2, T, D)
    terms, parameters = model(x).square().sum(1), [*model.parameters()]
    found = [torch.autograd.grad(term, parameters, retain_graph=True) for term in terms]
    with backpack(BatchGrad()):
        extend(model)(x).square().sum().backward()
    for parameter, expected in zip(parameters, zip(*found, strict=True), strict=True):
        oracle.assert_close(parameter.grad_batch, torch.stack(expected))
