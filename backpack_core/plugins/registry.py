"""What plugins have contributed, and which rule speaks for a module.

Keys are module types (classes or qualified names), and names of extensions and propagators. Two
claims on one key are a conflict, which is reported when the key is used; :func:`prefer` chooses.
Imports no plugin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.contract.bases import vet
from backpack_core.contract.carrier import CarrierOf
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule, ModuleType, NoRule, is_module_type
from backpack_core.discovery import Claim, Provenance, choose, imported_class, qualified_name
from backpack_core.errors import PluginError
from backpack_core.plugins.sameness import methods_behind, same_maps

CORE = Provenance("core", "backpack-core", "")


class Resolved(NamedTuple):
    """The rule that speaks for a module type.

    Attributes:
        rule: The rule.
        provenance: Who provided it.
        is_fallback: There is none, and it stands in its place.
        params: Parameters that it covers; of modules inside, as ``"out_proj.weight"``.
        methods: What the rule stands for: a module that has one of these as an attribute of its own
            computes something else.
    """

    rule: LayerRule
    provenance: Provenance
    is_fallback: bool = False
    params: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()


# A checked contribution: its table, and its key there.
Contribution = tuple[str, Any, Any]
FALLBACK = Resolved(NoRule(), CORE, is_fallback=True)


@dataclass(eq=False, repr=False)
class Registry:
    """All claims, with a cache of what they resolve to."""

    rules: dict[ModuleType, list[Claim[LayerRule]]] = field(default_factory=dict)
    extensions: dict[str, list[Claim[type[Extension]]]] = field(default_factory=dict)
    propagators: dict[str, list[Claim[type[Propagator]]]] = field(default_factory=dict)
    overrides: dict[tuple[type[Extension], ModuleType], list[Claim[CarrierOf]]] = field(
        default_factory=dict
    )
    generation: int = 0  # grows with every change, which makes earlier answers invalid
    _rule_cache: dict[type[Module], Resolved] = field(default_factory=dict)

    def add(self, contributions: Iterable[Contribution], provenance: Provenance) -> None:
        """Add everything a plugin provides; cannot fail half-way, since nothing here raises."""
        for table, key, value in contributions:
            claims = getattr(self, table).setdefault(key, [])
            # The same class under two entry points is one claim.
            if _identity(value) not in [_identity(claim.value) for claim in claims]:
                claims.append(Claim(value, provenance))
        self.forget()

    def remove(self, provenance: Provenance) -> None:
        """Take back everything that came from one plugin."""
        for table in self.tables:
            for key in list(table):
                table[key] = [c for c in table[key] if c.provenance != provenance]
                if not table[key]:
                    del table[key]
        self.forget()

    def forget(self) -> None:
        """Take a new cache: every module is looked up anew.

        What another thread is looking up meanwhile goes into the old one.
        """
        self._rule_cache = {}
        self.generation += 1

    @property
    def tables(self) -> tuple[dict[Any, list[Any]], ...]:
        """All tables of claims."""
        return self.rules, self.extensions, self.propagators, self.overrides

    def resolve(self, module: Module) -> Resolved:
        """The rule for a module: that of its type, or of a parent type; else what stands for none.

        A parent's rule counts only if the module computes what the parent does: its ``forward``,
        and everything that ``forward`` looks up, are the parent's own.

        Args:
            module: The module.

        Raises:
            PluginConflictError: Several distributions claim the type.
            PluginError: A judge finds a fault of its rule.
        """
        kind, cache = class_of(module), self._rule_cache
        resolved = cache.get(kind)
        if resolved is None:
            resolved = self.resolve_type(kind)
            if not resolved.is_fallback:
                vet(type(resolved.rule), module, who=resolved.provenance)
            cache[kind] = resolved
        if resolved.methods.isdisjoint(module.__dict__):
            return resolved
        return FALLBACK

    def resolve_type(self, kind: type[Module]) -> Resolved:
        """The rule for a module class, as for a module."""
        for parent in same_maps(kind):
            claims = self._claims_for(parent)
            if claims:
                claim = choose(claims, qualified_name(parent), "layer rule")
                names = getattr(claim.value, "params", ())
                methods = methods_behind(parent)
                return Resolved(claim.value, claim.provenance, False, tuple(names), methods)
        return FALLBACK

    def _claims_for(self, kind: type) -> list[Claim[LayerRule]]:
        rules = [*self.rules.items()]  # which another thread may add to
        named = [c for key, claims in rules if _names(key, kind) for c in claims]
        # A rule that names a class twice, as a class and by its name, makes one claim.
        return [*{_identity(claim.value): claim for claim in named}.values()]

    def override(self, extension: Extension, module: Module) -> CarrierOf | None:
        """The function that makes a carrier for a pair: the instance's own, else a plugin's.

        A plugin's speaks for the modules that a rule for the same type would speak for; that of an
        instance for no subclass.
        """
        own = module.__dict__.keys()
        kinds = [k for k in same_maps(class_of(module)) if methods_behind(k).isdisjoint(own)]
        for kind in kinds[:1]:
            if kind in extension.carriers:
                return extension.carriers[kind]
        for kind in kinds:
            for (extension_type, key), claims in [*self.overrides.items()]:
                if isinstance(extension, extension_type) and _names(key, kind):
                    name = f"{extension_type.__name__}/{qualified_name(kind)}"
                    return choose(claims, name, "pair override").value
        return None

    def refuse_rivals(self, kind: type[Propagator]) -> None:
        """Raise if several plugins provide a propagator of this name, and none is preferred."""
        if claims := self.propagators.get(kind.__name__):
            choose(claims, kind.__name__, "propagator")

    def has_overrides(self, extension_type: type[Extension]) -> bool:
        """Whether any plugin contributed a carrier for this extension."""
        return any(issubclass(extension_type, key[0]) for key in self.overrides)

    def describe(self, extension: Extension) -> str:
        """An extension's name, and who provided it, for messages."""
        name = type(extension).__name__
        for claim in self.extensions.get(name, ()):
            if claim.value is type(extension):
                return f"{name} of {claim.provenance}"
        return name


def _names(key: ModuleType, kind: type) -> bool:
    return kind is (imported_class(key) if isinstance(key, str) else key)


def _identity(value: Any) -> Any:
    return type(value) if isinstance(value, LayerRule) else value


_KINDS: dict[str, tuple[str, type]] = {
    "backpack_layer_rules": ("rules", LayerRule),
    "backpack_extensions": ("extensions", Extension),
    "backpack_propagators": ("propagators", Propagator),
}


def hook_of(obj: object) -> str | None:
    """The hook that would return a class; ``None`` if it is of another kind."""
    hooks = (hook for hook, (_, base) in _KINDS.items() if _is_class_of(base, obj))
    return next(hooks, None)


def _is_class_of(base: type, obj: object) -> bool:
    return isinstance(obj, type) and issubclass(obj, base)


def contributions(hook: str, item: Any) -> list[Contribution]:
    """The registry's entries for one object that a hook returned.

    Raises:
        PluginError: It is not of the kind that the hook promises.
    """
    if hook == "backpack_pair_overrides" and isinstance(item, tuple) and len(item) == 3:
        kind, module, carrier = item
        if _is_class_of(Extension, kind) and is_module_type(module) and callable(carrier):
            return [("overrides", (kind, module), carrier)]
    if hook_of(item) == hook:
        vet(item)
        is_rule = issubclass(item, LayerRule)
        return of_rules([item]) if is_rule else [(_KINDS[hook][0], item.__name__, item)]
    raise PluginError(f"{hook} returned {item!r}, which is not what the hook asks for.")


def of_rules(kinds: Iterable[type[LayerRule]]) -> list[Contribution]:
    """One instance of each rule, under every module type that it names."""
    return [("rules", key, rule) for rule in (k() for k in kinds) for key in rule.module_types]


registry = Registry()
