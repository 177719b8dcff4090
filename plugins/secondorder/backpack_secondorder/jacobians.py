"""Products with the Jacobian of a model's output in parameters, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import ShapeError, UsageError
from backpack_products.transposition import somewhere
from backpack_secondorder.twice import gradients

Forward: TypeAlias = Callable[[Module, Any], tuple[Tensor, Any]]


class Jacobian:
    """``J``, ``[N, *] × [*θ]`` for each parameter, at the output for a batch.

    Attributes:
        output: The output with its graph, ``[N, *]``.
        target: The target of the batch.
    """

    def __init__(
        self, model: Module, forward: Forward, batch: Any, parameters: Sequence[Tensor]
    ) -> None:
        """Run the model."""
        self.output, self.target = checked(forward(model, batch))
        self._parameters = parameters

    def product(self, vectors: Sequence[Tensor | None]) -> Tensor:
        """``Σ_θ J_θ v_θ`` for one vector ``[*θ]`` of each parameter, ``[N, *]``; ``None`` is zero.

        The transposed product is linear in ``u``; its derivative in ``u`` is this product.
        """
        dummy, images = self._transposed
        pairs = [
            (image, vector)
            for image, vector in zip(images, vectors, strict=True)
            if vector is not None
        ]
        return combined(pairs, [dummy])[0]

    def transposed_product(
        self, vector: Tensor, parameters: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """``J_θᵀ u`` for ``u`` of shape ``[N, *]``: ``[*θ]`` for each parameter, or some."""
        chosen = self._parameters if parameters is None else parameters
        return differentiated(self.output, chosen, vector)

    @cached_property
    def _transposed(self) -> tuple[Tensor, Sequence[Tensor]]:
        dummy = somewhere(self.output)
        return dummy, differentiated(self.output, self._parameters, dummy, create_graph=True)


def differentiated(
    output: Tensor,
    parameters: Sequence[Tensor],
    vector: Tensor | None = None,
    create_graph: bool = False,
) -> list[Tensor]:
    """``Jᵀ vector``; zeros where the output does not depend on a parameter."""
    return combined([(output, vector)], parameters, create_graph)


def combined(
    pairs: Sequence[tuple[Tensor, Tensor | None]],
    parameters: Sequence[Tensor],
    create_graph: bool = False,
) -> list[Tensor]:
    """``Σ_k J_kᵀ v_k`` for outputs ``y_k`` and vectors ``v_k``."""
    live = [(output, vector) for output, vector in pairs if output.requires_grad]
    if not live:
        return [torch.zeros_like(parameter) for parameter in parameters]
    outputs, vectors = zip(*live, strict=True)
    return gradients(outputs, parameters, vectors, create_graph)


def inputs_and_target(model: Module, batch: Any) -> tuple[Tensor, Any]:
    """Output and target of a batch ``(inputs, target)``, on the device of the model."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(
            f"A batch must be a pair (inputs, target). Got {type(batch).__name__}. Give one batch "
            "as a list, [(inputs, target)]. For batches of another kind, say how to use them: "
            "forward=lambda model, batch: (output, target)."
        )
    device = next(model.parameters()).device
    inputs, target = (on_device(part, device) for part in batch)
    if isinstance(inputs, Mapping):
        return model(**inputs), target
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs), target


def on_device(value: Any, device: torch.device) -> Any:
    """Copies of tensors in dictionaries, tuples and lists: a model may write into its inputs."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: on_device(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [on_device(part, device) for part in value]
    return value


def checked(found: Any) -> tuple[Tensor, Any]:
    """Check that a pair is an output with samples and a target, and return it.

    Raises:
        ShapeError: The output is not a tensor with an axis of samples.
    """
    output, target = found
    if not isinstance(output, Tensor) or not output.dim():
        raise ShapeError(
            f"The output of the model must be a tensor [N, *]. Got {type(output).__name__}. Let "
            "the model return the tensor, or, where forward= is taken, take the tensor out: "
            "forward=lambda model, batch: (model(**batch).logits, batch['labels'])."
        )
    return output, target
