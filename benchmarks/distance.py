"""Distance to the limit on a busy machine: ``python -m benchmarks.distance``.

CPU time of one thread, the least of several rounds, after the passes in which alignment is measured
(``check="first"``: 1, 2 and 4; ``python -m benchmarks`` counts them, and takes medians).
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

from benchmarks.limit import limit
from benchmarks.measure import forget, write_rate
from benchmarks.peers import PEERS, Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES, Quantity

NAMES = ["DiagGGNMC", "KFAC", "DiagGGNExact", "BatchDiagGGNExact", "KFLR"]


def least(problem: Problem, quantity: Quantity, batch: int, seconds: float) -> dict[str, float]:
    """Seconds of the fastest round of each peer that can, alternately."""
    steps: dict[str, tuple[Step, torch.nn.Module]] = {}
    for peer in ("gradient", "ours", "incumbent"):
        try:
            step, model = PEERS[peer](problem, quantity, batch)
            for _ in range(5 if peer == "ours" else 1):
                step()
            if peer == "gradient" or all(
                hasattr(p, quantity.fields[0]) for p in model.parameters()
            ):
                steps[peer] = step, model
        except Exception as error:  # whatever it is, the peer cannot do this
            print(f"{peer}: {str(error).splitlines()[0][:100]}")
    found = dict.fromkeys(steps, float("inf"))
    begin, rounds = time.perf_counter(), 0
    while rounds < 4 or time.perf_counter() - begin < seconds:
        for peer, (step, model) in steps.items():
            start = time.process_time()
            step()
            found[peer] = min(found[peer], time.process_time() - start)
            forget(model, quantity)
        rounds += 1
    return found


def main() -> None:
    """Print a line for each quantity on each problem."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distance", description=__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=["mlp", "3c3d", "vit"])
    parser.add_argument("--quantity", nargs="+", choices=QUANTITIES, default=NAMES)
    parser.add_argument("--seconds", type=float, default=7.0, help="for each line (default: 7)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rate = write_rate("cpu")
    print("problem    quantity             N plain ms   limit    ours ours/limit incumbent/ours")
    for name in options.problem:
        for kind in options.quantity:
            problem, quantity = PROBLEMS[name], QUANTITIES[kind]
            batch = problem.exact_batch if quantity.exact else problem.batch
            found, bound = least(problem, quantity, batch, options.seconds), None
            counted = limit(problem, quantity, batch)
            if counted is not None:
                bound = counted.time(found["gradient"], rate) / found["gradient"]
            ours = found["ours"] / found["gradient"]
            other = found.get("incumbent", float("nan")) / found["ours"]
            share = f"{bound:8.2f}{ours:8.2f}{ours / bound:11.2f}" if bound else f"{ours:16.2f}"
            plain = f"{1e3 * found['gradient']:9.1f}"
            print(f"{name:11}{kind:18}{batch:4}{plain}{share}{other:15.2f}", flush=True)


if __name__ == "__main__":
    main()
