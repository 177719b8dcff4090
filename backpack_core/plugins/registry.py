"""The contributions of all plugins, and which layer rule a module gets.

Keys are module types (classes or qualified names), and names of extensions and propagators. Two
claims on one key are a conflict. It is reported when the key is used, unless :func:`prefer`
chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.contract.bases import vet
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule, ModuleType, NoRule, is_module_type
from backpack_core.errors import PluginError
from backpack_core.preferences import Claim, Provenance, choose, imported_class, qualified_name

CORE = Provenance("core", "backpack-core", "")


class Resolved(NamedTuple):
    """The layer rule of a module type.

    Attributes:
        rule: The rule.
        provenance: The plugin that provided it.
        is_fallback: Whether there is no rule, so that ``rule`` is a ``NoRule``.
        params: The parameters that it covers; those of submodules as ``"out_proj.weight"``.
        behind: What determines what the module computes, as :class:`Sameness` knows it. The rule is
            not used for a module that has another method as an attribute of its own, or if
            something was replaced since.
    """

    rule: LayerRule
    provenance: Provenance
    is_fallback: bool = False
    params: tuple[str, ...] = ()
    behind: Mapping[Any, Any] = MappingProxyType({})


# A checked contribution: the name of its table in the registry, its key there, and itself.
Contribution = tuple[str, Any, Any]
FALLBACK = Resolved(NoRule(), CORE, is_fallback=True)


class Sameness:
    """Whether modules compute the same, so that one can use the rule of the other.

    This class compares classes and their ``forward``. A library that reads code derives from it.
    """

    def lenders(self, kind: type[Module]) -> Iterable[type]:
        """The classes whose rules a class may use, the first that has one."""
        return (kind,)

    def behind(self, kind: type) -> Mapping[Any, Any]:
        """What determines what a module of a class computes."""
        return {"forward": getattr(kind, "forward", None)}

    def is_patched(self, kind: type, behind: Mapping[Any, Any]) -> bool:
        """Whether a class has something else."""
        return any(getattr(kind, name, None) is not own for name, own in behind.items())

    def watch(self, kind: type, behind: Mapping[Any, Any]) -> Callable[[], bool]:
        """A function that says whether a class has something else by then."""
        return lambda: self.is_patched(kind, behind)


@dataclass(eq=False, repr=False)
class Registry:
    """All claims, with a cache of the rules that they resolve to.

    Attributes:
        sameness: Says which modules compute the same.
        generation: Grows with every change; rules that were resolved before it are outdated.
    """

    sameness: Sameness = field(default_factory=Sameness)

    rules: dict[ModuleType, list[Claim[LayerRule]]] = field(default_factory=dict)
    extensions: dict[str, list[Claim[type[Extension]]]] = field(default_factory=dict)
    propagators: dict[str, list[Claim[type[Propagator]]]] = field(default_factory=dict)
    overrides: dict[Any, list[Claim[Any]]] = field(default_factory=dict)  # by extension and module
    generation: int = 0
    _rule_cache: dict[type[Module], Resolved] = field(default_factory=dict)
    _watched: dict[type[Module], Callable[[], bool]] = field(default_factory=dict)

    def add(self, contributions: Iterable[Contribution], provenance: Provenance) -> None:
        """Add everything that a plugin provides. Nothing here raises, so it is all or nothing."""
        for table, key, value in contributions:
            claims = getattr(self, table).setdefault(key, [])
            # The same class under two entry points is one claim.
            if _identity(value) not in [_identity(claim.value) for claim in claims]:
                claims.append(Claim(value, provenance))
        self.forget()

    def remove(self, provenance: Provenance) -> None:
        """Remove everything that a plugin provided."""
        for table in self.tables:
            for key in list(table):
                table[key] = [c for c in table[key] if c.provenance != provenance]
                if not table[key]:
                    del table[key]
        self.forget()

    def forget(self) -> None:
        """Start a new cache, so that the rule of every module is resolved again.

        A thread that is resolving a rule meanwhile writes to the old cache.
        """
        self._rule_cache, self._watched = {}, {}
        self.generation += 1

    def look(self, module: Module | None = None) -> None:
        """Resolve all rules again if a class of modules was changed since.

        Args:
            module: Look at its class only; default: at all classes that have a rule.
        """
        one = None if module is None else self._watched.get(class_of(module))
        watched = [*self._watched.values()] if module is None else [one] if one else []
        if any(is_changed() for is_changed in watched):
            self.forget()

    @property
    def tables(self) -> tuple[dict[Any, list[Any]], ...]:
        """All tables of claims."""
        return self.rules, self.extensions, self.propagators, self.overrides

    def resolve(self, module: Module) -> Resolved:
        """The rule for a module: that of its type or of a parent type; otherwise the fallback.

        The rule of a parent type is used only if the module computes what the parent does:
        ``forward``, and everything that it looks up, are the parent's own.

        Args:
            module: The module.

        Raises:
            PluginConflictError: Several distributions claim the type.
            PluginError: A judge finds a fault in its rule.
        """
        self.look(module)
        kind, cache = class_of(module), self._rule_cache
        resolved = cache.get(kind)
        if resolved is None:
            resolved = self.resolve_type(kind)
            if not resolved.is_fallback:
                vet(type(resolved.rule), module, who=resolved.provenance)
                self._watched[kind] = self.sameness.watch(kind, resolved.behind)
                if self.sameness.is_patched(kind, resolved.behind):
                    resolved = FALLBACK
            cache[kind] = resolved
        return FALLBACK if has_methods(module, resolved.behind) else resolved

    def resolve_type(self, kind: type[Module]) -> Resolved:
        """The rule for a module class; see :meth:`resolve`."""
        for parent in self.sameness.lenders(kind):
            if claims := self._claims_for(parent):
                claim = choose(claims, qualified_name(parent), "layer rule for")
                params, behind = getattr(claim.value, "params", ()), self.sameness.behind(parent)
                return Resolved(claim.value, claim.provenance, False, tuple(params), behind)
        return FALLBACK

    def _claims_for(self, kind: type) -> list[Claim[LayerRule]]:
        rules = [*self.rules.items()]  # a copy, since another thread may add rules
        named = [c for key, claims in rules if is_named(key, kind) for c in claims]
        # A rule that names one class twice, by the class and by its name, makes one claim.
        return [*{_identity(claim.value): claim for claim in named}.values()]

    def refuse_rivals(self, kind: type[Propagator]) -> None:
        """Raise an error if several plugins provide a propagator's name, and none is preferred."""
        if claims := self.propagators.get(kind.__name__):
            choose(claims, kind.__name__, "propagator")

    def has_overrides(self, extension_type: type[Extension]) -> bool:
        """Whether any plugin provides a carrier for this extension."""
        return any(issubclass(extension_type, key[0]) for key in self.overrides)

    def describe(self, extension: Extension) -> str:
        """The name of an extension and the plugin that provided it, for messages."""
        kind = type(extension)
        claims = self.extensions.get(kind.__name__, ())
        origins = [f" of {claim.provenance}" for claim in claims if claim.value is kind]
        return kind.__name__ + "".join(origins)


def has_methods(module: Module, behind: Mapping[Any, Any]) -> bool:
    """Whether a module has attributes of its own where its class has methods."""
    return any(hasattr(behind.get(name), "__get__") for name in module.__dict__)


def is_named(key: ModuleType, kind: type) -> bool:
    """Whether a key stands for a class."""
    return kind is (imported_class(key) if isinstance(key, str) else key)


def _identity(value: Any) -> Any:
    return type(value) if isinstance(value, LayerRule) else value


_KINDS: dict[str, tuple[str, type]] = {
    "backpack_layer_rules": ("rules", LayerRule),
    "backpack_extensions": ("extensions", Extension),
    "backpack_propagators": ("propagators", Propagator),
}


def hook_of(obj: Any) -> str | None:
    """The hook that would return a class; ``None`` if it is of another kind."""
    kinds = _KINDS.items() if isinstance(obj, type) else ()
    return next((hook for hook, (_, base) in kinds if issubclass(obj, base)), None)


def contributions(hook: str, item: Any, is_new: bool) -> list[Contribution]:
    """The registry's entries for one object that a hook returned.

    Args:
        hook: The hook.
        item: The object.
        is_new: Whether its author is at work; see :class:`Candidate`.

    Raises:
        PluginError: It is not of the kind that the hook promises.
    """
    if hook == "backpack_pair_overrides" and isinstance(item, tuple) and len(item) == 3:
        kind, module, carrier = item
        if hook_of(kind) == "backpack_extensions" and is_module_type(module) and callable(carrier):
            return [("overrides", (kind, module), carrier)]
    if hook_of(item) == hook:
        vet(item, is_new=is_new)
        table = _KINDS[hook][0]
        return of_rules([item]) if table == "rules" else [(table, item.__name__, item)]
    raise PluginError(f"{hook} returned {item!r}, which the hook does not accept.")


def of_rules(kinds: Iterable[type[LayerRule]]) -> list[Contribution]:
    """Contributions of one instance of each rule, under every module type that it names."""
    return [("rules", key, rule) for rule in (k() for k in kinds) for key in rule.module_types]


registry = Registry()
