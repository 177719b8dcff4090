"""Columns cross a node by what knows of it: the propagator asks, and knows no node itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backpack_core import LossRule, View
from backpack_products import ColumnPropagator, Columns
from backpack_products.column_propagator import OutputGradient


@dataclass(frozen=True)
class Root(ColumnPropagator):
    def start(self, rule: LossRule, view: View) -> Columns:
        raise AssertionError


class There:
    """Stands for what knows of the node."""

    batch_size = 3

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def push(self, *given: Any, **settings: Any) -> str:
        self.heard.append((given, settings))
        return "pushed"


@pytest.mark.parametrize(
    ("propagator", "settings"), [(Root(), {}), (OutputGradient(), {"keeps_all": False})]
)
def test_it_is_asked(propagator: ColumnPropagator, settings: dict[str, bool]) -> None:
    there, node, quantities = There(), object(), {0: Columns.start("root", torch.rand(2, 3, 4))}
    crossed: object = propagator.cross(node, quantities, there)  # type: ignore[arg-type]
    assert crossed == "pushed"
    assert there.heard == [((node, quantities), settings)]
