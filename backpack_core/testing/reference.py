"""Everything the kit knows of a small net, by autograd in float64: individual gradients, curvature.

Conventions are those of the documentation: a mean loss carries its ``1/N``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core.context import disable
from backpack_core.testing import oracle
from backpack_core.testing.cases import FORWARD, Arguments, seeded
from backpack_core.testing.network import CLASSES, fixed_mixing
from backpack_core.testing.quantities import Quantity


@dataclass(eq=False)
class Reference:
    """A net, data, and a loss, with derivatives of single samples.

    Attributes:
        net: The net, ``arguments → [N, C]``.
        arguments: Its inputs.
        loss: ``[N, C] →`` a number, a sum over samples up to a factor.
        indices: Which samples a quantity is restricted to; ``None`` for all.
    """

    net: Module
    arguments: Arguments
    loss: Module
    indices: tuple[int, ...] | None = None
    _hessians: dict[str, Tensor] = field(default_factory=dict)
    _expected: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output and loss, not recorded."""
        with disable():
            output = seeded(
                lambda: self.net(*self.arguments.args, **self.arguments.kwargs), FORWARD
            )
            return output, self.loss(output)

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        return self.forward()

    @cached_property
    def _jacobians(self) -> dict[str, Tensor]:
        return oracle.jacobians(self._graph[0], self.parameters)

    @cached_property
    def _at_output(self) -> tuple[Tensor, Tensor]:
        """Gradient ``[N, C]`` and Hessians ``[N, C, C]`` of the loss in the net's output."""
        output = self._graph[0].detach().requires_grad_()
        with disable():
            value = self.loss(output)
        (gradient,) = oracle.gradients(value, [output], again=True)
        full = torch.zeros(*output.shape, *output.shape, dtype=output.dtype)
        if gradient.requires_grad:
            full = oracle.jacobians(gradient, {0: output})[0]
        blocks = torch.stack([full[n, :, n] for n in range(len(output))])
        return gradient.detach(), blocks

    def _chosen(self, tensor: Tensor, axis: int = 0) -> Tensor:
        if self.indices is None:
            return tensor
        return tensor.index_select(axis, torch.tensor(self.indices))

    @property
    def samples(self) -> int:
        """Size of the whole batch, over which a mean is taken."""
        return len(self._graph[0])

    def restricted(self, indices: tuple[int, ...]) -> Reference:
        """The same for some samples."""
        return Reference(self.net, self.arguments, self.loss, indices)

    def trained(self, names: Iterable[str]) -> Reference:
        """The same where only some parameters are trained."""
        other = copy.copy(self)
        other.parameters = {name: self.parameters[name] for name in names}
        return other

    def expected(self, quantity: Quantity, name: str) -> Tensor:
        """A quantity of one parameter, computed once."""
        key = (quantity.expected, name, tuple(self.parameters))
        if key not in self._expected:
            self._expected[key] = quantity.expected(self, name)
        return self._expected[key]

    def jacobian(self, name: str) -> Tensor:
        """Of the net's output in a parameter. Shape ``[N, C, *θ]``."""
        return self._chosen(self._jacobians[name])

    def gradients(self, name: str) -> Tensor:
        """Individual gradients, reduction included. Shape ``[N, *θ]``."""
        gradient = self._chosen(self._at_output[0])
        return torch.einsum("nc,nc...->n...", gradient, self.jacobian(name))

    def roots(self, name: str, sampled: int | None = None) -> Tensor:
        """Columns whose outer products are the GGN of a sample. Shape ``[V, N, *θ]``.

        Args:
            name: The parameter.
            sampled: Number of the kit's reproducible Monte-Carlo samples; ``None`` for exact.
        """
        blocks = self._chosen(self._at_output[1])
        if sampled is None:
            values, vectors = torch.linalg.eigh(blocks)
            columns = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)).permute(2, 0, 1)
        else:
            columns = self._sampled_columns(sampled)
        return torch.einsum("vnc,nc...->vn...", columns, self.jacobian(name))

    def _sampled_columns(self, samples: int) -> Tensor:
        """``Σ_c mixing_c √p_c (e_c - p)``, as the kit's loss draws them."""
        p = self._chosen(self._graph[0].detach()).softmax(1)
        whole = (p - p.square()).sum(1)  # trace of diag p - p pᵀ, which the loss scales
        factor = self._chosen(self._at_output[1]).diagonal(dim1=1, dim2=2).sum(1) / whole
        weighted = fixed_mixing(samples, CLASSES).unsqueeze(1) * p.sqrt()
        columns = weighted - weighted.sum(2, keepdim=True) * p
        return columns * factor.sqrt().unsqueeze(1)

    def ggn(self, name: str) -> Tensor:
        """Generalised Gauss-Newton block of each sample. Shape ``[N, θ, θ]`` (flat)."""
        root = self.roots(name).flatten(2)
        return torch.einsum("vni,vnj->nij", root, root)

    def hessian(self, name: str) -> Tensor:
        """Hessian block of each sample's loss. Shape ``[N, θ, θ]`` (flat)."""
        if name not in self._hessians:
            output, _ = self._graph
            theta = self.parameters[name]
            blocks = []
            for n in range(len(output)):
                # The loss of one sample: the other outputs held fixed.
                kept = torch.zeros_like(output)
                kept[n] = 1.0
                with disable():
                    value = self.loss(kept * output + (1 - kept) * output.detach())
                blocks.append(oracle.hessian(value, theta).reshape(theta.numel(), -1))
            self._hessians[name] = torch.stack(blocks).detach()
        return self._chosen(self._hessians[name])
