"""Nets, losses and data sets whose matrices fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from backpack_secondorder.over_data import GGN, DataOperator, Hessian

SIZES = (2, 3, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(4, 3))


Given = tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross entropy": nn.CrossEntropyLoss,
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
    "squares": nn.MSELoss,
    "sum of squares": lambda: nn.MSELoss(reduction="sum"),
    "binary": nn.BCEWithLogitsLoss,
}


def make(net: Callable[[], nn.Module] = mlp, loss: str = "cross entropy") -> Given:
    torch.manual_seed(0)
    model, lossfunc = net(), LOSSES[loss]()
    shape = (3,) if net is mlp else (1, 3)
    loader = []
    for size in SIZES:
        target = torch.randint(0, 3, (size,))
        if not isinstance(lossfunc, nn.CrossEntropyLoss):
            target = torch.rand(size, 3)
        elif size == 3:
            target[1] = -100
        loader.append((torch.randn(size, *shape), target))
    return model, lossfunc, loader


def whole(loader: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def function_of(model: nn.Module) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Output as a function of a flat vector of parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in parameters]

    def run(flat: Tensor, inputs: Tensor) -> Tensor:
        parts = [f.reshape(p.shape) for f, p in zip(flat.split(sizes), parameters, strict=True)]
        result: Tensor = functional_call(model, dict(zip(names, parts, strict=True)), (inputs,))
        return result

    return run, torch.cat([p.detach().flatten() for p in parameters])


def dense_ggn(given: Given) -> Tensor:
    model, lossfunc, loader = given
    inputs, target = whole(loader)
    run, flat = function_of(model)
    jacobian = torch.autograd.functional.jacobian(lambda f: run(f, inputs), flat)
    jacobian = jacobian.reshape(-1, len(flat))
    output = run(flat, inputs)
    hessian = torch.autograd.functional.hessian(lambda z: lossfunc(z, target), output)
    return jacobian.T @ hessian.reshape(len(jacobian), -1) @ jacobian


def dense_hessian(given: Given) -> Tensor:
    model, lossfunc, loader = given
    inputs, target = whole(loader)
    run, flat = function_of(model)
    return torch.autograd.functional.hessian(lambda f: lossfunc(run(f, inputs), target), flat)


def by_blocks(matrix: Tensor, model: nn.Module) -> Tensor:
    sizes = [p.numel() for p in model.parameters()]
    blocks, start = [], 0
    for size in sizes:
        blocks.append(matrix[start : start + size, start : start + size])
        start += size
    return torch.block_diag(*blocks)


KINDS: dict[str, tuple[type[DataOperator], Callable[[Given], Tensor]]] = {
    "ggn": (GGN, dense_ggn),
    "hessian": (Hessian, dense_hessian),
}
