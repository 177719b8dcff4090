"""Products of a vector with the block of a parameter, without the block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor

from backpack_core import (
    AffineRule,
    Columns,
    LayerRule,
    ModuleCall,
    ParametricRule,
    SecondOrderExtension,
    ops,
)
from backpack_core.errors import OverwrittenInputError, ShapeError, UsageError
from backpack_core.extension import FailMode, as_subsampling
from backpack_core.ops import MaterializedRule
from backpack_secondorder.diag_hessian import require_linear
from backpack_secondorder.hessian import Hessian
from backpack_secondorder.propagators import LossSqrt
from backpack_secondorder.signed_sqrt import SignedSqrt


class BlockProduct:
    """``v ↦ Σ_n J_nᵀ H_n J_n v`` for one parameter; a function of tensors ``[V, *θ]``.

    It keeps what it needs of the backward pass that made it (the layer's input, and the Hessian or
    its root at the layer's output) until it is dropped or overwritten by the next one.
    """

    def __init__(self, rule: LayerRule, call: ModuleCall, name: str, hessian: Hessian) -> None:
        """Keep the parts.

        Args:
            rule: How the module differentiates.
            call: The forward execution.
            name: Name of the parameter ``θ``.
            hessian: ``H`` at the call's output.
        """
        self._rule = rule
        self._call = call.retained()
        self._name = name
        self._hessian = hessian
        self._shape = call.parameter(name).shape
        self._is_differentiable = torch.is_grad_enabled()  # with create_graph=True
        self._versions = [p._version for p in call.module.parameters()]

    def __call__(self, vectors: Tensor) -> Tensor:
        """Multiply.

        Args:
            vectors: Shape ``[V, *θ]``.

        Returns:
            Shape ``[V, *θ]``.

        Raises:
            ShapeError: The vectors do not have the parameter's shape.
            OverwrittenInputError: The layer's parameters changed, and its Jacobian with them.
        """
        if vectors.dim() != 1 + len(self._shape) or vectors.shape[1:] != self._shape:
            raise ShapeError(
                f"Expected vectors of shape [V, {', '.join(map(str, self._shape))}]. "
                f"Got {list(vectors.shape)}."
            )
        if isinstance(self._rule, MaterializedRule):
            return self._of_shared(self._rule.product, vectors)
        rule = self._rule
        assert isinstance(rule, ParametricRule)
        # The Jacobian of an affine layer is made of its inputs alone.
        changed = self._versions != [p._version for p in self._call.module.parameters()]
        if changed and not isinstance(rule, AffineRule):
            raise OverwrittenInputError(
                f"The parameters of {self._call.path} changed since the backward pass that made "
                "this product: run another one."
            )
        # Under autocast, the layer computes in another dtype than its parameters have.
        vectors_there = vectors.to(self._call.dtype)
        with nullcontext() if self._is_differentiable else self._call.constant():
            outputs = rule.param_jac_mat_prod(self._call, self._name, vectors_there)
            columns = self._hessian.matmul(outputs)
            product = ops.per_sample_sum(rule, self._call, self._name, columns)
        self._call.memo.clear()
        return product.to(vectors.dtype)

    @staticmethod
    def _of_shared(product: Tensor, vectors: Tensor) -> Tensor:
        """The same from ``M``, the sum over the calls that share the parameter."""
        rows = product.flatten(2).flatten(0, 1)
        return (vectors.flatten(1) @ rows.T @ rows).reshape(vectors.shape)


class ProductExtension(SecondOrderExtension):
    """What stores a :class:`BlockProduct`.

    Class attributes:
        propagator_type: What travels backwards.
    """

    propagator_type: ClassVar[type[LossSqrt] | type[SignedSqrt]]

    def __init__(
        self,
        savefield: str | None = None,
        subsampling: Sequence[int] | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute on parameters; default: the class's.
            subsampling: Indices of the samples to take; default: all.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        propagator = self.propagator_type(subsampling=as_subsampling(subsampling))
        super().__init__(propagator, savefield, fail_mode)


class GGNMP(ProductExtension):
    """Products with the blocks of the generalised Gauss-Newton matrix.

    Stored in ``ggnmp``, a function ``[V, *θ] → [V, *θ]`` that multiplies each of ``V`` vectors with
    ``Σ_n J_nᵀ ∇²ℓ_n J_n``, where ``J_n`` is the Jacobian of the model's output in this parameter.
    Scaled as the loss. Schraudolph (2002).
    """

    savefield = "ggnmp"
    propagator_type = LossSqrt

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> BlockProduct:
        """The function."""
        return BlockProduct(rule, call, name, Hessian(Columns.start("loss", mat)))


class HMP(ProductExtension):
    """Products with the blocks of the Hessian.

    Stored in ``hmp``, a function ``[V, *θ] → [V, *θ]`` that multiplies each of ``V`` vectors with
    ``∂²ℓ/∂θ²``. Scaled as the loss. What :class:`~backpack_secondorder.diag_hessian.DiagHessian`
    requires of a net, this does, too.
    """

    savefield = "hmp"
    shared_parameters = False
    propagator_type = SignedSqrt

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Hessian) -> BlockProduct:
        """The function."""
        require_linear(rule, call, name)
        return BlockProduct(rule, call, name, mat)


class PCHMP(HMP):
    """Products with the blocks of the positive-curvature Hessian.

    Stored in ``pchmp``, a function ``[V, *θ] → [V, *θ]``. The recursion is that of the Hessian,
    with the residual of every nonlinear layer (and the Hessian of the loss, where it is indefinite)
    made positive semi-definite: negative eigenvalues are set to zero (``"clip"``) or made positive
    (``"abs"``). The result is positive semi-definite, but no projection of the Hessian. Chen et al.
    (2018), arXiv:1802.06502.
    """

    savefield = "pchmp"
    modifications: ClassVar[tuple[str, ...]] = ("clip", "abs")

    def __init__(
        self,
        savefield: str | None = None,
        modify: Literal["clip", "abs"] = "clip",
        subsampling: Sequence[int] | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute on parameters; default: ``"pchmp"``.
            modify: What is done to negative eigenvalues.
            subsampling: Indices of the samples to take; default: all.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.

        Raises:
            UsageError: The modification is unknown.
        """
        if modify not in self.modifications:
            raise UsageError(f"modify must be one of {self.modifications}. Got {modify!r}.")
        super().__init__(savefield, subsampling, fail_mode)
        self.propagator = SignedSqrt(modify, self.subsampling)

    def get_modification_mode(self) -> str:
        """What is done to negative eigenvalues."""
        assert isinstance(self.propagator, SignedSqrt)
        return self.propagator.residual
