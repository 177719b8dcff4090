"""How each library computes a quantity. All of them can be imported into one process.

A peer makes, for a problem and a quantity, a function that does one forward and backward pass. It
raises :class:`Unsupported` where the library has no such quantity, or cannot treat the net.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from benchmarks.problems import Problem
from benchmarks.quantities import Quantity

Step = Callable[[], None]


class Unsupported(Exception):
    """The library has no such quantity, or cannot treat the net."""


def _parts(problem: Problem, batch: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    return problem.net(), nn.CrossEntropyLoss(), *problem.data(batch)


def gradient(problem: Problem, quantity: Quantity, batch: int) -> tuple[Step, nn.Module]:
    """A plain forward and backward pass."""
    model, lossfunc, x, y = _parts(problem, batch)

    def step() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    return step, model


Library = tuple[ModuleType, ModuleType]  # the package, and its extensions


def _this_project() -> Library:
    import backpack_core
    from backpack_core import extensions

    return backpack_core, extensions


def _backpack_for_pytorch() -> Library:
    try:
        distribution = importlib.metadata.distribution("backpack-for-pytorch")
    except importlib.metadata.PackageNotFoundError as error:
        raise Unsupported("it is not installed") from error
    _stand_in_for_torchvision()
    package = importlib.import_module("backpack")
    home = Path(str(distribution.locate_file("backpack"))).resolve()
    if package.__file__ is None or Path(package.__file__).resolve().parent != home:
        raise Unsupported(f"its import name is taken by {package.__file__}")
    return package, importlib.import_module("backpack.extensions")


# Those with ``extend(...)`` and ``backpack(...)``.
LIBRARIES: dict[str, Callable[[], Library]] = {
    "ours": _this_project,
    "incumbent": _backpack_for_pytorch,
}


def in_a_block(
    library: str,
    problem: Problem,
    quantity: Quantity,
    batch: int,
    inside: bool = False,
    **options: str,
) -> tuple[Step, nn.Module]:
    """One of the ``LIBRARIES``; ``inside`` has the forward pass in the block, too."""
    model, lossfunc, x, y = _parts(problem, batch)
    package, extensions = LIBRARIES[library]()
    try:
        kinds = [getattr(extensions, name) for name in quantity.extensions]
    except (AttributeError, ImportError) as error:
        raise Unsupported(str(error)) from error
    model, lossfunc = package.extend(model), package.extend(lossfunc)

    def step() -> None:
        model.zero_grad()
        loss = lossfunc(model(x), y)
        with package.backpack(*(kind(*quantity.arguments) for kind in kinds), **options):
            loss.backward()

    def step_inside() -> None:
        model.zero_grad()
        with package.backpack(*(kind(*quantity.arguments) for kind in kinds), **options):
            lossfunc(model(x), y).backward()

    return step_inside if inside else step, model


def ours(
    problem: Problem, quantity: Quantity, batch: int, **options: Any
) -> tuple[Step, nn.Module]:
    """This project."""
    return in_a_block("ours", problem, quantity, batch, **options)


def extended(
    problem: Problem, quantity: Quantity, batch: int, library: str = "ours"
) -> tuple[Step, nn.Module]:
    """A plain pass of a model that is extended, without an active extension."""
    model, lossfunc, x, y = _parts(problem, batch)
    package, _ = LIBRARIES[library]()
    model, lossfunc = package.extend(model), package.extend(lossfunc)

    def step() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    return step, model


def incumbent(problem: Problem, quantity: Quantity, batch: int) -> tuple[Step, nn.Module]:
    """backpack-for-pytorch."""
    return in_a_block("incumbent", problem, quantity, batch)


def _stand_in_for_torchvision() -> None:
    """The incumbent imports torchvision, but only to download example data."""
    for name, attributes in {
        "torchvision": (),
        "torchvision.datasets": ("MNIST",),
        "torchvision.transforms": ("Compose", "Normalize", "ToTensor"),
    }.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute, None))


REDUCTIONS: dict[str, Callable[[Tensor], object]] = {
    "BatchGrad": lambda g: g,
    "BatchL2Grad": lambda g: g.flatten(1).square().sum(1),
    "SumGradSquared": lambda g: g.square().sum(0),
    "Variance": lambda g: g.var(0, correction=0),
    "FirstFour": lambda g: (
        g, g.var(0, correction=0), g.square().sum(0), g.flatten(1).square().sum(1)
    ),
    "BatchDotGrad": lambda g: g.flatten(1) @ g.flatten(1).T,
}  # fmt: skip


def reduction_of(quantity: Quantity) -> Callable[[Sequence[Tensor]], object]:
    """What is made of the individual gradients of all parameters.

    Raises:
        Unsupported: They do not determine the quantity.
    """
    if quantity.name == "ClippedSumGrad":
        return clipped_sums
    if quantity.name not in REDUCTIONS:
        raise Unsupported(f"no {quantity.name} by individual gradients")
    reduction = REDUCTIONS[quantity.name]
    return lambda gradients: [reduction(g) for g in gradients]


def clipped_sums(gradients: Sequence[Tensor]) -> object:
    """``Σ_n g_n min(1, 1 / ‖g_n‖)``, with the norm over all parameters."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients], 1).norm(dim=1)
    weights = (1 / norms).clamp(max=1)
    return [torch.einsum("n,n...->...", weights, g) for g in gradients]


def functional(problem: Problem, quantity: Quantity, batch: int) -> tuple[Step, nn.Module]:
    """torch.func: individual gradients, or Jacobians of the outputs, under vmap."""
    if quantity.name in {*REDUCTIONS, "ClippedSumGrad"}:
        divisor = 1 if quantity.name == "ClippedSumGrad" else batch  # it clips samples' own losses
        return _individual_gradients(problem, reduction_of(quantity), batch, divisor)
    if quantity.name == "DiagGGNExact":
        return _diagonal_ggn(problem, batch)
    raise Unsupported(f"no {quantity.name} by torch.func here")


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _individual_gradients(
    problem: Problem,
    reduction: Callable[[Sequence[Tensor]], object],
    batch: int,
    divisor: int,
) -> tuple[Step, nn.Module]:
    model, lossfunc, x, y = _parts(problem, batch)
    parameters = _parameters(model)
    model.stored = None  # type: ignore[assignment]

    def loss(values: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, values, (sample.unsqueeze(0),))
        value: Tensor = lossfunc(output, target.unsqueeze(0))
        return value / divisor

    def step() -> None:
        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        model.stored = reduction([*found.values()])  # type: ignore[assignment]

    return step, model


def _diagonal_ggn(problem: Problem, batch: int) -> tuple[Step, nn.Module]:
    model, _, x, _ = _parts(problem, batch)
    parameters = _parameters(model)
    model.stored = None  # type: ignore[assignment]
    entries = 4 * problem.classes * sum(p.numel() for p in parameters.values())

    def output(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = functional_call(model, values, (sample.unsqueeze(0),))
        return result

    def step() -> None:
        jacobian = vmap(jacrev(output), in_dims=(None, 0))
        total: dict[str, Tensor] = {}
        for rows in x.split(max(1, 2**28 // entries)):
            p = functional_call(model, parameters, (rows,)).softmax(1)
            hessian = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / batch
            for name, j in jacobian(parameters, rows).items():
                columns = j.flatten(1, 2).flatten(2)
                part = (columns * (hessian @ columns)).sum((0, 1))
                total[name] = total[name] + part if name in total else part
        model.stored = list(total.values())  # type: ignore[assignment]

    return step, model


def opacus(
    problem: Problem, quantity: Quantity, batch: int, force_functorch: bool = False
) -> tuple[Step, nn.Module]:
    """Opacus: individual gradients by hooks, or by functorch, and what is made of them."""
    reduction = reduction_of(quantity)
    grad_sample = importlib.import_module("opacus.grad_sample")
    model, lossfunc, x, y = _parts(problem, batch)
    wrapped = grad_sample.GradSampleModule(model, strict=False, force_functorch=force_functorch)
    model.stored = None  # type: ignore[assignment]

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad_sample = parameter.grad = None  # type: ignore[attr-defined]
        lossfunc(wrapped(x), y).backward()
        gradients: list[Any] = [parameter.grad_sample for parameter in model.parameters()]  # type: ignore[attr-defined]
        model.stored = reduction(gradients)  # type: ignore[assignment]

    return step, model


def ghost(problem: Problem, quantity: Quantity, batch: int) -> tuple[Step, nn.Module]:
    """Opacus without individual gradients ("ghost clipping"): norms, and a second pass for sums."""
    if quantity.name not in {"BatchL2Grad", "ClippedSumGrad"}:
        raise Unsupported(f"no {quantity.name} by ghost clipping")
    grad_sample = importlib.import_module("opacus.grad_sample")
    model, _, x, y = _parts(problem, batch)
    wrapped = grad_sample.GradSampleModuleFastGradientClipping(model, strict=False)
    is_clipped = quantity.name == "ClippedSumGrad"

    def step() -> None:
        wrapped.zero_grad()
        losses = nn.functional.cross_entropy(wrapped(x), y, reduction="none")
        losses.mean().backward(retain_graph=is_clipped)
        if is_clipped:
            weights = wrapped.get_clipping_coef()
            model.zero_grad()
            wrapped.disable_hooks()
            (weights * losses).sum().backward()
            wrapped.enable_hooks()

    return step, model


Peer = Callable[[Problem, Quantity, int], tuple[Step, nn.Module]]
PEERS: dict[str, Peer] = {
    "gradient": gradient,
    "ours": ours,
    "incumbent": incumbent,
    "torch.func": functional,
    "opacus": opacus,
}
# Further ones, for quantities of first order: the column of a table each.
FIRST_ORDER: dict[str, Peer] = {
    "gradient": gradient,
    "extended": extended,
    "ours": ours,
    "shared": partial(ours, gradient="shared"),
    "none": partial(ours, gradient="none"),
    "vmap": functional,
    "opacus": opacus,
    "functorch": partial(opacus, force_functorch=True),
    "ghost": ghost,
    "incumbent": incumbent,
}
