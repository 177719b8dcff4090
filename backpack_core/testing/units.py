"""Calls of modules that a rule differentiates as a whole, as the oracle sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.plugins.registry import registry
from backpack_core.record.structure import iter_tensors, map_tensors
from backpack_core.record.switch import disable
from backpack_core.testing import oracle
from backpack_core.testing.cases import FORWARD, seeded


@dataclass(eq=False)
class Unit:
    """One call of a module that a rule differentiates as a whole.

    Attributes:
        module: The module.
        args: What it received, with the graph behind.
        kwargs: Keyword arguments.
        outputs: What it returned, in the same graph.
    """

    module: Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that depend on parameters."""
        return [t for t in iter_tensors((self.args, dict(self.kwargs))) if t.requires_grad]

    def curvature(self, x: Tensor, gradients: Iterable[Tensor]) -> Tensor:
        """``Σ_o g_o ∂²f_o/∂x²`` of one input, sample by sample. Shape ``[N, D, D]`` (flat).

        Args:
            x: The input; all others are held fixed.
            gradients: ``g``, one for each output.
        """
        leaf = x.detach().requires_grad_()

        def passed(tensor: Tensor) -> Tensor:
            return (leaf if tensor is x else tensor.detach()).clone()

        args, kwargs = map_tensors((self.args, dict(self.kwargs)), passed)
        with disable():
            outputs = iter_tensors(seeded(lambda: self.module(*args, **kwargs), FORWARD))
        pairs = zip(outputs, gradients, strict=True)
        value = torch.stack([(y * g).sum() for y, g in pairs if y.is_floating_point()]).sum()
        return own_blocks(oracle.hessian(value, leaf), x.dim()).detach()


def own_blocks(jacobian: Tensor, rank: int) -> Tensor:
    """The blocks of each sample with itself: ``[N, *out, N, *in]`` to ``[N, D_out, D_in]``.

    Args:
        jacobian: The Jacobian over the whole batch.
        rank: Number of axes of the output, including the sample axis.
    """
    samples = len(jacobian)
    flat = jacobian.reshape(samples, jacobian.shape[1:rank].numel(), samples, -1)
    return torch.stack([flat[n, :, n] for n in range(samples)])


def wholes(module: Module) -> Iterator[Module]:
    """The outermost modules with a rule of their own."""
    resolved = registry.resolve(module)
    if resolved.rule.transparent:
        for child in module.children():
            yield from wholes(child)
    else:
        yield module
