"""Base classes that several layers share, as adapters over layer rules."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
    Subsampling,
    in_backward_mode,
)
from backpack_compat.views import (
    Grads,
    checked_view,
    rule_for,
    unfolded,
    view_of,
)
from backpack_core.errors import UnsupportedError
from backpack_products import ElementwiseRule
from backpack_products.some_samples import subsample


class ElementwiseDerivatives(BaseDerivatives):
    """An activation ``y_i = φ(x_i)``. A subclass for a new activation writes ``df`` and ``d2f``."""

    @in_backward_mode
    def df(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """``φ'(x)``. Shape of the input."""
        view = subsample(checked_view(module, g_out), subsampling)
        return _elementwise(module).derivative(view)

    @in_backward_mode
    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """``φ''(x)``. Shape of the input."""
        return _elementwise(module).second_derivative(checked_view(module, g_out))

    def hessian_is_zero(self, module: Module) -> bool:
        """Whether ``φ''`` vanishes; default for a new activation: it does not."""
        return type(self).df is ElementwiseDerivatives.df and super().hessian_is_zero(module)

    def hessian_is_diagonal(self, module: Module) -> bool:
        """It is."""
        return True

    def _jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Subsampling = None,
    ) -> Tensor:
        return mat * self.df(module, g_inp, g_out, subsampling=subsampling)

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat * self.df(module, g_inp, g_out)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        curvature: Tensor = self.d2f(module, g_inp, g_out) * g_out[0]
        return mat * curvature


def _elementwise(module: Module) -> ElementwiseRule:
    rule = rule_for(module)
    if not isinstance(rule, ElementwiseRule):
        raise NotImplementedError(f"{type(module).__name__} is not known as an activation.")
    return rule


class LinearLayerDerivatives(BaseParameterDerivatives):
    """Base of :class:`LinearDerivatives`."""

    @staticmethod
    def _get_additional_dims(module: Module) -> torch.Size:
        """The axes of the input between samples and features."""
        shape: torch.Size = module.input0.shape[1:-1]  # type: ignore[assignment, index]
        return shape


class ConvolutionDerivatives(BaseParameterDerivatives):
    """Base of the (transposed) convolutions.

    Args:
        N: Number of spatial dimensions.
    """

    def __init__(self, N: int) -> None:
        self.conv_dims = N

    def get_unfolded_input(self, module: Module) -> Tensor:
        """What the kernel sees at each position. Shape ``[N, C·K, S]``."""
        return unfolded(module, checked_view(module, None))


class PoolingDerivatives(BaseDerivatives):
    """Base of the pooling layers.

    Args:
        N: Number of spatial dimensions.
    """

    def __init__(self, N: int) -> None:
        self.N = N


class AdaptivePoolingDerivatives(PoolingDerivatives):
    """Base of the adaptive pooling layers; the layer rule treats any size of input and output."""

    def check_parameters(self, module: Module) -> None:
        """Raise an error unless an average pooling with a fixed kernel does the same.

        Raises:
            UnsupportedError: The input has another number of axes, or its size is not a multiple of
                the output's.
        """
        sizes, wanted = self._spatial_sizes(module)
        multiples = (size % target == 0 for size, target in zip(sizes, wanted, strict=True))
        if len(sizes) != self.N or not all(multiples):
            raise UnsupportedError(
                f"{type(module).__name__} takes {list(sizes)} pixels to {list(wanted)}, which no "
                f"pooling with a fixed kernel in {self.N} dimensions does. Use the products of "
                "this class, which do not need one."
            )

    def get_avg_pool_parameters(self, module: Module) -> tuple[list[int], list[int], list[int]]:
        """Stride, kernel size, padding of that average pooling; after ``check_parameters``."""
        sizes, wanted = self._spatial_sizes(module)
        strides = [size // target for size, target in zip(sizes, wanted, strict=True)]
        return strides, list(strides), [0] * self.N

    def get_parameters(self, module: Module) -> tuple[list[int], list[int], list[int]]:
        """The same: what the methods of an average pooling ask for."""
        return self.get_avg_pool_parameters(module)

    @staticmethod
    def _spatial_sizes(module: Module) -> tuple[torch.Size, torch.Size]:
        view = view_of(module)
        return view.input_shape[2:], view.output_shape[2:]


class weight_jac_t_save_memory:
    """Accepted for scripts that choose an algorithm for the weights of convolutions.

    Products are always made in pieces that fit ``backpack_products.tuning.memory_budget()``, so
    there is nothing to choose.
    """

    _SAVE_MEMORY = False

    def __init__(self, save_memory: bool = True) -> None:
        self._save_memory = save_memory

    def __enter__(self) -> None:
        """Store the setting."""
        self._before = weight_jac_t_save_memory._SAVE_MEMORY
        weight_jac_t_save_memory._SAVE_MEMORY = self._save_memory

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous setting."""
        weight_jac_t_save_memory._SAVE_MEMORY = self._before


def with_dimensions(base: type, dimensions: int) -> dict[str, Any]:
    """The ``__init__`` without arguments of a class for a fixed number of dimensions."""

    def __init__(self: Any) -> None:
        base.__init__(self, dimensions)  # type: ignore[misc]

    return {"__init__": __init__}
