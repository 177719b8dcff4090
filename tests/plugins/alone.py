"""One distribution alone, and what is said where it is blocked: ``python alone.py NAME``.

Run by ``.ci/long`` in an environment that has the distribution and what it requires, nothing else
of this repository.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import warnings

import torch
from importlib_metadata import distribution

from backpack_core import backpack, extend
from backpack_core import extensions as installed
from backpack_core.errors import BackpackError, MissingPluginError
from backpack_core.plugins import ensure_loaded, known_plugins
from backpack_core.plugins.registry import registry
from backpack_core.preferences import canonical


def modules_of(name: str) -> list[str]:
    """All modules of a distribution."""
    files = distribution(name).files or []
    tops = sorted({file.parts[0] for file in files if file.name == "__init__.py"})
    found = []
    for top in (importlib.import_module(top) for top in tops):
        found += [m.name for m in pkgutil.walk_packages(top.__path__, f"{top.__name__}.")]
    assert found, f"{name} has no modules"
    return found


def needs_an_extra(module: str) -> str:
    """Import a module; what it lacks of other distributions, of which extras have to tell."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("backpack"):
            raise
        return str(error.name)
    return ""


def values() -> dict[str, str]:
    """What comes of each extension that is installed and needs no arguments, in a small net."""
    found = {}
    for name in sorted(registry.extensions):
        kind = getattr(installed, name)
        parameters = inspect.signature(kind).parameters.values()
        if any(p.default is p.empty and "VAR" not in p.kind.name for p in parameters):
            continue
        model, lossfunc = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        try:
            loss = extend(lossfunc)(extend(model)(torch.rand(4, 3)), torch.arange(4) % 2)
            with backpack(kind()):
                loss.backward()
            assert hasattr(model.weight, kind.savefield), name
            found[name] = "a value"
        except BackpackError as error:
            found[name] = type(error).__name__
    return found


def what_is_missing(extension: str) -> str:
    """What is said when an extension is asked for that may not load."""
    try:
        getattr(installed, extension)
    except MissingPluginError as error:
        return str(error)
    return "nothing"


def blocked(name: str) -> None:
    """None of its plugins loads, and what it has is said to be blocked."""
    own = [plugin for plugin in known_plugins() if canonical(plugin.distribution) == name]
    assert {plugin.state for plugin in own} <= {"blocked"}, own
    for plugin in own:
        if plugin.attribute and not plugin.attribute.endswith(("Rule", "Gradients")):
            assert name in what_is_missing(plugin.attribute)
    model = extend(torch.nn.Linear(3, 2))
    with backpack():
        model(torch.rand(4, 3)).sum().backward()
    assert model.weight.grad is not None
    print(f"{name}: blocked, {len(own)} plugins")


def main(name: str) -> None:
    """Import all of it, load what it declares, and compute what can be computed."""
    if os.environ.get("BACKPACK_BLOCK_PLUGINS"):
        blocked(name)
        return
    modules = modules_of(name)
    without = {extra for module in modules if (extra := needs_an_extra(module))}
    ensure_loaded()
    states = {plugin.state for plugin in known_plugins()}
    assert states <= {"loaded"}, states
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = values()
    number = sum(result == "a value" for result in results.values())
    print(f"{name}: {len(modules)} modules, {number} of {len(results)} extensions have a value")
    if without:
        print("  modules that need an extra:", *sorted(without))
    if number < len(results):
        print("  the others:", {n: r for n, r in results.items() if r != "a value"})
    environment = {**os.environ, "BACKPACK_BLOCK_PLUGINS": name}
    subprocess.run([sys.executable, "-P", __file__, name], env=environment, check=True)


if __name__ == "__main__":
    main(sys.argv[1])
