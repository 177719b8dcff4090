"""Rules of activations that couple the entries along one axis."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import GLU, LogSoftmax, Softmax, Softmax2d, Softmin

from backpack_core.record.view import View
from backpack_products.derivatives import SecondOrderRule


class SoftmaxRule(SecondOrderRule):
    """``softmax(±x)`` along one axis: ``Softmax``, ``Softmin`` (with a minus), ``Softmax2d``."""

    module_types = (Softmax, Softmin, Softmax2d)

    def mixes_samples(self, view: View) -> bool:
        """Whether the axis is that of the samples."""
        return _along_samples(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        product = _softmax_product(view.output, mat, _axis(view))
        return -product if isinstance(view.module, Softmin) else product

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        # For Softmin, the minus occurs twice in the derivative, and cancels.
        y, axis = view.output, _axis(view)
        change = _softmax_product(y, mat, axis)
        mean = (y * grad_output).sum(axis, keepdim=True)
        return change * (grad_output - mean) - y * (change * grad_output).sum(axis, keepdim=True)


class LogSoftmaxRule(SecondOrderRule):
    """``log softmax(x)`` along one axis."""

    module_types = (LogSoftmax,)

    def mixes_samples(self, view: View) -> bool:
        """Whether the axis is that of the samples."""
        return _along_samples(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat - view.output.exp() * mat.sum(_axis(view), keepdim=True)

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        axis = _axis(view)
        change = _softmax_product(view.output.exp(), mat, axis)
        return -change * grad_output.sum(axis, keepdim=True)


class GLURule(SecondOrderRule):
    """``a σ(b)`` for the halves ``a, b`` of the input along one axis."""

    module_types = (GLU,)

    def mixes_samples(self, view: View) -> bool:
        """Whether the axis is that of the samples."""
        return _along_samples(view)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        axis, (a, b) = _axis(view), self._halves(view, view.input)
        s = b.sigmoid()
        return torch.cat([mat * s, mat * (a * s * (1 - s))], axis)

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        (a, b), (da, db) = self._halves(view, view.input), self._halves(view, mat)
        s = b.sigmoid()
        slope = s * (1 - s)
        mixed, pure = grad_output * slope, grad_output * a * slope * (1 - 2 * s)
        return torch.cat([mixed * db, mixed * da + pure * db], _axis(view))

    def _halves(self, view: View, x: Tensor) -> tuple[Tensor, ...]:
        return torch.chunk(x, 2, _axis(view))


def _axis(view: View) -> int:
    """The axis counted from the end: this number also fits with the column axis in front."""
    dims = len(view.input_shape)
    if isinstance(view.module, Softmax2d):
        return -3
    dim = cast(Softmax, view.module).dim
    if dim is None:
        # With dim=None torch chooses the axis, and warns in the forward pass.
        dim = 0 if dims in {0, 1, 3} else 1
    return dim if dim < 0 else dim - dims


def _along_samples(view: View) -> bool:
    return _axis(view) == -len(view.input_shape)


def _softmax_product(y: Tensor, mat: Tensor, axis: int) -> Tensor:
    product = y * mat
    return product - y * product.sum(axis, keepdim=True)
