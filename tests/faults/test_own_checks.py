"""Checks of the library on itself: they raise, and do not vanish under ``python -O``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.engine.schedule import NOTHING, Schedule
from backpack_core.errors import InternalError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_interplay.gradient import GradientSum
from backpack_operations.visits import GraphTraversal
from backpack_products.columns import ApartColumns, Columns, Root

ROOT = Path(__file__).parents[2]
FOLDERS = ("backpack_core", "plugins", "data/backpack_data")


def _loss() -> Tensor:
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    loss: Tensor = extend(nn.CrossEntropyLoss())(
        model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0])
    )
    return loss


def _pass(*extensions: Any, **options: Any) -> None:
    loss = _loss()
    with backpack(*extensions, **options):
        loss.backward()


def _seen(self: Any, lane: int, site: Any) -> Any:
    """What waits at a call, which it is not taken from."""
    return self._at_sites.get((site.call, site.index, lane), NOTHING)


def quantity_left() -> None:
    Schedule.take = _seen  # type: ignore[method-assign]
    _pass(DiagGGNExact(), check="never")


def chunk_left() -> None:
    Schedule.take = _seen  # type: ignore[method-assign]
    _pass(DiagGGNExact(chunk_size=1), check="never")


def gradient_left() -> None:
    model: nn.Module = extend(nn.Linear(3, 2))

    def run() -> None:
        loss = model(torch.ones(4, 3)).square().sum()
        with backpack(BatchGrad(), gradient="shared"):
            loss.backward()

    for _ in range(2):  # in the passes 1, 2 and 4, nothing is left out
        run()
    GradientSum.read = lambda *given: ()  # type: ignore[method-assign]
    run()


def columns_meet() -> None:
    root = Root("of either")
    Columns({root: torch.ones(1, 2, 2)}).merge(ApartColumns({root: torch.ones(1, 2, 2)}))


def parameter_left() -> None:
    begin = GraphTraversal.__init__

    def with_something(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.inside = {None: []}

    GraphTraversal.__init__ = with_something  # type: ignore
    _pass(BatchGrad())


CHECKS: dict[str, tuple[Callable[[], None], str]] = {
    "quantity_left": (quantity_left, "quantity was left on its way"),
    "chunk_left": (chunk_left, "quantity was left on its way"),
    "gradient_left": (gradient_left, "nothing was summed for it"),
    "columns_meet": (columns_meet, "met columns of all samples"),
    "parameter_left": (parameter_left, "left unread"),
}


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks patch is as it was afterwards."""
    for owner, name in (
        (Schedule, "take"),
        (GradientSum, "read"),
        (GraphTraversal, "__init__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_raises(name: str) -> None:
    function, message = CHECKS[name]
    with pytest.raises(InternalError, match=f"{message}.* please report it"):
        function()


def test_checks_raise_without_asserts() -> None:
    script = "\n".join(
        [
            "import sys",
            "from backpack_core.errors import InternalError",
            "from tests.faults.test_own_checks import CHECKS",
            "assert False",  # which counts for nothing
            "for name in sys.argv[1:]:",
            "    try:",
            "        CHECKS[name][0]()",
            "    except InternalError as error:",
            "        print(name, error)",
        ]
    )
    names = ("quantity_left", "columns_meet")
    command = [sys.executable, "-O", "-c", script, *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = found.stdout.splitlines()
    for name in names:
        said = next((line for line in lines if line.startswith(name)), "")
        assert CHECKS[name][1] in said, found.stderr


def _asserts() -> Iterator[tuple[str, ast.Assert]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Assert):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_asserts_tell_types_only() -> None:
    """``assert x is not None`` and ``assert isinstance(x, …)``: the next line fails without."""
    found = dict(_asserts())
    assert found
    for place, node in found.items():
        text = ast.unparse(node.test)
        assert text.endswith(" is not None") or text.startswith("isinstance("), f"{place}: {text}"
