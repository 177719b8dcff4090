"""Individual gradients as products: every method against formed ones by autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as pairs_of
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import BatchGrad
from backpack_firstorder import Projection, SampleGradients, divisors_of, projections
from backpack_firstorder.pairs import pairs
from backpack_firstorder.scores import GradInner
from backpack_firstorder.sketches import even_factors
from backpack_products import AffineProduct, DenseProduct, LookupProduct, SampleProduct
from backpack_products.product import SumProduct
from backpack_products.tuning import memory_budget, set_memory_budget
from tests import oracle
from tests.cases import Net, Problem
from tests.firstorder.problems import NETS, gradients, make

RTOL = 1e-12
_BatchGrad: Any = BatchGrad
ProjectedGrad: Any = projections.ProjectedGrad
KINDS: Any = ["kronecker", "gaussian", "rademacher", "sparse"]


def close(ours: Any, expected: Tensor) -> None:
    oracle.assert_close(ours, expected, RTOL)


# Nets ---------------------------------------------------------------------------------------------


def _tied_head(reduction: str) -> Problem:
    """A table that is the head's weight, and is read by a function, too."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(net.mix(net.table(x).mT).mT)
        found: Tensor = F.linear(hidden, net.table.weight).mT
        return found + net.table.weight.sum(1)[:, None]

    net = Net(forward, table=nn.Embedding(11, 6), mix=nn.Linear(5, 5))
    x, y = torch.randint(0, 7, (4, 5)), torch.randint(0, 11, (4, 5))
    return Problem(net, (x,), nn.CrossEntropyLoss(reduction=reduction), y)


def _both_ways(reduction: str) -> Problem:
    """A weight as it is, and transposed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(net.first(x)) @ net.first.weight + net.shift
        return found.sum(1)

    net = Net(forward, first=nn.Linear(6, 5), shift=nn.Parameter(torch.randn(6)))
    x, y = torch.randn(4, 3, 6), torch.randint(0, 6, (4,))
    return Problem(net, (x,), nn.CrossEntropyLoss(reduction=reduction), y)


def _parametrized(reduction: str) -> Problem:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    nn.utils.parametrizations.weight_norm(net[0])
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
    return Problem(net, (x,), nn.CrossEntropyLoss(reduction=reduction), y)


OTHERS: dict[str, Callable[[str], Problem]] = {
    "tied_head": _tied_head,
    "both_ways": _both_ways,
    "parametrized": _parametrized,
}
every_net = pytest.mark.parametrize("net", [*NETS, *OTHERS])


def problem_of(net: str, reduction: str = "mean", batch: int = 4) -> Problem:
    return OTHERS[net](reduction) if net in OTHERS else make(net, batch, reduction)


def kept(problem: Problem, **options: Any) -> list[tuple[SampleGradients, Tensor]]:
    """What is left on each parameter, and what it stands for."""
    expected = gradients(problem)
    problem.run(BatchGrad(form="product", **options))
    return [*zip(problem.fields("grad_batch"), expected, strict=True)]


@every_net
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_method(net: str, reduction: str) -> None:
    for found, expected in kept(problem_of(net, reduction)):
        flat, weights = expected.flatten(1), torch.randn(2, len(expected))
        assert found.shape == expected.shape
        assert len(found) == len(expected)
        close(found.dense(), expected)
        close(found.norm(), flat.norm(dim=1))
        close(found.inner(found), flat @ flat.T)
        close(found.inner(expected), flat @ flat.T)
        close(found.inner(expected[0]), flat @ flat[:1].T)
        for form in ("positions", "formed"):
            close(found.inner(found, form), flat @ flat.T)
            close(found.inner(expected, form), flat @ flat.T)
        close(found.sum(), expected.sum(0))
        close(found.weighted_sum(weights), torch.einsum("kn,n...->k...", weights, expected))
        close(found.weighted_sum(weights[0]), torch.einsum("n,n...->...", weights[0], expected))
        scaled = found.times(weights[0]).dense()
        close(scaled, torch.einsum("n,n...->n...", weights[0], expected))
        close(SampleGradients.from_state_dict(found.state_dict()).dense(), expected)
        close(found.low_rank(99).dense(), expected)
        assert found.nbytes <= expected.nbytes


@every_net
def test_samples_are_chosen_and_joined(net: str) -> None:
    for found, expected in kept(problem_of(net)):
        for index in ([2, 0, 2], slice(1, None), torch.tensor([3, 1]), [True, False, True, True]):
            chosen = torch.tensor(index) if isinstance(index, list) else index
            close(found[chosen].dense(), expected[chosen])
        close(found[-1].dense(), expected[-1:])
        other = SampleGradients.from_dense(expected[:1])
        joined = SampleGradients.cat([found[1:], other, found[:0], found[[3, 2]]])
        close(joined.dense(), torch.cat([expected[1:], expected[:1], expected[[3, 2]]]))
        close(joined.inner(found), joined.dense().flatten(1) @ expected.flatten(1).T)


@every_net
def test_a_consumer_is_given_each_parameter_by_name(net: str) -> None:
    problem = problem_of(net)
    seen: dict[str, Any] = {}
    expected = gradients(problem)
    problem.run(BatchGrad(form="product", consumer=seen.__setitem__))
    names = [name for name, p in problem.model.named_parameters() if p.requires_grad]
    assert {*seen} == {*names}
    for name, one in zip(names, expected, strict=True):
        close(seen[name].dense(), one)
    assert not any(hasattr(p, "grad_batch") for p in problem.parameters)


@every_net
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scores_of_one_pass(net: str, reduction: str) -> None:
    problem = problem_of(net, reduction)
    expected = gradients(problem)
    problem.run(BatchGrad(form="product"))
    named: list[Any] = [i for i in problem.model.named_parameters() if i[1].requires_grad]
    queries: dict[str, Any] = {name: p.grad_batch[[2, 0]] for name, p in named}
    inner = GradInner(queries)
    problem.run(inner)
    each = [g.flatten(1) @ g[[2, 0]].flatten(1).T for g in expected]
    problem.compare("grad_inner", each)
    assert inner.scores is not None
    close(inner.scores, torch.stack(each).sum(0))
    blocks = {n: (len(p.shape) - 1, p.shape[-1]) for n, p in named if p.dim()}
    blocks |= {n: (0, len(p)) for n, p in named[::2] if p.dim()}  # rows or columns, one by one
    inner = GradInner(queries, blocks=blocks, form="formed")
    problem.run(inner)
    close(inner.scores, torch.stack(each).sum(0))
    for (name, p), g in zip(named, expected, strict=True):
        if name in blocks:
            rows = g.movedim(blocks[name][0] + 1, 1).reshape(len(g), blocks[name][1], -1)
            close(p.grad_inner, torch.einsum("nbi,mbi->nmb", rows, rows[[2, 0]]))
    dense = GradInner({name: g[1:2] for (name, _), g in zip(named, expected, strict=True)})
    problem.run(dense, BatchGrad())
    close(
        dense.scores, torch.stack([g.flatten(1) @ g[1].flatten() for g in expected]).sum(0)[:, None]
    )


@every_net
@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_one_linear_map(net: str, kind: Any) -> None:
    """Whatever the form, and with whatever memory: that of formed gradients."""
    problem, projection = problem_of(net), Projection(6, kind, seed=3)
    expected, before = gradients(problem), memory_budget()
    named = [(n, p) for n, p in problem.model.named_parameters() if p.requires_grad]
    for budget in (before, 64):
        set_memory_budget(budget)
        try:
            problem.run(ProjectedGrad(6, kind, 3), BatchGrad(form="product"))
        finally:
            set_memory_budget(before)
        for (name, p), one in zip(named, expected, strict=True):
            matrix = map_of(projection, name, p.shape)
            close(p.projected_grad, one.flatten(1) @ matrix)  # type: ignore[attr-defined]
            close(p.grad_batch.project(projection, name), one.flatten(1) @ matrix)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_that_rows_are_multiplied_with(kind: Any) -> None:
    """Its entries are inputs, and not outputs, of the product."""
    net, vector = nn.Linear(4, 6), nn.Parameter(torch.randn(6))
    model = extend(
        Net(
            lambda net, x: torch.einsum("ntd,d->nt", net.first(x).tanh(), net.v),
            first=net,
            v=vector,
        )
    )
    x, queries = torch.randn(5, 3, 4), {"v": torch.randn(2, 6)}
    queries |= {name: torch.randn(2, *p.shape) for name, p in net.named_parameters("first")}
    inner = GradInner(queries, blocks={"v": (0, 3)})
    halves = {
        name: (torch.full(q.shape[1:2], 2.0), torch.ones(q[0, 0].numel()))
        for name, q in queries.items()
    }
    halved = ProjectedGrad(9, kind, divisors=halves, savefield="halved")
    for extension in (ProjectedGrad(9, kind), inner, halved):
        with backpack(extension, check="never"):
            model(x).square().sum().backward()
    hidden = net(x).tanh().detach()
    expected = 2 * ((hidden @ vector.detach())[..., None] * hidden).sum(1)
    matrix = map_of(Projection(9, kind), "v", vector.shape)
    close(vector.projected_grad, expected @ matrix)  # type: ignore[attr-defined]
    close(vector.halved, expected @ matrix / 2)  # type: ignore[attr-defined]
    each = torch.einsum("nbi,mbi->nmb", expected.view(5, 3, 2), queries["v"].view(2, 3, 2))
    close(vector.grad_inner, each)  # type: ignore[attr-defined]


def map_of(projection: Projection, name: str, shape: torch.Size) -> Tensor:
    """The matrix ``[θ, dim]`` of a projection."""
    units = torch.eye(shape.numel()).reshape(-1, *shape)
    return SampleGradients.from_dense(units).project(projection, name)


def test_vectors_that_fit_keep_their_inner_products() -> None:
    first, other = torch.randn(3, 7), torch.randn(2, 7)
    projection = Projection(9)

    def projected(vectors: Tensor, name: str) -> Tensor:
        return SampleGradients.from_dense(vectors).project(projection, name)

    close(projected(first, "b") @ projected(other, "b").T, first @ other.T)
    # With those of another parameter they have none in expectation: signs are independent.
    ones = torch.ones(1, 7)
    met = [projected(ones, "b") @ projected(ones, f"c{n}").T for n in range(200)]
    assert torch.cat(met).mean().abs() < 4 * (7 / 200) ** 0.5


# Pairs of forms -----------------------------------------------------------------------------------

ROWS, COLUMNS = 8, 6


def affine(samples: int, positions: int, groups: int = 1) -> SampleProduct:
    out = torch.randn(1, samples, positions, groups, ROWS // groups)
    shape = torch.Size((ROWS, COLUMNS))
    return AffineProduct(out, torch.randn(samples, positions, groups, COLUMNS), shape)


def lookup(samples: int, positions: int) -> SampleProduct:
    row = torch.randint(0, ROWS - 2, (samples, positions))
    out = torch.randn(1, samples, positions, COLUMNS)
    return LookupProduct(out, row, torch.Size((ROWS, COLUMNS)))


def formed(samples: int) -> SampleProduct:
    return DenseProduct(torch.randn(1, samples, ROWS, COLUMNS))


def in_parts(samples: int) -> SampleProduct:
    values, shape = torch.randn(1, samples, ROWS, COLUMNS), torch.Size((ROWS, COLUMNS))
    return DenseProduct(form=lambda v, n: values[v, n], mat=values[:, :, 0, 0], shape=shape)


FORMS: dict[str, Callable[[int], SampleProduct]] = {
    "one position": lambda n: affine(n, 1),
    "few positions": lambda n: affine(n, 2),
    "many positions": lambda n: affine(n, 40),
    "groups": lambda n: affine(n, 3, 2),
    "other groups": lambda n: affine(n, 20, 4),
    "table": lambda n: lookup(n, 3),
    "table read often": lambda n: lookup(n, 20),
    "formed": formed,
    "in parts": in_parts,
    "sum": lambda n: SumProduct([affine(n, 2), lookup(n, 3), formed(n)]),
}


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_every_pair_of_forms(first: str, second: str) -> None:
    before = memory_budget()
    for budget, (samples, others) in pairs_of(
        (None, 300), ((5, 4), (1, 3), (3, 1), (0, 2), (2, 0))
    ):
        one, other = FORMS[first](samples), FORMS[second](others)
        left = one.part(slice(0, 1), slice(0, samples))[0].flatten(1)
        right = other.part(slice(0, 1), slice(0, others))[0].flatten(1)
        set_memory_budget(budget or before)
        try:
            found = pairs(one, other)
        finally:
            set_memory_budget(before)
        close(found, left @ right.T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_low_rank_is_the_nearest(form: str, rank: int) -> None:
    whole = SampleGradients.of(FORMS[form](4))
    left, values, right = torch.linalg.svd(whole.dense(), full_matrices=False)
    nearest = (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]
    found = whole.low_rank(rank)
    close(found.dense(), nearest)
    close(found.inner(whole), nearest.flatten(1) @ whole.dense().flatten(1).T)


@pytest.mark.parametrize("form", FORMS)
def test_division(form: str) -> None:
    product = FORMS[form](4)
    whole = SampleGradients.of(product)
    entries, rows, columns = (0.5 + torch.rand(*n) for n in ((ROWS, COLUMNS), (ROWS,), (COLUMNS,)))
    close(whole.divide(entries).dense(), whole.dense() / entries)
    close(whole.divide((rows, columns)).dense(), whole.dense() / torch.outer(rows, columns))


METHODS: dict[str, Callable[[SampleGradients], Tensor]] = {
    "dense": lambda g: g.dense(),
    "norm": lambda g: g.norm(),
    "inner": lambda g: g.inner(g),
    "inner with directions": lambda g: g.inner(torch.ones(2, *g.shape[1:])),
    "weighted_sum": lambda g: g.weighted_sum(torch.ones(len(g))),
    "sum": lambda g: g.sum(),
    "project": lambda g: g.project(Projection(4), "weight"),
    "divide": lambda g: g.divide(torch.full((ROWS, COLUMNS), 3.0)).dense(),
    "low_rank": lambda g: g.low_rank(1).dense(),
    "prepared": lambda g: g.prepared(2**30).dense(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_autocast_rounds_nothing(form: str, method: str) -> None:
    """Around a forward pass of queries, it is often still on where these meet what was kept."""
    whole = SampleGradients.of(FORMS[form](4)).to(dtype=torch.float32)
    wanted = METHODS[method](whole)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = METHODS[method](whole)
    assert found.dtype is wanted.dtype
    assert torch.equal(found, wanted)


def test_factors_stay_factors() -> None:
    """What is kept takes less memory than gradients, and division by an outer product leaves it."""
    whole = SampleGradients.from_factors(torch.randn(3, 2, 40), torch.randn(3, 2, 50))
    assert whole.nbytes == 8 * 3 * 2 * 90
    assert whole.divide((torch.ones(40), torch.ones(50))).nbytes == whole.nbytes
    assert whole.low_rank(1).nbytes == whole.nbytes // 2
    assert whole.to(dtype=torch.bfloat16).nbytes == whole.nbytes // 4
    assert whole.to(dtype=torch.bfloat16).inner(whole).dtype == torch.float64


# Projections --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_unbiased(kind: Any) -> None:
    """The mean of ``P Pᵀ`` over seeds is the identity."""
    shape, seeds = torch.Size((3, 4)), 400
    total, squares = torch.zeros(12, 12), torch.zeros(12, 12)
    for seed in range(seeds):
        matrix = map_of(Projection(4, kind, seed), "weight", shape)
        found = matrix @ matrix.T
        total, squares = total + found, squares + found.square()
    mean = total / seeds
    error = ((squares / seeds - mean.square()) / seeds).sqrt()
    assert bool(((mean - torch.eye(12)).abs() <= 4.5 * error + 1e-12).all())


def test_projections_are_known_numbers() -> None:
    """The same on every machine, and in every later version."""
    known = {
        kind: map_of(Projection(4, kind, 7), "layer.weight", torch.Size((3, 2)))[[0, 5]].flatten()
        for kind in KINDS
    }
    for kind, expected in KNOWN.items():
        oracle.assert_close(known[kind], torch.tensor(expected), 1e-14)


KNOWN: dict[str, list[float]] = {
    "kronecker": [-0.5, -0.5, -0.5, -0.5, 0.5, -0.5, -0.5, 0.5],
    "gaussian": [
        -0.3305898633416143, 0.8366738654777064, -0.1238952105615752, 0.015540806964898533,
        0.09004577438429444, -0.749937711968089, 0.4111248285819431, -0.047325272771072714,
    ],
    "rademacher": [-0.5, -0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5],
    "sparse": [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0],
}  # fmt: skip


def test_projections_differ_by_parameter_role_and_seed() -> None:
    shape = torch.Size((5, 5))
    found = [
        map_of(Projection(4, "kronecker", seed), name, shape)
        for name, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert all(not torch.equal(*two) for two in pairs_of(found, found) if two[0] is not two[1])


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _named(model: nn.Module) -> list[str]:
    found = list[str]()
    with backpack(BatchGrad(form="product", consumer=lambda name, _: found.append(name))):
        extend(nn.CrossEntropyLoss())(
            model(torch.randn(4, 3)), torch.tensor([0, 1, 2, 0])
        ).backward()
    return sorted(found)


def test_a_parameter_has_the_name_that_it_has_now() -> None:
    """Names tell projections, queries and divisors; they do not depend on earlier passes."""
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)))
    assert _named(model) == sorted(name for name, _ in model.named_parameters())
    model[0].weight = model[1].weight  # tied: its first name counts from now on
    assert _named(model) == sorted(name for name, _ in model.named_parameters())
    nn.utils.parametrize.register_parametrization(model[2], "weight", Halved())
    assert _named(extend(model)) == sorted(name for name, _ in model.named_parameters())


def test_a_dimension_is_split_evenly() -> None:
    assert even_factors(64, (100, 100)) == (8, 8)
    assert even_factors(64, (4, 100)) == (4, 16)
    assert even_factors(12, (100, 1)) == (12, 1)
    assert even_factors(7, (100, 100)) in {(1, 7), (7, 1)}


# Optimisers ---------------------------------------------------------------------------------------


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1, d=1e9, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9)),
    "amsgrad": lambda p: torch.optim.AdamW(
        p, lr=0.1, betas=(0.0, 0.9), amsgrad=True, weight_decay=0.0
    ),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, betas=(0.0, 0.9)),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, betas=(0.0, 0.9)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "centered rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("steps", [3, 12])  # RAdam divides from the sixth step on
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_divided_gradient(name: str, steps: int) -> None:
    problem = problem_of("mlp")
    optimizer = OPTIMIZERS[name](problem.parameters)
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss().backward()
        before = [p.detach().clone() for p in problem.parameters]
        optimizer.step()
    divisors = divisors_of(optimizer, problem.model)
    for (parameter, p), old in zip(problem.model.named_parameters(), before, strict=True):
        assert p.grad is not None
        divisor = divisors[parameter]
        assert isinstance(divisor, Tensor)
        oracle.assert_close(old - p.detach(), 0.1 * p.grad / divisor, 1e-9)


def test_adafactor_divides_in_factors() -> None:
    problem = problem_of("mlp")
    optimizer = _adafactor(problem.parameters)
    problem.loss().backward()
    optimizer.step()
    divisors = divisors_of(optimizer, problem.model)
    state = optimizer.state[problem.parameters[0]]
    row, column = state["row_var"], state["col_var"]
    expected = (row @ column / row.mean()).sqrt()
    close(torch.outer(*divisors["0.weight"]), expected)
    whole = {name: p.grad_batch for name, p in _left(problem).items()}
    problem.run(BatchGrad(form="product", divisors=divisors))
    for name, p in _left(problem).items():
        close(p.grad_batch.dense(), whole[name].divide(divisors[name]).dense())
    inner = GradInner({name: whole[name].dense() for name in whole}, divisors=divisors)
    problem.run(inner, ProjectedGrad(4, divisors=divisors))
    for name, p in _left(problem).items():
        divided = whole[name].divide(divisors[name])
        close(p.grad_inner, divided.inner(whole[name]))
        close(p.projected_grad, divided.project(Projection(4), name))


def _left(problem: Problem) -> dict[str, Any]:
    if not hasattr(problem.parameters[0], "grad_batch"):
        problem.run(BatchGrad(form="product"))
    return dict(problem.model.named_parameters())


# Life of a result ---------------------------------------------------------------------------------


def test_what_is_kept_has_its_own_memory() -> None:
    """Data, activations and parameters may change; the graph and the model may go."""
    problem = problem_of("tokens")
    expected = gradients(problem)
    problem.run(BatchGrad(form="product"))
    found = problem.fields("grad_batch")
    with torch.no_grad():
        problem.inputs[0].zero_()
        for parameter in problem.parameters:
            parameter.zero_()
    problem.run(BatchGrad(form="product"))
    for ours, one in zip(found, expected, strict=True):
        close(ours.dense(), one)


def test_half_precision_is_added_up_in_single() -> None:
    out, inp = torch.randn(2, 300, 4).bfloat16(), torch.randn(2, 300, 5).bfloat16()
    whole = SampleGradients.from_factors(out, inp)
    exact = SampleGradients.from_factors(out.double(), inp.double())
    for ours, expected in (
        (whole.norm(), exact.norm()),
        (whole.inner(whole), exact.inner(exact)),
        (whole.project(Projection(4), "w"), exact.project(Projection(4), "w")),
    ):
        assert ours.dtype == torch.float32
        oracle.assert_close(ours.double(), expected, 1e-5)


def test_half_precision_is_divided_in_single() -> None:
    """Divisors of Adam are as small as 1e-8, which is zero in half precision."""
    gradients, rows, columns = (torch.full(n, 1e-4) for n in ((2, 3, 4), (3,), (4,)))
    whole = SampleGradients.from_dense(gradients.half())
    for divisor in (torch.outer(rows, columns), (rows, columns)):
        found = whole.divide(divisor).dense()
        assert found.dtype == torch.float32
        oracle.assert_close(found.double(), whole.dense().double() / 1e-8, 1e-5)


def test_subsampling() -> None:
    problem = problem_of("tied_head")
    for found, expected in kept(problem, subsampling=[3, 1, 1]):
        close(found.dense(), expected[[3, 1, 1]])


def test_an_empty_batch() -> None:
    model: Any = extend(nn.Linear(3, 2))
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    loss = lossfunc(model(torch.zeros(0, 3)), torch.zeros(0, 2))
    with backpack(BatchGrad(form="product"), ProjectedGrad(4)):
        loss.backward()
    found: Any = model.weight.grad_batch
    assert found.shape == (0, 2, 3)
    assert found.inner(torch.ones(2, 3)).shape == (0, 1)
    assert model.weight.projected_grad.shape == (0, 4)


# Refusals -----------------------------------------------------------------------------------------


def test_scores_refuse_queries_that_do_not_fit() -> None:
    problem = problem_of("mlp")
    whole: dict[str, Any] = {
        n: torch.ones(1, *p.shape) for n, p in problem.model.named_parameters()
    }
    some = {n: q for n, q in whole.items() if n != "0.bias"}
    with pytest.raises(UsageError, match=r"parameter '0\.bias' has no query"):
        problem.run(GradInner(some))
    with pytest.raises(UsageError, match=r"met no trained parameter '9\.weight'.* give None"):
        problem.run(GradInner({**whole, "9.weight": torch.ones(1, 2)}))
    with pytest.raises(ShapeError, match=r"\[M, 5, 4\]. Got \[1, 4, 5\]"):
        problem.run(GradInner({**whole, "0.weight": torch.ones(1, 4, 5)}))
    with pytest.raises(UsageError, match="the same number of queries"):
        GradInner({**whole, "0.weight": torch.ones(2, 5, 4)})
    with pytest.raises(UsageError, match="takes queries by parameter name"):
        GradInner([])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"axis 1 does not split into 3 blocks"):
        problem.run(GradInner(whole, blocks={"0.weight": (1, 3)}))
    with pytest.raises(UsageError, match=r"trained parameter '0\.wight', but blocks"):
        problem.run(GradInner(whole, blocks={"0.wight": (0, 1)}))
    with pytest.raises(UsageError, match=r"blocks must be \{name: \(axis, count\)\}"):
        GradInner(whole, blocks={"0.weight": 5})  # type: ignore[dict-item]
    left_out = GradInner({**whole, "0.bias": None})
    problem.run(left_out)
    assert not hasattr(problem.model.get_parameter("0.bias"), "grad_inner")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: _BatchGrad(form="factors"), "form must be one of"),
        (lambda g: _BatchGrad(consumer=print), "write BatchGrad"),
        (lambda g: _BatchGrad(divisors={}), "divisors divide products"),
        (lambda g: ProjectedGrad(0), "dim must be a positive number. Got 0"),
        (lambda g: ProjectedGrad(2.5), "dim must be a whole number. Got 2.5"),
        (lambda g: ProjectedGrad(4, "svd"), "kind must be one of"),
        (lambda g: ProjectedGrad(4, divisors=[1]), "divisors must map names of parameters"),
        (lambda g: g.low_rank(0), "rank must be a positive number"),
        (lambda g: g.inner(torch.ones(2)), r"has gradients \[M, 3, 4\]. Got \[2\]"),
        (lambda g: g.inner([1]), "SampleGradients or a tensor"),
        (lambda g: g.inner(g, "dense"), "form must be one of"),
        (lambda g: g.divide(torch.ones(4, 3)), r"need a divisor \[3, 4\]. Got \[4, 3\]"),
        (lambda g: g.weighted_sum(torch.ones(3)), "with N = 2. Got"),
        (lambda g: g.to(dtype=torch.int64), "floating-point"),
        (lambda g: SampleGradients.cat([]), "Got shapes none"),
        (lambda g: SampleGradients.from_state_dict({"a": torch.ones(1)}), "tensors named a"),
        (lambda g: SampleGradients.from_factors(torch.ones(2, 3), torch.ones(2, 3)), "takes"),
    ],
)
def test_a_wrong_call_is_refused(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises((UsageError, ShapeError), match=message):
        call(SampleGradients.from_dense(torch.ones(2, 3, 4)))


def test_an_optimizer_without_state_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"Adam has no state for the parameter 'weight'"):
        divisors_of(torch.optim.Adam(model.parameters()), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"state of SGD \(momentum_buffer\)"):
        divisors_of(optimizer, model)
    optimizer = torch.optim.Adadelta(model.parameters())
    optimizer.step()
    with pytest.raises(UsageError, match=r"state of Adadelta \(step, square_avg, acc_delta\)"):
        divisors_of(optimizer, model)


def test_indices_that_are_none() -> None:
    gradients = SampleGradients.from_dense(torch.ones(4, 3))
    for index in (torch.tensor([[0, 1]]), torch.tensor([True]), [True, False]):
        with pytest.raises(IndexError, match="There are 4 samples"):
            gradients[index]
    for strange in ((0, 1), "weight", (slice(None), 2)):
        with pytest.raises(IndexError, match="indexed by sample alone"):
            gradients[strange]  # type: ignore[index]
    for floats in ([0.5, 1.0], torch.ones(2)):
        with pytest.raises(IndexError, match=r"of torch\.float"):
            gradients[floats]  # type: ignore[index]
    assert gradients[[True, False, True, False]].shape == (2, 3)
    close(gradients.weighted_sum([1.0, 2.0, 0.0, 1.0]), torch.full((3,), 4.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["formed", "factors"])
def test_indices_of_every_kind(form: str) -> None:
    dense = torch.randn(4, 3, 2)
    gradients = SampleGradients.from_dense(dense)
    if form == "factors":
        out, inp = torch.randn(4, 2, 3), torch.randn(4, 2, 2)
        gradients, dense = SampleGradients.from_factors(out, inp), out.mT @ inp
    places: list[Any] = [slice(None, None, -1), slice(3, 0, -2), range(3, 1, -1), [2, 0]]
    for index in (*places, np.array([3, 1]), np.array([True, False, True, True])):
        wanted = dense.numpy()[[*index] if isinstance(index, range) else index]
        close(gradients[index].dense(), torch.as_tensor(wanted.copy()))
    close(gradients[np.int64(2)].dense(), dense[2:3])


def test_no_sample_has_no_weight() -> None:
    gradients = SampleGradients.from_dense(torch.ones(0, 3))
    close(gradients.weighted_sum(torch.ones(0)), torch.zeros(3))
    close(gradients.weighted_sum(torch.ones(2, 0)), torch.zeros(2, 3))
    close(gradients.weighted_sum(torch.ones(0, 0)), torch.zeros(0, 3))


def test_terms_of_one_form_are_kept_by_cat() -> None:
    """Both terms of a set, with those of a set that has one."""
    values = torch.randn(3, 2, 4, 3)
    both = SampleGradients([DenseProduct(values[:1]), DenseProduct(values[1:2])])
    found = SampleGradients.cat([both, SampleGradients.from_dense(values[2]), both])
    close(found.dense(), torch.cat([values[0] + values[1], values[2], values[0] + values[1]]))
    scalars = SampleGradients.from_dense(torch.ones(2))
    close(SampleGradients.cat([scalars, scalars]).dense(), torch.ones(4))


@pytest.mark.parametrize("kind", ["kronecker", "sparse", "rademacher", "gaussian"])
@pytest.mark.parametrize("form", ["affine", "lookup"])
def test_what_is_empty_is_projected_and_paired(form: str, kind: Any) -> None:
    """No samples, or samples without positions, such as an empty bag."""
    dense = torch.randn(2, 4, 3)
    for count, positions in ((0, 2), (2, 0)):
        out, shape = torch.randn(1, count, positions, 4), torch.Size((4, 3))
        product: SampleProduct = LookupProduct(
            out[..., :3], torch.zeros(count, positions, dtype=torch.long), shape
        )
        if form == "affine":
            inp = torch.randn(count, positions, 1, 3)
            product = AffineProduct(out.unsqueeze(3), inp, shape)
        empty = SampleGradients([product])
        close(empty.project(Projection(9, kind), "a"), torch.zeros(count, 9))
        for other in (dense, SampleGradients.from_dense(dense), empty):
            close(empty.inner(other), torch.zeros(count, len(other)))


@pytest.mark.parametrize("dim", [4, 25])
def test_a_table_with_one_column_is_projected(dim: int) -> None:
    """A bias for each word; one that fits keeps its inner products."""
    model, words = (
        extend(nn.Sequential(nn.Embedding(20, 1), nn.Flatten())),
        torch.randint(20, (5, 3)),
    )
    lossfunc, target = extend(nn.MSELoss()), torch.randn(5, 3)
    for extension in (BatchGrad(), ProjectedGrad(dim)):  # alone, so that nothing is formed
        with backpack(extension):
            lossfunc(model(words), target).backward()
    weight = model[0].weight
    formed = SampleGradients.from_dense(weight.grad_batch)
    close(weight.projected_grad, formed.project(Projection(dim), "0.weight"))
    if dim == 25:
        ours, flat = weight.projected_grad, weight.grad_batch.flatten(1)
        close(ours @ ours.T, flat @ flat.T)
