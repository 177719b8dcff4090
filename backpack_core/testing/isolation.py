"""Runs a package's tests with the plugins that they need, whatever else is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backpack_core.plugins import loading, registration
from backpack_core.plugins.registry import registry
from backpack_core.record import storage

LIBRARIES = ("backpack-operations", "backpack-checks", "backpack-interplay")
FAMILIES = ("backpack-plugin-layers", "backpack-plugin-firstorder", "backpack-plugin-secondorder")


def only_plugins(*names: str) -> None:
    """Load the libraries, the families and the named plugins in this process, and no others.

    Call it at the top of ``tests/conftest.py``. The environment variable ``BACKPACK_LOAD_PLUGINS``
    takes precedence: ``BACKPACK_LOAD_PLUGINS=a,b pytest`` tests a package together with others.

    Args:
        names: Names of distributions or of entry points.
    """
    if "BACKPACK_LOAD_PLUGINS" not in os.environ:
        os.environ["BACKPACK_LOAD_PLUGINS"] = ",".join((*LIBRARIES, *FAMILIES, *names))
        reset()


@contextmanager
def temporary_plugin(*objects: Any) -> Iterator[None]:
    """Register plugins for the length of a ``with`` block.

    Args:
        objects: What :func:`~backpack_core.register` takes.
    """
    done: list[str] = []
    try:
        for obj in objects:
            name = f"{registration.name_of(obj)} (temporary {id(obj)})"
            registration.register(obj, name)
            done.append(name)
        yield
    finally:
        for name in done:
            registration.unregister(name)


def reset() -> None:
    """Forget all discovered and loaded plugins, as in a fresh process."""
    with registration.lock:
        for name, plugin in registration.manager.list_name_plugin():
            if plugin is not None:
                registration.manager.unregister(name=name)
        for table in registry.tables:
            table.clear()
        registry.forget()
        storage.use(None)
        loading._plugins, loading._loaded = None, False
