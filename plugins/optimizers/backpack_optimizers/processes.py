"""Several processes: matrices and gradients of all their samples, and shared inversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, distributed

from backpack_core.errors import UsageError
from backpack_optimizers.passes import Factors, Joined
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import CurvatureMatrix

FactorsOf = Mapping[Tensor, KroneckerFactors]


def join(total: Joined, parameters: Sequence[Tensor], group: distributed.ProcessGroup) -> None:
    """Make gradients and matrices those of the samples of all processes, by one all-reduce.

    Gradients that ``DistributedDataParallel`` has averaged are equal on all processes. For a mean,
    they do not change; for a sum, the average becomes the sum.

    Args:
        total: What this process has found; replaced.
        parameters: The parameters whose gradients are joined.
        group: The processes.
    """
    scale = 1.0 if total.weight is None else total.weight
    matrices = [(f, p, m) for f, found in total.values.items() for p, m in found.items()]
    with_gradient = [p for p in parameters if p.grad is not None]
    parts = [torch.tensor([scale], dtype=torch.float64)]
    parts += [p.grad * scale for p in with_gradient if p.grad is not None]
    for _, _, matrix in matrices:
        parts += _as_sums(matrix, scale)
    require_alike([part.numel() for part in parts], group)
    sums = iter(_reduced(parts, group))
    weight = float(next(sums))
    divisor = 1.0 if total.weight is None else weight
    for parameter in with_gradient:
        parameter.grad = next(sums) / divisor
    for field, parameter, matrix in matrices:
        count = len(_as_sums(matrix, scale))
        found = _of_sums(matrix, [next(sums) for _ in range(count)])
        total.values[field][parameter] = found.scaled(1 / divisor)
    total.share = 1.0 if total.weight is None else scale / weight
    total.weight = None if total.weight is None else weight


def summed(number: float, group: distributed.ProcessGroup) -> float:
    """The sum of a number over processes."""
    parts = [torch.tensor([number], dtype=torch.float64)]
    if distributed.get_backend(group) == "nccl":
        parts = [parts[0].cuda()]
    return float(_reduced(parts, group)[0])


def _as_sums(matrix: CurvatureMatrix, scale: float) -> list[Tensor]:
    """Tensors that add up over processes: sums, averages times their weight, and that weight."""
    tensors = matrix.tensors()
    if not isinstance(matrix, KroneckerFactors):
        return [tensors["values"] * scale]
    weight = torch.as_tensor(matrix.weight, dtype=matrix.dtype, device=matrix.device) * scale
    return [matrix[0] * scale, *(factor * weight for factor in matrix[1:]), weight.reshape(1)]


def _of_sums(matrix: CurvatureMatrix, sums: Sequence[Tensor]) -> CurvatureMatrix:
    """The matrix of all samples, for the sum of their losses."""
    if not isinstance(matrix, KroneckerFactors):
        return matrix.with_tensors({**matrix.tensors(), "values": sums[0]})
    weight = sums[-1].squeeze(0)
    averages = [total / weight for total in sums[1:-1]]
    return matrix.with_factors([sums[0], *averages]).with_weight(weight)


def _reduced(parts: Sequence[Tensor], group: distributed.ProcessGroup) -> list[Tensor]:
    """Sums of tensors over processes."""
    device = parts[-1].device
    flat = torch.cat([part.to(device).flatten() for part in parts])
    distributed.all_reduce(flat, group=group)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.to(p.dtype).reshape(p.shape) for piece, p in zip(pieces, parts, strict=True)]


def require_alike(sizes: Sequence[int], group: distributed.ProcessGroup) -> None:
    """Check that all processes exchange tensors of the same sizes.

    Raises:
        UsageError: Sizes differ, because some parameters were reached only on some processes. All
            processes raise this.
    """
    mark = hash(tuple(sizes)) % 2**40
    marks = torch.tensor([mark, -mark], dtype=torch.int64)
    if distributed.get_backend(group) == "nccl":
        marks = marks.cuda()
    distributed.all_reduce(marks, distributed.ReduceOp.MAX, group=group)
    if int(marks[0]) != -int(marks[1]):
        raise UsageError(
            "Processes have gradients or curvature of different parameters in this step, so these "
            "cannot be joined: make sure that every process runs a backward pass with a sample, "
            "and that all parameters take part in it."
        )


def inverted(
    matrices: FactorsOf,
    invert: Callable[[KroneckerFactors], CurvatureMatrix],
    form_of: Callable[[KroneckerFactors], CurvatureMatrix],
    group: distributed.ProcessGroup | None,
) -> Factors:
    """A decomposition of every matrix; each process does a part, and sends it to the others.

    Args:
        matrices: The matrices, the same on all processes.
        invert: Computes an inverse, or an eigendecomposition.
        form_of: Makes a result of the same form, for processes that only receive it.
        group: The processes; ``None`` for only this one.
    """
    if group is None:
        return {p: invert(matrix) for p, matrix in matrices.items()}
    owners = shared_out(matrices, distributed.get_world_size(group))
    rank = distributed.get_rank(group)
    found: Factors = {}
    for owner in sorted(set(owners.values())):
        own = {p: m for p, m in matrices.items() if owners[p] == owner}
        done = [invert(m) for m in own.values()] if owner == rank else None
        found.update(zip(own, _sent(own, done, form_of, owner, group), strict=True))
    return {p: found[p] for p in matrices}


def shared_out(matrices: Mapping[Tensor, CurvatureMatrix], processes: int) -> dict[Tensor, int]:
    """Which process decomposes which matrix: largest first, to the least loaded process."""
    work = [0.0] * processes
    owners = {}
    costs = {p: sum(t.shape[-1] ** 3 for t in m.tensors().values()) for p, m in matrices.items()}
    for parameter in sorted(costs, key=lambda p: -costs[p]):
        owners[parameter] = min(range(processes), key=work.__getitem__)
        work[owners[parameter]] += costs[parameter]
    return owners


def eigenbasis_form(matrix: KroneckerFactors) -> KroneckerEigenbasis:
    """An eigenbasis with the sizes of a matrix, and any values."""
    vectors = [None if matrix.is_diagonal(factor) else factor for factor in matrix]
    groups, *sizes = matrix.sizes
    values = matrix[0].new_zeros([groups] * (groups > 1) + sizes)
    return KroneckerEigenbasis(vectors, values, matrix.order)


def _sent(
    matrices: FactorsOf,
    done: list[CurvatureMatrix] | None,
    form_of: Callable[[KroneckerFactors], CurvatureMatrix],
    owner: int,
    group: distributed.ProcessGroup,
) -> list[CurvatureMatrix]:
    """The owner's result on every process, by one broadcast."""
    forms = done or [form_of(matrix) for matrix in matrices.values()]
    tensors = [tensor for form in forms for tensor in form.tensors().values()]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.broadcast(flat, distributed.get_global_rank(group, owner), group=group)
    pieces = iter(flat.split([tensor.numel() for tensor in tensors]))
    found = []
    for form in forms:
        parts = {n: next(pieces).reshape(t.shape).to(t) for n, t in form.tensors().items()}
        found.append(form.with_tensors(parts))
    return found
