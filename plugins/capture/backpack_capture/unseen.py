"""Reads of numbers that are not operations of torch, so that a recorder would miss them.

While a step is recorded, other methods replace theirs.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backpack_capture.nested import is_plain, is_short_array
from backpack_capture.recorder import Recorder

# Methods by which numbers leave torch: what is computed from them elsewhere is not seen.
_LEAVING: Final = (
    *[(Tensor, name) for name in ("numpy", "__array__", "data_ptr", "__dlpack__", "storage")],
    (Tensor, "__reduce_ex__"),
    (Tensor, "__repr__"),
    (torch.UntypedStorage, "tolist"),
    (torch.UntypedStorage, "__getitem__"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
)
_LOCK: Final = threading.RLock()


class _Making(TorchFunctionMode):
    """Checks what tensors are made of: those of Python numbers only are the same each time."""

    replaces = False  # passes that are recorded have the plan of the others

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow the call."""
        kwargs = kwargs or {}
        if func not in _MAKING:
            return func(*args, **kwargs)
        data = [*args[int(func is Tensor.new_tensor) :], *kwargs.values()]
        before = self._recorder.is_lifting
        self._recorder.is_lifting = all(map(_is_number, data))
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.is_lifting = before


_MAKING: Final = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return is_plain(value) or is_short_array(value)


@contextmanager
def seen_by(recorder: Recorder) -> Iterator[None]:
    """A block that shows these reads to a recorder, on its thread."""
    thread, restore = threading.get_ident(), list[Callable[[], None]]()

    def put(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        own = vars(owner).get(name)
        original = getattr(owner, name)
        setattr(owner, name, wrap(original))
        back = (lambda: delattr(owner, name)) if own is None else lambda: setattr(owner, name, own)
        restore.append(back)

    def refusing(name: str) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread and recorder.refusal is None:
                    recorder.refusal = f"it calls {name}, by which numbers leave torch"
                return original(*args, **kwargs)

            return wrapped

        return wrap

    def listing(original: Any) -> Any:
        def tolist(tensor: Tensor) -> Any:
            found = original(tensor)
            if threading.get_ident() == thread and recorder.refusal is None:
                recorder.assume("tolist", (tensor,), found)
            return found

        return tolist

    with _LOCK:  # methods are put back in the reverse order
        try:
            put(Tensor, "tolist", listing)
            for owner, name in _LEAVING:
                if hasattr(owner, name):
                    put(owner, name, refusing(name))
            with _Making(recorder):
                yield
        finally:
            for back in reversed(restore):
                back()


def states_of_generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators, which graphs do not use."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state(legacy=True)
    parts = [part.tobytes() if hasattr(part, "tobytes") else part for part in of_numpy]
    return random.getstate(), tuple(parts)
