"""Carries columns exactly through autograd nodes that no module call covers. Imports torch only.

Between modules, users write ``x + y``, ``x.view(...)``, attention. The backward formula of each
such node is linear in the gradient, so calling it under vmap over the columns carries all of them.
Two things autograd's engine does *around* nodes are repeated here: gradients are summed to the
shape of the tensor they belong to (broadcasting), and cast to its dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from backpack_core.calls import Node
from backpack_core.columns import Columns, Root
from backpack_core.errors import BridgeError

# Backward nodes that are linear maps whatever their arguments are.
LINEAR_NODES = frozenset(
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
PIECEWISE_LINEAR_NODES = frozenset(
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
QUOTIENT_NODES = frozenset({"Div"})

_BATCH_NORM = re.compile(r"^(Native|Cudnn|Miopen)?BatchNorm")


def name_of(node: Node) -> str:
    """The node's operation, as ``"Mul"`` for ``MulBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def refuse(node: Node, reason: str) -> BridgeError:
    """The error for a node that cannot be crossed."""
    return BridgeError(
        f"Cannot carry the quantity through the operation {name_of(node)!r} ({node.name()}) "
        f"between two modules: {reason}. Move the operation into a module and give it a layer rule."
    )


def is_linear(node: Node) -> bool:
    """Whether the operation is known to be linear in all activations, almost everywhere.

    Leaves (parameters) are constants here.
    """
    name = name_of(node)
    if name in LINEAR_NODES or name in PIECEWISE_LINEAR_NODES:
        return True
    varies = [
        parent is not None and parent.name() != "torch::autograd::AccumulateGrad"
        for parent, _ in node.next_functions
    ]
    if name in FACTORS:
        return not all(varies[position] for position in FACTORS[name])
    return name in QUOTIENT_NODES and not any(varies[1:])


def mixes_samples(node: Node) -> bool:
    """Whether the node is a batch normalisation with statistics of several samples.

    An instance normalisation is one of a batch of a single sample, into which torch folds all.
    """
    if not _BATCH_NORM.match(node.name()):
        return False
    (output, *_) = node._input_metadata
    return output.shape[0] > 1 and bool(getattr(node, "_saved_training", True))


def cross_columns(node: Node, quantities: dict[int, Columns]) -> list[tuple[int, Columns]]:
    """Push columns through a node.

    Args:
        node: An autograd node that autograd has not executed yet.
        quantities: Columns of the whole batch at the node's outputs, by output number.

    Returns:
        Pairs (position in ``node.next_functions``, columns there).

    Raises:
        BridgeError: The node runs a backward pass of its own.
    """
    if node.name() == "CheckpointFunctionBackward":
        raise refuse(
            node, "re-entrant checkpointing; use torch.utils.checkpoint(use_reentrant=False)"
        )
    roots = list(dict.fromkeys(root for columns in quantities.values() for root in columns.blocks))
    results: dict[int, dict[Root, Tensor]] = {}
    for root in roots:
        present = {nr: c.blocks[root] for nr, c in quantities.items() if root in c.blocks}
        for position, product in _push(node, present).items():
            results.setdefault(position, {})[root] = product
    return [(position, Columns(blocks)) for position, blocks in results.items()]


def _push(node: Node, mats: dict[int, Tensor]) -> dict[int, Tensor]:
    """Call a node for every column: ``{output_nr: [V, ...]}`` to ``{position: [V, ...]}``."""
    if node.name() == "torch::autograd::AccumulateGrad":
        return {}
    metadata = node._input_metadata
    mats = {nr: mat.to(metadata[nr].dtype) for nr, mat in mats.items()}
    numbers = list(mats)
    # Nodes of a Python autograd.Function are not callable, but have apply.
    function: Any = getattr(node, "apply", node)

    def call(*gradients: Tensor) -> dict[int, Tensor]:
        grads: list[Tensor | None] = [None] * len(metadata)
        if function is not node:  # nor does autograd fill in zeros for them when called like this
            like = gradients[0]
            grads = [like.new_zeros(m.shape, dtype=m.dtype, device=m.device) for m in metadata]
        for number, gradient in zip(numbers, gradients, strict=True):
            grads[number] = gradient
        result = function(*grads)
        found = result if isinstance(result, tuple) else (result,)
        edges = node.next_functions
        return {i: g for i, g in enumerate(found) if g is not None and edges[i][0] is not None}

    products = _over_columns(call, list(mats.values()))
    return {
        position: _fit(product, node.next_functions[position])
        for position, product in products.items()
    }


def _over_columns(call: Any, mats: list[Tensor]) -> dict[int, Tensor]:
    columns = len(mats[0])
    if columns == 1:
        return {i: g.unsqueeze(0) for i, g in call(*(m[0] for m in mats)).items()}
    try:
        with quiet_vmap():
            result: dict[int, Tensor] = torch.vmap(call)(*mats)
    except RuntimeError:
        # Some formulas, and most Python autograd.Functions, know no vmap: exact all the same.
        singles = [call(*(m[v] for m in mats)) for v in range(columns)]
        return {i: torch.stack([single[i] for single in singles]) for i in singles[0]}
    return result


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """No warning where torch has no batching rule: that costs time, not exactness."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def _fit(product: Tensor, edge: tuple[Any, int]) -> Tensor:
    """Sum ``[V, *broadcast]`` to ``[V, *shape]`` of the tensor behind an edge, in its dtype."""
    node, number = edge
    variable = getattr(node, "variable", None)
    target = variable if variable is not None else node._input_metadata[number]
    shape = (len(product), *target.shape)
    surplus = product.dim() - len(shape)
    if surplus > 0:
        product = product.sum(tuple(range(1, 1 + surplus)))
    axes = tuple(
        axis for axis in range(1, len(shape)) if shape[axis] == 1 and product.shape[axis] != 1
    )
    if axes:
        product = product.sum(axes, keepdim=True)
    return product.to(target.dtype)
