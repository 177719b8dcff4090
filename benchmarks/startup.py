"""What the core costs before it does anything: ``python -m benchmarks.startup``.

Importing it after torch, and reading which of 60 further plugins are installed. Processor time in
fresh processes, the best of several runs: what else runs on the machine only adds. Python may keep
its bytecode, as it does for installed packages; the first run writes it. The exit code is 1 where a
limit is exceeded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributions import write_distribution

RUNS = 7
PLUGINS = 60

IMPORT_LIMIT = 30.0  # milliseconds
DISCOVERY_LIMIT = 15.0

IMPORT = """
import time, torch
start = time.process_time()
from backpack_core import backpack, extend
print((time.process_time() - start) * 1e3)
"""

# The first use imports importlib_metadata: that belongs to it. To collect what the import of torch
# has left takes 75 ms, and falls to whoever allocates next: that does not.
DISCOVERY = """
import gc, time, sys, torch
from backpack_core import plugins
gc.collect()
start = time.process_time()
found = plugins.known_plugins()
print((time.process_time() - start) * 1e3)
assert sum(p.distribution.startswith("backpack-plugin-fake") for p in found) == 60
assert not any(name.startswith("fake_") for name in sys.modules)
"""


def best(script: str, folder: Path) -> float:
    """Milliseconds that a script reports, in the best of several processes."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return min(
        float(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True))
        for _ in range(RUNS)
    )


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = [
            ("importing backpack and extend after torch", best(IMPORT, folder), IMPORT_LIMIT)
        ]
        for i in range(PLUGINS):
            write_distribution(
                folder,
                f"backpack-plugin-fake{i}",
                entry_points={f"fake{i}": f"fake_{i}:Rule"},
                modules={f"fake_{i}": "raise AssertionError('imported')"},
            )
        what = f"discovery, {PLUGINS} further plugins"
        measured.append((what, best(DISCOVERY, folder), DISCOVERY_LIMIT))
    for what, milliseconds, limit in measured:
        print(f"{what}: {milliseconds:.1f} ms (limit {limit:.0f} ms)")
    return int(any(milliseconds > limit for _, milliseconds, limit in measured))


if __name__ == "__main__":
    raise SystemExit(main())
