"""What kind of module a module is. Imports torch and the core's helper modules."""

from __future__ import annotations

import warnings

from torch.fx import GraphModule
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss, Sequential
from torch.nn.modules.loss import _Loss

from backpack_layers.modules import Branch, Parallel, ReduceTuple


def is_loss(module: Module) -> bool:
    """Whether it is a loss of ``torch.nn``."""
    return isinstance(module, _Loss)


def is_nll(module: Module) -> bool:
    """Whether it is a negative log-likelihood among the usual losses."""
    return isinstance(module, (MSELoss, CrossEntropyLoss, BCEWithLogitsLoss))


def is_no_op(module: Module) -> bool:
    """Whether it does nothing to tensors on its own."""
    return isinstance(module, (Sequential, Branch, Parallel, ReduceTuple, GraphModule))


def batch_norm_raise_error_if_train(module: Module, raise_error: bool = True) -> None:
    """Refuse a batch normalisation in train mode.

    Args:
        module: A batch normalisation.
        raise_error: Whether to raise or to warn.

    Raises:
        NotImplementedError: It is in train mode, and ``raise_error`` is on.
    """
    if not module.training:
        return
    message = (
        "Encountered BatchNorm module in training mode: it makes samples influence each other, so "
        "quantities of single samples have no meaning. Call eval()."
    )
    if raise_error:
        raise NotImplementedError(message)
    warnings.warn(message, stacklevel=2)
