"""The oracle of each extension, by its save field.

The package of an extension provides it: its module ``oracles``, which the kit imports, calls
:func:`register_quantity`. Authors may also pass it to an ``ExtensionCase``. An extension without an
oracle fails the check ``quantity``; beside others, its values must only be finite.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.errors import UsageError
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.preferences import choose
from backpack_core.testing.oracle import Reference, draw

Needs = Literal[
    "gradient", "curvature", "sampling", "double backward", "second derivative", "structure"
]
ALL_NEEDS: tuple[str, ...] = get_args(Needs)
# Those without an oracle if autograd cannot differentiate twice.
TWICE = frozenset({"double backward", "second derivative"})


@dataclass(frozen=True)
class Quantity:
    """What an extension computes.

    Attributes:
        expected: The oracle: a function of reference and parameter name that returns a tensor.
        observed: A function of stored value, reference and name that returns the tensor to
            compare; default: the value.
        needs: What a net must have for the extension to have a value there. Every layer has a
            gradient and curvature; extensions with other needs may raise on layers that lack them.
            "sampling" is curvature from random columns, exact only for the kit's own loss. "double
            backward" is that of autograd, "second derivative" that of the rules.
        cancels: Whether half precision is not checked, because the value is a small difference of
            large numbers, or needs eigenvalues, which torch lacks in half precision.
        arguments: Arguments for the extension's constructor, if some have no default.
    """

    expected: Callable[[Reference, str], Tensor]
    observed: Callable[[Any, Reference, str], Tensor] | None = None
    needs: Needs = "gradient"
    cancels: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse wrong arguments.

        Raises:
            UsageError: The oracle is not a function, or ``needs`` is unknown. With unknown needs,
                an extension could raise on every net and pass.
        """
        if not callable(self.expected):
            raise UsageError(
                "A quantity takes a function of reference and name that returns a tensor. Got "
                f"{self.expected!r:.80}."
            )
        if self.needs not in ALL_NEEDS:
            raise UsageError(f"needs must be one of {ALL_NEEDS}. Got {self.needs!r}.")

    def observe(self, value: Any, reference: Reference, name: str) -> Tensor:
        """The tensor to compare with the oracle."""
        tensor = value if self.observed is None else self.observed(value, reference, name)
        if not isinstance(tensor, Tensor):
            raise UsageError(f"The value for {name!r} is not a tensor but {type(tensor).__name__}.")
        return tensor


def directions(name: str, shape: torch.Size) -> Tensor:
    """Two fixed directions ``[2, *θ]``, the same for every parameter of a shape."""
    return draw((2, *shape), 11)


def fixed_vectors(reference: Reference, name: str) -> Tensor:
    """Two fixed vectors ``[2, *θ]``."""
    return directions(name, reference.parameters[name].shape)


_quantities: dict[str, Quantity] = {}


def quantity_of(extension: Extension | type[Extension]) -> Quantity | None:
    """The quantity of an extension, by its save field; ``None`` if there is no oracle."""
    kind = extension if isinstance(extension, type) else type(extension)
    bases = (base for base in kind.__mro__ if issubclass(base, Extension))
    for package in {base.__module__.partition(".")[0] for base in bases}:
        _load_oracles(package)
    return _quantities.get(extension.savefield)


@cache
def _load_oracles(package: str) -> None:
    """Import the module ``oracles`` of a package, which registers its quantities."""
    is_package = hasattr(sys.modules.get(package), "__path__")
    if is_package and find_spec(f"{package}.oracles"):
        import_module(f"{package}.oracles")


def register_quantity(savefield: str, quantity: Quantity) -> None:
    """Register the oracle of an extension, for all checks in this process.

    Args:
        savefield: The extension's save field.
        quantity: Its quantity.

    Raises:
        UsageError: There is one for that save field already.
    """
    if savefield in _quantities:
        raise UsageError(f"The kit has an oracle for {savefield!r} already.")
    _quantities[savefield] = quantity


def installed_factories() -> list[Callable[..., Extension]]:
    """Factories of all installed extensions that the kit can build.

    An extension whose constructor has arguments without defaults needs a quantity that gives them.
    """
    ensure_loaded()
    factories: list[Callable[..., Extension]] = []
    for name, claims in sorted(registry.extensions.items()):
        kind = choose(claims, name, "extension").value
        quantity = quantity_of(kind)
        factory = partial(kind, **quantity.arguments) if quantity and quantity.arguments else kind
        if not needs_arguments(factory):
            factories.append(factory)
    return factories


def needs_arguments(factory: Callable[..., Any]) -> bool:
    """Whether a factory has arguments without defaults."""
    parameters = inspect.signature(factory).parameters.values()
    return any(p.default is p.empty and not p.kind.name.startswith("VAR_") for p in parameters)


def installed_extensions(**given: Any) -> list[Extension]:
    """An instance of every installed extension whose constructor takes the given arguments."""
    return [
        factory(**given)
        for factory in installed_factories()
        if given.keys() <= inspect.signature(factory).parameters.keys()
    ]
