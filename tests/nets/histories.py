"""Histories of training loops: between passes, something changes that plans and recordings rely on.

A history is drawn from a seed: a net of some parts, and passes with changes in between. Its truth
is computed by plain autograd, on a copy of the net that was never extended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import backpack_core.extensions as known
from backpack_capture import CapturedStep, capture
from backpack_core import Extension, backpack, extend, unextend
from backpack_core.errors import BackpackError, InternalError
from tests import oracle

Change = Callable[["History"], None]
CHANGES: dict[str, Change] = {}
FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "BatchDotGrad")
CURVATURE = ("DiagGGNExact", "BatchDiagGGNExact", "DiagHessian")


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


# Parts of nets -----------------------------------------------------------------------------------


class Part(nn.Module):
    """Maps ``[N, d]`` to ``[N, d]``; ``k`` is a setting that changes between passes."""

    def __init__(self, size: int, function: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        self.k: Any = 1
        self.listed, self.plain = [1.0], torch.randn(size)
        self.register_buffer("buffer", torch.randn(size))
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def vary(self, random: Random) -> None:
        """Change something that ``forward`` looks at."""
        self.k = random.choice([1, 2, 3])
        self.listed[0] *= random.choice([0.9, 1.1])
        if random.random() < 0.5:
            self.plain = torch.randn_like(self.plain)
        else:
            self.plain.mul_(1.1)
            self.get_buffer("buffer").add_(0.1)


class Again(Part):
    """A part that runs again in the backward pass, with the values of then, as in plain torch."""


def _dense(size: int) -> nn.Linear:
    return nn.Linear(size, size)


def _often(part: Any, x: Tensor) -> Tensor:
    for _ in range(part.k):
        x = part.a(x).tanh()
    return x


def _watched(part: Any, x: Tensor) -> Tensor:
    h: Tensor = part.a(x)
    if part.k != 1 and h.requires_grad:
        factor = part.k
        h.register_hook(lambda grad: grad * factor)
    return h.tanh()


def _image(part: Any, x: Tensor) -> Tensor:
    image = (x.unsqueeze(2) * x.unsqueeze(1)).unsqueeze(1)
    return part.b(part.a(image).relu()).mean(-1).squeeze(1)  # type: ignore[no-any-return]


def _attending(part: Any, x: Tensor) -> Tensor:
    h = part.a(x.unsqueeze(-1))
    return part.c(h + part.b(h, h, h, need_weights=False)[0]).squeeze(-1)  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "dense": lambda d: nn.Sequential(_dense(d), nn.LeakyReLU(0.2)),
    "residual": lambda d: Part(d, lambda p, x: x + p.a(x).tanh(), a=_dense(d)),
    "in place": lambda d: nn.Sequential(_dense(d), nn.ReLU(inplace=True)),
    "twice": lambda d: Part(d, lambda p, x: p.a(p.a(x).sigmoid()), a=_dense(d)),
    "often": lambda d: Part(d, _often, a=_dense(d)),
    "transposed": lambda d: Part(d, lambda p, x: p.a(x).tanh() @ p.a.weight, a=_dense(d)),
    "gate": lambda d: Part(d, lambda p, x: p.a(x) * p.b(x).sigmoid(), a=_dense(d), b=_dense(d)),
    "or not": lambda d: Part(
        d, lambda p, x: p.a(x) if p.k > 1 else p.b(x), a=_dense(d), b=_dense(d)
    ),
    "detached": lambda d: Part(
        d, lambda p, x: p.a(x) + p.b(x.detach() if p.k > 1 else x), a=_dense(d), b=_dense(d)
    ),
    "function": lambda d: Part(
        d, lambda p, x: (x @ p.w).tanh() * p.k, w=nn.Parameter(torch.randn(d, d) / d)
    ),
    "plain": lambda d: Part(d, lambda p, x: p.a(x) * p.plain, a=_dense(d)),
    "buffer": lambda d: Part(d, lambda p, x: (p.a(x) + p.buffer).tanh(), a=_dense(d)),
    "listed": lambda d: Part(d, lambda p, x: p.a(x) * p.listed[0], a=_dense(d)),
    "hook": lambda d: Part(d, _watched, a=_dense(d)),
    "image": lambda d: Part(
        d, _image, a=nn.Conv2d(1, 2, 3, padding=1), b=nn.ConvTranspose2d(2, 1, 3, padding=1)
    ),
    "attention": lambda d: Part(
        d,
        _attending,
        a=nn.Linear(1, 4),
        b=nn.MultiheadAttention(4, 2, batch_first=True),
        c=nn.Linear(4, 1),
    ),
    "recurrent": lambda d: Part(
        d,
        lambda p, x: p.b(p.a(x.unsqueeze(-1))[0]).squeeze(-1),
        a=nn.GRU(1, 2, batch_first=True),
        b=nn.Linear(2, 1),
    ),
    "positions": lambda d: Part(
        d,
        lambda p, x: p.c((p.a(x.unsqueeze(-1)) + p.b(torch.arange(d))).tanh()).squeeze(-1),
        a=nn.Linear(1, 3),
        b=nn.Embedding(d, 3),
        c=nn.Linear(3, 1),
    ),
    "checkpoint": lambda d: Again(
        d, lambda p, x: checkpoint(p.a, x, use_reentrant=False), a=_dense(d)
    ),
    "weight norm": lambda d: parametrizations.weight_norm(_dense(d)),
    "layer norm": nn.LayerNorm,
}


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 1.5 * weight


# What changes ------------------------------------------------------------------------------------


@change
def samples(history: History) -> None:
    history.samples = history.random.randint(1, 6)


@change
def index_of_rows(history: History) -> None:
    """Which rows belong to one sample, as ``samples=`` says."""
    history.index = None if history.random.random() < 0.3 else history.draw_index()


@change
def layout(history: History) -> None:
    history.layout = history.random.choice(["plain", "turned", "part", "expanded"])


@change
def input_gradient(history: History) -> None:
    history.wants_input = not history.wants_input


@change
def freeze(history: History) -> None:
    parameter = history.parameter()
    parameter.requires_grad_(not parameter.requires_grad)
    if not any(p.requires_grad for p in history.model.parameters()):
        parameter.requires_grad_(True)


@change
def update(history: History) -> None:
    with torch.no_grad():
        for parameter in history.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


@change
def other_memory(history: History) -> None:
    parameter = history.parameter()
    parameter.data = (
        parameter.data.mul(0.9).t().contiguous().t() if parameter.dim() == 2 else parameter
    )


@change
def other_parameter(history: History) -> None:
    layer = history.layer()
    if layer is not None:
        layer.weight = nn.Parameter(layer.weight.detach() * 1.1)


@change
def tie(history: History) -> None:
    one, other = history.layer(), history.layer()
    if one is not None and other is not None and one.weight.shape == other.weight.shape:
        one.weight = other.weight


@change
def parametrized(history: History) -> None:
    layer = history.layer()
    if layer is not None:
        parametrize.register_parametrization(layer, "weight", Scaled())
        extend(history.model)


@change
def settings(history: History) -> None:
    for module in history.model.modules():
        if isinstance(module, Part):
            module.vary(history.random)
        elif isinstance(module, nn.LeakyReLU):
            module.negative_slope = history.random.choice([0.1, 0.3])
        elif isinstance(module, nn.LayerNorm):
            module.eps = history.random.choice([1e-5, 1e-2])


@change
def forward_hook(history: History) -> None:
    if history.handles:
        history.handles.pop().remove()
        return
    module = history.random.choice([*history.model.modules()])
    history.handles.append(
        module.register_forward_hook(
            lambda part, given, out: 1.2 * out if isinstance(out, Tensor) else None
        )
    )


@change
def gradient_hook(history: History) -> None:
    parameter = history.parameter()
    if parameter.requires_grad:
        history.handles.append(parameter.register_hook(lambda grad: None))


@change
def copied(history: History) -> None:
    history.model = copy.deepcopy(history.model)
    history.handles.clear()


@change
def loaded(history: History) -> None:
    history.model.load_state_dict({n: t.clone() for n, t in history.model.state_dict().items()})


@change
def extended_again(history: History) -> None:
    if history.random.random() < 0.5:
        unextend(history.model)
    extend(history.model)


@change
def other_part(history: History) -> None:
    place = history.random.randrange(len(history.model) - 1)
    history.model[place] = history.draw_part()
    extend(history.model)


@change
def loss(history: History) -> None:
    history.reduction = history.random.choice(["mean", "sum"])
    history.make_loss()


@change
def factor(history: History) -> None:
    history.factor = history.random.choice([1.0, 0.5, 3.0])


@change
def late(history: History) -> None:
    """Between forward and backward: values are those of the forward pass."""
    history.late = history.random.choice([None, *LATE])


@change
def two_losses(history: History) -> None:
    history.is_twofold = not history.is_twofold


@change
def extensions(history: History) -> None:
    history.draw_extensions()


@change
def gradient(history: History) -> None:
    history.gradient = history.random.choice(["autograd", "shared", "none", "skipped"])


@change
def gradients_stay(history: History) -> None:
    history.adds_up = not history.adds_up


@change
def another_pass(history: History) -> None:
    """In a nested block, of some inputs, or failing."""
    kind = history.random.choice(["nested", "inputs", "unreached", "failing", "forward"])
    x, target = history.data()
    value = history.value(x, target)
    try:
        if kind == "nested":
            with backpack(known.BatchGrad()), backpack():
                value.backward()
        elif kind == "inputs":
            trained = [p for p in history.model.parameters() if p.requires_grad]
            with backpack(known.BatchGrad()):
                value.backward(inputs=[history.random.choice(trained)])
        elif kind == "unreached":
            with backpack(known.BatchGrad()):
                value.backward(inputs=[nn.Parameter(torch.zeros(()))])
        elif kind == "failing":
            with backpack(known.BatchGrad(), extension_hook=_fail):
                value.backward()
    except InternalError:
        raise
    except (BackpackError, ZeroDivisionError):
        pass
    history.model.zero_grad()


def _fail(module: nn.Module) -> None:
    raise ZeroDivisionError


class Absolute(nn.Linear):
    """Computes something other than a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.abs(), self.bias)


def other_class(history: History) -> None:
    layer = history.layer()
    if layer is not None:
        layer.__class__ = Absolute


def other_mode(history: History) -> None:
    history.model.train(not history.model.training)


# What may change between forward and backward.
LATE = [settings, other_parameter, tie, other_part, parametrized, other_mode, other_class]


# The history -------------------------------------------------------------------------------------


class History:
    """A training loop.

    Attributes:
        random: What changes are drawn from.
        told: The changes so far, with the numbers of passes.
        repeated: How many passes were repeated from a recording, or replayed.
    """

    def __init__(self, seed: int, is_captured: bool) -> None:
        self.random, self.told, self.repeated = Random(seed), list[Any](), 0
        torch.manual_seed(seed)
        self.size = self.random.choice([4, 5])
        parts = [self.draw_part() for _ in range(self.random.randint(1, 3))]
        self.model: Any = extend(nn.Sequential(*parts, nn.Linear(self.size, 3)))
        self.samples, self.layout, self.factor = 3, "plain", 1.0
        self.gradient: Any = "autograd"
        self.index: Tensor | None = None
        self.wants_input = self.is_twofold = self.adds_up = False
        self.reduction = "mean"
        self.handles: list[Any] = []
        self.late: Change | None = None
        self.of_classes = self.random.random() < 0.5
        self.make_loss()
        self.draw_extensions()
        self.is_captured = is_captured
        self._step: tuple[Any, CapturedStep] | None = None

    def draw_index(self) -> Tensor:
        return torch.tensor([self.random.randrange(3) for _ in range(self.samples)])

    def draw_part(self) -> nn.Module:
        return PARTS[self.random.choice([*PARTS])](self.size)

    def draw_extensions(self) -> None:
        first = self.random.sample(FIRST, self.random.randint(0, 2))
        curvature = self.random.sample(CURVATURE, self.random.randint(0, 2))
        self.names = [*first, *curvature] or ["BatchGrad"]

    def make_loss(self) -> None:
        self.lossfunc = extend(self._plain_loss())

    def _plain_loss(self) -> nn.Module:
        kind: Any = nn.CrossEntropyLoss if self.of_classes else nn.MSELoss
        return kind(reduction=self.reduction)  # type: ignore[no-any-return]

    def parameter(self) -> nn.Parameter:
        parameters: list[nn.Parameter] = [*self.model.parameters()]
        return self.random.choice(parameters)

    def layer(self) -> nn.Linear | None:
        layers = [m for m in self.model.modules() if type(m) is nn.Linear]
        return self.random.choice(layers) if layers else None

    def data(self) -> tuple[Tensor, Tensor]:
        count, size = self.samples, self.size
        x = {
            "plain": lambda: torch.randn(count, size),
            "turned": lambda: torch.randn(size, count).t(),
            "part": lambda: torch.randn(count + 2, size + 2)[1:-1, 1:-1],
            "expanded": lambda: torch.randn(1, size).expand(count, size),
        }[self.layout]()
        target = torch.randint(3, (count,)) if self.of_classes else torch.randn(count, 3)
        return (x.clone().requires_grad_() if self.wants_input else x), target

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.factor * self.lossfunc(self.model(x), target)
        return value + self.lossfunc(self.model(x), target) if self.is_twofold else value

    # A pass --------------------------------------------------------------------------------------

    def go_on(self, number: int) -> str:
        """Change something, perhaps, and make a pass; returns what is wrong with it."""
        if number and self.random.random() < 0.25:
            name = self.random.choice([*CHANGES])
            self.told.append(name)
            CHANGES[name](self)
        self.told.append(number)
        if not self.adds_up:
            self.model.zero_grad()
        before = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        plain = unextend(copy.deepcopy(self.model))
        x, target = self.data()
        named = [*self.model.named_parameters()]  # those of the forward pass
        try:
            made = self._make(x, target)
        except InternalError as error:
            return str(error)
        except BackpackError:
            self.told.append("refused")
            return ""
        except RuntimeError as error:  # of torch, if what it saved was changed
            if "modified by an inplace operation" not in str(error):
                raise
            self.told.append("refused by torch")
            return ""
        truth = self._truth(plain, x.detach(), target)
        pairs = zip(named, before, strict=True)
        return next(filter(None, (self._compared(p, b, truth, made) for p, b in pairs)), "")

    def _make(self, x: Tensor, target: Tensor) -> list[Extension]:
        made: list[Extension] = [getattr(known, name)() for name in self.names]
        if self.is_captured:
            self._captured()(x, target)
            return made
        if self.index is not None and len(self.index) != self.samples:
            self.index = self.draw_index()
        with backpack(*made, gradient=self.gradient, samples=self.index) as block:
            value = self.value(x, target)
            is_again = any(isinstance(part, Again) for part in self.model)
            if self.late is not None and not is_again:
                self.late(self)
                self.told.append(self.late.__name__)
            value.backward()
        self.repeated += block._history["repeated a recording"]
        return made

    def _captured(self) -> CapturedStep:
        """The captured step, made anew if its function or its extensions have changed."""
        asked = self.names, self.model, self.lossfunc, self.factor, self.is_twofold
        if self._step is None or not all(a is b for a, b in zip(asked, self._step[0], strict=True)):
            extensions = [getattr(known, name)() for name in self.names]
            self._step = asked, capture(self.value, self.model, self.lossfunc, *extensions)
        self.repeated += "replays" in self._step[1].report()
        return self._step[1]

    def _truth(self, plain: nn.Module, x: Tensor, target: Tensor) -> dict[str, dict[str, Tensor]]:
        """What there should be, by name of the parameter, then by extension."""
        lossfunc, factor = self._plain_loss(), self.factor + self.is_twofold
        named = {n: p for n, p in plain.named_parameters() if p.requires_grad}
        parameters = [*named.values()]

        def loss(output: Tensor) -> Tensor:
            return factor * lossfunc(output, target)  # type: ignore[no-any-return]

        found: dict[str, dict[str, Tensor]] = {}
        each = oracle.individual_gradients(plain, loss, [x], parameters)
        for name, rows in zip(named, map(self._of_samples, each), strict=True):
            flat = rows.flatten(1)
            found[name] = {"grad": rows.sum(0), "BatchGrad": rows, "BatchDotGrad": flat @ flat.T}
            found[name] |= {"BatchL2Grad": (flat**2).sum(1), "SumGradSquared": (rows**2).sum(0)}
        if any("GGN" in name for name in self.names):
            each = oracle.ggn_diagonals(plain, loss, [x], parameters)
            for name, rows in zip(named, map(self._of_samples, each), strict=True):
                found[name] |= {"BatchDiagGGNExact": rows, "DiagGGNExact": rows.sum(0)}
        if "DiagHessian" in self.names:
            value = loss(plain(x))
            for name, parameter in named.items():
                found[name]["DiagHessian"] = _diagonal(value, parameter)
        return found

    def _of_samples(self, rows: Tensor) -> Tensor:
        """What rows have, for samples."""
        if self.index is None or self.is_captured:
            return rows
        found = rows.new_zeros(int(self.index.max()) + 1, *rows.shape[1:])
        return found.index_add(0, self.index, rows)

    def _compared(
        self,
        named: tuple[str, Tensor],
        before: Tensor | None,
        truth: dict[str, dict[str, Tensor]],
        made: list[Extension],
    ) -> str:
        name, parameter = named
        if not parameter.requires_grad:
            return ""
        wanted = [
            (e.savefield, getattr(parameter, e.savefield, None), type(e).__name__) for e in made
        ]
        if self.is_captured or self.gradient in ("autograd", "shared"):
            wanted.append(("grad", parameter.grad, "grad"))
        for field, ours, kind in wanted:
            right = truth[name][kind]
            right = right if kind != "grad" or before is None else right + before
            if ours is None:
                if right.abs().sum() > 0:
                    return f"{name}.{field} is missing"
            elif not _close(ours, right):
                return f"{name}.{field} is wrong"
        return ""


def _close(ours: Tensor, right: Tensor) -> bool:
    size = float(right.abs().max()) if right.numel() else 0.0
    return ours.shape == right.shape and torch.allclose(
        ours, right, rtol=0.0, atol=1e-9 * (1 + size)
    )


def _diagonal(value: Tensor, parameter: Tensor) -> Tensor:
    """The diagonal of the Hessian, entry by entry."""
    found = torch.zeros(parameter.numel())
    options: Any = {"allow_unused": True, "retain_graph": True}
    (gradient,) = torch.autograd.grad(value, parameter, create_graph=True, **options)
    if gradient is not None and gradient.requires_grad:
        for place, entry in enumerate(gradient.flatten()):
            (row,) = torch.autograd.grad(entry, parameter, **options)
            if row is not None:
                found[place] = row.flatten()[place]
    return found.view(parameter.shape)
