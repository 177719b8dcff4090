"""Measures the time to load a plugin, in a fresh interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection
from typing import NamedTuple

from backpack_core.discovery import discover
from backpack_core.errors import UsageError
from backpack_core.preferences import canonical
from backpack_core.testing.compare import CheckFailure

# Packages that take long wherever they are imported. A plugin may need them, but not to be loaded.
HEAVY = (
    *("accelerate", "datasets", "diffusers", "jax", "lightning", "matplotlib", "pandas", "peft"),
    *("pytorch_lightning", "scipy", "seaborn", "sklearn", "tensorflow", "torch._dynamo"),
    *("torch._inductor", "torchaudio", "torchvision", "transformers"),
)
SECONDS = 0.5
ATTEMPTS = 3

# Time of the main thread, without what it waited for a core: on a busy machine as on an idle one.
# Where the system does not tell, it is processor time, which does not see a thread that sleeps.
_SCRIPT = r"""
import importlib, json, sys, time
sys.path[:] = json.loads(sys.argv[1])
import torch, backpack_core.api, backpack_products.api

def now():
    try:
        with open("/proc/self/schedstat") as file:
            return time.perf_counter() - int(file.read().split()[1]) / 1e9
    except OSError:
        return time.process_time()

before, start = set(sys.modules), now()
for module in sys.argv[2:]:
    importlib.import_module(module)
print("\n" + json.dumps([now() - start, sorted(set(sys.modules) - before)]))
"""
# A line of ``-X importtime``: microseconds alone and with what it imports, indent, name.
_LINE = re.compile(r"^import time: +(\d+) \| +(\d+) \| ( *)(\S+)$", re.MULTILINE)


class _Import(NamedTuple):
    """An imported module, all that led to it, and microseconds alone and including its imports."""

    module: str
    by: tuple[str, ...]
    alone: int
    total: int

    def importer(self, packages: set[str]) -> str:
        """The nearest module of the plugin that led to the import."""
        own = (module for module in reversed(self.by) if _is_in(packages, module))
        return next(own, "an entry point")


def check_import(
    distribution: str, seconds: float = SECONDS, heavy: Collection[str] = HEAVY
) -> None:
    """Require that a plugin loads fast, and imports nothing heavy when it is loaded.

    All modules that its entry points name are imported by a fresh interpreter, after torch and
    backpack-core. Time in which the process waits for a core does not count. One of three attempts
    must be fast enough, since the first one reads and compiles files.

    Args:
        distribution: Name of the installed distribution, as ``"backpack-plugin-scale"``.
        seconds: The time that it may take.
        heavy: Packages, and modules of torch, that it may import only in functions.

    Raises:
        CheckFailure: It takes longer, or imports something heavy. The message names the module.
        UsageError: It is not installed, or has no entry points.
    """
    name = canonical(distribution)
    values = [plugin.value for plugin in discover() if canonical(plugin.distribution) == name]
    if not values:
        raise UsageError(
            f"{distribution!r} has no entry point in [project.entry-points.backpack] that is "
            "installed: name its classes there, and pip install it again."
        )
    modules = list(dict.fromkeys(value.partition(":")[0] for value in values))
    packages = {module.partition(".")[0] for module in modules}
    for _ in range(ATTEMPTS):
        taken, new, imports = _imported(distribution, modules)
        for one in (one for one in imports if one.module in new.intersection(heavy)):
            raise CheckFailure(
                f"{one.importer(packages)} imports {one.module} ({one.total / 1e6:.2f} s) when "
                f"{distribution} is loaded. Import it in the function that uses it; a rule names "
                "classes of it in module_types, as 'package.module.Class'."
            )
        if taken <= seconds:
            return
    # A module of the plugin counts alone; one that it imports counts with all of its imports.
    costs = {
        one: one.alone if _is_in(packages, one.module) else one.total
        for one in imports
        if one.module in new and _is_in(packages, one.module, *one.by[-1:])
    }
    worst = max(costs, key=costs.__getitem__)
    of = "" if _is_in(packages, worst.module) else f", which {worst.importer(packages)} imports"
    raise CheckFailure(
        f"Loading {distribution} takes {taken:.2f} s, and {seconds:g} s are allowed. Most of it is "
        f"{worst.module}{of}: do that when it is needed first."
    )


def _imported(distribution: str, modules: list[str]) -> tuple[float, set[str], list[_Import]]:
    """Seconds, the newly imported modules, and all imports."""
    command = [sys.executable, "-X", "importtime", "-c", _SCRIPT, json.dumps(sys.path), *modules]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        last = run.stderr.strip().rpartition("\n")[2]
        raise CheckFailure(f"{distribution} cannot be loaded: {last}")
    taken, new = json.loads(run.stdout.strip().rpartition("\n")[2])
    imports: list[_Import] = []
    above: list[str] = []  # a module is logged after what it imports, which is indented more
    for alone, total, indent, module in reversed(_LINE.findall(run.stderr)):
        del above[len(indent) // 2 :]
        imports.append(_Import(module, tuple(above), int(alone), int(total)))
        above.append(module)
    return taken, set(new), imports


def _is_in(packages: set[str], *modules: str) -> bool:
    """Whether one of some modules belongs to the plugin."""
    return any(module.partition(".")[0] in packages for module in modules)
