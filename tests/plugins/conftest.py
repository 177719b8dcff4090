"""Plugins of these tests are fake distributions, or temporary; none stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backpack_core.preferences import preferred
from backpack_core.testing.isolation import reset
from tests.distributions import fake_distribution as fake_distribution


@pytest.fixture(autouse=True)
def plugins_of_a_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is loaded or preferred, and the environment names none."""
    reset()
    for name in ("LOAD_PLUGINS", "BLOCK_PLUGINS", "STRICT_PLUGINS", "PREFER", "REQUIRE_CERTIFIED"):
        monkeypatch.delenv(f"BACKPACK_{name}", raising=False)
    before = dict(preferred)
    yield
    preferred.clear()
    preferred.update(before)
    reset()
