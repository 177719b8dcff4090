"""The value of one extension at one parameter for some batches, scaled so that batches add up.

How its parts combine is what an extension declares, see :mod:`backpack_products.merging`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backpack_core import Extension, backpack
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_products.merging import OverBatches, Part, declaration
from backpack_products.values import at_least_single

LINEAR = ("sum", "mean")  # ways in which values are added up


def over_batches(extension: Extension, what: str = "values of several batches") -> OverBatches:
    """The extension's declaration of how batches combine.

    Args:
        extension: The extension.
        what: What the caller wants, for the message.

    Raises:
        UnsupportedError: It declares none: its values for batches do not determine the value for
            all.
    """
    found = declaration(extension)
    if found.refusal:
        raise UnsupportedError(
            f"{type(extension).__name__} was asked for {what}, but {found.refusal}"
        )
    return found


def listed(extensions: Any) -> list[Extension]:
    """One extension, or several, as a list.

    Raises:
        NotAnExtensionError: Something is not an extension.
    """
    found = [*extensions] if isinstance(extensions, (list, tuple)) else [extensions]
    backpack(*found)
    return found


def named(extensions: Iterable[Extension]) -> list[str]:
    """Class and field of each extension, in the order of the fields."""
    return [f"{type(e).__name__} ({e.savefield})" for e in sorted(extensions, key=_field)]


def _field(extension: Extension) -> str:
    return extension.savefield


@dataclass
class State:
    """The value for some batches; states of disjoint batches merge.

    Attributes:
        extension: The extension.
        tensors: Parts of the value for the loss as a sum over samples, by name; a list of several
            is concatenated at the end.
        normaliser: ``W``; ``None`` for a loss that is a sum over samples.
        samples: How many samples took part.
        plugins: The fingerprint that the value of the first batch held.
    """

    extension: Extension
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    normaliser: float | None = None
    samples: int = 0
    plugins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        extension: Extension,
        value: Any,
        normaliser: float | None,
        samples: int,
        is_given_up: bool = False,
    ) -> State:
        """The state of one batch; if it is scaled or added to, in new memory.

        Args:
            extension: The extension; the value may be that of its ``reader``.
            value: The value on a parameter.
            normaliser: What the loss of the batch divides by; ``None`` for a sum.
            samples: How many samples took part.
            is_given_up: Whether the caller no longer needs the value, so its memory may be taken.

        Raises:
            UnsupportedError: The extension refuses, has no degree and the loss is a mean, or its
                value does not consist of tensors.
        """
        over = over_batches(extension)
        state = cls(extension, {}, normaliser, samples, over.plugins_of(value))
        for name, tensor in over.take_apart(value).items():
            if not isinstance(tensor, Tensor):
                raise UnsupportedError(
                    f"{type(extension).__name__} stores a value of type {type(tensor).__name__}, "
                    "and its over_batches combines tensors: return a tensor from read(), or "
                    "declare an OverBatches that takes the value apart."
                )
            part = over.part(name)
            if part.way in LINEAR:
                tensor = at_least_single(tensor)  # sums in half precision stop growing
            factor = state._power(part, normaliser) * (samples if part.way == "mean" else 1)
            if factor != 1:
                scale = tensor.mul_ if is_given_up and tensor.is_contiguous() else tensor.mul
                tensor = scale(factor)
            elif part.way in LINEAR and not is_given_up:
                tensor = tensor.clone()
            state.tensors[name] = [tensor]
        return state

    def require_fit(self, other: State) -> None:
        """Raise an error if another state cannot be merged; look at all before merging any.

        Raises:
            ShapeError: Values that are added have several shapes, or values that are joined differ
                along another axis.
        """
        over, name = declaration(self.extension), type(self.extension).__name__
        for key, (new, *_) in other.tensors.items():
            part, own = over.part(key), self.tensors[key][0]
            shapes = f"have the shapes {list(own.shape)} and {list(new.shape)}"
            if part.way in LINEAR and own.shape != new.shape:  # it might broadcast
                raise ShapeError(
                    f"Values of {name} are added over batches, and {shapes}: with an axis of "
                    "samples, declare over_batches = 'concatenate'."
                )
            if part.way == "concatenate" and _others(own, part.axis) != _others(new, part.axis):
                raise ShapeError(
                    f"Values of {name} are joined over batches along axis {part.axis}, and "
                    f"{shapes}: give batches of one length of samples."
                )

    def add(self, other: State) -> None:
        """Merge another state that fits into this one; sums are changed in place."""
        over = declaration(self.extension)
        for name, others in other.tensors.items():
            part, own = over.part(name), self.tensors[name]
            if part.way == "concatenate":
                own += others
            elif part.way in LINEAR:
                own[0] += others[0]
            elif not isinstance(part.way, str):
                own[0] = part.way(own[0], others[0])
        if self.normaliser is not None and other.normaliser is not None:
            self.normaliser += other.normaliser
        self.samples += other.samples

    @property
    def is_sum(self) -> bool:
        """Whether the value is a plain sum, which batches without it leave as it is."""
        over = declaration(self.extension)
        return all(over.part(name).way == "sum" for name in self.tensors)

    @property
    def counts_unreached(self) -> bool:
        """Whether the value of samples that do not reach the parameter is known to be zero.

        If an extension may leave parameters out (``fail_mode``), a missing value says nothing.
        """
        parts = [(declaration(self.extension).part(name), t) for name, t in self.tensors.items()]
        return self.extension.fail_mode in ("error", "autodiff") and all(
            part.counts_unreached
            or part.way == "sum"
            or (part.way == "concatenate" and sum(t.shape[part.axis] for t in ts) == self.samples)
            for part, ts in parts
        )

    def of_unreached(self, samples: int) -> State:
        """The state of so many samples that do not reach the parameter, in the form of this one."""
        over, tensors = declaration(self.extension), dict[str, list[Tensor]]()
        for name, (tensor, *_) in self.tensors.items():
            shape, part = [*tensor.shape], over.part(name)
            if part.way == "concatenate":
                shape[part.axis] = samples
            tensors[name] = [tensor.new_zeros(shape)]
        return State(self.extension, tensors, None if self.normaliser is None else 0.0, samples)

    def value(self, shape: torch.Size, is_given_up: bool = False) -> Any:
        """The value for all samples.

        Args:
            shape: Shape of the parameter.
            is_given_up: Whether the state is no longer needed, so its memory may be used for the
                value; otherwise it does not change.
        """
        over, found = declaration(self.extension), {}
        for name, tensors in self.tensors.items():
            part = over.part(name)
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, part.axis)
            divisor = self._power(part, self.normaliser)
            divisor *= max(1, self.samples) if part.way == "mean" else 1
            if divisor == 1:
                found[name] = whole if is_given_up else whole.clone()
            else:  # only sums lie in memory of their own
                is_own = is_given_up and part.way in LINEAR
                found[name] = whole.div_(divisor) if is_own else whole / divisor
        return over.marked(over.put_together(found, shape), self.plugins)

    def _power(self, part: Part, normaliser: float | None) -> float:
        if normaliser is None:
            return 1.0
        degree = self.extension.degree if part.degree is None else part.degree
        if degree is not None:
            return float(normaliser**degree)
        raise UnsupportedError(
            f"{type(self.extension).__name__} has no degree, because it has a threshold: a value "
            "for the mean over a batch says nothing about the mean over several. Use a loss with "
            "reduction='sum': its individual gradients are the same in every batch."
        )


def _others(tensor: Tensor, axis: int) -> list[int]:
    """The lengths of all axes but one."""
    return [length for place, length in enumerate(tensor.shape) if place != axis]
