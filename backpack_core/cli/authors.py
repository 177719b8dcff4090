"""The subcommands for authors of plugins: new, update, certify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

new = typer.Typer(
    no_args_is_help=True,
    help="Start a plugin package: `backpack new layer scale`, then `pytest`.",
)

Name = Annotated[str, typer.Argument(help="Name of the plugin, as in backpack-plugin-NAME.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the package is made.")]
Author = Annotated[str, typer.Option("--author", help="For the licence and the metadata.")]


def _make(kind: str, name: str, folder: Path, author: str) -> None:
    from backpack_core.cli import output
    from backpack_core.cli.scaffold import create

    package = create(kind, name, folder, author)
    output.say(f"Made {package}. Next:\n  cd {package}\n  pip install -e '.[test]'\n  pytest")


@new.command("layer")
def new_layer(name: Name, output: Output = Path(), author: Author = "") -> None:
    """A layer rule: how one kind of layer differentiates. Example: `backpack new layer scale`."""
    _make("layer", name, output, author)


@new.command("extension")
def new_extension(name: Name, output: Output = Path(), author: Author = "") -> None:
    """An extension: a quantity for every parameter. Example: `backpack new extension snr`."""
    _make("extension", name, output, author)


@new.command("propagator")
def new_propagator(name: Name, output: Output = Path(), author: Author = "") -> None:
    """A propagator, and an extension of it. Example: `backpack new propagator fisher`."""
    _make("propagator", name, output, author)


def update(
    folder: Annotated[Path, typer.Argument(exists=True, help="Made by `backpack new`.")] = Path(),
) -> None:
    """Bring a package made by `backpack new` up to date with the installed templates.

    The exit code is 1 if you and the templates changed the same lines.

    Example: `backpack update .`
    """
    from backpack_core import __version__
    from backpack_core.cli import output
    from backpack_core.cli.scaffold import update as run

    conflicts = run(folder)
    output.say(f"Up to date with the templates of backpack-core {__version__}: see `git diff`.")
    if conflicts:
        output.say(f"Resolve the conflict markers in {', '.join(conflicts)}.")
        raise typer.Exit(1)


def certify(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="With the pyproject.toml of a plugin's package; default: this one."),
    ] = None,
    tests: Annotated[
        list[Path] | None,
        typer.Option("--tests", help="What pytest runs; default: what the package says."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", exists=True, help="A wheel, or a folder of wheels, that gets it."),
    ] = None,
) -> None:
    """Run a package's tests, and write what the kit found into a certificate beside its code.

    If several packages are named, the tests run once.

    Build backends ship it with the package. `backpack plugins` shows it, and says when code or
    versions have changed since.

    Examples: `backpack certify`, `backpack certify . --wheel dist/backpack_plugin_scale-0.1.whl`
    """
    from backpack_core.cli import output
    from backpack_core.cli.certify import certify as run
    from backpack_core.cli.certify import into_wheels

    written = run(*(folders or [Path()]), tests=tests or ())
    for path, certificate in written.items():
        number, cases = sum(map(len, certificate.checks.values())), len(certificate.checks)
        output.say(f"{number} checks passed in {cases} case{'s' * (cases > 1)}. Wrote {path}.")
        if certificate.unchecked:
            output.say(f"No case builds the classes of {', '.join(certificate.unchecked)}.")
    if wheel is not None:
        names = ", ".join(path.name for path in into_wheels(wheel, written))
        output.say(f"Wrote {'it' if len(written) == 1 else 'them'} into {names}.")
