"""Which plugins computed a result: kept with it, and compared before results are mixed.

Two plugins, or two versions of one, may have other conventions. A sum of their results looks like
any other, so it is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import Extension
from backpack_core.cli.certificate import digest, version_of
from backpack_core.errors import UsageError
from backpack_core.plugins.loading import ensure_loaded, known_plugins
from backpack_core.plugins.registry import registry
from backpack_core.provided import home_of

T = TypeVar("T")
Fingerprint: TypeAlias = dict[str, str]

_UNDER_ALL = {"backpack_core": "backpack-core", "backpack_products": "backpack-products"}
_DIGITS = 12  # of a digest: enough to tell versions apart


def fingerprint(
    modules: Iterable[Module], extensions: Iterable[Extension | type[Extension]] = ()
) -> Fingerprint:
    """The plugins that compute some quantities of some modules.

    These are the plugins with the rules of all modules inside, those of the extensions, and the
    libraries that they are built on.

    Args:
        modules: A model, and a loss.
        extensions: What is computed; objects or classes.

    Returns:
        Version and digest of the code, by distribution. A class that no distribution brought counts
        by its name, with a digest of its source.
    """
    ensure_loaded()
    return of_parts(_parts(modules, [*extensions]))


def of_parts(parts: Iterable[Any]) -> Fingerprint:
    """The same, of the classes and functions that take part."""
    known = {plugin.package: plugin for plugin in known_plugins()}
    found = {name: _code(package, version_of(name)) for package, name in _UNDER_ALL.items()}
    for part in dict.fromkeys(base for each in parts for base in _with_bases(each)):
        package = part.__module__.partition(".")[0]
        if package in known:
            used = known[package].distribution
            below = ((p, known[p]) for p in known if used in known[p].users or p == package)
            found.update((each.distribution, _code(p, each.version)) for p, each in below)
        elif package not in _UNDER_ALL:
            found[f"{part.__module__}.{part.__qualname__}"] = _source(part)
    return found


def _parts(modules: Iterable[Module], extensions: list[Any]) -> Iterator[Any]:
    """Classes and functions that take part."""
    yield from (each if isinstance(each, type) else type(each) for each in extensions)
    made = [each for each in extensions if not isinstance(each, type)]
    by_type = {type(part): part for module in modules for part in module.modules()}
    for part in by_type.values():
        yield type(registry.resolve(part).rule)
        yield from filter(None, (registry.override(e, part) for e in made))


def _with_bases(part: Any) -> Iterator[Any]:
    """A class with those that it inherits from, which compute what it does not."""
    for base in getattr(part, "__mro__", (part,)):
        if base.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}:
            yield base


def _code(package: str, release: str) -> str:
    home = home_of(package)
    return f"{release} {'unknown code' if home is None else _digest(home)}".strip()


@cache
def _digest(home: Path) -> str:
    return digest(home).partition(":")[2][:_DIGITS]


def _source(part: Any) -> str:
    try:
        text = inspect.getsource(part)
    except (OSError, TypeError):  # of a console
        return "unknown code"
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def agreed(results: Mapping[str, Fingerprint], is_one_quantity: bool = True) -> Fingerprint:
    """The fingerprint of what is made of several results.

    Args:
        results: Fingerprints by the name of the result in a message. An empty one stands for a
            result whose plugins are not known, which is mixed with any.
        is_one_quantity: Whether all are values of the same quantities. Those of two, as the sum of
            a diagonal and of Kronecker factors, may differ in who takes part, but not in its code.

    Raises:
        UsageError: Two differ, and the environment does not say ``BACKPACK_MIX_PLUGINS=1``.
    """
    (first, own), *others = [(k, v) for k, v in results.items() if v] or [("", Fingerprint())]
    total = dict(own)
    for name, other in others:
        told = _told(own, other, is_one_quantity)
        if told and os.environ.get("BACKPACK_MIX_PLUGINS", "0") in ("", "0"):
            raise UsageError(
                f"{first} and {name} were computed by different plugins: {told}. Compute one of "
                "them again with the plugins of the other, or set BACKPACK_MIX_PLUGINS=1 if you "
                "know that their numbers agree."
            )
        total = {**other, **total}
    return total


def _told(own: Fingerprint, other: Fingerprint, is_one_quantity: bool) -> str:
    """What differs, by name."""
    both = own.keys() | other.keys() if is_one_quantity else own.keys() & other.keys()
    names = [name for name in sorted(both) if own.get(name) != other.get(name)]
    return "; ".join(f"{n}: {own.get(n, 'none')} and {other.get(n, 'none')}" for n in names)


def agreed_on_ranks(own: Fingerprint, group: distributed.ProcessGroup | None = None) -> None:
    """Compare the fingerprints of all processes of a group, which all have to call it.

    Args:
        own: That of this process.
        group: The processes; default: all.

    Raises:
        UsageError: Two differ; on every process.
    """
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, own, group=group)
    agreed({f"{'those' if r else 'The results'} of rank {r}": said for r, said in enumerate(found)})


class Marked(dict[str, T]):
    """Results by name, with the fingerprint of the plugins that computed them."""

    def __init__(self, values: Mapping[str, T], plugins: Fingerprint) -> None:
        """Store both."""
        super().__init__(values)
        self.plugins = plugins


def fingerprint_of(results: object) -> Fingerprint:
    """The fingerprint that results carry; an empty one if they carry none."""
    return dict(getattr(results, "plugins", {}))


def as_tensor(plugins: Fingerprint) -> Tensor:
    """A fingerprint for a file that holds tensors alone: the bytes of its JSON."""
    return torch.tensor([*json.dumps(plugins, sort_keys=True).encode()], dtype=torch.uint8)


def from_tensor(found: Tensor) -> Fingerprint:
    """What :func:`as_tensor` was given."""
    return dict(json.loads(bytes(found.tolist())))
