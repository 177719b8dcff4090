"""Sample ids: the sample of each entry of a tensor, and what operations make of them.

Most operations either keep entries where they are, or move them. Those that move entries are
linear, and their autograd node is the transpose of the operation. So the transpose of the node says
where entries go, and no table of operations is needed. Common operations have a fast path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import BackpackError
from backpack_operations import nodes
from backpack_operations._torch import CopyNode, metadata_of
from backpack_operations.bridge import push
from backpack_operations.codes import codes
from backpack_operations.own_pass import beside_pass

# For each entry of a tensor the sample that it belongs to, -1 for none. An axis has length one if
# all entries along it belong to the same sample: [N, 1, 1] is a tensor with samples in front.
SampleIds: TypeAlias = Tensor
OperandIds: TypeAlias = dict[int, SampleIds | None]  # by position of the operand; None if unknown
Shape: TypeAlias = tuple[int, ...]


def are_elsewhere(ids: SampleIds) -> bool:
    """Whether a row (an entry of axis 0) has entries of several samples."""
    return ids.shape[1:].numel() != 1


def along(rows: Tensor, axis: int, shape: Shape) -> SampleIds:
    """The ids of a tensor whose samples lie along one axis: ``rows`` are those of its entries."""
    return rows.reshape([-1 if k == axis else 1 for k in range(len(shape))]) if shape else rows[0]


def through_node(
    node: Node,
    output_nr: int,
    operand_ids: OperandIds,
    rows: Tensor,
    is_readable: bool,
    note_read: Callable[[], object],
) -> SampleIds | None:
    """The ids at an output of an operation; ``None`` if unknown, as where samples may meet.

    Args:
        node: The operation.
        output_nr: Which of its outputs.
        operand_ids: The ids at its operands.
        rows: The sample of each row that the model received.
        is_readable: Whether the tensors that the operation saved may be read.
        note_read: Called if the ids depend on values of these tensors.
    """
    shape, operation = nodes.lengths_of(node, output_nr), nodes.operation_of(node)
    known = {position: ids for position, ids in operand_ids.items() if ids is not None}
    is_all = len(known) == len(operand_ids)
    if is_readable and is_all and _is_beside_constants(node, known):
        return _through_linear(node, output_nr, known, rows)
    is_one = is_all and all(ids.numel() == 1 for ids in known.values())
    if is_one and is_readable and _may_have_others(node, shape, known, len(rows)):
        note_read()
        return _depending(node, output_nr, known, rows)
    if operation in nodes.ELEMENTWISE and known:
        unknown = [_operand_shape(node, i) for i in operand_ids.keys() - known.keys()]
        return _combined(known.values(), unknown, shape)
    if operation not in nodes.VIEWS:
        # Operands that do not keep rows are not asked: the dye measures whether samples meet.
        kept = [n for i, n in operand_ids.items() if nodes.keeps_rows(node, output_nr, i)]
        in_rows = [ids for ids in kept if ids is not None and not are_elsewhere(ids)]
        if in_rows and len(in_rows) == len(kept) and all(n.equal(in_rows[0]) for n in in_rows):
            return along(in_rows[0].flatten(), 0, shape)
    if not known or len(known) < len(operand_ids):
        return None
    if operation in nodes.MATRIX_PRODUCTS:
        return _multiplied(known, nodes.FACTORS[operation], shape)
    position, first = next(iter(known.items()))
    if operation in nodes.PAIRS:  # a complex number is a pair of real ones, on one more axis
        return _in_pairs(first, shape)
    axes = nodes.axes_along(node, first.dim())
    is_free = all(first.shape[axis] == 1 for axis in axes)
    if axes and is_free and all(ids.equal(first) for ids in known.values()):
        return first.squeeze(axes[0]) if operation in nodes.SELECTIONS else first
    reduced = nodes.reduced_axes(node, first.dim())
    if reduced and all(first.shape[axis] == 1 for axis in reduced):
        keeps_axes = len(shape) == first.dim()
        return first if keeps_axes else first.squeeze(tuple(reduced))
    if operation in ("Gather", "IndexSelect") and first.dim():
        axis = nodes.axes_of(node)[0]
        if first.shape[axis] == 1:  # whatever is picked along it; fewer entries of other axes
            pairs = zip(shape, first.shape, strict=True)
            return first[tuple(slice(n if m > 1 else 1) for n, m in pairs)]
    if first.numel() == 1 and all(n.flatten().equal(first.flatten()) for n in known.values()):
        return along(first.flatten(), 0, shape)  # all of it is of one sample
    if operation in nodes.VIEWS or nodes.hands_on(node):
        return viewed(first, _operand_shape(node, position), shape, rows)
    if operation in nodes.TURNS:
        return first.permute(nodes.order_of(node, len(shape)))
    is_one = not nodes.is_function(node) and _are_of_one(known.values())
    if not is_readable or not (is_one or operation in nodes.INDEXED | nodes.LINEAR):
        return None
    if not nodes.is_told_by_settings(type(node)):
        note_read()
    if operation in nodes.INDEXED:
        return _picked(first, nodes.picks_of(node), _operand_shape(node, position), rows)
    is_by_rows = len(shape) > 1 and not any(map(are_elsewhere, known.values()))
    if operation == "IndexAdd" and is_by_rows and nodes.axes_of(node) == [0]:
        index = node._saved_index  # type: ignore[attr-defined]
        # It is not saved if constant rows are added, as those of a frozen expert.
        return first if index is None else _added(known, index.cpu(), shape, rows)
    if operation in nodes.LINEAR:
        return _through_linear(node, output_nr, known, rows)
    return _depending(node, output_nr, known, rows)


def packed(node: Node, output_nr: int, operand_ids: OperandIds, rows: Tensor) -> SampleIds | None:
    """The ids where sequences are packed, or steps written into a larger tensor, as in padding.

    Args:
        node: The operation. In place, it may be any; it is linearised at its operands.
        output_nr: Which of its outputs.
        operand_ids: The ids at its operands.
        rows: The sample of each row that the model received.
    """
    known = {position: ids for position, ids in operand_ids.items() if ids is not None}
    if not known or len(known) < len(operand_ids):
        return None
    if type(node) is not CopyNode or 0 not in known:
        return _through_linear(node, output_nr, known, rows)
    ids = _of_entries(node, output_nr, known)
    # What is written over, or does not depend on what was there, stays where it is.
    return None if ids is None else shortened(torch.where(ids < 0, known[0], ids), rows)


def _operand_shape(node: Node, position: int) -> Shape:
    child, output_nr = node.next_functions[position]
    return () if child is None else nodes.lengths_of(child, output_nr)


def _are_of_one(known: Collection[SampleIds]) -> bool:
    """Whether all entries that belong to a sample belong to the same one."""
    one = max((int(ids.max()) for ids in known if ids.numel()), default=-1)
    return one >= 0 and all(bool(((ids == one) | (ids < 0)).all()) for ids in known)


def _may_have_others(node: Node, shape: Shape, known: dict[int, SampleIds], samples: int) -> bool:
    """Whether a result may hold entries of other samples than the one that operands belong to.

    For example where a row of one sample is written into zeros, or into rows of a parameter.
    """
    operation = nodes.operation_of(node)
    if samples < 2 or nodes.is_function(node) or not _are_of_one(known.values()):
        return False
    if operation in nodes.ELEMENTWISE and shape in [_operand_shape(node, i) for i in known]:
        return False
    has_others = len(known) < len(node.next_functions) or operation == "ConstantPadNd"
    return has_others and any(length and not length % samples for length in shape)


def _is_beside_constants(node: Node, known: dict[int, SampleIds]) -> bool:
    """Whether a row of one sample is joined with constant rows, which may become other samples'.

    A recurrent net that goes backwards through sequences of several lengths does so: it begins with
    the longest, and the others join with their first state. If several rows of a sample are joined
    with constants, they are a padded sequence. A row may also be written into constants in place.
    """
    if type(node) is CopyNode and node.next_functions[0][0] is None:
        return bool(known) and _are_of_one(known.values())
    if nodes.operation_of(node) != "Cat" or not 0 < len(known) < len(node.next_functions):
        return False
    shapes = [_operand_shape(node, position) for position in known]
    return all(s[:1] == (1,) and nodes.axes_along(node, len(s)) == [0] for s in shapes)


def from_data(node: Node, position: int, ids: SampleIds) -> SampleIds | None:
    """The ids at the result of an operation of parameters and data, from those of the data."""
    operation, shape = nodes.operation_of(node), nodes.lengths_of(node, 0)
    if operation in nodes.MATRIX_PRODUCTS:
        return _multiplied({position: ids}, nodes.FACTORS[operation], shape)
    if operation in nodes.ELEMENTWISE:
        return _combined([ids], [], shape)
    return ids.reshape(*ids.shape, *[1] * (len(shape) - ids.dim()))  # an index of rows


# Fast paths ---------------------------------------------------------------------------------------


def shortened(ids: Tensor, rows: Tensor, is_whole: bool = True) -> SampleIds:
    """Reduce each axis along which all ids are the same to length one.

    Entries of no sample (padding) count as those of the only sample along the axis. They do not
    where they may be the place of other samples: where the known ones stand as their order says.

    Args:
        ids: The id of each entry.
        rows: The sample of each row that the model received.
        is_whole: Whether every entry of the operands belongs to a sample. If not, entries of no
            sample are other samples' as well, unless another axis has the samples in order.
    """
    axes = range(ids.dim()) if bool((ids < 0).any()) else ()
    is_whole |= bool(axes) and bool((rows == rows[:1]).all())  # there are no other samples
    for axis, length in enumerate(ids.shape):
        first = ids.amax(axis, keepdim=True) if length > 1 else ids
        in_order = [other for other in axes if _is_in_order(ids, other, rows)]
        is_free = axis not in in_order and (is_whole or bool(in_order))
        if length > 1 and bool(((ids == first) | ((ids < 0) & is_free)).all()):
            ids = first
    return ids


def _are_whole(known: Collection[SampleIds]) -> bool:
    """Whether all entries belong to samples."""
    return not any(bool((ids < 0).any()) for ids in known)


def _is_in_order(ids: Tensor, axis: int, rows: Tensor) -> bool:
    """Whether some samples lie along an axis in order, and entries of none where others would."""
    is_none = ids < 0
    if len(rows) < 2 or ids.shape[axis] % len(rows) or not bool(is_none.any()):
        return False
    count = ids.shape[axis] // len(rows)
    orders = rows.repeat_interleave(count), rows.repeat(count)
    expected = (along(order, axis, tuple(ids.shape)) for order in orders)
    return any(bool((is_none | (ids == order)).all()) for order in expected)


def viewed(ids: SampleIds, before: Shape, after: Shape, rows: Tensor) -> SampleIds:
    """The ids behind a reshape from one shape to another, which keeps the order of entries."""
    # As many leading axes are reshaped as have different ids; the others keep length one.
    sizes = [torch.Size(after[:count]).numel() for count in range(len(after) + 1)]
    lead = max((axis + 1 for axis, length in enumerate(ids.shape) if length != 1), default=0)
    while torch.Size(before[:lead]).numel() not in sizes:
        lead += 1
    count = sizes.index(torch.Size(before[:lead]).numel())
    whole = ids.reshape(ids.shape[:lead]).expand(before[:lead]).reshape(after[:count])
    return shortened(whole[(..., *[None] * (len(after) - count))], rows, _are_whole([ids]))


def _combined(known: Collection[SampleIds], unknown: list[Shape], shape: Shape) -> SampleIds | None:
    """The ids of entries that were each computed from one entry of each operand.

    Args:
        known: The ids of operands.
        unknown: The shapes of the operands whose ids are unknown.
        shape: The shape of the result.
    """
    wide = [ids.reshape([*[1] * (len(shape) - ids.dim()), *ids.shape]) for ids in known]
    parts = torch.broadcast_tensors(*wide)
    combined = torch.stack(parts).amax(0)
    if any(bool(((part != combined) & (part >= 0)).any()) for part in parts):
        return None
    # An unknown operand may be any sample's, unless it is broadcast along the axes of the samples.
    for other in unknown:
        lengths = (*[1] * (len(shape) - len(other)), *other)
        if any(length != 1 for length, n in zip(lengths, combined.shape, strict=True) if n != 1):
            return None
    return combined


def _multiplied(known: dict[int, SampleIds], factors: Sequence[int], shape: Shape) -> Tensor | None:
    """The ids of a product of matrices, ``[*, i, k] × [*, k, j] → [*, i, j]``.

    Args:
        known: The ids of its operands that have samples.
        factors: The positions of the two factors; another operand is added to the product.
        shape: The shape of the result.
    """
    summed = dict(zip(factors, (-1, -2), strict=True))
    if any(ids.shape[summed[i]] > 1 for i, ids in known.items() if i in summed):
        return None  # samples meet
    return _combined(known.values(), [], shape)


def _in_pairs(ids: SampleIds, shape: Shape) -> SampleIds | None:
    """The ids where numbers with a last axis become complex, or complex ones get such an axis."""
    if len(shape) > ids.dim():
        return ids.unsqueeze(-1)
    return ids.squeeze(-1) if ids.shape[-1] == 1 else None


def _picked(
    ids: SampleIds, picks: Sequence[Tensor | None], before: Shape, rows: Tensor
) -> SampleIds:
    """The ids of what indices of leading axes pick; a ``None`` among them keeps an axis."""
    is_mask = [pick is not None and pick.dtype in (torch.bool, torch.uint8) for pick in picks]
    count = sum(
        pick.dim() if pick is not None and m else 1 for pick, m in zip(picks, is_mask, strict=True)
    )
    lead = ids.expand(*before[:count], *ids.shape[count:])
    index = tuple(slice(None) if pick is None else pick.cpu() for pick in picks)
    return shortened(lead[index], rows, _are_whole([ids]))


def _added(
    known: dict[int, SampleIds], index: Tensor, shape: Shape, rows: Tensor
) -> SampleIds | None:
    """The ids where an index adds rows to others, as experts hand back their tokens.

    The same as :func:`_through_linear`, without a call of the node.
    """
    nobody = torch.full((1,), -1, device="cpu")
    before = known.get(0, nobody).flatten().expand(shape[0])
    added = known.get(1, nobody).flatten().expand(len(index))
    ids = before.clone()
    ids[index[added >= 0]] = added[added >= 0]
    are_kept = ((ids == before) | (before < 0)).all()
    if not bool(((ids[index] == added) | (added < 0)).all() & are_kept):
        return None
    return shortened(along(ids, 0, shape), rows, _are_whole(known.values()))


# Any operation: marks are sent through it ---------------------------------------------------------


def _depending(
    node: Node, output_nr: int, known: dict[int, SampleIds], rows: Tensor
) -> SampleIds | None:
    """The ids if all operands are of one sample: it has the entries that depend on them."""
    one = torch.cat([ids.flatten() for ids in known.values()]).amax()
    whole = {i: ids.expand(_operand_shape(node, i)) for i, ids in known.items()}
    first = itertools.count(0, 2**40)  # other codes for each operand
    marks = [lambda ids: codes(ids.numel(), next(first)).reshape(ids.shape) / 2**63]
    try:
        (result,) = _pushed(node, output_nr, whole, marks)
    except (BackpackError, RuntimeError):  # a formula that has no derivative
        is_one = all(ids.numel() == 1 for ids in known.values())
        return along(one.reshape(1), 0, nodes.lengths_of(node, output_nr)) if is_one else None
    is_none = (result == 0) | result.isnan()  # nan: as of a root of zero
    return shortened(torch.where(is_none, -1, one), rows, _are_whole(known.values()))


def _through_linear(
    node: Node, output_nr: int, known: dict[int, SampleIds], rows: Tensor
) -> SampleIds | None:
    """The ids behind a linear operation."""
    ids = _of_entries(node, output_nr, known)
    is_whole = _are_whole(known.values()) and not _is_beside_constants(node, known)
    return None if ids is None else shortened(ids, rows, is_whole)


def _of_entries(node: Node, output_nr: int, known: dict[int, SampleIds]) -> Tensor | None:
    """The id of each entry behind a linear operation, through which ids are sent, digit by digit.

    If all summands of an entry have one id, the ids sum to ``id · Σ coefficients``, and ones sum to
    ``Σ coefficients``. Random codes of the samples tell whether that was so; ``None`` if not. It is
    -1 where the coefficients are zero.
    """
    metadata = metadata_of(node, output_nr)
    known = {position: ids for position, ids in known.items() if ids.numel()}
    if metadata.dtype.is_complex or not known:
        return None
    base = int(torch.finfo(metadata.dtype).eps ** -0.5)  # so that sums of digits are exact
    last = max(0, *[int(ids.max()) for ids in known.values()])
    code = codes(last + 1) % base
    powers = [base**k for k in range(64) if not k or base**k <= last]
    marks: list[Callable[[Tensor], Tensor]] = [torch.ones_like, code.__getitem__]
    marks += [partial(_digit, power, base) for power in powers]
    ones, checks, *digits = _pushed(node, output_nr, known, marks)
    is_some, ones = (ones != 0) | (checks != 0), torch.where(ones == 0, 1, ones)
    ids = torch.zeros_like(ones, dtype=torch.long)
    for power, digit in zip(powers, digits, strict=True):
        ids += (digit / ones).round().long() * power
    ids = ids.clamp(0, last)
    if ((checks - code[ids] * ones).abs() > ones.abs() / 4)[is_some].any():
        return None
    return torch.where(is_some, ids, -1)


def _digit(power: int, base: int, ids: Tensor) -> Tensor:
    return ids // power % base


def _pushed(
    node: Node,
    output_nr: int,
    known: dict[int, SampleIds],
    marks: Sequence[Callable[[Tensor], Tensor]],
) -> list[Tensor]:
    """What the operation makes of several marks of ids: the transpose of its node.

    Args:
        node: The operation; linear, or else it is linearised at its operands.
        output_nr: Which of its outputs.
        known: The ids at operands; entries of no sample send zero, as all other operands do.
        marks: Functions of ids; one result for each.
    """
    metadata = metadata_of(node, output_nr)

    def transposed() -> list[Tensor]:
        results = list[Tensor]()
        with torch.enable_grad():
            w = torch.ones(1, *metadata.shape, dtype=metadata.dtype, device=metadata.device)
            image = push(node, {output_nr: w.requires_grad_()})
            ends = {i: mat for i, mat in image.items() if i in known and mat.requires_grad}
            for mark in marks:
                sent = [torch.where(known[i] < 0, 0, mark(known[i].clamp(min=0))) for i in ends]
                full = [
                    m.to(mat).expand_as(mat) for m, mat in zip(sent, ends.values(), strict=True)
                ]
                (result,) = torch.autograd.grad([*ends.values()], w, full, retain_graph=True)
                results += (result[0].cpu(),)
        return results

    behind = [child for child, _ in node.next_functions if child is not None]
    return beside_pass(transposed, behind, metadata.device)
