"""Writes a program as Python, and compiles it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from backpack_capture.program import Assumption, Operation, Program, Ref, Step
from backpack_products.recycled import take

# Torch's own bindings parse arguments faster than overloads do. These names mean the same there.
_OF_TORCH: Final = """
    mm bmm addmm baddbmm mul add sub div sum mean t unsqueeze transpose permute squeeze select clone
    as_strided relu sigmoid tanh exp log sqrt rsqrt square pow abs neg reciprocal sin cos where cat
    stack clamp maximum minimum eq ne gt lt ge le amax amin flip sort cumsum logcumsumexp
    _log_softmax
"""
_BINDINGS: Final = {
    **{f"aten::{name}": f"torch.{name}" for name in _OF_TORCH.split()},
    **{f"aten::{name}": f"torch.Tensor.{name}" for name in ("view", "expand")},
    "aten::_unsafe_view": "torch.Tensor.view",
    "aten::linalg_vector_norm": "torch.linalg.vector_norm",
}


class AnotherAnswer(Exception):
    """A value differs from the one that Python read when the step was recorded."""


@dataclass(frozen=True)
class Code:
    """A program in Python.

    Attributes:
        run: Takes the tensors among the arguments, and returns the results.
        text: The source.
    """

    run: Callable[..., Sequence[Tensor]]
    text: str


def code_of(program: Program, names: Mapping[int, str]) -> Code:
    """Write a program as a function.

    Args:
        program: The program.
        names: The names of tensors from outside, by ``id``.
    """
    writer = _Writer(program, names)
    text = writer.text()
    exec(compile(text, "<captured step>", "exec"), writer.known)
    return Code(writer.known["step"], text)


def pausing(program: Program, received: Sequence[Sequence[int]]) -> Code:
    """Write a program with pauses as a generator: it yields results, and receives more tensors.

    Args:
        program: The program; its last step is a :class:`Pause`.
        received: The values that it receives before the first pause, then before the second, ….
    """
    writer = _PausingWriter(program, {})
    writer.received = received
    text = writer.text()
    exec(compile(text, "<recorded visits>", "exec"), writer.known)
    return Code(writer.known["step"], text)


class _Writer:
    """Gives names to values, and deletes them as early as possible."""

    def __init__(self, program: Program, names: Mapping[int, str]) -> None:
        self._program = program
        self.known: dict[str, Any] = {"torch": torch, "device": torch.device}
        self.known.update(inf=float("inf"), nan=float("nan"), AnotherAnswer=AnotherAnswer)
        self.known["take"] = take
        self._names = {n: f"given_{place}" for place, n in enumerate(program.given)}
        for number, tensor in program.known.items():
            self._names[number] = self._know(names.get(id(tensor), "outside"), tensor)
        self._lines: list[str] = []
        self._begin_fixed()

    def _begin_fixed(self) -> None:
        program, written = self._program, self._program.written
        shown = written | {program.roots[n] for n in program.outs}
        for number, tensor in program.fixed.items():
            name = self._know("fixed", tensor)
            if program.roots[number] in shown:  # results and overwritten values are new each time
                self._names[number] = f"v{number}"
                self._lines.append(f"v{number} = {name}.clone()")
            else:
                self._names[number] = name

    def text(self) -> str:
        """The source."""
        program = self._program
        kept = self._kept
        last = {n: place for place, step in enumerate(program.steps) for n in _of(step)}
        for place, step in enumerate(program.steps):
            if isinstance(step, Operation):
                self._write(step)
            else:
                self._assume(step)
            ended = [n for n in dict.fromkeys(_of(step)) if last[n] == place and n not in kept]
            local = [self._names[n] for n in ended if self._names[n] not in self.known]
            if local:
                self._lines.append(f"del {', '.join(local)}")
        return "\n    ".join(self._framed()) + "\n"

    @property
    def _kept(self) -> set[int]:
        """The values that keep their names to the end."""
        return {*self._program.outs, *self._program.known}

    def _framed(self) -> list[str]:
        given = ", ".join([self._names[n] for n in self._program.given])
        return [f"def step({given}):", *self._lines, f"return ({self._all(self._program.outs)})"]

    def _all(self, numbers: Sequence[int]) -> str:
        return "".join([f"{self._names[n]}, " for n in numbers])

    def _write(self, step: Operation) -> None:
        schema = step.function._schema
        name = _BINDINGS.get(schema.name, "")
        is_plain = bool(name) and _takes_the_same(step)
        if not is_plain:
            overload = schema.overload_name or "default"
            name = f"{schema.name.removeprefix('aten::').replace('::', '_')}_{overload}"
            self.known[name] = step.function._op
        given = [self._show(value) for value in step.args]
        given += [f"{key}={self._show(value)}" for key, value in step.kwargs.items()]
        if is_plain and (shape := self._large(step)):
            given.append(f"out=take({given[0]}, {shape})")
        call, made = f"{name}({', '.join(given)})", {*step.made}
        if not made:
            self._lines.append(call)
            return
        for number in made:
            self._names[number] = f"v{number}"
        targets = [self._names[n] if n in made else "_" for n in step.outs]
        left = targets[0] if step.is_single else ", ".join(targets) + ","
        self._lines.append(f"{left} = {call}")

    def _large(self, step: Operation) -> tuple[int, ...] | None:
        """The shape of a large result, which may use the memory of the result that it replaces."""
        made, roots = step.made[0] if step.made else -1, self._program.roots
        outs, fields = self._program.outs, self._program.fields
        is_field = made >= 0 and roots[made] in {roots[outs[place]] for place in fields}
        return self._program.large.get(made) if is_field else None

    def _assume(self, step: Assumption) -> None:
        names = [self._names[n] for n in step.values]
        if step.what == "equal":
            condition = f"torch.equal({', '.join(names)}) is not {step.answer}"
        elif step.what == "shape":
            found = " and ".join(
                f"{name}.shape == {shape}" for name, shape in zip(names, step.answer, strict=True)
            )
            condition = f"not ({found})"
        else:
            read = f"{names[0]}.{step.what}()"
            is_nan = step.answer != step.answer
            condition = f"{read} == {read}" if is_nan else f"{read} != {self._show(step.answer)}"
        self._lines += [f"if {condition}:", "    raise AnotherAnswer"]

    def _show(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._names[value.number]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._show, value))}]"
        return repr(value)

    def _know(self, name: str, value: Any) -> str:
        name = re.sub(r"\W", "_", name)
        while name in self.known:
            name += "_"
        self.known[name] = value
        return name


class _PausingWriter(_Writer):
    """Writes a generator."""

    received: Sequence[Sequence[int]] = ()

    @property
    def _kept(self) -> set[int]:
        """Not yielded values: their parameters hold them as long as they are needed."""
        return {*self._program.known}

    def _framed(self) -> list[str]:
        return ["def step():", self._sent(0), *self._lines]

    def _assume(self, step: Assumption) -> None:
        self._lines.append(self._sent(step.answer + 1, f" ({self._all(step.values)})"))

    def _sent(self, number: int, found: str = "") -> str:
        names = self._all(self.received[number]) if number < len(self.received) else ""
        return f"{names}= yield{found}" if names else f"yield{found}"


def _of(step: Step) -> list[int]:
    return step.reads if isinstance(step, Assumption) else [*step.reads, *step.made]


def _takes_the_same(step: Operation) -> bool:
    """Whether the binding takes the arguments as the operation has them."""
    arguments = step.function._schema.arguments
    is_positional = not any(a.kwarg_only for a in arguments[: len(step.args)])
    return (
        is_positional and step.kwargs.keys() <= {"dtype"} and isinstance(step.args[0], (Ref, list))
    )
