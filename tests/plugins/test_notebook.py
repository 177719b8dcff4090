"""In a notebook: cells run again, and what is shown says what it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend, plugins, register, unregister
from backpack_core.errors import PluginConflictError, PluginError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact
from backpack_core.plugins.registry import registry
from backpack_core.record.call import edge_of, site_at
from backpack_core.testing.isolation import reset

CELL = """
import torch
from torch import nn
from backpack_core import backpack, extend, register
from backpack_products import FirstOrderExtension, ParametricRule
from backpack_products.operations import dense

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * self.weight

@register
class ScaleRule(ParametricRule):
    module_types = (Scale,)
    params = {params}
    def _jac_t_mat_prod(self, view, mat):
        return mat * view.parameter("weight")
    def _param_jac_t_mat_prod(self, view, name, mat):
        return {factor} * mat * view.input

@register
class Mine(FirstOrderExtension):
    savefield = "mine"
    needs = (dense,)
    def read(self, product):
        return dense(product).sum()

model = extend(nn.Sequential(Scale()))
loss = model(torch.ones(2, 4)).sum()
with backpack(Mine(), check="never"):  # a wrong factor is what tells rules apart
    loss.backward()
found = float(model[0].weight.mine)
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(factor: int = 1, params: str = '("weight",)') -> float:
        exec(CELL.format(factor=factor, params=params), vars(main))
        return float(main.found)

    yield run
    vars(main).clear()
    reset()


def test_a_cell_runs_again(notebook: Any) -> None:
    assert [notebook(1), notebook(3), notebook(1)] == [8, 24, 8]
    assert len(registry.extensions["Mine"]) == 1


def test_a_cell_that_fails_leaves_the_class_that_was(notebook: Any) -> None:
    notebook(1)
    before = registry.extensions["Mine"][0].value
    with pytest.raises(PluginError, match="params must be a tuple"):
        notebook(1, "'weight'")
    assert registry.extensions["Mine"][0].value is before
    assert any(key.__name__ == "Scale" for key in registry.rules if isinstance(key, type))
    assert notebook(2) == 16


def test_elsewhere_it_is_a_conflict() -> None:
    source = "from backpack_products import FirstOrderExtension\n"
    source += "class Mine(FirstOrderExtension):\n    savefield = 'mine'\n"
    source += "    def read(self, product):\n        return product.samples\n"
    spaces: list[dict[str, Any]] = [{"__name__": "a_package"}, {"__name__": "a_package"}]
    for space in spaces:
        exec(source, space)
    register(spaces[0]["Mine"])
    try:
        with pytest.raises(PluginConflictError, match="registered already"):
            register(spaces[1]["Mine"])
    finally:
        unregister("Mine")


def test_what_is_shown() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    edge = edge_of(loss)
    assert edge is not None
    site = site_at(edge)
    assert site is not None
    assert repr(site.call).startswith("<call of MSELoss: [[4, 2], [4, 2]]")
    block = backpack(BatchGrad(), KFAC())
    assert repr(block).startswith("<backpack: BatchGrad(savefield='grad_batch', propagator=Out")
    with block:
        assert "(entered)" in repr(block)
        assert repr(block._entered[0]) == "<context of BatchGrad, KFAC, 0 passes under way>"
        loss.backward()
    factors = "<Kronecker factors [2, 2] ⊗ [3, 3] of a parameter of shape [2, 3]>"
    assert repr(model.weight.kfac) == factors
    assert repr(DiagGGNExact()) == (
        "DiagGGNExact(savefield='diag_ggn_exact', "
        "propagator=LossSqrt(samples=None, subsampling=None, tolerance=0.0))"
    )


@pytest.mark.parametrize("name", ["extensions", "propagators"])
def test_nothing_is_shown_by_its_address(name: str) -> None:
    plugins.ensure_loaded()
    for claims in getattr(registry, name).values():
        (claim,) = claims
        assert claim.value.__repr__ is not object.__repr__
