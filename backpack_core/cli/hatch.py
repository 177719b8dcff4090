"""The build hook for hatchling: no wheel is built without a certificate for its code.

In the ``pyproject.toml`` of a plugin::

    [tool.hatch.build.targets.wheel.hooks.backpack]

with ``backpack-core[testing]`` among the requirements of ``[build-system]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from backpack_core.cli.certificate import PROVIDES, beside, digest, file_of, read
from backpack_core.cli.certify import certify, project


class Certify(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the certificate and the file of what the plugin provides into the wheel.

    If there is no certificate for this code, the kit runs first.
    """

    PLUGIN_NAME = "backpack"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; does nothing for an editable one."""
        if self.target_name != "wheel" or version == "editable":
            return
        folder = Path(self.root)
        package = project(folder)
        certificates = {home: read(file_of(home)) for home in package.homes}
        if any(each is None or each.code != digest(home) for home, each in certificates.items()):
            certify(folder)
        for home in package.homes:
            for path in filter(Path.exists, (file_of(home), beside(home, PROVIDES))):
                inside = path.relative_to(home.parent).as_posix()
                build_data["force_include"][str(path)] = inside


@hookimpl
def hatch_register_build_hook() -> type[BuildHookInterface]:  # type: ignore[type-arg]
    """The hook's class, for hatchling."""
    return Certify
