"""Shortens a recorded program: drops operations with fixed, equal or unneeded values.

The program computes the same numbers by the same operations. Overwritten values stay as recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from backpack_capture.program import (
    BLANK,
    Assumption,
    Operation,
    Pause,
    Program,
    Ref,
    Step,
    renumbered,
)

aten = torch.ops.aten
LARGEST: Final = 2**16  # numbers of a tensor that is kept instead of what makes it
_SAME = (aten.detach.default, aten.alias.default)


def tidy(program: Program) -> Program:
    """The same program, with fewer steps."""
    for change in (_without_detach, _folded, _merged, drop_unneeded):
        change(program)
    return program


def _filtered(program: Program, keep: Callable[[Operation, dict[int, int]], bool]) -> None:
    """Drop operations; ``keep`` enters the values that replace those of each."""
    same: dict[int, int] = {}
    steps = list[Step]()
    for old in program.steps:
        step = renumbered(old, same)
        if isinstance(step, Assumption) or keep(step, same):
            steps.append(step)
    program.steps = steps
    program.outs = [same.get(n, n) for n in program.outs]
    for number, root in enumerate(program.roots):  # a view lies in the memory of the value kept
        while root in same:
            root = program.roots[same[root]]
        program.roots[number] = root


def _without_detach(program: Program) -> None:
    """Drop detach, since nothing is differentiated. But results stay separate tensors."""
    outs, outside = {*program.outs}, {*program.given, *program.known, *program.fixed}

    def keep(step: Operation, same: dict[int, int]) -> bool:
        if step.function not in _SAME:
            return True
        (mine,), (its,) = step.made, step.reads
        if mine in outs:
            if its in outside | outs:
                return True
            outs.add(its)
        same[mine] = its
        return False

    _filtered(program, keep)


def _folded(program: Program) -> None:
    """Compute constants once."""
    written, values = program.written, {**program.fixed}

    def keep(step: Operation, same: dict[int, int]) -> bool:
        filled = {n: program.filled[n] for n in step.made if n in program.filled}
        is_known = values.keys() >= {*step.reads} and not step.is_random
        if not (filled or is_known) or _is_blank(step):
            return True
        reads = [] if filled else step.reads  # filling reads only the shape of another tensor
        if {program.roots[n] for n in (*reads, *step.made)} & written:
            return True
        found = filled or _run(step, values)
        if any(t.numel() > LARGEST for t in found.values()):
            return True
        values.update(found)
        program.fixed.update(found)
        return False

    _filtered(program, keep)
    program.steps = [
        step
        for step in program.steps
        if isinstance(step, (Operation, Pause))
        or not values.keys() >= {*step.values}
        or written & {program.roots[n] for n in step.values}
    ]


def _run(step: Operation, values: dict[int, Tensor]) -> dict[int, Tensor]:
    def tensor(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.number]
        return [tensor(v) for v in value] if isinstance(value, list) else value

    kwargs = {name: tensor(value) for name, value in step.kwargs.items()}
    with torch.no_grad():
        found = step.function(*map(tensor, step.args), **kwargs)
    pairs = zip(step.outs, [found] if step.is_single else found, strict=True)
    return {number: value for number, value in pairs if number is not None}


def _merged(program: Program) -> None:
    """Compute equal values once; results keep their own memory."""
    written = program.written
    results = {program.roots[n] for n in program.outs}
    known: dict[Any, Operation] = {}

    def keep(step: Operation, same: dict[int, int]) -> bool:
        roots = {program.roots[same.get(n, n)] for n in (*step.reads, *step.made)}
        of_results = results & {program.roots[n] for n in step.made}
        if step.writes or step.is_random or roots & written or of_results or _is_blank(step):
            return True
        first = known.setdefault(_key(step), step)
        if first is step:
            return True
        for mine, its in zip(step.outs, first.outs, strict=True):
            if mine is not None and its is not None:
                same[mine] = its
        return False

    _filtered(program, keep)


def _key(step: Operation) -> Any:
    return step.function, _form(step.args), _form(step.kwargs)


def _form(value: Any) -> Any:
    """Arguments in a form that can be hashed; one, true, and 1.0 differ."""
    if isinstance(value, Ref):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([_form(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _form(item)) for name, item in value.items()])
    return type(value), repr(value)


def drop_unneeded(program: Program) -> None:
    """Drop what no result depends on, except for draws and writes to tensors from outside."""
    outside = {*program.given, *program.known}
    needed, roots = {*program.outs}, {program.roots[n] for n in program.outs}
    steps = list[Step]()
    for step in reversed(program.steps):
        if isinstance(step, Operation):
            changed = {program.roots[n] for n in step.writes}
            is_needed = needed & {*step.made} or changed & (outside | roots) or step.is_random
            if not is_needed:
                continue
        steps.append(step)
        needed.update(step.reads)
        roots |= {program.roots[n] for n in step.reads}
    program.steps = steps[::-1]
    used = {n for step in steps for n in step.reads} | {*program.outs}
    program.known = {n: t for n, t in program.known.items() if n in used}
    program.fixed = {n: t for n, t in program.fixed.items() if n in used}


def _is_blank(step: Operation) -> bool:
    return step.function._schema.name in BLANK
