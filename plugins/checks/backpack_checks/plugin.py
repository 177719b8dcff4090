"""The hooks that this library answers: checks of passes, and a profile of blocks."""

from __future__ import annotations

from backpack_checks import advice as advice  # registers a judge of plugins' classes
from backpack_checks.attending import Checks
from backpack_checks.profile import Profile
from backpack_checks.providers import advise
from backpack_checks.untouched import by_versions
from backpack_core import hookimpl
from backpack_core.contract.observer import Observer
from backpack_core.engine.backward import BackwardPass
from backpack_core.plugins.loading import ADVISERS
from backpack_core.record.guards import GUARDS

GUARDS.append(by_versions)
ADVISERS.append(advise)


@hookimpl
def backpack_run(run: BackwardPass) -> Observer | None:
    """The observer that checks a pass, unless ``check="never"``."""
    return None if run.context.check == "never" else Checks(run)


@hookimpl
def backpack_watch() -> type[Profile]:
    """The profile that measures the times of a block."""
    return Profile
