"""Combines states of several processes: they exchange what each has, and add it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, distributed

from backpack_core.errors import BackpackError, UsageError
from backpack_data.processes import ADVICE, FAILED, LostProcessError, failed
from backpack_data.state import LINEAR, State, named
from backpack_data.states import Place, States
from backpack_data.weights import require_proportional
from backpack_products.fingerprint import Fingerprint, agreed
from backpack_products.merging import declaration
from backpack_products.ranks import require_equal

Name = tuple[Place, str]  # place, and part of the value


def reduce(
    states: States, group: distributed.ProcessGroup, gather: bool, plugins: Fingerprint
) -> States:
    """Combine the states of all ranks of a group; every rank gets the result.

    Sums and averages go in one buffer for each dtype.

    Args:
        states: Those of this rank; they are not changed.
        group: The processes.
        gather: Whether values per sample are gathered, or stay on their rank.
        plugins: The plugins that compute on this rank.

    Raises:
        LostProcessError: Another process ended.
        UsageError: Ranks differ in plugins, extensions, parameters or shapes.
    """
    try:
        return _reduce(states, group, gather, plugins)
    except (RuntimeError, distributed.DistBackendError) as error:
        if isinstance(error, BackpackError):
            raise
        raise LostProcessError(
            f"A process of the group ended while results were exchanged: {error}"
        ) from error


def _reduce(states: States, group: Any, gather: bool, plugins: Fingerprint) -> States:
    own = states.numbers(), _described(states), plugins, _common(states, gather)
    found = _told(own, group)
    agreed({f"The results of rank {rank}": said[2] for rank, said in enumerate(found)})
    _require_alike([(said[3], said[1]) for said in found])
    total = States(states.extensions, states.shapes)
    for numbers, *_ in found:
        if not numbers["batches"]:
            continue
        if total.batches:
            if (numbers["normaliser"] is None) != (total.normaliser is None):
                raise UsageError("The loss of one rank is a sum and that of another is a mean.")
            require_proportional(total.ratios, numbers["ratios"])
        total.batches, total.ratios = total.batches + numbers["batches"], numbers["ratios"]
        if numbers["normaliser"] is not None:
            total.normaliser = (total.normaliser or 0.0) + numbers["normaliser"]
        for path, name, seen, samples, _ in numbers["places"]:
            place = path, name
            if place not in total.table:
                extension = next(e for e in states.extensions if e.savefield == name)
                total.table[place] = State(extension)
            total.seen[place] = total.seen.get(place, 0) + seen
            total.table[place].samples += samples
    for state in total.table.values():
        state.normaliser = total.normaliser
    kinds = {name: kind for _, described, *_ in found for name, kind in described.items()}
    _add_up(states, total, kinds, group)
    _put_beside(states, total, kinds, group, gather)
    return total


def _common(states: States, gather: bool) -> dict[str, Any]:
    """What must agree on all ranks, by its name in the message."""
    own: dict[str, Any] = {"The model": {path: [*s] for path, s in states.shapes.items()}}
    own |= {"The list of extensions": named(states.extensions), "gather": gather}
    if states.trained:
        own["The list of trained parameters"] = sorted(states.trained)
    return own


def _require_alike(found: Sequence[tuple[dict[str, Any], dict[Name, Any]]]) -> None:
    """Raise an error, on every rank, unless values of all ranks can be added.

    Raises:
        UsageError: Ranks differ in parameters, in extensions, or in forms of values.
    """
    known: dict[Any, tuple[Any, str]] = {}
    for rank, (common, described) in enumerate(found):
        own: dict[Any, Any] = {name: form for name, form in described.items() if form[0] in LINEAR}
        for name, said in {**common, **own}.items():
            before, first = known.setdefault(name, (said, f"rank {rank}"))
            if said != before:
                word = name if isinstance(name, str) else _value(name)
                one, two = {word: str(before)}, {word: str(said)}
                require_equal(one, two, first, f"rank {rank}", ADVICE)


def _value(name: Name) -> str:
    (path, field), _ = name
    return f"The form of {field!r} of the parameter {path!r}"


@contextmanager
def reported(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Tells the others, which wait in :func:`reduce`, of an error raised inside the block."""
    try:
        yield
    except Exception as error:
        if group is not None:
            with suppress(RuntimeError):
                _objects(f"{FAILED}{type(error).__name__}: {error}", group)
        raise


def _told(mine: Any, group: distributed.ProcessGroup) -> list[Any]:
    """What all ranks say.

    Raises:
        LostProcessError: One of them says that it failed.
    """
    found = _objects(mine, group)
    ranks = distributed.get_process_group_ranks(group)
    for rank, said in zip(ranks, found, strict=True):
        if isinstance(said, str):
            raise failed(rank, said.removeprefix(FAILED))
    return found


def _described(states: States) -> dict[Name, tuple[Any, torch.Size, torch.dtype]]:
    """How each tensor combines, its shape and dtype."""
    found = {}
    for place, state in states.table.items():
        over = declaration(state.extension)
        for key, tensors in state.tensors.items():
            way = over.part(key).way
            word = way if isinstance(way, str) else "function"
            found[place, key] = word, tensors[0].shape, tensors[0].dtype
    return found


def _add_up(states: States, total: States, kinds: dict[Name, Any], group: Any) -> None:
    """All-reduce sums, in one buffer for each dtype; a rank without a value adds zero."""
    names = sorted(name for name, kind in kinds.items() if kind[0] in LINEAR)
    for dtype in dict.fromkeys(kinds[name][2] for name in names):
        own = [name for name in names if kinds[name][2] == dtype]
        device = _device(states, group)
        parts = [_tensor(states, name, kinds[name], device).flatten() for name in own]
        buffer = torch.cat(parts)
        distributed.all_reduce(buffer, group=group)
        pieces = buffer.split([len(part) for part in parts])
        for (place, key), piece in zip(own, pieces, strict=True):
            shape = kinds[place, key][1]
            total.table[place].tensors[key] = [piece.reshape(shape).clone()]


def _put_beside(
    states: States, total: States, kinds: dict[Name, Any], group: Any, gather: bool
) -> None:
    """Combine everything that is not a sum: gather values per sample, compare what must agree."""
    for name in sorted(name for name, kind in kinds.items() if kind[0] not in LINEAR):
        (place, key), (way, *_) = name, kinds[name]
        own = states.table[place].tensors.get(key, []) if place in states.table else []
        if way == "concatenate" and not gather:
            _stay(total, place, key, own)
            continue
        every = [
            tensor for tensors in _objects([t.cpu() for t in own], group) for tensor in tensors
        ]
        every = [tensor.to(_device(states, group)) for tensor in every]
        if way == "same":
            every = every[:1]
        elif way == "function":
            function: Any = declaration(total.table[place].extension).part(key).way
            first, *others = every
            for other in others:
                first = function(first, other)
            every = [first]
        total.table[place].tensors[key] = every


def _stay(total: States, place: Place, key: str, own: list[Tensor]) -> None:
    if own:
        total.table[place].tensors[key] = own
    else:  # no sample on this rank
        total.table.pop(place, None)


def _tensor(states: States, name: Name, kind: Any, device: torch.device) -> Tensor:
    place, key = name
    if place in states.table:
        return states.table[place].tensors[key][0]
    return torch.zeros(kind[1], dtype=kind[2], device=device)


def _device(states: States, group: Any) -> torch.device:
    for state in states.table.values():
        for tensors in state.tensors.values():
            return tensors[0].device
    is_nccl = distributed.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _objects(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found
