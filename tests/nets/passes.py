"""Ways to run the backward pass that counts: alone, after another one, after one that failed, …"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call

from backpack_core import Extension, backpack, disable, extend
from backpack_core.errors import BackpackError
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.nets.losses import Losses
from tests.nets.net import DrawnNet, data
from tests.nets.recipe import Recipe
from tests.nets.scope import trained
from tests.nets.truth import fresh

# What these passes do to the net is felt by a checkpoint, and by every pass after them.
CHANGING = frozenset({"with_other_weights", "then_replaced", "then_changed", "with_updates"})

# These run the net on other data as well.
WITH_OTHER_DATA = frozenset({"after_another", "around_another"})


class Interruption(BackpackError):
    """What a backward pass is interrupted with."""


class Interrupting(FirstOrderExtension):
    """Raises at one of its readings, when others have read the same parameter."""

    savefield = "nothing"

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def read(self, product: SampleProduct) -> Tensor:
        """Count down."""
        self.left -= 1
        if not self.left:
            raise Interruption
        return product.new_zeros(*product.shape)


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Another memory budget; zero leaves it alone."""
    before = memory_budget()
    set_memory_budget(size or before)
    try:
        yield
    finally:
        set_memory_budget(before)


class Whole(nn.Module):
    """A model that returns its loss."""

    def __init__(self, net: DrawnNet, losses: Losses) -> None:
        super().__init__()
        self.net, self.losses = net, losses

    def forward(self, *inputs: Tensor) -> Tensor:
        values = dict(zip(self.net.results, self.net(*inputs), strict=True))
        found: Tensor = self.losses.forward(values, trained(self.net))
        return found


class Run:
    """Extended copies of a net and its losses, and the passes through them.

    Attributes:
        names: The parameters that should get values in the pass that counts.
        creates_graph: Whether those values can be differentiated.
        used: The parameters that the pass that counts went through, by name.
    """

    def __init__(self, recipe: Recipe, net: DrawnNet, losses: Losses, names: Iterable[str]) -> None:
        self.recipe = recipe
        self.names = list(names)
        self.net, self.losses = copy.deepcopy(net), copy.deepcopy(losses)
        self.whole = Whole(self.net, self.losses)
        is_inside = recipe.plan.is_inside
        for module in [self.whole] if is_inside else [self.net, *self.losses.extendable()]:
            extend(module)
        self.creates_graph = False
        self.used: dict[str, Tensor] = {}
        self.use(dict(self.net.named_parameters()))

    def use(self, parameters: Mapping[str, Tensor]) -> None:
        """Say where values are to be found."""
        self.used = {n: p for n, p in parameters.items() if p.requires_grad}

    def execute(self, extensions: Sequence[Extension]) -> None:
        """All passes of the plan; afterwards the parameters have what the last one stored."""
        with budget(self.recipe.plan.budget):
            PASSES[self.recipe.plan.passes](self, extensions)

    def forget(self) -> None:
        """Cut the circle of parameters and gradients that have a graph."""
        for parameter in self.used.values():
            parameter.grad = None
            parameter.__dict__.clear()

    def loss(
        self, variant: int = 0, more: int = 0, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """A forward pass.

        Args:
            variant: Others have other data.
            more: How many more samples there are.
            weights: Used in place of the net's parameters.
        """
        inputs = fresh(data(self.recipe, variant, more))
        torch.manual_seed(self.recipe.seed)
        self.losses.seed = self.recipe.seed + variant
        given = {f"net.{name}": weight for name, weight in (weights or {}).items()}
        result: Tensor = (
            functional_call(self.whole, given, tuple(inputs)) if given else self.whole(*inputs)
        )
        return result

    def backward(self, loss: Tensor, extensions: Sequence[Extension]) -> None:
        """A backward pass that forgets the graph."""
        with backpack(*extensions):
            loss.backward()

    def countdown(self, act: Callable[[], None]) -> Callable[[nn.Module], None]:
        """An extension hook that acts at one of its calls."""
        left = self.recipe.plan.hook_acts_at

        def hook(module: nn.Module) -> None:
            nonlocal left
            left -= 1
            if not left:
                act()

        return hook

    def fail(self, loss: Tensor, extensions: Sequence[Extension], **retain: bool) -> None:
        """A backward pass that a hook or an extension interrupts, if it is called often enough."""

        def act() -> None:
            raise Interruption

        at = self.recipe.plan.hook_acts_at
        hook = self.countdown(act) if at % 2 else None
        more = () if at % 2 else (Interrupting(at // 2),)
        with suppress(Interruption), backpack(*extensions, *more, extension_hook=hook, **retain):
            loss.backward(**retain)
        self.net.zero_grad()


Pass = Callable[[Run, Sequence[Extension]], None]
PASSES: dict[str, Pass] = {}


def listed(function: Pass) -> Pass:
    """Add a way to the table."""
    PASSES[function.__name__] = function
    return function


@listed
def single(run: Run, extensions: Sequence[Extension]) -> None:
    """One forward and one backward pass."""
    run.backward(run.loss(), extensions)


@listed
def after_another(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a pass over other data, one sample more."""
    run.backward(run.loss(1, 1), extensions)
    run.net.zero_grad()
    single(run, extensions)


@listed
def unmeasured(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind passes over other data, which take other ways through the net; nothing is measured."""
    for variant in (1, 2, 3):
        run.backward(run.loss(variant), extensions)
        run.net.zero_grad()
    loss = run.loss()
    with backpack(*extensions, check="never"):
        loss.backward()


@listed
def after_failure(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a pass that fails half-way."""
    run.fail(run.loss(), extensions)
    single(run, extensions)


@listed
def after_failure_on_one_graph(run: Run, extensions: Sequence[Extension]) -> None:
    """The same, through one graph."""
    loss = run.loss()
    run.fail(loss, extensions, retain_graph=True)
    run.backward(loss, extensions)


@listed
def twice_on_one_graph(run: Run, extensions: Sequence[Extension]) -> None:
    """Twice the same through one graph."""
    loss = run.loss()
    with backpack(*extensions, retain_graph=True):
        loss.backward(retain_graph=True)
    run.net.zero_grad()
    run.backward(loss, extensions)


@listed
def after_plain(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a plain backward pass through the same graph, outside of any block."""
    loss = run.loss()
    loss.backward(retain_graph=True)
    run.net.zero_grad()
    run.backward(loss, extensions)


@listed
def after_thawing(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a pass in which no parameter was frozen; it may fail where they have to be."""
    frozen = [p for p in run.net.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    with suppress(RuntimeError, BackpackError):
        run.backward(run.loss(), extensions)
    for parameter in frozen:
        parameter.requires_grad_(False)
        parameter.grad = None
    run.net.zero_grad()
    single(run, extensions)


@listed
def after_disabled(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a step that records nothing."""
    with disable():
        run.loss().backward()
    run.net.zero_grad()
    single(run, extensions)


@listed
def for_some(run: Run, extensions: Sequence[Extension]) -> None:
    """Restricted to every second parameter."""
    run.names = run.names[::2]
    loss = run.loss()
    with backpack(*extensions):
        loss.backward(inputs=[run.used[name] for name in run.names])


@listed
def differentiable(run: Run, extensions: Sequence[Extension]) -> None:
    """With a graph of the gradients."""
    run.creates_graph = True
    loss = run.loss()
    with backpack(*extensions):
        loss.backward(create_graph=True)


@listed
def by_grad(run: Run, extensions: Sequence[Extension]) -> None:
    """Gradients are asked for, not accumulated."""
    loss = run.loss()
    parameters = list(run.used.values())
    with backpack(*extensions):
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@listed
def with_other_weights(run: Run, extensions: Sequence[Extension]) -> None:
    """Weights are handed over; those of the net are others."""
    weights = {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in run.net.named_parameters()
    }
    with torch.no_grad():
        for parameter in run.net.parameters():
            parameter.add_(0.5)
    run.use(weights)
    run.backward(run.loss(weights=weights), extensions)


@listed
def then_replaced(run: Run, extensions: Sequence[Extension]) -> None:
    """The net gets new parameters between the forward and the backward pass."""
    loss = run.loss()
    for module in list(run.net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(2 * parameter.detach() + 1))
    run.backward(loss, extensions)


@listed
def then_changed(run: Run, extensions: Sequence[Extension]) -> None:
    """The settings of modules change between the forward and the backward pass."""
    loss = run.loss()
    for module in run.net.modules():
        module.training = not module.training
        for name in ("p", "eps", "negative_slope", "alpha"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.3)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer + 1)
    run.backward(loss, extensions)


@listed
def with_updates(run: Run, extensions: Sequence[Extension]) -> None:
    """Every parameter is updated as soon as its gradient is there."""

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.3 * torch.sign(parameter))

    for parameter in run.used.values():
        parameter.register_post_accumulate_grad_hook(update)
    run.backward(run.loss(), extensions)


@listed
def around_another(run: Run, extensions: Sequence[Extension]) -> None:
    """The extension hook runs a backward pass through another net."""
    other = Run(run.recipe, run.net, run.losses, run.names)
    loss, inner = run.loss(), other.loss(1, 1)
    with backpack(*extensions, extension_hook=run.countdown(inner.backward)):
        loss.backward()


@listed
def told(run: Run, extensions: Sequence[Extension]) -> None:
    """With rows that belong to other samples than one each; which, is not the same each time."""
    index = run.recipe.told
    for samples in (index, [max(index) - n for n in index], index):
        run.net.zero_grad()
        loss = run.loss()
        with backpack(*extensions, samples=torch.tensor(samples)):
            loss.backward()


@listed
def after_interruption(run: Run, extensions: Sequence[Extension]) -> None:
    """Behind a forward pass that the user interrupts."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    modules = list(run.net.parts.modules())
    module = modules[run.recipe.plan.hook_acts_at % len(modules)]
    handle = module.register_forward_hook(interrupt)
    with suppress(KeyboardInterrupt):
        run.loss()
    handle.remove()
    single(run, extensions)
