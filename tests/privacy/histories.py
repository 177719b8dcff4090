"""Histories of private training: between steps, something happens that a training must survive.

A history is drawn from a seed: a net, a loss, clipping, sampling, an optimizer, and what happens
between steps. Its truth is a loop over samples with a plain optimizer, on a copy of the net.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import exp, sqrt
from random import Random
from typing import Any

import torch
from dp_accounting import dp_event, pld, rdp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from backpack_privacy import AdaptiveClipping, Clipping, make_private
from backpack_privacy.randomness import Seeded
from tests.nets.histories import PARTS, Part

DELTA = 1e-3
CLASSES = 3
Losses = tuple[Any, Any, Callable[[Tensor, Tensor], Tensor]]


class Net(nn.Module):
    """Maps ``[N, d]``, or tokens ``[N, 4]``, to ``[N, 3]``."""

    def __init__(self, size: int, random: Random, has_tokens: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, size) if has_tokens else None
        names = [random.choice([*PARTS, "tied", "dropout"]) for _ in range(random.randint(1, 2))]
        self.parts = nn.Sequential(*(_part(name, size) for name in names))
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x).mean(1)
        return self.head(self.parts(x))  # type: ignore[no-any-return]


def _part(name: str, size: int) -> nn.Module:
    if name == "dropout":
        return nn.Sequential(nn.Linear(size, size), nn.Dropout(0.4))
    if name == "tied":
        made = Part(
            *(size, lambda p, x: p.b(p.a(x).tanh())),
            **{"a": nn.Linear(size, size), "b": nn.Linear(size, size)},
        )
        made.b.weight = made.a.weight  # type: ignore[union-attr]
        return made
    return PARTS[name](size)


def _mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def _sum(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def _hinge(out: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(out, y, reduction="sum") / 7


def _losses(random: Random) -> tuple[Losses, bool]:
    """A loss, the ``normaliser`` of the training, a sample's own loss; and if there are classes."""
    kind = random.choice(
        ["module", "module", "weighted", "square", "mean", "sum", "told", "number"]
    )
    reduction = random.choice(["mean", "sum"])
    if kind == "square":
        return (nn.MSELoss(reduction=reduction), "loss", nn.MSELoss(reduction="sum")), False
    if kind in ("module", "weighted"):
        options: dict[str, Any] = {"label_smoothing": random.choice([0.0, 0.1])}
        if kind == "weighted":
            options["weight"] = torch.tensor([0.5, 1.0, 2.0])
        own = nn.CrossEntropyLoss(reduction="sum", **options)
        return (nn.CrossEntropyLoss(reduction=reduction, **options), "loss", own), True
    if kind == "number":
        return (_hinge, 7.0, lambda out, y: 7 * _hinge(out, y)), True
    return ((_sum, None, _sum) if kind == "sum" else (_mean, "samples", _sum)), True


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda g: torch.optim.SGD(g, lr=0.1),
    lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, weight_decay=0.01),
    lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.5, nesterov=True),
    lambda g: torch.optim.Adam(g, lr=0.01, eps=1e-2, weight_decay=0.01),
    lambda g: torch.optim.AdamW(g, lr=0.01, eps=1e-2, weight_decay=0.1, amsgrad=True),
    lambda g: torch.optim.Adam(g, lr=0.01, eps=1e-2, fused=True),
    lambda g: torch.optim.RMSprop(g, lr=0.01, eps=1e-2, momentum=0.5),
    lambda g: torch.optim.Adagrad(g, lr=0.05, eps=1e-2),
]


def _halved(norms: Tensor, bound: float) -> Tensor:
    return (0.5 * bound / norms).clamp(max=1.0)


def _smooth(norms: Tensor, bound: float) -> Tensor:
    return bound / (bound + norms)


WEIGHTS: dict[Any, Callable[[float, float], float]] = {
    "clip": lambda norm, bound: min(1.0, bound / norm) if norm else 1.0,
    "automatic": lambda norm, bound: bound / (norm + 0.01),
    _halved: lambda norm, bound: min(1.0, 0.5 * bound / norm) if norm else 1.0,
    _smooth: lambda norm, bound: bound / (bound + norm),
}


class Setting:
    """What does not change in a history."""

    def __init__(self, random: Random, seed: int) -> None:
        self.seed, self.size, self.count = seed, random.choice([4, 5]), random.choice([9, 10, 12])
        has_tokens = random.random() < 0.25
        self.losses, has_classes = _losses(random)
        self.model = Net(self.size, random, has_tokens)
        every = [*self.model.parameters()]
        if random.random() < 0.3 and len(every) > 2:
            random.choice(every).requires_grad_(False)
        shape = (self.count, 4) if has_tokens else (self.count, self.size)
        self.x = torch.randint(5, shape) if has_tokens else torch.randn(shape)
        self.y = (
            torch.randint(CLASSES, (self.count,))
            if has_classes
            else torch.randn(self.count, CLASSES)
        )
        self.users = [random.randrange(5) for _ in range(self.count)]
        self.users = self.users if random.random() < 0.3 else None  # type: ignore[assignment]
        self.units = self.count if self.users is None else len({*self.users})
        self.batch_size = random.randint(1, self.units)
        self.make_optimizer = random.choice(OPTIMIZERS)
        self.is_split = random.random() < 0.4
        self.weights = random.choice(["clip", "clip", "automatic", _halved, _smooth])
        self.max_norm: Any = random.choice([0.1, 1.0, 5.0])
        self.groups: Any = random.choice(["flat", "flat", "per_layer", "per_parameter", "own"])
        if self.groups == "own" and not any(p.requires_grad for p in self.model.parts.parameters()):
            self.groups = "flat"  # otherwise a pattern would fit nothing
        if self.groups == "own":
            self.max_norm = {"head.*": 0.3, "*": 1.0}
        self.is_adaptive = random.random() < 0.25
        if self.is_adaptive:
            self.weights = "clip"
        self.options: dict[str, Any] = {
            "noise_multiplier": random.choice([0.0, 0.0, 0.5, 1.3]),
            "sampling": random.choice(["poisson", "shuffled"]),
            "max_rows": random.choice([None, None, 1, 3]),
            "accountant": random.choice(["rdp"] * 4 + ["pld"]),
            "checks": random.choice([0, 0, 2, 5]),
            "users": self.users,
            "normaliser": self.losses[1],
        }
        if self.users is not None and random.random() < 0.3:
            self.options["max_records"] = 2
        self.ahead = random.choice([0, 0, 0, 1])
        self.factor, self.is_twofold = random.choice([1.0, 1.0, 0.5]), random.random() < 0.2

    def value(self, out: Tensor, y: Tensor, is_own: bool = False) -> Tensor:
        """The loss, or a sample's own."""
        lossfunc = self.losses[2 if is_own else 0]
        value = self.factor * lossfunc(out, y)
        return value + lossfunc(2 * out, y) if self.is_twofold else value

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not self.is_split:
            return self.make_optimizer(trained)
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.02}]
        return self.make_optimizer([g for g in groups if g["params"]])

    def clipping(self) -> Clipping:
        groups = "flat" if self.groups == "own" else self.groups
        if self.is_adaptive:
            return AdaptiveClipping(self.max_norm, groups, 0.4, 0.3, count_noise=7.0)
        return Clipping(self.max_norm, groups, self.weights)

    def private(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=self.batch_size)
        return make_private(
            *(model, self.losses[0], optimizer, loader),
            **{"clipping": self.clipping(), "seed": self.seed, **self.options},
        )


class Reference:
    """The same training by a loop over samples."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.model = setting, copy.deepcopy(setting.model)
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = setting.optimizer(self.model)
        self.source, self.steps, self.epochs, self.is_new = Seeded(setting.seed), 0, 0, True
        self.noise = setting.options["noise_multiplier"]
        is_shuffled = setting.options["sampling"] == "shuffled"
        batches = max(1, round(setting.units / setting.batch_size))
        self.expected = setting.units / batches if is_shuffled else setting.batch_size
        self.group_of = {name: self._group(name) for name in self.named}
        names = [*dict.fromkeys(self.group_of.values())]
        bounds = setting.max_norm
        self.bounds: dict[str, float] = (
            {n: bounds[n] for n in names}
            if isinstance(bounds, dict)
            else {n: bounds / sqrt(len(names)) for n in names}
        )
        self.norms: dict[str, list[float]] = {}
        self.shares: dict[str, float] = {}
        self.before: dict[str, float] = {}

    def _group(self, name: str) -> str:
        kind = self.setting.groups
        if kind == "own":
            return "head.*" if name.startswith("head.") else "*"
        layer = name.rpartition(".")[0] or "(model)"
        return {"flat": "all", "per_layer": layer}.get(kind, name)

    def gradients(self, rows: Sequence[int]) -> dict[str, Tensor]:
        x, y = self.setting.x, self.setting.y
        loss = sum(self.setting.value(self.model(x[r : r + 1]), y[r : r + 1], True) for r in rows)
        found = torch.autograd.grad(loss, [*self.named.values()], materialize_grads=True)  # type: ignore[arg-type]
        return dict(zip(self.named, found, strict=True))

    def step(self, units: Sequence[Sequence[int]], moves: bool = True) -> None:
        """One step with these units, each with its rows; it may be counted, but move nothing."""
        weight = WEIGHTS[self.setting.weights]
        totals = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.norms = {name: [] for name in self.bounds}
        for rows in units:
            found = self.gradients(rows)
            for group, bound in self.bounds.items():
                names = [n for n, g in self.group_of.items() if g == group]
                norm = float(torch.cat([found[n].flatten() for n in names]).norm())
                self.norms[group].append(norm)
                for name in names:
                    totals[name] += weight(norm, bound) * found[name]
        self.shares = {
            g: sum(n > bound for n in self.norms[g]) / max(1, len(units))
            for g, bound in self.bounds.items()
        }
        self.before = dict(self.bounds)
        for name, parameter in self.named.items():
            total = totals[name]
            if self.noise:
                total = total + self.deviation() * self.source.normal(total)
            parameter.grad = total / self.expected
        if moves:
            self.optimizer.step()
        if self.setting.is_adaptive:
            self._adapt(len(units))
        self.steps += 1
        self.epochs, self.is_new = self.epochs + self.is_new, False

    def deviation(self) -> float:
        """Of the noise on the sum."""
        noise = self.noise
        if self.setting.is_adaptive:
            noise = (noise**-2 - len(self.bounds) * (2 * 7.0) ** -2) ** -0.5
        return float(noise * sqrt(sum(b**2 for b in self.before.values())))

    def _adapt(self, units: int) -> None:
        counts = [sum(n <= b for n in self.norms[g]) - units / 2 for g, b in self.bounds.items()]
        noisy = torch.tensor(counts, dtype=torch.float64)
        if self.noise:
            noisy += 7.0 * self.source.normal(noisy)
        for count, group in zip(noisy.tolist(), self.bounds, strict=True):
            self.bounds[group] *= exp(-0.3 * (count / self.expected + 0.5 - 0.4))

    def epsilon(self) -> float:
        """By calls of ``dp_accounting``."""
        if not self.steps:
            return 0.0
        if not self.noise:
            return float("inf")
        event: Any = dp_event.GaussianDpEvent(self.noise)
        count, setting = self.epochs, self.setting
        if setting.options["sampling"] == "poisson":
            event = dp_event.PoissonSampledDpEvent(setting.batch_size / setting.units, event)
            count = self.steps
        is_pld = setting.options["accountant"] == "pld"
        accountant: Any = pld.PLDAccountant() if is_pld else rdp.RdpAccountant()
        return float(accountant.compose(event, count).get_epsilon(DELTA))
