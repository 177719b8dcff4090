"""Products with the Jacobian of the model's output in both directions, without forming it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from reprlib import repr as abridged
from typing import Any

import torch
from torch import Tensor

from backpack_core import View
from backpack_core.autocast import without_autocast
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_products.contexts import suspended
from backpack_products.transposition import somewhere
from backpack_secondorder.operators import edge_at_input, is_finite
from backpack_secondorder.products import (
    FUNCTION,
    CollectingReading,
    GraphBlock,
    ProductExtension,
    of_one_or_several,
)
from backpack_secondorder.residual import live_inputs
from backpack_secondorder.torch_errors import explained
from backpack_secondorder.twice import gradients, nodes_behind
from backpack_secondorder.whole import GraphReading, LossGraph


class OutputJacobian:
    """``J``, ``[N, *out] × [*θ]`` for each parameter, at the output of one backward pass.

    Attributes:
        parameters: The parameters that the pass reached.
        output_shape: ``[N, *out]``, of the chosen samples.
    """

    def __init__(self, graph: LossGraph, view: View) -> None:
        """Keep the graph.

        Args:
            graph: The graph.
            view: The loss, with the samples that take part.
        """
        self.parameters = graph.parameters
        self.output_shape = view.input_shape
        self._chosen = view.indices
        self._like = view.stored.inputs[0].detach()
        self._edge = edge_at_input(view) if live_inputs(view) else None
        self._is_differentiable = torch.is_grad_enabled()

    def product(self, vectors: Mapping[Tensor, Tensor]) -> Tensor:
        """``Σ_θ J_θ v_θ``.

        Args:
            vectors: ``v_θ``, ``[*θ]``, by parameter; zero for all others. A parameter that the
                output does not depend on adds nothing.

        Returns:
            Shape ``[N, *out]``, in the dtype of the vectors.

        Raises:
            ShapeError: A vector does not have the shape of its parameter.
            UsageError: None of the keys is a parameter of the pass.
            UnsupportedError: An operation of the net has no finite second derivative.
        """
        self._check(vectors)
        dtype = reduce(torch.promote_types, {vector.dtype for vector in vectors.values()})
        with suspended(), without_autocast(), explained():
            dummy, images = self._images
            # The transposed product is linear in the dummy: its derivative is the product.
            pairs = [(image, vectors.get(parameter)) for parameter, image in images]
            given = [(image, vector) for image, vector in pairs if vector is not None]
            if not given:
                return self._cut(torch.zeros_like(dummy, dtype=dtype).detach())
            outputs, directions = zip(*given, strict=True)
            (found,) = gradients(outputs, (dummy,), directions, self._is_differentiable)
        if not is_finite(found) and all(map(is_finite, directions)):
            raise UnsupportedError(
                "The Jacobian of the net times a finite vector is not finite. An operation has no "
                "finite second derivative in torch where it was evaluated (a power or a root of "
                "zero), or the net has none. Use Jacobians, which needs only first derivatives."
            )
        return self._cut(found.to(dtype))

    def transposed(
        self, vector: Tensor, parameters: Sequence[Tensor] | None = None
    ) -> dict[Tensor, Tensor]:
        """``J_θᵀ u``, ``[*θ]``, by parameter.

        Args:
            vector: ``u``, shape ``[N, *out]``.
            parameters: Some of the parameters; default: all.

        Raises:
            ShapeError: The vector does not have the output's shape.
        """
        if vector.shape != self.output_shape:
            raise ShapeError(
                f"Expected a vector of the output's shape {list(self.output_shape)}. Got "
                f"{list(vector.shape)}."
            )
        with suspended(), without_autocast(), explained():
            whole = self._widened(vector.to(self._like.dtype))
            return self._sent(whole, parameters or self.parameters, self._is_differentiable)

    @cached_property
    def _images(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """A dummy ``u`` at the output; by parameter ``Jᵀ u`` as a function of it, unless zero."""
        dummy = somewhere(self._like)
        sent = self._sent(dummy, self.parameters, True).items()
        return dummy, [(parameter, image) for parameter, image in sent if image.requires_grad]

    def _sent(
        self, vector: Tensor, parameters: Sequence[Tensor], create_graph: bool
    ) -> dict[Tensor, Tensor]:
        if self._edge is None:
            return {parameter: torch.zeros_like(parameter) for parameter in parameters}
        grads = gradients((self._start,), parameters, (vector,), create_graph)
        return dict(zip(parameters, grads, strict=True))

    @cached_property
    def _start(self) -> Any:
        """The edge of the output, if all gradients behind it are derivatives."""
        edge: Any = self._edge
        nodes_behind((edge,))
        return edge

    def _check(self, vectors: Mapping[Tensor, Tensor]) -> None:
        if not isinstance(vectors, Mapping) or not any(p in vectors for p in self.parameters):
            raise UsageError(
                "Give vectors by parameter, for at least one parameter of the pass: "
                f"product({{p: torch.randn_like(p) for p in model.parameters()}}). Got "
                f"{abridged(vectors)}."
            )
        for parameter, vector in vectors.items():
            if vector.shape != parameter.shape:
                raise ShapeError(
                    f"Expected a vector of the parameter's shape {list(parameter.shape)}. Got "
                    f"{list(vector.shape)}."
                )

    def _cut(self, whole: Tensor) -> Tensor:
        return whole if self._chosen is None else whole[list(self._chosen)]

    def _widened(self, some: Tensor) -> Tensor:
        if self._chosen is None:
            return some
        chosen = torch.tensor(self._chosen, device=some.device)
        return torch.zeros_like(self._like).index_add(0, chosen, some)

    def __repr__(self) -> str:
        """The shape of the output, and the number of parameters."""
        return f"<{type(self).__name__} of {list(self.output_shape)} in {len(self.parameters)}>"


class JacobianBlock(GraphBlock):
    """``v ↦ J_θ v`` and ``u ↦ J_θᵀ u`` for one parameter."""

    field = "jmp"
    whole: OutputJacobian

    def __call__(self, vectors: Tensor) -> Tensor:
        """``J_θ v``.

        Args:
            vectors: One of the parameter's shape ``[*θ]``, or several, ``[V, *θ]``.

        Returns:
            Shape ``[N, *out]`` or ``[V, N, *out]``.

        Raises:
            ShapeError: The vectors do not have the parameter's shape.
        """
        one = lambda vector: self.whole.product({self._parameter: vector})  # noqa: E731
        function = partial(_stacked, one, self.whole.output_shape)
        return of_one_or_several(function, vectors, self._parameter.shape)

    def transposed(self, vectors: Tensor) -> Tensor:
        """``J_θᵀ u``.

        Args:
            vectors: One of the output's shape ``[N, *out]``, or several, ``[V, N, *out]``.

        Returns:
            Shape ``[*θ]`` or ``[V, *θ]``.

        Raises:
            ShapeError: The vectors do not have the output's shape.
        """
        parameter = self._parameter
        one = lambda vector: self.whole.transposed(vector, (parameter,))[parameter]  # noqa: E731
        function = partial(_stacked, one, parameter.shape)
        return of_one_or_several(function, vectors, self.whole.output_shape)


def _stacked(function: Callable[[Tensor], Tensor], shape: torch.Size, vectors: Tensor) -> Tensor:
    """Apply a function of one vector to several, ``[V, *shape]``, one after the other."""
    return torch.stack([*map(function, vectors)]) if len(vectors) else vectors.new_zeros(0, *shape)


class JMP(ProductExtension):
    """Products with the Jacobian of the model's output, in both directions.

    Stored in ``jmp``, a :class:`JacobianBlock` of the output ``f``, ``[N, *out]``, that an extended
    loss receives (:class:`~backpack_secondorder.outputs.SumOutputs` if the model has no loss):

    - ``param.jmp(v)``: ``J_θ v``, ``[*θ] → [N, *out]``, by differentiating the transposed product;
    - ``param.jmp.transposed(u)``: ``J_θᵀ u``, ``[N, *out] → [*θ]``, one backward pass;
    - ``param.jmp.whole``: both over all parameters, :class:`OutputJacobian`.

    Several vectors at once have another axis in front. Products do not depend on the loss or its
    scale. They exist wherever autograd can differentiate twice, even if samples influence each
    other. The Jacobian itself is :class:`~backpack_secondorder.output_jacobian.Jacobians`.
    """

    savefield = "jmp"
    degree = 0
    over_batches = FUNCTION
    is_of_losses = True

    def begin(self) -> GraphReading:
        """A reading that finds the loss."""
        return _OfOneLoss(self.subsampling)


class _OfOneLoss(CollectingReading):
    """The reading of ``JMP``."""

    def results(self, graph: LossGraph) -> Mapping[Tensor, JacobianBlock]:
        """One Jacobian, a block for each parameter."""
        self._require_losses("JMP")
        if len(self._losses) != 1:
            raise UnsupportedError(
                f"JMP belongs to one output, but {len(self._losses)} extended losses took part. Go "
                "backward from one of them, or join the outputs for one loss: "
                "SumOutputs()(torch.cat([a, b], 1))."
            )
        whole = OutputJacobian(graph, self._losses[0])
        return {parameter: JacobianBlock(whole, parameter) for parameter in graph.parameters}
