"""What operations make of the numbers of the samples that entries belong to.

Most operations either keep entries where they are, or put them elsewhere. The latter need not be
known one by one: they are linear, so the transpose of what their node sends back says where entries
go. Those that often work on large tensors are known, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_operations import nodes
from backpack_operations._torch import metadata_of
from backpack_operations.bridge import push
from backpack_operations.own_pass import beside_pass

# For each entry of a tensor the sample that it belongs to, -1 for none. An axis along which all
# entries belong to the same has length one.
Numbers: TypeAlias = Tensor
Given: TypeAlias = dict[int, Numbers | None]  # by position of the operand; ``None`` if unknown
Shape: TypeAlias = tuple[int, ...]
Picks: TypeAlias = Sequence[Tensor | None]


def are_elsewhere(numbers: Numbers) -> bool:
    """Whether a row, an entry of axis 0, has entries of several samples."""
    return numbers.shape[1:].numel() != 1


def along(rows: Tensor, axis: int, shape: Shape) -> Numbers:
    """The numbers of a tensor that has them along one axis."""
    return rows.reshape([-1 if k == axis else 1 for k in range(len(shape))]) if shape else rows[0]


def made(
    node: Node,
    number: int,
    given: Given,
    rows: Tensor,
    is_readable: bool,
    note_read: Callable[[], None],
) -> Numbers | None:
    """What an operation makes of the numbers at its operands; ``None`` where samples may meet.

    Args:
        node: The operation.
        number: Which of its outputs.
        given: The numbers at its operands.
        rows: The sample of each row that the model received.
        is_readable: Whether the tensors that it saved may be read.
        note_read: Called before they are.
    """
    shape, operation = nodes.lengths_of(node, number), nodes.operation_of(node)
    known = {position: n for position, n in given.items() if n is not None}
    if is_readable and len(known) == len(given) and _is_beside_constants(node, known):
        return _carried(node, number, known, rows)
    is_whole = len(known) == len(given) and all(n.numel() == 1 for n in known.values())
    if is_whole and is_readable and _may_leave_room(node, shape, known, len(rows)):
        note_read()
        return _reached(node, number, known, rows)
    if operation in nodes.ELEMENTWISE and known:
        return _met(known, [_behind(node, i) for i in given.keys() - known.keys()], shape)
    if operation not in nodes.VIEWS:  # of operands that do not keep rows, the dye will tell
        kept = [n for i, n in given.items() if nodes.keeps_rows(node, number, i)]
        alike = [n for n in kept if n is not None and not are_elsewhere(n)]
        if alike and len(alike) == len(kept) and all(n.equal(alike[0]) for n in alike):
            return along(alike[0].flatten(), 0, shape)
    if not known or len(known) < len(given):
        return None
    position, first = next(iter(known.items()))
    axes = nodes.axes_along(node, first.dim())
    is_free = all(first.shape[axis] == 1 for axis in axes)
    if axes and is_free and all(n.equal(first) for n in known.values()):
        return first.squeeze(axes[0]) if operation in nodes.SELECTIONS else first
    if first.numel() == 1 and all(n.flatten().equal(first.flatten()) for n in known.values()):
        return along(first.flatten(), 0, shape)  # all of it is of one sample
    if operation in nodes.VIEWS or nodes.hands_on(node):
        return viewed(first, _behind(node, position), shape, rows)
    if operation in nodes.TURNS:
        return first.permute(nodes.order_of(node, len(shape)))
    is_one = not nodes.is_function(node) and _are_of_one(known)
    if not is_readable or not (is_one or operation in nodes.INDEXED | nodes.LINEAR):
        return None
    if not nodes.is_told_by_settings(type(node)):
        note_read()
    if operation in nodes.INDEXED:
        return _picked(first, nodes.picks_of(node), _behind(node, position), rows)
    is_by_rows = len(shape) > 1 and not any(map(are_elsewhere, known.values()))
    if operation == "IndexAdd" and is_by_rows and nodes.axes_of(node) == [0]:
        return _added(known, node._saved_index.cpu(), shape, rows)  # type: ignore[attr-defined]
    if operation in nodes.LINEAR:
        return _carried(node, number, known, rows)
    return _reached(node, number, known, rows)


def _behind(node: Node, position: int) -> Shape:
    """The shape of an operand."""
    child, number = node.next_functions[position]
    return () if child is None else nodes.lengths_of(child, number)


def _are_of_one(known: dict[int, Numbers]) -> bool:
    """Whether all entries that are of a sample are of the same one."""
    one = max((int(n.max()) for n in known.values() if n.numel()), default=-1)
    return one >= 0 and all(bool(((n == one) | (n < 0)).all()) for n in known.values())


def _may_leave_room(node: Node, shape: Shape, known: dict[int, Numbers], samples: int) -> bool:
    """Whether a result may have room for all samples, where only one is known to have a part.

    As where a row of a sample is written into zeros, or into rows of a parameter.
    """
    operation = nodes.operation_of(node)
    if samples < 2 or nodes.is_function(node) or not _are_of_one(known):
        return False
    if operation in nodes.ELEMENTWISE and shape in [_behind(node, i) for i in known]:
        return False
    has_others = len(known) < len(node.next_functions) or operation == "ConstantPadNd"
    return has_others and any(length and not length % samples for length in shape)


def _is_beside_constants(node: Node, known: dict[int, Numbers]) -> bool:
    """Whether a row of one sample is joined with constant rows, which may become those of others.

    So does a recurrent net that goes backwards through sequences of several lengths: it begins with
    the longest, and the others join with their first state. Several rows of a sample that are
    joined with constants are a padded sequence.
    """
    if nodes.operation_of(node) != "Cat" or not 0 < len(known) < len(node.next_functions):
        return False
    shapes = [_behind(node, position) for position in known]
    return all(s[:1] == (1,) and nodes.axes_along(node, len(s)) == [0] for s in shapes)


def shortened(numbers: Tensor, rows: Tensor, is_whole: bool = True) -> Numbers:
    """Numbers with length one along each axis where they are all the same.

    What belongs to no sample, as padding, is that of the others along the axis: a sample alone
    has it.
    Not where these stand where the order of samples puts them: the rest may be that of others.

    Args:
        numbers: For each entry.
        rows: The sample of each row that the model received.
        is_whole: Whether all entries that these were made of are of a sample. Else what is no
            sample's may be that of others, unless another axis has them in their order.
    """
    axes = range(numbers.dim()) if bool((numbers < 0).any()) else ()
    for axis, length in enumerate(numbers.shape):
        first = numbers.amax(axis, keepdim=True) if length > 1 else numbers
        places = [other for other in axes if _is_in_place(numbers, other, rows)]
        is_free = axis not in places and (is_whole or bool(places))
        if length > 1 and bool(((numbers == first) | ((numbers < 0) & is_free)).all()):
            numbers = first
    return numbers


def _are_whole(known: Iterable[Numbers]) -> bool:
    return not any(bool((n < 0).any()) for n in known)


def _is_in_place(numbers: Tensor, axis: int, rows: Tensor) -> bool:
    """Whether an axis leaves room for other samples, before and behind those that it has."""
    is_free = numbers < 0
    if len(rows) < 2 or numbers.shape[axis] % len(rows) or not bool(is_free.any()):
        return False
    count = numbers.shape[axis] // len(rows)
    orders = rows.repeat_interleave(count), rows.repeat(count)
    wanted = (along(order, axis, tuple(numbers.shape)) for order in orders)
    return any(bool((is_free | (numbers == order)).all()) for order in wanted)


def viewed(numbers: Numbers, before: Shape, after: Shape, rows: Tensor) -> Numbers:
    """In the same order of entries: as many leading axes as have different numbers."""
    sizes = [torch.Size(after[:count]).numel() for count in range(len(after) + 1)]
    lead = max((axis + 1 for axis, length in enumerate(numbers.shape) if length != 1), default=0)
    while torch.Size(before[:lead]).numel() not in sizes:
        lead += 1
    count = sizes.index(torch.Size(before[:lead]).numel())
    whole = numbers.reshape(numbers.shape[:lead]).expand(before[:lead]).reshape(after[:count])
    return shortened(_with_axes(whole, len(after) - count), rows, _are_whole([numbers]))


def _with_axes(numbers: Tensor, count: int) -> Numbers:
    """With so many axes of length one behind the others."""
    return numbers.reshape([*numbers.shape, *[1] * count])


def _met(known: dict[int, Numbers], others: list[Shape], shape: Shape) -> Numbers | None:
    """What entries have that were computed from one entry of each operand."""
    wide = [n.reshape([*[1] * (len(shape) - n.dim()), *n.shape]) for n in known.values()]
    parts = torch.broadcast_tensors(*wide)
    found = torch.stack(parts).amax(0)
    if any(bool(((part != found) & (part >= 0)).any()) for part in parts):
        return None
    # What nothing is known of may be anybody's, unless all samples have the same.
    for other in others:
        lengths = (*[1] * (len(shape) - len(other)), *other)
        if any(length != 1 for length, n in zip(lengths, found.shape, strict=True) if n != 1):
            return None
    return found


def _picked(numbers: Numbers, picks: Picks, before: Shape, rows: Tensor) -> Numbers:
    """What indices of leading axes pick; ``None`` among them keeps an axis."""
    count = sum(pick.dim() if pick is not None and _is_mask(pick) else 1 for pick in picks)
    lead = numbers.expand(*before[:count], *numbers.shape[count:])
    chosen = tuple(slice(None) if pick is None else pick.cpu() for pick in picks)
    return shortened(lead[chosen], rows, _are_whole([numbers]))


def _added(known: dict[int, Numbers], index: Tensor, shape: Shape, rows: Tensor) -> Numbers | None:
    """What rows have to which others are added, as experts hand back their tokens.

    The same as :func:`_carried`, without a call of the node.
    """
    nobody = torch.full((1,), -1, device="cpu")
    before = known.get(0, nobody).flatten().expand(shape[0])
    added = known.get(1, nobody).flatten().expand(len(index))
    found = before.clone()
    found[index[added >= 0]] = added[added >= 0]
    is_clear = ((found[index] == added) | (added < 0)).all() & (
        (found == before) | (before < 0)
    ).all()
    if not is_clear:
        return None
    return shortened(along(found, 0, shape), rows, _are_whole(known.values()))


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _reached(node: Node, number: int, given: dict[int, Numbers], rows: Tensor) -> Numbers | None:
    """Where in a result its one sample is: in the entries that depend on what is known."""
    one, random = torch.cat([n.flatten() for n in given.values()]).amax(), _generator()
    whole = {i: n.expand(_behind(node, i)) for i, n in given.items()}
    marks = [lambda numbers: torch.rand(numbers.shape, generator=random, device="cpu")]
    behind = [child for child, _ in node.next_functions if child is not None]
    sent = partial(_sent, node, number, whole, marks)
    try:
        (found,) = beside_pass(sent, behind, metadata_of(node, number).device)
    except (BackpackError, RuntimeError):  # a formula that has no derivative
        is_whole = all(n.numel() == 1 for n in given.values())
        return along(one.reshape(1), 0, nodes.lengths_of(node, number)) if is_whole else None
    is_none = (found == 0) | found.isnan()  # as behind a root of zero
    return shortened(torch.where(is_none, -1, one), rows, _are_whole(given.values()))


def _carried(node: Node, number: int, given: dict[int, Numbers], rows: Tensor) -> Numbers | None:
    """What a linear operation makes of numbers, which are sent through it.

    No coefficient of these operations is negative. So where entries of one sample were added up,
    the number comes as many times as a one does. Other numbers, at random, tell if that is so.
    """
    metadata = metadata_of(node, number)
    if metadata.dtype.is_complex or not all(n.numel() for n in given.values()):
        return None
    base = int(torch.finfo(metadata.dtype).eps ** -0.5)  # so that sums are exact
    most = max(0, *[int(n.max()) for n in given.values()])
    codes = torch.randint(base, (most + 1,), generator=_generator(), device="cpu")
    powers = [base**k for k in range(64) if not k or base**k <= most]
    marks: list[Callable[[Tensor], Tensor]] = [torch.ones_like, codes.__getitem__]
    marks += [partial(_digit, power, base) for power in powers]
    behind = [child for child, _ in node.next_functions if child is not None]
    sent = partial(_sent, node, number, given, marks)
    ones, checks, *digits = beside_pass(sent, behind, metadata.device)
    is_some, ones = ones > 0, torch.where(ones > 0, ones, 1)
    found = torch.zeros_like(ones, dtype=torch.long)
    for power, digit in zip(powers, digits, strict=True):
        found += (digit / ones).round().long() * power
    found = found.clamp(0, most)
    if ((checks - codes[found] * ones).abs() > ones / 4)[is_some].any():
        return None
    is_whole = _are_whole(given.values()) and not _is_beside_constants(node, given)
    return shortened(torch.where(is_some, found, -1), rows, is_whole)


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _digit(power: int, base: int, numbers: Tensor) -> Tensor:
    return numbers // power % base


def _sent(
    node: Node, number: int, given: dict[int, Numbers], marks: list[Callable[[Tensor], Tensor]]
) -> list[Tensor]:
    """What the operation makes of marks: the transpose of what its node sends back."""
    metadata, found = metadata_of(node, number), list[Tensor]()
    with torch.enable_grad():
        w = torch.ones(1, *metadata.shape, dtype=metadata.dtype, device=metadata.device)
        image = push(node, {number: w.requires_grad_()})
        ends = {i: mat for i, mat in image.items() if i in given and mat.requires_grad}
        for mark in marks:
            shown = [torch.where(given[i] < 0, 0, mark(given[i].clamp(min=0))) for i in ends]
            full = [m.to(mat).expand_as(mat) for m, mat in zip(shown, ends.values(), strict=True)]
            (result,) = torch.autograd.grad([*ends.values()], w, full, retain_graph=True)
            found += (result[0].cpu(),)
    return found
