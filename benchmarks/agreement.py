"""Compares what two packages named ``backpack`` compute, for every extension, layer and reduction.

Both are imported as ``backpack``, so each needs an environment of its own. In each of them:

    python benchmarks/agreement.py dump FILE

and then, in any of them:

    python benchmarks/agreement.py compare FILE FILE [--markdown]

Inputs, parameters and seeds are the same in both. A cell of the table is the largest deviation
over all parameters, relative to the largest entry, in double precision (``f``: in single precision,
where one of the two cannot do double); ``a!`` and ``b!``: the first, the second raises an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import nn


def stand_in_for_torchvision() -> None:
    """The incumbent imports it for its examples only: an empty one will do."""
    try:
        metadata.version("backpack-for-pytorch")
    except metadata.PackageNotFoundError:
        return
    names = {"": [], ".datasets": ["MNIST"], ".transforms": ["Compose", "Normalize", "ToTensor"]}
    if importlib.util.find_spec("torchvision") is None:
        for module, attributes in names.items():
            made = types.ModuleType("torchvision" + module)
            made.__dict__.update(dict.fromkeys(attributes, object))
            sys.modules["torchvision" + module] = made


stand_in_for_torchvision()

Case = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]

N = 4
MC_SAMPLES = 2000


def rand(*shape: int) -> torch.Tensor:
    """Random inputs that single precision holds exactly."""
    return torch.randn(N, *shape).double()


def layers() -> dict[str, Case]:
    """The layer under test, between a layer with parameters and the head."""
    table = _on_vectors()
    for dims in (1, 2, 3):
        table |= _of_dimension(dims)
    return table | _on_images() | _on_sequences()


def _around(middle: Callable[[], nn.Module]) -> Case:
    return lambda: nn.Sequential(nn.Linear(6, 5), middle(), nn.Flatten()), lambda: rand(6)


def _image(middle: Callable[[], nn.Module]) -> Case:
    return lambda: nn.Sequential(nn.Conv2d(1, 2, 2), middle(), nn.Flatten()), lambda: rand(1, 6, 6)


def _on_vectors() -> dict[str, Case]:
    from backpack.custom_module.branching import Parallel
    from backpack.custom_module.scale_module import ScaleModule

    names = ["ReLU", "Sigmoid", "Tanh", "LeakyReLU", "LogSigmoid", "ELU", "SELU"]
    names += ["Dropout", "Identity"]
    return {
        "Linear": _around(lambda: nn.Linear(5, 4)),
        "Linear, 3d": (_around(lambda: nn.Linear(5, 2))[0], lambda: rand(3, 6)),
        **{name: _around(getattr(nn, name)) for name in names},
        "BatchNorm1d, eval": _around(lambda: nn.BatchNorm1d(5).eval()),
        "ScaleModule": _around(lambda: ScaleModule(0.3)),
        "SumModule": _around(lambda: Parallel(nn.Linear(5, 3), nn.Linear(5, 3))),
    }


def _of_dimension(dims: int) -> dict[str, Case]:
    """Convolutions and pooling with one, two, or three axes."""
    conv = getattr(nn, f"Conv{dims}d")

    def case(*parts: Callable[[], nn.Module]) -> Case:
        return (
            lambda: nn.Sequential(*(part() for part in parts), nn.Flatten()),
            lambda: rand(2, *[5] * dims),
        )

    convolutions = {
        f"Conv{dims}d": {"stride": 2, "padding": 1},
        f"Conv{dims}d groups": {"groups": 2, "dilation": 2},
        f"ConvTranspose{dims}d": {"stride": 2, "padding": 1},
    }
    poolings = [f"{kind}{dims}d" for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool")]
    return {
        name: case(partial(getattr(nn, name.split()[0]), 2, 4, 2, **options), nn.Sigmoid)
        for name, options in convolutions.items()
    } | {name: case(partial(conv, 2, 2, 2), partial(getattr(nn, name), 2)) for name in poolings}


def _on_images() -> dict[str, Case]:
    from backpack.custom_module.pad import Pad
    from backpack.custom_module.permute import Permute
    from backpack.custom_module.slicing import Slicing

    return {
        "BatchNorm2d, eval": _image(lambda: nn.BatchNorm2d(2).eval()),
        "ZeroPad2d": _image(lambda: nn.ZeroPad2d(1)),
        "Pad": _image(lambda: Pad((1, 0, 0, 2))),
        "Slicing": _image(lambda: Slicing((slice(None), slice(None), 1))),
        "Permute": _image(lambda: Permute(0, 2, 1, 3)),
    }


def _on_sequences() -> dict[str, Case]:
    from backpack.custom_module.reduce_tuple import ReduceTuple

    def recurrent(kind: type[nn.Module]) -> Case:
        return (
            lambda: nn.Sequential(kind(3, 2, batch_first=True), ReduceTuple(), nn.Flatten()),
            lambda: rand(3, 3),
        )

    return {
        "Embedding": (
            lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten()),
            lambda: torch.randint(0, 7, (N, 2)),
        ),
        "RNN": recurrent(nn.RNN),
        "LSTM": recurrent(nn.LSTM),
    }


def extensions() -> dict[str, Callable[[], Any]]:
    """Every extension, by the name in the table."""
    from backpack import extensions as e

    sampled = ("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC")
    names = [n for n in e.__all__ if n not in ("HBP", *sampled)]
    table = {name: getattr(e, name) for name in sorted(names)}
    for name in sampled:
        table[f"{name}"] = lambda name=name: getattr(e, name)(mc_samples=MC_SAMPLES)
    table["PCHMP, abs"] = lambda: e.PCHMP(modify="abs")
    return table


def evaluate(value: Any, parameter: torch.Tensor, sampled: str) -> list[torch.Tensor]:
    """What an extension stored, as tensors that can be compared."""
    if callable(value):
        vectors = torch.arange(2.0 * parameter.numel()).reshape(2, *parameter.shape)
        return [value(vectors.sin().to(parameter.dtype))]
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    if sampled.startswith("SqrtGGN"):  # columns may differ, what they are a root of does not
        flat = tensors[0].flatten(2)
        tensors = [torch.einsum("vni,vnj->ij", flat, flat)]
    return [t.detach().clone() for t in tensors]


def run(case: Case, loss: str, reduction: str, name: str, make: Callable[[], Any]) -> Any:
    """One cell: the values of all parameters, in the better precision, or the error as text."""
    found = [
        attempt(case, loss, reduction, name, make, dtype)
        for dtype in (torch.float64, torch.float32)
    ]
    return found[1] if isinstance(found[0], str) and not isinstance(found[1], str) else found[0]


def attempt(
    case: Case, loss: str, reduction: str, name: str, make: Callable[[], Any], dtype: torch.dtype
) -> Any:
    """The values of all parameters in one precision, or the error as text."""
    from backpack import backpack, extend

    build, draw = case
    torch.manual_seed(0)
    x = draw()
    x = x.to(dtype) if x.is_floating_point() else x
    net = build().to(dtype)
    features = net(x).shape[1]
    outputs = 1 if loss == "BCEWithLogitsLoss" else 3
    model = extend(nn.Sequential(net, nn.Linear(features, outputs).to(dtype)))
    lossfunc = extend(getattr(nn, loss)(reduction=reduction))
    target = {
        "CrossEntropyLoss": torch.arange(N) % outputs,
        "MSELoss": rand(outputs).to(dtype),
        "BCEWithLogitsLoss": (torch.arange(N) % 2).to(dtype).unsqueeze(1),
    }[loss]
    torch.manual_seed(1)
    try:
        extension = make()
        value = lossfunc(model(x), target)
        with backpack(extension):
            value.backward()
        stored = [
            evaluate(getattr(p, extension.savefield), p, name)
            for p in model.parameters()
            if p.requires_grad
        ]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return stored


def dump(path: str, only: str) -> None:
    """Compute every cell and write the file."""
    warnings.simplefilter("ignore")
    import backpack

    cells: dict[tuple[str, str, str, str], Any] = {}
    for layer, case in layers().items():
        for name, make in extensions().items():
            if only and only not in name and only not in layer:
                continue
            losses = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss")
            for loss in losses if layer == "Linear" else losses[:1]:
                for reduction in ("mean", "sum"):
                    cells[layer, loss, reduction, name] = run(case, loss, reduction, name, make)
    torch.save({"package": backpack.__file__, "cells": cells}, path)
    errors = sum(isinstance(value, str) for value in cells.values())
    print(f"{len(cells)} cells, {errors} of them errors, from {backpack.__file__}")


def deviation(first: list[list[torch.Tensor]], second: list[list[torch.Tensor]]) -> float:
    """Largest deviation relative to the largest entry; infinite where shapes differ."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        if [t.shape for t in one] != [t.shape for t in other]:
            return float("inf")
        for a, b in zip(one, other, strict=True):
            scale = b.abs().max().item() or 1.0
            worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
    return worst


def compare(first: str, second: str, markdown: bool) -> None:
    """Print the table: rows are layers, columns are extensions."""
    one, other = (torch.load(path, weights_only=False) for path in (first, second))
    print(f"a: {one['package']}\nb: {other['package']}\n")
    names = list(dict.fromkeys(key[3] for key in one["cells"]))
    rows = list(dict.fromkeys(key[:3] for key in one["cells"]))
    notes: dict[str, list[str]] = {}
    lines = []
    for row in rows:
        entries = []
        for name in names:
            a, b = one["cells"][(*row, name)], other["cells"][(*row, name)]
            if isinstance(a, str) or isinstance(b, str):
                entries.append(" ".join(m for m, v in (("a!", a), ("b!", b)) if isinstance(v, str)))
                for mark, value in (("a", a), ("b", b)):
                    if isinstance(value, str):
                        notes.setdefault(f"{mark}: {value}", []).append(f"{row[0]}/{name}")
            else:
                single = torch.float32 in {t.dtype for value in (a, b) for ts in value for t in ts}
                entries.append(f"{deviation(a, b):.0e}{' f' if single else ''}")
        lines.append((f"{row[0]}, {row[1][:3]}, {row[2]}", entries))
    width = max(len(label) for label, _ in lines)
    mark = " | " if markdown else "  "
    print(mark.join([" " * width, *[n[:12].rjust(12) for n in names]]))
    if markdown:
        print("|".join(["---"] * (len(names) + 1)))
    for label, entries in lines:
        print(mark.join([label.ljust(width), *[entry.rjust(12) for entry in entries]]))
    print("\nErrors:")
    for text, where in sorted(notes.items()):
        print(f"  {text}\n      at {len(where)} cells: {', '.join(dict.fromkeys(where[:6]))}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("path")
    dumping.add_argument("--only", default="", help="part of a layer's or an extension's name")
    comparing = commands.add_parser("compare")
    comparing.add_argument("first")
    comparing.add_argument("second")
    comparing.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "dump":
        dump(arguments.path, arguments.only)
    else:
        compare(arguments.first, arguments.second, arguments.markdown)


if __name__ == "__main__":
    main()
