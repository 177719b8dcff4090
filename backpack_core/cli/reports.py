"""Reports on plugins as plain data, which is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backpack_core.cli.certificate import Standing, standing
from backpack_core.discovery import Plugin

LIMIT = 60.0  # seconds that a plugin may take to load: enough for a healthy one on a busy machine


@dataclass(frozen=True)
class Provided:
    """One contribution of a plugin.

    Attributes:
        kind: ``"layer rule"``, ``"extension"``, ``"propagator"`` or ``"pair override"``.
        key: The key, which only one plugin may claim.
        implementation: The class.
        detail: The save field of an extension.
    """

    kind: str
    key: str
    implementation: str
    detail: str = ""

    def __str__(self) -> str:
        """As ``"extension BatchGrad, saved as grad_batch"``."""
        return f"{self.kind} {self.key}" + (f", saved as {self.detail}" if self.detail else "")


@dataclass
class Report:
    """What happened to one plugin in a process of its own.

    Attributes:
        name: Name of the entry point.
        value: The object that it names.
        distribution: The distribution that declares it.
        version: Its version.
        state: As in :class:`~backpack_core.discovery.Plugin`, or ``"hangs"`` or ``"died"``.
        error: The class name of the exception.
        message: The exception's message.
        where: File and line of the last frame of its traceback.
        traceback: The whole traceback.
        seconds: How long loading took.
        output: What it printed.
        provides: What it provides.
        broken_promises: What it declares but does not implement.
        absent: Libraries of its layers that are not installed, each with the first class that is
            named.
        standing: The state of its package's certificate; see
            :mod:`backpack_core.cli.certificate`.
        module_found: Whether the module of the entry point exists.
    """

    name: str
    value: str
    distribution: str
    version: str
    state: str = "not loaded"
    error: str = ""
    message: str = ""
    where: str = ""
    traceback: str = ""
    seconds: float = 0.0
    output: str = ""
    provides: list[Provided] = field(default_factory=list)
    broken_promises: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    standing: Standing = "no certificate"
    module_found: bool = True

    @classmethod
    def of(cls, plugin: Plugin, state: str = "", **fields: Any) -> Report:
        """A report on a plugin, with further fields."""
        fields |= {"state": state or plugin.state, "standing": standing(plugin.package)}
        return cls(plugin.name, plugin.value, plugin.distribution, plugin.version, **fields)

    @property
    def who(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}".rstrip()
