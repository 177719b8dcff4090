"""Extensions that are asked for: how they are made, and what they should give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from backpack_core import Extension, extensions
from tests.nets.net import generator
from tests.nets.recipe import Settings
from tests.nets.truth import Truth

# Entries of Hessian diagonals that are compared, and vectors that are multiplied.
ENTRIES = 5
VECTORS = 2


def chosen(truth: Truth, options: Settings, values: Tensor) -> Tensor:
    """The samples that take part, out of ``[N, *]``."""
    indices = options.get("subsampling")
    return values if indices is None else values[list(indices)]


def individual(truth: Truth, name: str, options: Settings) -> Tensor:
    """Individual gradients of the samples that take part."""
    return chosen(truth, options, truth.individual_gradients[name])


def _norms(truth: Truth, options: Settings, group: str | None) -> Tensor:
    squares = torch.zeros(len(individual(truth, next(iter(truth.parameters)), options)))
    for name in truth.parameters:
        if group is None or owner(truth, name) == group:
            squares = squares + individual(truth, name, options).flatten(1).square().sum(1)
    return squares.sqrt()


def owner(truth: Truth, name: str) -> str:
    """The module whose call a parameter is read at.

    Attention takes its projection with it, and a module what its parameters are computed from.
    """
    path = name.rpartition(".")[0].partition(".parametrizations.")[0]
    above = truth.net.get_submodule(path.rpartition(".")[0])
    return path.rpartition(".")[0] if isinstance(above, torch.nn.MultiheadAttention) else path


def divisor(truth: Truth, options: Settings) -> float:
    """What the loss divides by, as it is told or as its modules say."""
    told = options["normaliser"]
    return truth.normaliser or 1.0 if told == "loss" else told or 1.0


def bound(truth: Truth, options: Settings) -> float:
    """A bound that some samples' own losses exceed."""
    norm = _norms(truth, {}, None).mean().item()
    return norm * divisor(truth, options) * float(options["factor"])


def clipped(truth: Truth, name: str, options: Settings) -> Tensor:
    """``Σ_n g_n min(1, C / ‖g_n‖)``, of the samples' own losses."""
    group = None if options["clipping"] == "flat" else owner(truth, name)
    divided = divisor(truth, options)
    weights = (bound(truth, options) / divided / _norms(truth, options, group)).clamp(max=1.0)
    return torch.einsum("n,n...->...", divided * weights, individual(truth, name, options))


def vectors(truth: Truth, name: str) -> Tensor:
    """Random vectors of a parameter's shape. Shape ``[V, *θ]``."""
    shape = (VECTORS, *truth.parameters[name].shape)
    return torch.randn(shape, generator=generator(truth.recipe.seed, name))


def entries(truth: Truth, name: str) -> list[int]:
    """Positions in a flattened parameter."""
    size = truth.parameters[name].numel()
    order = torch.randperm(size, generator=generator(truth.recipe.seed, name))
    return order[:ENTRIES].tolist()


def hessian_entries(truth: Truth, name: str, options: Settings) -> Tensor:
    """Some entries of the diagonal of each sample's Hessian. Shape ``[N, entries]``."""
    parameter, found = truth.parameters[name], []
    for entry in entries(truth, name):
        unit = torch.zeros(parameter.numel())
        unit[entry] = 1.0
        product = truth.hessian_product(name, unit.reshape(parameter.shape))
        found.append(product.flatten(1)[:, entry])
    return chosen(truth, options, torch.stack(found, 1))


def hessian_products(truth: Truth, name: str, options: Settings) -> Tensor:
    """Products with the block of each sample's Hessian. Shape ``[N, V, *θ]``."""
    products = [truth.hessian_product(name, v) for v in vectors(truth, name)]
    return chosen(truth, options, torch.stack(products, 1))


def ggn_products(truth: Truth, name: str, options: Settings) -> Tensor:
    """Products with the block of the generalised Gauss-Newton matrix. Shape ``[V, *θ]``."""
    v = vectors(truth, name)
    block = chosen(truth, options, truth.ggn(name)).sum(0)
    return (v.flatten(1) @ block).reshape(v.shape)


def largest(values: Tensor) -> float:
    """The largest absolute value."""
    return values.abs().max().item() if values.numel() else 0.0


Read = Callable[[Truth, str, Any], Tensor]


def as_stored(truth: Truth, name: str, value: Any) -> Tensor:
    """The stored value itself."""
    assert isinstance(value, Tensor), f"{type(value)} is stored"
    return value


@dataclass(frozen=True)
class Quantity:
    """What is known about an extension.

    Attributes:
        family: ``"first"``, ``"ggn"`` or ``"hessian"``.
        expected: ``expected(truth, name, options)`` for one parameter.
        read: Makes a stored value comparable.
        floor: The least number that differences are relative to, where numbers cancel.
        chunks: Whether it takes ``chunk_size``.
        is_sum: Whether it is a derivative of the whole loss.
    """

    family: str
    expected: Callable[[Truth, str, Settings], Tensor]
    read: Read = as_stored
    floor: Callable[[Truth, str, Settings], float] = lambda truth, name, options: 0.0
    chunks: bool = False
    is_sum: bool = False

    def extension(self, name: str, options: Settings, truth: Truth) -> Extension:
        """An instance with the options of a request."""
        given = {k: v for k, v in options.items() if k not in {"factor"}}
        if "factor" in options:
            given["max_norm"] = bound(truth, options)
        kind: Any = getattr(extensions, name)
        result: Extension = kind(**given)
        return result

    def draw(self, random: Random, batch: int) -> dict[str, Any]:
        """Options of a request."""
        options: dict[str, Any] = {}
        if random.random() < 0.2:
            draw = random.choices if random.random() < 0.15 else random.sample
            options["subsampling"] = draw(range(batch), k=random.randint(1, batch))
        if self.chunks and random.random() < 0.5:
            options["chunk_size"] = random.randint(1, 3)
        return options


def _outer(truth: Truth, name: str, value: Tensor) -> Tensor:
    return torch.einsum("vni,vnj->nij", value.flatten(2), value.flatten(2))


def _multiplied(truth: Truth, name: str, value: Any) -> Tensor:
    result: Tensor = value(vectors(truth, name))
    return result


def _some(truth: Truth, name: str, value: Tensor) -> Tensor:
    return value.flatten()[entries(truth, name)]


def _some_of_each(truth: Truth, name: str, value: Tensor) -> Tensor:
    return value.flatten(1)[:, entries(truth, name)]


QUANTITIES: dict[str, Quantity] = {
    "BatchGrad": Quantity("first", individual),
    "BatchL2Grad": Quantity(
        "first", lambda t, n, o: individual(t, n, o).flatten(1).square().sum(1)
    ),
    "SumGradSquared": Quantity("first", lambda t, n, o: individual(t, n, o).square().sum(0)),
    "Variance": Quantity(
        "first",
        lambda t, n, o: individual(t, n, o).var(0, correction=0),
        floor=lambda t, n, o: largest(individual(t, n, o)) ** 2,
    ),
    "BatchDotGrad": Quantity(
        "first",
        lambda t, n, o: (g := individual(t, n, o).flatten(1)) @ g.T,
    ),
    "ClippedSumGrad": Quantity(
        "first",
        clipped,
        floor=lambda t, n, o: min(bound(t, o), divisor(t, o) * largest(individual(t, n, o))),
    ),
    "DiagGGNExact": Quantity(
        "ggn",
        lambda t, n, o: chosen(t, o, t.ggn_diagonal(n)).sum(0),
        chunks=True,
        is_sum=True,
    ),
    "BatchDiagGGNExact": Quantity(
        "ggn", lambda t, n, o: chosen(t, o, t.ggn_diagonal(n)), chunks=True
    ),
    "SqrtGGNExact": Quantity("ggn", lambda t, n, o: chosen(t, o, t.ggn(n)), _outer, chunks=True),
    "GGNMP": Quantity("ggn", ggn_products, _multiplied, is_sum=True),
    "DiagHessian": Quantity(
        "hessian",
        lambda t, n, o: hessian_entries(t, n, o).sum(0),
        _some,
        lambda t, n, o: largest(hessian_entries(t, n, o)),
        is_sum=True,
    ),
    "BatchDiagHessian": Quantity("hessian", hessian_entries, _some_of_each),
    "HMP": Quantity(
        "hessian",
        lambda t, n, o: hessian_products(t, n, o).sum(0),
        _multiplied,
        lambda t, n, o: largest(hessian_products(t, n, o)),
        is_sum=True,
    ),
}


def draw_options(name: str, random: Random, batch: int) -> dict[str, Any]:
    """Options of a request for an extension."""
    options = QUANTITIES[name].draw(random, batch)
    if name == "ClippedSumGrad":
        options["factor"] = random.choice([0.3, 1.0, 1.5, 10.0])
        options["clipping"] = random.choice(["flat", "per_layer"])
        options["normaliser"] = random.choice(["loss", "loss", None, 3.0])
    return options
