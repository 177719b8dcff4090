"""What is right, by plain autograd: a loop over samples, explicit Jacobians of every output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack_core.testing.oracle import gradients, hessian
from benchmarks.models.trial import Net


class Oracle:
    """The derivatives of one model at every trained parameter.

    Attributes:
        names: Of the trained parameters that the output depends on; others have no gradient either.
        parameters: These, of a copy of the model.
        jacobians: For each sample and parameter, ``[D, *θ]``.
        hessians: Of each sample's loss in the output, ``[D, D]``.
        slopes: For each sample, the gradient of its loss in its output, ``[D]``.
    """

    def __init__(
        self, model: Net, inputs: dict[str, Tensor], lossfunc: Module, target: Tensor
    ) -> None:
        """Differentiate.

        Args:
            model: The model, which nobody extends: another one, since copies share closures.
            inputs: Its arguments.
            lossfunc: A sum over samples.
            target: What it compares with.
        """
        self.model = model
        self.inputs, self.lossfunc, self.target = inputs, lossfunc, target
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(
            self.model(**inputs).sum(), [*trained.values()], allow_unused=True
        )
        self.names = [n for n, g in zip(trained, found, strict=True) if g is not None]
        self.parameters = [trained[name] for name in self.names]
        self.jacobians: list[list[Tensor]] = []
        self.hessians: list[Tensor] = []
        self.slopes: list[Tensor] = []
        for n in range(len(target)):
            self._differentiate(n)

    def _differentiate(self, n: int) -> None:
        output = self.model(**{name: x[n : n + 1] for name, x in self.inputs.items()})
        leaf = output.detach().requires_grad_()
        loss = self.lossfunc(leaf, self.target[n : n + 1])
        size = output.numel()
        self.hessians.append(hessian(loss, leaf).detach().reshape(size, size).to(output.dtype))
        (slope,) = torch.autograd.grad(self.lossfunc(leaf, self.target[n : n + 1]), leaf)
        self.slopes.append(slope.flatten())
        eye = torch.eye(size, dtype=output.dtype).reshape(size, *output.shape)
        columns = [gradients(output, self.parameters, column) for column in eye]
        self.jacobians.append([torch.stack(found) for found in zip(*columns, strict=True)])

    @property
    def samples(self) -> range:
        """One number for each."""
        return range(len(self.jacobians))

    def individual_gradients(self) -> list[Tensor]:
        """Of each sample's loss. Shape ``[N, *θ]`` for each parameter."""
        return self._per_parameter(
            lambda jac, n: torch.tensordot(self.slopes[n].to(jac.dtype), jac, 1)
        )

    def ggn_diagonals(self) -> list[Tensor]:
        """Of the generalised Gauss-Newton matrix. Shape ``[*θ]``."""
        blocks = self._per_parameter(
            lambda jac, n: torch.einsum(
                "c...,cd,d...->...", jac, self.hessians[n].to(jac.dtype), jac
            )
        )
        return [block.sum(0) for block in blocks]

    def sampled_diagonals(self, roots: Tensor) -> list[Tensor]:
        """``Σ_v Σ_n (J_nᵀ S[v, n])²`` for the columns that were drawn. Shape ``[*θ]``.

        Args:
            roots: Shape ``[V, N, *out]``.
        """
        flat = roots.reshape(*roots.shape[:2], -1)
        columns = self._per_parameter(
            lambda jac, n: torch.tensordot(flat[:, n].to(jac.dtype), jac, 1)
        )
        return [column.square().sum((0, 1)) for column in columns]

    def ggn_products(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The block of each parameter times a vector. Shape ``[*θ]``."""
        found = []
        for index, vector in enumerate(vectors):
            total = torch.zeros_like(vector)
            for n in self.samples:
                jac = _rows(self.jacobians[n][index])
                pushed = self.hessians[n].to(jac.dtype) @ (jac @ vector.flatten())
                total += (jac.T @ pushed).reshape(vector.shape)
            found.append(total)
        return found

    def ggn_block(self, index: int) -> Tensor:
        """The block of one parameter. Shape ``[P, P]``."""
        total = torch.zeros(())
        for n in self.samples:
            jac = _rows(self.jacobians[n][index])
            total = total + jac.T @ self.hessians[n].to(jac.dtype) @ jac
        return total

    def hessian_entries(self, entries: int) -> list[tuple[int, int, float]]:
        """Diagonal entries of the Hessian at random places: parameter, entry, value."""
        # Of fused attention, torch has no second derivative.
        plain = mock.patch.object(functional, "embedding_bag", _embedding_bag)
        with plain, sdpa_kernel(SDPBackend.MATH):
            loss = self.lossfunc(self.model(**self.inputs), self.target)
        gradients_ = torch.autograd.grad(
            loss, self.parameters, create_graph=True, allow_unused=True
        )
        generator = torch.Generator().manual_seed(0)
        found = []
        for index, (parameter, gradient) in enumerate(
            zip(self.parameters, gradients_, strict=True)
        ):
            for entry in torch.randperm(parameter.numel(), generator=generator)[:entries].tolist():
                value = 0.0
                if gradient is not None and gradient.requires_grad:
                    (second,) = torch.autograd.grad(
                        gradient.flatten()[entry], parameter, retain_graph=True, allow_unused=True
                    )
                    value = 0.0 if second is None else second.flatten()[entry].item()
                found.append((index, entry, value))
        return found

    def _per_parameter(self, function: object) -> list[Tensor]:
        assert callable(function)
        return [
            torch.stack([function(self.jacobians[n][index], n) for n in self.samples])
            for index in range(len(self.parameters))
        ]


def _embedding_bag(
    rows: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: Any, **options: Any
) -> Tensor:
    """Torch's has no second derivative; this one is for the sum or mean of bags that have rows."""
    mode = args[3] if len(args) > 3 else options.get("mode", "mean")
    bags = [*rows] if offsets is None else rows.tensor_split(offsets[1:].tolist())
    if mode not in ("sum", "mean"):
        return _TORCHS(rows, weight, offsets, *args, **options)
    found = [weight[bag] for bag in bags]
    return torch.stack([rows.sum(0) if mode == "sum" else rows.mean(0) for rows in found])


_TORCHS = functional.embedding_bag


def _rows(jac: Tensor) -> Tensor:
    """Shape ``[D, P]``, also of a parameter that is a number."""
    return jac.reshape(len(jac), -1)
