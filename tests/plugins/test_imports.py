"""What imports bring along at run time: each package alone, and entry points that load."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from tests.forks import python
from tests.plugins.test_rooms import (
    APPLICATIONS,
    FAMILIES,
    PACKAGES,
    ROOT,
    WITH_ENTRY_POINTS,
    tier_of,
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
    if point.value.partition(".")[0].partition(":")[0] in WITH_ENTRY_POINTS
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
        extend(torch.nn.Linear(3, 2))(torch.rand(5, 3)).backward(torch.ones(5, 2))
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
