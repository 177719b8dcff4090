"""Repeats what rules and extensions compute at visits, without calling them.

In a pass that goes by a plan, the same operations of torch run as in earlier ones. So they are
recorded once, visit by visit, and later passes run only these. Autograd's pass, its hooks, and the
time when results are stored do not change. A recording is compared with the engine at its 1st, 2nd,
4th, 8th, … use.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from backpack_capture._torch import is_ordinary
from backpack_capture.nested import is_plain
from backpack_capture.visited import Entry, Opaque, attributes_of, given_to
from backpack_core.contract.propagator import Propagator
from backpack_core.engine.backward import BackwardPass
from backpack_operations.observer import Driver, PlanObserver, looks_at_visits, of_plans
from backpack_operations.operands import makers_that_may_do_more
from backpack_operations.plan import Planned, model_of, plans
from backpack_operations.structure import Structure
from backpack_products.computing import only_computes
from backpack_products.open_functions import Operation, versions_that_may_do_more

WIDEST: Final = 2**22  # bytes of a tensor; beyond, kernels take much longer than their callers
FIRST: Final = 8  # the pass by a plan that is recorded; that takes as long as ten or twenty passes
MOST: Final = 4  # recordings of one plan, for different settings of extensions
MOST_OF_MODEL: Final = 32  # recordings of one model; each takes as long as several passes


class Visits(PlanObserver):
    """Drives passes by recordings, or makes recordings."""

    needs_visits = False

    def drive(self, run: Any, planned: Planned, structure: Structure) -> Driver | None:
        """A driver by a valid recording, or one that makes a recording, or ``None``."""
        if not _may_repeat(run):
            return None
        observers = of_plans(run)
        is_alone = any(each.goes_alone(run, planned, structure) for each in observers)
        is_hooked = run.context.extension_hook is not None
        if is_hooked and planned.plan.facts is not None:  # it waits for operations of parameters
            return None
        is_shown = is_hooked or run.context.observer is not None
        kind = is_alone, is_shown, tuple([each.adds(run) for each in observers])
        entry = _entry(planned, run.context.extensions, kind)
        if entry is None or entry.refusal:
            return None
        entry.passes += 1
        if entry.passes < FIRST:
            return None
        from backpack_capture.recorded_visits import Recording
        from backpack_capture.repeated import Compared, Repeated

        if entry.recorded is None:
            return Recording(run, structure, entry) if _may_record(entry, run, structure) else None
        given = given_to(entry.recorded, structure, is_alone)
        entry.misses = 0 if given else entry.misses + 1
        if given is None:
            if entry.misses == FIRST << entry.renewals:  # longer each time, for what keeps changing
                entry.renew()
            return None
        entry.uses += 1
        if entry.uses & (entry.uses - 1) == 0:
            return Compared(entry, run, structure, given)
        run.context.history["repeated a recording"] += 1
        return Repeated(entry, run, structure, given)


def _may_repeat(run: BackwardPass) -> bool:
    """Whether only rules and extensions do anything at visits of a pass."""
    context, options = run.context, run.arguments.options
    return not (
        looks_at_visits(run)
        or not run.is_outermost
        or options.get("inputs") is not None
        or options.get("create_graph")
        or any(extension.keeps_graph for extension in context.extensions)
        or any(group.has_overrides for group in run.groups)
        or "captured" in context.seen
        or not is_ordinary()
    )


def _entry(
    planned: Planned, extensions: Sequence[Any], kind: tuple[bool, bool, Hashable]
) -> Entry | None:
    known: list[Entry] = planned.kept.setdefault(Visits, [])
    alike = (entry for entry in known if (entry.is_alone, entry.is_shown, entry.added) == kind)
    found = next((entry for entry in alike if entry.is_of(extensions)), None)
    if found is None:
        if any(map(_has_loose_settings, extensions)):
            return None
        found = Entry(extensions, *kind)
        known.append(found)
        del known[:-MOST]
    return found


def _may_record(entry: Entry, run: BackwardPass, structure: Structure) -> bool:
    """Whether all parts have declared that they only compute, and whether a recording pays."""
    parts: list[Any] = [*run.context.extensions, *(e.propagator for e in run.context.extensions)]
    parts += [call.rule for call, _ in structure.sites]
    foreign = [type(part).__name__ for part in parts if not only_computes(type(part))]
    functions = [*versions_that_may_do_more(), *makers_that_may_do_more()]
    foreign += [f"a version of an operation in {each.__module__}" for each in functions]
    tensors = [t for c, _ in structure.sites for t in (*c.stored.inputs, *c.stored.outputs)]
    recorded: list[int] = plans.notes.setdefault(model_of(structure), {}).setdefault(Visits, [0])
    if foreign:
        entry.refusal = f"{foreign[0]} may do more than compute"
    elif any(t.is_inference() for t in tensors):
        entry.refusal = "torch does not count changes of inference tensors"
    elif max(t.nbytes for t in tensors) > WIDEST:
        entry.refusal = "kernels take longer than their callers"
    elif not _is_settled(structure):
        entry.refusal = "a module has an attribute that cannot be compared"
    elif recorded[0] == MOST_OF_MODEL:
        entry.refusal = "too many recordings of the model exist, for other shapes"
    else:
        recorded[0] += 1
    return not entry.refusal


def _has_loose_settings(extension: Any) -> bool:
    """Whether an attribute can change in another way than by assignment."""
    own = {name: value for name, value in vars(extension).items() if name != "carriers"}
    return not all(map(_is_setting, own.values()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_setting, value))
    if getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
        return all(map(_is_setting, vars(value).values()))
    return is_plain(value) or isinstance(value, (Propagator, Operation))


def _is_settled(structure: Structure) -> bool:
    """Whether all attributes of modules can be compared."""
    try:
        attributes_of(structure)
    except Opaque:
        return False
    return True
