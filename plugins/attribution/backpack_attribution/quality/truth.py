"""The true effect of leaving out samples: models that are retrained."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import getclosurevars, isfunction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from backpack_attribution.disk import write
from backpack_attribution.identities import content_hash
from backpack_attribution.quality.tasks import Task
from backpack_core.errors import UsageError


class Retrained(NamedTuple):
    """Losses of queries under models that were trained on subsets.

    Attributes:
        subsets: Which samples each model was trained on, ``[S, N]``, boolean.
        outputs: The loss of each query, the mean over seeds, ``[S, M]``.
    """

    subsets: Tensor
    outputs: Tensor


def halves(samples: int, subsets: int, seed: int = 0, share: float = 0.5) -> Tensor:
    """Random subsets of half the data, ``[S, N]``, boolean.

    Args:
        samples: ``N``.
        subsets: ``S``.
        seed: The seed of the draws.
        share: How much of the data a subset has.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(subsets, samples, dtype=torch.bool)
    for row in chosen:
        row[torch.randperm(samples, generator=generator)[: round(share * samples)]] = True
    return chosen


def retrained(
    task: Task,
    subsets: Tensor,
    seeds: Sequence[int] = (0,),
    file: str | Path | None = None,
    progress: bool = True,
) -> Retrained:
    """Train a model on every subset, once for each seed, and compute the queries' losses.

    Args:
        task: What to train.
        subsets: ``[S, N]``, boolean.
        seeds: Seeds for each subset; the losses are averaged over these.
        file: Where the losses are stored after each subset, so that an interrupted run continues.
        progress: Whether to show a bar, if the output is a terminal.

    Raises:
        UsageError: The file has the losses of another task, or of other subsets or seeds.
    """
    about = {"seeds": [*seeds], "task": "" if file is None else _hash(task)}
    outputs = _kept(file, subsets, about)
    bar = tqdm(subsets, "models", disable=None if progress else True, leave=False)
    for number, subset in enumerate(bar):
        if number < len(outputs):
            continue
        losses = [task.losses(task.train(subset, seed)) for seed in seeds]
        outputs.append(torch.stack(losses).mean(0))
        if file is not None:
            tensors = {"subsets": subsets, "outputs": torch.stack(outputs)}
            write(Path(file), tensors, "retrained", about)
    return Retrained(subsets, torch.stack(outputs))


def _hash(task: Task) -> str:
    """A hash of the data, and of how a model is trained on them as far as that is known."""
    fit: Any = task.fit
    known = getclosurevars(fit).nonlocals if isfunction(fit) else {}
    plain = {name: value for name, value in known.items() if isinstance(value, (str, int, float))}
    data = task.inputs, task.targets, task.query_inputs, task.query_targets
    return content_hash([*data, task.decay, getattr(fit, "__qualname__", ""), plain])


def _kept(file: str | Path | None, subsets: Tensor, about: dict[str, Any]) -> list[Tensor]:
    if file is None or not Path(file).exists():
        return []
    import json

    with safe_open(file, "pt") as opened:
        found = json.loads((opened.metadata() or {}).get("backpack_attribution", "{}"))
        known = opened.get_tensor("subsets")
        is_same = all(found.get(name) == value for name, value in about.items())
        is_same = is_same and torch.equal(known, subsets)
        outputs = opened.get_tensor("outputs")
    if not is_same:
        raise UsageError(
            f"{file} has the losses of another task, or of other subsets or seeds: give another "
            "file."
        )
    return [*outputs]
