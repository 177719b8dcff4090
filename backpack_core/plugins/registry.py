"""What plugins contributed, and who speaks for a module. Imports no plugin.

Keys are module types (classes or qualified names), and names of extensions and propagators. Two
claims on one key are a conflict, reported when the key is used; :func:`prefer` chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.contract.autodiff import AutodiffRule
from backpack_core.contract.extension import Extension
from backpack_core.contract.module_extension import ModuleExtension
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule, ModuleType
from backpack_core.errors import PluginConflictError, PluginError, nearest
from backpack_core.plugins.declarations import described, faults, missing_params
from backpack_core.plugins.discovery import Provenance, canonical, preferred_by_environment
from backpack_core.plugins.sameness import is_same_map, methods_behind

T = TypeVar("T")


CORE = Provenance("core", "backpack-core", "")


@dataclass(frozen=True)
class Claim(Generic[T]):
    """One contribution for a key."""

    value: T
    provenance: Provenance


class Resolved(NamedTuple):
    """The rule that speaks for a module type.

    Attributes:
        rule: The rule.
        provenance: Who provided it.
        is_fallback: It is the automatic one.
        params: Parameters that it covers; of modules inside, as ``"out_proj.weight"``.
        methods: What the rule stands for: a module that has one of these as an attribute of its own
            computes something else.
    """

    rule: LayerRule
    provenance: Provenance
    is_fallback: bool = False
    params: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()


class Contribution(NamedTuple):
    """Something that a plugin handed over, checked: in which table, and under which key."""

    table: Literal["rules", "extensions", "propagators", "overrides"]
    key: Any
    value: Any


FALLBACK = Resolved(AutodiffRule(), CORE, is_fallback=True)


@dataclass(eq=False, repr=False)
class Registry:
    """All claims, and a cache of the answers."""

    rules: dict[ModuleType, list[Claim[LayerRule]]] = field(default_factory=dict)
    extensions: dict[str, list[Claim[type[Extension]]]] = field(default_factory=dict)
    propagators: dict[str, list[Claim[type[Propagator]]]] = field(default_factory=dict)
    overrides: dict[tuple[type[Extension], ModuleType], list[Claim[ModuleExtension]]] = field(
        default_factory=dict
    )
    preferred: dict[str, str] = field(default_factory=dict)
    generation: int = 0  # of the answers
    _rule_cache: dict[type[Module], Resolved] = field(default_factory=dict)

    def add(self, contributions: Iterable[Contribution], provenance: Provenance) -> None:
        """Enter everything a plugin provides. Cannot fail half-way: nothing here raises."""
        for table, key, value in contributions:
            claims = getattr(self, table).setdefault(key, [])
            if _kind(value) not in [_kind(claim.value) for claim in claims]:
                # The same class under two entry points is one claim.
                claims.append(Claim(value, provenance))
        self._forget()

    def remove(self, provenance: Provenance) -> None:
        """Take back everything that came from one plugin."""
        for table in self._tables:
            for key in list(table):
                table[key] = [c for c in table[key] if c.provenance != provenance]
                if not table[key]:
                    del table[key]
        self._forget()

    def clear(self) -> None:
        """Take back everything that came from plugins; preferences stay."""
        for table in self._tables:
            table.clear()
        self._forget()

    def _forget(self) -> None:
        self._rule_cache.clear()
        self.generation += 1

    @property
    def _tables(self) -> tuple[dict[Any, list[Any]], ...]:
        return self.rules, self.extensions, self.propagators, self.overrides

    def resolve(self, module: Module) -> Resolved:
        """The rule for a module: that of its type, of a parent type, or the automatic one.

        A parent's rule counts only if the module computes what the parent does: its ``forward``,
        and everything that looks up, are the parent's own.

        Args:
            module: The module.

        Raises:
            PluginConflictError: Several distributions claim the type.
            PluginError: The rule speaks of parameters that the module does not have.
        """
        kind = class_of(module)
        found = self._rule_cache.get(kind)
        if found is None:
            found = self.resolve_type(kind)
            fault = missing_params(found.rule, module)
            if fault:
                who = f"{described(type(found.rule))} of {found.provenance}"
                raise PluginError(f"{who}: {fault}.")
            self._rule_cache[kind] = found
        if found.methods.isdisjoint(module.__dict__):
            return found
        return FALLBACK

    def resolve_type(self, kind: type[Module]) -> Resolved:
        """The same for a class."""
        for parent in kind.__mro__:
            claims = self._claims_for(parent)
            if claims and is_same_map(kind, parent):
                claim = self.choose(claims, _qualified_name(parent), "layer rule")
                names = getattr(claim.value, "params", ())
                methods = methods_behind(parent)
                return Resolved(claim.value, claim.provenance, False, tuple(names), methods)
        return FALLBACK

    def _claims_for(self, kind: type) -> list[Claim[LayerRule]]:
        claims = list(self.rules.get(kind, ()))
        for key, named in self.rules.items():
            if isinstance(key, str) and _find_class(key) is kind:
                claims += named
        return claims

    def override(self, extension: Extension, module: Module) -> ModuleExtension | None:
        """A module extension for this pair: set on the instance, else contributed by a plugin."""
        own = extension.module_extensions.get(type(module))
        if own is not None:
            return own
        for (extension_type, key), claims in self.overrides.items():
            matches = key is type(module) or (
                isinstance(key, str) and _find_class(key) is type(module)
            )
            if matches and isinstance(extension, extension_type):
                name = f"{extension_type.__name__}/{_qualified_name(type(module))}"
                return self.choose(claims, name, "pair override").value
        return None

    def saves_under(self, kind: type[Extension]) -> Claim[type[Extension]] | None:
        """Another extension that saves under the name of this one, and is no relative of it."""
        for claim in (c for claims in self.extensions.values() for c in claims):
            is_relative = issubclass(kind, claim.value) or issubclass(claim.value, kind)
            if claim.value.savefield == kind.savefield and kind.savefield and not is_relative:
                return claim
        return None

    def has_overrides(self, extension_type: type[Extension]) -> bool:
        """Whether any plugin contributed a pair override for this extension."""
        return any(issubclass(extension_type, key[0]) for key in self.overrides)

    def describe(self, extension: Extension) -> str:
        """An extension's name, and who provided it, for messages."""
        name = type(extension).__name__
        for claim in self.extensions.get(name, ()):
            if claim.value is type(extension):
                return f"{name} of {claim.provenance}"
        return name

    def choose(self, claims: list[Claim[T]], key: str, what: str) -> Claim[T]:
        """The one claim on a key, or the preferred one.

        Raises:
            PluginConflictError: There are several, and none is preferred.
        """
        if len(claims) == 1:
            return claims[0]
        wanted = canonical(self.preference(key))
        chosen = [
            c
            for c in claims
            if wanted in (canonical(c.provenance.distribution), canonical(c.provenance.plugin))
        ]
        if wanted and len(chosen) == 1:
            return chosen[0]
        claims = sorted(claims, key=lambda c: str(c.provenance))  # whatever order they came in
        who = " and ".join(str(c.provenance) for c in claims)
        name = claims[0].provenance.distribution or claims[0].provenance.plugin
        raise PluginConflictError(
            f"Several plugins provide the {what} for {key!r}: {who}. Uninstall all but one, call "
            f"backpack_core.prefer({name!r}, {key!r}), or set BACKPACK_PREFER={key}={name}."
        )

    def preference(self, key: str) -> str:
        """The preferred distribution for a key, or an empty string."""
        if key in self.preferred:
            return self.preferred[key]
        pairs = preferred_by_environment().items()
        from_environment = {_spelled_out(name): distribution for name, distribution in pairs}
        return from_environment.get(key) or self.preferred.get("*") or from_environment.get("*", "")

    def prefer(self, distribution: str, *keys: str | type) -> None:
        """See :func:`backpack_core.prefer`."""
        for key in keys or ("*",):
            self.preferred[_spelled_out(key)] = distribution
        self._forget()


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def check_contributions(found: dict[str, list[Any]]) -> list[Contribution]:
    """Check what a plugin's hooks returned.

    Args:
        found: Returned objects by hook name.

    Raises:
        PluginError: An object is not of the kind its hook promises.
    """
    rules = _each(found, "backpack_layer_rules", partial(_is_whole, base=LayerRule))
    extensions = _each(found, "backpack_extensions", partial(_is_whole, base=Extension))
    propagators = _each(found, "backpack_propagators", partial(_is_whole, base=Propagator))
    overrides = _each(found, "backpack_pair_overrides", _is_override)
    return [
        *of_rules(rules),
        *(Contribution("extensions", kind.__name__, kind) for kind in extensions),
        *(Contribution("propagators", kind.__name__, kind) for kind in propagators),
        *(Contribution("overrides", (kind, module), value) for kind, module, value in overrides),
    ]


def of_rules(kinds: Iterable[type[LayerRule]]) -> Iterator[Contribution]:
    """One instance of each, for all the types of modules that it names."""
    for rule in (kind() for kind in kinds):
        yield from (Contribution("rules", key, rule) for key in rule.module_types)


def _each(found: dict[str, list[Any]], hook: str, accepts: Callable[[Any], bool]) -> list[Any]:
    objects = found.get(hook, [])
    for item in objects:
        if not accepts(item):
            raise PluginError(f"{hook} returned {item!r}, which is not what the hook asks for.")
    return objects


def _is_subclass(item: Any, base: type) -> bool:
    return isinstance(item, type) and issubclass(item, base)


def _is_whole(item: Any, base: type) -> bool:
    """Whether it is a class of a kind; raises if it is one that cannot be used."""
    if not _is_subclass(item, base):
        return False
    missing = getattr(item, "__abstractmethods__", ())
    if missing:
        near = nearest(min(missing), vars(item)) or "."
        raise PluginError(f"{item.__name__} does not implement {', '.join(sorted(missing))}{near}")
    found = faults(item)
    if found:
        raise PluginError(f"{described(item)}: {'; '.join(found)}.")
    return True


def _is_override(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 3
        and _is_subclass(item[0], Extension)
        and (isinstance(item[1], str) or _is_subclass(item[1], Module))
        and isinstance(item[2], ModuleExtension)
    )


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _spelled_out(key: str | type) -> str:
    """The one name of a module class: ``torch.nn.Linear`` is an alias."""
    kind = key if isinstance(key, type) else _find_class(key)
    return _qualified_name(kind) if isinstance(kind, type) else str(key)


def _find_class(name: str) -> Any:
    """The class behind a qualified name, if its package is imported already; never imports."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


registry = Registry()
