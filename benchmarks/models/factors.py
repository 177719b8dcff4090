"""Kronecker factors by their definition: what modules receive, and what their outputs change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core.testing.oracle import gradients
from benchmarks.models.oracle import Oracle


class Owner:
    """One module that owns a weight, and what it received and returned."""

    def __init__(self, module: Module) -> None:
        """Store the module."""
        self.module = module
        self.calls: list[tuple[Tensor, Tensor]] = []

    def note(self, module: Module, args: Any, output: Tensor) -> None:
        """The forward hook."""
        self.calls.append((args[0], output))

    @property
    def channel(self) -> int:
        """The axis of the outputs."""
        return 1 if isinstance(self.module, nn.Conv2d) else -1

    def inputs(self, x: Tensor) -> Tensor:
        """What the weight multiplies, one row for each position. Shape ``[S, I]``."""
        module = self.module
        if isinstance(module, nn.Embedding):
            return nn.functional.one_hot(x.flatten(), module.num_embeddings).double()
        if isinstance(module, nn.Conv2d):
            unfold: Any = nn.functional.unfold
            patches: Tensor = unfold(
                x, module.kernel_size, module.dilation, module.padding, module.stride
            )
            return patches.transpose(1, 2).flatten(0, 1)
        return x.reshape(-1, x.shape[-1])


def owners(oracle: Oracle) -> dict[int, Owner]:
    """The modules of weights that one module alone owns, by the number of the parameter."""
    found: dict[int, list[Module]] = {}
    numbers = {id(p): index for index, p in enumerate(oracle.parameters)}
    for module in oracle.model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in numbers:
                known = found.setdefault(numbers[id(parameter)], [])
                known.append(module if name == "weight" else nn.Identity())
    return {
        index: Owner(modules[0])
        for index, modules in found.items()
        if len(modules) == 1 and _is_known(modules[0])
    }


def _is_known(module: Module) -> bool:
    name = type(module).__name__
    is_plain = isinstance(module, nn.Conv2d) and module.groups == 1
    return is_plain or name in ("Linear", "Conv1D", "FalconLinear", "Embedding")


@contextmanager
def _noting(known: list[Owner]) -> Iterator[None]:
    handles = [owner.module.register_forward_hook(owner.note) for owner in known]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def factors(oracle: Oracle) -> dict[int, tuple[Tensor, Tensor]]:
    """``B = Σ_n G_nᵀ H_n G_n`` and ``A = 1/N Σ_n Σ_s x xᵀ`` of weights that are used once.

    ``G_n`` is the derivative of the sample's output in something that is added to the module's
    output at all positions.
    """
    known = owners(oracle)
    totals: dict[int, tuple[Tensor, Tensor]] = {}
    for n in oracle.samples:
        for owner in known.values():
            owner.calls.clear()
        with _noting([*known.values()]):
            output = oracle.model(**{name: x[n : n + 1] for name, x in oracle.inputs.items()})
        used = {index: owner for index, owner in known.items() if len(owner.calls) == 1}
        outputs = [owner.calls[0][1] for owner in used.values()]
        size = output.numel()
        eye = torch.eye(size, dtype=output.dtype).reshape(size, *output.shape)
        columns = [gradients(output, outputs, column) for column in eye] if used else []
        for (index, owner), slopes in zip(used.items(), zip(*columns, strict=True), strict=True):
            moved = [slope.movedim(owner.channel, -1) for slope in slopes]
            change = torch.stack([m.reshape(-1, m.shape[-1]).sum(0) for m in moved]).double()
            x = owner.inputs(owner.calls[0][0].detach()).double()
            new = change.T @ oracle.hessians[n].double() @ change, x.T @ x / len(oracle.samples)
            old = totals.get(index)
            totals[index] = new if old is None else (old[0] + new[0], old[1] + new[1])
    return totals
