"""Influence beside other programs: ``python -m benchmarks.influence_peers [model ...]``.

The models, texts and cells of :mod:`benchmarks.influence`, by this library and by ``kronfluence``,
``dattri-llm`` and ``bergson``, as far as they are installed (none is a dependency; take an
environment of their own). Only linear layers in blocks take part, which all of them cover, with
their biases; GPT-2's ``Conv1D`` is made a ``Linear``, which is what kronfluence knows. With
``--all``, embeddings, gains and heads are trained as well, and each program takes of them what it
covers. In the models ``gpt2-twice`` and ``llama-twice`` all blocks are the first.

Each program runs in a process of its own, on one core. Printed are processor times over that of a
plain pass in that process, its largest memory, and how far its dot products are from autograd's,
which have the cross terms of tied weights and of modules that run several times.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.influence import MODELS, plain, texts
from benchmarks.influence_programs import PROGRAMS, SIZE, layers_of, loss_of, samples_of

CELLS = ("dot products", "KFAC fit", "EKFAC fit", "EKFAC scores", "stored projections")
NAMES = [*MODELS, *(f"{name}-twice" for name in MODELS)]


def model_of(name: str, is_whole: bool = False) -> Module:
    """The model with Linear instead of Conv1D.

    Args:
        name: One of ``NAMES``.
        is_whole: Whether everything is trained, or linear layers in blocks alone.
    """
    torch.manual_seed(0)
    kind, _, twice = name.partition("-")
    model: Any = MODELS[kind]().eval()
    for module in [*model.modules()]:
        for key, child in [*module.named_children()]:
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data = child.weight.data.T.contiguous()
                linear.bias.data = child.bias.data
                setattr(module, key, linear)
    if twice:
        blocks = getattr(model.base_model, "h", None) or model.base_model.layers
        for number in range(1, len(blocks)):
            blocks[number] = blocks[0]
    model.requires_grad_(is_whole)
    for layer in layers_of(model):
        model.get_submodule(layer).requires_grad_(True)
    model.config.use_cache = False
    found: Module = model
    return found


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


def run(program: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one program takes, in this process."""
    torch.set_num_threads(1)
    train, queries = texts(arguments.texts, 1, SIZE), texts(8, 2, SIZE)
    plainly = model_of(name, arguments.all)
    wanted = by_autograd(plainly, train[:1], queries)
    least, error = {"plain": float("inf")}, None
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(name, arguments.all)
        found = PROGRAMS[program](model, train, queries, Path(folder))
        asked = {what: f for what, f in found.items() if what.startswith(tuple(arguments.cells))}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(arguments.runs):
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
    which = "all parameters" if arguments.all else "linear layers in blocks"
    print(f"\n{name}, {which}, × one plain pass over {arguments.texts} texts")
    print(f"{'':14}" + "".join(f"{what:>20}" for what in CELLS) + f"{'GiB':>8}   error of dots")
    for program in arguments.programs:
        command = [sys.executable, "-m", "benchmarks.influence_peers", name, "--only", program]
        command += ["--runs", str(arguments.runs), "--texts", str(arguments.texts)]
        command += ["--cells", *arguments.cells, *(["--all"] if arguments.all else [])]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            print(f"{program:14} did not run: {found.stderr.strip().splitlines()[-1]}")
            continue
        row = json.loads(found.stdout.splitlines()[-1])
        ratios = row["ratios"]
        if "EKFAC fit and scores" in ratios:
            ratios["EKFAC scores"] = ratios["EKFAC fit and scores"] - ratios["EKFAC fit"]
        error = "–" if row["error"] is None else f"{row['error']:.1e}"
        shown = (f"{ratios[c]:20.2f}" if c in ratios else f"{'–':>20}" for c in CELLS)
        print(f"{program:14}" + "".join(shown) + f"{row['peak']:8.2f}   {error}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS], choices=[*NAMES, []])
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--only", choices=[*PROGRAMS], help="in this process, as JSON")
    parser.add_argument("--all", action="store_true", help="train every parameter")
    parser.add_argument("--cells", nargs="*", default=[*CELLS], choices=CELLS)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--texts", type=int, default=64)
    arguments = parser.parse_args()
    for name in arguments.models:
        if arguments.only:
            print(json.dumps(run(arguments.only, name, arguments)))
        else:
            measured(name, arguments)


if __name__ == "__main__":
    main()
