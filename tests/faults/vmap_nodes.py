"""Crosses the nodes of torch's own operator database under vmap and in a loop.

python -m tests.faults.vmap_nodes --write   # plugins/operations/backpack_operations/vmap_nodes.txt
python -m tests.faults.vmap_nodes --also    # in an environment with another version of torch

The first command begins a list. The second one takes out of it what another version gets wrong, or
what was not seen there, and adds the version.

It runs in a process of its own: torch's database of operators sets global flags.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_core.record.nested import iter_tensors
from backpack_operations._torch import node_type, vmapped
from backpack_operations.nodes import vmap_nodes

COLUMNS = 3
# Entries of an output from which on it is not looked at.
LARGEST = 3000
# Samples of an operator in double precision, and in complex numbers.
MANY, FEW = 50, 3
# A leaf, and a node whose formula is that of another one inside.
UNTYPED = {"AccumulateGrad", "CopySlices"}
ROOT = Path(__file__).parents[2]
HOME = ROOT / "plugins" / "operations" / "backpack_operations" / "vmap_nodes.txt"


@dataclass
class Findings:
    """What was seen of each type of node.

    Attributes:
        exact: Types for which both agreed whenever vmap gave something.
        wrong: Types for which they did not, with the operators.
    """

    exact: set[str] = field(default_factory=set)
    wrong: dict[str, set[str]] = field(default_factory=dict)

    def note(self, node: Any, operator: str) -> None:
        """Cross a node from each of its outputs, and from all together."""
        kind = type(node).__name__
        if getattr(torch._C._functions, kind, None) is not type(node) or kind in UNTYPED:
            return
        numbers = range(len(node._input_metadata))
        for chosen in [[n] for n in numbers] + ([list(numbers)] if len(numbers) > 1 else []):
            agree = _agrees(node, chosen)
            if agree:
                self.exact.add(kind)
            elif agree is not None:
                self.wrong.setdefault(kind, set()).add(operator)

    @property
    def verified(self) -> list[str]:
        """Types that were right every time."""
        return sorted(self.exact - self.wrong.keys())


def run() -> Findings:
    """Samples of all operators, in double precision and in complex numbers."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = Findings()
    for operator in op_db:
        name = f"{operator.name}{operator.variant_test_name}"
        for dtype, most in ((torch.float64, MANY), (torch.complex128, FEW)):
            if not operator.supports_autograd or dtype not in operator.supported_dtypes("cpu"):
                continue
            for outputs in _results(operator, dtype, most):
                for node in nodes(outputs):
                    found.note(node, name)
    for name, made in (*(("fold", made) for made in _folded()), ("solve", _solved())):
        for node in nodes([made]):
            found.note(node, name)
    return found


def _folded() -> Iterator[Tensor]:
    """Samples of an operator that the database lacks: images made of patches."""
    kernels: list[Any] = [1, 2, (2, 3)]
    settings = itertools.product(kernels, (1, 2), (0, 1), (1, 2), ((), (1,), (2,)))
    for kernel, dilation, padding, stride, batch in settings:
        image = torch.zeros(1, 1, 6, 5, dtype=torch.float64)
        rest: dict[str, Any] = {"dilation": dilation, "padding": padding, "stride": stride}
        patches = F.unfold(image, kernel, **rest)  # as many as there are places
        for channels, dtype in ((1, torch.float64), (3, torch.float64), (2, torch.complex128)):
            shape = (*batch, channels * patches.shape[1], patches.shape[2])
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            yield F.fold(x, image.shape[2:], kernel, **rest)


def _solved() -> Tensor:
    """A sample that the database lacks: one matrix, and a batch of one vector."""
    matrix = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
    vector = torch.randn(1, 3, 1, dtype=torch.float64, requires_grad=True)
    return torch.linalg.solve(matrix, vector)


def _results(operator: Any, dtype: torch.dtype, most: int) -> Iterator[list[Tensor]]:
    # Without the wrapper that looks through the stack for the name of a test, for each sample.
    samples = operator.sample_inputs_func(operator, "cpu", dtype, requires_grad=True)
    for sample in itertools.islice(samples, most):
        try:
            result = operator.op(sample.input, *sample.args, **sample.kwargs)
        except RuntimeError:  # some samples have no derivative, or none for complex numbers
            continue
        yield [output for output in iter_tensors(result) if output.numel() < LARGEST]


def nodes(outputs: Sequence[Tensor]) -> set[Any]:
    """Every autograd node behind some tensors."""
    seen: set[Any] = set()
    todo = [output.grad_fn for output in outputs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return seen


def _agrees(node: Any, numbers: list[int]) -> bool | None:
    """Whether vmap gives what a loop gives; ``None`` if one of them gives nothing."""
    metadata = [node._input_metadata[number] for number in numbers]
    if any(m.is_nested_tensor or not (m.dtype.is_floating_point or m.dtype.is_complex)
           for m in metadata):  # fmt: skip
        return None

    def call(*columns: Tensor) -> dict[int, Tensor]:
        gradients: list[Tensor | None] = [None] * len(node._input_metadata)
        for number, column in zip(numbers, columns, strict=True):
            gradients[number] = column
        result = node(*gradients)
        found = result if isinstance(result, tuple) else (result,)
        return {
            i: g
            for i, (g, edge) in enumerate(zip(found, node.next_functions, strict=False))
            if g is not None and edge[0] is not None
        }

    agree: bool | None = None
    for last in (False, True):
        mats = [torch.randn(COLUMNS, *m.shape, dtype=m.dtype) for m in metadata]
        if last:  # where vmap may leave the columns in memory
            mats = [m.movedim(0, -1).contiguous().movedim(-1, 0) for m in mats]
        try:
            singles = [call(*(mat[v] for mat in mats)) for v in range(COLUMNS)]
            together = vmapped(call, mats)
        except RuntimeError:
            continue
        looped = {i: torch.stack([single[i] for single in singles]) for i in singles[0]}
        if not _equal(together, looped):
            return False
        agree = True
    return agree


def _equal(first: dict[int, Tensor], second: dict[int, Tensor]) -> bool:
    """Whether results agree wherever the second are numbers."""
    return first.keys() == second.keys() and all(
        first[i].shape == second[i].shape
        and torch.allclose(first[i][known], second[i][known], rtol=1e-8, atol=1e-10)
        for i in second
        for known in [second[i].isfinite()]
    )


def version() -> str:
    """The version of torch, without what is behind the second number."""
    return ".".join(torch.__version__.split(".")[:2])


def unseen(verified: Sequence[str]) -> set[str]:
    """What is listed, and torch has here, and was not right every time."""
    return {kind for kind in vmap_nodes()[1].difference(verified) if node_type(kind) is not None}


def write(versions: Sequence[str], kinds: Collection[str]) -> None:
    """Write the list."""
    lines = [f"torch {' '.join(versions)}", *wrap(" ".join(sorted(kinds)), 100)]
    HOME.write_text("\n".join(lines) + "\n")
    print(f"{len(kinds)} types written to {HOME.relative_to(ROOT)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    findings = run()
    for kind, operators in sorted(findings.wrong.items()):
        print(f"wrong: {kind} ({', '.join(sorted(operators))})")
    if "--write" in sys.argv:
        write([version()], findings.verified)
    elif "--also" in sys.argv:
        versions, listed = vmap_nodes()
        versions = sorted({*versions, version()}, key=lambda v: [*map(int, v.split("."))])
        write(versions, listed - unseen(findings.verified))
    elif version() not in vmap_nodes()[0] or unseen(findings.verified):
        sys.exit(f"{HOME.relative_to(ROOT)} is another list: run this with --also.")
