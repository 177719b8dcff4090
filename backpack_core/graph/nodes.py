"""What is known of autograd's nodes by type. Imports ``_torch`` only.

Only nodes of torch's own operations have a name that means something: a Python
``autograd.Function`` may be called anything, and is never looked up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from backpack_core import _torch
from backpack_core._torch import ACCUMULATE, Node, metadata_of, node_type, operations
from backpack_core.errors import BridgeError, is_library


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that are linear maps whatever their arguments are.
LINEAR = _names(
    """
    Add Sub Neg Sum Mean View UnsafeView ReshapeAlias Transpose Permute T Expand Squeeze Unsqueeze
    Slice Select Index IndexSelect Gather Cat Stack Split SplitWithSizes Unbind Clone Alias
    AsStrided Flip Roll Repeat ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D
    ReplicationPad1D ReplicationPad2D ReplicationPad3D ToCopy Diagonal Trace Tril Triu Unfold
    Cumsum AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D PixelShuffle Where MaskedFill
    Rot90 Im2Col Col2Im UnsafeSplit LiftFresh Rsub UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D
    IndexAdd ScatterAdd IndexPut
    """
)
# Linear almost everywhere, in real numbers: the second derivative is zero.
PIECEWISE_LINEAR = _names(
    """
    Relu LeakyRelu RreluWithNoise Threshold Hardtanh Hardsigmoid Hardshrink Softshrink Abs Clamp
    ClampMin ClampMax Maximum Minimum Max Min Amax Amin MaxPool2DWithIndices MaxPool3DWithIndices
    AdaptiveMaxPool2D AdaptiveMaxPool3D NativeDropout Sort Topk Kthvalue Median
    """
)
# Views in the order of the entries.
VIEWS = _names("View UnsafeView ReshapeAlias Unsqueeze Squeeze Alias")
SELECTIONS = _names("Select Unbind")
REDUCTIONS = _names("Sum Mean Amax Amin Logsumexp LinalgVectorNorm Max Min Prod Var Std")
# Entry by entry: what is broadcast is summed around the node, not in it.
ELEMENTWISE = _names(
    """
    Add Sub Rsub Mul Div Neg Where MaskedFill Pow Relu LeakyRelu Gelu Silu Mish Elu Celu Selu Tanh
    Sigmoid Softplus Hardtanh Hardswish Hardsigmoid Threshold Exp Log Sqrt Rsqrt Reciprocal Abs
    Clamp ClampMin ClampMax Maximum Minimum Addcmul Addcdiv Lerp NativeDropout Clone ToCopy Sin Cos
    Erf Expm1 Log1P Square
    """
)
# What goes along axes that the node saved, and leaves all others alone.
_ALONG = dict.fromkeys(
    _names(
        """
        Slice Select Cat Split SplitWithSizes Unbind Softmax LogSoftmax Sum Mean Amax Amin Logsumexp
        LinalgVectorNorm Cumsum IndexSelect
        """
    ),
    ("_saved_dim",),
) | {"Transpose": ("_saved_dim0", "_saved_dim1"), "Permute": ("_saved_dims",)}
# Entries of axis 0 are picked, any number of times.
GATHERS = _names("Index IndexSelect Gather Embedding")
# Another axis comes to the front.
TURNS = _names("T Transpose Permute")
# Entries go to picked places: the second operand has no order of its own.
SCATTERS = _names("IndexAdd IndexPut IndexCopy Scatter ScatterAdd MaskedScatter")
# Queries, keys and values of one entry of axis 0 meet each other alone.
_ATTENTION = _names(
    """
    ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFusedAttentionOverrideable
    """
)
# Where the factor stands that has the rows of the product.
_ROW_FACTOR = {"Mm": 0, "Addmm": 1}
# Operands that are one for all samples, where these are on axis 0 of the result.
_SHARED = {
    "Mm": (1,),
    "Addmm": (2,),
    **dict.fromkeys(["Convolution", "Linear", "NativeLayerNorm", "NativeGroupNorm"], (1, 2)),
}
# Of one tensor, in any order of its entries; or of tensors that all have an edge, if they need any.
_OF_ONE = VIEWS | _names(
    """
    T Transpose Permute Clone ToCopy Neg Exp Log Sqrt Rsqrt Reciprocal Abs Tanh Sigmoid Relu
    Softplus Sum Mean Norm LinalgVectorNorm Slice Select Split Unbind Flip Diagonal Tril Triu
    DiagEmbed Softmax LogSoftmax Clamp ClampMin ClampMax Expm1 Log1P Sin Cos Erf Gelu Silu LeakyRelu
    Elu Hardtanh Amax Amin
    """
)
_OF_SEVERAL = _names(
    """
    Add Sub Mul Div Mm Bmm Cat Stack Mv Dot Addmm Baddbmm Addmv Pow Maximum Minimum
    WeightNormInterface
    """
)
_ROW_BY_ROW = ELEMENTWISE | _ATTENTION | {"Bmm", "Expand"}
# Losses that are not reduced, or else a number; classes are on another axis.
_LOSSES = _names("NllLoss NllLoss2D MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropyWithLogits")
# Linear as long as one of two factors is constant: where these stand among the node's inputs.
FACTORS = dict.fromkeys(_names("Mul Mm Bmm Mv Dot Matmul Linear Convolution"), (0, 1))
FACTORS |= dict.fromkeys(_names("Addmm Baddbmm Addmv"), (1, 2))
# Linear in the numerator, and only if the denominator is a constant.
QUOTIENTS = _names("Div")


_GIVE_IT_A_RULE = "Move the operation into a module and give it a layer rule."

_BATCH_NORM = re.compile(r"^(Native|Cudnn|Miopen)?BatchNorm")


def is_function(node: Node) -> bool:
    """Whether a node is that of a Python ``autograd.Function``."""
    return isinstance(node, BackwardCFunction)


def is_compiled(node: Node) -> bool:
    """Whether a node is what ``torch.compile`` made of a part of the graph."""
    return is_function(node) and hasattr(getattr(node, "_forward_cls", None), "compiled_bw")


def hands_on(node: Node) -> bool:
    """Whether a node gives what it gets: where torch calls hooks of a module, or shards it."""
    return _torch.hands_on(type(node))


def is_nested(node: Node) -> bool:
    """Whether what a node made is a nested tensor."""
    return bool(node._input_metadata[0].is_nested_tensor)


def is_leaf(node: Node) -> bool:
    """Whether a node takes the gradient of a leaf: a parameter, say."""
    return node.name() == ACCUMULATE


def shape_of(node: Node, output_nr: int) -> torch.Size:
    """The shape of one of a node's outputs."""
    return torch.Size(metadata_of(node, output_nr).shape)


def filled(node: Node, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients at a node's outputs, those that are zero included."""
    return [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if gradient is None else gradient
        for gradient, m in zip(gradients, node._input_metadata, strict=True)
    ]


def name_of(node: Node) -> str:
    """The node's operation, as ``"Mul"`` for ``MulBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def described(node: Node) -> str:
    """The operation, and the user's line where anomaly mode has recorded it."""
    steps = node.metadata.get("traceback_") or ()  # type: ignore[attr-defined]
    for step in reversed(steps):
        found = re.match(r'\s*File "(.+)", line (\d+)', step)
        if found and not is_library(found[1]):
            return f"{name_of(node)} [{found[1]}:{found[2]}]"
    return name_of(node)


def operation_of(node: Node) -> str:
    """The operation of one of torch's own nodes; empty where it has any other."""
    return operations().get(type(node), "")


def keeps_rows(node: Node, output_nr: int, position: int) -> bool:
    """Whether entry ``i`` of axis 0 of an output is known to need entry ``i`` of an operand only.

    Views count that keep the order of the entries: whole rows stay whole rows.

    Args:
        node: The node.
        output_nr: Which output.
        position: Which operand, as a position in ``node.next_functions``.
    """
    operation = operation_of(node)
    if operation in VIEWS or hands_on(node):
        return True
    child, number = node.next_functions[position]
    assert child is not None
    out, inp = shape_of(node, output_nr), shape_of(child, number)
    if not out or out[:1] != inp[:1]:
        return False
    if operation in _ALONG:
        axes = [axis % len(inp) for axis in _axes(node, _ALONG[operation])]
        return axes[0] == 0 if operation == "Permute" else 0 not in axes
    if operation in _LOSSES or len(out) != len(inp):
        return operation in _LOSSES
    if operation == "NativeLayerNorm":
        return position == 0 and len(node._saved_normalized_shape) < len(inp)  # type: ignore[attr-defined]
    return operation in _ROW_BY_ROW or _ROW_FACTOR.get(operation) == position


def axis_behind(node: Node, output_nr: int, position: int, axis: int) -> int | None:
    """Where samples lie in an operand, if they lie on an axis of an output; ``None`` if unknown.

    Off the first axis they are followed from where a tensor is taken apart along it, as stacked
    queries, keys and values are, to where the axes are put into another order before.

    Args:
        node: The node.
        output_nr: Which output.
        position: Which operand, as a position in ``node.next_functions``.
        axis: Of the output.
    """
    child, number = node.next_functions[position]
    operation = operation_of(node)
    if child is None:
        return None
    count = len(shape_of(child, number))
    if operation == "Unbind" and axis == 0 == _axes(node, _ALONG[operation])[0] % count:
        return 1
    if axis:
        return _axes(node, _ALONG["Permute"])[axis] % count if operation == "Permute" else None
    return 0 if keeps_rows(node, output_nr, position) else None


def turns_rows(node: Node) -> bool:
    """Whether what was on another axis, or in another tensor, may be on axis 0 of the result."""
    return operation_of(node) in TURNS | GATHERS | {"Cat", "Stack", ""}


def is_shared(operation: str, position: int, has_samples: bool = True) -> bool:
    """Whether an operand is one for all samples, where the result has them on axis 0.

    Axis 0 of the second factor of matrices is summed over: no samples are there in any case.
    """
    is_known = has_samples or operation in _ROW_FACTOR
    return is_known and position in _SHARED.get(operation, ())


def _axes(node: Node, attributes: Sequence[str]) -> list[int]:
    """Axes that a node saved; torch gives negative ones as numbers of 64 bits without a sign."""
    found = [getattr(node, attribute) for attribute in attributes]
    found = [0 if axis is None else axis for axis in found]  # all of them
    axes = [axis for one in found for axis in (one if isinstance(one, tuple) else (one,))]
    return [axis - 2**64 if axis >= 2**63 else axis for axis in axes]


def is_stack_of_numbers(node: Node) -> bool:
    """Whether a node puts single numbers side by side: terms of a loss, as a rule."""
    edges = [(child, number) for child, number in node.next_functions if child is not None]
    return operation_of(node) in ("Stack", "Cat") and all(shape_of(*e).numel() == 1 for e in edges)


def is_of_its_operands(node: Node) -> bool:
    """Whether all tensors that the operation works on are known to have an edge."""
    operation = operation_of(node)
    if operation in _OF_ONE:
        return True
    edges = node.next_functions
    return operation in _OF_SEVERAL and all(child is not None for child, _ in edges)


def refuse(node: Node, reason: str, advice: str = _GIVE_IT_A_RULE) -> BridgeError:
    """The error for a node that cannot be crossed."""
    error = BridgeError(
        f"Cannot carry the quantity through the operation {name_of(node)!r} ({node.name()}) "
        f"between two modules: {reason}. {advice}"
    )
    error.node = node
    return error


def is_linear(node: Node) -> bool:
    """Whether the operation is known to be linear in all activations, almost everywhere.

    Leaves (parameters) are constants here.
    """
    # By its type: a Python function may have any name, and nothing is known of it.
    operation = operation_of(node)
    if operation in LINEAR or hands_on(node):
        return True
    edges = node.next_functions
    if operation in PIECEWISE_LINEAR:  # |z| is not, in complex numbers
        return not any(p is not None and metadata_of(p, nr).dtype.is_complex for p, nr in edges)
    varies = [parent is not None and not is_leaf(parent) for parent, _ in edges]
    if operation in FACTORS:  # of which a number is none of the node's inputs
        return not all(p < len(varies) and varies[p] for p in FACTORS[operation])
    return operation in QUOTIENTS and not any(varies[1:])


def is_vmap_exact(node: Node) -> bool:
    """Whether torch's formula at this type of node is known to be the same under vmap as alone."""
    return type(node) in _exact_under_vmap()


@cache
def _exact_under_vmap() -> frozenset[type]:
    version, names = vmap_nodes()
    if not torch.__version__.startswith(f"{version}."):
        return frozenset()
    return frozenset(kind for kind in map(node_type, names) if kind is not None)


def vmap_nodes() -> tuple[str, frozenset[str]]:
    """A version of torch, and the types of nodes whose formulas vmap treats there as a loop does.

    Written by ``python -m tests.faults.vmap_nodes --write`` from torch's own operator database.
    """
    text = (files("backpack_core.graph") / "vmap_nodes.txt").read_text(encoding="utf-8")
    _, version, *names = text.split()
    return version, frozenset(names)


def mixes_samples(node: Node) -> bool:
    """Whether the node is a batch normalisation with statistics of several samples.

    An instance normalisation is one of a batch of a single sample, into which torch folds all.
    """
    if is_function(node) or not _BATCH_NORM.match(node.name()):
        return False
    return shape_of(node, 0)[0] > 1 and bool(getattr(node, "_saved_training", True))
