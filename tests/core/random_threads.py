"""What several threads do at once, drawn: passes of own models, and of one that all share.

Each thread checks its own results by plain autograd, on a copy that was never extended.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import backpack_core.extensions as known
from backpack_capture import capture
from backpack_core import backpack, extend, unextend
from backpack_core.errors import BackpackError
from backpack_data import accumulate
from tests import oracle

Action = Callable[["Thread"], None]
ACTIONS: dict[str, Action] = {}
SIZE = 3


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


class Residual(nn.Module):
    """A layer that is called twice, with an operation between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layer(self.layer(x).tanh())
        return result


def made() -> Any:
    return extend(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), Residual(), nn.Linear(SIZE, 2)))


class Thread:
    """One thread: its models, and what it did.

    Attributes:
        shared: A model of all threads. Results on it have the number of the thread in their names.
        told: What it did.
    """

    def __init__(self, number: int, seed: int, shared: Any) -> None:
        self.number, self.random, self.shared = number, Random(1000 * seed + number), shared
        self.generator = torch.Generator().manual_seed(1000 * seed + number)
        self.told: list[str] = []
        self.model, self.lossfunc = made(), extend(nn.MSELoss())
        self.open: list[Iterator[Any]] = []
        self.step: Any = None

    def run(self, count: int) -> None:
        torch.set_default_dtype(torch.float64)
        for _ in range(count):
            name = self.random.choice([*ACTIONS])
            self.told.append(name)
            ACTIONS[name](self)
        while self.open:
            with contextlib.suppress(StopIteration):
                next(self.open.pop(self.random.randrange(len(self.open))))
        self.told.append("in the end")
        self.check(self.model)

    # Passes --------------------------------------------------------------------------------------

    def data(self) -> tuple[Tensor, Tensor]:
        count = self.random.choice([1, 2, 4])
        options: Any = {"generator": self.generator, "dtype": torch.float64}
        return torch.randn(count, SIZE, **options), torch.randn(count, 2, **options)

    def check(self, model: Any, is_shared: bool = False, **options: Any) -> None:
        """A pass, and a comparison of its results."""
        x, y = self.data()
        name = self.random.choice(["BatchGrad", "BatchL2Grad", "SumGradSquared", "DiagGGNExact"])
        field = f"of_{self.number}_{name}"
        loss = self.lossfunc(model(x), y)
        options.setdefault("gradient", "none" if is_shared else "autograd")
        with backpack(getattr(known, name)(savefield=field), **options):
            loss.backward()
        self.compare(model, name, field, x, y)

    def compare(self, model: Any, name: str, field: str, x: Tensor, y: Tensor) -> None:
        plain = copy.deepcopy(model)
        unextend(plain)
        for parameter in plain.parameters():
            parameter.grad = None
        parameters, loss = [*plain.parameters()], lambda output: nn.functional.mse_loss(output, y)
        if name == "DiagGGNExact":
            right = [rows.sum(0) for rows in oracle.ggn_diagonals(plain, loss, [x], parameters)]
        else:
            rows = oracle.individual_gradients(plain, loss, [x], parameters)
            read = {
                "BatchGrad": lambda each: each,
                "BatchL2Grad": lambda each: each.flatten(1).square().sum(1),
                "SumGradSquared": lambda each: each.square().sum(0),
            }[name]
            right = [read(each) for each in rows]
        for parameter, wanted in zip(model.parameters(), right, strict=True):
            ours = getattr(parameter, field, None)
            assert ours is not None, f"{self.told}: {field} is missing"
            assert ours.shape == wanted.shape, f"{self.told}: {field}"
            assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-11), f"{self.told}: {field}"


@action
def own(thread: Thread) -> None:
    thread.check(thread.model)


@action
def shared(thread: Thread) -> None:
    thread.check(thread.shared, is_shared=True)


@action
def update(thread: Thread) -> None:
    with torch.no_grad():
        for parameter in thread.model.parameters():
            parameter.mul_(0.97)


@action
def nested(thread: Thread) -> None:
    """A pass of an inner block; the outer one gets a pass of its own afterwards."""
    x, y = thread.data()
    outer, inner = f"outer_{thread.number}", f"inner_{thread.number}"
    for parameter in thread.model.parameters():
        vars(parameter).pop(outer, None)
    with backpack(known.BatchL2Grad(savefield=outer)):
        loss = thread.lossfunc(thread.model(x), y)
        with backpack(known.SumGradSquared(savefield=inner)):
            loss.backward()
        thread.compare(thread.model, "SumGradSquared", inner, x, y)
        assert not any(hasattr(p, outer) for p in thread.model.parameters()), thread.told
        x, y = thread.data()
        thread.lossfunc(thread.model(x), y).backward()
        thread.compare(thread.model, "BatchL2Grad", outer, x, y)


@action
def failing_hook(thread: Thread) -> None:
    kind = thread.random.choice([ZeroDivisionError, KeyboardInterrupt, GeneratorExit, SystemExit])

    def fail(module: nn.Module) -> None:
        raise kind

    try:
        thread.check(thread.model, extension_hook=fail)
    except kind:
        return
    raise AssertionError(f"{thread.told}: no error")


@action
def failing_forward(thread: Thread) -> None:
    kind = thread.random.choice([ZeroDivisionError, KeyboardInterrupt])

    def fail(module: nn.Module, given: Any, output: Tensor) -> None:
        raise kind

    place = thread.random.randrange(len(thread.model))
    handle = thread.model[place].register_forward_hook(fail)
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
        thread.check(thread.model)
    handle.remove()


@action
def failing_gradient(thread: Thread) -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    handle = thread.model[0].weight.register_hook(fail)
    with contextlib.suppress(KeyboardInterrupt):
        thread.check(thread.model)
    handle.remove()


@action
def yielding(thread: Thread) -> None:
    """A generator that stays in its block after its pass, and is closed at any time."""

    def passes() -> Iterator[None]:
        x, y = thread.data()
        field = f"yielded_{thread.number}"
        with backpack(known.BatchGrad(savefield=field)):
            thread.lossfunc(thread.model(x), y).backward()
            thread.compare(thread.model, "BatchGrad", field, x, y)
            yield

    generator = passes()
    next(generator)
    thread.open.append(generator)
    if thread.random.random() < 0.7:
        closed = thread.open.pop(thread.random.randrange(len(thread.open)))
        closed.close()  # type: ignore[attr-defined]


@action
def copied(thread: Thread) -> None:
    kind = thread.random.choice(["copy", "saved", "graph alive"])
    loss = (
        thread.lossfunc(thread.model(thread.data()[0]), torch.zeros(2)) if kind[0] == "g" else None
    )
    if kind == "saved":
        file = io.BytesIO()
        torch.save(thread.model, file)
        file.seek(0)
        thread.model = torch.load(file, weights_only=False)
    else:
        thread.model = copy.deepcopy(thread.model)
    del loss
    extend(thread.model)


@action
def collected(thread: Thread) -> None:
    """A model that is gone when its graph is used."""
    model, (x, y) = made(), thread.data()
    parameters = [*model.parameters()]
    loss = thread.lossfunc(model(x), y)
    plain = unextend(copy.deepcopy(model))
    del model
    if thread.random.random() < 0.3:
        gc.collect()
    with backpack(known.BatchGrad()), contextlib.suppress(BackpackError):
        loss.backward()
        each = oracle.individual_gradients(
            plain, lambda out: nn.functional.mse_loss(out, y), [x], [*plain.parameters()]
        )
        for parameter, rows in zip(parameters, each, strict=True):
            assert torch.allclose(parameter.grad_batch, rows), thread.told


@action
def extended_again(thread: Thread) -> None:
    if thread.random.random() < 0.5:
        unextend(thread.model)
    extend(thread.model)


@action
def captured(thread: Thread) -> None:
    field = f"captured_{thread.number}"
    if thread.step is None or thread.step[0] is not thread.model:
        model, lossfunc = thread.model, thread.lossfunc
        step = capture(
            lambda x, y: lossfunc(model(x), y), model, lossfunc, known.BatchGrad(savefield=field)
        )
        thread.step = model, step
    for _ in range(thread.random.choice([1, 5])):
        x, y = thread.data()
        thread.step[1](x, y)
        thread.compare(thread.model, "BatchGrad", field, x, y)


@action
def over_data(thread: Thread) -> None:
    x, y = thread.data()
    extension = known.SumGradSquared(savefield=f"summed_{thread.number}")
    loader = [*zip(x.split(2), y.split(2), strict=True)]
    found = accumulate(thread.model, thread.lossfunc, loader, extension, progress=False)
    for (path, field), value in found.items():
        setattr(thread.model.get_parameter(path), field, value)
    thread.compare(thread.model, "SumGradSquared", extension.savefield, x, y)


def run(seed: int, count: int, threads: int) -> None:
    """Threads that start together; errors of any are raised.

    Raises:
        AssertionError: A result is wrong.
    """
    torch.manual_seed(seed)
    shared = made()
    made_threads = [Thread(number, seed, shared) for number in range(threads)]
    meet = threading.Barrier(threads, timeout=30)

    def work(thread: Thread) -> None:
        meet.wait()
        thread.run(count)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, thread) for thread in made_threads]:
            future.result(120)
