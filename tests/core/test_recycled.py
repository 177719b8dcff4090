"""Memory of results is written again where nothing else can see it, and nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backpack_capture import visits
from backpack_core import Extension, backpack, extend
from backpack_core.extensions import (
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    Jacobians,
    SumGradSquared,
)
from backpack_products import recycled
from backpack_secondorder.outputs import SumOutputs

pytestmark = pytest.mark.host("torch itself recycles the memory of a GPU")

SAMPLES, WIDTH = 4, 160


@pytest.fixture(autouse=True)
def _small_results_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "SMALLEST", 1)
    # No recordings: what they are compared with lies in new memory. See capture/test_memory.py.
    monkeypatch.setattr(visits, "_may_repeat", lambda run: False)


def _model() -> nn.Sequential:
    return extend(nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))


def _pass(
    model: nn.Module, *extensions: Extension, samples: int = SAMPLES, **options: Any
) -> Tensor:
    """A pass over new data; returns the individual gradients of a weight, by autograd."""
    inputs = torch.randn(samples, 3)
    weight: Any = model[0].weight  # type: ignore[index]
    rows = [torch.autograd.grad(model(x[None]).square().sum(), weight)[0] for x in inputs]
    loss = model(inputs).square().sum()
    with backpack(*extensions or [BatchGrad()], **options):
        loss.backward()
    return torch.stack(rows)


def _address(model: nn.Module) -> int:
    found: Any = model[0].weight.grad_batch  # type: ignore[index]
    return int(found.data_ptr())


def _warm(model: nn.Module, passes: int = 6, **options: Any) -> None:
    for _ in range(passes):
        _pass(model, **options)


def test_memory_is_written_again() -> None:
    model = _model()
    _warm(model)
    addresses = [_address(model)]
    for _ in range(12):
        expected = _pass(model)
        torch.testing.assert_close(model[0].weight.grad_batch, expected)  # type: ignore[union-attr]
        addresses.append(_address(model))
    # Two of the passes are measured. They compute more, free what does not fit that, and so may
    # store results in other memory.
    assert sum(one != other for one, other in pairwise(addresses)) <= 2


def test_memory_of_transposed_results_is_written_again() -> None:
    model, inputs = _model(), torch.randn(SAMPLES, 3)
    lossfunc, weight = extend(SumOutputs()), model[0].weight
    seen = set()
    for _ in range(12):
        outputs = model(inputs).flatten()
        rows = [torch.autograd.grad(y, weight, retain_graph=True)[0] for y in outputs]
        with backpack(Jacobians()):
            lossfunc(model(inputs)).backward()
        found: Any = weight.jacobians  # type: ignore[union-attr]
        torch.testing.assert_close(found, torch.stack(rows).view_as(found))
        assert not found.is_contiguous()
        seen.add(found.data_ptr())
        del found
        inputs = torch.randn(SAMPLES, 3)
    assert len(seen) <= 2


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        *product([BatchDiagGGNMC, BatchDiagGGNExact], ["linear", "positions", "convolution"]),
        (BatchDiagHessian, "linear"),
    ],
)
def test_memory_of_curvature_by_sample_is_written_again(
    kind: Callable[[], Any], layer: str
) -> None:
    first: nn.Module = nn.Conv1d(3, WIDTH, 2) if layer == "convolution" else nn.Linear(3, WIDTH)
    layers = [first, nn.Flatten(), nn.ReLU(), nn.LazyLinear(3)]
    model = extend(nn.Sequential(*layers))
    lossfunc = extend(nn.CrossEntropyLoss())
    shape = {"linear": (3,), "positions": (2, 3), "convolution": (3, 3)}[layer]
    targets, seen = torch.arange(SAMPLES) % 3, []
    for _ in range(12):
        with backpack(extension := kind()):
            lossfunc(model(torch.randn(SAMPLES, *shape)), targets).backward()
        seen.append(getattr(first.weight, extension.savefield).data_ptr())
    # Each result takes the memory of one of the two before it.
    assert len({*seen}) <= 2


class _Holding(TorchDispatchMode):
    """Holds all results, as a recording does."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.held.append(func(*args, **(kwargs or {})))
        return self.held[-1]


@pytest.mark.parametrize("mode", [_Holding, torch.inference_mode])
@pytest.mark.parametrize("is_view", [False, True])
def test_counts_of_what_nobody_holds(is_view: bool, mode: Any) -> None:
    """They are the same in a recording and in inference mode, and whoever holds ``None``."""
    recycled._unheld.cache_clear()
    with mode():
        recycled._unheld(is_view)
    noise = [None] * 1000
    whole = torch.zeros(2, 3)
    owner: dict[str, Any] = {"result": whole[0] if is_view else whole}
    del whole
    held = [owner.pop("result", None)]
    assert recycled.holders_of(held) == recycled.holders_of(recycled._unheld(is_view))
    assert len(noise) == 1000


def _failed_compilation() -> None:
    with pytest.raises(Exception, match="unknown"):
        torch.compile(lambda x: x.unknown(), backend="eager", fullgraph=True)(torch.ones(1))


def test_counts_do_not_depend_on_the_compiler() -> None:
    """A compilation that fails leaves frames to the compiler, which may hold arguments, too."""
    script = """
import torch
from tests.core import test_recycled as here

here.recycled.SMALLEST = 1
model = here._model()
here._warm(model)
here._failed_compilation()
addresses = set()
for _ in range(4):
    here._pass(model)
    addresses.add(here._address(model))
assert len(addresses) == 1, addresses
held = model[0].weight.grad_batch
numbers = held.clone()
here._pass(model)
assert torch.equal(held, numbers)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_not_if_results_are_kept() -> None:
    model = _model()
    _warm(model, keep_results=True)
    seen = model[0].weight.grad_batch.numpy().copy()  # type: ignore[union-attr, operator]
    held, address = _holding_nothing_but_memory(model), _address(model)
    _pass(model, keep_results=True)
    assert _address(model) != address
    assert (held == seen).all()


def _holding_nothing_but_memory(model: nn.Module) -> Any:
    return model[0].weight.grad_batch.numpy()  # type: ignore[index, union-attr, operator]


class Holder:
    """Holds something as an attribute."""

    def __init__(self, held: object) -> None:
        self.held = held


def _graph(result: Tensor) -> Tensor:
    return (torch.ones_like(result, requires_grad=True) * result).sum()


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "name": lambda result: result,
    "list": lambda result: [result],
    "attribute": Holder,
    "closure": lambda result: lambda: result,
    "detached": Tensor.detach,
    "data": lambda result: result.data,
    "row": lambda result: result[1],
    "rows": lambda result: result[1:],
    "view": lambda result: result.view(-1),
    "transposed": lambda result: result.mT,
    "as_strided": lambda result: result.as_strided((2, 2), (1, 3)),
    "base": lambda result: result if result._base is None else result._base,
    "storage": Tensor.untyped_storage,
    "array": Tensor.numpy,
    "memoryview": lambda result: memoryview(result.numpy()),
    "part of an array": lambda result: result.numpy()[1:],
    "dlpack": torch.utils.dlpack.to_dlpack,
    "through dlpack": lambda result: torch.from_dlpack(result.detach()),
    "graph": _graph,
    "graph of a view": lambda result: _graph(result[1:]),
    "set_": lambda result: torch.empty(0).set_(result.untyped_storage()),  # type: ignore[call-overload]
    "parameter": lambda result: nn.Parameter(result, requires_grad=False),
    "in a cycle": lambda result: _in_a_cycle(result),
}


def _in_a_cycle(result: Tensor) -> None:
    holder = Holder(result)
    holder.held = [result, holder]


@pytest.mark.parametrize("kind", HOLDERS)
def test_not_if_something_holds_it(kind: str) -> None:
    gc.disable()  # so that the cycle stays
    try:
        model = _model()
        _warm(model)
        parameter: Any = model[0].weight
        address = parameter.grad_batch.data_ptr()
        held = HOLDERS[kind](parameter.grad_batch)
        _pass(model)
        assert parameter.grad_batch.data_ptr() != address
        del held
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [kind for kind in HOLDERS if kind != "view"])
def test_not_if_something_holds_a_transposed_result(kind: str) -> None:
    gc.disable()
    try:
        model, lossfunc = _model(), extend(SumOutputs())
        parameter: Any = model[0].weight
        address, held = 0, None
        for _ in range(7):
            with backpack(Jacobians()):
                lossfunc(model(torch.randn(SAMPLES, 3))).backward()
            assert parameter.jacobians.data_ptr() != address
            address, held = parameter.jacobians.data_ptr(), HOLDERS[kind](parameter.jacobians)
        del held
    finally:
        gc.enable()


def test_a_weak_reference_does_not_hold_it() -> None:
    model = _model()
    _warm(model)
    address, reference = _address(model), weakref.ref(model[0].weight.grad_batch)  # type: ignore[arg-type]
    _pass(model)
    assert reference() is None
    assert _address(model) == address


def test_results_that_are_held_keep_their_numbers() -> None:
    model, held, expected = _model(), list[Tensor](), list[Tensor]()
    for _ in range(10):
        expected.append(_pass(model))
        held.append(model[0].weight.grad_batch)  # type: ignore[arg-type, union-attr]
    for ours, theirs in zip(held, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_sizes_get_memory_of_their_own() -> None:
    model = _model()
    for samples in (4, 4, 4, 4, 3, 4, 3, 3, 5, 5):
        expected = _pass(model, samples=samples)
        torch.testing.assert_close(model[0].weight.grad_batch, expected)  # type: ignore[union-attr]


def test_nothing_is_left_behind() -> None:
    model = _model()
    for extensions in ((BatchGrad(),), (BatchGrad(), SumGradSquared()), (BatchL2Grad(),)):
        for samples in (4, 4, 4, 4, 2):
            _pass(model, *extensions, samples=samples)
            assert not recycled._recycled.memories


def test_nor_after_an_error() -> None:
    model = _model()
    _warm(model)

    def fail(module: nn.Module) -> None:
        raise KeyError(module)

    with pytest.raises(KeyError):
        _pass(model, extension_hook=fail)
    assert not recycled._recycled.memories
