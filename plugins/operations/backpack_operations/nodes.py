"""The properties of autograd's nodes by their type, from the tables beside this file.

Only nodes of torch's own operations are looked up, since a Python ``autograd.Function`` may have
any name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from backpack_core._torch import Node, has_memory
from backpack_core.graph import is_leaf
from backpack_operations import _torch
from backpack_operations._torch import metadata_of, node_type, operations
from backpack_products.values import is_symbolic

NodeOutput: TypeAlias = tuple[Node, int]  # a tensor of a graph: its node, and the output number


def _lines(name: str) -> list[str]:
    """The lines of a table, without comments, continued lines joined."""
    text = (files("backpack_operations") / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return text.replace("\n ", " ").split("\n")


# The properties of each operation, from ``operations.txt``, which explains them.
_PROPERTIES = {
    operation: frozenset(properties.split())
    for properties, _, operations in (line.partition(":") for line in _lines("operations.txt"))
    for operation in operations.split()
}


def _with(*properties: str) -> frozenset[str]:
    """The operations that have at least one of some properties."""
    return frozenset(name for name, has in _PROPERTIES.items() if not has.isdisjoint(properties))


LINEAR, PIECEWISE_LINEAR, QUOTIENTS = _with("linear"), _with("piecewise"), _with("quotient")
ELEMENTWISE, VIEWS, TURNS, SELECTIONS = map(_with, ("elementwise", "view", "turn", "selection"))
GATHERS, SCATTERS, IMAGES = _with("gather"), _with("scatter"), _with("image")
REDUCTIONS, SPREADS = _with("reduction"), _with("spread")
_ALONG, _LOSSES, _OF_SEVERAL = _with("along"), _with("loss"), _with("of_several")
# Operations that may pick some entries of axis 0; all others of their results keep whole rows.
PICKS = SELECTIONS | {"Index", "IndexSelect", "Slice", "Split", "SplitWithSizes"}
INDEXED = {"Index", "IndexSelect"}
# Operations that may put other rows on axis 0.
MOVES = TURNS | GATHERS | PICKS | {"Stack", "Cat", "Flip", "Roll", "Repeat", "Expand"}
MOVES |= {"SelectBackward", "SliceBackward"}
SAME_AXES = _ALONG - TURNS - GATHERS - _with("selection", "reduction")
_OF_ONE = _with("of_one", "view")
# Their formula returns the gradient itself. No operator in torch's database makes such a node.
_IDENTITIES = {"Alias"}
_LAYER_NORMS = {"NativeLayerNorm", "NativeLayerNormBackward"}
# The position of the only operand whose rows are those of the result.
_ROW_FACTOR = {"Mm": 0, "Addmm": 1, "Convolution": 0, "NativeGroupNorm": 0, "Cdist": 0}
# Operations whose entry ``i`` of axis 0 depends on entry ``i`` of an operand of the same length.
ROW_BY_ROW = _with("elementwise", "attention") | {
    "Bmm",
    "Baddbmm",
    "Expand",
    "Repeat",
    "GridSampler2D",
    "GridSampler3D",
    *_ROW_FACTOR,
}
# The names of the factors that products save, by position.
_FACTORS_SAVED = {
    "Mm": {0: "self", 1: "mat2"},
    "Bmm": {0: "self", 1: "mat2"},
    "Addmm": {1: "mat1", 2: "mat2"},
    "Baddbmm": {1: "batch1", 2: "batch2"},
    "Mul": {0: "self", 1: "other"},
}
# Products, which are linear if one factor is constant; the positions of the two factors.
FACTORS = dict.fromkeys(
    ["Mul", "Mm", "Bmm", "Mv", "Dot", "Matmul", "Linear", "Convolution"], (0, 1)
)
FACTORS |= dict.fromkeys(["Addmm", "Baddbmm", "Addmv", "Addcmul"], (1, 2))

MATRIX_PRODUCTS = {"Mm", "Addmm", "Bmm", "Baddbmm"}
PAIRS = {"ViewAsComplex", "ViewAsReal"}

# Options of look-ups that make of their gradient something else than a derivative.
_OF_LOOKUPS = ("scale_grad_by_freq", "sparse")

# The settings (not tensors or sizes) that operations save and our decisions depend on.
_SAVED = (
    *("dim", "dim0", "dim1", "dim2", "dims", "dimension", "self_dim", "source_dim", "sumdim"),
    *("axis", "start", "step", "offset", "shifts", "stride", "storage_offset", "pad", "reverse"),
    *("training", "train", "update", "group", "groups", "transposed", "output_padding"),
    *("kernel_size", "padding", "dilation", "ceil_mode", "count_include_pad"),
    *("upscale_factor", "downscale_factor", "left", "transpose", "adjoint", "diagonal"),
    *_OF_LOOKUPS,
)
# Settings of which only the number of axes counts, and not the sizes.
_COUNTED = ("normalized_shape",)


# Settings that follow from shapes, or that do not say where rows go.
_OF_SHAPES = {
    *("end", "keepdim", "last_dim_size", "normalization", "onesided", "repeats"),
    *("size", "split_size", "split_sizes"),
}


# All that the decorator returns share their code.
_MARK = once_differentiable(lambda ctx: None).__code__


def is_function(node: Node) -> bool:
    """Whether a node is that of a Python ``autograd.Function``."""
    return isinstance(node, BackwardCFunction)


def may_act(node: Node) -> bool:
    """Whether calling a node once more may have side effects.

    A Python function may do anything. The formula of a custom operator must not depend on global
    state or change it: ``torch.library.register_autograd`` requires that.
    """
    if not is_function(node) or hands_on(node):
        return False
    return not _torch.is_operator(type(node)) or differentiates_once(node)


def differentiates_once(node: Node) -> bool:
    """Whether a function's ``backward`` is marked ``once_differentiable``, which cuts its graph.

    Torch's linear cross entropy in chunks has no mark, but computes gradients in the forward pass,
    and gives them away.
    """
    if _torch.is_operator(type(node)) and "linear_cross_entropy" in node.name():
        return True
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    return getattr(backward, "__code__", None) is _MARK


def wanted_inputs(node: Node) -> list[bool]:
    """For each input of a node: whether the current backward pass needs its gradient."""
    children = [child for child, _ in node.next_functions]
    return [child is not None and _torch.will_get_to(child) for child in children]


def is_compiled(node: Node) -> bool:
    """Whether a node is a part of the graph that ``torch.compile`` compiled."""
    return is_function(node) and hasattr(getattr(node, "_forward_cls", None), "compiled_bw")


def hands_on(node: Node) -> bool:
    """Whether a node returns its gradient unchanged, with side effects; see ``_torch``."""
    return _torch.hands_on(type(node))


def is_nested(node: Node) -> bool:
    """Whether an output of a node is a nested tensor."""
    return bool(node._input_metadata[0].is_nested_tensor)


def shape_of(node: Node, output_nr: int) -> torch.Size:
    """The shape of an output of a node."""
    return torch.Size(lengths_of(node, output_nr))


def lengths_of(node: Node, output_nr: int) -> tuple[int, ...]:
    """The shape of an output of a node as a plain tuple, which is much faster."""
    return tuple(metadata_of(node, output_nr).shape)


def zeros_at(node: Node, output_nr: int, *lead: int) -> Tensor:
    """Zeros ``[*lead, *shape]`` for the shape of an output of a node."""
    metadata = metadata_of(node, output_nr)
    shape = (*lead, *metadata.shape)
    return torch.zeros(shape, dtype=metadata.dtype, device=metadata.device)


def filled(node: Node, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients at all outputs of a node, with zeros for those that are undefined."""
    return [
        zeros_at(node, output_nr) if gradient is None else gradient
        for output_nr, gradient in enumerate(gradients)
    ]


def operation_of(node: Node) -> str:
    """The name of a torch operation (``AddBackward0`` is ``Add``); empty for all other nodes."""
    return operations().get(type(node), "")


def settings_of(node: Node) -> list[object]:
    """The settings that an operation saved, such as axes; plans compare them."""
    kind = type(node)
    values = [getattr(node, name) for name in setting_names(kind)]
    found = [tuple(value) if isinstance(value, (list, tuple)) else value for value in values]
    return found + [len(getattr(node, name)) for name in _counted_names(kind)]


@cache
def _counted_names(kind: type) -> tuple[str, ...]:
    return tuple([f"_saved_{name}" for name in _COUNTED if hasattr(kind, f"_saved_{name}")])


@cache
def has_indices(kind: type) -> bool:
    """Whether a type of node saves an index tensor, or several: ``h[:, index]``."""
    is_known = operations().get(kind, "") in GATHERS | SCATTERS
    return is_known and any(hasattr(kind, name) for name in ("_saved_indices", "_saved_index"))


def axes_indexed(node: Node) -> tuple[bool, ...]:
    """By axis, whether it has an index; then whether that of axis 0 has all rows in order.

    Rows that a later pass moves need another plan than rows in order. Rows of a parameter are not
    looked at. It reads what the node has saved, so no hook may have taken that.

    Args:
        node: A node that :func:`has_indices`.
    """
    saved: Any = node
    indices: tuple[Tensor | None, ...] = ()
    if hasattr(node, "_saved_indices"):
        several = saved._saved_indices
        indices = (several,) if isinstance(several, Tensor) else tuple(several)
    elif axes_of(node)[0] in (0, -len(lengths_of(node, 0))):
        indices = (saved._saved_index,)
    child, number = node.next_functions[0]
    is_of_samples = child is None or not is_leaf(child)
    rows = lengths_of(child or node, number if child else 0)[:1]
    of_rows = indices[0] if indices and is_of_samples else None
    return (*[index is not None for index in indices], _is_in_order(of_rows, rows))


def _is_in_order(index: Tensor | None, rows: tuple[int, ...]) -> bool:
    """Whether an index has a number of rows, all in order."""
    if index is None or index.shape[:1] != rows or index.dtype == torch.bool:
        return False
    if is_symbolic(index) or not has_memory(index):
        return False
    numbers = torch.arange(len(index), device=index.device)
    numbers = numbers.to(index.dtype).view(-1, *[1] * (index.dim() - 1))
    return numbers.expand_as(index).equal(index)


@cache
def setting_names(kind: type) -> tuple[str, ...]:
    """The names of what :func:`settings_of` gives for a type of node."""
    has_number = operations().get(kind, "").startswith("Select")  # others' index is a tensor
    names = [f"_saved_{name}" for name in (*_SAVED, *(["index"] if has_number else []))]
    return tuple([name for name in names if hasattr(kind, name)])


@cache
def is_told_by_settings(kind: type) -> bool:
    """Whether shapes and :func:`settings_of` say everything about the operations of a type.

    They do not if values of a tensor count, such as those of an index.
    """
    names = {name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")}
    known = {name.removeprefix("_saved_") for name in setting_names(kind)} | _OF_SHAPES
    return bool(operations().get(kind)) and not {n for n in names - known if "_sym_" not in n}


def keeps_rows(node: Node, output_nr: int, position: int) -> bool:
    """Whether entry ``i`` of axis 0 of an output depends on entry ``i`` of an operand only.

    Views that keep the order of entries count, since they keep whole rows together.

    Args:
        node: The node.
        output_nr: Which output.
        position: Which operand, as a position in ``node.next_functions``.
    """
    child, number = node.next_functions[position]
    assert child is not None
    return keeps_rows_of(node, position, lengths_of(node, output_nr), lengths_of(child, number))


def keeps_rows_of(node: Node, position: int, out: tuple[int, ...], inp: tuple[int, ...]) -> bool:
    """The same, given the shapes of output and operand."""
    operation = operation_of(node)
    if operation in VIEWS or hands_on(node):
        return True
    if not out or out[:1] != inp[:1]:
        return False
    if operation in ("Stack", "SelectBackward"):
        return axes_of(node)[0] % len(out) > 0
    if operation in _ALONG:
        axes = [axis % len(inp) for axis in axes_of(node)]
        return axes[0] == 0 if operation == "Permute" else 0 not in axes
    if operation in _LOSSES or len(out) != len(inp):
        return operation in _LOSSES
    if operation in _LAYER_NORMS:
        return len(node._saved_normalized_shape) < len(inp)  # type: ignore[attr-defined]
    if "BatchNorm" in operation:
        return not mixes_samples(node)
    return _ROW_FACTOR.get(operation, position) == position and operation in ROW_BY_ROW


def selected(node: Node, output_nr: int) -> int:
    """How many entries an ``index_select`` picks along its axis."""
    shape = shape_of(node, output_nr)
    return shape[axes_of(node)[0] % len(shape)] if shape else 1


def reduced_axes(node: Node, count: int) -> set[int]:
    """The axes along which an operation makes one entry of several; empty if unknown.

    Torch saves ``keepdim`` for such operations alone, and no axes if they go along all of them.

    Args:
        node: The operation.
        count: How many axes the operand has.
    """
    if not hasattr(node, "_saved_keepdim"):
        return set()
    is_whole = node._saved_dim is None  # type: ignore[attr-defined]
    return {*range(count)} if is_whole else {axis % count for axis in axes_of(node)}


def axes_along(node: Node, count: int) -> list[int]:
    """The axes that an operation works along, while it leaves the others alone; empty if unknown.

    Args:
        node: The node.
        count: How many axes the operand has.
    """
    operation = operation_of(node)
    if operation in _LAYER_NORMS:
        return [*range(count)][-len(node._saved_normalized_shape) :]  # type: ignore[attr-defined]
    is_known = operation in SAME_AXES | SELECTIONS and count
    return [axis % count for axis in axes_of(node)] if is_known else []


def joins(node: Node) -> bool:
    """Whether a node joins rows of several tensors."""
    return operation_of(node) == "Cat" and 0 in axes_along(node, len(lengths_of(node, 0)))


def axes_left_alone(node: Node, count: int) -> list[int]:
    """The axes of an operand that an operation leaves alone; empty if unknown."""
    is_known = operation_of(node) in _ALONG - TURNS - GATHERS and hasattr(node, "_saved_dim")
    gone = (
        {axis % count for axis in axes_of(node)} if is_known and count else axes_along(node, count)
    )
    return [axis for axis in range(count) if axis not in gone] if gone else []


def picks_of(node: Node) -> list[Tensor | None]:
    """The indices of leading axes of an operation of :data:`INDEXED`; ``None`` keeps an axis."""
    saved: Any = node
    if operation_of(node) == "Index":
        return [*saved._saved_indices]
    child, number = node.next_functions[0]
    assert child is not None
    return [*[None] * (axes_of(node)[0] % len(lengths_of(child, number))), saved._saved_index]


def data_of(node: Node) -> tuple[Tensor | None, int]:
    """The data of an operation of parameters and data: a factor or an index of rows, as saved.

    Returns:
        The data, ``None`` if unknown; and the position of this operand.
    """
    operation, data = operation_of(node), None
    edges = dict(enumerate(node.next_functions))
    for position, name in _FACTORS_SAVED.get(operation, {}).items():
        if edges.get(position, (node, 0))[0] is None:  # a number is not an operand
            return getattr(node, f"_saved_{name}", None), position
    if operation in INDEXED:
        data = picks[0] if len(picks := picks_of(node)) == 1 else None
    elif operation == "Embedding":
        data = cast(Any, node)._saved_indices
    is_index = data is not None and data.dtype not in (torch.bool, torch.uint8)
    return data if is_index else None, 1


def is_widened(node: Node) -> bool:
    """Whether a product of parameters and data has an axis that only the data have."""
    lengths = [lengths_of(child, nr) for child, nr in node.next_functions if child is not None]
    is_product = operation_of(node) == "Mul" and lengths_of(node, 0) not in lengths
    return is_product or operation_of(node) in MATRIX_PRODUCTS


def order_of(node: Node, count: int) -> list[int]:
    """The permutation of an operation of :data:`TURNS`, as a list for ``Tensor.permute``."""
    order = [*range(count)]
    if count < 2:
        return order
    axes = [0, 1] if operation_of(node) == "T" else [axis % count for axis in axes_of(node)]
    if operation_of(node) == "Permute":
        return axes
    for axis, other in zip(axes, reversed(axes), strict=True):
        order[axis] = other
    return order


def axes_of(node: Node) -> list[int]:
    """The axes that a node saved. Torch saves negative axes as unsigned 64-bit numbers."""
    saved = {"Transpose": ("dim0", "dim1"), "Permute": ("dims",)}.get(operation_of(node), ("dim",))
    values = [getattr(node, f"_saved_{name}") for name in saved]
    values = [0 if value is None else value for value in values]  # ``None`` means all axes
    axes = [axis for one in values for axis in (one if isinstance(one, tuple) else (one,))]
    return [axis - 2**64 if axis >= 2**63 else axis for axis in axes]


def is_stack_of_numbers(node: Node) -> bool:
    """Whether a node stacks single numbers, usually the terms of a loss."""
    edges = [(child, number) for child, number in node.next_functions if child is not None]
    return operation_of(node) in ("Stack", "Cat") and all(shape_of(*e).numel() == 1 for e in edges)


def is_of_its_operands(node: Node) -> bool:
    """Whether an operation depends only on tensors that have an edge."""
    operation = operation_of(node)
    edges = node.next_functions
    # Matrix products expand both operands, even if there is nothing to expand.
    child, number = edges[0] if operation == "Expand" else (None, 0)
    is_same = child is not None and lengths_of(child, number) == lengths_of(node, 0)
    if operation in _OF_ONE or is_same or hands_on(node):
        return True
    return operation in _OF_SEVERAL and all(child is not None for child, _ in edges)


def is_linear(node: Node, varying: Container[Node] | None = None) -> bool:
    """Whether an operation is known to be linear in its varying operands, almost everywhere.

    Args:
        node: The operation.
        varying: The nodes of the operands that vary together; default: all but leaves.
    """
    operation = operation_of(node)
    if operation in LINEAR or hands_on(node):
        return True
    edges = node.next_functions
    if operation in PIECEWISE_LINEAR:  # |z| is not, for complex numbers
        return not any(p is not None and metadata_of(p, nr).dtype.is_complex for p, nr in edges)
    parents = [parent for parent, _ in edges]
    if varying is None:
        varies = [parent is not None and not is_leaf(parent) for parent in parents]
    else:
        varies = [parent in varying for parent in parents]
    if operation in FACTORS:  # a factor without a gradient may have no position
        return not all(p < len(varies) and varies[p] for p in FACTORS[operation])
    return operation in QUOTIENTS and not any(varies[1:])


def is_vmap_exact(node: Node) -> bool:
    """Whether vmap is known to give what a loop gives for this type of node."""
    return type(node) in _exact_under_vmap() or operation_of(node) in _IDENTITIES


@cache
def _exact_under_vmap() -> frozenset[type]:
    versions, names = vmap_nodes()
    if not torch.__version__.startswith(tuple(f"{version}." for version in versions)):
        return frozenset()
    return frozenset(kind for kind in map(node_type, names) if kind is not None)


def loses_statistics(node: Node) -> bool:
    """Whether a derivative of the node's result is wrong under vmap.

    For batch and layer normalisation, torch 2.13 then treats the statistics as constants. A loop is
    right.
    """
    operation = operation_of(node)
    return "BatchNorm" in operation or operation in _LAYER_NORMS


def vmap_nodes() -> tuple[list[str], frozenset[str]]:
    """Versions of torch, and the types of nodes for which vmap agreed with a loop in all of them.

    Written by ``python -m tests.faults.vmap_nodes --write`` from torch's own operator database. A
    type that some version lacks may be among them.
    """
    heading, *lines = _lines("vmap_nodes.txt")
    return heading.split()[1:], frozenset(" ".join(lines).split())


def option_of_gradients(node: Node) -> str:
    """The option of a look-up that makes of the gradient something else; empty if there is none."""
    if operation_of(node) not in ("Embedding", "EmbeddingBag"):
        return ""
    return next((name for name in _OF_LOOKUPS if getattr(node, f"_saved_{name}")), "")


def mixes_samples(node: Node) -> bool:
    """Whether a node is a batch normalisation with statistics of several samples.

    Torch computes an instance normalisation as a batch normalisation of one sample, which does not
    count.
    """
    operation = operation_of(node)
    if "BatchNorm" not in operation or operation.endswith(("NoTraining", "NoUpdate")):
        return False
    modes = [getattr(node, f"_saved_{name}", True) for name in ("training", "train", "update")]
    return shape_of(node, 0)[0] > 1 and all(modes)
