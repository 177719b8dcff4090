"""Where the time of a pass goes: ``python -m benchmarks.shares``.

A line for each problem and quantity, in milliseconds: a plain pass (``plain``); the same without
gradients of parameters, which no quantity needs (``bare``); what the forward pass of an extended
model takes besides (``hooks``); what is read off at parameters, by itself, outside of a pass
(``kernels``), with factors in the cache, memory that is used again, and the plain gradient as far
as it is a sum of that; the multiply-adds that this is at the least, at the rate of the plain
gradient (``least``); a whole pass, ``gradient="shared"`` (``ours``); and what that leaves
(``rest``): the traversal, memory that was not in the cache, and results written to fresh memory.
With ``--forms``, ``kernels`` by the form of the product.

The allocator gives back what a quantity kept for one pass, unless it is told not to, as activations
do in training: ``MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend, extensions
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import batch_sum, has_free_sum
from benchmarks.limit import limit, shared_limit
from benchmarks.measure import CLOCKS, SETTLED, alternate, forget
from benchmarks.peers import FIRST_ORDER, Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES, Quantity

_NAMES = ("BatchGrad", "SumGradSquared", "Variance", "BatchL2Grad", "ClippedSumGrad")
_HEAD = ("plain", "bare", "hooks", "kernels", "least", "ours", "rest")


class _Kept(FirstOrderExtension):
    """Keeps what others read."""

    savefield = "kept_product"

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Tensor, SampleProduct]] = []

    def read(self, product: SampleProduct) -> Tensor:
        """Nothing of interest."""
        assert product.module is not None
        self.products.append((product.module.get_parameter(product.name), product))
        return torch.zeros(())


def bare(problem: Problem, batch: int) -> Step:
    """A pass as far as the outputs of modules with parameters of their own."""
    model, lossfunc, (x, y) = problem.net(), nn.CrossEntropyLoss(), problem.data(batch)
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(keep)

    def step() -> None:
        loss = lossfunc(model(x), y)
        some = [output for output in outputs if output.requires_grad]
        outputs.clear()
        torch.autograd.grad(loss, some, allow_unused=True)

    return step


def reading(
    problem: Problem, quantity: Quantity, batch: int
) -> Callable[[Callable[[], float]], dict[str, float]]:
    """What reads all products of a pass once, and says how long each form took."""
    model, lossfunc = extend(problem.net()), extend(nn.CrossEntropyLoss())
    x, y = problem.data(batch)
    kept, loss = _Kept(), lossfunc(model(x), y)
    with backpack(kept, check="never", gradient="none"):
        loss.backward()
    reader = getattr(extensions, quantity.extensions[0])(*quantity.arguments)

    def read(clock: Callable[[], float]) -> dict[str, float]:
        found: dict[Tensor, Any] = {}
        spent: dict[str, float] = defaultdict(float)
        for parameter, product in kept.products:
            fresh = copy.copy(product)
            fresh.results, fresh.made = {}, []
            fresh.needs = frozenset(reader.needs) | {batch_sum}
            is_shared = has_free_sum(fresh)
            fresh.needs = fresh.needs if is_shared else frozenset(reader.needs)
            start = clock()
            with torch.no_grad():
                value = reader.read(fresh)
                if is_shared:
                    batch_sum(fresh)
            spent[type(fresh).__name__] += clock() - start
            if reader.is_deferred:  # else memory is used again
                found[parameter] = value
        if reader.is_deferred:
            start = clock()
            with torch.no_grad():
                reader.finish(found, [batch])
            spent["finish"] += clock() - start
        return spent

    return read


def line(problem: Problem, quantity: Quantity, seconds: float, clock: str) -> dict[str, float]:
    """Milliseconds of every share, and of every form of a product."""
    batch, steps, models = problem.batch, {}, {}
    for name in ("gradient", "extended", "shared"):
        steps[name], models[name] = FIRST_ORDER[name](problem, quantity, batch)
        for _ in range(SETTLED):
            steps[name]()
    steps["bare"], models["bare"] = bare(problem, batch), nn.Identity()
    steps["bare"]()
    times = alternate(steps, seconds, clock, lambda n: forget(models[n], quantity), least=5)
    plain, ours = times.best("gradient"), times.best("shared")
    shares = {"plain": plain, "bare": times.best("bare"), "ours": ours}
    shares["hooks"] = times.best("extended") - plain
    read = reading(problem, quantity, batch)
    best: dict[str, float] = {}
    begin, rounds = time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - begin < seconds:
        gc.collect()
        for form, spent in read(CLOCKS[clock]).items():
            best[form] = min(best.get(form, spent), spent)
        rounds += 1
    shares["kernels"] = sum(best.values())
    shares["rest"] = ours - sum(shares[name] for name in ("bare", "hooks", "kernels"))
    least, without = (bound(problem, quantity, batch) for bound in (limit, shared_limit))
    if least is not None and without is not None:
        shares["least"] = (without.work - 1) * plain + plain - shares["bare"]
    return {name: 1e3 * value for name, value in {**shares, **best}.items()}


def main() -> None:
    """Print a line for each problem and quantity."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=["gpt2", "vit", "mlp"])
    parser.add_argument("--quantity", nargs="+", choices=QUANTITIES, default=list(_NAMES))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each half of a line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--forms", action="store_true", help="kernels by the form of the product")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(f"{'problem':14}{'quantity':16}" + "".join(f"{name:>9}" for name in _HEAD))
    for name in options.problem:
        for kind in options.quantity:
            found = line(PROBLEMS[name], QUANTITIES[kind], options.seconds, options.clock)
            numbers = "".join(f"{found[h]:9.2f}" if h in found else f"{'-':>9}" for h in _HEAD)
            print(f"{name:14}{kind:16}{numbers}", flush=True)
            if options.forms:
                forms = (f"{form} {ms:.2f}" for form, ms in found.items() if form not in _HEAD)
                print("    " + ", ".join(forms))


if __name__ == "__main__":
    main()
