"""Observers of a backward pass: they may add quantities, watch visits, and judge results.

Libraries return an observer from the hook ``backpack_run``. The arguments ``observer``, ``debug``
and ``extension_hook`` of ``backpack(...)`` are handled by observers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from backpack_core.record.view import View

Grads = Sequence[Tensor | None]
Options = Mapping[str, Any]  # arguments of ``backward()``


class Observer:
    """Attends one backward pass. By default methods do nothing; they are called in this order.

    ``run`` is the :class:`~backpack_core.engine.backward.BackwardPass`. It owns the observer, which
    must not keep a reference to it: tensor hooks would keep both alive.

    Attributes:
        answers: The arguments of ``backpack(...)`` that it handles.
        needs_autograd: Whether autograd must run, because the observer looks at gradients.
    """

    answers: frozenset[str] = frozenset()
    needs_autograd: bool = False

    def begin(self, run: Any) -> None:
        """Called when the graph is surveyed. It may append groups of its own to ``run.groups``."""

    def instead(self, run: Any) -> bool:
        """Make all visits without autograd, if that is possible; returns whether it was.

        Only called if ``run.may_narrow``.
        """
        return False

    def options(self, run: Any, given: Options) -> Options:
        """Arguments of ``backward()`` to replace before autograd runs."""
        return {}

    def before(self, view: View) -> None:
        """Called at an output of a call, before anything is read there.

        This method and :meth:`after` are called only if a class overrides them.
        """

    def after(self, view: View) -> None:
        """Called at an output of a call, after everything was read there and sent on."""

    def leave(self) -> None:
        """Called when the pass is over, whether or not it failed; perhaps twice."""

    def finish(self, run: Any) -> None:
        """Called when autograd is done, and every quantity that was sent has arrived."""

    def results(self, run: Any) -> Iterable[tuple[Any, Mapping[Tensor, Any]]]:
        """Results by extension and parameter, which are then stored."""
        return ()

    def stored(self, run: Any) -> None:
        """Called when all results are stored."""
