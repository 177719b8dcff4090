"""Attribution on a transformer: scores, projections and kept products, × one plain pass.

``python -m benchmarks.attribution`` prints a table: GPT-2 with 4 layers of width 256, a vocabulary
of 8,192 words and a tied head; 64 training sequences of 128 tokens, 8 queries; all parameters. The
first row is a plain pass over the 64, forward and backward. Times are of the processor, so that a
busy machine disturbs them less. ``--layers 12 --width 768 --words 50257
--samples 32`` is the smallest GPT-2; ``--repeats 0`` runs everything once.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from backpack_firstorder.projections import ProjectedGrad
from backpack_firstorder.scores import GradInner


class _Model(nn.Module):
    """A language model whose output is logits alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=options.words, n_positions=options.tokens, n_embd=options.width,
            n_layer=options.layers, n_head=max(1, options.width // 64), resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(words).logits
        return logits.mT


def _passes(options: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], int]:
    """What is timed, and the number of parameters."""
    torch.manual_seed(0)
    model, lossfunc = extend(_Model(options)), extend(nn.CrossEntropyLoss(reduction="sum"))
    shape = (options.samples + options.queries, options.tokens + 1)
    words = torch.randint(0, options.words, shape)
    train, asked = words[: options.samples], words[options.samples :]

    def run(some: Tensor, *extensions: Any, **settings: Any) -> None:
        model.zero_grad()
        loss = lossfunc(model(some[:, :-1]), some[:, 1:])
        if not extensions:
            loss.backward()
            return
        with backpack(*extensions, check="never", **settings):
            loss.backward()

    run(asked, BatchGrad(form="product"), gradient="none")
    queries = {n: p.grad_batch for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    low = {name: query.low_rank(8) for name, query in queries.items()} if options.low else None
    for parameter in model.parameters():
        del parameter.grad_batch  # type: ignore[attr-defined]

    def drop(name: str, gradients: Any) -> None:
        """What a store would take."""

    found: dict[str, Callable[[], object]] = {
        "plain pass": lambda: run(train),
        f"scores of {options.queries} queries": lambda: run(
            train, GradInner(queries), gradient="none"
        ),
        "projections, kronecker, 256": lambda: run(train, ProjectedGrad(256), gradient="none"),
        "projections, kronecker, 4096": lambda: run(train, ProjectedGrad(4096), gradient="none"),
        "products to a consumer": lambda: run(
            train, BatchGrad(form="product", consumer=drop), gradient="none"
        ),
    }
    if low is not None:
        found["scores, queries of rank 8"] = lambda: run(train, GradInner(low), gradient="none")
    return found, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Print times and peaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("layers", 4), ("width", 256), ("words", 8192), ("tokens", 128), ("samples", 64),
        ("queries", 8), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--low", action="store_true", help="queries of rank 8, too")
    options = parser.parse_args()
    passes, count = _passes(options)
    print(f"{count:,} parameters, {options.samples} texts of {options.tokens} tokens")
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(options.repeats + 1):  # the first is left out
        for name, function in passes.items():
            start = process_time()
            function()
            times[name].append(process_time() - start)
    middles = {
        name: sorted(found[1:] or found)[options.repeats // 2] for name, found in times.items()
    }
    plain = middles["plain pass"]
    for name, middle in middles.items():
        print(f"{name:32} {middle:8.2f} s  {middle / plain:5.2f} ×")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak of the process {peak:.2f} GiB")


if __name__ == "__main__":
    main()
