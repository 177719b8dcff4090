"""A layer rule as the carrier of a call, and what is done where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.contract.bases import is_of_base
from backpack_core.contract.carrier import Carrier, Found
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.active import Context
from backpack_core.engine.groups import Group
from backpack_core.engine.location import place
from backpack_core.graph.parameters import Trained
from backpack_core.graph.survey import Survey
from backpack_core.plugins.loading import blocked, missing
from backpack_core.plugins.registry import registry
from backpack_core.record.untouched import ask
from backpack_core.record.view import View
from backpack_products.computed import at_leaf
from backpack_products.product import Reading, SampleProduct
from backpack_products.regrouping import regrouped


class RuleCarrier(Carrier):
    """A layer rule, which any extension can read from; the same for all calls of a group."""

    def __init__(self, group: Group, survey: Survey) -> None:
        self._propagator = self.speaker = group.propagator
        self._needs = group.needs
        self._survey = survey
        self._products = _asked(group.propagator, "products")
        self._propagate = _asked(group.propagator, "propagate")

    def starts(self, view: View) -> bool:
        """It does not: the propagator has a quantity at a loss."""
        return False

    def arrive(self, view: View, waiting: Any) -> Any:
        """By the propagator."""
        arrived = self._propagator.arrive(view.call.rule, view, waiting)
        if arrived is None and view.call.rule.is_loss:
            raise self._wrong("start", None, view, "the quantity at its input")
        return arrived

    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> list[Reading]:
        """What the propagator finds at parameters, each with where it stands."""
        rule, module = view.call.rule, view.call.module
        names = [*dict.fromkeys([own.name for own in trained])]
        found = self._products(rule, view, names, quantity)
        is_list = isinstance(found, (list, tuple)) and len(found) == len(names)
        if not is_list or False in [isinstance(reading, Reading) for reading in found]:
            raise self._wrong("products", found, view, f"a list with a reading for each of {names}")
        if view.positions > 1:
            found = [self._regrouped(view, reading) for reading in found]
        beside: dict[Any, Any] = {}
        for name, reading in zip(names, found, strict=True):
            reading.name, reading.module, reading.rule = name, module, type(rule)
            reading.kept, reading.beside, reading.needs = view.kept, beside, self._needs
            reading.is_measured = view.is_measured
        at = dict(zip(names, found, strict=True))
        return [
            at[name] if parameter is used else at_leaf(at[name], used, parameter)
            for name, parameter, used in trained
        ]

    def _regrouped(self, view: View, reading: Reading) -> Reading:
        """A product of several entries for each sample, as one of samples."""
        if not isinstance(reading, SampleProduct):
            return reading
        product = regrouped(reading, reading.columns, self._survey.batch_size, view.kept)
        product.roots = reading.roots
        return product

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """By the propagator; a loss hands its quantity to its first input as it is."""
        rule = view.call.rule
        if rule.is_loss:
            return {0: quantity}
        found: Any = self._propagate(rule, view, quantity)
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


def values_of(
    carrier: Carrier, survey: Survey, view: View, trained: Sequence[Trained], quantity: Any
) -> Iterator[Found]:
    """The results of a carrier that gives values.

    Raises:
        UnsupportedError: A value is not all that there is to a parameter.
    """
    for found in carrier.find(view, (*trained, *survey.freed.get(view.call, ())), quantity):
        number = id(found.parameter)
        use, is_computed = survey.uses[number], found.name in view.stored.computed
        is_shared = (use.unruled or use.count) > 1
        if is_computed or is_shared or number in (survey.outside if use.unruled else survey.bare):
            what = "computed from others (parametrized)" if is_computed else "used more than once"
            raise errors.UnsupportedError(
                f"The parameter {found.name!r} of {view.path} is {what}, which a carrier for "
                f"{class_of(view.call.module).__name__} cannot account for. Write a layer rule "
                "instead, or leave the carrier out."
            )
        yield found


def _asked(propagator: Propagator, method: str) -> Callable[..., Any]:
    """A method of a rule, a view, and more; what a base class does needs nobody to watch it."""
    own: Callable[..., Any] = getattr(propagator, method)
    if is_of_base(own):
        return own
    return lambda rule, view, *given: ask(view, propagator, method, rule, view, *given)


def ask_without_rule(survey: Survey, context: Context) -> None:
    """Leave out parameters of modules without a rule that no extension wants.

    Raises:
        MissingPluginError: An extension does not take them, and says so.
    """
    for call in survey.freed:
        if not any(survey.uses[id(own.parameter)].unruled for own in survey.uncovered(call)):
            continue
        module = call.module
        is_wanted = bool(context.whole)
        for group in context.groups:
            for extension in group.extensions:
                if group.has_overrides and registry.override(extension, module):
                    continue
                try:
                    is_wanted |= _takes(extension, View(call))
                except Exception as error:
                    place(error, View(call), extension)
                    raise
        if not is_wanted:
            survey.leave_out(call)


def wants_unruled(extension: Extension) -> bool:
    """Whether an extension has a value for parameters of modules without a rule."""
    return extension.fail_mode not in ("warning", "silent")


def _takes(extension: Extension, view: View) -> bool:
    """Whether an extension takes the parameters of a module, as its ``fail_mode`` says.

    Raises:
        MissingPluginError: It does not, and says so.
    """
    kind = class_of(view.call.module)
    name, full_name = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
    if extension.fail_mode == "error":
        raise missing(
            f"No layer rule covers the parameters of {view.path}, and fail_mode is 'error'. "
            f"Install a plugin that knows {name}, or write a layer rule.",
            name,
        )
    if extension.needs_every_parameter and extension.fail_mode != "autodiff":
        raise errors.UnsupportedError(
            f"No layer rule covers the parameters of {view.path}, and fail_mode is "
            f"{extension.fail_mode!r}: {type(extension).__name__} means nothing without them. Use "
            "fail_mode='autodiff', freeze them, or write a layer rule."
        )
    mine = type(extension)
    text = f"{view.path} has no layer rule: {mine.__name__} leaves it out (a {full_name})."
    if _leaves_out(extension, (kind, mine), text):
        return False
    errors.warn_once(
        (kind,),
        f"{view.path} has no layer rule: the parameters of {full_name} are looked at where "
        "operations use them, which is exact, but a rule may be faster. Install a plugin that "
        f"knows {name} (backpack-plugin-layers covers torch.nn), or write a layer rule.{blocked()}",
        errors.AutodiffFallbackWarning,
    )
    return True


def tolerates(extension: Extension, view: View, name: str, error: errors.UnsupportedError) -> bool:
    """Whether an extension goes on where it has no value, as its ``fail_mode`` says."""
    if extension.needs_every_parameter:
        return False
    key = (type(view.call.module), type(extension), name)
    return _leaves_out(extension, key, f"{view.path}: {error}")


def _leaves_out(extension: Extension, key: tuple[object, ...], text: str) -> bool:
    if extension.fail_mode == "warning":
        errors.warn_once(key, text, errors.BackpackWarning)
    return extension.fail_mode in ("warning", "silent")
