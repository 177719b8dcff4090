"""The oracle: dense derivatives by autograd in float64, with a backward pass for each entry.

The conventions are those of the documentation: a mean loss contains its ``1/N``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core.record.switch import disable

if TYPE_CHECKING:
    from backpack_core.testing.cases import Arguments

T = TypeVar("T")
K = TypeVar("K")


def jacobians(output: Tensor, targets: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Jacobians of one tensor with respect to several, by reverse mode, row by row.

    Args:
        output: A tensor with a graph, of any shape.
        targets: Tensors it depends on.

    Returns:
        For every target, shape ``[*output, *target]``.
    """
    units = torch.eye(output.numel(), dtype=output.dtype).reshape(output.numel(), *output.shape)
    rows = [gradients(output, [*targets.values()], unit) for unit in units] if targets else []
    found = {}
    for i, (key, target) in enumerate(targets.items()):
        columns = torch.cat([target.new_empty((0, *target.shape)), *(row[i][None] for row in rows)])
        found[key] = columns.reshape((*output.shape, *target.shape))
    return found


def gradients(
    output: Tensor, targets: list[Tensor], cotangent: Tensor | None = None, again: bool = False
) -> tuple[Tensor, ...]:
    """``Jᵀ cotangent`` for every target; zero if the output does not depend on it.

    Args:
        output: A tensor with a graph.
        targets: Tensors that it may depend on.
        cotangent: Shape of ``output``; may be left out for a scalar.
        again: Whether the result gets a graph, to be differentiated once more.
    """
    if not output.requires_grad:
        return tuple(map(torch.zeros_like, targets))
    options = {"retain_graph": True, "create_graph": again, "materialize_grads": True}
    return torch.autograd.grad(output, targets, cotangent, **options)


def hessian(value: Tensor, target: Tensor) -> Tensor:
    """Second derivative of a scalar. Shape ``[*target, *target]``."""
    return jacobians(gradients(value, [target], again=True)[0], {0: target})[0]


def transposed_product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``Jᵀ mat``: ``[*out, *in]`` and ``[V, *out]`` to ``[V, *in]``."""
    found: Tensor = torch.tensordot(mat, jacobian, mat.dim() - 1)
    return found


def product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``J mat``: ``[*out, *in]`` and ``[V, *in]`` to ``[V, *out]``."""
    rank = mat.dim() - 1
    axes = list(range(1, rank + 1)), list(range(jacobian.dim() - rank, jacobian.dim()))
    found: Tensor = torch.tensordot(mat, jacobian, axes)
    return found


def per_sample_product(jacobian: Tensor, mat: Tensor) -> Tensor:
    """``J[n]ᵀ mat[v, n]``: ``[N, *out, *θ]`` and ``[V, N, *out]`` to ``[V, N, *θ]``."""
    rank = mat.dim() - 1
    matrices = flat(jacobian, rank).unsqueeze(1).flatten(1, -2)
    found = torch.einsum("nop,vno->vnp", matrices, flat(mat, 2))
    return found.reshape(*mat.shape[:2], *jacobian.shape[rank:])


def flat(tensor: Tensor, leading: int) -> Tensor:
    """A tensor with all axes but the leading ones flattened, even if there are none."""
    return tensor.unsqueeze(leading).flatten(leading)


def blocks(jacobian: Tensor, rank: int) -> Tensor:
    """Blocks of one sample in another: ``[N, *out, N, *in]`` to ``[N, N, D_out, D_in]``.

    Args:
        jacobian: The Jacobian over the whole batch.
        rank: Number of axes of the output, including the sample axis.
    """
    samples = len(jacobian)
    sizes = jacobian.shape[1:rank].numel(), jacobian.shape[rank], jacobian.shape[rank + 1 :].numel()
    whole = jacobian.reshape(samples, *sizes)
    return whole.transpose(1, 2)


def own_blocks(jacobian: Tensor, rank: int) -> Tensor:
    """The blocks of each sample with itself: ``[N, *out, N, *in]`` to ``[N, D_out, D_in]``."""
    return blocks(jacobian, rank).diagonal().movedim(-1, 0)


def mix(jacobian: Tensor, rank: int) -> bool:
    """Whether a sample depends on another one, from a Jacobian ``[N, *out, N, *in]``."""
    pairs = blocks(jacobian, rank)
    return bool(pairs[~torch.eye(*pairs.shape[:2], dtype=torch.bool)].any())


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers from a fixed seed."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fixed_mixing(samples: int, columns: int) -> Tensor:
    """Fixed numbers that replace random ones with mean zero and variance ``1/samples``."""
    scaled: Tensor = draw((samples, columns), samples) / samples**0.5
    return scaled


@dataclass(eq=False)
class Reference:
    """A net, its inputs and a loss, with derivatives of single samples.

    Attributes:
        net: The net, ``arguments → [N, *]``; all axes but the first are flattened to ``C``.
        arguments: Its inputs.
        loss: ``[N, C] →`` a number, a sum over samples up to a factor.
        indices: The samples that a quantity is restricted to; ``None`` for all.
    """

    net: Module
    arguments: Arguments
    loss: Callable[[Tensor], Tensor]
    indices: tuple[int, ...] | None = None
    _cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @cached_property
    def traced(self) -> tuple[Tensor, Tensor]:
        """Output and loss, with their graph; nothing is recorded."""
        with disable():
            output = flat(self.arguments.map(torch.clone).call(self.net), 1)
            return output, self.loss(output)

    @cached_property
    def _jacobians(self) -> dict[str, Tensor]:
        return jacobians(self.traced[0], self.parameters)

    @cached_property
    def at_output(self) -> tuple[Tensor, Tensor]:
        """Gradient ``[N, C]`` and Hessians ``[N, C, C]`` of the loss in the net's output."""
        output = self.traced[0].detach().requires_grad_()
        with disable():
            value = self.loss(output)
        return gradients(value, [output])[0], own_blocks(hessian(value, output), 2)

    def chosen(self, tensor: Tensor) -> Tensor:
        """The rows of the chosen samples."""
        return tensor if self.indices is None else tensor[list(self.indices)]

    @property
    def samples(self) -> int:
        """Size of the whole batch, over which a mean is taken."""
        return len(self.traced[0])

    def restricted(self, indices: tuple[int, ...]) -> Reference:
        """The same reference, restricted to some samples."""
        other = copy.copy(self)
        other.indices = indices
        return other

    def trained(self, names: Iterable[str]) -> Reference:
        """The same reference, where only some parameters are trained."""
        other = copy.copy(self)
        other.parameters = {name: self.parameters[name] for name in names}
        return other

    def once(self, function: Callable[[Reference, str], T], name: str) -> T:
        """The value of a function for one parameter, computed once."""
        key = (function, name, tuple(self.parameters), self.indices)
        return self.cached(key, lambda: function(self, name))

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """The cached value of a key, made if there is none. Derived references share the cache."""
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    def jacobian(self, name: str) -> Tensor:
        """Jacobian of the net's output with respect to a parameter. Shape ``[N, C, *θ]``."""
        return self.chosen(self._jacobians[name])

    def gradients(self, name: str) -> Tensor:
        """Individual gradients, reduction included. Shape ``[N, *θ]``."""
        gradient = self.chosen(self.at_output[0])
        return torch.einsum("nc,nc...->n...", gradient, self.jacobian(name))

    def roots(self, name: str, sampled: int | None = None) -> Tensor:
        """Columns whose outer products sum to the GGN of a sample. Shape ``[V, N, *θ]``.

        Args:
            name: The parameter.
            sampled: Number of the kit's reproducible Monte Carlo samples; ``None`` for the exact
                GGN.
        """

        def make() -> Tensor:
            columns = self._columns() if sampled is None else self._sampled_columns(sampled)
            return torch.einsum("vnc,nc...->vn...", columns, self.jacobian(name))

        return self.cached(("roots", name, sampled, self.indices), make)

    def _columns(self) -> Tensor:
        """Columns of the loss's Hessian at the net's output. Shape ``[V, N, C]``."""
        values, vectors = torch.linalg.eigh(self.chosen(self.at_output[1]))
        root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
        return root.permute(2, 0, 1)

    def _sampled_columns(self, samples: int) -> Tensor:
        """``Σ_c mixing_c √p_c (e_c - p)``, as the kit's loss draws them."""
        p = self.chosen(self.traced[0].detach()).softmax(1)
        trace = (p - p.square()).sum(1)  # of diag p - p pᵀ, which the loss scales
        factor = self.chosen(self.at_output[1]).diagonal(dim1=1, dim2=2).sum(1) / trace
        weighted = fixed_mixing(samples, p.shape[1]).unsqueeze(1) * p.sqrt()
        columns = weighted - weighted.sum(2, keepdim=True) * p
        return columns * factor.sqrt().unsqueeze(1)

    def ggn(self, name: str) -> Tensor:
        """Generalised Gauss-Newton block of each sample. Shape ``[N, θ, θ]`` (flat)."""
        jacobian = flat(self.jacobian(name), 2)
        return torch.einsum("nci,ncd,ndj->nij", jacobian, self.chosen(self.at_output[1]), jacobian)

    def hessian(self, name: str) -> Tensor:
        """Hessian block of each sample's loss. Shape ``[N, θ, θ]`` (flat)."""
        theta, output = self.parameters[name], self.traced[0]

        def of_sample(n: int) -> Tensor:
            kept = (torch.arange(len(output)) == n).unsqueeze(1)
            with disable():  # the other outputs are held fixed
                value = self.loss(torch.where(kept, output, output.detach()))
            return hessian(value, theta).reshape(theta.numel(), -1).detach()

        make = lambda: torch.stack([of_sample(n) for n in range(len(output))])  # noqa: E731
        return self.chosen(self.cached(("Hessian", name), make))
