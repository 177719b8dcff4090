"""The subcommands of ``backpack``. Each imports what it needs only when it runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from importlib_metadata import entry_points

from backpack_core.cli import authors
from backpack_core.cli.reports import LIMIT
from backpack_core.errors import BackpackError, PluginError, UsageError

app = typer.Typer(
    name="backpack",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="More than the gradient from one backward pass: plugins, and what they support.",
)
app.add_typer(authors.new, name="new")

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Limit = Annotated[float, typer.Option("--limit", min=0.1, help="Seconds that one plugin may take.")]


def _version(wanted: bool) -> None:
    if wanted:
        from backpack_core import __version__

        typer.echo(f"backpack-core {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("plugins")
def list_plugins(
    as_json: Json = False,
    load: Annotated[
        bool,
        typer.Option("--all", help="Load them too, and show one by one what they provide."),
    ] = False,
    limit: Limit = LIMIT,
) -> None:
    """List the installed plugins, from metadata alone.

    Examples: `backpack plugins`, `backpack plugins --all`, `backpack plugins --json | jq`
    """
    from dataclasses import asdict

    from backpack_core.cli import listing, output

    reports = listing.collect(load, limit)
    if as_json:
        output.print_json([asdict(report) for report in reports])
    elif reports:
        lines = listing.rows(reports) if load else listing.folded(reports)
        output.print_table(listing.HEADER if load else listing.FOLDED, lines)
    else:
        output.say("No plugins are installed. Run `pip install backpack-plugin-layers`.")


@app.command()
def doctor(as_json: Json = False, limit: Limit = LIMIT) -> None:
    """Load every plugin in a process of its own, and say what is wrong and what to do.

    The exit code is 1 if a plugin is at fault. Warnings and notes do not change it.

    Examples: `backpack doctor`, `backpack doctor --limit 300`
    """
    from dataclasses import asdict

    from backpack_core.cli import output
    from backpack_core.cli.doctor import examine
    from backpack_core.plugins.loading import SWITCHES

    diagnosis = examine(limit)
    if as_json:
        findings = [asdict(finding) for finding in diagnosis.findings]
        output.print_json({"healthy": diagnosis.healthy, "findings": findings})
    else:
        for finding in diagnosis.findings:
            plugin = f" ({finding.plugin})" if finding.plugin else ""
            output.say(f"{finding.severity}: {finding.who}{plugin}: {finding.problem}")
            output.say(f"  → {finding.remedy}")
        states = [report.state for report in diagnosis.reports]
        summary = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        hint = f" Check {SWITCHES}." if {*states} == {"blocked"} else ""
        output.say(f"{len(states)} plugins: {summary or 'none'}.{hint}")
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _extensions(incomplete: str) -> list[str]:
    """Completions of an extension's name: classes of entry points, except layer rules."""
    from backpack_core.discovery import discover

    names = {plugin.attribute for plugin in discover() if plugin.state == "not loaded"}
    return sorted(n for n in names if n and n.startswith(incomplete) and not n.endswith("Rule"))


_EXTENSION = typer.Option(
    *("--extension", "-e"),
    autocompletion=_extensions,
    help="Name of a quantity; may be given several times.",
)


@app.command()
def support(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FACTORY]",
            help="Returns a model, or a model and a loss. It is imported and called.",
        ),
    ] = None,
    extension: Annotated[list[str] | None, _EXTENSION] = None,
    as_json: Json = False,
) -> None:
    """Say what is supported: by every rule and extension, or in one model.

    Nothing of yours is imported unless it is named here. If a factory returns a model, a loss,
    inputs and a target, every extension is tried on them.

    Examples: `backpack support`, `backpack support mypackage.nets:make_resnet -e KFAC`
    """
    from backpack_core.cli import output
    from backpack_core.cli.support import table_of_model, table_of_rules

    if model is None:
        gc.freeze()  # imported modules are not collected; scanning them took a third of the time
        table = table_of_rules(tuple(extension or ()))
    else:
        table = table_of_model(model, tuple(extension or ()))
    if as_json:
        output.print_json([row.as_json() for row in table])
        return
    from backpack_core.cli.table import folded

    for line in folded(table, output.width()):
        output.say(line)


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="Returns a model, a loss, inputs and a target. It is imported and called.",
        ),
    ],
    extension: Annotated[list[str], _EXTENSION],
    as_json: Json = False,
) -> None:
    """Say for each parameter which rule computes a quantity, in which form, and what it costs.

    Costs are relative to the gradient of the same layer, as counted by the benchmarks. After that
    come the steps of a backward pass that computes all of them.

    Example: `backpack explain mypackage.nets:make -e KFAC -e BatchGrad`
    """
    from backpack_core.cli import output
    from backpack_core.cli.explain import HEADER, UNITS, UNKNOWN, WITH_COUNTS, explained

    names = tuple(dict.fromkeys(extension))
    rows, plan, otherwise = explained(model, names)
    if as_json:
        output.print_json([row._asdict() for row in rows])
        return
    for name in names:
        if len(names) > 1:
            output.say(name)
        cells = [row.cells() for row in rows if row.quantity == name]
        notes = [*dict.fromkeys(row[-1] for row in cells if len(row[-1]) > 40)]  # below the table
        for row in cells:
            row[-1] = f"see {notes.index(row[-1]) + 1}" if row[-1] in notes else row[-1]
        output.print_table(HEADER, cells, output.width())
        output.say("\n".join([*(f"{n}: {note}" for n, note in enumerate(notes, 1)), ""]))
    output.say(UNITS)
    if any(UNKNOWN in row.cells() for row in rows):
        output.say(f"{UNKNOWN}: not counted. {WITH_COUNTS}")
    output.say("")
    if plan is None:
        output.say(otherwise)
    else:
        steps = [(str(number), step.path, str(step)) for number, step in enumerate(plan.steps, 1)]
        output.print_table(("step", "at", "what happens"), steps, output.width())


def _errors(incomplete: str) -> list[str]:
    from backpack_core.cli.trouble import entries

    return [name for name in entries() if name.startswith(incomplete)]


@app.command()
def trouble(
    error: Annotated[
        str,
        typer.Argument(metavar="NAME", autocompletion=_errors, help="Of an error or a warning."),
    ] = "",
) -> None:
    """Say what causes an error or a warning, and what to do. Without a name, list all.

    Example: `backpack trouble SampleMixingError`
    """
    from backpack_core.cli import output
    from backpack_core.cli.trouble import entries, plain
    from backpack_core.cli.trouble import trouble as entry

    lines = plain(entry(error), output.width()) if error else entries()
    print("\n".join(lines).strip("\n"))


app.command()(authors.update)
app.command()(authors.certify)


def add_commands(asked: Sequence[str]) -> None:
    """Add the commands of other distributions: entry points of the group ``backpack.commands``.

    Each names a ``typer.Typer``. Only the command that was asked for is imported; the others are
    listed by name.

    Args:
        asked: The arguments of the command line.
    """
    for point in entry_points(group="backpack.commands"):
        commands = typer.Typer(help=f"Commands of {point.module.partition('.')[0]}.")
        if point.name in asked[:1]:
            try:
                commands = point.load()
            except Exception as error:
                raise PluginError(
                    f"The command {point.name!r} ({point.value}) cannot be loaded: {error}."
                ) from error
        app.add_typer(commands, name=point.name)


def run(**kwargs: Any) -> None:
    """Run the command. For expected errors, print a message and set the exit code."""
    try:
        add_commands(sys.argv[1:])
        app(**kwargs)
    except BackpackError as error:
        typer.echo(f"backpack: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
