"""The private gradients that a step of the optimizer was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from backpack_privacy.shards import placed_as


class Given:
    """Gradients in ``.grad``, from when they are released until the step is over or has failed."""

    def __init__(self) -> None:
        """Nothing is given."""
        self._gradients: dict[Tensor, Tensor] = {}
        self._versions: list[int] = []  # when the step began
        self._depth = 0  # calls of step() that go on

    def give(self, named: Mapping[str, Tensor], gradients: Iterable[Tensor], scale: float) -> None:
        """Set ``.grad`` of all parameters.

        Args:
            named: The parameters.
            gradients: Their private gradients, which are changed in place.
            scale: What these are multiplied by.
        """
        self._depth = 0
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            placed = placed_as(gradient.mul_(scale), parameter)
            parameter.grad = self._gradients[parameter] = placed

    def take_back(self) -> None:
        """Remove the gradients that are left of the last step, also of one that has failed."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                parameter.grad = None
        self._gradients = {}

    def _found(self) -> list[int]:
        pairs = self._gradients.items()
        return [grad._version if p.grad is grad else -1 for p, grad in pairs]

    def enter_again(self) -> bool:
        """Whether the step goes on with the same gradients.

        So the step of a subclass may call that of its base class, and a failed one is repeated.
        """
        is_again = bool(self._depth and self._gradients) and self._versions == self._found()
        self._depth += is_again
        return is_again

    def enter(self) -> None:
        """A step begins."""
        self._depth, self._versions = 1, self._found()

    def leave(self) -> bool:
        """A call of ``step()`` ends; whether that is the end of the step."""
        self._depth -= 1
        return not self._depth
