"""Base classes of the module extensions that third-party code derives from or puts into its tables.

The incumbent has a class for every pair (extension, layer). Here each is an adapter: of the layer's
derivatives if the quantity is columns, otherwise of the core's extension.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
)
from backpack.extensions.hbp_options import LossHessianStrategy
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.strategies import extension_by
from backpack_compat.hand_written import adopt, present
from backpack_compat.views import checked_view, loss_view, parametric_rule_for, rule_for
from backpack_core import Extension, LossRule
from backpack_products.some_samples import subsample
from backpack_secondorder import diag_hessian, kfac

Derivatives = Any  # BaseDerivatives, or BaseParameterDerivatives if there are parameters


class FirstOrderModuleExtension(ModuleExtension):
    """A module extension for first-order extensions: nothing is handed on."""


class _PerParameter(ModuleExtension):
    """Gives parameters without a method of their name a default method of the class."""

    derivatives: Derivatives

    def _fill(self, params: list[str] | None) -> None:
        for param in params or ():
            if not hasattr(self, param):
                setattr(self, param, partial(self._value, param))

    def _value(
        self, param: str, ext: Any, module: Module, g_inp: Any, g_out: Any, backproped: Any
    ) -> Any:
        """The quantity for one parameter."""
        raise NotImplementedError

    def _per_sample(
        self, param: str, ext: Any, module: Module, g_inp: Any, g_out: Any, mat: Tensor | None
    ) -> Tensor:
        """Transposed Jacobian products of the samples that take part; default: of the gradient."""
        samples = ext.get_subsampling()
        if mat is None:
            mat = g_out[0] if samples is None else g_out[0][samples]
        product: Tensor = self.derivatives.param_mjp(
            param, module, g_inp, g_out, mat, sum_batch=False, subsampling=samples
        )
        return product


class BatchGradBase(_PerParameter, FirstOrderModuleExtension):
    """Individual gradients of one layer."""

    def __init__(self, derivatives: BaseParameterDerivatives, params: list[str]) -> None:
        self._derivatives = self.derivatives = derivatives
        self._fill(params)
        super().__init__(params)

    def _value(self, param: str, *args: Any) -> Tensor:
        return self._per_sample(param, *args)


class GradBaseModule(BatchGradBase):
    """Gradients of one layer."""

    def _value(self, param: str, *args: Any) -> Tensor:
        return self._per_sample(param, *args).sum(0)


class SGSBase(BatchGradBase):
    """Sums of squared individual gradients of one layer."""

    def __init__(
        self, derivatives: BaseParameterDerivatives, params: list[str] | None = None
    ) -> None:
        super().__init__(derivatives, params or [])

    def _value(self, param: str, *args: Any) -> Tensor:
        return self._per_sample(param, *args).square().sum(0)


class BatchL2Base(_PerParameter, FirstOrderModuleExtension):
    """Squared norms of individual gradients of one layer."""

    def __init__(
        self, params: list[str], derivatives: BaseParameterDerivatives | None = None
    ) -> None:
        if derivatives is not None:
            self.derivatives = derivatives
            self._fill(params)
        super().__init__(params)

    def _value(self, param: str, *args: Any) -> Tensor:
        return self._per_sample(param, *args).flatten(1).square().sum(1)


class VarianceBaseModule(_PerParameter, FirstOrderModuleExtension):
    """Variances of individual gradients of one layer."""

    def __init__(
        self, params: list[str], grad_extension: GradBaseModule, sgs_extension: SGSBase
    ) -> None:
        self.grad_ext = grad_extension
        self.sgs_ext = sgs_extension
        self._fill(params)
        super().__init__(params)

    def _value(self, param: str, ext: Any, module: Module, g_inp: Any, g_out: Any, _: Any) -> Any:
        gradient = getattr(self.grad_ext, param)(ext, module, g_inp, g_out, None)
        squares = getattr(self.sgs_ext, param)(ext, module, g_inp, g_out, None)
        samples = len(g_out[0])
        return squares / samples - (gradient / samples) ** 2


class SqrtGGNBaseModule(_PerParameter, MatToJacMat):
    """Square root of the generalised Gauss-Newton matrix of one layer."""

    def __init__(self, derivatives: BaseDerivatives, params: list[str] | None = None) -> None:
        self.derivatives = derivatives
        self._fill(params)
        super().__init__(derivatives, params=params)

    def _value(self, param: str, *args: Any) -> Tensor:
        return self._per_sample(param, *args)


class DiagGGNBaseModule(SqrtGGNBaseModule):
    """Diagonal of the generalised Gauss-Newton matrix of one layer."""

    def __init__(
        self,
        derivatives: BaseDerivatives,
        params: list[str] | None = None,
        sum_batch: bool | None = None,
    ) -> None:
        self._sum_batch = sum_batch
        super().__init__(derivatives, params)

    def _value(self, param: str, *args: Any) -> Tensor:
        squares = self._per_sample(param, *args).square()
        return squares.sum((0, 1) if self._sum_batch in (True, None) else 0)


class LossStart(MatToJacMat):
    """Starts at a loss with the root of its Hessian that the extension asks for."""

    def backpropagate(
        self, ext: Any, module: Module, grad_inp: Any, grad_out: Any, backproped: Any
    ) -> Tensor:
        """The exact or sampled root.

        Raises:
            NotImplementedError: The extension asks for something else.
        """
        derivatives: Any = self.derivatives
        samples = ext.get_subsampling()
        if ext.loss_hessian_strategy == LossHessianStrategy.EXACT:
            root: Tensor = derivatives.sqrt_hessian(module, grad_inp, grad_out, subsampling=samples)
            return root
        if ext.loss_hessian_strategy == LossHessianStrategy.SAMPLING:
            count = ext.get_num_mc_samples()
            sampled: Tensor = derivatives.sqrt_hessian_sampled(
                module, grad_inp, grad_out, mc_samples=count, subsampling=samples
            )
            return sampled
        raise NotImplementedError(f"Unknown hessian strategy {ext.loss_hessian_strategy}")


class SqrtGGNBaseLossModule(LossStart, SqrtGGNBaseModule):
    """Where the square root of the generalised Gauss-Newton matrix starts."""


class DiagGGNLoss(LossStart, DiagGGNBaseModule):
    """Where the diagonal of the generalised Gauss-Newton matrix starts."""


class CoreModule(_PerParameter):
    """One layer under an extension of the core: what is handed on is the core's own quantity."""

    core_extension: ClassVar[type[Extension]]

    def __init__(self, derivatives: BaseDerivatives, params: list[str] | None = None) -> None:
        self.derivatives = derivatives
        self._fill(params)
        super().__init__(params)

    def _extension(self, ext: Any) -> Extension:
        kind: Any = self.core_extension
        extension: Extension = ext if isinstance(ext, kind) else kind()
        return extension

    def _value(
        self, param: str, ext: Any, module: Module, g_inp: Any, g_out: Any, backproped: Any
    ) -> Any:
        view = subsample(checked_view(module, g_out), ext.get_subsampling())
        extension = self._extension(ext)
        quantity = adopt(extension.propagator, backproped)
        (reading,) = extension.propagator.products(
            parametric_rule_for(module, param), view, (param,), quantity
        )
        return extension.read(reading)

    def backpropagate(
        self, ext: Any, module: Module, g_inp: Any, g_out: Any, backproped: Any
    ) -> Any:
        """What the extension's propagator does at this layer or loss."""
        propagator, rule = self._extension(ext).propagator, rule_for(module)
        if isinstance(rule, LossRule):
            view = subsample(loss_view(module, g_out), ext.get_subsampling())
            return present(propagator.start(rule, view))
        view = subsample(checked_view(module, g_out), ext.get_subsampling())
        sent = propagator.propagate(rule, view, adopt(propagator, backproped))
        for position, new in propagator.residual(rule, view).items():
            sent[position] = propagator.merge(sent[position], new) if position in sent else new
        return present(sent[0])


class DiagHBaseModule(CoreModule):
    """Diagonal of the Hessian of one layer."""

    core_extension = diag_hessian.DiagHessian


class BatchDiagHBaseModule(CoreModule):
    """Diagonals of the Hessians of single samples of one layer."""

    core_extension = diag_hessian.BatchDiagHessian


class HBPBaseModule(CoreModule):
    """Kronecker factors of one layer."""

    core_extension = kfac.KFLR

    def _extension(self, ext: Any) -> Extension:
        return extension_by(
            ext.get_curv_type(),
            ext.get_loss_hessian_strategy(),
            ext.get_backprop_strategy(),
            ext.get_ea_strategy(),
            ext.get_num_mc_samples(),
        )


class _Product(_PerParameter):
    """Products are taken from the graph of the loss: layers need no classes for them."""

    def __init__(self, derivatives: BaseDerivatives, params: list[str] | None = None) -> None:
        self.derivatives = derivatives
        self._fill(params)
        super().__init__(params)


class GGNMPBase(_Product):
    """Products with the generalised Gauss-Newton matrix of one layer."""


class HMPBase(_Product):
    """Products with the Hessian of one layer."""


class PCHMPBase(_Product):
    """Products with the positive-curvature Hessian of one layer."""
