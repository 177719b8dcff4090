"""What a model computes beside the batch: on a grid as long as it by chance, in an inner step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR, BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, Problem

N, D, P = 4, 3, 5

JOIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda b, t: b @ t.T,
    "einsum": lambda b, t: torch.einsum("np,gp->ng", b, t),
    "broadcast": lambda b, t: (b.unsqueeze(1) * t).sum(-1),
    "broadcast_view": lambda b, t: (b[:, None] * t[None]).sum(-1),
}


def compare(problem: Problem) -> None:
    """Individual gradients and the diagonal of the GGN, with the oracle."""
    problem.run(BatchGrad(), DiagGGNExact())
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.compare("diag_ggn_exact", diagonals)


def deep_operator_net(join: str, points: int, width: int = P) -> Problem:
    """A net of the batch times a net of the coordinates."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return JOIN[join](net.branch(x), net.trunk(net.grid.unsqueeze(1)))

    parts = [nn.Sequential(nn.Linear(n, 6), nn.Tanh(), nn.Linear(6, width)) for n in (D, 1)]
    model = Net(forward, branch=parts[0], trunk=parts[1])
    model.register_buffer("grid", torch.linspace(0, 1, points))
    return Problem(model, (torch.randn(N, D),), nn.MSELoss(), torch.randn(N, points))


@pytest.mark.parametrize("points", [N - 1, N, 2 * N])
@pytest.mark.parametrize("join", JOIN)
def test_a_net_on_a_grid(join: str, points: int) -> None:
    compare(deep_operator_net(join, points))


def test_a_net_on_a_grid_with_as_many_features_as_samples() -> None:
    compare(deep_operator_net("product", N, N))


@pytest.mark.parametrize("width", [N - 1, N])
@pytest.mark.parametrize("codes", [1, N - 1, N + 1])
def test_a_net_makes_weights_of_codes(codes: int, width: int) -> None:
    """A weight that is as long as the batch by chance has no samples, as its code has none."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for weight in net.weights(torch.linspace(-1, 1, 2 * codes).view(codes, 2)):
            x = F.linear(x, weight.view(width, width)).tanh()
        return x

    model = Net(forward, weights=nn.Linear(2, width**2))
    compare(Problem(model, (torch.randn(N, width),), nn.MSELoss(), torch.randn(N, width)))


@pytest.mark.parametrize("width", [N - 1, N])
def test_parts_of_weights_are_not_picked_rows(width: int) -> None:
    """One argument is a single row, as is the code of the weights: the samples are the others."""

    def forward(net: Any, x: Tensor, scale: Tensor) -> Tensor:
        weights = net.weights(torch.tensor([[0.3, -0.4]]))[0]
        found = F.linear(x * scale, weights[: width**2].view(width, width), weights[width**2 :])
        return net.last(found.tanh())  # type: ignore[no-any-return]

    parts = {"weights": nn.Linear(2, width**2 + width), "last": nn.Linear(width, width)}
    model, loss = extend(Net(forward, **parts)), extend(nn.MSELoss(reduction="sum"))
    x, scale, y = torch.randn(N, width), torch.randn(1, width), torch.randn(N, width)
    with backpack(BatchGrad()):
        loss(model(x, scale), y).backward()
    own = [*model.parameters()]
    losses = [loss(model(x[n : n + 1], scale), y[n : n + 1]) for n in range(N)]
    wanted = zip(*(torch.autograd.grad(each, own) for each in losses), strict=True)
    for parameter, each in zip(own, wanted, strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(each))  # type: ignore[attr-defined]


@pytest.mark.parametrize("features", [N, N + 1])
def test_a_net_on_a_grid_gives_the_bias_of_a_function(features: int) -> None:
    """A bias is repeated for every sample, also where it is as long as the batch."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.a(x), net.weight, net.trunk(net.grid).squeeze(-1))

    weight = nn.Parameter(torch.rand(features, 2))
    model = Net(forward, a=nn.Linear(D, 2), trunk=nn.Linear(1, 1), weight=weight)
    model.register_buffer("grid", torch.linspace(0, 1, features).unsqueeze(1))
    compare(Problem(model, (torch.randn(N, D),), nn.MSELoss(), torch.randn(N, features)))


BIASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda scores, bias: scores + bias.permute(2, 0, 1),
    "added, with an axis for samples": lambda s, bias: s + bias.permute(2, 0, 1).unsqueeze(0),
    "expanded": lambda scores, bias: scores + bias.sin().permute(2, 0, 1).expand_as(scores),
}


@pytest.mark.parametrize("steps", [N, N - 1])
@pytest.mark.parametrize("kind", ["table", "net"])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_of_attention_by_relative_positions(name: str, kind: str, steps: int) -> None:
    """However wide: it is added to every sample, so it has none of its own."""
    places = torch.arange(steps)
    apart = places[:, None] - places + steps - 1
    bias: nn.Module = nn.Embedding(2 * steps - 1, 6)
    if kind == "net":
        apart = torch.stack([apart, apart.T], 2).double()
        last = nn.Linear(9, 6, bias=False)  # a softmax ignores one
        bias = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), last)

    def forward(net: Any, x: Tensor) -> Tensor:
        heads = net.a(x).transpose(1, 2).unsqueeze(-1)  # [N, H, T, 1]
        scores = BIASES[name](heads * heads.mT, net.bias(apart))
        return net.b((scores.softmax(-1) @ heads).squeeze(-1).mT.mean(1))  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(D, 6), b=nn.Linear(6, D), bias=bias)
    compare(Problem(model, (torch.randn(N, steps, D),), nn.MSELoss(), torch.randn(N, D)))


def test_preprocessed_data_are_no_table() -> None:
    """What is added to the samples entry by entry has its own row of each, as if it were given."""
    x, more, y = torch.randn(N, D), torch.randn(N, 1), torch.randn(N, D)
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(1, D)}
    hidden = Problem(Net(lambda net, x: net.a(x) + net.b(more), **parts), (x,), nn.MSELoss(), y)
    given = Problem(Net(lambda net, x, z: net.a(x) + net.b(z), **parts), (x, more), nn.MSELoss(), y)
    found = []
    for problem in (hidden, given):
        problem.run(KFLR())
        found.append(problem.fields("kflr"))
    for ours, expected in zip(*found, strict=True):
        for factor, other in zip(ours, expected, strict=True):
            oracle.assert_close(factor, other)


@pytest.mark.parametrize("steps", [N, 3])
def test_attention_behind_frozen_embeddings(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are turned beside the samples, which stay in front: nothing has to be kept apart."""
    words, places = nn.Embedding(9, 4), nn.Embedding(steps, 4)

    def forward(net: Any, ids: Tensor) -> Tensor:
        x = net.words(ids) + net.places(torch.arange(steps))
        q, k, v = (p.unflatten(2, (2, 2)).transpose(1, 2) for p in net.attend(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + net.out(heads.transpose(1, 2).flatten(2))
        return net.head(x).mT  # type: ignore[no-any-return]

    parts = {"attend": nn.Linear(4, 12), "out": nn.Linear(4, 4), "head": nn.Linear(4, 99)}
    model = Net(forward, words=words.requires_grad_(False), places=places, **parts)
    places.requires_grad_(False)

    def apart(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("backpack_operations.alignment.cross_apart", apart)
    ids, target = torch.randint(9, (N, steps)), torch.randint(99, (N, steps))
    problem = Problem(model, (ids,), nn.CrossEntropyLoss(), target)
    problem.run(BatchGrad())
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))


def test_an_inner_step() -> None:
    """Weights after a step on other data, of a model that is used by functions alone."""
    support, labels = torch.randn(5, D), torch.randn(5, 2)

    def run(x: Tensor, weight: Any, bias: Any, head: Any) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, weight, bias)), head)

    def forward(net: Any, x: Tensor) -> Tensor:
        own = [net.a.weight, net.a.bias, net.b.weight]
        inner = F.mse_loss(run(support, *own), labels)
        steps = torch.autograd.grad(inner, own, create_graph=True)
        return run(x, *(p - 0.1 * g for p, g in zip(own, steps, strict=True)))

    model = Net(forward, a=nn.Linear(D, 5), b=nn.Linear(5, 2, bias=False))
    compare(Problem(model, (torch.randn(6, D),), nn.MSELoss(), torch.randn(6, 2)))


def test_a_bias_that_a_module_computed() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(x, net.a.weight, net.b(net.c))

    c = nn.Parameter(torch.randn(2))
    model = Net(forward, a=nn.Linear(D, N, bias=False), b=nn.Linear(2, N), c=c)
    compare(Problem(model, (torch.randn(N, D),), nn.MSELoss(), torch.randn(N, N)))


@pytest.mark.parametrize("samples", [1, N])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.PReLU, nn.Tanh])
def test_a_module_receives_a_single_number(kind: type[nn.Module], samples: int) -> None:
    """As the number of a step, or a temperature."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scale = net.part(torch.tensor(2) if kind is nn.Embedding else -net.number.sum())
        return torch.tanh(net.first(x)) * scale * net.number.sum()

    part = nn.Embedding(4, D) if kind is nn.Embedding else kind()
    number = nn.Parameter(torch.tensor([0.3, 0.4]))
    model = Net(forward, first=nn.Linear(D, D), part=part, number=number)
    compare(Problem(model, (torch.randn(samples, D),), nn.MSELoss(), torch.randn(samples, D)))


@pytest.mark.parametrize("samples", [1, 2, N, 6])
def test_a_vector_for_all_samples_beside_them(samples: int) -> None:
    """What a layer makes of it is as long as the batch by chance."""

    def forward(net: Any, x: Tensor, code: Tensor) -> Tensor:
        scale: Tensor = net.scale(code)
        return net.first(x) * scale

    torch.manual_seed(0)
    model = extend(Net(forward, first=nn.Linear(D, 2), scale=nn.Linear(5, 2)))
    lossfunc, code = extend(nn.MSELoss(reduction="sum")), torch.randn(5)
    x, y = torch.randn(samples, D), torch.randn(samples, 2)
    rows = [
        torch.autograd.grad((model(x[n : n + 1], code) - y[n]).square().sum(), model.scale.weight)
        for n in range(samples)
    ]
    with backpack(BatchGrad()):
        lossfunc(model(x, code), y).backward()
    found: Tensor = model.scale.weight.grad_batch  # type: ignore[assignment, union-attr]
    torch.testing.assert_close(found, torch.stack([row for (row,) in rows]))


class Shift(nn.Module):
    """A container with a parameter of its own, which the automatic rule reads off."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.offset = nn.Tanh(), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.offset)  # type: ignore[no-any-return]


@pytest.mark.parametrize("activation", [torch.relu, torch.relu_])
@pytest.mark.parametrize("use", ["function", "table", "both"])
def test_a_parameter_of_a_container_is_counted_once(
    use: str, activation: Callable[[Tensor], Tensor]
) -> None:
    """Operations inside send to it as to any parameter that is looked at by itself."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.shift(net.first(x))
        hidden = hidden if use == "table" else hidden * net.shift.offset
        hidden = hidden if use == "function" else hidden + net.shift(net.grid)
        return activation(net.last(hidden))

    model = Net(forward, first=nn.Linear(D, D), shift=Shift(), last=nn.Linear(D, D))
    model.register_buffer("grid", torch.randn(P, D))
    data = (torch.randn(N, P, D),)
    compare(Problem(model, data, nn.MSELoss(reduction="sum"), torch.randn(N, P, D)))
