"""Influence on small language models: ``python -m benchmarks.influence [model ...]``.

A GPT-2 and a Llama of 4 layers, width 256, 8,192 words, texts of 128 tokens: 64 for training, 8
queries, in batches of 8. Printed are times over that of a plain forward and backward pass over the
64, and the largest memory of the process. ``--linear`` freezes all but the weights of linear layers
inside of blocks, which is what other programs cover.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from backpack_attribution import GradDot, GradientStore, Influence, fill
from backpack_attribution.problem import Problem
from backpack_attribution.run import Run
from backpack_firstorder import Projection
from backpack_layers.language import CausalLMLoss

WORDS, WIDTH, LAYERS, HEADS, TOKENS = 8192, 256, 4, 4, 128


def gpt2() -> Module:
    """A GPT-2, with a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    model: Module = GPT2LMHeadModel(config)
    return model


def llama() -> Module:
    """A Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=TOKENS,
    )
    model: Module = LlamaForCausalLM(config)
    return model


MODELS = {"gpt2": gpt2, "llama": llama}


def texts(samples: int, seed: int, size: int = 8) -> list[dict[str, Any]]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, TOKENS), generator=generator)
    return [{"input_ids": part, "labels": part, "use_cache": False} for part in ids.split(size)]


def restrict(model: Module) -> None:
    """Train the weights of linear layers in blocks alone."""
    for name, p in model.named_parameters():
        p.requires_grad_(p.dim() == 2 and (".h." in name or ".layers." in name))


def plain(model: Module, batches: list[Any]) -> None:
    """A forward and a backward pass over all batches."""
    lossfunc = CausalLMLoss("sum")
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        lossfunc(model(**inputs).logits, batch["labels"]).backward()
        model.zero_grad()


def cells(model: Module, train: list[Any], queries: list[Any]) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    problem = Problem(model, CausalLMLoss("sum"))
    run = Run(problem, problem, train, queries, progress=False)
    for loader in (train, queries):
        run.names(loader, "place", is_shared=False)
    kfac, ekfac = Influence("kfac"), Influence()

    def scores() -> None:
        with problem.extended():
            asked = [ekfac.transform(q, run) for q in ekfac.asked(run)]
            for each in asked:
                ekfac.scores(run, each)

    def stored() -> None:
        with tempfile.TemporaryDirectory() as folder:
            fill(
                GradientStore(Path(folder) / "store"),
                model,
                problem.lossfunc,
                train,
                Projection(64),
                progress=False,
            )

    def fitted(method: Influence) -> None:
        with problem.extended():
            method.fit(run)

    return {
        "dot products": lambda: GradDot().values(run),
        "KFAC fit": lambda: fitted(kfac),
        "EKFAC fit": lambda: fitted(ekfac),
        "EKFAC scores": scores,
        "stored projections": stored,
    }


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def measured(name: str, arguments: argparse.Namespace) -> None:
    """Print the ratios of a model: the smallest of several runs, one after the other."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    if arguments.linear:
        restrict(model)
    train, queries = texts(arguments.texts, 1), texts(8, 2)
    asked = cells(model, train, queries)
    least = {what: float("inf") for what in ("plain", *asked)}
    for _ in range(arguments.runs):
        least["plain"] = min(least["plain"], timed(lambda: plain(model, train)))
        for what, function in asked.items():
            least[what] = min(least[what], timed(function))
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"\n{name}: {count:,} numbers; {arguments.texts} texts take {least['plain']:.2f} s plainly"
    )
    for what in asked:
        print(f"  {what:20} {least[what] / least['plain']:6.2f} plain passes")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  largest memory so far {peak:.2f} GiB")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--texts", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models or MODELS:
        measured(name, arguments)


if __name__ == "__main__":
    main()
