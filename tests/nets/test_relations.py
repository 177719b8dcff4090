"""Two ways to one number: quantities that no net is drawn for follow from those that are.

A net follows from its seed, and ``--nets=N --seed=...`` asks for more of them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backpack_core import Extension
from backpack_core.errors import BackpackError
from backpack_core.extensions import (
    HMP,
    JMP,
    NTK,
    AggregatedGrad,
    BatchGrad,
    DiagHMP,
    GGNGram,
    GradInner,
    Jacobians,
    ProjectedGrad,
    SqrtGGNExact,
    TaskDotGrad,
    TaskGrad,
)
from backpack_firstorder import Projection
from tests.leftovers import left_behind, state
from tests.nets.draw import draw
from tests.nets.passes import Run
from tests.nets.recipe import Plan
from tests.nets.truth import difference
from tests.nets.verdict import Prepared

RTOL = 1e-8
SMALLEST = 1e-6
MOST_ENTRIES = 30  # of a parameter whose whole Hessian is formed
Pairs = Iterator[tuple[Tensor, Tensor]]


def _run(prepared: Prepared, *extensions: Extension) -> Run:
    run = Run(prepared.recipe, prepared.net, prepared.losses, prepared.truth.parameters)
    run.backward(run.loss(), extensions)
    return run


def _values(run: Run, field: str) -> dict[str, Any]:
    return {name: getattr(p, field) for name, p in run.used.items() if hasattr(p, field)}


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _gradients(prepared: Prepared) -> dict[str, Tensor]:
    return _values(_run(prepared, BatchGrad()), "grad_batch")


def _products(prepared: Prepared) -> Pairs:
    """What ``SampleGradients`` computes, from the gradients themselves."""
    grads, run = _gradients(prepared), _run(prepared, BatchGrad(form="product"))
    found = _values(run, "grad_batch")
    for name, rows in grads.items():
        product, weights, vector = found[name], _drawn(len(rows)), _drawn(*rows.shape[1:])
        yield product.dense(), rows
        yield product[1:].dense(), rows[1:]
        yield product.norm(), _rows(rows).norm(dim=1)
        yield product.inner(vector).flatten(), _rows(rows * vector).sum(1)
        yield product.inner(product), _rows(rows) @ _rows(rows).T
        yield product.weighted_sum(weights), torch.einsum("n,n...->...", weights, rows)


def _projections(prepared: Prepared) -> Pairs:
    """Projections in the pass, and of what the pass left."""
    for kind in ("kronecker", "gaussian", "rademacher", "sparse"):
        run = _run(prepared, ProjectedGrad(4, kind, seed=3), BatchGrad(form="product"))
        whole = run.whole if prepared.recipe.plan.is_inside else run.net
        names = {p: name for name, p in whole.named_parameters()}
        for parameter in run.used.values():
            if hasattr(parameter, "grad_batch"):
                product: Any = parameter.grad_batch
                projection = Projection(4, kind, seed=3)
                yield parameter.projected_grad, product.project(projection, names[parameter])


def _scores(prepared: Prepared) -> Pairs:
    """Inner products with queries, by parameter and over all."""
    grads, inner = _gradients(prepared), GradInner(lambda name, shape: _drawn(3, *shape))
    found = _values(_run(prepared, inner), "grad_inner")
    expected = {n: _rows(g) @ _rows(_drawn(3, *g.shape[1:])).T for n, g in grads.items()}
    for name, scores in expected.items():
        yield found[name], scores
    yield inner.scores, torch.stack([*expected.values()]).sum(0)


def _mixtures(prepared: Prepared) -> Pairs:
    """Gradients of samples, weighted by a function of their Gram matrix."""

    def weighting(gram: Tensor) -> Tensor:
        return (gram.sum(1) / (1 + gram.diagonal())).tanh()

    grads = _gradients(prepared)
    found = _values(_run(prepared, AggregatedGrad(weighting, rows="samples")), "grad_aggregated")
    weights = weighting(torch.stack([_rows(g) @ _rows(g).T for g in grads.values()]).sum(0))
    for name, rows in grads.items():
        yield found[name], torch.einsum("n,n...->...", weights, rows)


def _losses(prepared: Prepared) -> Pairs:
    """Gradients of losses add up, and have the inner products."""
    run = _run(prepared, TaskGrad(), TaskDotGrad())
    dots = _values(run, "task_dot")
    for name, rows in _values(run, "grad_task").items():
        whole = run.used[name].grad
        yield rows.sum(0), torch.zeros_like(rows[0]) if whole is None else whole
        yield dots[name], _rows(rows) @ _rows(rows).T


def _jacobians(prepared: Prepared) -> dict[str, Tensor]:
    return _values(_run(prepared, Jacobians()), "jacobians")


def _kernels(prepared: Prepared) -> Pairs:
    """Tangent kernels from Jacobians."""
    jacobians, found = _jacobians(prepared), _values(_run(prepared, NTK()), "ntk")
    for name, rows in jacobians.items():
        flat = rows.flatten(2)
        yield found[name], torch.einsum("ncp,mdp->ncmd", flat, flat)


def _jacobian_products(prepared: Prepared) -> Pairs:
    """Products with Jacobians, whose numbers lie as the loss has them; and their adjoints."""
    run = _run(prepared, JMP())
    jacobians = _jacobians(prepared)
    for name, product in _values(run, "jmp").items():
        vector = _drawn(*run.used[name].shape)
        image = product(vector)
        other = _drawn(*image.shape)
        yield (image * other).sum(), (product.transposed(other) * vector).sum()
        if name not in jacobians:  # no output depends on it
            yield image, torch.zeros_like(image)
            continue
        expected = jacobians[name].flatten(2) @ vector.flatten()
        if expected.numel() == image.numel():  # else some samples have fewer numbers
            yield image.flatten().sort().values, expected.flatten().sort().values


def _spectra(prepared: Prepared) -> Pairs:
    """Gram matrices of the root of the generalised Gauss-Newton matrix."""
    roots = _values(_run(prepared, SqrtGGNExact()), "sqrt_ggn_exact")
    found = _values(_run(prepared, GGNGram()), "ggn_gram")
    for name, root in roots.items():
        flat = root.flatten(0, 1).flatten(1)
        gram = found[name].gram.reshape(len(flat), len(flat))
        yield torch.linalg.eigvalsh(gram), torch.linalg.eigvalsh(flat @ flat.T)


def _hessians(prepared: Prepared) -> Pairs:
    """Diagonals, from products with unit vectors."""
    small = {n for n, p in prepared.truth.parameters.items() if p.numel() <= MOST_ENTRIES}
    diagonals = _values(_run(prepared, DiagHMP()), "diag_hmp")
    run = _run(prepared, HMP())
    for name, multiply in _values(run, "hmp").items():
        if name in small:
            units = torch.eye(diagonals[name].numel()).reshape(-1, *diagonals[name].shape)
            yield diagonals[name].flatten(), _rows(multiply(units)).diagonal()


RELATIONS: list[Callable[[Prepared], Pairs]] = [
    *(_products, _projections, _scores, _mixtures, _losses),
    *(_kernels, _jacobian_products, _spectra, _hessians),
]


def _fault(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"has shape {[*found.shape]}, expected {[*expected.shape]}"
    error = difference(found, expected, SMALLEST)
    return "" if error < RTOL else f"has the relative error {error:.1e}"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Every net is judged by itself: one that is refused may leave what it has overwritten."""


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.__name__[1:])
def test_relations(relation: Callable[[Prepared], Pairs], pytestconfig: pytest.Config) -> None:
    first, count = pytestconfig.getoption("--seed"), pytestconfig.getoption("--nets")
    outcomes, faults = Counter[str](), list[str]()
    for seed in range(first, first + max(1, count // 10)):
        prepared = draw(seed)
        prepared.recipe = replace(prepared.recipe, plan=Plan("single", 0, 1))
        before = state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [_fault(*pair) for pair in relation(prepared)]
        except BackpackError as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["compared"] += bool(found)
        faults += [f"seed {seed}: {fault}" for fault in found if fault]
        del prepared
        # A product keeps the graph, and with it what was overwritten.
        if relation is not _hessians and (left := left_behind(before)):
            faults.append(f"seed {seed} left something behind: {left}")
    assert not faults
    assert outcomes["compared"] * 3 > outcomes.total(), outcomes
