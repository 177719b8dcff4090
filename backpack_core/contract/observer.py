"""Who attends a backward pass besides its extensions: asks for more, looks on, judges at the end.

Libraries return an observer from the hook ``backpack_run``. What the arguments ``observer``,
``debug`` and ``extension_hook`` ask for is done by observers, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from backpack_core.record.view import View

Grads = Sequence[Tensor | None]
Options = Mapping[str, Any]  # arguments of ``backward()``


class Observer:
    """Attends one backward pass; each method does nothing by default, in the order of a pass.

    ``run`` is the :class:`~backpack_core.engine.backward.BackwardPass`. It owns the observer, which
    must not hold it: hooks would keep both alive.

    Attributes:
        answers: Which arguments of ``backpack(...)`` it sees to.
        needs_autograd: Whether autograd has to run, since somebody looks at gradients.
        needs_visits: Whether it looks at visits, or adds to what they do, in passes that go by a
            plan, so that nothing may drive them.
        kept: What the plan of the pass keeps for observers of this class; ``None`` for nothing.
    """

    answers: frozenset[str] = frozenset()
    needs_autograd: bool = False
    needs_visits: bool = True
    kept: Any = None

    def goes_by(self, kept: Any) -> bool:
        """Whether the pass may go by a plan, so that nothing is found out in it.

        Args:
            kept: What an observer of this class has left in the plan; ``None`` if nothing.
        """
        return True

    def drive(self, run: Any, planned: Any, structure: Any) -> Driver | None:
        """What takes over the visits of a pass that goes by a plan; ``None`` for the engine.

        Args:
            run: The pass, of which nothing is surveyed yet.
            planned: The :class:`~backpack_core.plan.plan.Planned` that it goes by.
            structure: Its :class:`~backpack_core.plan.structure.Structure`.
        """
        return None

    def begin(self, run: Any) -> None:
        """The graph is known. More groups may travel: they are appended to ``run.groups``."""

    def instead(self, run: Any, given: Options, gradients: Grads) -> bool:
        """Visit every call without autograd; whether that was done.

        Args:
            run: The pass.
            given: The arguments of ``backward()``.
            gradients: What comes in at each root.
        """
        return False

    def options(self, run: Any, given: Options) -> Options:
        """What to tell autograd instead of arguments of ``backward()``."""
        return {}

    def before(self, view: View) -> None:
        """At an output of a call, before anything is read there.

        Only called if a class overrides it, as :meth:`after`.
        """

    def after(self, view: View) -> None:
        """At an output of a call, when everything was read there, and sent on."""

    def leave(self) -> None:
        """The pass is over, however it ended; may be called twice."""

    def finish(self, run: Any) -> None:
        """Autograd is through, and nothing was left on its way."""

    def results(self, run: Any) -> Iterable[tuple[Any, Mapping[Tensor, Any]]]:
        """Results by extension and parameter, which are then stored."""
        return ()

    def stored(self, run: Any) -> None:
        """All results are stored."""


class Driver(ABC):
    """Takes over the visits of a pass.

    Attributes:
        outputs: The outputs of calls that it visits; others are let go, and nothing is surveyed.
            ``None`` if the engine visits calls besides.
    """

    outputs: Container[tuple[Any, int]] | None = None

    @abstractmethod
    def reach(self, run: Any, site: Any, grads: Grads, others: Any) -> None:
        """Autograd has reached an output; see :meth:`~backpack_core.engine.between.Between.reach`.

        Args:
            run: The pass.
            site: The output.
            grads: The gradients that autograd goes on with at its node.
            others: Hooks of the user's on the tensor, if its gradient was changed.
        """

    @abstractmethod
    def end(self, run: Any) -> None:
        """Autograd is through.

        Raises:
            InternalError: It did not get to an output that was to be visited.
        """


class Sharer(ABC):
    """Takes the sums of products that extensions have read anyway.

    Attributes:
        needs: The operations that are asked of such a product.
    """

    needs: frozenset[Any]

    @abstractmethod
    def wants(self, extension: Any, parameter: Tensor) -> bool:
        """Whether it takes the sum of a parameter's product, as the group of an extension reads it.

        Args:
            extension: The first of the group.
            parameter: The parameter.
        """

    @abstractmethod
    def take(self, parameter: Tensor, whole: Any, is_reached: bool) -> None:
        """Take it.

        Args:
            parameter: The parameter.
            whole: The product, of all uses.
            is_reached: Whether any gradient arrives.
        """
