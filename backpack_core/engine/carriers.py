"""What the engine asks of the layer rule at a call, and of extensions if the rule cannot answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from backpack_core import errors
from backpack_core.contract.bases import is_of_base
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.reading import Reading
from backpack_core.engine.groups import Group
from backpack_core.graph.parameters import Trained
from backpack_core.record.guards import ask
from backpack_core.record.view import View


class RuleCarrier:
    """The layer rules as carriers; one object answers for all calls of a group."""

    gives_values = False

    def __init__(self, group: Group) -> None:
        self._propagator = self.speaker = group.propagator
        self._needs = group.needs
        self._products = _asked(group.propagator, "products")
        self._propagate = _asked(group.propagator, "propagate")

    def starts(self, view: View) -> bool:
        """No: the propagator starts the quantity, at a loss."""
        return False

    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the output; at a loss, the propagator starts one."""
        arrived = self._propagator.arrive(view.call.rule, view, waiting)
        if arrived is None and view.call.rule.is_loss:
            raise self._wrong("start", None, view, "the quantity at its input")
        return arrived

    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> list[Reading]:
        """The propagator's reading for each parameter, with module, name and rule noted on it."""
        rule, module = view.call.rule, view.call.module
        names, *_ = zip(*trained, strict=True)
        found = self._products(rule, view, names, quantity)
        if view.is_checked:
            is_list = isinstance(found, (list, tuple)) and len(found) == len(names)
            if not is_list or not all(isinstance(reading, Reading) for reading in found):
                what = f"a list with a reading for each of {[*names]}"
                raise self._wrong("products", found, view, what)
        beside: dict[Any, Any] = {}
        for name, reading in zip(names, found, strict=True):
            reading.name, reading.module, reading.rule = name, module, type(rule)
            reading.call_cache, reading.column_cache = view.call_cache, beside
            reading.needs, reading.is_measured = self._needs, view.is_measured
        return list(found)

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """The quantities at the inputs, by position; a loss hands its own to the first input."""
        rule = view.call.rule
        if rule.is_loss:
            return {0: quantity}
        found: Any = self._propagate(rule, view, quantity)
        if not view.is_checked:
            return found  # type: ignore[no-any-return]
        count = len(view.stored.inputs)
        if isinstance(found, dict) and all(place in range(count) for place in found):
            return found
        expected = f"a dictionary from positions of its {count} inputs to quantities"
        raise self._wrong("propagate", found, view, expected)

    def _wrong(self, method: str, found: Any, view: View, expected: str) -> errors.ShapeError:
        return errors.ShapeError(
            f"{type(self._propagator).__name__}.{method} returned {found!r:.200} at "
            f"{view.path}, expected {expected}."
        )


def _asked(propagator: Propagator, method: str) -> Callable[..., Any]:
    """A method of the propagator, guarded unless it is that of a base class."""
    own: Callable[..., Any] = getattr(propagator, method)
    if is_of_base(own):
        return own
    return lambda rule, view, *given: ask(view, propagator, method, rule, view, *given)


def wants_unruled(extension: Extension) -> bool:
    """Whether an extension wants a value for parameters of modules without a rule."""
    return extension.fail_mode not in ("warning", "silent")


def tolerates(extension: Extension, view: View, name: str, error: errors.UnsupportedError) -> bool:
    """Whether an extension goes on after an error, as its ``fail_mode`` says."""
    if extension.needs_every_parameter:
        return False
    key = (type(view.call.module), type(extension), name)
    return leaves_out(extension, key, f"{view.path}: {error}")


def leaves_out(extension: Extension, key: tuple[object, ...], text: str) -> bool:
    """Whether an extension leaves a parameter out, as its ``fail_mode`` says; warns if asked to."""
    if extension.fail_mode == "warning":
        errors.warn_once(key, text, errors.BackpackWarning)
    return extension.fail_mode in ("warning", "silent")
