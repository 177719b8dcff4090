"""Where the two packages named ``backpack`` differ, next to automatic differentiation.

Run it in an environment of each package; the migration page quotes what it prints:

    python -m benchmarks.differences
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import benchmarks.agreement  # noqa: F401  # stands in for torchvision where it is missing
from backpack import backpack, extend, extensions

Make = Callable[[], nn.Module]


class Transposed(nn.Module):
    """A functional operation between two convolutions of square maps."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transpose between the first two."""
        first, second, flat, head = self.parts
        return head(flat(second(first(x).transpose(2, 3))))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Call it twice."""
        return self.head(self.shared(torch.tanh(self.shared(x))))


class Named(nn.Module):
    """A layer that gets its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Pass the input by name."""
        return self.head(input=x)


class Subclass(nn.Linear):
    """A layer that differs from a known one in name only."""


def circular() -> nn.Module:
    """A padding other than zeros."""
    conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(16, 2))


def grouped() -> nn.Module:
    """Two groups of channels."""
    return nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 2))


def spread() -> nn.Module:
    """An output padding."""
    conv = nn.ConvTranspose2d(1, 1, 3, stride=2, output_padding=1)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(100, 2))


def in_place() -> nn.Module:
    """An activation that overwrites its input."""
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def smooth() -> nn.Module:
    """An activation with a second derivative."""
    return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 2))


def normalised() -> nn.Module:
    """A batch normalisation in train mode."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


VECTORS, IMAGES, SIGNALS = (3,), (1, 4, 4), (2, 3)


def first(model: nn.Module) -> nn.Parameter:
    """The parameter that is looked at."""
    return next(model.parameters())


def ggn_trace(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> float:
    """Trace of the block of the generalised Gauss-Newton matrix, by explicit Jacobians."""
    name = next(n for n, _ in model.named_parameters())
    rest = dict(model.named_parameters())

    def forward(value: Tensor) -> Tensor:
        return functional_call(model, {**rest, name: value}, (x,))

    output = forward(rest[name].detach())
    jacobian = jacrev(forward)(rest[name].detach()).reshape(output.numel(), -1)
    curvature = hessian(loss)(output.detach()).reshape(output.numel(), -1)
    return torch.einsum("oi,op,pi->", jacobian, curvature, jacobian).item()


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Individual gradients by ``torch.func``. Shape ``[N, *θ]``."""
    name = next(n for n, _ in model.named_parameters())
    rest = dict(model.named_parameters())

    def loss(value: Tensor, sample: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, {**rest, name: value}, (sample[None],))
        return nn.functional.cross_entropy(output, target[None]) / len(x)

    gradient = torch.func.grad(loss)
    return vmap(gradient, (None, 0, 0))(rest[name].detach(), x, y)


def positive_trace(model: Any, x: Tensor, y: Tensor) -> float:
    """Trace of the positive-curvature Hessian of the first weight of :func:`smooth`."""
    inner = model[0](x).sigmoid().detach().requires_grad_()
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model[2](inner), y), inner)
    residual = (inner * (1 - inner) * (1 - 2 * inner) * grad).clamp(min=0).detach()
    extra = (residual.sum(1) * x.square().sum(1)).sum().item()
    return ggn_trace(model, x, lambda out: nn.functional.cross_entropy(out, y)) + extra


def found(make: Make, shape: tuple[int, ...], name: str, scale: float = 1.0) -> str:
    """What the installed package gives for the first parameter, as one number, or its error."""
    model, x, y = problem(make, shape)
    extension = getattr(extensions, name)()
    parts = model.parts if isinstance(model, Transposed) else [model]
    try:
        for part in parts:
            extend(part)
        loss = scale * extend(nn.CrossEntropyLoss())(model(x), y)
        with backpack(extension):
            loss.backward()
        value: Any = getattr(first(model), extension.savefield)
        if callable(value):
            size = first(model).numel()
            unit = torch.eye(size).reshape(size, *first(model).shape)
            return f"{value(unit).reshape(size, size).trace().item():.6f}"
        return f"{value.sum().item():.6f}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def problem(make: Make, shape: tuple[int, ...]) -> tuple[Any, Tensor, Tensor]:
    """The same model and data in both packages."""
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(5)
    return model, torch.randn(4, *shape), torch.arange(4) % 2


def right(make: Make, shape: tuple[int, ...], name: str, scale: float = 1.0) -> str:
    """The same number by automatic differentiation."""
    model, x, y = problem(make, shape)
    if name == "DiagGGNExact":
        loss = nn.functional.cross_entropy
        return f"{ggn_trace(model, x, lambda out: scale * loss(out, y)):.6f}"
    if name == "PCHMP":
        return f"{positive_trace(model, x, y):.6f}"
    gradients = per_sample(model, x, y)
    return f"{(gradients.square() if name == 'BatchL2Grad' else gradients).sum().item():.6f}"


ROWS: list[tuple[str, Make, tuple[int, ...], str, float]] = [
    ("transpose between two convolutions", Transposed, IMAGES, "DiagGGNExact", 1.0),
    ("0.5 * loss", lambda: nn.Linear(3, 2), VECTORS, "DiagGGNExact", 0.5),
    ("padding_mode='circular'", circular, IMAGES, "BatchGrad", 1.0),
    ("padding_mode='circular'", circular, IMAGES, "DiagGGNExact", 1.0),
    ("groups=2", grouped, SIGNALS, "BatchL2Grad", 1.0),
    ("sigmoid behind the layer", smooth, VECTORS, "PCHMP", 1.0),
    ("module called twice", Twice, VECTORS, "DiagGGNExact", 1.0),
    ("ReLU(inplace=True)", in_place, VECTORS, "DiagGGNExact", 1.0),
    ("input by keyword", Named, VECTORS, "DiagGGNExact", 1.0),
    ("subclass of Linear", lambda: Subclass(3, 2), VECTORS, "DiagGGNExact", 1.0),
    ("output_padding=1", spread, IMAGES, "DiagGGNExact", 1.0),
    ("BatchNorm1d in train mode", normalised, VECTORS, "BatchGrad", 1.0),
]


def main() -> None:
    """Print the table."""
    import backpack as package

    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    print(package.__file__)
    for label, make, shape, name, scale in ROWS:
        reference = "-" if make is normalised else right(make, shape, name, scale)
        here = found(make, shape, name, scale)
        print(f"{label:36} {name:14} autograd {reference:>10}  here {here}")


if __name__ == "__main__":
    main()
