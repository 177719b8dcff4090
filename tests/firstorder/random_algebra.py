"""Expressions of individual gradients that are drawn, with the tensors that they stand for."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_firstorder import Projection, SampleGradients
from backpack_products import AffineProduct, DenseProduct, LookupProduct
from backpack_products.tuning import memory_budget, set_memory_budget

Change = Callable[["Algebra"], None]
CHANGES: dict[str, Change] = {}
Read = Callable[["Algebra"], tuple[Any, Any]]
READS: dict[str, Read] = {}
SHAPES = [(), (3,), (4, 3), (2, 3, 2), (6, 2, 1, 2), (1, 5), (5, 1)]
BUDGETS = [1, 300, 4000, 2**30]


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def read(function: Read) -> Read:
    READS[function.__name__] = function
    return function


class Algebra:
    """Gradients ``ours`` and the tensor ``right``, changed step by step.

    Attributes:
        random: What is drawn from.
        told: What was drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.told = Random(seed), list[Any]([seed])
        torch.manual_seed(seed)
        self.shape = torch.Size(self.random.choice(SHAPES))
        self.ours, self.right = self.draw()
        self.told.append(f"{self.ours!r}")

    # Drawn ---------------------------------------------------------------------------------------

    def draw(self, samples: int | None = None) -> tuple[SampleGradients, Tensor]:
        """Gradients of one to three terms, and their tensor."""
        count = self.random.choice([1, 2, 3, 5]) if samples is None else samples
        terms = [self.term(count) for _ in range(self.random.choice([1, 1, 2, 3]))]
        return SampleGradients([term for term, _ in terms]), sum(right for _, right in terms)  # type: ignore[return-value]

    def term(self, count: int) -> tuple[Any, Tensor]:
        kinds = (
            ["dense"] + ["affine"] * 2 * (len(self.shape) > 1) + ["lookup"] * (len(self.shape) == 2)
        )
        kind, size = self.random.choice(kinds), self.shape.numel()
        positions = self.random.choice([1, 1, 2, 4, 0])
        if kind == "dense":
            values = torch.randn(count, *self.shape)
            return DenseProduct(values.unsqueeze(0)), values
        if kind == "affine":
            divisors = [g for g in (1, 2, 3) if self.shape[0] % g == 0]
            groups = self.random.choice(divisors)
            out = torch.randn(count, positions, groups, self.shape[0] // groups)
            inp = torch.randn(count, positions, groups, size // self.shape[0])
            formed = torch.einsum("nsgo,nsgi->ngoi", out, inp).reshape(count, *self.shape)
            return AffineProduct(out.unsqueeze(0), inp, self.shape), formed
        out = torch.randn(count, positions, self.shape[1])
        row = torch.randint(self.shape[0], (count, positions))
        formed = torch.einsum("nkr,nkd->nrd", F.one_hot(row, self.shape[0]).to(out), out)
        return LookupProduct(out.unsqueeze(0), row, self.shape), formed

    def places(self) -> tuple[Any, Any]:
        """An index of ours, and one of a tensor."""
        count = len(self.ours)
        mask = torch.rand(count) < 0.6
        some = [self.random.randrange(count) for _ in range(self.random.randint(1, 4))]
        chosen: list[tuple[Any, Any]] = [
            (slice(None, None, 2), slice(None, None, 2)),
            (slice(None, None, -1), torch.arange(count).flip(0)),
            (slice(-1, None), slice(-1, None)),
            (some[0], slice(some[0], some[0] + 1)),
            (some, some),
            (torch.tensor(some), some),
            (torch.tensor(some, device="cpu").numpy(), some),
            (mask, mask),
            (mask.tolist(), mask),
        ]
        return self.random.choice(chosen)

    # A step --------------------------------------------------------------------------------------

    def go_on(self) -> str:
        """Change the gradients, or not, and read something; returns what is wrong."""
        before, budget = memory_budget(), self.random.choice(BUDGETS)
        if self.random.random() < 0.6:
            name = self.random.choice([*CHANGES])
            self.told.append(name)
            CHANGES[name](self)
        name = self.random.choice([*READS])
        self.told.append(f"{name} with {budget} bytes")
        set_memory_budget(budget)
        try:
            ours, right = READS[name](self)
        finally:
            set_memory_budget(before)
        is_alike = ours.shape == right.shape and ours.dtype == right.dtype
        size = 1 + (float(right.abs().max()) if right.numel() else 0.0)
        eps = 3e-2 if ours.dtype == torch.bfloat16 else 1e-4 if self.is_rounded else 1e-9
        if not is_alike or not torch.allclose(ours, right, rtol=0.0, atol=eps * size):
            return f"{name} gives\n{ours}\ninstead of\n{right}\nfor {self.ours!r}"
        return ""

    @property
    def is_rounded(self) -> bool:
        return self.ours.dtype != torch.float64

    @property
    def wide(self) -> torch.dtype:
        """What norms and inner products are computed in."""
        return torch.promote_types(self.ours.dtype, torch.float32)


# What changes ------------------------------------------------------------------------------------


@change
def index(given: Algebra) -> None:
    if len(given.ours):
        ours, right = given.places()
        given.ours, given.right = given.ours[ours], given.right[right]


@change
def cat(given: Algebra) -> None:
    ours, right = given.draw()
    ours = ours.to(dtype=given.ours.dtype)
    right = right.to(given.ours.dtype)
    is_first = given.random.random() < 0.5
    pair = [(given.ours, given.right), (ours, right)]
    pair = pair if is_first else pair[::-1]
    given.ours = SampleGradients.cat([p[0] for p in pair])
    given.right = torch.cat([p[1] for p in pair])
    if len(given.ours) > 12:
        given.ours, given.right = given.ours[:7], given.right[:7]


@change
def twice(given: Algebra) -> None:
    given.ours = SampleGradients.cat([given.ours, given.ours[:1]])
    given.right = torch.cat([given.right, given.right[:1]])


@change
def divide(given: Algebra) -> None:
    rows, columns = _matrix(given.shape)
    if given.random.random() < 0.5:
        divisor: Any = torch.rand(given.shape) + 0.5
        flat = divisor
    else:
        divisor = torch.rand(rows) + 0.5, torch.rand(columns) + 0.5
        flat = torch.outer(*divisor).reshape(given.shape)
    if given.ours.dtype == torch.bfloat16:
        return
    given.ours, given.right = given.ours.divide(divisor), given.right / flat.to(given.right)


@change
def whole_rank(given: Algebra) -> None:
    """A rank that is not smaller changes nothing but the form."""
    if given.ours.dtype != torch.bfloat16:
        given.ours = given.ours.low_rank(min(_matrix(given.shape)))


@change
def low_rank(given: Algebra) -> None:
    rows, columns = _matrix(given.shape)
    if given.ours.dtype == torch.bfloat16 or min(rows, columns) < 2 or not len(given.ours):
        return
    low = given.ours.low_rank(1)
    values = torch.linalg.svdvals(given.right.reshape(-1, rows, columns))
    error = (low.dense() - given.right).flatten(1).square().sum(1)
    least = values[:, 1:].square().sum(1)
    assert bool((error <= least * (1 + 1e-3) + 1e-4).all()), given.told
    given.ours, given.right = low, low.dense()


@change
def stored(given: Algebra) -> None:
    file = io.BytesIO()
    torch.save(given.ours.state_dict(), file)
    file.seek(0)
    given.ours = SampleGradients.from_state_dict(torch.load(file))


@change
def cloned(given: Algebra) -> None:
    old, given.ours = given.ours, given.ours.clone()
    for term in old.terms:
        for tensor in vars(term).values():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))


@change
def prepared(given: Algebra) -> None:
    given.ours = given.ours.prepared(given.random.choice([0, 200, 10**9]))


@change
def single(given: Algebra) -> None:
    given.ours, given.right = given.ours.to(dtype=torch.float32), given.right.float()


@change
def of_product(given: Algebra) -> None:
    given.ours = SampleGradients.of(given.ours.product())


@change
def formed(given: Algebra) -> None:
    given.ours = SampleGradients.from_dense(given.right.clone())


# What is read ------------------------------------------------------------------------------------


@read
def dense(given: Algebra) -> tuple[Any, Any]:
    return given.ours.dense(), given.right


@read
def norm(given: Algebra) -> tuple[Any, Any]:
    return given.ours.norm(), _flat(given.right).to(given.wide).norm(dim=1)


@read
def sum_of(given: Algebra) -> tuple[Any, Any]:
    return given.ours.sum(), given.right.sum(0)


@read
def weighted_sum(given: Algebra) -> tuple[Any, Any]:
    several = given.random.choice([(), (1,), (3,), (0,)])
    weights = torch.randn(*several, len(given.ours))
    right = torch.tensordot(weights.to(given.right), given.right, 1)
    return given.ours.weighted_sum(weights), right


@read
def inner(given: Algebra) -> tuple[Any, Any]:
    other, right = given.draw()
    form = given.random.choice([None, "positions", "formed"])
    kind = given.random.choice(["gradients", "tensor", "single", "itself"])
    given.told.append((kind, form))
    flat = _flat(given.right)
    if kind == "itself":
        return given.ours.inner(given.ours, form), flat.to(given.wide) @ flat.to(given.wide).T
    if kind == "single":
        ours = given.ours.inner(right[0], form)
        return ours, flat.double() @ right[:1].flatten().unsqueeze(1)
    ours = given.ours.inner(other if kind == "gradients" else right, form)
    return ours, flat.double() @ _flat(right).T


@read
def project(given: Algebra) -> tuple[Any, Any]:
    """In any form, projections are those of the formed gradients, and linear."""
    kinds = ["kronecker", "sparse", "rademacher", "gaussian"]
    projection = Projection(given.random.choice([1, 4, 5, 9]), given.random.choice(kinds), 3)
    given.told.append(projection)
    right = SampleGradients.from_dense(given.right.to(given.wide))
    return given.ours.project(projection, "name"), right.project(projection, "name")


@read
def shapes(given: Algebra) -> tuple[Any, Any]:
    assert given.ours.shape == given.right.shape
    assert len(given.ours) == len(given.right)
    assert given.ours.dtype == given.right.dtype
    return given.ours.dense(), given.right


def _matrix(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if shape else (1, 1)


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), rows.shape[1:].numel())
