"""The programs of :mod:`benchmarks.influence_peers`: functions without arguments, to be timed."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F

from backpack_core import extend
from benchmarks.influence import cells

Cells = dict[str, Callable[[], Any]]
SIZE = 8  # samples of a batch


def layers_of(model: Module) -> list[str]:
    """The paths of the layers that take part."""
    named = model.named_modules()
    return [name for name, m in named if isinstance(m, nn.Linear) and "head" not in name]


def is_shared(model: Any) -> bool:
    """Whether blocks run several times."""
    blocks = getattr(model.base_model, "h", None) or model.base_model.layers
    return len({*blocks}) < len(blocks)


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
        shared = is_shared(model)
        analyzer.fit_all_factors(
            strategy, data, per_device_batch_size=SIZE, overwrite_output_dir=True,
            factor_args=FactorArguments(strategy=strategy, has_shared_parameters=shared),
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
        REGISTER_ALL,
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
    is_whole = all(p.requires_grad for p in model.parameters())
    hooks = (
        HookManagerConfig(linear_io=REGISTER_ALL)
        if is_whole
        else HookManagerConfig(hook_types=dict.fromkeys(layers_of(model), "linear_io"))
    )
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


class Bergson:
    """Bergson, by its collectors."""

    def __init__(self, model: Module, train: list[Any], queries: list[Any], folder: Path) -> None:
        logging.disable(logging.INFO)
        base = f"{model.base_model_prefix}."
        self.model: Any = model
        self.names = {name.removeprefix(base) for name in layers_of(model)}
        self.folder, self.fitted = folder, folder / "fit"
        self.data, self.asked = self._data(train), self._data(queries)
        self.batches = self._parts(self.data)

    def cells(self) -> Cells:
        """What is timed."""
        return {
            "dot products": lambda: self.scores(self.collect(self.asked).gradients),
            "KFAC fit": lambda: self.fit(False),
            "EKFAC fit": lambda: self.fit(True),
            "EKFAC scores": self.scores_of_ekfac,
            "stored projections": self.stored,
        }

    def _data(self, batches: list[Any]) -> Any:
        from datasets import Dataset

        ids = torch.cat([batch["input_ids"] for batch in batches]).tolist()
        return Dataset.from_dict({"input_ids": ids, "labels": ids, "length": [*map(len, ids)]})

    def _parts(self, some: Any) -> list[list[int]]:
        return [[*range(n, min(n + SIZE, len(some)))] for n in range(0, len(some), SIZE)]

    def _settings(self, place: Path, **options: Any) -> Any:
        from bergson.config.config import IndexConfig

        cfg = IndexConfig(run_path=str(place), include_bias=True, **options)
        cfg.partial_run_path.mkdir(parents=True, exist_ok=True)
        return cfg

    def collect(self, some: Any, **options: Any) -> Any:
        """Gradients of some texts, or what ``options`` make of them."""
        from bergson.collector.collector import CollectorComputer
        from bergson.collector.in_memory_collector import InMemoryCollector
        from bergson.gradients import GradientProcessor

        cfg = self._settings(self.folder / "run")
        collector = InMemoryCollector(
            model=self.model.base_model, data=some, cfg=cfg, target_modules=self.names,
            processor=GradientProcessor(include_bias=True), **options,
        )  # fmt: skip
        computer = CollectorComputer(
            model=self.model, data=some, collector=collector, batches=self._parts(some), cfg=cfg
        )
        computer.run_with_collector_hooks()
        return collector

    def scores(self, query: dict[str, Tensor]) -> Tensor:
        """Inner products of the training texts with queries."""
        from bergson.score.score_writer import InMemorySequenceScoreWriter
        from bergson.score.scorer import Scorer

        writer = InMemorySequenceScoreWriter(len(self.data), len(self.asked))
        scorer = Scorer(query, [*query], writer, torch.device("cpu"), torch.float32)
        self.collect(self.data, scorer=scorer)
        return torch.as_tensor(writer.scores)

    def fit(self, is_corrected: bool) -> None:
        """The factors, with corrected eigenvalues or not."""
        from bergson.config.config import HessianConfig
        from bergson.hessians.hessian_approximations import fit_factored_hessians

        cfg = self._settings(self.fitted)
        fit_factored_hessians(
            self.model, self.data, cfg, HessianConfig("kfac", ev_correction=is_corrected),
            target_modules=self.names, attention_cfgs={}, batches=self.batches,
            path=str(cfg.partial_run_path), do_eigendecomposition=True,
        )  # fmt: skip

    def scores_of_ekfac(self) -> Tensor:
        """Influence functions with the factors of the last fit."""
        from bergson.hessians.preconditioner import FactoredPreconditioner

        path = self._settings(self.fitted).partial_run_path
        inverse = FactoredPreconditioner.from_path(path, ev_correction=True)
        return self.scores(inverse.apply(self.collect(self.asked).gradients))

    def stored(self) -> None:
        """A directory of projected gradients."""
        from bergson.collection import collect_gradients
        from bergson.gradients import GradientProcessor

        with tempfile.TemporaryDirectory() as place:
            processor = GradientProcessor(projection_dim=8, include_bias=True)
            cfg = self._settings(Path(place) / "run", projection_dim=8)
            collect_gradients(
                self.model, self.data, processor, cfg, batches=self.batches,
                target_modules=self.names,
            )  # fmt: skip


def bergson(model: Module, train: list[Any], queries: list[Any], folder: Path) -> Cells:
    """Bergson, by its collectors."""
    return Bergson(model, train, queries, folder).cells()


PROGRAMS: dict[str, Callable[..., Cells]] = {
    "ours": ours,
    "kronfluence": kronfluence,
    "dattri_llm": dattri_llm,
    "bergson": bergson,
}
