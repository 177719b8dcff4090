"""A recorded step: operations on numbered values, and what they assume. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

# What these operations return is not written yet.
BLANK: Final = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
    *("aten::new_empty", "aten::new_empty_strided"),
}


class Ref(NamedTuple):
    """A value, by its number."""

    number: int


class Geometry(NamedTuple):
    """Where the entries of a tensor lie in its memory, and what they are."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of torch.

    Attributes:
        function: The overload that was called.
        args: Its arguments, with a :class:`Ref` instead of each tensor.
        kwargs: Its keyword arguments, likewise.
        outs: The numbers of its results; ``None`` for a result that is not a tensor.
        is_single: Whether it returned one value, not several.
        writes: The values that it overwrites.
        is_random: Whether it draws random numbers.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    is_single: bool
    writes: tuple[int, ...] = ()
    is_random: bool = False

    @cached_property
    def reads(self) -> list[int]:
        """The values among the arguments."""
        return [ref.number for ref in refs_in((self.args, self.kwargs))]

    @cached_property
    def made(self) -> list[int]:
        """The values that it makes, without arguments that it returns."""
        got = set(self.reads)
        return [n for n in self.outs if n is not None and n not in got]


@dataclass(frozen=True, eq=False)
class Assumption:
    """What Python read from values when the step was recorded, and must read again.

    Attributes:
        what: What was read: a tensor's only number, all its numbers, equality of two, or a shape.
        values: The values that were read.
        answer: The result.
    """

    what: Literal["item", "tolist", "equal", "shape", "pause"]
    values: tuple[int, ...]
    answer: Any

    @property
    def reads(self) -> list[int]:
        """The values that were read."""
        return [*self.values]


@dataclass(frozen=True, eq=False)
class Pause(Assumption):
    """A place where a program hands over its results, and waits for more tensors.

    Attributes:
        answer: The number of the pause, from zero.
        values: The results.
    """


Step = Operation | Assumption


@dataclass
class Program:
    """All of a step.

    Attributes:
        given: The values that differ from step to step: the tensors among the arguments.
        known: Tensors such as parameters: always the same objects, but with other numbers.
        fixed: Tensors with the same numbers in every step.
        filled: Results of operations that fill a tensor of another one's shape.
        steps: The steps, in order.
        large: Shapes of large results, if their operations can write into existing memory.
        geometry: Where the results of operations lie, except for those that negate their memory.
        outs: The results.
        fields: Which results are fields of parameters.
        roots: For each value, the value whose memory it shares.
    """

    given: list[int] = field(default_factory=list)
    known: dict[int, Tensor] = field(default_factory=dict)
    fixed: dict[int, Tensor] = field(default_factory=dict)
    filled: dict[int, Tensor] = field(default_factory=dict)
    large: dict[int, tuple[int, ...]] = field(default_factory=dict)
    geometry: dict[int, Geometry] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)
    fields: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)

    def new(self, root: int | None = None) -> int:
        """The number of another value, in the memory of ``root``."""
        number = len(self.roots)
        self.roots.append(number if root is None else root)
        return number

    def is_constant(self, number: int) -> bool:
        """Whether a value is the same in every step, because it does not depend on the outside.

        Drawn values, and values that were written to, count as dependent.
        """
        varying = {self.roots[n] for n in (*self.given, *self.known)}
        for step in self.operations:
            if step.is_random or not varying.isdisjoint([self.roots[n] for n in step.reads]):
                varying.update([self.roots[n] for n in (*step.made, *step.writes)])
        return self.roots[number] not in varying

    @property
    def operations(self) -> list[Operation]:
        """The operations."""
        return [step for step in self.steps if isinstance(step, Operation)]

    @property
    def assumptions(self) -> list[Assumption]:
        """The assumptions."""
        return [step for step in self.steps if isinstance(step, Assumption)]

    @property
    def written(self) -> set[int]:
        """The roots of overwritten values. Values from outside may share their memory."""
        found = {self.roots[n] for op in self.operations for n in op.writes}
        outside = {*self.given, *self.known}
        return found | outside if found & outside else found

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return any(op.is_random for op in self.operations)


def refs_in(value: Any) -> Iterator[Ref]:
    """Every reference in nested arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        yield from refs_in([*value.values()])


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested arguments with another value for each one that is not a container."""
    if isinstance(value, (list, tuple)) and not isinstance(value, Ref):
        return [replaced(item, function) for item in value]
    if isinstance(value, dict):
        return {name: replaced(item, function) for name, item in value.items()}
    return function(value)


def renumbered(step: Step, same: dict[int, int]) -> Step:
    """A step with some values replaced by others.

    Args:
        step: The step.
        same: The new value for each value that is replaced.
    """
    if not same or same.keys().isdisjoint(step.reads):
        return step
    if isinstance(step, Assumption):
        return replace(step, values=tuple([same.get(n, n) for n in step.values]))

    def other(value: Any) -> Any:
        return Ref(same.get(value.number, value.number)) if isinstance(value, Ref) else value

    args, kwargs = tuple(replaced(step.args, other)), replaced(step.kwargs, other)
    outs = tuple([n if n is None else same.get(n, n) for n in step.outs])
    writes = tuple([same.get(n, n) for n in step.writes])
    return Operation(step.function, args, kwargs, outs, step.is_single, writes, step.is_random)


def numbers(values: Sequence[int | None]) -> list[int]:
    """The numbers that are not ``None``."""
    return [n for n in values if n is not None]
