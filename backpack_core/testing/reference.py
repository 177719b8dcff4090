"""The oracle for a small net, by autograd in float64: individual gradients and curvature.

Conventions are those of the documentation: a mean loss carries its ``1/N``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core.plugins.registry import registry
from backpack_core.record.structure import iter_tensors
from backpack_core.record.switch import disable
from backpack_core.testing import oracle
from backpack_core.testing.cases import Arguments
from backpack_core.testing.network import CLASSES, Affine, fixed_mixing
from backpack_core.testing.quantities import Quantity

T = TypeVar("T")


@dataclass(eq=False)
class Unit:
    """One call of a module that a rule differentiates as a whole.

    Attributes:
        module: The module.
        given: What it received, with the graph behind.
        outputs: What it returned, in the same graph.
    """

    module: Module
    given: Arguments
    outputs: list[Tensor]

    def curvature(self, x: Tensor, gradients: Iterable[Tensor]) -> Tensor:
        """``Σ_o g_o ∂²f_o/∂x²`` of one input, sample by sample. Shape ``[N, D, D]`` (flat).

        Args:
            x: The input; all others are held fixed.
            gradients: ``g``, one for each output.
        """
        leaf = x.detach().requires_grad_()
        given = self.given.map(lambda t: (leaf if t is x else t.detach()).clone())
        with disable():
            outputs = iter_tensors(given.call(self.module))
        pairs = zip(outputs, gradients, strict=True)
        value = torch.stack([(y * g).sum() for y, g in pairs if y.is_floating_point()]).sum()
        return oracle.own_blocks(oracle.hessian(value, leaf), x.dim()).detach()


def wholes(module: Module) -> Iterator[Module]:
    """The outermost modules with a rule of their own."""
    if not registry.resolve(module).rule.transparent:
        yield module
    else:
        for child in module.children():
            yield from wholes(child)


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
    _known: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @cached_property
    def _traced(self) -> tuple[Tensor, Tensor, list[Unit]]:
        """Output, loss, and the units in the order of their calls; nothing is recorded."""
        received: list[Arguments] = []
        units: list[Unit] = []

        def enter(module: Module, args: Any, kwargs: Any) -> Any:
            received.append(Arguments(args, kwargs))
            passed = received[-1].map(torch.clone)  # for modules that work in place
            return passed.args, passed.kwargs

        def leave(module: Module, args: Any, output: Any) -> None:
            units.append(Unit(module, received.pop(), list(iter_tensors(output))))

        with ExitStack() as hooks, disable():
            for module in dict.fromkeys(wholes(self.net)):
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            output = self.arguments.call(self.net)
            return output, self.loss(output), units

    @cached_property
    def _jacobians(self) -> dict[str, Tensor]:
        return oracle.jacobians(self._traced[0], self.parameters)

    @cached_property
    def _at_output(self) -> tuple[Tensor, Tensor]:
        """Gradient ``[N, C]`` and Hessians ``[N, C, C]`` of the loss in the net's output."""
        output = self._traced[0].detach().requires_grad_()
        with disable():
            value = self.loss(output)
        gradient = oracle.gradients(value, [output])[0]
        return gradient, oracle.own_blocks(oracle.hessian(value, output), 2)

    def _chosen(self, tensor: Tensor) -> Tensor:
        return tensor if self.indices is None else tensor[list(self.indices)]

    @property
    def samples(self) -> int:
        """Size of the whole batch, over which a mean is taken."""
        return len(self._traced[0])

    def restricted(self, indices: tuple[int, ...]) -> Reference:
        """The same for some samples."""
        other = copy.copy(self)
        other.indices = indices
        return other

    def trained(self, names: Iterable[str]) -> Reference:
        """The same where only some parameters are trained."""
        other = copy.copy(self)
        other.parameters = {name: self.parameters[name] for name in names}
        return other

    def expected(self, quantity: Quantity, name: str) -> Tensor:
        """A quantity of one parameter, computed once."""
        return self.once(quantity.expected, name)

    def once(self, function: Callable[[Reference, str], T], name: str) -> T:
        """A function of this reference and one parameter, computed once."""
        key = (function, name, tuple(self.parameters), self.indices)
        return self._kept(key, lambda: function(self, name))

    def _kept(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

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

        def made() -> Tensor:
            columns = self._columns() if sampled is None else self._sampled_columns(sampled)
            return torch.einsum("vnc,nc...->vn...", columns, self.jacobian(name))

        return self._kept(("roots", name, sampled, self.indices), made)

    def _columns(self) -> Tensor:
        """The same at the output of the net. Shape ``[V, N, C]``."""
        values, vectors = torch.linalg.eigh(self._chosen(self._at_output[1]))
        root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
        return root.permute(2, 0, 1)

    def _sampled_columns(self, samples: int) -> Tensor:
        """``Σ_c mixing_c √p_c (e_c - p)``, as the kit's loss draws them."""
        p = self._chosen(self._traced[0].detach()).softmax(1)
        whole = (p - p.square()).sum(1)  # trace of diag p - p pᵀ, which the loss scales
        factor = self._chosen(self._at_output[1]).diagonal(dim1=1, dim2=2).sum(1) / whole
        weighted = fixed_mixing(samples, CLASSES).unsqueeze(1) * p.sqrt()
        columns = weighted - weighted.sum(2, keepdim=True) * p
        return columns * factor.sqrt().unsqueeze(1)

    def ggn(self, name: str) -> Tensor:
        """Generalised Gauss-Newton block of each sample. Shape ``[N, θ, θ]`` (flat)."""
        root = oracle.flat(self.roots(name), 2)
        return torch.einsum("vni,vnj->nij", root, root)

    @cached_property
    def _residuals(self) -> list[tuple[dict[str, Tensor], Tensor]]:
        """For each curved unit, ``∂x/∂θ`` by name, ``[N, *x, *θ]``, and ``Σ_o g_o ∂²f_o/∂x²``."""
        _, loss, units = self._traced
        found = []
        for unit in units:
            inputs = [t for t in unit.given.tensors() if t.requires_grad]
            for x in inputs[:1]:  # units that are nonlinear in several inputs are refused
                slopes = [
                    oracle.gradients(loss, [y])[0] if y.requires_grad else torch.zeros_like(y)
                    for y in unit.outputs
                ]
                curvature = unit.curvature(x, slopes)
                if curvature.any():
                    found.append((oracle.jacobians(x, self.parameters), curvature))
        return found

    def positive_curvature(self, name: str, modify: Callable[[Tensor], Tensor]) -> Tensor:
        """``Σ_n J_nᵀ ∇²ℓ_n J_n + Σ_u Σ_n (∂x_un/∂θ)ᵀ |Σ_o g_o ∂²f_o/∂x²|₊ ∂x_un/∂θ``.

        The recursion of Chen et al. (2018, arXiv:1802.06502), multiplied out: every unit ``u`` with
        input ``x`` adds its residual, with other eigenvalues. Shape ``[θ, θ]`` (flat). Where all
        units are piecewise linear, it is the generalised Gauss-Newton block.

        Args:
            name: The parameter.
            modify: New eigenvalues of residuals from theirs.
        """
        total = self.ggn(name).sum(0)
        for jacobians, curvature in self._residuals:
            values, vectors = torch.linalg.eigh(self._chosen(curvature))
            positive = (vectors * modify(values).unsqueeze(1)) @ vectors.mT
            jacobian = self._chosen(jacobians[name]).reshape(*positive.shape[:2], -1)
            total = total + torch.einsum("nai,nab,nbj->ij", jacobian, positive, jacobian)
        return total

    def hessian(self, name: str) -> Tensor:
        """Hessian block of each sample's loss. Shape ``[N, θ, θ]`` (flat)."""
        theta, output = self.parameters[name], self._traced[0]

        def of_sample(n: int) -> Tensor:
            kept = (torch.arange(len(output)) == n).unsqueeze(1)
            with disable():  # the other outputs are held fixed
                value = self.loss(torch.where(kept, output, output.detach()))
            return oracle.hessian(value, theta).reshape(theta.numel(), -1).detach()

        made = lambda: torch.stack([of_sample(n) for n in range(len(output))])  # noqa: E731
        return self._chosen(self._kept(("Hessian", name), made))

    def _averaged_hessian(self, index: int) -> Tensor | None:
        """``Ḡ`` at the output of a unit, by ``Ḡ_x = 1/N Σ_n J_nᵀ Ḡ_y J_n`` from the next one.

        Botev et al. (2017), eq. 21. Starts with the Hessian of the loss, summed over samples.

        Args:
            index: Which unit; the number of units for the output of the net.

        Returns:
            Shape ``[D_out, D_out]``, or ``None`` where a unit has several outputs.
        """
        return self._kept(("average", index, self.indices), lambda: self._recursion(index))

    def _recursion(self, index: int) -> Tensor | None:
        last, _, units = self._traced
        if index == len(units):
            return self._chosen(self._at_output[1]).sum(0)
        (output, *more), *later = [*(unit.outputs for unit in units[index:]), [last]]
        if more:
            return None
        for following, outputs in enumerate(later, index + 1):
            if len(outputs) != 1 or len(outputs[0]) != len(output):
                return None
            jacobian = oracle.jacobians(outputs[0], {0: output})[0]
            if jacobian.any():
                blocks = self._chosen(oracle.own_blocks(jacobian, outputs[0].dim()))
                return _averaged(blocks, self._averaged_hessian(following))
        size = output[0].numel()  # the loss does not depend on it
        return output.new_zeros(size, size)

    def averaged(self, name: str) -> Tensor | None:
        """``1/N Σ_n J_nᵀ Ḡ J_n`` of a parameter, with ``Ḡ`` at the output of its unit.

        Returns:
            Shape ``[θ, θ]`` (flat), or ``None`` where a unit has several outputs.
        """
        theta = self.parameters[name]
        for index, unit in enumerate(self._traced[2]):
            if any(theta is p for p in unit.module.parameters()):
                output, average = unit.outputs[0], self._averaged_hessian(index)
                jacobian = {} if average is None else oracle.jacobians(output, {0: theta})
                blocks = [j.reshape(len(j), output[0].numel(), -1) for j in jacobian.values()]
                return _averaged(self._chosen(blocks[0]), average) if blocks else None
        return None

    def input_moment(self, name: str) -> Tensor | None:
        """``1/N Σ_n Σ_s x xᵀ`` of the rows that a weight of the kit's own modules multiplies.

        Returns:
            Shape ``[I, I]``, the sum over all uses; ``None`` for other parameters.
        """
        moments = []
        for unit in self._traced[2]:
            if isinstance(unit.module, Affine) and self.parameters[name] is unit.module.weight:
                x = self._chosen(unit.given.tensors()[0].detach())
                rows = unit.module.laid_out(x).flatten(0, -2)
                moments.append(rows.T @ rows / len(x))
        return torch.stack(moments).sum(0) if moments else None


def _averaged(jacobians: Tensor, inner: Tensor | None) -> Tensor | None:
    """``1/N Σ_n J_nᵀ Ḡ J_n``: ``[N, D, P]`` and ``[D, D]`` to ``[P, P]``."""
    if inner is None:
        return None
    return torch.einsum("nai,ab,nbj->ij", jacobians, inner, jacobians) / len(jacobians)
