"""Who keeps tensors that torch itself does something with: a library, which core asks by a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from backpack_core import View, backpack, extend, hookimpl, register, unregister
from backpack_core.errors import MissingPluginError, NotExtendedError
from backpack_core.extensions import BatchGrad
from backpack_core.record import storage
from backpack_core.record.storage import Storage
from backpack_interplay.storage import Interplay
from tests.forks import python


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, X: Tensor) -> Tensor:
        """Twice the tensor."""
        return 2 * X


class Net(nn.Module):
    """Two layers, of which the first may run in a checkpoint."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 2))
        self.is_checkpointed = is_checkpointed

    def forward(self, X: Tensor) -> Tensor:
        """Both."""
        if self.is_checkpointed:
            return self.last(checkpoint(self.first, X, use_reentrant=False))
        return self.last(self.first(X))


def run(net: nn.Module, create_graph: bool = False) -> None:
    """A pass in which all outputs are looked at."""
    X = torch.rand(5, 3)
    loss = extend(net)(X).square().sum()

    def look(view: View) -> None:
        assert view.output.shape == view.output_shape

    with backpack(BatchGrad(), observer=look):
        loss.backward(create_graph=create_graph)
    for parameter in net.parameters():
        assert parameter.grad_batch.shape == (5, *parameter.shape)
        del parameter.grad_batch
        parameter.grad = None  # which holds the graph


def offloaded() -> None:
    with torch.autograd.graph.save_on_cpu():
        run(Net())


def parametrized() -> None:
    net = Net()
    parametrize.register_parametrization(net.first, "weight", Twice())
    run(net)


def computed_in_a_hook() -> None:
    net = Net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(net.first)
    run(net)


WAYS: list[Callable[[], None]] = [
    lambda: run(Net(is_checkpointed=True)),
    lambda: run(Net(), create_graph=True),
    offloaded,
    parametrized,
    computed_in_a_hook,
]


@pytest.fixture
def alone() -> Iterator[None]:
    """No library gives a storage."""
    known = storage.storage()
    storage.use(None)
    yield
    storage.use(known)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("alone")
def test_core_alone_says_what_to_install(way: Callable[[], None]) -> None:
    with pytest.raises(MissingPluginError, match="pip install backpack-interplay"):
        way()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_with_the_library_there_is_a_result(way: Callable[[], None]) -> None:
    way()


@pytest.mark.usefixtures("alone")
def test_core_alone_keeps_tensors_in_memory() -> None:
    run(Net())


@pytest.mark.usefixtures("alone")
def test_a_compiled_net_takes_no_part_in_core_alone() -> None:
    """Nothing turns the compiler off, and compiled code runs no hooks of ours."""
    net = extend(Net())
    compiled = torch.compile(net, backend="eager")
    with (
        pytest.raises(NotExtendedError, match="no extended module took part"),
        backpack(BatchGrad()),
    ):
        compiled(torch.rand(5, 3)).sum().backward()
    assert not hasattr(net.first.weight, "grad_batch")


def test_a_library_that_is_blocked_gives_none() -> None:
    source = (
        "from backpack_core.plugins import ensure_loaded\n"
        "from backpack_core.record.storage import Storage, storage\n"
        "ensure_loaded()\n"
        "print(type(storage()) is Storage)\n"
    )
    assert python(source, BACKPACK_BLOCK_PLUGINS="backpack-interplay").strip() == "True"


class Counting(Storage):
    """Keeps tensors in memory, and counts how often it is asked to."""

    asked = 0

    def keep(
        self, stored: storage.Stored, run: storage.Run
    ) -> tuple[storage.Stored, storage.Run, bool]:
        """As they are."""
        self.asked += 1
        return stored, run, False


class Library:
    """A plugin with a storage of its own."""

    calls = 0

    @hookimpl
    def backpack_storage(self) -> Storage:
        """Count the calls."""
        self.calls += 1
        return Counting()


def test_the_hook_is_called_when_a_plugin_comes_and_not_by_passes() -> None:
    model, X, library = extend(nn.Linear(3, 2)), torch.rand(4, 3), Library()
    register(library, "library")
    try:
        found = storage.storage()
        assert isinstance(found, Counting)
        for _ in range(2):
            loss = model(X).square().sum()
            with backpack(BatchGrad()):
                loss.backward()
        assert (library.calls, found.asked) == (1, 0)
        with torch.autograd.graph.save_on_cpu():
            model(X)
        assert found.asked == 1
    finally:
        unregister("library")
    assert isinstance(storage.storage(), Interplay)
