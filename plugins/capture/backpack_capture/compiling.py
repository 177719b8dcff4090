"""Compiles a graph by Inductor, in a separate process. Imports torch only.

The compiler holds the lock of Python for a long time, and restores the state of torch's generator
when it ends. In the process of a training loop, it would slow down the loop, and make it draw the
same numbers twice.
"""

from __future__ import annotations

import operator
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

REQUEST, ARTIFACT = "request", "artifact"


class Value(NamedTuple):
    """A value, by its number."""

    number: int


class Call(NamedTuple):
    """An operation: its name, overload, arguments, and the numbers of its results."""

    name: str
    overload: str
    args: Any
    kwargs: Any
    outs: tuple[int | None, ...]
    is_single: bool


class Input(NamedTuple):
    """A tensor from outside."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Request(NamedTuple):
    """The program to compile, and torch's settings. All of it can be pickled."""

    inputs: list[Input]
    calls: list[Call]
    outs: list[int]
    threads: int
    precision: str
    is_deterministic: bool


def module_of(request: Request) -> torch.fx.GraphModule:
    """The graph of torch.fx."""
    graph = torch.fx.Graph()
    nodes = {given.number: graph.placeholder(f"given_{given.number}") for given in request.inputs}

    def shown(value: Any) -> Any:
        if isinstance(value, Value):
            return nodes[value.number]
        if isinstance(value, (list, tuple)):
            return [shown(item) for item in value]
        return value

    for call in request.calls:
        function = getattr(getattr(torch.ops.aten, call.name), call.overload)
        kwargs = {name: shown(value) for name, value in call.kwargs.items()}
        result = graph.call_function(function, tuple(shown(call.args)), kwargs)
        for place, number in enumerate(call.outs):
            if number is not None and number not in nodes:
                nodes[number] = (
                    result
                    if call.is_single
                    else graph.call_function(operator.getitem, (result, place))
                )
    graph.output(tuple([nodes[number] for number in request.outs]))
    return torch.fx.GraphModule({}, graph)


def main(folder: Path) -> None:
    """Compile the request in a folder, and store the result there."""
    request = pickle.loads((folder / REQUEST).read_bytes())
    torch.set_num_threads(request.threads)
    torch.set_float32_matmul_precision(request.precision)
    torch.use_deterministic_algorithms(request.is_deterministic)
    inputs: list[Any] = [
        torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        for given in request.inputs
    ]
    # Random numbers are those of torch, in their order.
    with torch.no_grad(), torch._inductor.config.patch(fallback_random=True):
        artifact = torch._inductor.standalone_compile(module_of(request), inputs)
    artifact.save(path=str(folder / ARTIFACT), format="binary")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
