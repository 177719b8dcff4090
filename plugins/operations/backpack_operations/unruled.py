"""Asks extensions, by their ``fail_mode``, whether they want parameters that no rule covers."""

from __future__ import annotations

from collections.abc import Sequence

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.contract.extension import Extension
from backpack_core.engine.active import Context
from backpack_core.engine.location import place
from backpack_core.plugins.loading import missing
from backpack_core.record.view import View
from backpack_operations.sink import leaves_out
from backpack_operations.survey import GraphSurvey
from backpack_products.overrides import override


def ask_without_rule(survey: GraphSurvey, context: Context) -> None:
    """Leave out the parameters without a rule that no extension wants.

    Raises:
        MissingPluginError: An extension refuses such parameters.
    """
    for call in survey.freed:
        uncovered = [o for o in survey.uncovered(call) if survey.uses[id(o.parameter)].unruled]
        if not uncovered:
            continue
        module, names = call.module, [own.name for own in uncovered]
        is_wanted = bool(context.whole)
        for group in context.groups:
            for extension in group.extensions:
                if group.has_overrides and override(extension, module):
                    continue
                try:
                    is_wanted |= _takes(extension, View(call), names)
                except Exception as error:
                    place(error, View(call), extension)
                    raise
        if not is_wanted:
            survey.leave_out(call)


def _takes(extension: Extension, view: View, names: Sequence[str]) -> bool:
    """Whether an extension wants the parameters of a module that has no rule, or only for some.

    Args:
        extension: The extension.
        view: A call of the module.
        names: The trained parameters that no rule covers.

    Raises:
        MissingPluginError: Its ``fail_mode`` is ``"error"``.
        UnsupportedError: It needs every parameter, and its ``fail_mode`` would leave some out.
    """
    kind = class_of(view.call.module)
    name, full_name = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
    lacks, rule = "has no layer rule", type(view.call.rule).__name__
    advice = f" Install a plugin that knows {name}, or write a layer rule."
    if not view.call.rule.transparent:
        lacks = f"has the layer rule {rule}, whose params leave out {', '.join(map(repr, names))}"
        advice = f" Add it to the params of {rule}, with its product."
    if extension.fail_mode == "error":
        raise missing(
            f"No layer rule covers the parameters of {view.path}, and fail_mode is 'error'.",
            kind,
            advice,
        )
    if extension.needs_every_parameter and extension.fail_mode != "autodiff":
        raise errors.UnsupportedError(
            f"No layer rule covers the parameters of {view.path}, and fail_mode is "
            f"{extension.fail_mode!r}: {type(extension).__name__} needs all parameters. Use "
            "fail_mode='autodiff', freeze them, or write a layer rule."
        )
    text = f"{view.path} {lacks}: {type(extension).__name__} leaves it out (a {full_name})."
    if leaves_out(extension, (kind, type(extension)), text):
        return False
    if (kind,) in errors.warned:
        return True  # plugins declare what they provide in files, which takes long to read
    text = (
        f"{view.path} {lacks}: the parameters of {full_name} are read where operations use them, "
        "which is exact, but a rule may be faster."
    )
    told = str(missing(text, kind, advice))
    errors.warn_once((kind,), told, errors.AutodiffFallbackWarning)
    return True
