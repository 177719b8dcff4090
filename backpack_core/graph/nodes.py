"""What is known of autograd's nodes by name. Imports ``_torch`` only.

Only nodes of torch's own operations have a name that means something: a Python
``autograd.Function`` may be called anything, and is never looked up.
"""

from __future__ import annotations

import re

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from backpack_core._torch import ACCUMULATE, Node, metadata_of
from backpack_core.errors import BridgeError

# Backward nodes that are linear maps whatever their arguments are.
LINEAR = frozenset(
    """
    Add Sub Neg Sum Mean View UnsafeView Reshape ReshapeAlias Transpose Permute T Expand Squeeze
    Unsqueeze Slice Select Index IndexSelect Gather Cat Stack Split SplitWithSizes Unbind Clone
    Alias AsStrided Flip Roll Repeat Tile Pad ConstantPadNd ReflectionPad1D ReflectionPad2D
    ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D ToCopy Diagonal Trace
    Tril Triu Unfold Narrow Movedim Detach Cumsum AvgPool2D AvgPool3D AdaptiveAvgPool2D
    UpsampleNearest1D UpsampleNearest2D UpsampleBilinear2D PixelShuffle Where MaskedFill Rot90
    Im2Col Col2Im Identity Contiguous UnsafeSplit Swapaxes LiftFresh Rsub AdaptiveAvgPool3D
    UpsampleLinear1D UpsampleBicubic2D UpsampleTrilinear3D UpsampleNearest3D IndexAdd ScatterAdd
    IndexPut
    """.split()  # noqa: SIM905 - a list of a hundred lines is no easier to read
)
# Linear almost everywhere: the second derivative is zero, as it is for the modules of that name.
PIECEWISE_LINEAR = frozenset(
    """
    Relu LeakyRelu RreluWithNoise Threshold Hardtanh Hardsigmoid Hardshrink Softshrink Abs Clamp
    ClampMin ClampMax Maximum Minimum Max Min Amax Amin MaxPool2DWithIndices MaxPool3DWithIndices
    AdaptiveMaxPool2D AdaptiveMaxPool3D NativeDropout Sort Topk Kthvalue Median
    """.split()  # noqa: SIM905
)
# Linear as long as one of two factors is constant: where these stand among the node's inputs.
FACTORS = {
    **dict.fromkeys(["Mul", "Mm", "Bmm", "Mv", "Dot", "Matmul", "Linear", "Convolution"], (0, 1)),
    **dict.fromkeys(["Addmm", "Baddbmm", "Addmv"], (1, 2)),
}
# Linear in the numerator, and only if the denominator is a constant.
QUOTIENTS = frozenset({"Div"})

# Backward formulas that torch computes wrongly, without an error, under vmap over gradients (2.13).
# Found by comparing all operations of torch's own test database with a loop.
_WRONG_UNDER_VMAP = frozenset({"Cdist", "AsStridedScatter"})

_BATCH_NORM = re.compile(r"^(Native|Cudnn|Miopen)?BatchNorm")


def is_function(node: Node) -> bool:
    """Whether a node is that of a Python ``autograd.Function``."""
    return isinstance(node, BackwardCFunction)


def is_hook(node: Node) -> bool:
    """Whether a node is where torch calls a module's full backward hooks."""
    return getattr(type(node), "_forward_cls", None) is BackwardHookFunction


def is_leaf(node: Node) -> bool:
    """Whether a node takes the gradient of a leaf: a parameter, say."""
    return node.name() == ACCUMULATE


def shape_of(node: Node, output_nr: int) -> torch.Size:
    """The shape of one of a node's outputs."""
    return torch.Size(metadata_of(node, output_nr).shape)


def name_of(node: Node) -> str:
    """The node's operation, as ``"Mul"`` for ``MulBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def described(node: Node) -> str:
    """The operation, and the user's line where anomaly mode has recorded it."""
    lines = node.metadata.get("traceback_") or ()  # type: ignore[attr-defined]
    line = str(lines[-1]).strip().partition("\n")[0] if lines else ""
    return f"{name_of(node)} [{line}]" if line else name_of(node)


def is_vectorised(node: Node) -> bool:
    """Whether calling a node under vmap over the gradients gives what single calls give."""
    if is_function(node):
        return True
    name = name_of(node)
    # Of a tensor without axes, it moves the columns.
    is_rolled_number = name == "Roll" and not node._input_metadata[0].shape
    return name not in _WRONG_UNDER_VMAP and not is_rolled_number


def refuse(node: Node, reason: str) -> BridgeError:
    """The error for a node that cannot be crossed."""
    error = BridgeError(
        f"Cannot carry the quantity through the operation {name_of(node)!r} ({node.name()}) "
        f"between two modules: {reason}. Move the operation into a module and give it a layer rule."
    )
    error.node = node
    return error


def is_linear(node: Node) -> bool:
    """Whether the operation is known to be linear in all activations, almost everywhere.

    Leaves (parameters) are constants here.
    """
    if is_function(node):
        return False
    name = name_of(node)
    if name in LINEAR or name in PIECEWISE_LINEAR:
        return True
    varies = [parent is not None and not is_leaf(parent) for parent, _ in node.next_functions]
    if name in FACTORS:
        return not all(varies[position] for position in FACTORS[name])
    return name in QUOTIENTS and not any(varies[1:])


def mixes_samples(node: Node) -> bool:
    """Whether the node is a batch normalisation with statistics of several samples.

    An instance normalisation is one of a batch of a single sample, into which torch folds all.
    """
    if is_function(node) or not _BATCH_NORM.match(node.name()):
        return False
    return shape_of(node, 0)[0] > 1 and bool(getattr(node, "_saved_training", True))
