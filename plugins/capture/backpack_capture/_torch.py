"""Every use of torch's private interface in this package, except for the recorder's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from backpack_products.values import is_onednn_on, saving_hooks

# Where steps are recorded.
DEVICES: Final = ("cpu", "cuda")

_tables = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_peek_transform: Any = torch._C._functorch.peek_interpreter_stack
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


def may_overlap(tensor: Tensor) -> bool:
    """Whether entries may share memory, as those of ``expand`` do."""
    # 0 means that they do not, 1 that they do, and 2 that it is not known.
    return bool(torch._debug_has_internal_overlap(tensor))


def takes_tensor(operation: Any, place: int) -> bool:
    """Whether an argument of an operation must be a tensor, not a number."""
    schema = operation._schema
    is_tensor = isinstance(schema.arguments[place].type, torch._C.TensorType)
    name = schema.name.removeprefix("aten::")
    return is_tensor and not torch._C._should_allow_numbers_as_tensors(name)


def modes() -> tuple[Any, ...]:
    """The settings of this thread that change what operations of torch do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        is_onednn_on(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_allow_tf32(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        _peek_transform() is None,
        saving_hooks() is None,
        *[tuple(table) for table in _tables],
    )


def is_ordinary() -> bool:
    """Whether replays are possible: some modes need the engine."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and _peek_transform() is None
        and saving_hooks() is None
        and not any(_tables)
    )


def generator_states() -> tuple[Tensor, ...]:
    """The states of torch's generators: the host's, and that of the current accelerator."""
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else states


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Restore the result of :func:`generator_states`."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def are_equal(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether states of generators are the same."""
    return len(states) == len(others) and all(map(torch.equal, states, others))


def is_foreign(tensor: Tensor) -> bool:
    """Whether steps with a tensor cannot be recorded: it is on another device, or not dense."""
    device = tensor.device
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    is_dense = tensor.layout is torch.strided
    return device.type not in DEVICES or is_other or not is_dense


@contextmanager
def recorded_as_operations(is_recurrent: bool) -> Iterator[None]:
    """A block that runs all of a step on this thread, by operations that can be replayed.

    Args:
        is_recurrent: Whether the model has recurrent layers. mkldnn and cuDNN would run each as one
            operation with buffers that are not tensors.
    """
    libraries = is_onednn_on(), torch._C._get_cudnn_enabled()
    if is_recurrent:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(libraries[0])
        torch._C._set_cudnn_enabled(libraries[1])


def take_hooks(parameter: Tensor) -> Callable[[], None]:
    """Take away the hooks on a gradient, and return a function that puts them back."""
    tables: list[Any] = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    kept = [(table, dict(table)) for table in tables if table]
    for table, _ in kept:
        table.clear()

    def put_back() -> None:
        for table, hooks in kept:
            table.update(hooks)

    return put_back


def gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook listens to the gradient of a parameter."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


class without_gradients:
    """``torch.no_grad()`` in a fifth of the time."""

    def __enter__(self) -> None:
        """Record nothing."""
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        """Restore the earlier mode."""
        torch._C._set_grad_enabled(self._before)
