"""Every use of torch's private interface in this package. Imports torch, and core's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from backpack_core import _torch
from backpack_core._torch import peek_transform
from backpack_core._torch import saving_hooks as saving_hooks


def any_hooks(ignore_is_tracing: bool) -> tuple[()] | None:
    """What torch 2.6 tells: an empty tuple if saved-tensor hooks are active, ``None`` if not."""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():  # where they are forbidden, there are none
        return None
    try:
        autograd._saved_tensors_hooks_disable("hooks are active")  # raised if they are
        return None
    except RuntimeError:
        return ()
    finally:
        autograd._saved_tensors_hooks_enable()


if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    _torch._top_hooks = any_hooks


def kernels_of(tensor: Tensor) -> int:
    """A number for what decides which kernels run on a tensor, such as device and layout."""
    found: int = torch._C._dispatch_keys(tensor).raw_repr()
    return found


def look_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells, by one look, whether as many other tensors are of the same kinds.

    "Of the same kind" means the same class, data type, device, kernels, shape, strides, and whether
    they require a gradient. The function also says no if a mode or a transform stands between the
    tensors and their kernels.
    """
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
    except (AttributeError, TypeError):  # there is none, or not for these arguments
        known = [*map(_kind_of, tensors)]
        return lambda *others: [*map(_kind_of, others)] == known
    return check


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.shape, tensor.stride(), tensor.device, kernels_of(tensor)
    return type(tensor), tensor.dtype, tensor.requires_grad, *layout


def is_symbolic(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, but no values (``FakeTensorMode``, ``meta``)."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_on_host(*tensors: Tensor, allowed: str = "runs_kernels") -> bool:
    """Whether operations without a graph run at once on tensors that have values on the host.

    Not in forward mode, where an operation that has no formula for tangents drops them in silence.

    Args:
        tensors: The tensors.
        allowed: The attribute of modes that are allowed. Other modes record operations, and may
            have no kernels.
    """
    mode = _get_current_dispatch_mode()
    return (
        not torch.compiler.is_compiling()
        and all(tensor.is_cpu for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and getattr(forward_ad, "_current_level", -1) < 0
        and (mode is None or getattr(mode, allowed, False))
        and peek_transform() is None
        and not any(map(is_symbolic, tensors))
    )


def reads_are_recorded() -> bool:
    """Whether Python may read values where operations run: nothing records, or reads, too.

    A mode with ``reads_are_assumptions`` takes the values that are read for constants.
    """
    mode = _get_current_dispatch_mode()
    return mode is None or bool(getattr(mode, "reads_are_assumptions", False))


# A block without dispatch modes, so that none records a comparison of times.
without_modes: Callable[[], Any] = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
# Whether ``torch.backends.mkldnn`` is switched on.
is_onednn_on: Callable[[], bool] = getattr(torch._C, "_get_mkldnn_enabled", lambda: True)


def onednn_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T`` of matrices by oneDNN, as compiled models of torch compute it.

    Raises:
        AttributeError: This build of torch lacks the operation.
    """
    product: Tensor
    product = torch.ops.mkldnn._linear_pointwise(rows, dense(weight), None, "none", [], "")
    return product


def dense(matrix: Tensor) -> Tensor:
    """A matrix without gaps in memory, by rows or by columns: itself if it has none.

    For a weight with gaps (some of the columns of another), oneDNN takes a thousand times as long.
    """
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def holders_of(held: list[Tensor]) -> tuple[int, ...] | None:
    """Reference counts of a tensor, its base and its storage, in Python and C++.

    Views, NumPy arrays, graphs and lists all increase one of them. ``None`` if torch lacks a count.

    Args:
        held: A list with the tensor, which the caller must not hold otherwise. An argument may be
            counted once more while ``torch.compile`` runs frames, and afterwards if it failed.
    """
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    (tensor,) = held
    storage, base = tensor.untyped_storage(), tensor._base
    counts: list[int] = [sys.getrefcount(tensor), sys.getrefcount(storage), count(storage._cdata)]
    for one in (tensor,) if base is None else (tensor, base):
        counts.append(one._use_count())  # type: ignore[attr-defined]
    # Before Python 3.12, ``None`` is counted, too, and everybody may hold it.
    return tuple(counts) if base is None else (*counts, sys.getrefcount(base))
