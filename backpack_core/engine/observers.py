"""The observers of a pass: those that ``backpack(...)`` asks for, and those of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from backpack_core.contract.observer import Observer
from backpack_core.engine.active import Context, ExtensionHook, logger
from backpack_core.errors import PluginCodeError
from backpack_core.graph import Survey
from backpack_core.plugins.loading import missing
from backpack_core.plugins.registration import hooks
from backpack_core.record.view import View


class Shown(Observer):
    """Calls a function with the view of each visit: ``observer``, or one that logs."""

    def __init__(self, function: Callable[[View], None]) -> None:
        self._function = function

    def before(self, view: View) -> None:
        """Call it before anything is read."""
        self._function(view)


def log(view: View) -> None:
    """Log the module of a visit, the shape of its output, and the rule."""
    shape, rule, who = list(view.output_shape), type(view.call.rule), view.call.provenance
    logger.info("%s: output %s, rule %s of %s", view.path, shape, rule.__name__, who)


class Hooked(Observer):
    """Calls ``extension_hook`` with each module."""

    needs_autograd = True

    def __init__(self, function: ExtensionHook, survey: Survey) -> None:
        self._function, self._survey = function, survey

    def after(self, view: View) -> None:
        """Call it with the visited module, unless operations go on using its parameters."""
        if view.call not in self._survey.freed:
            self._function(view.call.module)


def own_observers(context: Context, survey: Survey) -> list[Observer]:
    """Those of core's own observers that were asked for."""
    shown = context.observer, log if context.debug else None
    found: list[Observer] = [Shown(function) for function in shown if function is not None]
    hook = context.extension_hook
    return found if hook is None else [*found, Hooked(hook, survey)]


def returned_by_libraries(run: Any) -> list[Observer]:
    """The observers that libraries return for a pass.

    Raises:
        PluginCodeError: A library returned something other than an observer.
        MissingPluginError: No installed library implements an argument of ``backpack(...)``.
    """
    found: list[Any] = hooks.backpack_run(run=run)
    for observer in found:
        if not isinstance(observer, Observer):
            raise PluginCodeError(f"backpack_run must return an Observer. Got {observer!r:.80}.")
    check, gradient = run.context.check, run.context.gradient
    for argument, word, is_asked, library in (
        ("check", check, check == "always", "backpack-checks"),
        ("gradient", gradient, gradient != "autograd", "backpack-interplay"),
    ):
        if is_asked and not answers(found, argument):
            raise missing(
                f"backpack({argument}={word!r}) needs a library that is not there: "
                f"pip install {library}.",
                library.removeprefix("backpack-"),
            )
    return found


def answers(observers: Iterable[Observer], argument: str) -> bool:
    """Whether any observer implements an argument of ``backpack(...)``."""
    return any(argument in observer.answers for observer in observers)


def overriding(observers: Iterable[Observer], method: str) -> tuple[Callable[..., Any], ...]:
    """The bound method of each observer whose class overrides it."""
    bound = [getattr(observer, method) for observer in observers]
    default = getattr(Observer, method)
    return tuple([each for each in bound if getattr(each, "__func__", None) is not default])
