"""Energies of molecules and forces of their atoms in one loss: a molecule is a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact
from backpack_core.testing import oracle as kit
from tests.core import first_order
from tests.oracle import assert_close

Pool = Callable[[Tensor, Tensor, int], Tensor]


class Batch(NamedTuple):
    """Positions of atoms, the molecule of each, pairs of atoms, the number of molecules."""

    positions: Tensor
    molecules: Tensor
    pairs: Tensor
    count: int

    def part(self, number: int) -> Batch:
        """One molecule alone."""
        own = self.molecules == number
        pairs = (own.cumsum(0) - 1)[self.pairs[:, own[self.pairs[0]]]]
        return Batch(self.positions[own], self.molecules[own] * 0, pairs, 1)


def _batch(sizes: list[int]) -> Batch:
    torch.manual_seed(0)
    molecules = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    is_pair = molecules[:, None] == molecules
    pairs = (is_pair & ~torch.eye(len(molecules), dtype=torch.bool)).nonzero().T
    return Batch(torch.randn(len(molecules), 3), molecules, pairs, len(sizes))


def _add(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    return torch.zeros(count, h.shape[1]).index_add(0, molecules, h)


def _add_numbers(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    parts = [torch.zeros(count).index_add(0, molecules, column) for column in h.unbind(1)]
    return torch.stack(parts, 1)


def _scatter(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    return torch.zeros(count, h.shape[1]).scatter_add_(0, molecules[:, None].expand_as(h), h)


def _reduce(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    index = molecules[:, None].expand_as(h)
    return torch.zeros(count, h.shape[1]).scatter_reduce(0, index, h, "sum")


def _put(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    return torch.zeros(count, h.shape[1]).index_put((molecules,), h, accumulate=True)


def _mean(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    return _add(h, molecules, count) / molecules.bincount(minlength=count)[:, None]


def _multiply(h: Tensor, molecules: Tensor, count: int) -> Tensor:
    return (molecules == torch.arange(count)[:, None]).to(h.dtype) @ h


POOLS = [_add, _add_numbers, _scatter, _reduce, _put, _mean, _multiply]


class Energies(nn.Module):
    """Atoms, messages between pairs of them, and what is added up for each molecule."""

    def __init__(self, pool: Pool, has_pairs: bool, has_head: bool, has_forces: bool) -> None:
        super().__init__()
        self.pool, self.has_forces = pool, has_forces
        self.atoms, self.out = nn.Linear(3, 4), nn.Linear(4, 3 if has_head else 1)
        self.pairs = nn.Linear(1, 4) if has_pairs else None
        self.head = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)) if has_head else None

    def energies(self, positions: Tensor, molecules: Tensor, pairs: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.atoms(positions))
        if self.pairs is not None:
            one, other = pairs
            distances = (positions[one] - positions[other]).square().sum(1, keepdim=True)
            messages = h[one] * torch.tanh(self.pairs(distances))
            h = h + torch.zeros_like(h).index_add(0, other, messages)
        found = self.pool(self.out(h), molecules, count)
        found = found if self.head is None else self.head(torch.tanh(found))
        return found[:, 0]

    def forward(self, *batch: Any) -> Any:
        return _derived(self.energies, *batch) if self.has_forces else self.energies(*batch)


def _derived(
    energies: Callable[..., Tensor], positions: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    positions = positions.clone().requires_grad_()
    found = energies(positions, *rest)
    (forces,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
    return found, -forces


def _both(model: Energies, batch: Batch) -> tuple[Tensor, Tensor]:
    """Energies and forces, of which the model or a script computes the latter."""
    found: tuple[Tensor, Tensor] = model(*batch) if model.has_forces else _derived(model, *batch)
    return found


def _model(pool: Pool, *options: bool) -> Energies:
    model = Energies(pool, *options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model


def _loss(model: Energies, batch: Batch) -> Tensor:
    energies, forces = _both(model, batch)
    return 0.3 * energies.square().sum() + 2 * (forces - 0.1).square().sum()


SIZES = [[3, 2], [2, 2], [3, 3, 3], [2, 1], [1, 2, 4], [3], [1, 1], [4, 1, 2, 3]]


@pytest.mark.grid(8)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_pairs", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_energies_and_forces(pool: Pool, has_pairs: bool, has_head: bool, sizes: list[int]) -> None:
    batch = _batch(sizes)
    model = _model(pool, has_pairs, has_head, sum(sizes) % 2 == 0)
    alone = [_loss(model, batch.part(n)) for n in range(len(sizes))]
    first_order.check(extend(model), lambda: _loss(model, batch), alone)


@pytest.mark.grid(6)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_pairs", [False, True])
def test_curvature_of_both(
    has_pairs: bool, has_head: bool, sizes: list[int], reduction: str
) -> None:
    batch, model = _batch(sizes), _model(_add, has_pairs, has_head, True)
    lossfunc, parameters = nn.MSELoss(reduction=reduction), [*model.parameters()]
    energies, forces = model(*batch)
    weights = (2.0, 1.0) if reduction == "sum" else (2 / energies.numel(), 1 / forces.numel())
    of_energies, of_forces = (
        kit.jacobians(out, dict(enumerate(parameters))) for out in (energies, forces)
    )
    extend(model), extend(lossfunc)
    energies, forces = model(*batch)
    value = lossfunc(energies, energies.detach() + 1) + 0.5 * lossfunc(forces, batch.positions)
    with backpack(DiagGGNExact(), BatchDiagGGNExact()):
        value.backward()
    owners = F.one_hot(batch.molecules, len(sizes)).double()
    for k, p in enumerate(parameters):
        if p.grad is None:
            continue
        of_atoms = of_forces[k].reshape(len(owners), 3, *p.shape).square().sum(1)
        expected = weights[0] * of_energies[k].square()
        expected = expected + weights[1] * torch.einsum("an,a...->n...", owners, of_atoms)
        assert_close(1 + p.diag_ggn_exact_batch, 1 + expected)  # type: ignore[attr-defined]
        assert_close(1 + p.diag_ggn_exact, 1 + expected.sum(0))  # type: ignore[attr-defined]


def _forces(model: Energies, batch: Batch) -> Tensor:
    return _both(model, batch)[1].square().sum()


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("sizes", [[3, 2], [2, 2, 2], [2, 1]], ids=str)
def test_forces_alone_do_not_tell_the_molecules(sizes: list[int], has_head: bool) -> None:
    """Nothing is added up in such a loss: it has to be said which atoms are one molecule's."""
    batch, model = _batch(sizes), _model(_add, True, has_head, False)
    alone = [_forces(model, batch.part(n)) for n in range(len(sizes))]
    parts = [kit.gradients(part, [*model.parameters()]) for part in alone]
    value = _forces(extend(model), batch)
    with pytest.raises(SampleMixingError, match="samples=index"), backpack(BatchGrad()):
        value.backward()
    value = _forces(model, batch)
    with backpack(BatchGrad(), samples=batch.molecules):
        value.backward()
    for k, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            assert_close(parameter.grad_batch, torch.stack([part[k] for part in parts]))  # type: ignore[attr-defined]


def test_sums_that_a_script_compares_with_rows_are_no_samples() -> None:
    """Nor where a term of them alone stands beside: the model has returned the rows."""
    model, x, y = extend(nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 0])
    h = model(x)
    sums = _add(h, y, 3)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        (F.mse_loss(h, sums[y]) + sums.square().sum()).backward()
