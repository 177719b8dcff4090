"""The support matrix is what the product does, and the page in the documentation is the matrix."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from backpack_core.cli import catalogue
from backpack_core.cli import matrix as support
from backpack_core.cli.support import table_of_rules
from backpack_core.cli.table import Cell, Row, folded
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import CORE, registry

DOCS = Path(__file__).parents[2] / "docs"
FAMILIES: list[tuple[str, list[Row]]] = []


@pytest.fixture
def families() -> list[tuple[str, list[Row]]]:
    torch.set_default_dtype(torch.float32)  # as on the command line
    if not FAMILIES:
        FAMILIES.extend(support.matrix())
    return FAMILIES


def cell(families: list[tuple[str, list[Row]]], layer: str, extension: str) -> Cell:
    row = next(row for _, rows in families for row in rows if row.labels["layer"] == layer)
    return row.cells[extension]


def test_the_page_is_what_a_run_finds(families: list[tuple[str, list[Row]]]) -> None:
    generator = runpy.run_path(str(DOCS / "make_support_matrix.py"))
    found = (DOCS / "support-matrix.md").read_text(encoding="utf-8")
    assert found == generator["page"](families), "run python docs/make_support_matrix.py"


@pytest.mark.parametrize(
    ("layer", "extension", "kind"),
    [
        ("Linear", "SumGradSquared", "fast"),
        ("Linear", "BatchGrad", "rule"),
        ("Linear", "DiagHessian", "fast"),
        ("Linear", "GGNMP", "graph"),
        ("LayerNorm", "Variance", "rule"),
        ("Embedding", "SumGradSquared", "fast"),
        ("GRU", "HMP", "graph"),
        ("GRU", "PCHMP", "graph"),
        ("GRUCell", "ClippedSumGrad", "fast"),
        ("A module without a rule", "ClippedSumGrad", "autodiff"),
        ("Tanh", "BatchGrad", "-"),
        ("Tanh", "DiagGGNExact", "rule"),
        ("BatchNorm1d (training)", "BatchGrad", "refused"),
        ("BatchNorm1d (training)", "HMP", "graph"),
        ("BatchNorm1d (training)", "PCHMP", "refused"),
        ("BatchNorm1d (evaluation)", "BatchGrad", "rule"),
        ("GRU", "KFRA", "refused"),
        ("HingeEmbeddingLoss", "DiagGGNExact", "refused"),
        ("HingeEmbeddingLoss", "GGNMP", "refused"),
        ("HingeEmbeddingLoss", "HMP", "graph"),
        ("L1Loss", "DiagGGNMC", "refused"),
        ("MSELoss", "DiagGGNMC", "rule"),
    ],
)
def test_cells(
    families: list[tuple[str, list[Row]]], layer: str, extension: str, kind: str
) -> None:
    found = cell(families, layer, extension)
    assert found.kind == kind
    assert bool(found.reason) == (kind == "refused")


def test_without_a_rule_parameters_are_automatic() -> None:
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    row = support.layer_row(support.RuleCase(Affine, lambda n: torch.randn(n, 4)))
    assert row.rule is None
    assert row.cells["BatchGrad"].kind == "autodiff"


def test_the_catalogue_knows_every_installed_rule(
    families: list[tuple[str, list[Row]]],
) -> None:
    ensure_loaded()
    # Layers that are named only belong to libraries that need not be there.
    found = [claims for kind, claims in registry.rules.items() if not isinstance(kind, str)]
    claims = [claim for claims in found for claim in claims]
    installed = {type(c.value).__name__ for c in claims if c.provenance != CORE}
    shown = {type(row.rule).__name__ for _, rows in families for row in rows}
    assert installed - shown == set(), "add an example to backpack_core/cli/catalogue.py"


# What the command prints of it --------------------------------------------------------------------


@pytest.fixture
def one_matrix(families: list[tuple[str, list[Row]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found once: it takes seconds."""
    monkeypatch.setattr(support, "matrix", lambda chosen: iter(families))


@pytest.mark.usefixtures("one_matrix")
def test_matrix_fits_a_terminal() -> None:
    rows = table_of_rules()
    lines = list(folded(rows, 100))
    assert len(lines) < 250
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    for row in rows:
        assert row.labels["layer"] in text
        for cell in row.cells.values():
            assert " ".join(cell.reason.split())[:30] in text
            assert (cell.kind == "refused") == bool(cell.reason)


def test_matrix_of_some_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = catalogue.LAYERS["Linear maps"]
    cases = [case for case in maps if isinstance(case.make(), nn.Bilinear)]
    monkeypatch.setattr(catalogue, "LAYERS", {"Linear maps": cases})
    monkeypatch.setattr(catalogue, "LOSSES", [])
    (bilinear,) = [row.as_json() for row in table_of_rules(("DiagHessian", "KFAC"))]
    assert sorted(bilinear) == ["DiagHessian", "KFAC", "layer", "reasons"]
    assert (bilinear["DiagHessian"], bilinear["KFAC"]) == ("refused", "fast")
    assert "second derivatives only in the first input" in bilinear["reasons"]["DiagHessian"]
