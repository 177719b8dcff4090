"""Results of a backward pass by name of the parameter, for code that is type-checked.

Type checkers do not know attributes such as ``parameter.grad_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module, Parameter

from backpack_core.errors import UsageError, nearest


class Fields:
    """The quantities of one parameter, as attributes: ``.grad_batch``, ``.kfac``.

    Attributes:
        parameter: The parameter.
    """

    __slots__ = ("_name", "parameter")

    def __init__(self, name: str, parameter: Parameter) -> None:
        self._name = name
        self.parameter = parameter

    def __getattr__(self, field: str) -> Any:
        names = self.__dir__()
        if field in names:
            return self.parameter.__dict__[field]
        near = nearest(field, names) or "."
        raise AttributeError(
            f"The parameter {self._name!r} has no quantity {field!r}{near} It has: "
            f"{', '.join(names) or 'none'}. Quantities are there after a backward pass inside "
            "backpack(...)."
        )

    def __dir__(self) -> list[str]:
        return sorted(name for name in self.parameter.__dict__ if not name.startswith("_"))

    def __repr__(self) -> str:
        """The parameter and its quantities."""
        return f"<quantities of {self._name!r}: {', '.join(self.__dir__()) or 'none'}>"


class Quantities(dict[str, Fields]):
    """The quantities of all trained parameters, by name."""

    def __missing__(self, name: str) -> Fields:
        near = nearest(str(name), self) or "."
        raise KeyError(f"No trained parameter is named {name!r}{near}")


def quantities(model: Module) -> Mapping[str, Fields]:
    """The results that backward passes stored on the parameters of a model, by name.

    ``quantities(model)["0.weight"].grad_batch`` is ``model[0].weight.grad_batch``, which type
    checkers reject.

    Args:
        model: The model.

    Returns:
        A mapping from names, as in ``named_parameters``, to objects with the quantities as
        attributes.

    Raises:
        UsageError: ``model`` is not a module.
    """
    given: object = model
    if not isinstance(given, Module):
        raise UsageError(f"quantities(model) takes a torch.nn.Module. Got {given!r:.80}.")
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return Quantities((name, Fields(name, parameter)) for name, parameter in trained)
