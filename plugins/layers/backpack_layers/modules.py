"""Helper modules for operations that networks usually write as functions. Imports errors.

The core sends quantities through plain operations, so no network needs these modules. They give a
step of a network a name, and a layer rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F

from backpack_core.errors import UsageError

__all__ = [
    "Branch",
    "Pad",
    "Parallel",
    "Permute",
    "ReduceTuple",
    "ScaleModule",
    "Slicing",
    "SumModule",
]


class SumModule(Module):
    """Sum of tensors. If they broadcast, a plain function adds them, without a module's call."""

    def __call__(self, *inputs: Any) -> Any:
        """Add the inputs."""
        shapes = {tensor.shape for tensor in inputs if isinstance(tensor, Tensor)}
        return self.forward(*inputs) if len(shapes) > 1 else super().__call__(*inputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Add the inputs.

        Args:
            inputs: One or more tensors.

        Returns:
            Their sum.

        Raises:
            ValueError: No tensor was passed.
        """
        if not inputs:
            raise ValueError("SumModule got no tensor to add: pass at least one.")
        total = inputs[0]
        for tensor in inputs[1:]:
            total = total + tensor
        return total


class Branch(Module):
    """Give the same input to several modules.

    Args:
        modules: The branches, or one ``OrderedDict`` of named branches.
    """

    def __init__(self, *modules: Module | OrderedDict[str, Module]) -> None:
        super().__init__()
        for position, item in enumerate(modules):
            named = item if isinstance(item, OrderedDict) else {str(position): item}
            for name, module in named.items():
                self.add_module(name, module)

    def forward(self, input: Tensor) -> tuple[Any, ...]:
        """What every branch returns for ``input``."""
        return tuple(module(input) for module in self.children())


class Parallel(Module):
    """Give the same input to several modules and merge what they return.

    Args:
        modules: The branches, or one ``OrderedDict`` of named branches.
        merge_module: Called with the results, one argument each. Default: :class:`SumModule`.
    """

    def __init__(
        self, *modules: Module | OrderedDict[str, Module], merge_module: Module | None = None
    ) -> None:
        super().__init__()
        self.branch = Branch(*modules)
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Tensor) -> Any:
        """Run every branch on ``input`` and merge."""
        return self.merge(*self.branch(input))


class ScaleModule(Module):
    """Multiply by one number, ``x ↦ w x``.

    Args:
        weight: The number to start from.
        optimize: Whether the number is trained: then it is a parameter, otherwise a plain number.
    """

    weight: float | Parameter

    def __init__(self, weight: float = 1.0, optimize: bool = False) -> None:
        super().__init__()
        self.weight = Parameter(torch.tensor([float(weight)])) if optimize else float(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Scale ``input``."""
        return input * self.weight


class Permute(Module):
    """Rearrange the axes of a tensor; samples stay in front.

    Args:
        dims: The axes in their new order; with ``init_transpose``, the two axes to exchange.
        init_transpose: Read ``dims`` as for :func:`torch.transpose`.

    Raises:
        UsageError: The permutation would move axis 0.
    """

    def __init__(self, *dims: int, init_transpose: bool = False) -> None:
        super().__init__()
        if moves_samples(dims, init_transpose):
            raise UsageError(
                f"Permute{dims} with init_transpose={init_transpose} would move axis 0, which "
                "holds the samples: leave that axis in its place. If an operation needs another "
                "order, rearrange the axes by a function between modules."
            )
        self.dims = dims
        self.init_transpose = init_transpose

    def forward(self, input: Tensor) -> Tensor:
        """Return a view of ``input`` with its axes rearranged."""
        return input.permute(self.permutation(input.dim()))

    def permutation(self, axes: int) -> tuple[int, ...]:
        """The axes of the input in the order of the output.

        Args:
            axes: How many axes the input has.
        """
        if not self.init_transpose:
            return tuple(dim % axes for dim in self.dims)
        first, second = (dim % axes for dim in self.dims)
        order = list(range(axes))
        order[first], order[second] = second, first
        return tuple(order)


def moves_samples(dims: Sequence[int], init_transpose: bool = False) -> bool:
    """Whether :class:`Permute` moves axis 0, if its arguments show it."""
    if init_transpose:
        return 0 in dims and any(dims)
    return bool(dims) and dims[0] % len(dims) != 0


class Pad(Module):
    """:func:`torch.nn.functional.pad` as a module.

    Args:
        pad: Pairs of sizes, the last axis first. Negative sizes crop.
        mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: What a constant padding is filled with.
    """

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        self.pad = tuple(pad)
        self.mode = mode
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """Pad ``input``."""
        value = self.value if self.mode == "constant" else None
        return F.pad(input, self.pad, mode=self.mode, value=value)


class Slicing(Module):
    """Index a tensor, ``x ↦ x[slice_info]``.

    Args:
        slice_info: Anything a tensor can be indexed with.
    """

    def __init__(self, slice_info: Any) -> None:
        super().__init__()
        self.slice_info = slice_info

    def forward(self, input: Tensor) -> Tensor:
        """Index ``input``."""
        return input[self.slice_info]


class ReduceTuple(Module):
    """Pick one element of a tuple, such as the outputs of a recurrent layer.

    Args:
        index: Which element.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def forward(self, input: tuple[Any, ...]) -> Any:
        """Return the element."""
        return input[self.index]
