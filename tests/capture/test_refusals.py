"""What is not recorded runs by the engine, as without a capture, and one warning says why."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CaptureWarning, capture
from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import GGNMP, KFAC, BatchGrad, GGNGram
from tests.capture.twins import same
from tests.cases import Net

Function = Callable[[Tensor, Tensor], Any]
Write = Callable[[nn.Module, nn.Module], Function]
CASES: dict[str, tuple[str, Write]] = {}


def because(text: str) -> Callable[[Write], Write]:
    def add(write: Write) -> Write:
        CASES[write.__name__] = text, write
        return write

    return add


@because("numpy, by which numbers leave torch")
def to_numpy(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * float(x.numpy().mean())


@because("__array__, by which")
def as_array(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * float(np.asarray(x)[0, 0])


@because("data_ptr, by which")
def address(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * bool(x.data_ptr())


@because("__dlpack__, by which")
def dlpack(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * float(np.from_dlpack(x)[0, 0])


@because("to_dlpack, by which")
def to_dlpack(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: (
        lossfunc(model(x), y) * torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))[0, 0]
    )


@because("set_, which exchanges the memory")
def exchanged_memory(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x.clone().set_(x * 2)), y)


@because("the memory of a tensor was exchanged")
def data_of_a_tensor(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = x * 1
        h.data = x * 2
        return lossfunc(model(h), y)

    return step


@because("the memory of a")
def data_of_a_parameter(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        model[0].weight.data = model[0].weight.data * 1.5
        return lossfunc(model(x), y)

    return step


@because("random numbers that are not torch's")
def python_random(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * (1 + random.random())


@because("random numbers that are not torch's")
def numpy_random(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * (1 + np.random.rand())


@because("sets the state of torch's generator")
def seeded_inside(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return lossfunc(model(torch.nn.functional.dropout(x, 0.5)), y)

    return step


@because("sets the state of torch's generator")
def seeded_at_the_end(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = lossfunc(model(torch.nn.functional.dropout(x, 0.5)), y)
        torch.manual_seed(int(y.sum()))
        return loss

    return step


@because("draws numbers with a Generator")
def own_generator(model: nn.Module, lossfunc: nn.Module) -> Function:
    generator = torch.Generator().manual_seed(0)
    return lambda x, y: lossfunc(model(x), y) * torch.rand((), generator=generator)


@because("changes attributes of modules, or variables")
def counter(model: nn.Module, lossfunc: nn.Module) -> Function:
    model.calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.calls += 1
        return lossfunc(model(x), y) * model.calls

    return step


@because("changes attributes of modules, or variables")
def setting_that_changes_once(model: nn.Module, lossfunc: nn.Module) -> Function:
    model.scale, turns = 1.0, iter(range(30))

    def step(x: Tensor, y: Tensor) -> Tensor:
        if next(turns) == 2:  # that is recorded
            model.scale = 2.0
        return lossfunc(model(x), y) * model.scale

    return step


@because("changes attributes of modules, or variables")
def counter_around(model: nn.Module, lossfunc: nn.Module) -> Function:
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return lossfunc(model(x), y) * calls

    return step


@because("it keeps a tensor elsewhere")
def kept_loss(model: nn.Module, lossfunc: nn.Module) -> Function:
    log: SimpleQueue[Tensor] = SimpleQueue()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = lossfunc(model(x), y)
        log.put(loss.detach())
        return loss

    return step


@because("it changes attributes of modules, or variables that it refers to")
def constant_of_a_class(model: nn.Module, lossfunc: nn.Module) -> Function:
    class Log:
        entries = ()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = lossfunc(model(x), y)
        Log.entries = (*Log.entries, loss.detach())
        return loss

    return step


@because("a tensor of shape [] that is not an argument")
def iterator(model: nn.Module, lossfunc: nn.Module) -> Function:
    weights = iter(torch.rand(30))
    return lambda x, y: lossfunc(model(x), y) * next(weights)


@because("a parameter of shape [1] that is not an argument")
def unknown_parameter(model: nn.Module, lossfunc: nn.Module) -> Function:
    weight = torch.rand(1).requires_grad_()
    return lambda x, y: (lossfunc(model(x), y) * weight).sum()


@because("a hook on Linear may do more")
def forward_hook(model: nn.Module, lossfunc: nn.Module) -> Function:
    model[0].register_forward_hook(lambda module, args, out: None)
    return lambda x, y: lossfunc(model(x), y)


@because("forward of Tanh is replaced")
def forward_of_an_instance(model: nn.Module, lossfunc: nn.Module) -> Function:
    model[1].forward = torch.tanh
    return lambda x, y: lossfunc(model(x), y)


@because("a tensor of layout torch.sparse")
def sparse(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x.to_sparse().to_dense()), y)


@because("it sets or clears .grad, as zero_grad() does")
def cleared_gradients(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        return lossfunc(model(x), y)

    return step


@because("it uses the gradient that an earlier step has left")
def optimizer_inside(model: nn.Module, lossfunc: nn.Module) -> Function:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.step()
        return lossfunc(model(x), y)

    return step


@because("it uses a tensor of shape [3, 4, 3] that is not an argument")
def results_of_the_step_before(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss, before = lossfunc(model(x), y), getattr(model[0].weight, "grad_batch", None)
        return loss if before is None else loss * before.norm()

    return step


@because("numbers or shapes from values, which differ each time")
def number_in_a_formula(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * x.mean().item()


@because("numbers or shapes from values, which differ each time")
def list_of_numbers(model: nn.Module, lossfunc: nn.Module) -> Function:
    return lambda x, y: lossfunc(model(x), y) * x.flatten().tolist()[0]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture
def _seeded() -> Iterator[None]:
    before, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(before)
    np.random.set_state(numpy)


@pytest.mark.host("numpy is one of the reasons")
@pytest.mark.usefixtures("_seeded")
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    text, write = CASES[name]
    models = [net(), net()]
    models[1].load_state_dict(models[0].state_dict())
    results: list[list[Any]] = [[], []]
    said: list[str] = []
    for turn, model in enumerate(models):
        torch.manual_seed(1)
        random.seed(1), np.random.seed(1)
        extend(model)
        lossfunc = extend(nn.CrossEntropyLoss())
        function = write(model, lossfunc)
        step = capture(function, model, lossfunc, BatchGrad())
        for _ in range(12):
            x, y = torch.rand(3, 3), torch.randint(2, (3,))
            if turn:
                with backpack(BatchGrad()):
                    loss = function(x, y)
                    loss.backward()
            else:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    loss = step(x, y)
                said += [str(w.message) for w in caught if w.category is CaptureWarning]
            grads = [t.clone() for p in model.parameters() for t in (p.grad, p.grad_batch)]
            results[turn].append([loss.detach(), *grads])
        if not turn:
            assert len(said) == 1, (said, step.report())
            assert text in said[0]
            assert text in step.report()
    same(*results)


@pytest.mark.parametrize("extension", [GGNMP(), GGNGram()], ids=["GGNMP", "GGNGram"])
def test_results_that_are_code(extension: Any) -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, extension)
    for _ in range(2):
        step(torch.rand(3, 3), torch.randint(2, (3,)))
    with pytest.warns(CaptureWarning, match="holds code"):
        step(torch.rand(3, 3), torch.randint(2, (3,)))
    assert "engine, a result is a" in step.report()
    for parameter in model.parameters():  # which hold the graph
        parameter.__dict__.clear()


@pytest.mark.parametrize("argument", [itertools.count(), nn.Linear(1, 1), torch.device])
def test_arguments_that_are_no_values(argument: Any) -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y, other: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    with pytest.warns(CaptureWarning, match="an argument is a"):
        step(torch.rand(3, 3), torch.randint(2, (3,)), argument)


def test_checked_always() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    function = lambda x, y: lossfunc(model(x), y)  # noqa: E731
    step = capture(function, model, lossfunc, BatchGrad(), check="always")
    with pytest.warns(CaptureWarning, match="measures every pass"):
        step(torch.rand(3, 3), torch.randint(2, (3,)))


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((), {}, "needs the extended modules"),
        ((nn.Linear(1, 1), BatchGrad), {}, "takes extension instances"),
        (
            (nn.Linear(1, 1), BatchGrad()),
            {"observer": dict},
            "observer= makes an object for each pass",
        ),
        ((nn.Linear(1, 1), BatchGrad()), {"samples": [0]}, "does not take samples="),
        ((nn.Linear(1, 1), BatchGrad()), {"gradient": "all"}, "gradient is one of"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        capture(lambda x: x, *arguments, **options)


def test_shapes_that_are_always_others() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    for number in range(1, 64):
        step(torch.rand(number, 3), torch.randint(2, (number,)))
    with pytest.warns(CaptureWarning, match="are others nearly every time"):
        step(torch.rand(64, 3), torch.randint(2, (64,)))
    step(torch.rand(65, 3), torch.randint(2, (65,)))
    assert model[0].weight.grad_batch.shape == (65, 4, 3)


@pytest.mark.parametrize("extension", [BatchGrad, KFAC])
def test_tokens_that_are_handed_to_experts(extension: Any) -> None:
    """A recorded step may make a plan, which keeps tensors; that is not why it is refused."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, which = net.a(x), (x[:, 0] > 0).nonzero().flatten()
        return h.index_add(0, which, net.b(h[which]))

    torch.manual_seed(0)
    model = extend(Net(forward, a=nn.Linear(3, 2), b=nn.Linear(2, 2)))
    lossfunc = extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, extension())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(24):
            step(torch.randn(4, 3), torch.randint(2, (4,)))
    assert "from values, which differ each time" in step.report()


def test_steps_are_not_copied() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    with pytest.raises(UsageError, match="belongs to its modules and to this process"):
        copy.deepcopy(step)


def test_what_is_no_function() -> None:
    with pytest.raises(UsageError, match="takes a function"):
        capture(nn.Linear(1, 1), nn.Linear(1, 1))


def test_what_is_no_loss() -> None:
    model = extend(net())
    step = capture(lambda x: 3, model, BatchGrad())
    with pytest.raises(UsageError, match="returns its loss"):
        step(torch.rand(3, 3))


def test_errors_of_a_step_are_its_own() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())

    def function(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() < 0:
            raise KeyError("mine")
        return lossfunc(model(x), y)

    step = capture(function, model, lossfunc, BatchGrad())
    y = torch.randint(2, (3,))
    for _ in range(6):
        step(torch.rand(3, 3), y)
    assert "3 replays" in step.report()
    with pytest.raises(KeyError, match="mine"):
        step(-torch.rand(3, 3), y)
    step(torch.rand(3, 3), y)
    assert "5 replays" in step.report()


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_a_step_clears_only_later(to_none: bool) -> None:
    """There were none when the step was recorded: the first replay that finds some is compared."""
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())

    def function(x: Tensor, y: Tensor) -> Any:
        model.zero_grad(to_none)
        return lossfunc(model(x), y)

    step = capture(function, model, lossfunc, BatchGrad())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(20):
            x, y = torch.randn(5, 4), torch.randint(3, (5,))
            if number < 10:
                model.zero_grad()
            step(x, y)
            torch.testing.assert_close(model.weight.grad, model.weight.grad_batch.sum(0))
    assert "it sets or clears .grad" in str(found[-1].message)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("change", [lambda losses: losses, lambda losses: losses.mean().detach()])
def test_a_loss_without_a_backward_pass(
    change: Callable[[Tensor], Tensor], is_inside: bool
) -> None:
    model = extend(nn.Linear(4, 3))

    def function(x: Tensor, y: Tensor) -> Any:
        loss = change(nn.functional.cross_entropy(model(x), y, reduction="none"))
        return (loss, 1) if is_inside else loss

    step = capture(function, model, BatchGrad())
    with pytest.raises(UsageError, match=r"but that has (shape|no graph)"):
        step(torch.randn(5, 4), torch.randint(3, (5,)))
