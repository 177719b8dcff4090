"""Passes that repeat what earlier ones computed at visits: the engine's numbers, bit by bit."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backpack_core.extensions as known
from backpack_capture import repeated, visits
from backpack_capture.nested import Apart
from backpack_core import backpack, extend
from backpack_core.contract.observer import Observer
from backpack_core.contract.rules import normaliser_of
from backpack_core.engine import backward
from backpack_core.errors import BackpackError, OverwrittenInputError, PluginCodeError
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC
from backpack_core.record.view import View
from backpack_products import AffineProduct, computing, multiply
from backpack_products._torch import onednn_linear
from backpack_products.operations import dense, square_sum
from tests.capture.nets import NETS
from tests.capture.test_random_nets import Side, differs, move
from tests.cases import Net
from tests.devices import rng_state
from tests.forks import python
from tests.leftovers import live_calls
from tests.nets.draw import draw

pytestmark = [
    pytest.mark.usefixtures("reproducible"),
    pytest.mark.filterwarnings("ignore:.*deterministic implementation"),
]

EXTENSIONS: dict[str, Callable[[], Any]] = {
    name: getattr(known, name)
    for name in (
        *("BatchL2Grad", "Variance", "DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "KFAC"),
    )
}
EXTENSIONS |= {
    "some": lambda: BatchGrad(subsampling=[2, 0]),
    "clipped": lambda: known.ClippedSumGrad(0.1, "per_layer"),
    "projected": lambda: known.ProjectedGrad(5),
}
PASSES = 10


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)


@contextmanager
def by_the_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "_may_repeat", lambda run: False)
        yield


class Twin:
    """A model of two: one repeats, and the other goes by the engine."""

    def __init__(self, model: nn.Module, lossfunc: nn.Module | None = None) -> None:
        self.model = extend(model.double())
        self.lossfunc = extend(lossfunc or nn.CrossEntropyLoss())
        self.repeated = 0

    def step(self, batch: tuple[Tensor, ...], *extensions: Any, **options: Any) -> list[Any]:
        """A pass; gradients and results."""
        self.model.zero_grad()
        inputs, targets = batch
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        torch.manual_seed(1)
        loss = self.lossfunc(self.model(inputs), targets)
        with backpack(*extensions, **options) as block:
            loss.backward()
        self.repeated += block._history["repeated a recording"]
        fields = [extension.savefield for extension in extensions]
        found = [[p.grad, *[getattr(p, f, None) for f in fields]] for p in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        return [loss.detach(), rng_state(), found]


def compare(model: nn.Module, batches: list[Any], make: Callable[[], Any]) -> int:
    """How many passes of one model were repeated; they give what the engine gives."""
    ours, right = Twin(copy.deepcopy(model)), Twin(model)
    for batch in batches:
        found = ours.step(batch, make())
        with by_the_engine():
            expected = right.step(batch, make())
        here, there = Apart(found), Apart(expected)
        assert here.form == there.form
        for one, other in zip(here.tensors, there.tensors, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    assert not right.repeated
    return ours.repeated


@pytest.mark.grid(6)
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("net", NETS)
def test_repeated_passes(net: str, extension: str) -> None:
    torch.manual_seed(0)
    model, batches = NETS[net].make(), [NETS[net].draw(4) for _ in range(PASSES)]
    lengths = [NETS[net].draw(n) for n in (3, 4)]
    try:
        with by_the_engine():
            Twin(copy.deepcopy(model)).step(batches[0], EXTENSIONS[extension]())
    except BackpackError:
        pytest.skip("it does not exist for this net")
    repeated = compare(model, batches + lengths, EXTENSIONS[extension])
    is_hidden = net == "lstm" or (net, extension) == ("tied", "KFAC")
    # Exact columns of a weight that is used transposed, too, are compared with what they stand for.
    is_hidden |= net == "slopes" and "Exact" in extension
    assert repeated or is_hidden


class Changing:
    """An ``extension_hook`` that copies what it finds on a module's parameters, and changes it."""

    def __init__(self, model: nn.Module, field: str) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.field, self.seen = field, list[Any]()

    def __call__(self, module: nn.Module) -> None:
        self.seen.append(self.names.get(module, type(module).__name__))
        for parameter in module.parameters(recurse=False):
            for tensor in Apart(getattr(parameter, self.field, None)).tensors:
                self.seen.append(tensor.clone())
                if tensor.is_floating_point():
                    tensor.mul_(-3.0)


class Seeing:
    """An ``observer`` that notes what views show."""

    def __init__(self) -> None:
        self.seen = list[Any]()

    def __call__(self, view: View) -> None:
        number = normaliser_of(view) if view.call.rule.is_loss else None
        self.seen += [view.path, view.samples, view.positions, view.output_shape, number]
        self.seen += [t.detach() for t in (view.output, *view.stored.inputs)]
        self.seen += [view.grad_output]


@pytest.mark.grid(8)
@pytest.mark.parametrize("gradient", ["autograd", "skipped"])
@pytest.mark.parametrize("extension", ["some", "DiagGGNExact", "DiagGGNMC", "KFAC", "clipped"])
@pytest.mark.parametrize("net", sorted(NETS))
def test_observers_are_called(net: str, extension: str, gradient: str) -> None:
    """Before each visit, with the engine's view; what they compute is not recorded."""
    torch.manual_seed(0)
    model, make = NETS[net].make(), EXTENSIONS[extension]
    ours, right, options = Twin(copy.deepcopy(model)), Twin(model), {"check": "never"}
    for _ in range(PASSES):
        batch, seeing = NETS[net].draw(4), [Seeing(), Seeing()]
        options |= {"gradient": gradient}
        try:
            with by_the_engine():
                expected = right.step(batch, make(), observer=seeing[1], **options)
        except BackpackError:
            pytest.skip("it does not exist for this net")
        found = ours.step(batch, make(), observer=seeing[0], **options)
        assert not differs([found, seeing[0].seen], [expected, seeing[1].seen])
    assert seeing[0].seen
    is_hidden = net == "slopes" and "Exact" in extension
    assert ours.repeated > 2 or is_hidden


@pytest.mark.grid(6)
@pytest.mark.parametrize("extension", ["BatchL2Grad", "some", "DiagGGNExact", "KFAC", "clipped"])
@pytest.mark.parametrize("net", ["mlp", *sorted(NETS.keys() - {"mlp"})])
def test_extension_hooks_are_called(net: str, extension: str) -> None:
    """After each module's results are stored; what they change changes nothing else."""
    torch.manual_seed(0)
    model, make = NETS[net].make(), EXTENSIONS[extension]
    ours, right, hooks = Twin(copy.deepcopy(model)), Twin(model), list[Changing]()
    for _ in range(PASSES):
        batch = NETS[net].draw(4)
        hooks = [Changing(twin.model, make().savefield) for twin in (ours, right)]
        try:
            with by_the_engine():
                expected = right.step(batch, make(), check="never", extension_hook=hooks[1])
        except BackpackError:
            pytest.skip("it does not exist for this net")
        found = ours.step(batch, make(), check="never", extension_hook=hooks[0])
        assert not differs([found, hooks[0].seen], [expected, hooks[1].seen])
    assert hooks[0].seen
    assert ours.repeated > 2 or net == "slopes"  # operations use its parameters


def agree_on(
    seeds: range,
    steps: int,
    around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext(),
) -> int:
    """How many passes of random nets used a recording; they give what the engine gives."""
    begun, begin = list[int](), repeated.Repeated.__init__
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(
            repeated.Repeated, "__init__", lambda self, *what: begun.append(1) or begin(self, *what)
        )
        for seed in seeds:
            prepared = draw(seed)
            ours, right = Side(prepared), Side(prepared)
            if not ours.extensions or not isinstance(ours.whole, nn.Module):
                continue
            for number in range(1, 1 + steps):
                with around(number):
                    found = ours.run(number)
                with around(number), by_the_engine():
                    expected = right.run(number)
                assert not differs(found, expected), f"net {seed}, step {number}\n{prepared.recipe}"
                for side in (ours, right):
                    move(side.whole)
            for side in (ours, right):
                for parameter in side.whole.parameters():
                    parameter.__dict__.clear()
    return len(begun)


@pytest.mark.parametrize("seeds", [range(10), range(40, 50)], ids=str)
def test_random_nets_repeat(seeds: range) -> None:
    assert agree_on(seeds, 9)


MANY: dict[str, Callable[[], Any]] = {
    **EXTENSIONS,
    "all": BatchGrad,
    "squares": known.SumGradSquared,
    "dots": known.BatchDotGrad,
    "flat": lambda: known.ClippedSumGrad(0.1, savefield="flat"),
    "tasks": known.TaskGrad,
    "projected": lambda: known.ProjectedGrad(3),
    "ekfac": known.EKFAC,
    "diagonals": known.BatchDiagGGNMC,
}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300))
def test_several_extensions_repeat(seed: int) -> None:
    """Drawn: a net, up to four extensions, how losses are reduced, checks, and a hook."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    net, names = drawn.choice([*NETS]), drawn.sample([*MANY], drawn.randint(1, 4))
    options = {"check": drawn.choice(["first", "never"])}
    options |= {"gradient": drawn.choice(["shared", "none"])} if not seed % 5 else {}
    lossfunc = nn.CrossEntropyLoss(
        reduction=drawn.choice(["mean", "sum"]), ignore_index=drawn.choice([-100, 0])
    )
    ours = Twin(NETS[net].make(), lossfunc)
    right = Twin(copy.deepcopy(ours.model), copy.deepcopy(lossfunc))
    factor, place = drawn.choice([None, None, 1.0, 1.5]), drawn.randrange(100)
    if factor is not None:
        for twin in (ours, right):
            _with_hook([*twin.model.modules()][place % len([*twin.model.modules()])], factor)
    batches = [NETS[net].draw(3 + (number == 8)) for number in range(11)]
    for number, batch in enumerate(batches):
        found = _passed(ours, batch, names, options)
        with by_the_engine():
            expected = _passed(right, batch, names, options)
        assert not differs(found, expected), (number, net, names, options, factor, place)


def _passed(twin: Twin, batch: Any, names: list[str], options: dict[str, Any]) -> Any:
    """What a pass gives; the kind of its error, if it raises."""
    try:
        return twin.step(batch, *[MANY[name]() for name in names], **options)
    except BackpackError as error:
        return type(error)


def _with_hook(module: nn.Module, factor: float) -> None:
    """Have a hook on an output look at a gradient, or change it."""

    def on_output(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook((lambda grad: None) if factor == 1 else lambda grad: factor * grad)

    module.register_forward_hook(on_output)


# What may differ from pass to pass ----------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.a_first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.a_first:
            left, right = self.a(x), self.b(x)
        else:
            right, left = self.b(x), self.a(x)
        return self.c(left.tanh() + right)


@pytest.mark.parametrize("make", [BatchGrad, DiagGGNExact])
def test_another_order(make: Any) -> None:
    ours, right = Twin(Branches()), Twin(Branches())
    right.model.load_state_dict(ours.model.state_dict())
    for number in range(16):
        batch = torch.rand(4, 5), torch.randint(3, (4,))
        for twin in (ours, right):
            twin.model.a_first = number % 3 != 2
        found = ours.step(batch, make())
        with by_the_engine():
            expected = right.step(batch, make())
        assert not differs(found, expected)


def test_the_same_tensor_twice() -> None:
    """One that came twice when it was written down, and two of the same shape."""
    ours, right = Twin(nn.Bilinear(3, 3, 2)), Twin(nn.Bilinear(3, 3, 2))
    right.model.load_state_dict(ours.model.state_dict())
    for number in range(16):
        x, y = torch.rand(4, 3).double(), torch.rand(4, 3).double()
        for twin in (ours, right):
            twin.model.zero_grad()
            loss = twin.lossfunc(twin.model(x, x if number % 4 else y), torch.tensor([0, 1, 1, 0]))
            with by_the_engine() if twin is right else backpack(), backpack(BatchGrad()):
                loss.backward()
        expected = [p.grad_batch for p in right.model.parameters()]
        assert not differs([p.grad_batch for p in ours.model.parameters()], expected)


@pytest.mark.parametrize("make", [lambda: known.ClippedSumGrad(0.1), known.TaskGrad])
def test_what_extensions_compute_at_the_end(make: Any) -> None:
    """What the loss divides by is another number in each pass."""
    lossfunc, right_loss = nn.CrossEntropyLoss(ignore_index=0), nn.CrossEntropyLoss(ignore_index=0)
    ours = Twin(NETS["mlp"].make(), lossfunc)
    right = Twin(copy.deepcopy(ours.model), right_loss)
    for number in range(PASSES):
        batch = torch.rand(6, 5), torch.tensor([1, 2, *[int(n < number % 4) for n in range(4)]])
        found = ours.step(batch, make(), BatchGrad())
        with by_the_engine():
            expected = right.step(batch, make(), BatchGrad())
        assert not differs(found, expected)
    assert ours.repeated


class Odd(known.ClippedSumGrad):
    """Computes something else at the end, some day."""

    times = 1.0

    def finish(self, values: Any, normalisers: Any = ()) -> Any:
        return {p: value * Odd.times for p, value in super().finish(values, normalisers).items()}


class Keeping(known.ClippedSumGrad):
    """Keeps something of its own at the end."""

    def finish(self, values: Any, normalisers: Any = ()) -> Any:
        found = super().finish(values, normalisers)
        self.count = len(found)
        return found


def test_what_extensions_keep_is_kept_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        computing, "_ONLY_COMPUTING", computing._ONLY_COMPUTING | {"tests", __name__}
    )
    ours = Twin(NETS["mlp"].make())
    for _ in range(PASSES):
        extension = Keeping(0.1)
        ours.step(NETS["mlp"].draw(4), extension)
        assert extension.count == 6
    assert not ours.repeated


def test_a_broken_promise_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        computing, "_ONLY_COMPUTING", computing._ONLY_COMPUTING | {"tests", __name__}
    )
    ours = Twin(NETS["mlp"].make())

    def steps() -> None:
        for _ in range(PASSES):
            ours.step(NETS["mlp"].draw(4), Odd(0.1))

    steps()
    assert ours.repeated
    monkeypatch.setattr(Odd, "times", 2.0)
    with pytest.raises(PluginCodeError, match="At the end of the pass: the plugin"):
        steps()


def _times(gradient: Tensor, factor: float) -> Tensor | None:
    return None if factor == 1.0 else gradient * factor  # the same tensor goes on, or another


@pytest.mark.parametrize("hooked", ["a", "b"])
@pytest.mark.parametrize("extension", ["BatchGrad", "BatchL2Grad"])
def test_hooks_that_change_one_of_two_gradients_which_were_one_tensor(
    extension: str, hooked: str
) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(5, 4) for name in "ab"} | {"c": nn.Linear(4, 3)}
    model = Net(lambda net, x: net.c(net.a(x) + net.b(x)), **layers)
    factor, make = [1.0], getattr(known, extension)
    layers[hooked].register_forward_hook(
        lambda m, a, out: (out.register_hook(lambda g: _times(g, factor[0])), None)[1]
    )
    ours = Twin(model)
    for number in range(PASSES + 2):
        factor[0] = 1.0 if number < PASSES - 1 else 3.0
        ours.step(NETS["mlp"].draw(1), make())
        for parameter in model.parameters():
            found = getattr(parameter, make().savefield)
            alone = parameter.grad.unsqueeze(0)
            right = alone if extension == "BatchGrad" else alone.square().sum().unsqueeze(0)
            torch.testing.assert_close(found, right)
    assert ours.repeated


@pytest.mark.parametrize("extension", ["BatchGrad", "BatchL2Grad"])
def test_a_gradient_that_was_expanded(extension: str) -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(5, 4), "b": nn.Linear(4, 3)}
    factor = list[float]()

    def tripled(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if factor:
            output.register_hook(lambda grad: grad * factor[0])

    layers["a"].register_forward_hook(tripled)
    model = Net(lambda net, x: net.b(net.a(x).sum(1)), **layers)
    ours, right = Twin(copy.deepcopy(model)), Twin(model)
    for number in range(PASSES + 2):
        factor[:] = [] if number < PASSES - 1 else [3.0]
        batch = torch.randn(4, 2, 5), torch.randint(3, (4,))
        found = ours.step(batch, getattr(known, extension)())
        with by_the_engine():
            expected = right.step(batch, getattr(known, extension)())
        assert not differs(found, expected)
    assert ours.repeated


def test_gradients_that_hooks_change() -> None:
    torch.manual_seed(0)
    model = NETS["mlp"].make()
    outs: list[Tensor] = []
    model[2].register_forward_hook(lambda m, a, out: outs.append(out))
    ours = Twin(model)
    for number in range(PASSES):
        batch = NETS["mlp"].draw(4)
        ours.model.zero_grad()
        loss = ours.lossfunc(ours.model(batch[0].double()), batch[1])
        if number > 7:
            outs[-1].register_hook(lambda grad: 2 * grad)
            outs[-1].grad_fn.register_prehook(lambda grads: (grads[0].t().contiguous().t(),))
        with backpack(BatchGrad()):
            loss.backward()
        torch.testing.assert_close(model[2].weight.grad_batch.sum(0), model[2].weight.grad)
        outs.clear()


def test_results_are_there_when_a_gradient_is() -> None:
    model, there = NETS["mlp"].make(), list[bool]()
    ours = Twin(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: there.append(torch.allclose(p.grad_batch.sum(0), p.grad))
        )
    for _ in range(PASSES):
        ours.step(NETS["mlp"].draw(4), BatchGrad())
    assert ours.repeated
    assert all(there)


@pytest.mark.parametrize("extension", ["BatchL2Grad", "SumGradSquared", "DiagGGNMC", "KFLR"])
def test_kernels_that_are_chosen(extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a product, and by the values of which a norm is taken."""
    try:
        onednn_linear(torch.ones(1, 1).float(), torch.ones(1, 1).float())
        monkeypatch.setattr(multiply, "_is_faster", lambda: True)
    except (AttributeError, RuntimeError):
        pass  # this build of torch has one library
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(160, 256), nn.ReLU(), nn.Linear(256, 3)).float()
    model, lossfunc, field = extend(net), extend(nn.CrossEntropyLoss()), ""
    batches = [(torch.randn(512, 160).float(), torch.randint(3, (512,))) for _ in range(8)]
    found, repeated = list[list[Tensor]](), 0
    for is_ours in (True, False):
        for x, y in batches:
            torch.manual_seed(1)
            loss = lossfunc(model(x), y)
            quantity = getattr(known, extension)()
            with nullcontext() if is_ours else by_the_engine(), backpack(quantity) as block:
                loss.backward()
            repeated, field = repeated + block._history["repeated a recording"], quantity.savefield
            found.append([t for p in model.parameters() for t in Apart(getattr(p, field)).tensors])
    assert repeated
    for ours, right in zip(found[: len(batches)], found[len(batches) :], strict=True):
        for one, other in zip(ours, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=float(other.abs().max()) * 1e-5)


# Operations with a number that is read off the data: another one in each pass.
NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "factor": lambda h, number: number * h,
    "quotient": lambda h, number: h / (1 + number),
    "power": lambda h, number: (2 + h.square()) ** number,
    "base": lambda h, number: (1 + number) ** h,
    "weight": lambda h, number: torch.add(h, h.sin(), alpha=number),
    "slope": lambda h, number: nn.functional.leaky_relu(h, number),
    "bound": lambda h, number: h.clamp(-number, number),
    "filled": lambda h, number: h.masked_fill(h > number, number),
    "tensor": lambda h, number: h * torch.tensor(number),
    "dropout": lambda h, number: nn.functional.dropout(h, min(number, 0.9)),
    "way": lambda h, number: h.roll(int(10 * number), 1),
}


class Numbered(nn.Module):
    """A net with such an operation between its layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Linear(5, 4), nn.Linear(4, 3), name

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(NUMBERS[self.name](h, float(x.abs().mean())))


@pytest.mark.grid(4)
@pytest.mark.parametrize("extension", ["DiagGGNExact", "KFAC", "BatchL2Grad"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_between_modules(name: str, extension: str) -> None:
    torch.manual_seed(0)
    # Two others in a row would make another recording.
    sizes = [*[0.4] * 6, 0.9, 0.4, 0.4, 1.2, 0.4, 0.9, 0.4, 0.2, 0.4, 0.9]
    batches = [(torch.randn(6, 5).sign() * size, torch.randint(3, (6,))) for size in sizes]
    repeated = compare(Numbered(name), batches, EXTENSIONS[extension])
    assert repeated or name in ("way", "base")  # another structure each time; values are read


def test_objects_among_attributes_are_compared() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].config = config = SimpleNamespace(width=4, names=["a"], table={"b": (1.0, None)})
    ours = Twin(net)
    draw_batch = NETS["mlp"].draw
    for _ in range(PASSES):
        ours.step(draw_batch(4), DiagGGNExact())
    assert (before := ours.repeated)
    config.table["b"] = (2.0, None)
    ours.step(draw_batch(4), DiagGGNExact())
    assert ours.repeated == before
    config.table["b"] = (1.0, None)
    for _ in range(4):  # some of them are compared
        ours.step(draw_batch(4), DiagGGNExact())
    assert ours.repeated > before
    for value in (iter([1]), partial(torch.add, alpha=2), Looking([]).before):
        unknown = Twin(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
        unknown.model[0].own = value  # type: ignore[index]
        for _ in range(PASSES):
            unknown.step(draw_batch(4), DiagGGNExact())
        assert not unknown.repeated, value


def test_settings() -> None:
    ours, right = Twin(NETS["mlp"].make()), Twin(NETS["mlp"].make())
    right.model.load_state_dict(ours.model.state_dict())
    for number in range(20):
        batch, some = NETS["mlp"].draw(4), [0] if number % 2 else [1, number // 8]
        found = ours.step(batch, BatchGrad(subsampling=some))
        with by_the_engine():
            expected = right.step(batch, BatchGrad(subsampling=some))
        assert not differs(found, expected)
    assert ours.repeated


@pytest.mark.parametrize(
    "options",
    [
        {"check": "always"},
        {"debug": True},
    ],
    ids=lambda options: next((f"{k}-{v}" for k, v in options.items() if not callable(v)), ""),
)
def test_what_the_engine_does(options: dict[str, Any]) -> None:
    ours = Twin(NETS["mlp"].make())
    for _ in range(PASSES):
        ours.step(NETS["mlp"].draw(4), BatchGrad(), **options)
    assert not ours.repeated


SHARING = {"all": BatchGrad, "squares": known.SumGradSquared, "norms": BatchL2Grad}


@pytest.mark.grid(8)
@pytest.mark.parametrize("extension", SHARING)
@pytest.mark.parametrize("net", ["mlp", "cnn", *sorted(NETS.keys() - {"mlp", "cnn"})])
def test_shared_gradients(net: str, extension: str) -> None:
    """Sums that become gradients are repeated like other results; trust grows at some passes."""
    torch.manual_seed(0)
    ours, right = Twin(NETS[net].make()), Twin(NETS[net].make())
    right.model.load_state_dict(ours.model.state_dict())
    make = SHARING[extension]
    for _ in range(2 * PASSES):
        batch = NETS[net].draw(4)
        plain = copy.deepcopy(ours)
        try:
            with by_the_engine():
                expected = right.step(batch, make(), gradient="shared")
        except BackpackError:
            pytest.skip("it does not exist for this net")
        found = ours.step(batch, make(), gradient="shared")
        assert not differs(found, expected)
        gradients = [grad for grad, *_ in plain.step(batch, make())[-1]]
        for (one, *_), other in zip(found[-1], gradients, strict=True):
            assert (one is None) is (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert ours.repeated or net in ("lstm", "slopes")


def test_sums_are_trusted_later() -> None:
    """A gradient that was zero shows nothing; later passes have another recording."""
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(30, 4))
    ours, right = Twin(net), Twin(copy.deepcopy(net))
    counts = list[int]()
    for number in range(40):
        batch = torch.randn(5, 2, 12) * (number > 9), torch.randint(4, (5,))
        found = ours.step(batch, BatchGrad(), gradient="shared")
        with by_the_engine():
            expected = right.step(batch, BatchGrad(), gradient="shared")
        assert not differs(found, expected)
        counts.append(ours.repeated)
    assert counts[9] > 0
    assert counts[-1] > counts[16] + PASSES


class Undefined(torch.autograd.Function):
    """Passes its input on, and now and then no gradient."""

    given = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        return grad if Undefined.given else None


class Added(nn.Module):
    """Two layers whose outputs are added, one of them behind :class:`Undefined`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 3, 3), nn.Conv1d(2, 3, 3)
        self.last = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Any:
        both = Undefined.apply(self.first(x)) + self.second(x)  # type: ignore[no-untyped-call]
        return self.last(both.flatten(1))


def test_gradients_that_are_undefined_stay_so() -> None:
    torch.manual_seed(0)
    ours = Twin(Added())
    right = Twin(copy.deepcopy(ours.model))
    for number in range(24):
        batch = torch.randn(5, 2, 12), torch.randint(4, (5,))
        Undefined.given = number < 17 or number % 2 == 0
        found = ours.step(batch, BatchGrad(), gradient="shared", check="never")
        with by_the_engine():
            expected = right.step(batch, BatchGrad(), gradient="shared", check="never")
        assert not differs(found, expected)
        assert (found[-1][0][0] is None) is not Undefined.given
    assert ours.repeated > 5


def test_passes_that_share_nothing_have_recordings_of_their_own() -> None:
    """With a leaf among the roots, autograd computes every gradient."""
    torch.manual_seed(0)
    models = [extend(NETS["cnn"].make().double()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lossfunc, leaf = extend(nn.CrossEntropyLoss()), torch.ones((), requires_grad=True)
    repeated = 0
    for number in range(30):
        x, y = NETS["cnn"].draw(4)
        found = list[Any]()
        for model, around in zip(models, (nullcontext(), by_the_engine()), strict=True):
            model.zero_grad()
            loss = lossfunc(model(x.double()), y)
            roots = [loss, leaf] if number % 3 == 1 else [loss]
            with around, backpack(BatchGrad(), gradient="shared", check="never") as block:
                torch.autograd.backward(roots)
            repeated += block._history["repeated a recording"]
            found.append([(p.grad, p.grad_batch) for p in model.parameters()])  # type: ignore
        assert not differs(*found)
        assert not any(hasattr(p, "_backpack_gradient") for p in models[0].parameters())
    assert repeated > PASSES


@pytest.mark.parametrize("net", ["mlp", "cnn", "residual", "frozen"])
def test_without_gradients(net: str) -> None:
    ours, right = Twin(NETS[net].make()), Twin(NETS[net].make())
    right.model.load_state_dict(ours.model.state_dict())
    for _ in range(PASSES):
        batch = NETS[net].draw(4)
        found = ours.step(batch, known.ClippedSumGrad(0.1), gradient="none")
        with by_the_engine():
            expected = right.step(batch, known.ClippedSumGrad(0.1), gradient="none")
        assert not differs(found, expected)
        assert all(grad is None for grad, _ in found[-1])
    assert ours.repeated


class Looking(Observer):
    """Somebody else's, which looks at every visit."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def after(self, view: Any) -> None:
        self._seen.append(view.path)


def test_observers_of_others_see_every_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = Twin(NETS["mlp"].make()), list[str]()
    own = backward.returned_by_libraries
    monkeypatch.setattr(backward, "returned_by_libraries", lambda run: [*own(run), Looking(seen)])
    for number in range(PASSES):
        ours.step(NETS["mlp"].draw(4), BatchGrad())
        assert len(seen) == 6 * (number + 1)
    assert not ours.repeated


def test_one_graph_twice() -> None:
    ours = Twin(NETS["mlp"].make())
    for _ in range(PASSES):
        batch = NETS["mlp"].draw(4)
        loss = ours.lossfunc(ours.model(batch[0].double()), batch[1])
        found = []
        for keep in (True, False):
            with backpack(BatchL2Grad()):
                loss.backward(retain_graph=keep)
            found.append([p.batch_l2 for p in ours.model.parameters()])
        assert not differs(*found)


def test_what_was_overwritten_raises() -> None:
    model = NETS["mlp"].make()
    ours, inputs = Twin(model), list[Tensor]()
    model[2].register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    for _ in range(PASSES):
        ours.step(NETS["mlp"].draw(4), DiagGGNMC())
    batch = NETS["mlp"].draw(4)
    loss = ours.lossfunc(ours.model(batch[0].double()), batch[1])
    with torch.no_grad():
        inputs[-1].add_(1.0)
    with pytest.raises(OverwrittenInputError), backpack(DiagGGNMC()):
        loss.backward()


def test_nothing_is_kept() -> None:
    def own(net: Any) -> Any:
        return lambda: net

    ours, before = Twin(NETS["mlp"].make()), live_calls()
    ours.model[0].own = own(ours.model), SimpleNamespace(function=own(ours.model))  # type: ignore[index]
    for _ in range(PASSES):
        ours.step(NETS["mlp"].draw(4), BatchGrad())
    held = [weakref.ref(p.grad_batch) for p in ours.model.parameters()]
    for parameter in ours.model.parameters():
        del parameter.grad_batch
    assert [reference() for reference in held] == [None] * len(held)
    assert live_calls() == before
    assert ours.repeated
    model = weakref.ref(ours.model)
    del ours, parameter
    gc.collect()
    assert model() is None


COMPILER = """
import sys, torch
from torch import nn
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from tests.devices import rng_state
from tests.leftovers import live_calls
model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.MSELoss())
for _ in range(20):
    loss = lossfunc(model(torch.rand(8, 4)), torch.rand(8, 3))
    with backpack(BatchGrad()) as block:
        loss.backward()
print("repeated a recording" in block.summary().passes, "torch._dynamo" in sys.modules)
"""


def test_the_compiler_is_not_imported() -> None:
    """It would take seconds, in the midst of a loop."""
    assert python(COMPILER).strip() == "True False"


# Code that does more ------------------------------------------------------------------------------


class Counting(BatchGrad):
    """Does more than compute."""

    count = 0

    def read(self, product: Any) -> Any:
        Counting.count += 1
        return super().read(product) * (1 + Counting.count // 100)


def test_code_of_others_is_called() -> None:
    ours, Counting.count = Twin(NETS["mlp"].make()), 0
    for number in range(PASSES):
        ours.step(NETS["mlp"].draw(4), Counting())
        assert Counting.count == 6 * (number + 1)
    assert not ours.repeated


def _squares(factor: float) -> Any:
    """A version of ``square_sum`` in another package, which counts its calls."""

    def version(product: AffineProduct) -> Tensor:
        Counting.count += 1
        return factor * dense(product).square().sum((0, 1))

    version.__module__ = "elsewhere"
    return version


def _without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_versions", "_chosen"):
        monkeypatch.setattr(square_sum, table, {})


def test_a_version_of_others_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_versions(monkeypatch)
    square_sum.register(_squares(1.0))
    ours, Counting.count = Twin(NETS["mlp"].make()), 0
    for number in range(PASSES):
        ours.step(NETS["mlp"].draw(4), DiagGGNExact())
        assert Counting.count == 6 * (number + 1)
    assert not ours.repeated


def test_versions_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version computed is not repeated."""
    monkeypatch.setattr(computing, "_ONLY_COMPUTING", computing._ONLY_COMPUTING | {"elsewhere"})
    _without_versions(monkeypatch)
    ours, batch, found = Twin(NETS["mlp"].make()), NETS["mlp"].draw(4), []
    start = copy.deepcopy(ours.model.state_dict())
    for factor in (1.0, 2.0):
        square_sum.register(_squares(factor))
        for _ in range(PASSES):
            ours.step(batch, DiagGGNExact())
        ours.model.load_state_dict(start)
        *_, results = ours.step(batch, DiagGGNExact())
        found.append([result for _, result in results])
    assert ours.repeated
    torch.testing.assert_close(found[1], [2 * each for each in found[0]])


def test_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        computing, "_ONLY_COMPUTING", computing._ONLY_COMPUTING | {"tests", __name__}
    )
    ours, Counting.count = Twin(NETS["mlp"].make()), 60

    def steps() -> None:
        for _ in range(40):
            ours.step(NETS["mlp"].draw(4), Counting())
            Counting.count += 5

    with pytest.raises(PluginCodeError, match="only computes"):
        steps()


def test_threads_that_record() -> None:
    """Methods of tensors are torch's own afterwards, and each thread has its numbers."""
    own, faults = Tensor.tolist, list[BaseException]()

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
            lossfunc = extend(nn.CrossEntropyLoss())
            for _ in range(PASSES):
                inputs = torch.rand(4, 5, generator=generator)
                loss = lossfunc(model(inputs), torch.tensor([0, 1, 2, 0]))
                model.zero_grad()
                with backpack(BatchGrad()):
                    loss.backward()
                for parameter in model.parameters():
                    torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert Tensor.tolist is own
