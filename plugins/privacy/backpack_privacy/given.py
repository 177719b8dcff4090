"""The private gradients that a step of the optimizer was given."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType

from torch import Tensor

from backpack_privacy.shards import placed_as


class Given:
    """Gradients in ``.grad``, from when they are released until the step is over or has failed."""

    def __init__(self) -> None:
        """Nothing is given."""
        self._gradients: dict[Tensor, Tensor] = {}
        self._versions: list[int] = []  # when the step began
        self._depth = 0  # calls of step() that go on
        self._frame: FrameType | None = None  # of the first of these

    def give(self, named: Mapping[str, Tensor], gradients: Iterable[Tensor], scale: float) -> None:
        """Set ``.grad`` of all parameters.

        Args:
            named: The parameters.
            gradients: Their private gradients, which are changed in place.
            scale: What these are multiplied by.
        """
        self._depth, self._frame = 0, None
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            placed = placed_as(gradient.mul_(scale), parameter)
            parameter.grad = self._gradients[parameter] = placed

    def take_back(self, is_over: bool = False) -> None:
        """Remove the gradients that are left of the last step, also of one that has failed.

        Args:
            is_over: Whether the step has just ended: others than those given are its own, too.
        """
        for parameter, gradient in self._gradients.items():
            if is_over or parameter.grad is gradient:
                parameter.grad = None
        self._gradients = {}

    def _found(self) -> list[int]:
        pairs = self._gradients.items()
        return [grad._version if p.grad is grad else -1 for p, grad in pairs]

    def enter_again(self) -> bool:
        """Whether the step goes on, or one that has failed is repeated with the same gradients.

        So the step of a subclass may change gradients, and call that of its base class.
        """
        is_given = bool(self._depth and self._gradients)
        is_again = is_given and (self._goes_on() or self._versions == self._found())
        self._depth += is_again
        return is_again

    def _goes_on(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def enter(self) -> None:
        """A step begins, in the function that has called the caller."""
        self._depth, self._versions, self._frame = 1, self._found(), sys._getframe(2)

    def leave(self) -> bool:
        """A call of ``step()`` ends; whether that is the end of the step."""
        self._depth -= 1
        if not self._depth:
            self._frame = None
        return not self._depth
