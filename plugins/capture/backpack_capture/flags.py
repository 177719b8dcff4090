"""A program without reads: its assumptions become one more result, a flag.

Compiled code cannot stop on the way. So it runs to its end, and returns one truth value: whether a
value differs from the one that Python had read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backpack_capture.compiled import NotCompiled
from backpack_capture.program import Assumption, Operation, Program, Ref, Step

aten = torch.ops.aten


def flagged(program: Program, device: torch.device) -> Program:
    """The same program, with operations instead of its assumptions.

    Args:
        program: The program.
        device: Where it computes.

    Returns:
        A program whose last result is the flag, if ``program`` assumes anything.

    Raises:
        NotCompiled: A shape depends on values.
    """
    found = replace(program, steps=list[Step](), outs=[*program.outs])
    found.fixed, found.roots = {**program.fixed}, [*program.roots]
    flags = list[Ref]()
    for step in program.steps:
        if isinstance(step, Operation):
            found.steps.append(step)
        else:
            flags.append(_flag(found, step, device))
    if flags:
        flag = _call(found, aten.any.default, _call(found, aten.stack.default, flags))
        found.outs.append(flag.number)
    return found


def _flag(program: Program, step: Assumption, device: torch.device) -> Ref:
    """Whether Python would read something else now."""
    value = Ref(step.values[0])
    if step.what == "shape":
        raise NotCompiled("the shape of a tensor depends on values, as for a mask as an index")
    if step.what == "equal":
        differ = _call(program, aten.ne.Tensor, value, Ref(step.values[1]))
        flag = _call(program, aten.any.default, differ)
        return flag if step.answer else _call(program, aten.logical_not.default, flag)
    if step.what == "tolist":
        known = Ref(program.new())
        program.fixed[known.number] = torch.tensor(step.answer, device=device)
        return _call(program, aten.any.default, _call(program, aten.ne.Tensor, value, known))
    if step.answer != step.answer:  # NaN: only this differs from itself
        differ = _call(program, aten.eq.Tensor, value, value)
    else:
        differ = _call(program, aten.ne.Scalar, value, step.answer)
    return _call(program, aten.any.default, differ)


def _call(program: Program, function: Any, *args: Any) -> Ref:
    result = Ref(program.new())
    program.steps.append(Operation(function, args, {}, (result.number,), True))
    return result
