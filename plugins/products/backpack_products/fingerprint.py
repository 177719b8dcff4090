"""Fingerprints of the plugins that computed a result, compared before results are combined.

Two plugins, or two versions of a plugin, may have different conventions. A sum of their results
would look like any other, so it is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import Extension
from backpack_core.cli.certificate import digest, home_of, version_of
from backpack_core.errors import UsageError, nearest
from backpack_core.plugins.loading import ensure_loaded, known_plugins
from backpack_core.plugins.registry import registry
from backpack_core.preferences import canonical
from backpack_products.overrides import override

T = TypeVar("T")
Fingerprint: TypeAlias = dict[str, str]

_UNDER_ALL = {"backpack_core": "backpack-core", "backpack_products": "backpack-products"}
_COMPILED: Final = "_orig_mod."  # in names, where torch.compile wraps a module
_DIGITS = 12  # of a digest; enough to distinguish versions


def fingerprint(
    modules: Iterable[Module], extensions: Iterable[Extension | type[Extension]] = ()
) -> Fingerprint:
    """The plugins that compute some quantities of some modules.

    These are the plugins with the rules of all modules inside, those of the extensions, and the
    libraries that they are built on.

    Args:
        modules: A model, and a loss.
        extensions: Extensions, as objects or classes.

    Returns:
        Version and digest of the code, by distribution. A class that belongs to no distribution is
        listed by its name, with a digest of its source.
    """
    ensure_loaded()
    return of_parts(_parts(modules, [*extensions]))


def of_parts(parts: Iterable[Any]) -> Fingerprint:
    """The fingerprint of classes and functions that take part in a computation."""
    plugins = known_plugins()
    if _INSTALLED[-1][0] is not plugins:  # they are found once; a test may have others
        found = [Installed(p.package, p.distribution, p.version, p.requires) for p in plugins]
        _INSTALLED[:] = [(plugins, tuple(found))]
    return dict(_marks(tuple(dict.fromkeys(parts)), _INSTALLED[-1][1]))


class Installed(NamedTuple):
    """The facts about an installed plugin that a fingerprint depends on."""

    package: str
    distribution: str
    version: str
    requires: frozenset[str]


_INSTALLED: Final[list[tuple[Any, tuple[Installed, ...]]]] = [(None, ())]


@lru_cache(maxsize=100)
def _marks(parts: tuple[Any, ...], installed: tuple[Installed, ...]) -> Fingerprint:
    plugins = {plugin.package: plugin for plugin in installed}
    marks = {name: _code(package, version_of(name)) for package, name in _UNDER_ALL.items()}
    for part in dict.fromkeys(base for each in parts for base in _with_bases(each)):
        package = part.__module__.partition(".")[0]
        if package in plugins:
            needed = plugins[package].requires
            used = (
                (p, own)
                for p, own in plugins.items()
                if p == package or canonical(own.distribution) in needed
            )
            marks.update((own.distribution, _code(p, own.version)) for p, own in used)
        elif package not in _UNDER_ALL:
            marks[f"{part.__module__}.{part.__qualname__}"] = _source(part)
    return marks


def _parts(modules: Iterable[Module], extensions: list[Any]) -> Iterator[Any]:
    """Yields the classes and functions that take part: extensions, rules and overrides."""
    yield from (each if isinstance(each, type) else type(each) for each in extensions)
    made = [each for each in extensions if not isinstance(each, type)]
    by_type = {type(part): part for module in modules for part in module.modules()}
    for part in by_type.values():
        yield type(registry.resolve(part).rule)
        yield from filter(None, (override(e, part) for e in made))


def _with_bases(part: Any) -> Iterator[Any]:
    """Yields a class and its bases, except for torch's and those of the standard library."""
    for base in getattr(part, "__mro__", (part,)):
        if base.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}:
            yield base


def _code(package: str, release: str) -> str:
    """The version of a package and the digest of its code."""
    home = home_of(package)
    return f"{release} {'unknown code' if home is None else _digest(home)}".strip()


@cache
def _digest(home: Path) -> str:
    return digest(home).partition(":")[2][:_DIGITS]


def _source(part: Any) -> str:
    """A digest of the source of a class or function."""
    try:
        text = inspect.getsource(part)
    except (OSError, TypeError):  # defined in a console
        return "unknown code"
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def agreed(results: Mapping[str, Fingerprint], is_one_quantity: bool = True) -> Fingerprint:
    """The fingerprint of a combination of several results.

    Args:
        results: Fingerprints, by the name of the result in messages. An empty one stands for a
            result whose plugins are not known, which may be combined with any other.
        is_one_quantity: Whether all are values of the same quantities. Different quantities (the
            sum of a diagonal and of Kronecker factors) may use different plugins, but not different
            versions of one.

    Raises:
        UsageError: Two differ, and the environment variable ``BACKPACK_MIX_PLUGINS`` is not 1.
    """
    (first, own), *others = [(k, v) for k, v in results.items() if v] or [("", Fingerprint())]
    total = dict(own)
    for name, other in others:
        difference = _difference(own, other, is_one_quantity)
        if difference and os.environ.get("BACKPACK_MIX_PLUGINS", "0") in ("", "0"):
            raise UsageError(
                f"{first} and {name} were computed by different plugins: {difference}. Compute one "
                "of them again with the plugins of the other, or set BACKPACK_MIX_PLUGINS=1 if you "
                "know that their numbers agree."
            )
        total = {**other, **total}
    return total


def _difference(own: Fingerprint, other: Fingerprint, is_one_quantity: bool) -> str:
    """The entries that differ, for a message; empty if they all agree."""
    both = own.keys() | other.keys() if is_one_quantity else own.keys() & other.keys()
    names = [name for name in sorted(both) if own.get(name) != other.get(name)]
    return "; ".join(f"{n}: {own.get(n, 'none')} and {other.get(n, 'none')}" for n in names)


def agreed_on_ranks(own: Fingerprint, group: distributed.ProcessGroup | None = None) -> None:
    """Compare the fingerprints of all processes of a group; all of them must call it.

    Args:
        own: The fingerprint in this process.
        group: The processes; default: all.

    Raises:
        UsageError: Two differ. Every process raises it.
    """
    every: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(every, own, group=group)
    agreed({f"{'those' if r else 'The results'} of rank {r}": one for r, one in enumerate(every)})


class Marked(dict[str, T]):
    """Results by name, with the fingerprint of the plugins that computed them."""

    def __init__(self, values: Mapping[str, T], plugins: Fingerprint) -> None:
        """Store the values and the fingerprint."""
        super().__init__(values)
        self.plugins = plugins

    def __missing__(self, name: str) -> T:
        """The result under the name that it has if parts of the model are compiled, or are not."""
        return super().__getitem__(same_name(name, self))


def same_name(name: str, known: Iterable[str]) -> str:
    """The known name of a parameter, whether or not ``torch.compile`` wraps modules around it.

    Raises:
        KeyError: There is none.
    """
    for other in (names := [*known]):
        if other.replace(_COMPILED, "") == name.replace(_COMPILED, ""):
            return other
    raise KeyError(f"There is no {name!r}{nearest(name, names) or '.'}")


def fingerprint_of(results: object) -> Fingerprint:
    """The fingerprint stored with results; empty if there is none."""
    return dict(getattr(results, "plugins", {}))


def as_tensor(plugins: Fingerprint) -> Tensor:
    """A fingerprint as a tensor (the bytes of its JSON), for files that hold only tensors."""
    text = bytearray(json.dumps(plugins, sort_keys=True).encode())
    return torch.frombuffer(text, dtype=torch.uint8)


def from_tensor(data: Tensor) -> Fingerprint:
    """The fingerprint from a tensor of :func:`as_tensor`."""
    return dict(json.loads(bytes(data.tolist())))
