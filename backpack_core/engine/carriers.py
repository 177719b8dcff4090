"""The carrier that a layer rule makes, and what to do at parameters that no rule covers.

Every call has this carrier, unless an extension brings another one for the module's type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.contract.autodiff import AutodiffRule
from backpack_core.contract.carrier import Carrier, Found
from backpack_core.contract.computed import at_leaf
from backpack_core.contract.extension import Extension
from backpack_core.contract.parametric import ParametricRule
from backpack_core.contract.product import Reading, SampleProduct
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.regrouping import regrouped
from backpack_core.engine.groups import Group
from backpack_core.graph.parameters import Trained
from backpack_core.graph.survey import Survey
from backpack_core.plugins.loading import blocked, missing
from backpack_core.record.untouched import ask
from backpack_core.record.view import View

_AUTODIFF = AutodiffRule()


class RuleCarrier(Carrier):
    """A layer rule, which any extension can read from; the same for all calls of a group."""

    def __init__(self, group: Group, survey: Survey) -> None:
        self._propagator = self.speaker = group.propagator
        self._needs = group.needs
        self._survey = survey
        self._product = _asked(group.propagator, "product")
        self._propagate = _asked(group.propagator, "propagate")

    def starts(self, view: View) -> bool:
        """It does not: the propagator has a quantity at a loss."""
        return False

    def arrive(self, view: View, waiting: Any) -> Any:
        """By the propagator."""
        return self._propagator.arrive(view.call.rule, view, waiting)

    def find(self, view: View, trained: Iterable[Trained], quantity: Any) -> list[Found]:
        """By the propagator; of parameters that no rule covers, by automatic differentiation."""
        found: list[Found] = []
        used: dict[str, Reading] = {}
        beside: dict[Any, Any] = {}
        for name, parameter, tensor, is_covered in trained:
            reading = used.get(name)
            if reading is None:
                rule: ParametricRule = view.call.rule if is_covered else _AUTODIFF
                reading = self._product(rule, view, name, quantity)
                if view.positions > 1 and isinstance(reading, SampleProduct):
                    roots, samples = reading.roots, self._survey.batch_size
                    reading = regrouped(reading, reading.columns, samples, view.kept)
                    reading.roots = roots
                used[name] = reading
                reading.name, reading.module, reading.rule = name, view.call.module, type(rule)
                reading.is_linear = is_covered and name in rule.linear_in_params
            if parameter is not tensor:
                reading = at_leaf(reading, tensor, parameter)
            reading.kept, reading.beside, reading.needs = view.kept, beside, self._needs
            found.append(Found(name, parameter, reading, is_covered, view))
        return found

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """By the propagator; a loss hands its quantity to its first input as it is."""
        rule = view.call.rule
        if rule.is_loss:
            return {0: quantity}
        found: dict[int, Any] = self._propagate(rule, view, quantity)
        return found


def _asked(propagator: Propagator, method: str) -> Callable[..., Any]:
    """A method of a rule, a view, and more; what the core does itself needs nobody to watch it."""
    own: Callable[..., Any] = getattr(propagator, method)
    if getattr(own, "__globals__", {}).get("__name__", "").startswith("backpack_core."):
        return own  # where it was written, which a wrapper does not take over
    return lambda rule, view, *given: ask(view, propagator, method, rule, view, *given)


def allows_fallback(extension: Extension, view: View) -> bool:
    """Whether an extension takes a parameter that no rule covers, as its ``fail_mode`` says.

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
        f"{view.path} has no layer rule: the parameters of {full_name} are differentiated "
        "automatically, which is exact but slower. Install a plugin that knows "
        f"{name} (backpack-plugin-layers covers torch.nn), or write a layer rule.{blocked()}",
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
