"""Declarations of how values of disjoint batches combine to the value for all samples.

The loss of all samples is ``1/W Σ_b W_b ℓ_b``. Here ``W_b`` is what the loss of batch ``b`` divides
by (the number of samples for a mean, the weights of the targets for a weighted one), and ``W = Σ_b
W_b``; a sum divides by nothing. If a part of a value carries the power ``d`` of the loss's scale,
it is multiplied by ``W_b^d``, then combined, and the result is divided by ``W^d``. An extension
only declares this; ``backpack-data`` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension

Way: TypeAlias = Literal["sum", "mean", "concatenate", "same"] | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """How one tensor of a value combines over batches.

    Attributes:
        way: ``"sum"``; ``"mean"``, weighted by the numbers of samples; ``"concatenate"`` along
            ``axis``; ``"same"`` for a tensor that does not depend on the samples; or a commutative,
            associative function of two tensors.
        degree: The power of the loss's scale in the tensor; ``None`` for that of the extension.
        axis: The axis of the samples, for ``"concatenate"``.
        counts_unreached: Whether a mean is one over all samples, with zeros for those that do not
            reach the parameter.
    """

    way: Way = "sum"
    degree: float | None = None
    axis: int = 0
    counts_unreached: bool = False


class OverBatches:
    """How the values of an extension combine over batches, as named tensors.

    Attributes:
        refusal: Why values of several batches do not combine, and what to do; empty if they do.
        parts: How each tensor combines, by its name.
    """

    refusal: str = ""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Store how the tensors combine; a value that is a single tensor has the name ``""``."""
        self.parts = parts

    def __repr__(self) -> str:
        """The class and the declared parts."""
        return f"{type(self).__name__}({dict(self.parts)})"

    def refused(self, refusal: str) -> OverBatches:
        """A copy for scaling only, with a reason why values of batches do not combine."""
        refused = copy(self)
        refused.refusal = refusal
        return refused

    def part(self, name: str) -> Part:
        """How the tensor with a name combines."""
        return self.parts[name]

    def take_apart(self, value: Any) -> dict[str, Tensor]:
        """The tensors of a value, by name."""
        return {"": value}

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Any:
        """The value of a parameter with a shape, from its tensors."""
        return tensors[""]

    def plugins_of(self, value: Any) -> Mapping[str, str]:
        """The fingerprint that a value holds; empty if it holds none."""
        return {}

    def marked(self, value: Any, plugins: Mapping[str, str]) -> Any:
        """A value of :meth:`put_together` with a fingerprint, if it can hold one."""
        return value

    def reader(self, extension: Extension) -> Extension:
        """The extension to run instead, if the values of this one lack what combining needs."""
        return extension

    def of_batch(self, extension: Extension, normaliser: float | None) -> Extension:
        """The extension to run on a batch whose loss divides by a number that the user gave.

        Args:
            extension: The extension.
            normaliser: The number; ``None`` for a sum.
        """
        return extension

    def first_pass(self, extension: Extension) -> Extension | None:
        """The extension to run over all samples first, if this one depends on its result."""
        return None

    def second_pass(self, extension: Extension, known: Mapping[Tensor, Any]) -> Extension:
        """The extension to run after the first pass.

        Args:
            extension: The extension.
            known: The values of :meth:`first_pass` over all samples, by parameter.
        """
        return extension


class Refused(OverBatches):
    """The declaration that values neither combine over batches nor scale."""

    def __init__(self, refusal: str) -> None:
        """Store the reason, and what to do instead, as a sentence."""
        super().__init__({})
        self.refusal = refusal


SUM = OverBatches({"": Part("sum")})
CONCATENATE = OverBatches({"": Part("concatenate")})
UNDECLARED = Refused(
    "it does not say how values of disjoint batches combine: declare degree and over_batches on "
    "its class, or take its value of one batch."
)
_WORDS = {"sum": SUM, "concatenate": CONCATENATE}


def declaration(extension: Extension) -> OverBatches:
    """The declaration of an extension; it may be a refusal."""
    declared: Any = extension.over_batches
    if declared is None:  # what has a degree can be scaled all the same
        return UNDECLARED if extension.degree is None else SUM.refused(UNDECLARED.refusal)
    if getattr(declared, "__self__", None) is extension:  # a function of the class became a method
        declared = declared.__func__
    if isinstance(declared, OverBatches):
        return declared
    return _WORDS[declared] if isinstance(declared, str) else OverBatches({"": Part(declared)})
