"""Derivatives of layers by layer rules, with the incumbent's methods. Imports backpack_core only.

The methods take a module with ``input0``, ``input1``, …, and ``output``, as it is after a forward
pass and inside hooks. A subclass for a new module overrides the methods with an underscore; the
layer rule for the module's type answers those that it does not override.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_compat.roots import with_every_column
from backpack_compat.views import (
    Grads,
    checked_view,
    loss_rule_for,
    loss_view,
    mixes_samples,
    parametric_rule_for,
    rule_for,
)
from backpack_products import derivatives
from backpack_products.derivatives import second_order
from backpack_products.operations import batch_sum, dense
from backpack_products.some_samples import subsample

Subsampling = Sequence[int] | None

__all__ = ["BaseDerivatives", "BaseLossDerivatives", "BaseParameterDerivatives"]

P = ParamSpec("P")
R = TypeVar("R")


def in_backward_mode(method: Callable[P, R]) -> Callable[P, R]:
    """Compute as autograd's hooks do: with a graph only inside ``backward(create_graph=True)``."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        in_backward = torch._C._current_graph_task_id() != -1
        with torch.set_grad_enabled(in_backward and torch.is_grad_enabled()):
            return method(*args, **kwargs)

    return wrapped


class BaseDerivatives(ABC):  # noqa: B024 - as its users know it
    """First and second derivatives of a layer without parameters.

    ``V`` columns, ``N`` samples. Products take a matrix ``[V, N, *]`` or a vector ``[N, *]``, and
    return the same kind. ``g_inp`` may always be ``None``, ``g_out`` unless a second derivative is
    computed.
    """

    @in_backward_mode
    def jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Input Jacobian times columns: ``[V, N, *in] → [V, N, *out]``."""
        return _columns(
            lambda m: self._jac_mat_prod(module, g_inp, g_out, m), mat, _input(module), "input0"
        )

    @in_backward_mode
    def jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Subsampling = None,
    ) -> Tensor:
        """Transposed input Jacobian times columns: ``[V, N, *out] → [V, N, *in]``.

        With ``subsampling``, columns and result hold those samples only.
        """
        return _columns(
            lambda m: self._jac_t_mat_prod(module, g_inp, g_out, m, subsampling=subsampling),
            mat,
            _output_shape(module, subsampling),
            "output",
        )

    @in_backward_mode
    def ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """``1/N Σ_n J_nᵀ mat J_n``: ``[D_out, D_out] → [D_in, D_in]``."""
        samples, *features = _output_shape(module, None)
        rows = mat.reshape(-1, 1, *features).expand(-1, samples, *features)
        half = self._jac_t_mat_prod(module, g_inp, g_out, rows)  # [D_out, N, *in]
        size = half.shape[2:].numel()
        columns = half.reshape(-1, samples, size).permute(2, 1, 0)
        whole = self._jac_t_mat_prod(
            module, g_inp, g_out, columns.reshape(size, samples, *features)
        )
        return whole.reshape(size, samples, size).sum(1).T / samples

    def hessian_is_zero(self, module: Module) -> bool:
        """Whether ``∂²output/∂input²`` vanishes."""
        return second_order(rule_for(module)).hessian_is_zero and not mixes_samples(module)

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Whether ``∂²output_o/∂input_i∂input_j`` vanishes unless ``o = i = j``."""
        return second_order(rule_for(module)).hessian_is_diagonal and not mixes_samples(module)

    @in_backward_mode
    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        """``∂²output_i/∂input_i² · g_out_i``. Shape of the input."""
        ones = torch.ones_like(module.input0).unsqueeze(0)  # type: ignore[arg-type]
        return self._residual_mat_prod(module, g_in, g_out, ones).squeeze(0)

    def hessian_is_psd(self) -> bool:
        """Whether the Hessian is positive semi-definite."""
        raise NotImplementedError(f"{type(self).__name__} says nothing about its Hessian's sign.")

    @in_backward_mode
    def residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """``Σ_o g_out_o ∂²output_o/∂input²`` times columns: ``[V, N, *in] → [V, N, *in]``."""
        return _columns(
            lambda m: self._residual_mat_prod(module, g_inp, g_out, m),
            mat,
            _input(module),
            "input0",
        )

    @classmethod
    def reshape_like_input(
        cls, mat: Tensor, module: Module, subsampling: Subsampling = None
    ) -> Tensor:
        """Give a matrix the shape ``[V, *input]``, with fewer samples under ``subsampling``."""
        shape = _input(module)
        samples = shape[0] if subsampling is None else len(subsampling)
        return mat.reshape(-1, samples, *shape[1:])

    @classmethod
    def reshape_like_output(cls, mat: Tensor, module: Module) -> Tensor:
        """Give a matrix the shape ``[V, *output]``."""
        return mat.reshape(-1, *_output_shape(module, None))

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        view = checked_view(module, g_out)
        return derivatives.jac_mat_prod(rule_for(module), view, mat)

    def _jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Subsampling = None,
    ) -> Tensor:
        view = subsample(checked_view(module, g_out), subsampling)
        product = rule_for(module).jac_t_mat_prod(view, mat)[0]
        assert product is not None
        return product

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        view = checked_view(module, g_out)
        return derivatives.second_derivative_mat_prod(rule_for(module), view, g_out[0], mat)


class BaseParameterDerivatives(BaseDerivatives, ABC):
    """Derivatives of a layer with parameters."""

    @in_backward_mode
    def param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Subsampling = None,
    ) -> Tensor:
        """Transposed parameter Jacobian times columns.

        A subclass may have a method ``_{param_str}_jac_t_mat_prod`` for a parameter.

        Args:
            param_str: Name of the parameter ``θ``.
            module: The module, with inputs and output.
            g_inp: Gradients at the inputs, or ``None``.
            g_out: Gradients at the outputs, or ``None``.
            mat: Columns ``[V, N, *out]``, or one vector ``[N, *out]``.
            sum_batch: Whether to sum over samples.
            subsampling: The samples that ``mat`` holds; ``None`` for all.

        Returns:
            ``[V, *θ]``, or ``[V, N, *θ]`` without the sum; without ``V`` for a vector.
        """

        def product(columns: Tensor) -> Tensor:
            own = getattr(self, f"_{param_str}_jac_t_mat_prod", None)
            if own is not None:
                result: Tensor = own(
                    module, g_inp, g_out, columns, sum_batch=sum_batch, subsampling=subsampling
                )
                return result
            view = subsample(checked_view(module, g_out), subsampling)
            rule = parametric_rule_for(module, param_str)
            operation = batch_sum if sum_batch else dense
            return operation(rule.param_product(view, param_str, columns))

        return _columns(product, mat, _output_shape(module, subsampling), "output")

    @in_backward_mode
    def weight_jac_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """Weight Jacobian times columns: ``[V, *weight] → [V, N, *out]``."""
        return self._param_jac("weight", module, g_inp, g_out, mat)

    @in_backward_mode
    def bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Bias Jacobian times columns: ``[V, *bias] → [V, N, *out]``."""
        return self._param_jac("bias", module, g_inp, g_out, mat)

    def _param_jac(
        self, name: str, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        def product(columns: Tensor) -> Tensor:
            own = getattr(self, f"_{name}_jac_mat_prod", None)
            if own is not None:
                result: Tensor = own(module, g_inp, g_out, columns)
                return result
            rule = parametric_rule_for(module, name)
            return rule.param_jac_mat_prod(checked_view(module, g_out), name, columns)

        parameter: Tensor = getattr(module, name)
        return _columns(product, mat, parameter.shape, name)


class BaseLossDerivatives(BaseDerivatives, ABC):
    """Second derivatives of a loss. Where ``g_out`` is given, it scales them."""

    module_type: ClassVar[type[Module] | None] = None

    @in_backward_mode
    def sqrt_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """Columns ``S`` with ``∇²ℓ_n = Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[V, N, *in]``."""
        return self._sqrt_hessian(module, g_inp, g_out, subsampling=subsampling)

    @in_backward_mode
    def sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
    ) -> Tensor:
        """The same in expectation, by sampled targets. Shape ``[mc_samples, N, *in]``."""
        return self._sqrt_hessian_sampled(
            module, g_inp, g_out, mc_samples=mc_samples, subsampling=subsampling
        )

    def make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[[Tensor], Tensor]:
        """The function ``mat ↦ ∇²ℓ mat``, ``[V, N, *in] → [V, N, *in]``."""
        product = self._make_hessian_mat_prod(module, g_inp, g_out)
        shape = _input(module)
        return in_backward_mode(lambda mat: _columns(product, mat, shape, "input0"))

    @in_backward_mode
    def sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """``Σ_n ∇²ℓ_n``. Shape ``[*, *]`` with ``*`` the shape of one input: ``[D, D]``, say."""
        return self._sum_hessian(module, g_inp, g_out)

    def hessian_is_psd(self) -> bool:
        """Whether the loss Hessian is positive semi-definite."""
        if self.module_type is None:
            return super().hessian_is_psd()
        return loss_rule_for(self.module_type()).hessian_is_psd

    def _sqrt_hessian(
        self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        rule, view = loss_rule_for(module), subsample(loss_view(module, g_out), subsampling)
        return with_every_column(rule, rule.sqrt_hessian(view))

    def _sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
    ) -> Tensor:
        view = subsample(loss_view(module, g_out), subsampling)
        return loss_rule_for(module).sqrt_hessian_sampled(view, mc_samples)

    def _make_hessian_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads
    ) -> Callable[[Tensor], Tensor]:
        rule, view = loss_rule_for(module), loss_view(module, g_out)
        return lambda mat: rule.hessian_mat_prod(view, mat)

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        shape = _input(module)[1:]
        return loss_rule_for(module).sum_hessian(loss_view(module, g_out)).reshape(*shape, *shape)


def _input(module: Module) -> torch.Size:
    shape: torch.Size = module.input0.shape  # type: ignore[assignment]
    return shape


def _output_shape(module: Module, subsampling: Subsampling) -> torch.Size:
    shape: torch.Size = module.output.shape  # type: ignore[assignment]
    if subsampling is None:
        return shape
    return torch.Size([len(subsampling), *shape[1:]])


def _columns(
    product: Callable[[Tensor], Tensor], mat: Tensor, shape: torch.Size, like: str
) -> Tensor:
    """Apply a product of columns to columns or to a single vector of the given shape."""
    is_vector = mat.dim() == len(shape)
    columns = mat.unsqueeze(0) if is_vector else mat
    if columns.shape[1:] != shape:
        raise RuntimeError(
            f"A matrix like {like} has shape [V, {', '.join(map(str, shape))}]. "
            f"Got {list(mat.shape)}."
        )
    result = product(columns)
    return result.squeeze(0) if is_vector else result
