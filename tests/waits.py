"""Which operations read values of tensors, and where in the project: a wait on an accelerator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = "core layers firstorder secondorder products operations checks interplay"
_ROOTS = {f"backpack_{name}" for name in _NAMES.split()}
_READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "masked_select",
    "repeat_interleave", "allclose",
}  # fmt: skip
_TO_PYTHON = {"tolist", "numpy", "__array__", "__dlpack__"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Reads(TorchDispatchMode):
    """Notes every operation whose result, or its shape, is known only with a tensor's values.

    Attributes:
        found: What was read, and by which function of the project: ``(operation, place)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._functions = _ToPython(self)

    def __enter__(self) -> Reads:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        known_size = name == "repeat_interleave" and kwargs.get("output_size") is not None
        if name in _READS and not known_size:
            self.note(name)
        if name in _INDEXING and any(_is_mask(index) for index in args[1]):
            self.note("a mask as an index")
        return func(*args, **kwargs)

    def note(self, operation: str) -> None:
        """Note one, with the innermost function of the project."""
        self.found.append((operation, _place(sys._getframe(1))))


class _ToPython(TorchFunctionMode):
    """Sees what passes by a dispatch mode."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _TO_PYTHON:
            self._reads.note(func.__name__)
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _place(frame: FrameType | None) -> str:
    """``owners.py:of_data``, of the innermost function in the project."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        root = next((part for part in path.parts if part in _ROOTS), None)
        if root is not None and not {"tests", "values.py"} & {*path.parts}:
            inside = "/".join(path.parts[len(path.parts) - path.parts[::-1].index(root) :])
            return f"{inside}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
