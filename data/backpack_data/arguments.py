"""What the arguments of ``accumulate`` must be, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import Dataset, IterableDataset

from backpack_core.errors import UsageError


def require_model(model: object, lossfunc: object) -> None:
    """Raise an error if the first argument is not a model, but the loss, for example."""
    if isinstance(lossfunc, type):
        raise UsageError(f"The loss is the class {lossfunc.__name__}: write {lossfunc.__name__}().")
    if isinstance(model, Module) and any(True for _ in model.parameters()):
        if torch.is_inference_mode_enabled() or not any(
            p.requires_grad for p in model.parameters()
        ):
            raise UsageError(
                "accumulate(...) computes quantities of trained parameters, and there is none: all "
                "have requires_grad=False, or it runs inside torch.inference_mode()."
            )
        return
    found = type(model).__name__
    if isinstance(lossfunc, Module) and any(True for _ in lossfunc.parameters()):
        raise UsageError(
            f"accumulate(model, lossfunc, loader, ...) got {found}, which has no parameters, as "
            f"the model, and {type(lossfunc).__name__}, which has some, as the loss: swap them."
        )
    if not isinstance(model, Module):
        raise UsageError(
            f"accumulate(model, ...) takes a torch.nn.Module, whose parameters get quantities. Got "
            f"{found}."
        )


def require_kinds(lossfunc: Any, loader: Any, batch: Any, normaliser: Any, every: Any) -> None:
    """Raise an error if an argument is not a loader, a function or a count."""
    if not isinstance(every, Integral) or int(every) < 1:
        raise UsageError(f"every must be a positive number of batches. Got {every!r}.")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise UsageError(
            "The loader must allow several iterations, such as a DataLoader or a list "
            f"of (inputs, targets). Got {loader!r:.80}."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise UsageError(
            f"{type(loader).__name__} gives single samples, but batches are needed: give "
            "DataLoader(dataset, batch_size=...), with None if its items are batches."
        )
    for name, value, what in (
        ("lossfunc", lossfunc, "a loss module, CrossEntropyLoss(), or a function of both"),
        ("batch", batch, "a function of what the loader gives: lambda item: (inputs, targets)"),
        ("normaliser", normaliser, "a function of both: lambda inputs, targets: len(targets)"),
    ):
        if not callable(value) and (value is not None or name == "lossfunc"):
            raise UsageError(f"accumulate(..., {name}) takes {what}. Got {value!r}.")


def require_result(device: Any, dtype: Any) -> None:
    """Raise an error before the pass, not after it, if results cannot be stored."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype is that of results, such as torch.float64. Got {dtype!r}.")
    try:
        torch.empty(0, device=device, dtype=dtype)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(f"No tensor can be on the device {device!r}: {error}") from error


def require_number(loss: Any) -> None:
    """Raise an error if the loss of a batch is not a number to go backward from."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss of a batch is a tensor of one number. Got {loss!r:.80}.")
    if loss.numel() != 1:
        raise UsageError(
            f"The loss of a batch has shape {list(loss.shape)}, and backward() needs a single "
            'number: use reduction="mean" or "sum".'
        )
    if not loss.requires_grad:
        raise UsageError(
            "The loss of a batch has no graph to go backward through: remove .detach(), .item() "
            "and torch.no_grad() in the model and in the loss."
        )
