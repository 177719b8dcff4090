"""Steps that run in another object's block: of an optimizer, or of a private training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from backpack_capture.step import CapturedStep

Function = Callable[..., Any]


class Make(Protocol):
    """Makes a captured step with the user's modules and compiler."""

    def __call__(self, function: Function, *parts: Any, **options: Any) -> CapturedStep:
        """Capture a function.

        Args:
            function: Returns the loss.
            parts: Extensions, and other modules that it calls than those that the user named.
            options: ``gradient=``, ``check=`` and ``observer=`` of
                :func:`~backpack_capture.capture`.
        """


@runtime_checkable
class Host(Protocol):
    """Opens its own block around passes, and runs steps in it.

    It decides what passes compute, so ``capture(function, lossfunc, host)`` takes no extensions.
    """

    def captured(self, function: Function, make: Make) -> Function:
        """A function that runs one captured step in the block.

        Args:
            function: The user's function, which returns the loss.
            make: Makes captured steps: of ``function``, or of one that calls it.
        """


class HostedStep:
    """What :func:`~backpack_capture.capture` returns for a host. Call it like the function."""

    def __init__(self, function: Function, host: Host, make: Make) -> None:
        """Ask the host for its step.

        Args:
            function: The user's function.
            host: The owner of the block.
            make: Makes captured steps, which are kept for reports.
        """
        self._function, self._host = function, host
        self._steps: list[CapturedStep] = []

        def kept(function: Function, *parts: Any, **options: Any) -> CapturedStep:
            self._steps.append(make(function, *parts, **options))
            return self._steps[-1]

        self._run = host.captured(function, kept)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step in the block of the host.

        Args:
            args: The function's arguments.
            kwargs: The function's keyword arguments.

        Returns:
            What the host returns: usually what the function returned, detached; for a private
            training, whether the optimizer took a step.
        """
        return self._run(*args, **kwargs)

    def wait(self, timeout: float | None = None) -> bool:
        """As for :class:`CapturedStep`."""
        ended = [step.wait(timeout) for step in self._steps]
        return all(ended)

    def report(self) -> str:
        """What runs how, and why, for all steps that the host has made."""
        return "\n".join([repr(self), *[step.report() for step in self._steps]])

    @property
    def code(self) -> str:
        """The Python code of the graphs."""
        return "\n".join([step.code for step in self._steps])

    def __repr__(self) -> str:
        """The function, and the host."""
        return f"<captured {self._function.__qualname__} in {type(self._host).__name__}>"
