"""Nets of tokens that are drawn, and the gradients of each token by plain autograd.

A token's gradient is that of a copy of the parameter that its position alone uses. So the truth is
the same net, written as functions of one copy of each parameter for each sample and position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad, BatchL2Grad, GradInner, ProjectedGrad
from backpack_firstorder import Projection, SampleGradients

WORDS = 7
Copies = Callable[[str], Tensor]


def _linear(x: Tensor, get: Copies, name: str) -> Tensor:
    out = torch.einsum("ntoi,nti->nto", get(f"{name}.weight"), x)
    return out + get(f"{name}.bias")


class Part(nn.Module):
    """A part of a net: its module, and the same by copies."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        raise NotImplementedError


class Dense(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        return _linear(x, get, "a").tanh()


class Twice(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(self.a(x).sigmoid())

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        return x + _linear(_linear(x, get, "a").sigmoid(), get, "a")


class Gated(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x).sigmoid()

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        return _linear(x, get, "a") * _linear(x, get, "b").sigmoid()


class Norm(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.n(x)

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        plain = nn.functional.layer_norm(x, x.shape[-1:])
        return plain * get("n.weight") + get("n.bias")


class Mixing(Part):
    """Positions look at each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(self.a(x), x)

    def mixed(self, q: Tensor, x: Tensor) -> Tensor:
        return (q @ x.mT / math.sqrt(x.shape[-1])).softmax(-1) @ x

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        return x + self.mixed(_linear(x, get, "a"), x)


class Conv(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(x.mT).mT.tanh()

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)  # [N, T, I, 3]
        out = torch.einsum("ntoik,ntik->nto", get("c.weight"), padded)
        return (out + get("c.bias")).tanh()


class Recurrent(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.r(x)[0]

    def by_copies(self, x: Tensor, get: Copies) -> Tensor:
        names = ("weight_ih_l0", "bias_ih_l0", "weight_hh_l0", "bias_hh_l0")
        ih, bias, hh, other = (get(f"r.{name}") for name in names)
        hidden, states = x.new_zeros(x.shape[0], x.shape[2]), []
        for t in range(x.shape[1]):
            seen = torch.einsum("noi,ni->no", ih[:, t], x[:, t]) + bias[:, t] + other[:, t]
            hidden = (seen + torch.einsum("noi,ni->no", hh[:, t], hidden)).tanh()
            states.append(hidden)
        return torch.stack(states, 1)


PARTS: dict[str, Callable[[int], Part]] = {
    "dense": lambda d: Dense(a=nn.Linear(d, d)),
    "twice": lambda d: Twice(a=nn.Linear(d, d)),
    "gated": lambda d: Gated(a=nn.Linear(d, d), b=nn.Linear(d, d)),
    "norm": lambda d: Norm(n=nn.LayerNorm(d)),
    "mixing": lambda d: Mixing(a=nn.Linear(d, d)),
    "conv": lambda d: Conv(c=nn.Conv1d(d, d, 3, padding=1)),
    "recurrent": lambda d: Recurrent(r=nn.RNN(d, d, batch_first=True)),
}


class Net(nn.Module):
    """A table, parts, and a head, which may be tied to the table."""

    def __init__(self, size: int, parts: list[Part], is_tied: bool) -> None:
        super().__init__()
        self.table, self.parts = nn.Embedding(WORDS, size), nn.ModuleList(parts)
        self.head = nn.Linear(size, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for part in self.parts:
            x = part(x)
        return self.head(x).mT  # type: ignore[no-any-return]

    def by_copies(self, words: Tensor, copies: dict[str, Tensor]) -> Tensor:
        """The same, with copies ``[N, T, *θ]`` of every parameter."""
        table = copies["table.weight"]
        index = words[..., None, None].expand(*words.shape, 1, table.shape[-1])
        x = table.gather(2, index).squeeze(2)
        for number, part in enumerate(self.parts):
            x = part.by_copies(x, lambda name, n=number: copies[f"parts.{n}.{name}"])  # type: ignore[misc]
        head = copies.get("head.weight", table)
        return torch.einsum("ntoi,nti->not", head, x)


class Tokens:
    """A net, a loss and data.

    Attributes:
        random: What is drawn from.
        told: What was drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        torch.manual_seed(seed)
        draw, self.size = self.random, self.random.choice([3, 4])
        names = [draw.choice([*PARTS]) for _ in range(draw.randint(0, 3))]
        self.net = Net(self.size, [PARTS[name](self.size) for name in names], draw.random() < 0.4)
        parameters = [*self.net.parameters()]
        for parameter in parameters[:-1]:
            parameter.requires_grad_(draw.random() < 0.85)
        self.samples, self.length = draw.choice([1, 2, 4]), draw.choice([1, 2, 5])
        shape = self.samples, self.length
        self.words, self.target = torch.randint(WORDS, shape), torch.randint(WORDS, shape)
        self.target[torch.rand(shape) < 0.2] = -100
        self.target[0, 0] = 1
        reduction = draw.choice(["mean", "sum"])
        self.lossfunc = nn.CrossEntropyLoss(reduction=reduction)
        self.told = [seed, names, shape, reduction, draw.choice(["sample", "token"])]
        self.per: Any = self.told[-1]

    def truth(self) -> dict[str, Tensor]:
        """Gradients of tokens, ``[N, T, *θ]``, by parameter."""
        named = {n: p.detach() for n, p in self.net.named_parameters() if p.requires_grad}
        copies = {
            n: p.detach().expand(*self.words.shape, *p.shape).clone().requires_grad_(n in named)
            for n, p in self.net.named_parameters()
        }
        self.lossfunc(self.net.by_copies(self.words, copies), self.target).backward()
        found = {name: copies[name].grad for name in named}
        return {n: torch.zeros_like(copies[n]) if g is None else g for n, g in found.items()}

    def fault(self) -> str:
        """What is wrong with individual gradients, by sample or by token."""
        right = self.truth()
        if self.per == "sample":
            right = {name: rows.sum(1) for name, rows in right.items()}
        model, lossfunc = extend(self.net), extend(self.lossfunc)
        queries: dict[str, Any] = {n: torch.randn(2, *r.shape[-p.dim():]) for (n, r), p in zip(
            right.items(), [p for p in model.parameters() if p.requires_grad], strict=True
        )}  # fmt: skip
        if self.random.random() < 0.3:
            queries = {n: SampleGradients.from_dense(q).low_rank(9) for n, q in queries.items()}
        kinds: Any = self.random.choice(["kronecker", "sparse", "rademacher", "gaussian"])
        form: Any = self.random.choice([None, "positions", "formed"])
        self.told += [kinds, form]
        scores = GradInner(queries, per=self.per, form=form)
        every: dict[str, Any] = {
            "BatchGrad": BatchGrad(per=self.per),
            "product": BatchGrad(per=self.per, form="product", savefield="product"),
            "BatchL2Grad": BatchL2Grad(per=self.per),
            "GradInner": scores,
            "ProjectedGrad": ProjectedGrad(9, kinds, 3, per=self.per),
        }
        asked = self.random.sample([*every], self.random.randint(1, len(every)))
        self.told += [asked]
        with backpack(*[every[name] for name in asked]):
            lossfunc(model(self.words), self.target).backward()
        lead, total = (
            (self.words.shape if self.per == "token" else (self.samples,)),
            torch.zeros(()),
        )
        for path, rows in right.items():
            parameter = model.get_parameter(path)
            each = SampleGradients.from_dense(rows.reshape(-1, *parameter.shape))
            wanted = {
                "BatchGrad": rows,
                "product": rows,
                "BatchL2Grad": each.norm().square().reshape(lead),
                "GradInner": each.inner(queries[path]).reshape(*lead, 2),
                "ProjectedGrad": each.project(Projection(9, kinds, 3), path).reshape(*lead, 9),
            }
            total = total + wanted["GradInner"]
            for name in asked:
                found = getattr(parameter, every[name].savefield)
                if name == "product":
                    found = found.dense().reshape(rows.shape)
                if found.shape != wanted[name].shape:
                    return f"{self.told}: {name} of {path} has the shape {[*found.shape]}"
                if not torch.allclose(found, wanted[name], rtol=1e-8, atol=1e-10):
                    return f"{self.told}: {name} of {path} is wrong"
        if "GradInner" in asked and not torch.allclose(scores.scores, total):  # type: ignore[arg-type]
            return f"{self.told}: the scores are wrong"
        return ""


def fault_of(seed: int) -> str:
    """What is wrong; ``refused`` if something is not covered."""
    given = Tokens(seed)
    try:
        return given.fault()
    except UnsupportedError as error:
        given.told.append(str(error))
        return "refused"
