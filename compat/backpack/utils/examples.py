"""Data and references for examples. Imports Hessian-free products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.convert_parameters import parameters_to_vector
from torch.utils.data import DataLoader, Dataset

from backpack.utils import mnist
from backpack.utils.parameters import vector_to_parameter_list
from backpack_secondorder.hessianfree import ggn_vector_product


def load_mnist_dataset() -> Dataset[Any]:
    """The normalised training set of MNIST, downloaded into ``./data`` if it is missing.

    If there is neither a copy nor a network, a warning says so, and scikit-learn's digits, resized
    to 28x28, replace it.
    """
    return mnist.training_set(Path("data"))


def get_mnist_dataloader(batch_size: int = 64, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of MNIST.

    Args:
        batch_size: Number of samples.
        shuffle: Whether to draw them in random order.
    """
    return DataLoader(load_mnist_dataset(), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(
    batch_size: int = 64, shuffle: bool = True, flat: bool = False
) -> tuple[Tensor, Tensor]:
    """One batch of MNIST.

    Args:
        batch_size: Number of samples.
        shuffle: Whether to draw them in random order.
        flat: Whether to flatten the images.

    Returns:
        Images ``[N, 1, 28, 28]`` (``[N, 784]`` if flat) and labels ``[N]``.
    """
    images, labels = next(iter(get_mnist_dataloader(batch_size, shuffle)))
    return (images.flatten(1) if flat else images), labels


def autograd_diag_ggn_exact(
    X: Tensor, y: Tensor, model: Module, loss_function: Module, idx: Sequence[int] | None = None
) -> Tensor:
    """Diagonal of the generalised Gauss-Newton matrix, column by column.

    Args:
        X: Inputs.
        y: Targets.
        model: The model.
        loss_function: The loss.
        idx: Which entries; default: all.

    Returns:
        The entries, over all trainable parameters in a row.
    """
    columns = _autograd_ggn_exact_columns(X, y, model, loss_function, idx=idx)
    return torch.stack([column[position] for position, column in columns])


def _autograd_ggn_exact_columns(
    X: Tensor, y: Tensor, model: Module, loss_function: Module, idx: Sequence[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Columns of the generalised Gauss-Newton matrix with their positions."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    output = model(X)
    loss = loss_function(output, y)
    size = sum(p.numel() for p in parameters)
    for position in range(size) if idx is None else idx:
        unit = loss.new_zeros(size)
        unit[position] = 1
        parts = vector_to_parameter_list(unit, parameters)
        product = ggn_vector_product(loss, output, model, parts)
        yield position, parameters_to_vector([p.contiguous() for p in product])
