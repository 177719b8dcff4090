"""Explicit matrices by plain autograd, and optimizers that step by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.drawn import Fault

IN, CLASSES = 4, 3


class Net(nn.Module):
    """Layers, of which some are used in some passes only: ``k`` says which."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.k, size = 1, random.choice([3, 4])
        self.first = nn.Linear(IN, size)
        self.kinds = random.sample(["norm", "either", "function", "more"], random.randint(0, 2))
        if "norm" in self.kinds:
            self.norm = nn.LayerNorm(size)
        if "either" in self.kinds:
            self.one, self.other = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        if "function" in self.kinds:
            self.table = nn.Parameter(torch.randn(size, size) / size)
        if "more" in self.kinds:
            self.more = nn.Linear(size, size)
        self.last = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for kind in self.kinds:
            if kind == "norm":
                x = self.norm(x)
            elif kind == "either":
                x = (self.one if self.k == 1 else self.other)(x).tanh()
            elif kind == "function":
                x = (x @ self.table.exp()).tanh()
            else:
                x = x + self.more(x).sigmoid()
        return self.last(x)  # type: ignore[no-any-return]


def param_groups(model: nn.Module, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with parameters in the place of their names."""
    return [
        {**{k: v for k, v in group.items() if k != "names"}, "params": params}
        for group in groups
        for params in [[model.get_parameter(name) for name in group["names"]]]
    ]


def near(model: nn.Module, right: nn.Module, bound: float) -> None:
    """Compare all parameters."""
    for (name, found), wanted in zip(model.named_parameters(), right.parameters(), strict=True):
        distance = float((found - wanted).detach().abs().max())
        if not distance <= bound * (1 + float(wanted.detach().abs().max())):
            raise Fault(f"{name} is off by {distance:.3g}")


def diverged(model: nn.Module) -> bool:
    """Whether training grows rounding errors."""
    return any(float(p.detach().abs().max()) > 20.0 for p in model.parameters())


@dataclass
class Found:
    """What a pass gives for a parameter: a gradient, and the curvature of its samples.

    Attributes:
        gradient: That of the loss.
        outer: For each sample, ``[N, o, o]``: ``Jᵀ H J`` of a layer's output (or of a vector).
        inner: For each sample, ``[N, i, i]``: ``a aᵀ`` of a layer's input; ones for a vector.
        weight: Of these samples in averages: what the loss multiplies their terms by.
    """

    gradient: Tensor
    outer: Tensor | None = None
    inner: Tensor | None = None
    weight: float = 1.0


def loss_hessians(lossfunc: Any, out: Tensor) -> Tensor:
    """Of each sample's own term of the loss, ``[N, C, C]``."""
    eye = torch.eye(CLASSES).expand(len(out), -1, -1)
    is_mean = lossfunc.reduction == "mean"
    if isinstance(lossfunc, nn.MSELoss):
        return 2 * eye / (out.numel() if is_mean else 1)
    chances = out.softmax(1)
    found = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
    return found / (len(out) if is_mean else 1)


def look(model: Net, lossfunc: Any, x: Tensor, y: Tensor) -> dict[str, Found]:
    """Gradients, and the curvature where there are Kronecker factors."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[module] = inputs[0].detach(), output

    handles = [m.register_forward_hook(hook) for m in model.modules() if type(m) is nn.Linear]
    out = model(x)
    for handle in handles:
        handle.remove()
    hessians = loss_hessians(lossfunc, out.detach())
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    options: Any = {"retain_graph": True, "allow_unused": True}
    gradients = torch.autograd.grad(lossfunc(out, y), [*named.values()], **options)
    found = {}
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        if gradient is None:
            continue
        weight = 1.0 if lossfunc.reduction == "mean" else len(x)
        found[name] = one = Found(gradient, weight=weight)
        layer = model.get_submodule(name.rpartition(".")[0])
        if name == "table":
            continue
        if isinstance(layer, nn.Linear):
            a, z = seen[layer]
            rows = [torch.autograd.grad(out[:, c].sum(), z, **options)[0] for c in range(CLASSES)]
            if parameter.dim() == 2:
                one.inner = a.unsqueeze(2) * a.unsqueeze(1)
        else:
            each = [
                [torch.autograd.grad(out[n, c], parameter, **options)[0] for n in range(len(x))]
                for c in range(CLASSES)
            ]
            rows = [torch.stack(row) for row in each]
        jacobian = torch.stack(rows, 1)  # [N, C, o]
        one.outer = jacobian.mT @ hessians @ jacobian
        if one.inner is None:
            one.inner = torch.ones(len(x), 1, 1)
    return found


def as_one(passes: Sequence[tuple[dict[str, Found], int]], is_mean: bool) -> dict[str, Found]:
    """Passes of so many samples each, as one."""
    total = sum(count for _, count in passes)
    found: dict[str, Found] = {}
    for each, count in passes:
        share = count / total if is_mean else 1.0
        for name, one in each.items():
            new = Found(share * one.gradient, weight=share * one.weight)
            if one.outer is not None and one.inner is not None:
                new.outer, new.inner = share * one.outer, one.inner
            if name in found:
                old = found[name]
                new.gradient = old.gradient + new.gradient
                new.weight += old.weight
                if new.outer is not None and old.outer is not None:
                    new.outer = torch.cat([old.outer, new.outer])
                    new.inner = torch.cat([old.inner, one.inner])  # type: ignore[list-item]
            found[name] = new
    return found


@dataclass
class Curvature:
    """What a factored optimizer knows of a parameter."""

    outer: Tensor
    inner: Tensor
    count: int = 1
    inverted: Any = None  # the damped matrix that is solved with, or vectors and values
    corrected: int = 0


@dataclass
class Plain:
    """Steps of K-FAC or EKFAC by explicit matrices.

    Attributes:
        model: A plain copy of the net.
        groups: Settings of groups, and names of their parameters.
        options: Arguments of the optimizer.
        basis_of: The eigenvectors of a parameter that the optimizer has found, ``[P, P]``; they
            are not unique, so they are checked and taken over.
    """

    model: Net
    groups: list[dict[str, Any]]
    options: dict[str, Any]
    is_corrected: bool
    basis_of: Callable[[str], Tensor]
    damping: float = 0.1
    steps: int = 0
    known: dict[str, Curvature] = field(default_factory=dict)
    momenta: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, list[Any]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def step(self, found: dict[str, Found], fresh: bool = True) -> None:
        """One step; ``gradients`` are there."""
        options = self.options
        chosen = {n for g in self.groups if g["method"] != "adam" for n in g["names"]}
        if fresh and self.steps % options["factors_every"] == 0:
            for name, one in found.items():
                if one.outer is not None and name in chosen:
                    self._fold(name, one)
        is_due = self.steps % options["inverses_every"] == 0
        for name, one in self.known.items():
            if is_due or one.inverted is None:
                self._invert(name, one)
        with torch.no_grad():
            self._move()
        self.steps += 1

    def _fold(self, name: str, one: Found) -> None:
        assert one.outer is not None
        assert one.inner is not None
        decay = self.options["factor_decay"]
        outer, inner = one.outer.sum(0), one.inner.mean(0)
        old = self.known.get(name)
        if old is None:
            self.known[name] = Curvature(outer, inner)
            return
        if self.is_corrected:
            vectors, values = old.inverted
            old.corrected += 1
            keep = min(1 - 1 / old.corrected, decay)
            dense = sum(map(torch.kron, one.outer, one.inner))
            old.inverted = vectors, keep * values + (1 - keep) * _diagonal(vectors, dense)
        old.count += 1
        keep = min(1 - 1 / old.count, decay)
        old.outer = keep * old.outer + (1 - keep) * outer
        old.inner = keep * old.inner + (1 - keep) * inner

    def _invert(self, name: str, one: Curvature) -> None:
        product = torch.kron(one.outer, one.inner)
        eye, damping, split = torch.eye(len(product)), self.damping, self.options.get("split")
        if self.is_corrected:
            vectors = self.basis_of(name)
            turned = vectors.T @ product @ vectors
            off = (turned - turned.diagonal().diag()).abs().max()
            if (
                off > 1e-10 * (1 + turned.abs().max())
                or (vectors.T @ vectors - eye).abs().max() > 1e-10
            ):
                raise Fault(f"the eigenvectors of {name} are wrong")
            before = product
            if one.inverted is not None:
                old, values = one.inverted
                before = old @ values.diag() @ old.T
            one.inverted = vectors, _diagonal(vectors, before)
        elif split == "exact":
            one.inverted = product
        elif one.inner.shape == (1, 1):
            one.inverted = product + damping * eye
        else:
            means = [m.diagonal().mean() for m in (one.outer, one.inner)]
            pi = (means[1] / means[0]).sqrt() if split == "pi" and min(means) > 0 else 1.0
            root = damping**0.5
            factors = (one.outer, root / pi), (one.inner, root * pi)
            one.inverted = torch.kron(*(m + shift * torch.eye(len(m)) for m, shift in factors))

    def _solved(self, name: str) -> Tensor | None:
        one = self.known.get(name)
        if one is None:
            return None
        gradient = self.gradients[name]
        matrix = one.inverted
        if self.is_corrected:
            matrix = matrix[0] @ matrix[1].diag() @ matrix[0].T
        if self.is_corrected or self.options.get("split") == "exact":
            matrix = matrix + self.damping * torch.eye(len(matrix))
        return torch.linalg.solve(matrix, gradient.flatten()).reshape(gradient.shape)

    def times(self, name: str, vector: Tensor) -> Tensor:
        """``F`` times a vector."""
        one = self.known.get(name)
        if one is None:
            return torch.zeros_like(vector)
        matrix = torch.kron(one.outer, one.inner)
        if self.is_corrected:
            matrix = one.inverted[0] @ one.inverted[1].diag() @ one.inverted[0].T
        return (matrix @ vector.flatten()).reshape(vector.shape)

    def _move(self) -> None:
        named = dict(self.model.named_parameters())
        directions: dict[str, Tensor] = {}
        norm = 0.0
        for group in self.groups:
            for name in group["names"]:
                if name not in self.gradients or group["method"] == "adam":
                    continue
                solved = self._solved(name)
                if solved is not None:
                    directions[name] = solved
                    norm += group["lr"] ** 2 * float((solved * self.gradients[name]).sum())
        clip = self.options.get("kl_clip")
        scale = (clip / norm) ** 0.5 if clip is not None and norm > clip else 1.0
        for group in self.groups:
            for name in group["names"]:
                if name not in self.gradients:
                    continue
                named[name].mul_(1 - group["lr"] * group["weight_decay"])
                if name not in directions:
                    adam(group, self.moments, name, named[name], self.gradients[name])
                    continue
                step = scale * directions[name]
                if group["momentum"]:
                    if name in self.momenta:
                        step = group["momentum"] * self.momenta[name] + step
                    self.momenta[name] = step
                named[name].sub_(group["lr"] * step)


def adam(group: Any, moments: dict[str, Any], name: str, parameter: Tensor, grad: Tensor) -> None:
    """A step of AdamW; weights have decayed already."""
    first, second, count = moments.get(name, (torch.zeros_like(grad), torch.zeros_like(grad), 0))
    count += 1
    first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
    moments[name] = first, second, count
    root = (second / (1 - 0.999**count)).sqrt() + group["adam_eps"]
    parameter.sub_(group["lr"] * group["adam_scale"] * first / (1 - 0.9**count) / root)


def _diagonal(vectors: Tensor, dense: Tensor) -> Tensor:
    return torch.einsum("ij,ik,kj->j", vectors, dense, vectors)
