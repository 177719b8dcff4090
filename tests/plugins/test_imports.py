"""Who imports whom: plugins import the core, the core imports none, and families not each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.forks import python

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
    """Everything named by an import statement anywhere in a file, also inside functions.

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

# What each room of the core may import, besides torch.
BELOW = {
    "record": {"_torch", "errors", "remember"},
    "graph": {"_torch", "errors", "record", "values"},
    "contract": {"_torch", "discovery", "errors", "record", "graph"},
    "plan": {"_torch", "record", "graph"},
    "plugins": {"_torch", "discovery", "errors", "record", "contract", "remember"},
    "engine": {
        "_torch",
        "_hooks",
        "errors",
        "record",
        "graph",
        "contract",
        "plan",
        "plugins",
        "replaced",
        "tuning",
        "values",
    },
}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_those_below_it(room: str) -> None:
    files = sorted((PACKAGES["backpack_core"] / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            top, _, rest = name.partition(".")
            home = rest.partition(".")[0]
            allowed = top != "backpack_core" or home in BELOW[room] | {room}
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def modules_of_the_core() -> dict[str, Path]:
    core = PACKAGES["backpack_core"]
    return {
        ".".join(path.relative_to(core.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in core.rglob("*.py")
    }


def graph_of_the_core() -> dict[str, set[str]]:
    """Which modules of the core each of them imports."""
    paths = modules_of_the_core()
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


def test_imports_of_the_core_have_no_circle() -> None:
    graph = graph_of_the_core()
    assert len(graph) > 80
    assert sum(map(len, graph.values())) > 300
    circle = circle_in(graph)
    assert not circle, " -> ".join(circle)


def test_rooms_import_nothing_private_of_each_other() -> None:
    """A name that begins with an underscore is for its own file; those two are for all."""
    found = []
    for module, path in modules_of_the_core().items():
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


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in APPLICATIONS])
def test_importing_imports_no_other_plugin(package: str) -> None:
    source = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module('{package}')\n"
        "if package.__name__ != 'backpack_core':\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        f"others = {set(FAMILIES) - tier_of(package) - {package}!r}\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in others))\n"
    )
    assert python(source).strip() == "[]"


def test_importing_core_neither_discovers_nor_loads() -> None:
    source = (
        "import sys, backpack_core\n"
        "from backpack_core.plugins import loading\n"
        "print(loading._plugins, loading._loaded)"
    )
    assert python(source).strip() == "None False"


POINTS = [
    point
    for point in entry_points(group="backpack")
    if point.value.partition(".")[0].partition(":")[0] in FAMILIES
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_every_entry_point_loads(point) -> None:
    assert isinstance(point.load(), type)


def test_there_are_entry_points_of_every_family() -> None:
    found = {point.value.partition(":")[0].partition(".")[0] for point in POINTS}
    assert found == set(WITH_ENTRY_POINTS)


ALONE = """
import torch
from torch import nn
from backpack_core import backpack, extend
from backpack_products import FirstOrderExtension
from backpack_products.operations import dense
from backpack_core.errors import AutodiffFallbackWarning
import warnings

class Individual(FirstOrderExtension):
    savefield = "individual"
    needs = (dense,)
    def read(self, product):
        return dense(product).squeeze(0)

torch.set_default_dtype(torch.float64)
model = extend(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)))
X, y = torch.rand(5, 3), torch.rand(5, 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loss = ((model(X) - y) ** 2).sum()
    with backpack(Individual()):
        loss.backward()
assert any(w.category is AutodiffFallbackWarning for w in caught)
for parameter in model.parameters():
    expected = torch.stack([
        torch.autograd.grad(((model(X[n : n + 1]) - y[n : n + 1]) ** 2).sum(), parameter)[0]
        for n in range(5)
    ])
    assert (parameter.individual - expected).abs().max() < 1e-12
try:
    from backpack_core.extensions import {name}
except ImportError as error:
    print(error)
"""


def test_core_alone_carries_quantities_of_somebody_through_a_chain() -> None:
    source = (ROOT / "tests" / "plugins" / "core_alone.py").read_text(encoding="utf-8")
    assert "pip install backpack-operations" in python(source, BACKPACK_LOAD_PLUGINS="")


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("BatchGrad", "backpack-plugin-firstorder"), ("KFAC", "backpack-plugin-secondorder")],
)
def test_libraries_work_without_any_family(name: str, distribution: str) -> None:
    said = python(ALONE.replace("{name}", name), BACKPACK_LOAD_PLUGINS="backpack-operations")
    assert distribution in said
    assert name in said


NOTHING = """
import importlib_metadata
importlib_metadata.distributions = lambda **kwargs: iter(())
import torch
from backpack_core import backpack, extend
from backpack_core.errors import MissingPluginError
from backpack_products import FirstOrderExtension
try:
    from backpack_core.extensions import BatchGrad
except ImportError as error:
    print(error)
class Individual(FirstOrderExtension):
    savefield = "individual"
    def read(self, product):
        return None
try:
    with backpack(Individual()):
        extend(torch.nn.Linear(3, 2))(torch.rand(5, 3)).sum().backward()
except MissingPluginError as error:
    print(error)
"""


def test_core_says_what_to_install() -> None:
    """Nothing installed at all, rather than blocked."""
    said = python(NOTHING)
    assert "pip install backpack-plugin-firstorder" in said
    assert "Linear has no layer rule" in said
    assert "pip install backpack-operations" in said


DEFINED = """
from itertools import combinations
import torch
from backpack_products import AffineProduct
from backpack_products import operations as ops

DEFINITIONS = {
    ops.dense: lambda m: m,
    ops.square_sum: lambda m: m.square().sum((0, 1)),
    ops.per_sample_square_sum: lambda m: m.square().sum(0),
    ops.squared_norm: lambda m: m.square().sum((2, 3)),
    ops.batch_sum: lambda m: m.sum(1),
}
assert not ops.squared_norm.has_version(AffineProduct)
torch.set_grad_enabled(False)  # as in a pass
for columns, positions in ((1, 3), (2, 3), (2, 1)):
    out, inp = torch.rand(columns, 4, positions, 1, 3), torch.rand(4, positions, 1, 2)
    whole = torch.einsum("vnsgo,nsgi->vnoi", out, inp)
    for count in range(1, len(DEFINITIONS) + 1):
        for needs in combinations(DEFINITIONS, count):
            product = AffineProduct(out, inp, torch.Size((3, 2)))
            product.needs = frozenset(needs)
            for operation in needs:
                torch.testing.assert_close(operation(product), DEFINITIONS[operation](whole))
"""


def test_operations_hold_where_no_family_has_brought_versions() -> None:
    """As for an extension of somebody's, with all families blocked."""
    python(DEFINED, BACKPACK_LOAD_PLUGINS="")
