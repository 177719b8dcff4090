"""Views of some samples of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.record.view import View
from backpack_products.held import PLAIN
from backpack_products.nested import map_tensors


def subsample(view: View, indices: Sequence[int] | None) -> View:
    """The same call with some samples only.

    Args:
        view: A view of the call.
        indices: Positions along axis 0, which may be repeated; ``None`` for all.

    Returns:
        A view whose inputs, output and gradient hold the chosen samples. Tensors whose axis 0 is
        not the batch axis do not change.

    Raises:
        UsageError: An index is out of range.
    """
    if indices is None:
        return view
    size = view.batch_size
    chosen = counted_from_zero(indices, size, view.path)
    # A subsample of a subsample: indices count what the view shows.
    shown = range(size) if view.indices is None else view.indices
    return SomeSamples(view, tuple(shown[i] for i in chosen))


def counted_from_zero(indices: Sequence[int], size: int, path: str = "the model") -> list[int]:
    """Indices of samples, which may be counted from the end; ``path`` is who saw these samples.

    Raises:
        UsageError: An index names none of ``size`` samples.
    """
    for index in indices:
        if not -size <= index < size:
            raise UsageError(
                f"subsampling asks for sample {index}, but {path} saw a batch of {size} "
                f"samples: use indices from 0 to {size - 1}."
            )
    return [index % size for index in indices]


class SomeSamples(View):
    """A view of some entries of axis 0."""

    def __init__(self, view: View, indices: tuple[int, ...]) -> None:
        """Choose entries.

        Args:
            view: A view of the call.
            indices: The entries, counted in the whole call.
        """
        self.__dict__.update(view.__dict__)
        self.call_cache, self._tensors = {}, {}
        self._whole = whole = view.full
        self.indices, self._pick = indices, _as_index(indices, self.device)
        gradient = whole.grad_output
        self.grad_output = None if gradient is None else self.cut(gradient)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor among the arguments, unchecked: for shapes and flags, not for values."""
        return tuple(map(self._shown, self.stored.inputs))

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        args: tuple[Any, ...] = map_tensors(self.values.args, self._shown)
        return args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        kwargs: dict[str, Any] = map_tensors(self.values.kwargs, self._shown)
        return kwargs

    def tensor_input(self, index: int) -> Tensor:
        """Input tensor ``index``, in the dtype of the gradient; see the base class."""
        if index not in self._tensors:
            self._tensors[index] = self._shown(self.full.tensor_input(index))
        return self._tensors[index]

    @property
    def output(self) -> Tensor:
        """The output ``[N, *out]`` that is visited; see the base class."""
        slot = len(self.stored.inputs) + self.index
        if slot not in self._tensors:
            self._tensors[slot] = self.cut(self.full.output)
        return self._tensors[slot]

    @property
    def input_shape(self) -> torch.Size:
        """Shape of the first input."""
        return self._shortened(super().input_shape)

    @property
    def output_shape(self) -> torch.Size:
        """Shape of the output."""
        return self._shortened(super().output_shape)

    def takes_product(self, slot: int) -> bool:
        """Whether input ``slot`` has the samples on axis 0, so that some can be chosen.

        Raises:
            UnsupportedError: It has not, and requires a gradient.
        """
        tensor = self.full.inputs[slot]
        if not self._has_batch(tensor) and tensor.requires_grad:
            raise UnsupportedError(
                f"{self.path} received an input of shape {list(tensor.shape)} that requires a "
                "gradient and does not hold the samples on axis 0 (an initial state, say). This "
                "cannot be combined with subsampling: detach it, or leave subsampling out."
            )
        return self._has_batch(tensor)

    def _has_batch(self, tensor: Tensor) -> bool:
        """Whether axis 0 of an input has the length of the batch."""
        size = self.stored.inputs[0].shape[0]
        return tensor.dim() > 0 and tensor.shape[0] == size

    def _shortened(self, shape: torch.Size) -> torch.Size:
        assert self.indices is not None
        return torch.Size((len(self.indices), *shape[1:])) if shape else shape

    def _shown(self, tensor: Tensor) -> Tensor:
        """The chosen samples of a tensor whose axis 0 is the batch axis; others unchanged."""
        picked: Tensor = tensor[self._pick] if self._has_batch(tensor) else tensor
        return picked

    def cut(self, tensor: Tensor) -> Tensor:
        """The chosen entries of axis 0."""
        picked: Tensor = tensor[self._pick] if tensor.dim() else tensor
        return picked

    def __repr__(self) -> str:
        """The call, and the samples."""
        return f"{super().__repr__()[:-1]}, samples {[*(self.indices or ())]}>"


PLAIN.add(SomeSamples)


def _as_index(indices: tuple[int, ...], device: torch.device) -> Any:
    """An index of samples: a slice if they are consecutive, since a slice copies nothing."""
    start = indices[0] if indices else 0
    if indices == tuple(range(start, start + len(indices))):
        return slice(start, start + len(indices))
    return torch.tensor(indices, device=device, dtype=torch.long)


def saved_in(view: View, name: str, node: Node | None = None) -> Tensor | None:
    """A tensor that autograd saved for the backward pass of the output's node.

    Args:
        view: The view of a call.
        name: Torch's name for it: ``"result1"`` for ``grad_fn._saved_result1``.
        node: Another node, inside of the module.

    Returns:
        The tensor, for the samples that are shown. ``None`` if it may not be read, or if there is
        no tensor of that name whose first axis is the batch axis.
    """
    if view.node is None or not view.call.is_readable or view.axis:
        return None
    tensor: Tensor | None = getattr(node or view.node, f"_saved_{name}", None)
    if tensor is None or tensor.shape[:1] != view.stored.outputs[view.index].shape[:1]:
        return None
    return view.cut(tensor) if isinstance(view, SomeSamples) else tensor
