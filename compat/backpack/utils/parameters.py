"""Parameters as lists and vectors, and diagonals of linear layers. Imports core's operations."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, typename
from torch.nn import Linear, Module

from backpack_compat.views import parametric_rule_for, view_of
from backpack_products.operations import per_sample_square_sum, square_sum


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a vector into views of the shapes of parameters.

    Args:
        vec: The vector, as from ``torch.nn.utils.parameters_to_vector``.
        parameters: Tensors of the wanted shapes. They do not change.

    Returns:
        One tensor for each parameter.

    Raises:
        TypeError: ``vec`` is not a tensor.
    """
    if not isinstance(vec, Tensor):
        raise TypeError(f"expected Tensor, but got: {typename(vec)}")
    shapes = [parameter.shape for parameter in parameters]
    pieces = vec.detach()[: sum(s.numel() for s in shapes)].split([s.numel() for s in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def extract_weight_diagonal(module: Linear, S: Tensor, sum_batch: bool = True) -> Tensor:
    """``diag(Σ_v JᵀS_v (JᵀS_v)ᵀ)`` for the weight of a linear layer.

    Args:
        module: The layer, with its inputs and output.
        S: Columns at its output ``[V, N, *out]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Shape ``[*weight]``, or ``[N, *weight]``.
    """
    return squares(module, "weight", S, sum_batch)


def extract_bias_diagonal(module: Linear, S: Tensor, sum_batch: bool = True) -> Tensor:
    """The same for the bias."""
    return squares(module, "bias", S, sum_batch)


def squares(module: Module, name: str, columns: Tensor, sum_batch: bool) -> Tensor:
    """Squared transposed Jacobian products, summed over columns."""
    operation = square_sum if sum_batch else per_sample_square_sum
    return operation(
        parametric_rule_for(module, name).param_product(view_of(module), name, columns)
    )
