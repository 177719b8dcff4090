"""What became of a plugin, as plain data, to be sent between processes. Imports no plugin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backpack_core.cli.certificate import Standing
from backpack_core.discovery import Plugin

LIMIT = 60.0  # seconds that a plugin may take to load: enough for a healthy one on a busy machine


@dataclass(frozen=True)
class Provided:
    """One thing that a plugin contributes.

    Attributes:
        kind: ``"layer rule"``, ``"extension"``, ``"propagator"`` or ``"pair override"``.
        key: What may be claimed by one plugin only.
        implementation: The class.
        detail: Where an extension saves.
    """

    kind: str
    key: str
    implementation: str
    detail: str = ""


@dataclass
class Report:
    """What became of one plugin in a process of its own.

    Attributes:
        name: Name of the entry point.
        value: What it names.
        distribution: The distribution that declares it.
        version: Its version.
        state: As that of a :class:`~backpack_core.discovery.Plugin`, or ``"hangs"`` or
            ``"died"``.
        error: Name of the exception's class.
        message: The exception's message.
        where: File and line of the last frame of its traceback.
        traceback: The whole of it.
        seconds: How long loading took.
        output: What it printed.
        provides: What it contributes.
        broken_promises: What it declares and does not implement.
        absent: Libraries that its layers come from and that are not installed, each with the first
            class of it that is named.
        standing: Of its package's certificate, see :mod:`backpack_core.cli.certificate`.
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
    def of(cls, plugin: Plugin, state: str = "", **found: Any) -> Report:
        """What is known of a plugin, and what was found."""
        known = (plugin.name, plugin.value, plugin.distribution, plugin.version)
        return cls(*known, state or plugin.state, **found)

    @property
    def who(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def identity(self) -> tuple[str, str]:
        """What tells plugins apart."""
        return self.distribution, self.name
