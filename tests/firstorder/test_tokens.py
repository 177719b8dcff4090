"""Gradients token by token: against copies of the parameter, one for each position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import BatchGrad, BatchL2Grad
from backpack_firstorder import Projection, SampleGradients
from backpack_firstorder.projections import ProjectedGrad
from backpack_firstorder.scores import GradInner
from tests import oracle
from tests.cases import Net, Problem

N, T, WORDS, WIDTH = 3, 5, 7, 4
Uses = Callable[[str], list[Tensor]]  # of a parameter's name, the copies of its positions


def close(ours: Any, expected: Tensor) -> None:
    oracle.assert_close(ours, expected, 1e-12)


class Small(nn.Module):
    """A table that is the head, too, a layer that runs twice, a gain, and attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.is_flat = True  # tokens of all samples as rows, for a while
        self.table = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(T, WIDTH)
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.place(torch.arange(T)[None])
        for _ in range(2):
            x = x + torch.tanh(self.layer(self.norm(x)))
        rows = x.flatten(0, 1) if self.is_flat else x
        query, key = self.mix(rows).view(*x.shape[:2], -1).chunk(2, -1)
        x = x + (query @ key.mT).softmax(-1) @ x
        x = x + torch.tanh(self.conv(x.mT)).mT
        found: Tensor = self.head(x)
        return found.mT


def copied(words: Tensor, copies: dict[str, Tensor]) -> Tensor:
    """The net on one sample, where each position has copies ``[T, *θ]`` of every parameter."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = copies.get(f"{name}.bias")
        found = torch.einsum("toi,ti->to", copies[f"{name}.weight"], x)
        return found if bias is None else found + bias

    table = copies["table.weight"]
    x = torch.stack([table[t, words[t]] + copies["place.weight"][t, t] for t in range(T)])
    for _ in range(2):
        normal = F.layer_norm(x, (WIDTH,)) * copies["norm.weight"] + copies["norm.bias"]
        x = x + torch.tanh(linear("layer", normal))
    query, key = linear("mix", x).chunk(2, -1)
    x = x + (query @ key.mT).softmax(-1) @ x
    seen = F.pad(x.mT, (1, 1)).unfold(1, 3, 1)  # [WIDTH, T, 3]
    weight, bias = copies["conv.weight"], copies["conv.bias"]
    one = [F.conv1d(seen[:, t], weight[t], bias[t], groups=2)[:, 0] for t in range(T)]
    x = x + torch.tanh(torch.stack(one))
    return torch.einsum("toi,ti->to", table, x)


def expected(model: nn.Module, words: Tensor, target: Tensor, scale: float) -> dict[str, Tensor]:
    """Gradients with respect to all copies, ``[N, T, *θ]`` for each parameter."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for x, y in zip(words, target, strict=True):
        copies = {
            name: p.detach().expand(T, *p.shape).clone().requires_grad_()
            for name, p in model.named_parameters()
        }
        loss = F.cross_entropy(copied(x, copies), y, reduction="sum") * scale
        found = torch.autograd.grad(loss, [*copies.values()])
        for name, gradient in zip(copies, found, strict=True):
            rows[name].append(gradient)
    return {name: torch.stack(parts) for name, parts in rows.items()}


def small(reduction: str = "sum", batch: int = N) -> Problem:
    words, target = torch.randint(WORDS, (batch, T)), torch.randint(WORDS, (batch, T))
    return Problem(Small(), (words,), nn.CrossEntropyLoss(reduction=reduction), target)


def of(problem: Problem) -> dict[str, Tensor]:
    words, scale = problem.inputs[0], 1.0
    if problem.lossfunc.reduction == "mean":
        scale /= words.numel()
    return expected(problem.model, words, problem.target, scale)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", [1, N])
def test_every_quantity(reduction: str, batch: int) -> None:
    problem = small(reduction, batch)
    wanted = of(problem)
    named = dict(problem.model.named_parameters())
    queries: dict[str, Any] = {name: torch.randn(2, *p.shape) for name, p in named.items()}
    scores, kept = GradInner(queries, per="token"), dict[str, SampleGradients]()
    product = BatchGrad(savefield="p", form="product", consumer=kept.__setitem__, per="token")
    problem.run(
        BatchL2Grad(per="token"), ProjectedGrad(4, per="token"), scores, BatchGrad(per="token"),
        product, BatchGrad(savefield="whole"), BatchL2Grad(savefield="norms"),
    )  # fmt: skip
    total = torch.zeros(batch, T, 2)
    for name, p in named.items():
        each, found = wanted[name], vars(p)
        inner = torch.einsum("nt...,m...->ntm", each, queries[name])
        flat = each.flatten(0, 1)
        close(found["grad_batch"], each)
        close(found["whole"], each.sum(1))
        close(found["norms"], each.sum(1).flatten(1).square().sum(1))
        close(found["batch_l2"], each.flatten(2).square().sum(2))
        close(found["grad_inner"], inner)
        close(kept[name].dense(), flat)
        projected = SampleGradients.from_dense(flat).project(Projection(4), name)
        close(found["projected_grad"], projected.unflatten(0, (batch, T)))
        total += inner
    close(scores.scores, total)


def test_queries_are_products_and_tokens() -> None:
    problem = small()
    problem.run(BatchGrad(form="product", per="token"))
    queries = {name: p.grad_batch for name, p in problem.model.named_parameters()}  # type: ignore[attr-defined]
    scores = GradInner(queries, per="token")
    problem.run(scores)
    flat = torch.cat([g.flatten(2) for g in of(problem).values()], 2).flatten(0, 1)
    close(scores.scores, (flat @ flat.T).unflatten(0, (N, T)))


def test_chosen_samples_and_frozen_parameters() -> None:
    problem = small()
    problem.model.is_flat = False  # type: ignore[assignment]
    problem.model.layer.weight.requires_grad_(False)  # type: ignore[union-attr]
    problem.run(BatchL2Grad([2, 0], per="token"))
    wanted = of(problem)
    for name, p in problem.model.named_parameters():
        if p.requires_grad:
            close(p.batch_l2, wanted[name][[2, 0]].flatten(2).square().sum(2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_time_steps_of_recurrent_layers(kind: Any) -> None:
    """Backwards, too, where steps run from the end: a position is one of the input."""
    net = kind(3, 2, batch_first=True, bidirectional=True)
    x, y = torch.randn(N, T, 3), torch.randn(N, T, 4)
    problem = Problem(
        Net(lambda net, x: net.rnn(x)[0], rnn=net), (x,), nn.MSELoss(reduction="sum"), y
    )
    problem.run(BatchGrad(per="token"))
    cells = {nn.RNN: nn.RNNCell, nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell}
    for suffix, order in (("l0", [*range(T)]), ("l0_reverse", [*range(T)][::-1])):
        steps = [cells[kind](3, 2) for _ in range(T)]  # a copy for each position
        for cell in steps:
            for name, p in cell.named_parameters():
                p.data = getattr(net, f"{name}_{suffix}").data.clone()
        column = slice(2, 4) if "reverse" in suffix else slice(2)
        for n in range(N):
            state: Any = None
            loss = torch.zeros(())
            for t in order:
                state = steps[t](x[n : n + 1, t], state)
                hidden = state[0] if kind is nn.LSTM else state
                loss = loss + (hidden - y[n, t, column]).square().sum()
            for name, _ in steps[0].named_parameters():
                one = [dict(cell.named_parameters())[name] for cell in steps]
                wanted = torch.stack(torch.autograd.grad(loss, one, retain_graph=True))
                close(getattr(net, f"{name}_{suffix}").grad_batch[n], wanted)


def _added(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.layer(x) + net.shift
    return found


def _pooled(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.last(net.layer(x).mean(1))
    return found


def _shorter(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.layer(x).sum(1) + net.layer(x[:, 1:]).sum(1)
    return found


def _picked(net: Any, x: Tensor) -> Tensor:
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    picked = net.layer(x[rows, torch.tensor([0, 1, 4, 2, 0, 3])])
    return torch.zeros(N, WIDTH).index_add(0, rows, picked)


def _run(forward: Callable[..., Tensor], extension: Any, **parts: Any) -> nn.Module:
    net = Net(forward, layer=nn.Linear(WIDTH, WIDTH), **parts)
    net, lossfunc = extend(net), extend(nn.MSELoss())
    x = torch.randn(N, T, WIDTH)
    out = net(x)
    with backpack(extension):
        lossfunc(out, torch.randn_like(out)).backward()
    return net


@pytest.mark.parametrize(
    ("forward", "parts", "why"),
    [
        (_added, {"shift": nn.Parameter(torch.randn(T, WIDTH))}, "'shift'.*not known as a sum"),
        (_shorter, {}, "'weight'.*different numbers of positions"),
        (_picked, {}, "'weight'.*picked from the samples"),
    ],
)
def test_what_has_no_tokens_is_refused(forward: Any, parts: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        _run(forward, BatchL2Grad(per="token"), **parts)


def test_parameters_with_other_positions_are_not_added_up() -> None:
    last = nn.Linear(WIDTH, 2)
    queries: dict[str, Any] = {
        "layer.weight": torch.ones(1, WIDTH, WIDTH), "layer.bias": None,
        "last.weight": torch.ones(1, 2, WIDTH), "last.bias": None,
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"has 1 positions and .layer.weight. has 5"):
        _run(_pooled, GradInner(queries, per="token"), last=last)
    scores = GradInner({**queries, "last.weight": None}, per="token")
    _run(_pooled, scores, last=last)
    assert scores.scores is not None
    assert scores.scores.shape == (N, T, 1)


def test_per_is_one_of_two_words() -> None:
    with pytest.raises(UsageError, match="per must be one of"):
        BatchL2Grad(per="word")
