"""What an extended model received in one forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

Place = tuple[int, ...]  # the index of an argument, and of the item at each level of containers


class Run:
    """What an extended model received in one forward pass.

    This class knows which tensors they are. A library that follows samples through other tensors
    derives from it.

    Attributes:
        sizes: The lengths of the batch axis of its input tensors; one of them is the number of
            samples.
        axis: Their declared batch axis.
        is_distributed: Whether it runs inside of DistributedDataParallel.
        has_computed_input: Whether an input has a graph: parameters or another model computed it.
        inputs: What a library notes about each input tensor.
        memories: What a library notes about each memory that has samples, by its number.
    """

    inputs: Sequence[Any] = ()
    memories: Mapping[int, Any] = MappingProxyType({})

    def __init__(
        self,
        placed: Sequence[tuple[Place, Tensor]] = (),
        axis: int = 0,
        is_distributed: bool = False,
    ) -> None:
        """Note what the model received.

        Args:
            placed: The tensors, each with its path.
            axis: Their declared batch axis.
            is_distributed: Whether the model runs inside of DistributedDataParallel.
        """
        tensors = [tensor for _, tensor in placed]
        self.axis, self.is_distributed = axis, is_distributed
        with_axis = [t for t in tensors if t.dim() > axis and not t.is_nested]
        self.sizes = tuple([tensor.shape[axis] for tensor in with_axis])
        self.has_computed_input = any(tensor.grad_fn is not None for tensor in tensors)
        self._given = [*map(weakref.ref, tensors)]

    @property
    def facts(self) -> Iterable[Any]:
        """What decisions about the whole pass may depend on."""
        return self.axis, self.is_distributed, self.has_computed_input, torch.Size(self.sizes)

    def receives(self, tensors: Iterable[Tensor]) -> int:
        """Whether any tensor has the samples of an input: 1, or 2 if they are on axis 0."""
        given = [reference() for reference in self._given]
        return 2 * any(tensor is other for tensor in tensors for other in given)

    def pass_on(self, tensors: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Treat results without a graph as inputs of the model, if a layer made them from inputs.

        This is for modules with a layer rule, which keep samples in place. Other modules may not: a
        table of positions is made from the input as well.
        """
        self._given += map(weakref.ref, results if self.receives(tensors) else ())

    def note_returned(self, results: Iterable[Tensor]) -> None:
        """Note what the model returned, if its samples are on axis 0. Default: nothing."""


# Makes the run of a model, from the model, what it received, and the declared batch axis.
RunOf = Callable[[Module | None, Sequence[tuple[Place, Tensor]], int], Run]
# For calls outside of an extended model; the second, inside of DistributedDataParallel.
NO_RUN: Final = Run()
NO_RUN_OF_RANKS: Final = Run(is_distributed=True)
