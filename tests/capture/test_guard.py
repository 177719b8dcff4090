"""Whatever a graph takes for granted is compared before each replay; else the engine runs."""

from __future__ import annotations

import copy
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from backpack_capture import CapturedStep, capture
from backpack_core import _torch, backpack, extend
from backpack_core.extensions import BatchGrad
from backpack_core.plugins.registry import registry
from backpack_products.tuning import memory_budget, set_memory_budget
from backpack_products.values import any_hooks
from tests.capture.twins import same

FACTOR, OTHER = 1.0, 1.0


class Weight:
    """An object that is called."""

    def __init__(self) -> None:
        self.power = 1.0

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.power

    def method(self, loss: Tensor) -> Tensor:
        return loss * self.power


class Settings:
    def __init__(self) -> None:
        self.scale, self.shifts = 1.0, [0.5, 0.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Linear(3, 3)
        self.table, self.settings, self.shift = {"scale": 1.0}, Settings(), torch.zeros(3)
        self.register_buffer("mask", torch.ones(3))

    factor = 1.0

    def more(self, x: Tensor) -> Tensor:
        return x * self.factor * OTHER

    def forward(self, x: Tensor) -> Tensor:
        h = self.more(self.act(self.first(x)) * self.mask)
        h = h * self.table["scale"] * self.settings.scale
        return self.last(h) + self.settings.shifts[1] + self.shift


class Situation:
    """A step that is replayed."""

    def __init__(self) -> None:
        self.model, self.lossfunc = extend(Net()), extend(nn.CrossEntropyLoss())
        self.extension, self.weight = BatchGrad(), 1.0
        self.step = self._captured()
        self.x, self.y = torch.rand(5, 4), torch.randint(3, (5,))
        for _ in range(6):
            self.step(self.x, self.y)

    def _captured(self) -> CapturedStep:
        weight, model, lossfunc = 1.0, self.model, self.lossfunc
        self.called, self.bound, self.partial = called, bound, part = Weight(), Weight(), Weight()
        method, partly = bound.method, partial(Weight.method, part)

        def function(x: Tensor, y: Tensor, more: float = 0.0) -> Tensor:
            loss = lossfunc(model(x), y) * weight * FACTOR + more
            return partly(method(called(loss)))

        def change() -> None:
            nonlocal weight
            weight = 3.0

        self.change, self.function = change, function
        return capture(function, model, lossfunc, self.extension)

    @property
    def replays(self) -> int:
        forms = [form for forms in self.step._forms.values() for form in forms]
        return sum(form.graph.replays for form in forms if form.graph)

    def run(self) -> bool:
        """One step, which has to be right; whether it was replayed."""
        before, by_engine = self.replays, self.step._by_engine
        compared = sum(f.graph.compared for fs in self.step._forms.values() for f in fs if f.graph)
        loss, results = self._results(lambda: self.step(self.x, self.y))
        after = sum(f.graph.compared for fs in self.step._forms.values() for f in fs if f.graph)
        was_replayed = self.replays > before
        assert was_replayed != (self.step._by_engine - by_engine > after - compared)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right, expected = self._results(self._by_engine)
        same(loss, right)
        same(results, expected)
        return was_replayed

    def _by_engine(self) -> Tensor:
        with backpack(self.extension):
            loss = self.function(self.x, self.y)
            loss.backward()
        return loss.detach()

    def _results(self, run: Callable[[], Tensor]) -> Any:
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.__dict__.pop("grad_batch", None)
        loss = run()
        return loss, [
            t for p in self.model.parameters() for t in (p.grad, p.__dict__.get("grad_batch"))
        ]


CHANGES: dict[str, Callable[[Situation], AbstractContextManager[Any] | None]] = {}


def change(function: Any) -> Any:
    CHANGES[function.__name__] = function
    return function


@change
def eval_mode(now: Situation) -> None:
    now.model.eval()


@change
def inner_module_in_eval_mode(now: Situation) -> None:
    now.model.act.eval()


@change
def parameter_replaced(now: Situation) -> None:
    now.model.first.weight = nn.Parameter(torch.rand(3, 4))


@change
def parameter_in_other_layout(now: Situation) -> None:
    weight = now.model.first.weight
    weight.data = weight.data.T.contiguous().T


@change
def parameter_frozen(now: Situation) -> None:
    now.model.first.weight.requires_grad_(False)


@change
def buffer_replaced(now: Situation) -> None:
    now.model.mask = torch.rand(3)


@change
def tensor_attribute_replaced(now: Situation) -> None:
    now.model.shift = torch.rand(3)


@change
def setting_of_a_module(now: Situation) -> None:
    now.model.act.negative_slope = 0.7


@change
def entry_of_a_dictionary(now: Situation) -> None:
    now.model.table["scale"] = 2.0


@change
def attribute_of_an_attribute(now: Situation) -> None:
    now.model.settings.scale = 2.0


@change
def entry_of_a_list_of_an_attribute(now: Situation) -> None:
    now.model.settings.shifts[1] = torch.rand(()).item()


@change
def setting_of_the_loss(now: Situation) -> None:
    now.lossfunc.reduction = "sum"


@change
def module_replaced(now: Situation) -> None:
    now.model.act = extend(nn.Sigmoid())


@change
def module_added(now: Situation) -> None:
    now.model.add_module("further", nn.Linear(2, 2))


@change
def forward_hook(now: Situation) -> None:
    now.model.first.register_forward_hook(lambda module, args, out: out * 2)


@change
def forward_pre_hook(now: Situation) -> None:
    now.model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@change
def backward_hook(now: Situation) -> None:
    now.model.last.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 1,))


@change
def hook_of_all_modules(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        handle = register_module_forward_hook(lambda module, args, out: None)
        try:
            yield
        finally:
            handle.remove()

    return block()


@change
def gradient_hook(now: Situation) -> None:
    now.model.first.weight.register_hook(lambda grad: grad * 2)


@change
def hook_after_accumulation(now: Situation) -> None:
    now.model.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "seen", 1))


@change
def forward_of_the_instance(now: Situation) -> None:
    now.model.act.forward = lambda x: x * 2


@change
def forward_of_the_class(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        before = Net.forward
        Net.forward = lambda self, x: before(self, x) * 2
        try:
            yield
        finally:
            Net.forward = before

    return block()


@change
def class_of_a_module(now: Situation) -> None:
    now.model.first.__class__ = type("Other", (nn.Linear,), {"__module__": "torch.other"})


@change
def variable_around_the_function(now: Situation) -> None:
    now.change()


@change
def global_variable(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        globals()["FACTOR"] = 2.0
        try:
            yield
        finally:
            globals()["FACTOR"] = 1.0

    return block()


@change
def global_variable_of_a_method(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        globals()["OTHER"] = 2.0
        try:
            yield
        finally:
            globals()["OTHER"] = 1.0

    return block()


@change
def attribute_of_a_class(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        Net.factor = 2.0
        try:
            yield
        finally:
            Net.factor = 1.0

    return block()


@change
def method_of_a_class(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        before = Net.more
        Net.more = lambda self, x: x * 2
        try:
            yield
        finally:
            Net.more = before

    return block()


@change
def attribute_of_an_object_that_is_called(now: Situation) -> None:
    now.called.power = 2.0


@change
def attribute_of_an_object_with_a_method(now: Situation) -> None:
    now.bound.power = 2.0


@change
def attribute_of_an_object_in_a_partial(now: Situation) -> None:
    now.partial.power = 2.0


@change
def code_of_a_function(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        before = Weight.method.__code__
        Weight.method.__code__ = (lambda self, loss: loss * 2).__code__
        try:
            yield
        finally:
            Weight.method.__code__ = before

    return block()


@change
def buffer_of_another_dtype(now: Situation) -> None:
    now.model.mask.data = torch.ones(3, dtype=torch.float32)


@change
def buffer_of_another_shape(now: Situation) -> None:
    now.model.mask.data = torch.ones(1)


@change
def default_of_the_function(now: Situation) -> None:
    now.function.__defaults__ = (3.0,)


@change
def setting_of_an_extension(now: Situation) -> None:
    now.extension.fail_mode = "error"


@change
def memory_budget_set(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        before = memory_budget()
        set_memory_budget(8)
        try:
            yield
        finally:
            set_memory_budget(before)

    return block()


@change
def plugins_changed(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        registry.generation += 1
        yield

    return block()


@change
def autocast(now: Situation) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@change
def deterministic_algorithms(now: Situation) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return block()


@change
def default_dtype(now: Situation) -> None:
    torch.set_default_dtype(torch.float32)  # the fixture puts it back


@change
def without_mkldnn(now: Situation) -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


@change
def anomaly_detection(now: Situation) -> Any:
    return torch.autograd.set_detect_anomaly(True)


@change
def saved_tensor_hooks(now: Situation) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@change
def another_shape(now: Situation) -> None:
    now.x, now.y = torch.rand(6, 4), torch.randint(3, (6,))


@change
def another_layout(now: Situation) -> None:
    now.x = torch.rand(4, 5).T


@change
def another_dtype(now: Situation) -> None:
    now.model.float(), now.lossfunc.float()
    now.x = now.x.float()
    now.model.shift = now.model.shift.float()


@change
def an_argument_that_wants_a_gradient(now: Situation) -> None:
    now.x = now.x.clone().requires_grad_()


def test_nothing_changed() -> None:
    now = Situation()
    assert now.replays == 3
    with torch.no_grad():
        for parameter in now.model.parameters():
            parameter += 0.1  # no graph holds numbers of parameters
        now.model.shift += 1.0  # nor those of tensors that lie where the guard looks
    now.x = torch.rand(5, 4)
    assert [now.run() for _ in range(4)] == [True] * 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_changed(name: str) -> None:
    now = Situation()
    block = CHANGES[name](now)
    if block is None:
        assert not now.run()
        return
    with block:
        assert not now.run()
    assert now.run() or name == "plugins_changed"  # the graph is still there


@pytest.mark.filterwarnings("ignore")
def test_hooks_are_seen_where_torch_does_not_tell_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.6."""
    monkeypatch.setattr(_torch, "_top_hooks", any_hooks)
    test_changed("saved_tensor_hooks")


@pytest.mark.parametrize("name", ["parameter_replaced", "buffer_replaced", "module_replaced"])
def test_what_was_replaced_is_recorded_again(name: str) -> None:
    now = Situation()
    CHANGES[name](now)
    assert [now.run() for _ in range(8)][-1]


@pytest.mark.filterwarnings("ignore")
def test_modes_alternate() -> None:
    """Each has its graph."""
    now = Situation()
    for _ in range(6):
        now.model.eval()
        now.run()
        now.model.train()
        now.run()
    found = []
    for mode in (False, True, False, True):
        now.model.train(mode)
        found.append(now.run())
    assert found == [True] * 4


def test_a_step_of_an_installed_package() -> None:
    """The function itself is looked at, wherever it comes from."""
    source = "def step(x, y, more=[0.0]):\n    return lossfunc(model(x), y) * SCALE + more[0]\n"
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    known: dict[str, Any] = {"model": model, "lossfunc": lossfunc, "SCALE": 1.0}
    exec(compile(source, sysconfig.get_path("purelib") + "/installed.py", "exec"), known)
    step = capture(known["step"], model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(7):
        loss = step(x, y)
    known["SCALE"] = 2.0
    same(step(x, y), 2 * loss)
    known["SCALE"], known["step"].__defaults__[0][0] = 1.0, 5.0
    same(step(x, y), loss + 5)


class Trainer:
    """Holds a model, a setting, a step that is captured, and counts."""

    def __init__(self) -> None:
        self.model, self.lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
        self.scale, self.count = 1.0, 0
        self.step = capture(self.loss, self.model, self.lossfunc, BatchGrad())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scaled(self.lossfunc(self.model(x), y))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale


def test_an_object_that_is_copied() -> None:
    """Python notes something in each class that it copies."""

    class Scaling:
        def __init__(self) -> None:
            self.scale = 2.0

    model, lossfunc, scaling = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss()), Scaling()
    step = capture(lambda x, y: scaling.scale * lossfunc(model(x), y), model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(8):
        step(x, y)
    assert "__slotnames__" not in vars(Scaling)
    copy.deepcopy(scaling)
    assert "__slotnames__" in vars(Scaling)
    assert step.holds(x, y)
    Scaling.other = 2.0  # type: ignore[attr-defined]
    assert not step.holds(x, y)


def test_an_object_that_counts_its_steps() -> None:
    """What a method does not name may change; what it names may not."""
    trainer = Trainer()
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(10):
        trainer.count += 1
        loss = trainer.step(x, y)
    assert len(trainer.step.report().splitlines()) == 2
    assert "7 replays" in trainer.step.report()
    trainer.scale = 2.0
    same(trainer.step(x, y), 2 * loss)
    assert "7 replays" in trainer.step.report()
