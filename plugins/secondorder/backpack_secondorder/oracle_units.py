"""Oracles of quantities that depend on where modules begin and end, by *units* of a net.

A unit is a call of the outermost module with a rule that is not transparent. Autograd does all the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.plugins.registry import registry
from backpack_core.record.nested import iter_tensors
from backpack_core.record.switch import disable
from backpack_core.testing import Arguments, Reference, oracle
from backpack_core.testing.network import Affine


@dataclass(eq=False)
class Unit:
    """One call of a module that a rule differentiates as a whole.

    Attributes:
        module: The module.
        given: The tensors that it received, with the graph behind them.
        outputs: The tensors that it returned, in the same graph.
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


def traced(reference: Reference) -> tuple[Tensor, Tensor, list[Unit]]:
    """Output, loss, and the units in the order of their calls; nothing is recorded."""
    return reference.cached("units", lambda: _trace(reference))


def _trace(reference: Reference) -> tuple[Tensor, Tensor, list[Unit]]:
    received: list[Arguments] = []
    units: list[Unit] = []

    def enter(module: Module, args: Any, kwargs: Any) -> Any:
        received.append(Arguments(args, kwargs))
        passed = received[-1].map(torch.clone)  # for modules that work in place
        return passed.args, passed.kwargs

    def leave(module: Module, args: Any, output: Any) -> None:
        units.append(Unit(module, received.pop(), list(iter_tensors(output))))

    with ExitStack() as hooks, disable():
        for module in dict.fromkeys(wholes(reference.net)):
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        output = reference.arguments.call(reference.net)
        return output, reference.loss(output), units


def _residuals(reference: Reference) -> list[tuple[dict[str, Tensor], Tensor]]:
    """For each curved unit, ``∂x/∂θ`` by name, ``[N, *x, *θ]``, and ``Σ_o g_o ∂²f_o/∂x²``."""
    _, loss, units = traced(reference)
    residuals = []
    for unit in units:
        inputs = [t for t in unit.given.tensors() if t.requires_grad]
        for x in inputs[:1]:  # units that are nonlinear in several inputs are refused
            slopes = [
                oracle.gradients(loss, [y])[0] if y.requires_grad else torch.zeros_like(y)
                for y in unit.outputs
            ]
            curvature = unit.curvature(x, slopes)
            if curvature.any():
                residuals.append((oracle.jacobians(x, reference.parameters), curvature))
    return residuals


def positive_curvature(
    reference: Reference, name: str, modify: Callable[[Tensor], Tensor]
) -> Tensor:
    """``Σ_n J_nᵀ ∇²ℓ_n J_n + Σ_u Σ_n (∂x_un/∂θ)ᵀ |Σ_o g_o ∂²f_o/∂x²|₊ ∂x_un/∂θ``.

    The recursion of Chen et al. (2018, arXiv:1802.06502), multiplied out: every unit ``u`` with
    input ``x`` adds its residual, with other eigenvalues. Shape ``[θ, θ]`` (flat). If all units are
    piecewise linear, it is the generalised Gauss-Newton block.

    Args:
        reference: The net.
        name: The parameter.
        modify: A function from the eigenvalues of residuals to new ones.
    """
    root = oracle.flat(reference.roots(name), 2)  # of the positive part of the loss's Hessian
    total = torch.einsum("vni,vnj->ij", root, root)
    key = ("residuals", *reference.parameters)
    for jacobians, curvature in reference.cached(key, lambda: _residuals(reference)):
        values, vectors = torch.linalg.eigh(reference.chosen(curvature))
        positive = (vectors * modify(values).unsqueeze(1)) @ vectors.mT
        jacobian = reference.chosen(jacobians[name]).reshape(*positive.shape[:2], -1)
        total = total + torch.einsum("nai,nab,nbj->ij", jacobian, positive, jacobian)
    return total


def _averaged_hessian(reference: Reference, index: int) -> Tensor | None:
    """``Ḡ`` at the output of a unit, by ``Ḡ_x = 1/N Σ_n J_nᵀ Ḡ_y J_n`` from the next one.

    Botev et al. (2017), eq. 21. Starts with the Hessian of the loss, summed over samples.

    Args:
        reference: The net.
        index: Which unit; the number of units for the output of the net.

    Returns:
        Shape ``[D_out, D_out]``, or ``None`` if a unit has several outputs.
    """
    key = ("average", index, reference.indices)
    return reference.cached(key, lambda: _recursion(reference, index))


def _recursion(reference: Reference, index: int) -> Tensor | None:
    last, _, units = traced(reference)
    if index == len(units):
        return reference.chosen(reference.at_output[1]).sum(0)
    (output, *more), *later = [*(unit.outputs for unit in units[index:]), [last]]
    if more:
        return None
    for following, outputs in enumerate(later, index + 1):
        if len(outputs) != 1 or len(outputs[0]) != len(output):
            return None
        jacobian = oracle.jacobians(outputs[0], {0: output})[0]
        if jacobian.any():
            blocks = reference.chosen(oracle.own_blocks(jacobian, outputs[0].dim()))
            return _averaged(blocks, _averaged_hessian(reference, following))
    size = output[0].numel()  # the loss does not depend on it
    return output.new_zeros(size, size)


def averaged(reference: Reference, name: str) -> Tensor | None:
    """``1/N Σ_n J_nᵀ Ḡ J_n`` of a parameter, with ``Ḡ`` at the output of its unit.

    Returns:
        Shape ``[θ, θ]`` (flat), or ``None`` if a unit has several outputs.
    """
    theta = reference.parameters[name]
    for index, unit in enumerate(traced(reference)[2]):
        if any(theta is p for p in unit.module.parameters()):
            output, average = unit.outputs[0], _averaged_hessian(reference, index)
            jacobian = {} if average is None else oracle.jacobians(output, {0: theta})
            blocks = [j.reshape(len(j), output[0].numel(), -1) for j in jacobian.values()]
            return _averaged(reference.chosen(blocks[0]), average) if blocks else None
    return None


def _averaged(jacobians: Tensor, inner: Tensor | None) -> Tensor | None:
    """``1/N Σ_n J_nᵀ Ḡ J_n``: ``[N, D, P]`` and ``[D, D]`` to ``[P, P]``."""
    if inner is None:
        return None
    return torch.einsum("nai,ab,nbj->ij", jacobians, inner, jacobians) / len(jacobians)


def input_moment(reference: Reference, name: str) -> Tensor | None:
    """``1/N Σ_n Σ_s x xᵀ`` of the rows that a weight of the kit's own modules multiplies.

    Returns:
        Shape ``[I, I]``, the sum over all uses; ``None`` for other parameters.
    """
    moments = []
    for unit in traced(reference)[2]:
        if isinstance(unit.module, Affine) and reference.parameters[name] is unit.module.weight:
            x = reference.chosen(unit.given.tensors()[0].detach())
            rows = x.flatten(unit.module.start).flatten(0, -2)
            moments.append(rows.T @ rows / len(x))
    return torch.stack(moments).sum(0) if moments else None
