"""What all calls of a module have in common, remembered until the module changes.

Finding it takes longer than a small layer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

from torch.nn import Module

from backpack_core.plugins.registry import registry
from backpack_core.record.models import runs_on
from backpack_core.record.state import (
    MODULE_ATTRIBUTES,
    OUR_ATTRIBUTES,
    TRAITS_ATTRIBUTE,
    Settings,
    Traits,
    parts_of,
)

_settings: WeakValueDictionary[Any, Settings] = WeakValueDictionary()


def traits_of(module: Module) -> KnownTraits:
    """The rule and settings of a module; found anew if the module has changed."""
    if not runs_on(get_ident()):
        registry.look(module)  # else the model looked at all classes when it began
    attributes = module.__dict__
    traits: KnownTraits | None = attributes.get(TRAITS_ATTRIBUTE)
    if traits is None or traits.generation != registry.generation or not traits.hold(module):
        attributes[TRAITS_ATTRIBUTE] = None  # set first, since the attributes are counted
        generation = registry.generation  # read first, since another thread may change the registry
        traits = KnownTraits(module, registry.resolve(module), generation)
        attributes[TRAITS_ATTRIBUTE] = traits
    return traits


def _shared(settings: Settings) -> Settings:
    """The one object that stands for all equal settings."""
    names, values = settings
    return _settings.setdefault((names, _as_key(values)), settings)


def _as_key(value: Any) -> Any:
    """A hashable form of a value, which includes its type: ``1`` and ``True`` differ."""
    has_parts = isinstance(value, (tuple, list, slice))
    return type(value), tuple(map(_as_key, parts_of(value))) if has_parts else value


class KnownTraits(Traits):
    """The traits of a module, which are checked at each call by :meth:`hold`.

    Attributes:
        settings: Names and values of its plain attributes; equal settings are one object.
        generation: The generation of the registry that resolved the rule.
        noted: What a plan notes about its last calls; see ``noted.py``.
    """

    def __init__(self, module: Module, resolved: Any, generation: int) -> None:
        super().__init__(module, resolved)
        attributes = module.__dict__
        self.generation = generation
        self.noted: list[tuple[Any, Callable[..., bool], Any]] = []
        self.settings = _shared(self.settings)
        names, values = self.settings
        others = attributes.keys() - MODULE_ATTRIBUTES - {*names, *OUR_ATTRIBUTES}
        # The name that is given twice makes both getters return tuples, even for no other name.
        self._plain = itemgetter(*names, *["_forward_hooks"] * 2)
        self._others = itemgetter(*others, *["_forward_hooks"] * 2)
        self._types = self._types_of(attributes) if others else None
        # Comparing types and values does not show what is in a tuple, or that a list was changed in
        # place. In these cases, the count of attributes is one that never holds.
        is_open = any(isinstance(attributes[n], tuple) for n in others) or list in map(type, values)
        self._kind, self._count = type(module), -1 if is_open else len(attributes)
        self._values = self._plain(attributes)

    def hold(self, module: Module) -> bool:
        """Whether they still describe the module."""
        attributes = module.__dict__
        try:
            return (
                len(attributes) == self._count
                and type(module) is self._kind
                and bool(self._plain(attributes) == self._values)
                and (self._types is None or self._types == self._types_of(attributes))
            )
        except Exception:  # an attribute is gone, or cannot be compared with a number
            return False

    def _types_of(self, attributes: dict[str, Any]) -> tuple[type, ...]:
        return tuple(map(type, self._others(attributes)))

    def __deepcopy__(self, memo: Any) -> None:
        """A copied module computes its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        """So does an unpickled one."""
        return type(None), ()
