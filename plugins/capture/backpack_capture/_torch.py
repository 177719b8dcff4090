"""Every use of torch's private interface in this package, but for the recorder's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

_tables = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_saved_tensor_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None
)
_peek_transform: Any = torch._C._functorch.peek_interpreter_stack
_keys: Any = torch._C._dispatch_keys


def modes() -> tuple[Any, ...]:
    """Whatever changes what operations of torch do, on this thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        _peek_transform() is None,
        _saved_tensor_hooks(True) is None,
        *[tuple(table) for table in _tables],
    )


def is_ordinary() -> bool:
    """Whether no mode is on that only the engine can serve."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and _peek_transform() is None
        and _saved_tensor_hooks(True) is None
        and not any(_tables)
    )


def keys_of(tensor: Tensor) -> int:
    """Device, layout, and what else decides which kernels run."""
    found: int = _keys(tensor).raw_repr()
    return found


def gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody listens to the gradient of a parameter."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)
