"""Influence beside other programs: ``python -m benchmarks.influence_peers [model ...]``.

The models, texts and cells of :mod:`benchmarks.influence`, by this library and by ``kronfluence``,
``dattri-llm`` and ``bergson``, as far as they are installed (none is a dependency; take an
environment of their own). Only linear layers in blocks take part, which all of them cover, with
their biases; GPT-2's ``Conv1D`` is made a ``Linear``, which is what kronfluence knows. Each program
runs in a process of its own, on one core. Printed are processor times over that of a plain pass in
that process, its largest memory, and how far its dot products are from autograd's.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F

from backpack_core import extend
from benchmarks.influence import MODELS, cells, plain, texts

Cells = dict[str, Callable[[], Any]]
SIZE = 8  # samples of a batch
CELLS = ("dot products", "KFAC fit", "EKFAC fit", "EKFAC scores", "stored projections")


def model_of(name: str) -> Module:
    """The model with Linear instead of Conv1D; only linear layers in blocks are trained."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    for module in [*model.modules()]:
        for key, child in [*module.named_children()]:
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data = child.weight.data.T.contiguous()
                linear.bias.data = child.bias.data
                setattr(module, key, linear)
    model.requires_grad_(False)
    for layer in layers_of(model):
        model.get_submodule(layer).requires_grad_(True)
    model.config.use_cache = False
    found: Module = model
    return found


def layers_of(model: Module) -> list[str]:
    """The paths of the layers that take part."""
    named = model.named_modules()
    return [name for name, m in named if isinstance(m, nn.Linear) and "head" not in name]


def samples_of(batches: list[Any]) -> list[dict[str, Tensor]]:
    """Single texts."""
    ids = torch.cat([batch["input_ids"] for batch in batches])
    return [{"input_ids": text, "labels": text} for text in ids]


def loss_of(model: Any, batch: Any, sample: bool = False) -> Tensor:
    """The sum over tokens, of the text or of drawn ones."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    target = batch["labels"][:, 1:].flatten()
    if sample:
        with torch.no_grad():
            target = torch.multinomial(logits.softmax(-1), 1).flatten()
    return F.cross_entropy(logits, target, reduction="sum")


# Programs -----------------------------------------------------------------------------------------


def ours(model: Module, train: list[Any], queries: list[Any], folder: Path) -> Cells:
    """This library; the model stays extended, so that the second run measures nothing any more."""
    extend(model)
    found = cells(model, train, queries)
    dots = found["dot products"]
    return {**found, "dot products": lambda: torch.as_tensor(dots())}


def kronfluence(model: Module, train: list[Any], queries: list[Any], folder: Path) -> Cells:
    """Kronfluence, by its Analyzer."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    names = layers_of(model)

    class Language(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Tensor:
            return loss_of(model, batch, sample)

        def compute_measurement(self, batch: Any, model: Any) -> Tensor:
            return loss_of(model, batch)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

    task = Language()
    analyzer = Analyzer(
        "benchmark", prepare_model(model, task), task, cpu=True, disable_tqdm=True,
        output_dir=str(folder), log_level=logging.ERROR,
    )  # fmt: skip
    data, asked = samples_of(train), samples_of(queries)

    def fit(strategy: str) -> None:
        analyzer.fit_all_factors(
            strategy, data, per_device_batch_size=SIZE, overwrite_output_dir=True,
            factor_args=FactorArguments(strategy=strategy),
        )  # fmt: skip

    def scores(strategy: str) -> Tensor:
        analyzer.compute_pairwise_scores(
            strategy, strategy, asked, data, per_device_query_batch_size=SIZE,
            per_device_train_batch_size=SIZE, overwrite_output_dir=True,
        )  # fmt: skip
        found: Tensor = analyzer.load_pairwise_scores(strategy)["all_modules"].T
        return found

    fit("identity")
    return {
        "dot products": lambda: scores("identity"),
        "KFAC fit": lambda: fit("kfac"),
        "EKFAC fit": lambda: fit("ekfac"),
        "EKFAC scores": lambda: scores("ekfac"),
    }


def dattri_llm(model: Module, train: list[Any], queries: list[Any], folder: Path) -> Cells:
    """dattri-LLM, by its attributors; gradients are streamed, and kept for the fits."""
    from dattri_llm import (
        AttributionArguments,
        AttributionTask,
        EKFACAttributor,
        HookManagerConfig,
        KFACAttributor,
        TracInAttributor,
    )

    logging.disable(logging.WARNING)
    arguments = AttributionArguments(
        output_dir=str(folder), per_device_train_batch_size=SIZE, per_device_eval_batch_size=SIZE
    )
    hooks = HookManagerConfig(hook_types=dict.fromkeys(layers_of(model), "linear_io"))
    task = AttributionTask(loss_of, model)
    data, asked = samples_of(train), samples_of(queries)
    fits: dict[Any, Any] = {}

    def dots() -> Tensor:
        found = TracInAttributor(arguments, task=task).attribute(data, asked, hook_config=hooks)
        return torch.as_tensor(found.scores)

    def fit(kind: Any) -> None:
        fits[kind] = kind(arguments, task=task)
        with fits[kind].generate_train_rep(data, hook_config=hooks) as source:
            fits[kind].fit_raw(source)

    def all_of_ekfac() -> None:
        EKFACAttributor(arguments, task=task).attribute(
            data, asked, hook_config=hooks, damping=0.1, relative_damping=True
        )

    return {
        "dot products": dots,
        "KFAC fit": lambda: fit(KFACAttributor),
        "EKFAC fit": lambda: fit(EKFACAttributor),
        "EKFAC fit and scores": all_of_ekfac,
    }


def bergson(model: Module, train: list[Any], queries: list[Any], folder: Path) -> Cells:
    """Bergson, by its collectors."""
    from bergson.collection import collect_gradients
    from bergson.collector.collector import CollectorComputer
    from bergson.collector.in_memory_collector import InMemoryCollector
    from bergson.config.config import HessianConfig, IndexConfig
    from bergson.gradients import GradientProcessor
    from bergson.hessians.hessian_approximations import fit_factored_hessians
    from bergson.hessians.preconditioner import FactoredPreconditioner
    from bergson.score.score_writer import InMemorySequenceScoreWriter
    from bergson.score.scorer import Scorer
    from datasets import Dataset

    logging.disable(logging.INFO)
    base = f"{model.base_model_prefix}."
    names = {name.removeprefix(base) for name in layers_of(model)}

    def data_of(batches: list[Any]) -> Any:
        ids = torch.cat([batch["input_ids"] for batch in batches]).tolist()
        return Dataset.from_dict({"input_ids": ids, "labels": ids, "length": [*map(len, ids)]})

    data, asked = data_of(train), data_of(queries)
    fitted = folder / "fit"

    def settings(place: Path, **options: Any) -> Any:
        cfg = IndexConfig(run_path=str(place), include_bias=True, **options)
        cfg.partial_run_path.mkdir(parents=True, exist_ok=True)
        return cfg

    def parts(some: Any) -> list[list[int]]:
        return [[*range(n, min(n + SIZE, len(some)))] for n in range(0, len(some), SIZE)]

    def collect(some: Any, **options: Any) -> Any:
        cfg = settings(folder / "run")
        collector = InMemoryCollector(
            model=model.base_model, data=some, cfg=cfg, target_modules=names,
            processor=GradientProcessor(include_bias=True), **options,
        )  # fmt: skip
        computer = CollectorComputer(
            model=model, data=some, collector=collector, batches=parts(some), cfg=cfg
        )
        computer.run_with_collector_hooks()
        return collector

    def scores(query: dict[str, Tensor]) -> Tensor:
        writer = InMemorySequenceScoreWriter(len(data), len(asked))
        modules = [*query]
        scorer = Scorer(query, modules, writer, torch.device("cpu"), torch.float32)
        collect(data, scorer=scorer)
        return torch.as_tensor(writer.scores)

    def fit(is_corrected: bool) -> None:
        cfg = settings(fitted)
        fit_factored_hessians(
            model, data, cfg, HessianConfig("kfac", ev_correction=is_corrected),
            target_modules=names, attention_cfgs={}, batches=parts(data),
            path=str(cfg.partial_run_path), do_eigendecomposition=True,
        )  # fmt: skip

    def scores_of_ekfac() -> Tensor:
        path = settings(fitted).partial_run_path
        inverse = FactoredPreconditioner.from_path(path, ev_correction=True)
        return scores(inverse.apply(collect(asked).gradients))

    def stored() -> None:
        with tempfile.TemporaryDirectory() as place:
            processor = GradientProcessor(projection_dim=8, include_bias=True)
            cfg = settings(Path(place) / "run", projection_dim=8)
            collect_gradients(
                model, data, processor, cfg, batches=parts(data),
                target_modules=names,
            )  # fmt: skip

    return {
        "dot products": lambda: scores(collect(asked).gradients),
        "KFAC fit": lambda: fit(False),
        "EKFAC fit": lambda: fit(True),
        "EKFAC scores": scores_of_ekfac,
        "stored projections": stored,
    }


PROGRAMS: dict[str, Callable[..., Cells]] = {
    "ours": ours,
    "kronfluence": kronfluence,
    "dattri_llm": dattri_llm,
    "bergson": bergson,
}


# Measured -----------------------------------------------------------------------------------------


def by_autograd(model: Module, train: list[Any], queries: list[Any]) -> Tensor:
    """Dot products of gradients, one text at a time, ``[N, M]``."""
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradient(text: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, {key: value.unsqueeze(0) for key, value in text.items()})
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])

    asked = torch.stack([*map(gradient, samples_of(queries))])
    return torch.stack([asked @ gradient(text) for text in samples_of(train)])


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, and what the function returned."""
    begun = process_time()
    found = function()
    return process_time() - begun, found


def run(program: str, name: str, runs: int, count: int) -> dict[str, Any]:
    """What one program takes, in this process."""
    torch.set_num_threads(1)
    train, queries = texts(count, 1, SIZE), texts(8, 2, SIZE)
    plainly = model_of(name)
    wanted = by_autograd(plainly, train[:1], queries)
    least, error = {"plain": float("inf")}, None
    with tempfile.TemporaryDirectory() as folder:
        asked = PROGRAMS[program](model_of(name), train, queries, Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(runs):
            least["plain"] = min(least["plain"], timed(lambda: plain(plainly, train))[0])
            for what, function in asked.items():
                took, found = timed(function)
                least[what] = min(least.get(what, took), took)
                if what == "dot products":
                    near = found[: len(wanted)].double() - wanted.double()
                    error = float(near.abs().max() / wanted.double().abs().max())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratios = {what: took / least["plain"] for what, took in least.items() if what != "plain"}
    return {"ratios": ratios, "error": error, "peak": peak / 2**20, "before": before / 2**20}


def measured(name: str, arguments: argparse.Namespace) -> None:
    """Print the table of a model."""
    print(f"\n{name}, × one plain pass over {arguments.texts} texts")
    print(f"{'':14}" + "".join(f"{what:>20}" for what in CELLS) + f"{'GiB':>8}   error of dots")
    for program in arguments.programs:
        command = [sys.executable, "-m", "benchmarks.influence_peers", name, "--only", program]
        command += ["--runs", str(arguments.runs), "--texts", str(arguments.texts)]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            print(f"{program:14} did not run: {found.stderr.strip().splitlines()[-1]}")
            continue
        row = json.loads(found.stdout.splitlines()[-1])
        ratios = row["ratios"]
        if "EKFAC fit and scores" in ratios:
            ratios["EKFAC scores"] = ratios["EKFAC fit and scores"] - ratios["EKFAC fit"]
        shown = (f"{ratios[c]:20.2f}" if c in ratios else f"{'–':>20}" for c in CELLS)
        print(f"{program:14}" + "".join(shown) + f"{row['peak']:8.2f}   {row['error']:.1e}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS], choices=[*MODELS, []])
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--only", choices=[*PROGRAMS], help="in this process, as JSON")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--texts", type=int, default=64)
    arguments = parser.parse_args()
    for name in arguments.models:
        if arguments.only:
            print(json.dumps(run(arguments.only, name, arguments.runs, arguments.texts)))
        else:
            measured(name, arguments)


if __name__ == "__main__":
    main()
