"""Products of vectors with the curvature block of a parameter, without forming the block.

They are second derivatives of the loss, computed from its graph at each product: exact for every
architecture that autograd can differentiate twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from reprlib import repr as abridged
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from backpack_core import View
from backpack_core.contract.extension import FailMode
from backpack_core.errors import SampleMixingError, ShapeError, UsageError
from backpack_core.graph import refuse
from backpack_operations.chosen import of_samples
from backpack_products.derivatives import second_order
from backpack_products.extensions import as_subsampling
from backpack_products.merging import Refused
from backpack_secondorder.operators import (
    CurvatureOperator,
    HessianOperator,
    Operator,
    Term,
    loss_terms,
    positive_term,
    require_losses,
)
from backpack_secondorder.whole import GraphExtension, GraphReading, LossGraph

FUNCTION = Refused(
    "its value is a function with the graph of one batch: use the linear operators over a data "
    "set, which differentiate one batch after the other."
)


class GraphBlock:
    """The block of one parameter in a matrix that is given by the graph of a backward pass.

    It keeps the graph alive until it is deleted, or until the next pass overwrites it.

    Attributes:
        whole: The matrix over all parameters of the pass, the same object on each.
    """

    field: ClassVar[str]

    def __init__(self, whole: Any, parameter: Tensor) -> None:
        """Store the matrix and the parameter.

        Args:
            whole: The matrix over all parameters.
            parameter: ``θ``.
        """
        self.whole = whole
        self._parameter = parameter

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled, alone or on a parameter of a model.

        Raises:
            UsageError: Always: a graph cannot be copied or pickled.
        """
        raise UsageError(
            f"{self!r} holds the graph of its backward pass, which cannot be copied or pickled. "
            f"Delete the field from the parameters first (del parameter.{self.field}, or the name "
            "it is saved under), or save model.state_dict()."
        )

    def __repr__(self) -> str:
        """The kind of matrix and the parameter's shape."""
        return f"<block of {self.whole!r} for a parameter of shape {list(self._parameter.shape)}>"


class BlockProduct(GraphBlock):
    """``v ↦ F v`` for one parameter, with ``F`` its block of a curvature matrix."""

    field = "hmp"
    whole: Operator

    def __call__(self, vectors: Tensor) -> Tensor:
        """Multiply.

        Args:
            vectors: One of the parameter's shape ``[*θ]``, or several, ``[V, *θ]``.

        Returns:
            The same shape.

        Raises:
            ShapeError: The vectors do not have the parameter's shape.
            UsageError: The vectors are not a tensor.
            OverwrittenInputError: Parameters changed since the backward pass.
            UnsupportedError: An operation of the net has no finite second derivative.
        """
        function = partial(self.whole.multiply, self._parameter)
        return of_one_or_several(function, vectors, self._parameter.shape)


def of_one_or_several(
    function: Callable[[Tensor], Tensor], vectors: Tensor, shape: torch.Size
) -> Tensor:
    """Apply a function of vectors ``[V, *shape]`` to one vector or several.

    Raises:
        ShapeError: The vectors have another shape.
        UsageError: The vectors are not a tensor.
    """
    if not isinstance(vectors, Tensor):
        raise UsageError(f"A block can only multiply tensors. Got {abridged(vectors)}.")
    if vectors.shape == shape:
        return function(vectors.unsqueeze(0)).squeeze(0)
    if vectors.dim() != 1 + len(shape) or vectors.shape[1:] != shape:
        sizes = ", ".join(map(str, shape))
        raise ShapeError(
            f"Expected a vector of shape [{sizes}], or several as [V, {sizes}]. "
            f"Got {list(vectors.shape)}."
        )
    return function(vectors)


class ProductExtension(GraphExtension):
    """An extension that stores a :class:`BlockProduct`."""

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
        super().__init__(as_subsampling(subsampling), savefield, fail_mode)
        self.is_of_losses |= subsampling is not None


class GGNMP(ProductExtension):
    """Products with the blocks of the generalised Gauss-Newton matrix.

    Stored in ``ggnmp``, a function of one vector ``[*θ]`` or several ``[V, *θ]`` that multiplies
    by ``Jᵀ ∇²ℓ J``, with the Jacobian ``J`` of the model's output in this parameter. It scales as
    the loss, which must be extended. It exists wherever autograd can differentiate twice, even if
    samples influence each other. Schraudolph (2002).
    """

    savefield = "ggnmp"
    degree = 1
    over_batches = FUNCTION
    is_of_losses = True

    def begin(self) -> GraphReading:
        """Collect the losses."""
        return _OfOutputs(self.subsampling)


class HMP(ProductExtension):
    """Products with the blocks of the Hessian.

    Stored in ``hmp``, a function of one vector ``[*θ]`` or several ``[V, *θ]`` that multiplies by
    ``∂²ℓ/∂θ²``, by differentiating the gradient (Pearlmutter, 1994). It scales as the loss. It
    exists wherever autograd can differentiate twice, even if samples influence each other.
    """

    savefield = "hmp"
    degree = 1
    over_batches = FUNCTION

    def begin(self) -> GraphReading:
        """Collect the losses: subsampling chooses from their samples."""
        return OfLoss(self.subsampling)


class PCHMP(ProductExtension):
    """Products with the blocks of the positive-curvature Hessian.

    Stored in ``pchmp``, a function of one vector ``[*θ]`` or several ``[V, *θ]``. The matrix is
    that of the recursion of the Hessian, ``Σ_c J_cᵀ R_c J_c`` over all nonlinear modules ``c`` and
    the loss, with the residual ``R_c`` of each (``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``, at the module's input)
    made positive semi-definite: negative eigenvalues are set to zero (``"clip"``) or made positive
    (``"abs"``). The result is positive semi-definite, but not a projection of the Hessian.
    Operations between modules must be linear. Residuals must be those of single samples: the pass
    refuses a module that makes samples influence each other. Chen et al. (2018), arXiv:1802.06502.
    """

    savefield = "pchmp"
    degree = 1
    over_batches = FUNCTION
    is_of_losses = True
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
            savefield: Name of the attribute on parameters; default: the class's.
            modify: What is done to negative eigenvalues of residuals.
            subsampling: Indices of the samples to take; default: all.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.

        Raises:
            UsageError: The modification is unknown.
        """
        if modify not in self.modifications:
            raise UsageError(f"modify must be one of {self.modifications}. Got {modify!r}.")
        super().__init__(savefield, subsampling, fail_mode)
        self.modify: Literal["clip", "abs"] = modify

    def begin(self) -> GraphReading:
        """Collect residuals."""
        return _OfResiduals(self.subsampling, self.modify)


class CollectingReading(GraphReading):
    """A reading that collects the losses of a pass, and the other calls that it reached."""

    def __init__(self, subsampling: tuple[int, ...] | None) -> None:
        self._subsampling = subsampling
        self._losses: list[View] = []
        self._others: list[View] = []

    def observe(self, view: View) -> None:
        """Collect losses, and other calls."""
        if view.call.rule.is_loss:
            view.call.rule.check(view)
            self._losses.append(of_samples(view, self._subsampling))
        elif view.is_reached:
            self._others.append(view)

    def _require_losses(self, who: str) -> None:
        require_losses(self._losses, self._others, who)

    def _stored(self, operator: Operator, graph: LossGraph) -> dict[Tensor, BlockProduct]:
        return {parameter: BlockProduct(operator, parameter) for parameter in graph.parameters}


class _OfOutputs(CollectingReading):
    """The reading of ``GGNMP``."""

    def results(self, graph: LossGraph) -> dict[Tensor, BlockProduct]:
        """One matrix, a block for each parameter."""
        self._require_losses("GGNMP")
        terms = [term for view in self._losses for term in loss_terms(view)]
        return self._stored(CurvatureOperator(graph, terms), graph)


class OfLoss(CollectingReading):
    """The reading of ``HMP`` and ``DiagHMP``."""

    def observe(self, view: View) -> None:
        """Collect losses if samples are chosen: the Hessian of all needs no rule of a loss."""
        if self._subsampling is not None:
            super().observe(view)

    def operator(self, graph: LossGraph) -> HessianOperator:
        """The Hessian of the losses, for the chosen samples."""
        if self._subsampling is None:
            return HessianOperator(graph)
        self._require_losses("The Hessian of some samples")
        return HessianOperator(graph, self._losses)

    def results(self, graph: LossGraph) -> Mapping[Tensor, Any]:
        """One matrix, a block for each parameter."""
        return self._stored(self.operator(graph), graph)


class _OfResiduals(CollectingReading):
    """The reading of ``PCHMP``."""

    def __init__(self, subsampling: tuple[int, ...] | None, modify: Literal["clip", "abs"]) -> None:
        super().__init__(subsampling)
        self._modify = modify
        self._terms: list[Term] = []

    def observe(self, view: View) -> None:
        """Collect losses, and the residuals of nonlinear calls."""
        super().observe(view)
        rule = view.call.rule
        if rule.mixes_samples(view):
            raise SampleMixingError(
                f"{view.path} makes samples of the batch influence each other, so it has no "
                "residual for each sample, which PCHMP needs: call model.eval(), or use GGNMP or "
                "HMP, which exist here."
            )
        is_curved = not (rule.transparent or second_order(rule).hessian_is_zero)
        if is_curved and not rule.is_loss:
            rule.check(view)
        if rule.is_loss or is_curved:
            view = of_samples(view, self._subsampling)
            self._terms += positive_term(rule, view, self._modify)

    def results(self, graph: LossGraph) -> dict[Tensor, BlockProduct]:
        """One matrix, a block for each parameter."""
        self._require_losses("PCHMP")
        for node in graph.nonlinear():
            why = "it is not known to be linear, but the positive-curvature Hessian needs that"
            raise refuse(
                node,
                why,
                "Use HMP or GGNMP, if the model returns a derivative of itself "
                "(torch.autograd.grad(..., create_graph=True)). Otherwise move the operation into "
                "a module and give it a layer rule.",
            )
        return self._stored(CurvatureOperator(graph, self._terms), graph)
