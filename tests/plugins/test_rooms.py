"""Rooms and arrows, read from the sources: who may import whom, also inside functions.

Plugins import the core, the core imports none, and families not each other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_ENTRY_POINTS = (
    "backpack_layers",
    "backpack_firstorder",
    "backpack_secondorder",
    "backpack_transformers",
)
FAMILIES = (*WITH_ENTRY_POINTS, "backpack_capture")
# What is built with them, as anybody could: on public interfaces only.
APPLICATIONS = ("backpack_privacy", "backpack_attribution", "backpack_optimizers")
# What families stand on: each may import those before it, and core.
LIBRARIES = (
    "backpack_products",
    "backpack_operations",
    "backpack_checks",
    "backpack_interplay",
)
PACKAGES = {
    "backpack_core": ROOT / "backpack_core",
    **{
        name: ROOT / "plugins" / name.removeprefix("backpack_") / name
        for name in (*LIBRARIES, *FAMILIES, *APPLICATIONS)
    },
}


def imported(path: Path, runs: bool = False) -> Iterator[str]:
    """Everything that a file imports by name, also inside functions.

    Args:
        path: The file.
        runs: Leave out what stands under ``if TYPE_CHECKING``.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in below(tree, "TYPE_CHECKING" if runs else ""):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (each.value for each in node.args[:1] if isinstance(each, ast.Constant))


def below(node: ast.AST, condition: str) -> Iterator[ast.AST]:
    """Everything below a node, but for what stands under an ``if`` with some condition."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == condition):
            yield child
            yield from below(child, condition)


def tier_of(package: str) -> set[str]:
    """What a package may import of ours, besides core and itself."""
    if package in LIBRARIES:
        return {*LIBRARIES[: LIBRARIES.index(package)]}
    if package in FAMILIES:
        return {*LIBRARIES}
    return {*LIBRARIES, *FAMILIES} if package in APPLICATIONS else set()


# The rooms of libraries: those that families may enter, and those that other libraries may enter,
# too. All others are a library's own.
OPEN = {
    "backpack_products": (
        "affine apart column_propagator columns computing conformance contexts contractions "
        "derivatives elementwise extensions factors fingerprint held host_functions lookup loss "
        "merging multiply nested open_functions "
        "operations owned parametric product ranks recycled rows sameness scale some_samples "
        "substitutes transposition tuning values",
        "overrides regrouping",
    ),
    "backpack_operations": (
        "alignment bare bridge carrier chosen fused nodes observer operands order own_pass plan "
        "structure",
        "_torch apart batch own_order owners passes paths received refusals survey",
    ),
    "backpack_checks": ("providers", "_torch sums trust"),
    "backpack_interplay": ("checkpoints compiled leaves shards", ""),
}


def inner_room(name: str, importer: str) -> str:
    """The room of a library that a name leads to, if the importing package may not enter it."""
    top, *rest = name.split(".")
    if top not in LIBRARIES or top == importer:
        return ""
    for_families, for_libraries = OPEN[top]
    allowed = for_families + (f" {for_libraries}" if importer in LIBRARIES else "")
    room = rest[0] if rest and is_room(top, rest[0]) else ""
    return "" if room in allowed.split() else room


def is_room(library: str, name: str) -> bool:
    """Whether a library has a module or a folder with a name."""
    return (PACKAGES[library] / f"{name}.py").exists() or (PACKAGES[library] / name).is_dir()


@pytest.mark.parametrize("package", [*PACKAGES, "backpack_data", "backpack_compat", "backpack"])
def test_nobody_enters_an_inner_room_of_a_library(package: str) -> None:
    elsewhere = ROOT / ("data" if package == "backpack_data" else "compat") / package
    home = PACKAGES.get(package, elsewhere)
    files = sorted(home.rglob("*.py"))
    assert files
    for path in files:
        entered = {name for name in imported(path) if inner_room(name, package)}
        assert not entered, f"{path.relative_to(ROOT)} imports {sorted(entered)}"


def test_an_inner_room_is_told_from_an_open_one() -> None:
    assert inner_room("backpack_operations.between.Operations", "backpack_firstorder") == "between"
    assert inner_room("backpack_operations.owners.Owners", "backpack_firstorder") == "owners"
    assert not inner_room("backpack_operations.owners.Owners", "backpack_checks")
    assert not inner_room("backpack_operations.nodes", "backpack_firstorder")
    assert not inner_room("backpack_products.AffineRule", "backpack_firstorder")
    for library, (families, libraries) in OPEN.items():
        for room in f"{families} {libraries}".split():
            assert is_room(library, room), room


# The kit and the command line are for all.
FOR_ALL = ("testing", "cli")


@pytest.mark.parametrize("package", PACKAGES)
def test_sources_import_those_before_them(package: str) -> None:
    """Core imports none, a library those before it, a family any library and no other family."""
    home = PACKAGES[package]
    files = sorted(home.rglob("*.py"))
    assert files
    allowed = {package} | tier_of(package)
    for path in files:
        is_for_all = package == "backpack_core" and path.relative_to(home).parts[0] in FOR_ALL
        for name in imported(path):
            top = name.partition(".")[0]
            others = {*FAMILIES, *APPLICATIONS, "backpack"} | (
                set() if is_for_all else {*LIBRARIES}
            )
            assert top not in others - allowed, f"{path.relative_to(ROOT)} imports {name}"


# Where torch's private interface is used.
PRIVATE_OF_TORCH = {"_torch", "_hooks"}

# What each room of the core may import of the core, from below: only rooms that were named before.
ROOMS: dict[str, str] = {
    "errors": "",
    "remember": "",
    "_torch": "errors",
    "autocast": "_torch",
    "fields": "errors",
    "preferences": "errors",
    "discovery": "errors preferences",
    "_hooks": "_torch",
    "record": "_torch errors remember",
    "graph": "_torch errors record autocast",
    "contract": "_torch discovery errors graph record",
    "plugins": "_torch contract discovery errors preferences record remember",
    "engine": "_torch _hooks errors record graph contract plugins autocast",
    "extensions": "discovery errors plugins preferences",
    "recording": "_hooks _torch engine errors plugins record",
    "context": "_torch contract engine errors plugins record remember",
    "extending": "_hooks _torch engine errors plugins record recording",
    "api": "context contract extending extensions fields plugins record",
    "__init__": "api errors",
    "testing": "context contract discovery errors extending plugins preferences record",
    "cli": "__init__ _hooks context contract discovery engine errors extending extensions plugins "
    "preferences testing",
}


def arrows_of(module: str, names: Iterable[str]) -> set[str]:
    """The other rooms that a module of the core imports from.

    A name that the package itself hands out comes from its interface, which is at the top.
    """
    found = set()
    for name in names:
        top, *rest = name.split(".")
        if top == "backpack_core":
            found.add(rest[0] if rest and rest[0] in ROOMS else "__init__")
    return found - {room_of(module)}


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_rooms_stand_above_what_they_import() -> None:
    below: set[str] = set()
    for room, others in ROOMS.items():
        assert {*others.split()} <= below, room
        below.add(room)
    assert {room_of(module) for module in modules_of("backpack_core")} == below


def test_arrows_of_the_core_are_those_that_are_drawn() -> None:
    """Inside functions, too: what is imported late is needed all the same."""
    for module, path in modules_of("backpack_core").items():
        more = arrows_of(module, imported(path)) - {*ROOMS[room_of(module)].split()}
        assert not more, f"{path.relative_to(ROOT)} imports from {sorted(more)}"


@pytest.mark.parametrize(
    ("line", "room"),
    [
        ("from backpack_core.cli.listing import collect", "cli"),
        ("from backpack_core import testing", "testing"),
        ("import backpack_core.engine.sink", "engine"),
        ("from backpack_core import LayerRule", "__init__"),
        ("importlib.import_module('backpack_core.context')", "context"),
    ],
)
def test_an_arrow_is_found_inside_a_function(tmp_path: Path, line: str, room: str) -> None:
    (tmp_path / "late.py").write_text(f"def late():\n    {line}\n")
    assert arrows_of("backpack_core.discovery", imported(tmp_path / "late.py")) == {room}


def modules_of(package: str) -> dict[str, Path]:
    home = PACKAGES[package]
    names = {path: path.relative_to(home.parent).with_suffix("") for path in home.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in names.items()}


def graph_of(package: str) -> dict[str, set[str]]:
    """Which other modules of its package each module imports."""
    paths = modules_of(package)
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = set(imported(path, runs=True))
        homes = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = homes & paths.keys()
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Some circle, its first module named again at the end; empty if there is none."""
    done: set[str] = set()

    def search(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        found: list[str] = []
        if module not in done:
            behind = (search(other, [*way, module]) for other in sorted(graph[module]))
            found = next(filter(None, behind), [])
        done.add(module)
        return found

    return next(filter(None, (search(module, []) for module in sorted(graph))), [])


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert circle_in(graph) == ["b", "d", "b"]
    assert not circle_in({**graph, "d": {"c"}})


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_circle(package: str) -> None:
    graph = graph_of(package)
    arrows = sum(map(len, graph.values()))
    assert arrows > (300 if package == "backpack_core" else 2)
    circle = circle_in(graph)
    assert not circle, " -> ".join(circle)


def test_rooms_import_nothing_private_of_each_other() -> None:
    """A name that begins with an underscore is for its own file; those two are for all."""
    found = []
    for module, path in modules_of("backpack_core").items():
        for name in imported(path):
            top, *rest = name.split(".")
            private = [p for p in rest if re.match("_(?!_)", p) and p not in PRIVATE_OF_TORCH]
            if top == "backpack_core" and private:
                found.append(f"{module} imports {name}")
    assert not found, found


@pytest.mark.parametrize("package", FAMILIES)
def test_plugins_import_nothing_private(package: str) -> None:
    """Of the core, no name that begins with an underscore: what they need has a public home."""
    for path in sorted(PACKAGES[package].rglob("*.py")):
        for name in imported(path):
            top, *rest = name.split(".")
            private = top == "backpack_core" and any(part.startswith("_") for part in rest)
            assert not private, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", APPLICATIONS)
def test_applications_import_what_the_reference_lists(package: str) -> None:
    """They prove that the public interface is enough, so they use nothing else of ours."""
    pages = (ROOT / "docs/_ext/api_pages.py").read_text(encoding="utf-8")
    public = {*re.findall(r'"(backpack_[\w.]+)"', pages)}
    blocks = re.findall(
        r'f"(backpack_\w+)\.\{name\}"\s+for name in \((.*?)\n +\)', pages, re.DOTALL
    )
    public |= {f"{home}.{name}" for home, names in blocks for name in re.findall(r'"(\w+)"', names)}
    for path in sorted(PACKAGES[package].rglob("*.py")):
        for name in imported(path):
            top = name.partition(".")[0]
            is_ours = top in {"backpack_core", "backpack_data", *LIBRARIES, *FAMILIES}
            module = name.rpartition(".")[0] or name
            assert not is_ours or {name, module} & public, (
                f"{path.relative_to(ROOT)} imports {name}"
            )
