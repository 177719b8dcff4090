"""What an extension declares of its values for disjoint batches: how they make that of all.

The loss of all samples is ``1/W Σ_b W_b ℓ_b``, with the normaliser ``W_b`` that the loss of a batch
divides by (the number of samples for a mean, the weights of the targets for a weighted one), and
``W = Σ_b W_b``; a sum has none. A part of a value that carries the power ``d`` of the loss's scale
is multiplied by ``W_b^d`` when it comes in, combined, and divided by ``W^d`` at the end. Who does
so is not the core: ``backpack-data`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from backpack_core.contract.extension import Extension

Way: TypeAlias = Literal["sum", "mean", "concatenate", "same"] | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """How one tensor of a value combines.

    Attributes:
        way: ``"sum"``; ``"mean"``, weighted by the numbers of samples; ``"concatenate"`` along
            ``axis``; ``"same"`` for what does not depend on the samples; or a commutative,
            associative function of two tensors.
        degree: The power of the loss's scale; ``None`` for that of the extension.
        axis: Where samples lie, to concatenate.
    """

    way: Way = "sum"
    degree: float | None = None
    axis: int = 0


class OverBatches:
    """The declaration of an extension: values as named tensors, and how each of them combines.

    Attributes:
        refusal: Why values of batches make none of all, and what to do; empty where they do.
        parts: How each tensor combines, by name.
    """

    refusal: str = ""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Store how tensors combine; a value that is a tensor has the name ``""``."""
        self.parts = parts

    def __repr__(self) -> str:
        """What is declared."""
        return f"{type(self).__name__}({dict(self.parts)})"

    def refused(self, refusal: str) -> OverBatches:
        """The same, to scale values only: those of several batches make none of all, and why."""
        found = copy(self)
        found.refusal = refusal
        return found

    def part(self, name: str) -> Part:
        """How the tensor of a name combines."""
        return self.parts[name]

    def take_apart(self, value: Any) -> dict[str, Tensor]:
        """The tensors of a value, by name."""
        return {"": value}

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Any:
        """The value of a parameter of a shape, from its tensors."""
        return tensors[""]

    def reader(self, extension: Extension) -> Extension:
        """What to run in the place of an extension whose own value does not say enough."""
        return extension

    def first_pass(self, extension: Extension) -> Extension | None:
        """What has to be known of all samples before the extension can be run."""
        return None

    def second_pass(self, extension: Extension, known: Mapping[Tensor, Any]) -> Extension:
        """What to run when it is known.

        Args:
            extension: The extension.
            known: The values of :meth:`first_pass` over all samples, by parameter.
        """
        return extension


class Refused(OverBatches):
    """No value of several batches, and nothing that could be scaled."""

    def __init__(self, refusal: str) -> None:
        """Store why, and what to do instead, as a sentence."""
        super().__init__({})
        self.refusal = refusal


SUM = OverBatches({"": Part("sum")})
CONCATENATE = OverBatches({"": Part("concatenate")})
UNDECLARED = Refused(
    "it does not say how values of disjoint batches combine: declare degree and over_batches on "
    "its class, or take its value of one batch."
)
_WORDS = {"sum": SUM, "concatenate": CONCATENATE}

Declaration: TypeAlias = (
    OverBatches | Literal["sum", "concatenate"] | Callable[[Tensor, Tensor], Tensor]
)


def declaration(extension: Extension) -> OverBatches:
    """What an extension declares, be it a refusal."""
    found = extension.over_batches
    if isinstance(found, OverBatches):
        return found
    return _WORDS[found] if isinstance(found, str) else OverBatches({"": Part(found)})
