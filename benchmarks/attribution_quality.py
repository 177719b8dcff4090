"""How good scores are, by method: ``python -m benchmarks.attribution_quality [task ...]``.

Tasks are ``logistic``, ``mlp``, ``gpt`` and ``facts``. Models are trained again on halves of the
data (``--subsets``, ``--seeds``), and the linear datamodelling score of each method is printed with
its standard error over queries, beside its time. ``--data-seed`` draws other data. For ``facts``,
it is recall and the mean reciprocal rank of the texts that state the fact.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from backpack_attribution import TRAK, Influence, Method, influence
from backpack_attribution.quality import (
    Task,
    characters,
    digits,
    facts,
    halves,
    lds,
    mean_reciprocal_rank,
    recall_at,
    retrained,
)

TASKS = {
    "logistic": lambda seed: digits("logistic", seed=seed),
    "mlp": lambda seed: digits("mlp", seed=seed),
    "gpt": lambda seed: characters(seed=seed),
    "facts": lambda seed: facts(seed=seed),
}


def methods(task: Task) -> dict[str, str | Method]:
    """By the name that is printed; with the weight decay as the damping, where there was one."""
    found: dict[str, str | Method] = {
        name: name for name in ("dot", "cosine", "trak", "logra", "kfac", "ekfac", "ekfac-cg")
    }
    found["trak, damped"] = TRAK(damping=1.0)
    if task.decay:
        found["ekfac, damped by the decay"] = Influence(damping=task.decay)
        found["ekfac-cg, damped by the decay"] = Influence(damping=task.decay, refine=20)
    return found


def measured(name: str, arguments: argparse.Namespace) -> None:
    """Print the table of a task."""
    task = TASKS[name](arguments.data_seed)
    begun = time.perf_counter()
    model, truth = task.train(), None
    if task.relevant is None:
        subsets = halves(len(task), arguments.subsets, seed=arguments.data_seed)
        file = arguments.folder / f"{name}-{arguments.data_seed}" if arguments.folder else None
        truth = retrained(task, subsets, range(arguments.seeds), file)
    print(f"\n{name}: {len(task)} samples, models trained in {time.perf_counter() - begun:.0f} s")
    for label, method in methods(task).items():
        begun = time.perf_counter()
        loaders = task.train_loader(), task.query_loader()
        scores = influence(model, task.lossfunc, *loaders, method, progress=False)
        took = time.perf_counter() - begun
        if truth is not None:
            said: Any = f"LDS {lds(scores, *truth)}"
        else:
            ranks = mean_reciprocal_rank(scores, task.relevant)
            said = f"recall at 2 {recall_at(2, scores, task.relevant)}, reciprocal rank {ranks}"
        print(f"  {label:32} {said}   {took:5.1f} s")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=[*TASKS], choices=[*TASKS, []])
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--data-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where losses of trained models are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tasks:
        measured(name, arguments)


if __name__ == "__main__":
    main()
