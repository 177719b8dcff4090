"""Quantities of a loss that a gradient scaler multiplied."""

from __future__ import annotations

from math import inf
from typing import Any, Protocol

import torch
from torch.nn import Module

from backpack_core import Extension
from backpack_core.errors import UsageError
from backpack_data.shards import carriers
from backpack_data.state import listed
from backpack_products.merging import Refused, declaration


class Scaler(Protocol):
    """The interface of ``torch.amp.GradScaler`` that is used."""

    def get_scale(self) -> Any:
        """What the loss is multiplied by."""


def unscale(model: Module, extensions: Extension | list[Extension], scaler: Scaler | float) -> None:
    """Divide values of extensions by ``scale ** degree``, with each extension's degree in the loss.

    It does what ``scaler.unscale_(optimizer)`` does with ``.grad``. Call it once after each
    backward pass, before ``scaler.update()``. Values that are not finite stay so.

    Args:
        model: The model.
        extensions: The extensions of the block.
        scaler: A gradient scaler, or the scale.

    Raises:
        UsageError: An extension has no degree in the loss, the scale is not positive, or there is
            no value.
    """
    if not isinstance(scaler, (int, float)) and not hasattr(scaler, "get_scale"):
        raise UsageError(f"scaler is a torch.amp.GradScaler, or the scale. Got {scaler!r:.80}.")
    factor = float(scaler) if isinstance(scaler, (int, float)) else float(scaler.get_scale())
    if not 0 < factor < inf:
        raise UsageError(f"The scale must be positive and finite. Got {factor!r}.")
    asked = listed(extensions)
    new = []
    for parameters in carriers(model).values():
        for extension in asked:
            value = getattr(parameters[0], extension.savefield, None)
            if value is not None:
                new.append((parameters, extension, value))
    if not new:
        fields = ", ".join(extension.savefield for extension in asked)
        raise UsageError(
            f"No parameter of the model has {fields or 'a value'}: call unscale(...) after the "
            "backward pass, with the extensions of its block."
        )
    # Compute all before storing any: if one has no degree, nothing is changed.
    results = [_rescaled(e, value, 1 / factor, ps[0].shape) for ps, e, value in new]
    for (parameters, extension, _), result in zip(new, results, strict=True):
        for parameter in parameters:
            setattr(parameter, extension.savefield, result)


def _rescaled(extension: Extension, value: Any, factor: float, shape: torch.Size) -> Any:
    """The value that the extension would have for ``factor`` times the loss.

    Args:
        extension: The extension.
        value: Its value.
        factor: Positive.
        shape: Shape of the parameter.

    Raises:
        UsageError: The extension has no degree, or its value does not consist of tensors.
    """
    over, name = declaration(extension), type(extension).__name__
    if extension.degree is None:
        raise UsageError(f"{name} has no degree in the loss: {extension.without_degree}")
    if isinstance(over, Refused):
        raise UsageError(f"{name} holds no tensors that could be scaled: scale the loss instead.")
    tensors = {}
    for key, tensor in over.take_apart(value).items():
        degree = over.part(key).degree
        tensors[key] = tensor * factor ** (extension.degree if degree is None else degree)
    return over.marked(over.put_together(tensors, shape), over.plugins_of(value))
