"""Base class of activations with a backward pass that is one kernel of torch."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache

from torch import Tensor

from backpack_core.record.view import View
from backpack_products.elementwise import ElementwiseRule


class FusedRule(ElementwiseRule):
    """An activation for which one kernel of torch computes ``mat * φ'(x)`` from the output.

    If a subclass overrides ``derivative`` but not ``fused``, its ``derivative`` is used.

    To write:
        ``derivative(view)`` and ``fused(mat, output)`` in one class, and ``second_derivative``.
    """

    @abstractmethod
    def fused(self, mat: Tensor, output: Tensor) -> Tensor:
        """``mat * φ'(x)`` from the output. Shapes ``[V, N, *]`` and ``[N, *]``."""

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        if _has_fused(type(self)):
            return self.fused(mat, view.output)
        return super()._jac_t_mat_prod(view, mat)


@cache
def _has_fused(kind: type[FusedRule]) -> bool:
    """Whether the class that defines ``derivative`` also defines ``fused``."""
    return "fused" in next(vars(base) for base in kind.__mro__ if "derivative" in vars(base))
