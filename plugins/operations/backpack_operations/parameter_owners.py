"""Finds the module of an extended model that owns a parameter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

from backpack_core.record.models import MODELS, OWNER_ATTRIBUTE, owners_of
from backpack_products.substitutes import PARAMETERS, SUBSTITUTES


def name_of_parameter(modules: Iterable[Module], parameter: Tensor) -> str | None:
    """The name of a parameter in the extended models to which some modules belong."""
    for model in owners_of(modules):
        for name, own in model.named_parameters():
            if own is parameter:
                return name
    return None


def owned_by_models() -> dict[int, tuple[Module, str]]:
    """The owning module and the name there of each parameter of all extended models, by ``id``.

    If no module of a model is called (``F.linear(x, model.weight)``), only this table connects its
    parameters with it. One that a model had when it ran, and has lost since, is that model's.
    """
    living = (reference() for reference in MODELS.valuerefs())
    models = [m for m in living if m is not None and OWNER_ATTRIBUTE in m.__dict__]
    modules = (module for model in models for module in model.modules())
    noted = {**PARAMETERS, **SUBSTITUTES}  # a copy at once: garbage collection removes entries
    handed = [(key, part(), name) for key, (_, part, name) in noted.items()]
    return {key: (part, name) for key, part, name in handed if part is not None} | {
        id(own): (module, name)
        for module in modules
        for name, own in module._parameters.items()
        if own is not None
    }
