"""Base classes that several layers share, as adapters over layer rules."""

from __future__ import annotations

from math import sqrt
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module

from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseLossDerivatives,
    BaseParameterDerivatives,
    Grads,
    Subsampling,
    _loss,
    _prepared,
    _rule,
    in_backward_mode,
)
from backpack_core import AffineRule, ElementwiseRule, View
from backpack_core.errors import UsageError


class ElementwiseDerivatives(BaseDerivatives):
    """An activation ``y_i = φ(x_i)``. A subclass for one of one's own writes ``df`` and ``d2f``."""

    @in_backward_mode
    def df(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """``φ'(x)``. Shape of the input."""
        view = _prepared(module, g_out).subsample(subsampling)
        return _elementwise(module).derivative(view)

    @in_backward_mode
    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """``φ''(x)``. Shape of the input."""
        return _elementwise(module).second_derivative(_prepared(module, g_out))

    def hessian_is_zero(self, module: Module) -> bool:
        """Whether ``φ''`` vanishes; not so for an activation that says nothing about it."""
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
    rule = _rule(module)
    if not isinstance(rule, ElementwiseRule):
        raise NotImplementedError(f"{type(module).__name__} is not known as an activation.")
    return rule


class BatchNormDerivatives(BaseParameterDerivatives):
    """A batch normalisation: an affine map, if its statistics are those of training."""

    def hessian_is_zero(self, module: Module) -> bool:
        """Not where the statistics are those of the batch."""
        return not module.training and module.running_mean is not None


class NLLLossDerivatives(BaseLossDerivatives):
    """A loss that is the negative logarithm of a likelihood.

    Args:
        use_autograd: Accepted; the rule's formula is used either way.
    """

    def __init__(self, use_autograd: bool = True) -> None:
        self.use_autograd = use_autograd

    def compute_sampled_grads(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """Gradients of a summed loss, for targets drawn from the likelihood.

        Args:
            subsampled_input: Input of the loss ``[N, *in]``.
            mc_samples: How many targets to draw for each sample.

        Returns:
            Shape ``[mc_samples, N, *in]``.

        Raises:
            UsageError: The class stands for no particular loss.
        """
        if self.module_type is None:
            raise UsageError(f"{type(self).__name__} stands for no particular loss.")
        loss = self.module_type(reduction="sum")
        x = subsampled_input.detach()
        target = torch.zeros_like(x)
        if isinstance(loss, CrossEntropyLoss):
            target = target.select(1, 0).long()
        view = _call(loss, x, target)
        rule = _loss(loss)
        rule.check(view)
        return rule.sqrt_hessian_sampled(view, mc_samples) * sqrt(mc_samples)


class CrossEntropyDerivatives(NLLLossDerivatives):
    """Base of :class:`CrossEntropyLossDerivatives`."""

    module_type = CrossEntropyLoss

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd)


class BCEWithLogitsDerivatives(NLLLossDerivatives):
    """Base of :class:`BCELossWithLogitsDerivatives`."""

    module_type = BCEWithLogitsLoss

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd)


def _call(loss: Module, x: Tensor, target: Tensor) -> View:
    value = loss(x, target)
    return View(
        module=loss,
        args=(x, target),
        kwargs={},
        inputs=(x, target),
        edges=(None, None),
        outputs=(value,),
        frame=None,
        thread=0,
        grad_output=torch.ones_like(value),
        _versions=(x._version, target._version, value._version),
    )


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
        rule = _rule(module)
        assert isinstance(rule, AffineRule)
        patches = rule.affine_input(_prepared(module, None))  # [N, S, G, I]
        return patches.permute(0, 2, 3, 1).flatten(1, 2)


class PoolingDerivatives(BaseDerivatives):
    """Base of the pooling layers.

    Args:
        N: Number of spatial dimensions.
    """

    def __init__(self, N: int) -> None:
        self.N = N


class weight_jac_t_save_memory:
    """Accepted for scripts that choose an algorithm for the weights of convolutions.

    Products are always made in pieces that fit ``backpack_core.memory_budget()``, so there is
    nothing to choose.
    """

    _SAVE_MEMORY = False

    def __init__(self, save_memory: bool = True) -> None:
        self._save_memory = save_memory

    def __enter__(self) -> None:
        """Remember the wish."""
        self._before = weight_jac_t_save_memory._SAVE_MEMORY
        weight_jac_t_save_memory._SAVE_MEMORY = self._save_memory

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Forget it."""
        weight_jac_t_save_memory._SAVE_MEMORY = self._before


def with_dimensions(base: type, dimensions: int) -> dict[str, Any]:
    """The ``__init__`` without arguments of a class for a fixed number of dimensions."""

    def __init__(self: Any) -> None:
        base.__init__(self, dimensions)  # type: ignore[misc]

    return {"__init__": __init__}
