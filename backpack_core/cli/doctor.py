"""Examines the installation: faults and warnings, each with a remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from importlib_metadata import distributions, entry_points
from packaging.requirements import Requirement

from backpack_core.cli.certificate import Standing
from backpack_core.cli.listing import worst
from backpack_core.cli.processes import load_isolated
from backpack_core.cli.reports import LIMIT, Provided, Report
from backpack_core.discovery import GROUP, Plugin, name_of
from backpack_core.errors import PluginConflictError, nearest
from backpack_core.plugins import loading as plugins
from backpack_core.preferences import Claim, Provenance, canonical, choose

SEVERITIES = ("fault", "warning", "note")
SLOW = 1.0  # seconds of import, beyond torch, that are worth a warning


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        severity: A fault makes something unusable, a warning does not. A note is about something
            that may be missing on purpose.
        who: The distribution or distributions.
        plugin: Names of entry points.
        problem: What was found.
        remedy: What to do.
    """

    severity: Literal["fault", "warning", "note"]
    who: str
    plugin: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        reports: One for each plugin.
        findings: Everything that is wrong: faults first, notes last.
    """

    reports: list[Report]
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether there are no faults."""
        return all(finding.severity != "fault" for finding in self.findings)


def examine(limit: float = LIMIT) -> Diagnosis:
    """Load everything that is installed and not blocked, in other processes.

    Args:
        limit: Seconds that one plugin may take.
    """
    installed = plugins.known_plugins()
    reports = load_isolated(installed, limit)
    findings = [finding for report in reports for finding in _judge(report, limit)]
    findings += _conflicts(reports)
    findings += _field_conflicts(reports)
    findings += _of_metadata(reports)
    findings += _of_environment(installed)
    findings += _of_others()
    findings += _without_library(reports)
    findings += _certificates(reports)
    return Diagnosis(
        reports, sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.who, f.plugin))
    )


def _of_environment(installed: Iterable[Plugin]) -> Iterator[Finding]:
    """Findings about environment variables that name plugins that are not installed."""
    names = {name for plugin in installed for name in plugin.provenance[:2]}
    known = {canonical(name) for name in names}
    for variable in ("BACKPACK_BLOCK_PLUGINS", "BACKPACK_PREFER"):
        for entry in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
            key, _, name = entry.rpartition("=")
            if canonical(name) not in known or (variable == "BACKPACK_PREFER" and not key):
                near = nearest(name, names) or "."
                problem = f"its entry {entry!r} names no installed plugin and has no effect{near}"
                listed = "entries are names that `backpack plugins --all` lists"
                remedy = f"Correct it: {listed}, and in BACKPACK_PREFER key=name."
                yield Finding("warning", variable, "", problem, remedy)


def _of_others() -> Iterator[Finding]:
    """Findings of installed distributions: entry points of the group ``backpack.doctor``.

    The function that such an entry point names returns who is concerned, what is wrong and what to
    do; or ``None``.
    """
    for entry_point in entry_points(group="backpack.doctor"):
        owner = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        try:
            finding = entry_point.load()()
        except Exception as error:
            problem = f"its check of the installation fails ({type(error).__name__}: {error})"
            remedy = f"Update or uninstall {owner}."
            yield Finding("fault", owner, entry_point.name, problem, remedy)
            continue
        if finding is not None:
            who, problem, remedy = finding
            yield Finding("warning", who, "", problem, remedy)


def _judge(report: Report, limit: float) -> Iterator[Finding]:
    """Everything that is wrong with a single plugin."""
    fault = partial(Finding, "fault", report.who, report.name)
    warning = partial(Finding, "warning", report.who, report.name)
    update = (
        f"Update or uninstall {report.distribution}, or set BACKPACK_BLOCK_PLUGINS={report.name}."
    )
    if report.state == "hangs":
        yield fault(
            f"its import did not end in {limit:g} s",
            f"If the machine is busy: backpack doctor --limit {10 * limit:g}. Otherwise: "
            f"{_lower(update)}",
        )
    elif report.state == "died":
        yield fault(f"its import ended the process with {report.message}", update)
    elif report.state == "failed":
        yield fault(*_failure(report, update))
    if not report.version:
        again = f"pip install --force-reinstall {report.distribution}"
        yield fault("its distribution has no metadata", f"The installation is damaged: {again}.")
    tell = f"Tell the authors of {report.distribution}"
    for promise in report.broken_promises:
        yield fault(promise, f"{tell}; whatever needs it will fail.")
    if report.output.strip():
        line = report.output.strip().splitlines()[0]
        yield warning(f"it prints at import: {line!r}", f"{tell}.")
    if report.state == "loaded" and report.seconds > SLOW:
        yield warning(
            f"its import takes {report.seconds:.1f} s",
            f"Ask the authors of {report.distribution} to import heavy libraries on first use.",
        )


def _failure(report: Report, update: str) -> tuple[str, str]:
    """Problem and remedy of a plugin that raised an error."""
    last = f"{report.error}: {report.message}".rstrip(": ")
    place = f"\n{report.where}" if report.where else ""
    if report.error == "PluginVersionError":
        return report.message, f"Update or uninstall {report.distribution}."
    if not report.module_found or "The entry point" in report.message:
        problem = f"its entry point {report.value!r} points nowhere ({last})"
        return problem, (
            f"pip install --force-reinstall {report.distribution}; authors: check "
            "[project.entry-points.backpack] in pyproject.toml."
        )
    if report.error == "ModuleNotFoundError":
        return f"{last}{place}", f"Install what it needs (pip check), or: {_lower(update)}"
    return f"{last}{place}", update


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _conflicts(reports: list[Report]) -> Iterator[Finding]:
    """Names of plugins, and keys of what they provide, that several claim."""
    claims: dict[tuple[str, str], dict[Any, Claim[Report]]] = {}
    for report in reports:
        claim = Claim(report, Provenance(report.name, report.distribution, report.version))
        if report.state == "conflict":
            claims.setdefault(("name", report.name), {})[claim.provenance] = claim
        for provided in report.provides:
            rivals = claims.setdefault((f"{provided.kind} for", provided.key), {})
            rivals.setdefault(provided.implementation, claim)
    for (what, key), found in claims.items():
        try:
            choose([*found.values()], key, what)
        except PluginConflictError as error:
            own = [claim.value for claim in found.values()]
            who = " and ".join(report.who for report in own)
            names = ", ".join(dict.fromkeys(report.name for report in own))
            problem, _, remedy = str(error).partition(". ")
            yield Finding("fault", who, names, f"in conflict: {problem}", remedy)


def _field_conflicts(reports: list[Report]) -> Iterator[Finding]:
    """Extensions of several distributions with the same save field."""
    by_field: dict[str, dict[str, tuple[Report, Provided]]] = {}
    for report in reports:
        for provided in report.provides:
            if provided.kind == "extension" and provided.detail:
                by_field.setdefault(provided.detail, {})[provided.implementation] = report, provided
    for name, rivals in by_field.items():
        if len({report.distribution for report, _ in rivals.values()}) > 1:
            yield Finding(
                "warning",
                " and ".join(report.who for report, _ in rivals.values()),
                ", ".join(report.name for report, _ in rivals.values()),
                f"{' and '.join(provided.key for _, provided in rivals.values())} both save under "
                f"{name!r}: the later of two passes overwrites, and one pass cannot have both",
                "Give one of them another name where you use it: savefield='...'; authors: choose "
                "another savefield.",
            )


def _certificates(reports: list[Report]) -> Iterator[Finding]:
    """Certificates that are no longer valid. A missing certificate is not a finding."""
    problems = {
        "unreadable": "its certificate cannot be read",
        "code changed": "its code differs from the code that its certificate is for",
        "other versions": "its certificate is for other versions of backpack-core or torch",
    }
    by_who: dict[str, list[Standing]] = {}
    for report in reports:
        by_who.setdefault(report.who, []).append(report.standing)
    for who, standings in by_who.items():
        if problem := problems.get(worst(standings)):
            remedy = "Authors: run `backpack certify` again, in the folder of its pyproject.toml."
            yield Finding("warning", who, "", problem, remedy)


def _without_library(reports: list[Report]) -> Iterator[Finding]:
    """Rules for layers of a library that is not installed, one finding for each distribution."""
    by_who: dict[tuple[str, str], dict[str, str]] = {}
    for report in reports:
        for library, name in report.absent.items():
            by_who.setdefault((report.who, library), {})[report.name] = name
    for (who, library), names in by_who.items():
        first, number = next(iter(names.values())), len(names)
        yield Finding(
            "note",
            who,
            next(iter(names)) if number == 1 else "",
            f"{number} of its rules {'is' if number == 1 else 'are'} for {library} (first: "
            f"{first!r}), and {library} is not installed",
            "Nothing, unless you use that library; authors: check the name in module_types.",
        )


def _of_metadata(reports: list[Report]) -> Iterator[Finding]:
    """Requirements of plugins that are not met, and names of plugins without entry points."""
    there = {canonical(name_of(each)): each for each in reversed([*distributions()])}
    declared = {canonical(report.distribution) for report in reports}
    for name, dist in sorted(there.items()):
        if name in declared:
            yield from _unmet(dist, there)
        elif name.startswith("backpack-plugin-"):
            groups = re.findall(r"^\[.+\]", dist.read_text("entry_points.txt") or "", re.MULTILINE)
            there_are = ", but in ".join([f"[{GROUP}]", *groups])
            problem = f"is installed, but declares no plugin: it has no entry points in {there_are}"
            remedy = f"pip install it again. Authors: name it in [project.entry-points.{GROUP}]."
            yield Finding("fault", name, "", problem, remedy)


def _unmet(dist: Any, there: dict[str, Any]) -> Iterator[Finding]:
    """What a distribution requires without an extra, and what is installed does not meet."""
    with suppress(Exception):  # metadata is damaged, and what is left of it may raise anything
        for needed in map(Requirement, dist.requires or ()):
            found, wanted = there.get(canonical(needed.name)), f"{needed.name}{needed.specifier}"
            is_met = found and needed.specifier.contains(found.version, prereleases=True)
            if not is_met and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                who, other = f"{dist.name} {dist.version}", found.version if found else "none"
                problem = f"it requires {wanted}, and {other} is installed"
                yield Finding("warning", who, "", problem, f"pip install {wanted!r}.")
