"""A view: what a rule sees of a call during a visit.

A view holds no more than its call does, and lives as long as the visit. Each tensor is checked when
it is asked for: if it was changed in place since the forward pass, its values are not those that
the module received, and the view raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, version_of
from backpack_core.errors import OverwrittenInputError
from backpack_core.record.call import Call, Stored
from backpack_core.record.state import as_it_was
from backpack_core.record.storage import read, storage

T = TypeVar("T")


class View:
    """A call during a visit, with the gradient at one of its outputs.

    Attributes:
        call: The call.
        index: The index of the output that is visited.
        node: The autograd node of that output, if tensors that it saved may be read.
        indices: The samples that are shown, ``None`` for all. An index may occur several times. A
            library derives a class for views of some samples.
        axis: The axis of the output that holds the samples; views move it to the front.
        is_differentiable: Whether quantities are functions of the parameters
            (``create_graph=True``).
        is_reached: Whether a gradient arrived. Autograd leaves some zero gradients undefined.
        positions: How many entries of axis 0 each sample has; zero if axis 0 holds no samples.
        owners: The sample of each entry of axis 0, counted among the shown samples, where samples
            have several entries or none; ``None`` if each sample has ``positions`` entries in a
            row, or if this is not known.
        samples: The number of samples of the backward pass, whichever axis holds them here.
        is_measured: Whether rules may read values in order to refuse some, which synchronises with
            an accelerator. True in passes that are measured, and outside of passes.
        grad_output: Gradient of the loss with respect to the output, ``[N, *out]``. ``None`` before
            the backward pass, for chunks of columns, and (except at losses) in a pass without
            autograd.
        inner: While the parameters of ``reads_inside`` are read: the gradient at the node that the
            rule named, in the shape of that node's output. Otherwise ``None``.
        dtype: The dtype that derivatives are computed in, which is that of the gradient.
        call_cache: Values computed from the call alone (patches, positions of maxima), which serve
            all columns; see :meth:`once`.
        stored: The call's tensors, for shapes and flags, even if the call was released. Their
            values are in :attr:`values`.
        counted: The tensors that the view shows, with their version counters when a guard first
            asked; see ``guards.py``.
        memories: The memory of tensors that rules can get, and of results, once somebody asks; see
            ``guards.py``.
        unpacked: Access to tensors that saved-tensor hooks packed; ``None`` without such hooks.
        is_checked: Whether a guard checks that plugins do not change what they get.
    """

    is_checked = True
    indices: tuple[int, ...] | None = None
    _whole: View | None = None

    def __init__(
        self,
        call: Call,
        index: int = 0,
        grad_output: Tensor | None = None,
        node: Node | None = None,
        axis: int = 0,
        kept: dict[Any, Any] | None = None,
        positions: int = 1,
        samples: int = 0,
    ) -> None:
        self.call = call
        self.stored = call.stored
        self.index = index
        self.node = node
        self.axis = axis
        self.call_cache: dict[Any, Any] = {} if kept is None else kept
        self.is_differentiable = torch.is_grad_enabled()
        self.is_reached = True
        self.inner: Tensor | None = None
        self.positions = positions
        self.owners: Tensor | None = None
        self.samples = samples
        self.is_measured = True
        self.counted: list[tuple[Tensor, int]] | None = None
        self.memories: set[int] | None = None
        self.unpacked = storage().unpack(self.stored) if self.stored.saved else None
        if axis and grad_output is not None:
            grad_output = grad_output.movedim(axis, 0)
        self.grad_output = grad_output
        self.dtype = (self.stored.outputs[index] if grad_output is None else grad_output).dtype
        self._module: Module | None = None
        self._tensors: dict[int, Tensor] = {}

    # What the module was -------------------------------------------------------------------------

    @property
    def module(self) -> Module:
        """The module with the settings that it had in the forward pass.

        If a setting was changed since (``dropout.p``, the mode, a replaced parameter), this is a
        stand-in of the same class that has the old values.
        """
        if self._module is None:
            call = self.call
            self._module = as_it_was(call.module, call.settings, self.stored.owned)
        return self._module

    @property
    def training(self) -> bool:
        """Whether the module was in train mode."""
        return self.call.training

    @property
    def path(self) -> str:
        """The path of the module in the extended model, for messages."""
        return self.call.path

    def parameter(self, name: str) -> Tensor:
        """A parameter or buffer (dots allowed) as the forward pass used it, in the view's dtype.

        Raises:
            OverwrittenInputError: It was changed in place since.
        """
        tensor = self.parameter_itself(name)
        tensor = tensor if self.is_differentiable else tensor.detach()
        return tensor if tensor.dtype is self.dtype else self._cast(tensor)

    def parameter_itself(self, name: str) -> Tensor:
        """The tensor behind :meth:`parameter`, with its own dtype and graph."""
        entry = self.stored.owned.get(name)
        if entry is None:
            tensor: Tensor = attrgetter(name)(self.module)
            return tensor
        tensor, version = entry
        if version_of(tensor) != version:
            raise OverwrittenInputError(
                f"{self.path}: its {name!r} was changed in place since the forward pass, so "
                "derivatives would be computed with other values. Call backward() first."
            )
        return tensor

    # What it received and returned ---------------------------------------------------------------

    @property
    def values(self) -> Stored:
        """The call's tensors with their values, unpacked where hooks packed them."""
        return self.stored if self.unpacked is None else self.unpacked.values()

    @property
    def input(self) -> Tensor:
        """The first input tensor ``[N, *in]``, in the dtype of the gradient."""
        return self.tensor_input(0)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor among the arguments, unchecked: for shapes and flags, not for values."""
        return self.stored.inputs

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, with the samples that are shown."""
        return self.values.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, with the samples that are shown."""
        return self.values.kwargs

    def tensor_input(self, index: int) -> Tensor:
        """Input tensor ``index``, in the dtype of the gradient.

        It is detached unless quantities are differentiable, so results may keep it.

        Raises:
            OverwrittenInputError: It was changed in place since the forward pass.
            ReleasedIOError: An earlier backward pass freed it.
        """
        tensor = self._tensors.get(index)
        if tensor is None:
            tensor = read(self, index, "input")
            tensor = tensor if self.is_differentiable else tensor.detach()
            tensor = tensor if tensor.dtype is self.dtype else self._cast(tensor)
            self._tensors[index] = tensor
        return tensor

    @property
    def output(self) -> Tensor:
        """The output ``[N, *out]`` that is visited, in the dtype of the gradient.

        It is detached unless quantities are differentiable.

        Raises:
            OverwrittenInputError: It was changed in place since the forward pass, or cannot be
                computed again for ``create_graph=True``.
            ReleasedIOError: An earlier backward pass freed it.
        """
        stored = self.stored
        slot = len(stored.inputs) + self.index
        if slot not in self._tensors:
            tensor = read(self, slot, "output")
            if self.is_differentiable:
                tensor = storage().output_again(self, tensor)
            tensor = tensor.movedim(self.axis, 0) if self.axis else tensor
            self._tensors[slot] = tensor if tensor.dtype is self.dtype else self._cast(tensor)
        return self._tensors[slot]

    @property
    def input_shape(self) -> torch.Size:
        """Shape of the first input, which is known even if its values were overwritten."""
        return self.stored.inputs[0].shape

    @property
    def output_shape(self) -> torch.Size:
        """Shape of the output, which is known even if its values were overwritten."""
        output = self.stored.outputs[self.index]
        return output.movedim(self.axis, 0).shape if self.axis else output.shape

    @property
    def batch_size(self) -> int:
        """Number of samples ``N`` that are shown."""
        return int(self.input_shape[0])

    @property
    def device(self) -> torch.device:
        """The device of the output."""
        return self.stored.outputs[self.index].device

    @property
    def full(self) -> View:
        """The view with all samples."""
        return self._whole or self

    def once(self, key: str, compute: Callable[[], T]) -> T:
        """A value that depends on the call alone, computed once for all columns.

        A value from a pass without gradients is not reused in one with ``create_graph=True``.
        """
        cache_key = (key, self.is_differentiable, self.dtype)
        if cache_key not in self.call_cache:
            self.call_cache[cache_key] = compute()
        value: T = self.call_cache[cache_key]
        return value

    def takes_product(self, slot: int) -> bool:
        """Whether a product for input ``slot`` has one entry for each sample that is shown."""
        return True

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == self.dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.dtype)

    def __repr__(self) -> str:
        """The call, and the samples."""
        return f"<view of {self.call!r}, output {self.index}>"
