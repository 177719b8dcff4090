"""Small nets and losses, and plain formulas for steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import EKFAC, KFLR

KINDS = ("mlp", "conv", "table")


def net(kind: str = "mlp") -> tuple[nn.Module, Tensor, Tensor]:
    """A net with the same start every time, and seven samples of three classes."""
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
        return model, torch.randn(7, 4), y
    if kind == "conv":
        body = (nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        return nn.Sequential(*body), torch.randn(7, 2, 4, 4), y
    table = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 3, bias=False))
    return table, torch.randint(0, 6, (7, 2)), y


def problem(
    kind: str = "mlp", reduction: str = "mean"
) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model, x, y = net(kind)
    return extend(model), extend(nn.CrossEntropyLoss(reduction=reduction)), x, y


def matrices(model: nn.Module, lossfunc: Any, x: Tensor, y: Tensor, extension: Any) -> list[Any]:
    """What an extension stores for each parameter; ``.grad`` is that of this batch."""
    model.zero_grad()
    with backpack(extension):
        lossfunc(model(x), y).backward()
    return [getattr(p, extension.savefield) for p in model.parameters()]


def factors(model: nn.Module, lossfunc: Any, x: Tensor, y: Tensor) -> list[Any]:
    return matrices(model, lossfunc, x, y, KFLR("expand"))


def corrected(model: nn.Module, lossfunc: Any, x: Tensor, y: Tensor, basis: Any) -> list[Any]:
    return matrices(model, lossfunc, x, y, EKFAC(None, "expand", basis=basis))


def dense_factor(factor: Tensor) -> Tensor:
    return torch.diag(factor) if factor.dim() == 1 else factor


def damped_product(found: Any, damping: float, split: str) -> Tensor:
    """``F + damping · I`` in the parameter's order, ``[P, P]``, by plain Kronecker products."""
    groups = found.groups
    blocks = []
    for number in range(groups):
        mats = [dense_factor(f[number] if groups > 1 else f) for f in found]
        eye = [torch.eye(len(m)) for m in mats]
        if len(mats) == 1:
            blocks.append(mats[0] + damping * eye[0])
        elif split == "exact":
            whole = torch.kron(*mats)
            blocks.append(whole + damping * torch.eye(len(whole)))
        else:
            traces = [m.trace() / len(m) for m in mats]
            pi = (traces[1] / traces[0]).sqrt() if split == "pi" else torch.tensor(1.0)
            root = damping**0.5
            blocks.append(torch.kron(mats[0] + root / pi * eye[0], mats[1] + root * pi * eye[1]))
    dense: Tensor = found.order.matrix(torch.block_diag(*blocks))
    return dense


def solved(matrix: Tensor, gradient: Tensor) -> Tensor:
    return torch.linalg.solve(matrix, gradient.flatten()).reshape(gradient.shape)


def train(
    optimizer: Any, model: nn.Module, lossfunc: Any, x: Tensor, y: Tensor, steps: int = 1
) -> list[float]:
    """Losses before each step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with optimizer.curvature():
            loss = lossfunc(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def closure_of(
    optimizer: Any, model: nn.Module, lossfunc: Any, x: Tensor, y: Tensor
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = lossfunc(model(x), y)
        loss.backward()
        return loss

    return closure


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_near(first: Tensor, second: Tensor, bound: float = 1e-10) -> None:
    assert first.shape == second.shape
    assert float((first - second).abs().max()) <= bound * max(1.0, float(second.abs().max()))
