"""One cell of the comparison: a quantity on a problem, by every peer that can."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.limit import largest, limit
from benchmarks.measure import alternate, forget, peak_memory, settle, write_rate
from benchmarks.peers import PEERS, Step, Unsupported
from benchmarks.problems import Problem
from benchmarks.quantities import Quantity

# Bytes of a tensor from which on a cell is left out: each peer needs several like it.
LARGEST = 3 * 2**30


@dataclass
class Cell:
    """What was measured.

    Attributes:
        problem: Its name.
        quantity: Its name.
        batch: Number of samples.
        gradient: Seconds of a plain gradient.
        time: For each peer, time relative to the gradient.
        to_ours: For each peer, its time relative to ours, measured next to each other.
        memory: For each peer, bytes at its peak above those of a plain gradient.
        write_rate: Bytes per second of a write of the result's size into memory that is there,
            before the runs.
        limit: The least time that is needed, relative to the gradient.
        difference: Largest relative difference between the incumbent's numbers and ours.
        refused: Why a peer is missing.
    """

    problem: str
    quantity: str
    batch: int
    gradient: float = 0.0
    time: dict[str, float] = field(default_factory=dict)
    to_ours: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    write_rate: float = 0.0
    limit: float | None = None
    difference: float | None = None
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


def measure(
    problem: Problem,
    quantity: Quantity,
    peers: Sequence[str],
    seconds: float,
    clock: str = "wall",
    memory: bool = True,
    batch: int | None = None,
) -> Cell:
    """Measure one cell.

    Args:
        problem: The problem.
        quantity: The quantity.
        peers: Which peers besides the gradient.
        seconds: How long to repeat.
        clock: See :func:`benchmarks.measure.alternate`.
        memory: Measure memory, too.
        batch: Number of samples; default: the problem's.
    """
    size = batch or (problem.exact_batch if quantity.exact else problem.batch)
    cell = Cell(problem.name, quantity.name, size)
    bound = limit(problem, quantity, size)
    needed = largest(problem, quantity, bound)
    if needed > LARGEST:
        cell.refused["all"] = f"it needs {needed / 2**30:.1f} GiB several times"
        return cell
    bytes_written = min(max(bound.result_bytes if bound else 0, 2**20), 2**28)
    cell.write_rate = write_rate(clock, bytes_written, fresh=False)
    steps, models = _steps(cell, problem, quantity, ["gradient", *peers])
    if {"ours", "incumbent"} <= models.keys() and not quantity.random:
        cell.difference = _difference(models["ours"], models["incumbent"], quantity.fields)
    times = alternate(steps, seconds, clock, lambda peer: forget(models[peer], quantity), before=1)
    cell.gradient = times.best("gradient")
    for name in steps:
        cell.time[name] = times.ratio(name, "gradient")
        if "ours" in steps:
            cell.to_ours[name] = times.ratio(name, "ours")
    if bound is not None:
        cell.limit = bound.time(cell.gradient, cell.write_rate) / cell.gradient
    models.clear()
    if memory:
        base = peak_memory(problem.name, "BatchGrad", "gradient", size) or 0
        for name in steps.keys() - {"gradient"}:
            peak = peak_memory(problem.name, quantity.name, name, size)
            if peak is not None:
                cell.memory[name] = peak - base
    return cell


def _steps(
    cell: Cell, problem: Problem, quantity: Quantity, peers: Sequence[str]
) -> tuple[dict[str, Step], dict[str, nn.Module]]:
    """The peers that work, after a first run."""
    steps, models = {}, {}
    for peer in peers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step, model = PEERS[peer](problem, quantity, cell.batch)
                if peer == "ours":
                    settle(step)
                else:
                    step()
                check(peer, model, quantity)
        except Exception as error:  # whatever it is, the peer cannot do this
            known = isinstance(error, Unsupported)
            text = str(error).strip().split("\n", 1)[0]
            cell.refused[peer] = text if known else f"{type(error).__name__}: {text}"
        else:
            steps[peer], models[peer] = step, model
    return steps, models


def check(peer: str, model: nn.Module, quantity: Quantity) -> None:
    """Refuse a library that computed only a part: the incumbent warns and leaves some out."""
    if peer in {"ours", "incumbent"}:
        missing = [n for n, p in model.named_parameters() if not hasattr(p, quantity.fields[0])]
        if missing:
            raise Unsupported(f"nothing for {len(missing)} parameters, as {missing[0]}")


def _difference(ours: nn.Module, theirs: nn.Module, fields: Sequence[str]) -> float | None:
    """Largest difference of any field, relative to the largest entry of the parameter's.

    A root is one up to a rotation of its columns, of which ours has one less: their squares count.
    """
    worst = None
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        for name in fields:
            for a, b in zip(_tensors(first, name), _tensors(second, name), strict=True):
                if name.startswith("sqrt"):
                    a, b = (_sum_of_squares(root) for root in (a, b))
                scale = float(b.abs().max()) or 1.0
                error = float((a.reshape(b.shape) - b).abs().max()) / scale
                worst = error if worst is None else max(worst, error)
    return worst


def _sum_of_squares(root: Tensor) -> Tensor:
    """Over the columns, which may be gigabytes: one at a time."""
    total = torch.zeros_like(root[0])
    for column in root:
        total.addcmul_(column, column)
    return total


def _tensors(parameter: nn.Parameter, name: str) -> list[Tensor]:
    value = getattr(parameter, name)
    return [value] if isinstance(value, torch.Tensor) else list(value)
