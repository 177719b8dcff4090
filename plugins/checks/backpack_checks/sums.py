"""Checks that products, summed over samples, equal autograd's gradient, in measured passes.

This shows what a product lacks or counts twice: a use outside any call, a wrong rule, or a fault of
this library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from backpack_checks._torch import hook_leaf_first
from backpack_checks.trust import Trust
from backpack_checks.units import coarsest_at, coarsest_of
from backpack_core._torch import graph_task_id
from backpack_core.contract.rules import Normaliser
from backpack_core.engine.active import Group
from backpack_core.errors import UnsupportedError
from backpack_core.graph import Survey
from backpack_operations.order import behind
from backpack_operations.refusals import named
from backpack_products.affine import AffineProduct
from backpack_products.extensions import FirstOrderExtension
from backpack_products.operations import batch_sum
from backpack_products.product import SampleProduct, SumProduct
from backpack_products.scale import ScaleProduct

_HALF = torch.finfo(torch.float16).eps / 2  # rounding units above it are of half precision


class SumCheck(FirstOrderExtension):
    """An extension that compares sums with gradients at the end of a pass, and stores nothing."""

    savefield = "_backpack_sum"
    needs = (batch_sum,)
    is_deferred = True

    def __init__(self, survey: Survey, groups: list[Group], trust: Trust) -> None:
        """Begin; hooks get autograd's gradients before other hooks can change them.

        Args:
            survey: What is known about the graph.
            groups: The groups of the pass. The check joins the group of per-sample gradients, or
                adds one.
            trust: What passes of this structure have shown.
        """
        super().__init__()
        self._survey, self._trust = survey, trust
        # Under autocast, gradients in single precision may have been computed in half precision.
        self._unit = coarsest_of(call.stored.outputs[index] for call, index in survey.sites)
        self._task = -1
        self._incoming: dict[tuple[int, Tensor], Tensor] = {}  # by graph task of autograd
        self._join(groups)
        self._handles = [
            hook_leaf_first(use.parameter, self, SumCheck._hear)
            for use in survey.uses.values()
            if use.parameter.is_leaf and use.count
        ]

    def _join(self, groups: list[Group]) -> None:
        """Become an extension of the group of per-sample gradients, or of a new group."""
        for lane, group in enumerate(groups):
            if group.propagator == self.propagator and not group.has_overrides:
                extensions, needs = (*group.extensions, self), group.needs.union(self.needs)
                groups[lane] = group._replace(extensions=extensions, needs=needs)
                return
        groups.append(Group(self.propagator, (self,), frozenset(self.needs)))

    def leave(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hear(self, parameter: Tensor, gradient: Tensor) -> None:
        """Store autograd's gradient, of this pass or of a nested one."""
        # A copy, since autograd may store the tensor itself as ``.grad``, which may be changed.
        self._incoming[graph_task_id(), parameter] = gradient.detach().clone()

    def read(self, product: SampleProduct) -> tuple[Tensor, Tensor]:
        """The sum over all samples, and the size of its terms (see :func:`magnitude`)."""
        if self._task < 0:
            self._task = graph_task_id()
        return batch_sum(product)[0].detach(), magnitude(product)

    def finish(
        self, values: Mapping[Tensor, Any], normalisers: Sequence[Normaliser]
    ) -> Mapping[Tensor, Any]:
        """Compare the sums with the gradients.

        Raises:
            UnsupportedError: They do not add up.
        """
        gradients = {
            parameter: gradient
            for (task, parameter), gradient in self._incoming.items()
            if task == self._task and not gradient.is_sparse
        }
        compared = [
            (parameter, gradients[parameter], total)
            for parameter, (total, _) in values.items()
            if parameter in gradients and gradients[parameter].shape == total.shape
        ]
        norms = _numbers(map(_norm, gradients.values()))
        widest, sizes = max(norms, default=0.0), dict(zip(gradients, norms, strict=True))
        terms = dict(zip(values, _numbers(size for _, size in values.values()), strict=True))
        differences = _numbers(_norm(gradient - total) for _, gradient, total in compared)
        for (parameter, *tensors), difference in zip(compared, differences, strict=True):
            unit = max(self._unit, coarsest_of(tensors))
            # Terms may also cancel on the way to the parameter, as at a softmax.
            size = sizes[parameter], max(terms[parameter], widest / 32)
            if difference > _allowed(*size, unit):  # false for values that are not finite
                unit = max(unit, self._coarsest())
            if difference > _allowed(*size, unit):
                self._trust.open_sites = None  # so that the next pass is measured, too
                raise self._does_not_add_up(parameter, difference, size[0], unit)
        return {}

    def _coarsest(self) -> float:
        """The coarsest rounding unit of anything computed in this graph.

        It may be coarser than those of the results, as at normalisations in single precision.
        """
        return coarsest_at(behind(site.edge.node for site in self._survey.sites.values()))

    def _does_not_add_up(
        self, parameter: Tensor, difference: float, size: float, unit: float
    ) -> UnsupportedError:
        """The error for a sum that is not autograd's gradient."""
        is_half = parameter.device.type == "cpu" and unit > _HALF
        half = (
            "In half precision on a CPU, torch loses terms of its own gradient at normalisations "
            "and look-ups of many rows: run the model in single precision, or pass check='never', "
            "which leaves the quantities right. If single precision does not help, a"
        )
        return UnsupportedError(
            f"The gradients of single samples in {named(self._survey, parameter)} do not add up to "
            f"the gradient that autograd brings: the norm of the difference is {difference:.1e}, "
            f"that of the gradient {size:.1e}. {half if is_half else 'A'} custom "
            "autograd.Function, an operation outside autograd or a layer rule is wrong: run "
            "check_case of backpack_core.testing on the rule, and move the function into a "
            "separate module."
        )


def magnitude(product: SampleProduct) -> Tensor:
    """The size of the terms of a sum over samples, which may cancel: about ``Σ ‖out‖ ‖inp‖``."""
    if isinstance(product, SumProduct):
        return sum(map(magnitude, product.parts), torch.zeros((), device="cpu"))
    if isinstance(product, AffineProduct | ScaleProduct) and product.inp is not None:
        inp: Any = product.inp
        some = min(4, product.samples)
        size = _norm(inp[0:some]) * sqrt(product.samples / max(1, some))
        terms = product.terms if isinstance(product, ScaleProduct) else None
        size = size if terms is None else torch.maximum(size, terms.to(size.dtype))
        return _norm(product.out) * size
    out = getattr(product, "out", None)
    if isinstance(out, Tensor):
        return _norm(out) * sqrt(out.shape[1:3].numel())
    # A product without factors.
    return _norm(product.like) * sqrt(product.like.shape[1:].numel())


def _allowed(gradient: float, terms: float, unit: float) -> float:
    """The difference that rounding may cause in a gradient, given the size of its terms."""
    bound: float = unit**0.7
    return max(gradient * bound, terms * min(32 * unit, bound))


def _norm(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=wide)
    return norm


def _numbers(scalars: Iterable[Tensor]) -> list[float]:
    """The values of scalar tensors, in one transfer from the device."""
    flat = [scalar.reshape(1) for scalar in scalars]
    return torch.cat([one.to(flat[0].device) for one in flat]).tolist() if flat else []
