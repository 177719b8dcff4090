"""Passes inside others, and passes whose call of ``backward()`` was not seen.

A pass that a hook began is separate. A pass that the backward of a Python function began (a
re-entrant checkpoint, for example) is a part of the pass around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from backpack_core._torch import graph_task_id
from backpack_core.contract.extension import Extension
from backpack_core.engine.active import Context
from backpack_core.engine.backward import Arguments, BackwardPass
from backpack_core.errors import UnsupportedError
from backpack_core.record.call import Edge
from backpack_operations._torch import at_end_of_pass
from backpack_operations.schedule import HookSchedule


class InnerPass(BackwardPass):
    """A pass inside another, or one that was not announced."""

    def __init__(
        self,
        context: Context,
        outer: BackwardPass | None,
        arguments: Arguments | None,
        roots: Sequence[Edge] = (),
        is_part: bool = False,
    ) -> None:
        """Begin it.

        Args:
            context: What was asked for.
            outer: The pass around this one; a hook or a function's backward began this one.
            arguments: What ``backward()`` was called with, if the call was seen.
            roots: Where the pass was first seen, if the call was not.
            is_part: Whether it belongs to the outer pass.
        """
        self._outer: BackwardPass | None = outer
        self.is_part = is_part
        self.is_outermost = outer is None
        self.is_whole = outer is None or (is_part and not outer.survey.sites)
        super().__init__(context, arguments or Arguments(), roots)
        self._outer = None  # which is not kept alive

    def _begin(self) -> None:
        """Plan the pass; results that the outer one stored do not change."""
        if self._outer is not None:
            self.sink.join(self._outer.sink, self.is_part)
        super()._begin()


def pass_inside(context: Context, edge: Edge | None, arguments: Arguments | None) -> BackwardPass:
    """Begin a pass inside another, or one that was not announced; see :class:`Between`."""
    outer = _innermost(context)
    if edge is None:
        return InnerPass(context, outer, arguments)
    ways = [] if outer is None else outer.schedule.inside
    is_part = ways[:1] == [True]
    if is_part:
        _refuse_part(ways, context.whole)
    found = InnerPass(context, outer, None, [edge], is_part)
    # Autograd owns the new pass, which ends with autograd's, also if that fails.
    at_end_of_pass(found.finish)
    assert isinstance(found.schedule, HookSchedule)
    found.schedule.begin()
    found.is_running = True
    context.passes[graph_task_id()] = found
    return found


def _innermost(context: Context) -> BackwardPass | None:
    """The pass that a new one begins inside of now; ``None`` if there is none."""
    others = context.passes.values() if context.passes else ()
    under_way: list[BackwardPass] = [*filter(None, context.announced), *others]
    return under_way[-1] if under_way else None  # they are in the order in which they began


def _refuse_part(ways: Sequence[bool], whole: Sequence[Extension]) -> None:
    """Raise an error if the backward of a function begins a part of a pass that is not known.

    Args:
        ways: For each pass inside the known one, whether a function began it.
        whole: The extensions that read the graph as a whole, which a part does not have.

    Raises:
        UnsupportedError: A hook began the pass of this part, or there are such extensions.
    """
    if whole or not all(ways):
        where = f"{type(whole[0]).__name__} reads as a whole" if whole else "a hook began"
        raise UnsupportedError(
            "Extended modules run in a re-entrant checkpoint, or in a function whose backward() "
            f"calls autograd, and are a part of a pass that {where}, where parts are not known. "
            "Write checkpoint(..., use_reentrant=False), and differentiate the steps of a solver "
            "(odeint, not odeint_adjoint)."
        )
