"""Several processes: matrices and gradients of all their samples, and shared inversions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

import torch
from torch import Tensor, distributed

from backpack_core.errors import UsageError
from backpack_optimizers.passes import Factors, Joined
from backpack_products.ranks import largest_of
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
    places = {p: place for place, p in enumerate(parameters)}
    matrices = [(f, p, m) for f, known in total.values.items() for p, m in known.items()]
    matrices.sort(key=lambda one: (one[0], places[one[1]]))  # passes may reach them in any order
    with_gradient = [p for p in parameters if p.grad is not None]
    parts = [torch.tensor([scale], dtype=torch.float64)]
    parts += [p.grad * scale for p in with_gradient if p.grad is not None]
    forms: list[Any] = [(places[p], [*p.shape]) for p in with_gradient]
    for field, parameter, matrix in matrices:
        sums = _as_sums(matrix, scale)
        forms.append((field, places[parameter], [part.numel() for part in sums]))
        parts += sums
    require_alike(forms, total, group)
    found = iter(_reduced(parts, group))
    weight = float(next(found))
    divisor = 1.0 if total.weight is None else weight
    for parameter in with_gradient:
        parameter.grad = next(found) / divisor
    for field, parameter, matrix in matrices:
        count = len(_as_sums(matrix, scale))
        of_all = _of_sums(matrix, [next(found) for _ in range(count)])
        total.values[field][parameter] = of_all.scaled(1 / divisor)
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


def require_alike(forms: Sequence[Any], total: Joined, group: distributed.ProcessGroup) -> None:
    """Check that all processes exchange tensors of the same parameters, for losses of one kind.

    Args:
        forms: What is exchanged: places of parameters, and sizes.
        total: The passes of this process.
        group: The processes.

    Raises:
        UsageError: Some parameters were reached only on some processes, or losses divide by numbers
            that are not proportional. All processes raise this.
    """
    numbers = [zlib.crc32(repr(forms).encode()), total.weight is not None, len(total.ratios)]
    is_same = _alike(numbers, group)
    if not is_same[0]:
        raise UsageError(
            "Processes have gradients or curvature of different parameters in this step, so these "
            "cannot be joined: make sure that every process runs a backward pass with a sample, "
            "and that all parameters take part in it."
        )
    if not all(is_same) or (len(total.ratios) > 1 and not all(_alike(total.ratios, group))):
        raise UsageError(
            "The losses of processes divide by numbers that are not proportional in this step, or "
            "some are sums and some are means, so their passes cannot be joined: use the same "
            "losses on every process, and reduction='sum' if several divide by different numbers."
        )


def _alike(numbers: Sequence[float], group: distributed.ProcessGroup) -> list[bool]:
    """Which of some numbers are the same on all processes, up to rounding."""
    found = largest_of([*numbers, *[-number for number in numbers]], group)
    most, least = found[: len(numbers)], found[len(numbers) :]
    return [isclose(one, -other) for one, other in zip(most, least, strict=True)]


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
