"""How the values of disjoint batches of samples make the value of all of them.

The loss of all samples is ``1/W Σ_b W_b ℓ_b``, with the normaliser ``W_b`` that the loss of a batch
divides by (the number of samples for a mean, the weights of the targets for a weighted one), and
``W = Σ_b W_b``; a sum has none. A part of a value that carries the power ``d`` of the loss's scale
is multiplied by ``W_b^d`` when it comes in, combined, and divided by ``W^d`` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UnsupportedError

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
    """No value of several batches, for a reason; scaling goes by another declaration."""

    def __init__(self, refusal: str, scaled_as: OverBatches | None = None) -> None:
        """Store why, and what to do instead, as a sentence."""
        super().__init__({} if scaled_as is None else scaled_as.parts)
        self.refusal, self.scaled_as = refusal, scaled_as

    def part(self, name: str) -> Part:
        """As for the other declaration."""
        return self._other().part(name)

    def take_apart(self, value: Any) -> dict[str, Tensor]:
        """As for the other declaration."""
        return self._other().take_apart(value)

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Any:
        """As for the other declaration."""
        return self._other().put_together(tensors, shape)

    def _other(self) -> OverBatches:
        if self.scaled_as is None:
            raise UnsupportedError(self.refusal)
        return self.scaled_as


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


def over_batches(extension: Extension, what: str = "values of several batches") -> OverBatches:
    """What an extension declares, for those that do.

    Args:
        extension: The extension.
        what: What is asked for, for the message.

    Raises:
        UnsupportedError: Values of several batches make none of all.
    """
    found = declaration(extension)
    if found.refusal:
        raise UnsupportedError(
            f"{type(extension).__name__} was asked for {what}, but {found.refusal}"
        )
    return found


def declaration(extension: Extension) -> OverBatches:
    """What an extension declares, be it a refusal."""
    found = extension.over_batches
    if isinstance(found, OverBatches):
        return found
    return _WORDS[found] if isinstance(found, str) else OverBatches({"": Part(found)})


@dataclass
class State:
    """What is known of some batches; states of disjoint batches merge.

    Attributes:
        extension: What was computed.
        tensors: In the units of the summed loss, by name; several are to be concatenated.
        normaliser: ``W``; ``None`` for a loss that is a sum over samples.
        samples: How many took part.
    """

    extension: Extension
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    normaliser: float | None = None
    samples: int = 0

    @classmethod
    def of(
        cls,
        extension: Extension,
        value: Any,
        normaliser: float | None,
        samples: int,
        is_given_up: bool = False,
    ) -> State:
        """The state of one batch, in memory of its own where it is scaled.

        Args:
            extension: What was computed, and stands for its ``reader`` where that is another one.
            value: What it stored on a parameter.
            normaliser: What the loss of the batch divides by; ``None`` for a sum.
            samples: How many samples took part.
            is_given_up: Whether nobody else needs the value, so that it is scaled in place.

        Raises:
            UnsupportedError: The extension refuses, or has no degree and the loss is a mean.
        """
        state = cls(extension, {}, normaliser, samples)
        over = over_batches(extension)
        for name, tensor in over.take_apart(value).items():
            part = over.part(name)
            factor = state._power(part, normaliser) * (samples if part.way == "mean" else 1)
            if factor != 1:
                scale = tensor.mul_ if is_given_up and tensor.is_contiguous() else tensor.mul
                tensor = scale(factor)
            state.tensors[name] = [tensor]
        return state

    def add(self, other: State) -> None:
        """Merge another state into this one; what is a sum is changed in place."""
        over = declaration(self.extension)
        for name, others in other.tensors.items():
            part, own = over.part(name), self.tensors[name]
            if part.way == "concatenate":
                own += others
            elif part.way in ("sum", "mean"):
                own[0] += others[0]
            elif not isinstance(part.way, str):
                own[0] = part.way(own[0], others[0])
        if self.normaliser is not None and other.normaliser is not None:
            self.normaliser += other.normaliser
        self.samples += other.samples

    def value(self, shape: torch.Size) -> Any:
        """The value for all samples, for a parameter of a shape; the state stays as it is."""
        over, found = declaration(self.extension), {}
        for name, tensors in self.tensors.items():
            part = over.part(name)
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, part.axis)
            divisor = self._power(part, self.normaliser)
            divisor *= max(1, self.samples) if part.way == "mean" else 1
            found[name] = whole.clone() if divisor == 1 else whole / divisor
        return over.put_together(found, shape)

    def _power(self, part: Part, normaliser: float | None) -> float:
        if normaliser is None:
            return 1.0
        degree = self.extension.degree if part.degree is None else part.degree
        if degree is not None:
            return float(normaliser**degree)
        raise UnsupportedError(
            f"{type(self.extension).__name__} has no degree: a threshold lies in it, so a value "
            "for the mean over a batch says nothing of the mean over several. Use a loss with "
            "reduction='sum', whose individual gradients are the same in every batch."
        )
