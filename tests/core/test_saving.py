"""Where autograd saves through hooks, so do calls: memory that checkpoints save is still saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from backpack_core import _torch, backpack, disable, extend, is_extended
from backpack_core.errors import OverwrittenInputError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian
from backpack_interplay import checkpoints
from backpack_products.tuning import memory_budget, set_memory_budget
from backpack_products.values import any_hooks
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.leftovers import settle

Run = Callable[..., Tensor]
WAYS: dict[str, Run] = {
    "one graph": lambda block, h: checkpoint(block, h, use_reentrant=False),
    "re-entrant": lambda block, h: checkpoint(block, h, use_reentrant=True),
    "nested": lambda block, h: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), h, use_reentrant=False
    ),
    "re-entrant inside": lambda block, h: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=True), h, use_reentrant=False
    ),
    "inside re-entrant": lambda block, h: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), h, use_reentrant=True
    ),
}


class Block(nn.Module):
    """Modules with rules and without, a function, something in place, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.rectify = nn.LayerNorm(4), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.rand(4))
        self.runs = 0

    def forward(self, h: Tensor) -> Tensor:
        self.runs += 1
        h = h + self.rectify(self.first(self.norm(h)))
        h = torch.sigmoid(self.twice(torch.sin(self.twice(h))))
        return h * self.scale


def model(run: Run, depth: int = 2) -> nn.Module:
    return Net(
        lambda net, x: net.last(run_all(run, net.blocks, net.first(x)).flatten(1)),
        first=nn.Linear(3, 4),
        blocks=nn.ModuleList([Block() for _ in range(depth)]),
        last=nn.Linear(8, 3),
    )


def run_all(run: Run, blocks: nn.ModuleList, h: Tensor) -> Tensor:
    for block in blocks:
        # What is expected is computed by grad(), which re-entrant ones refuse.
        h = run(block, h) if is_extended(block) else block(h)
    return h


def problem(run: Run) -> Problem:
    return classification(model(run), (2, 3), batch=3)


pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_quantity(way: str, early_stop: bool) -> None:
    with set_checkpoint_early_stop(early_stop):
        problem(WAYS[way]).check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}])
def test_each_block_is_computed_once_more(way: str, options: dict[str, int]) -> None:
    found = problem(WAYS[way])
    found.run(DiagGGNExact(**options), BatchGrad(), KFAC(fail_mode="block"))
    # What is nested is computed again by the outer and by the inner one.
    assert {block.runs for block in found.model.blocks} <= {2, 3}


def storages(shape: tuple[int, ...]) -> int:
    """How many activations of a shape are alive."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == shape]
    sizes = {o.untyped_storage()._cdata: o.untyped_storage().nbytes() for o in found}
    return sum(size >= 8 * torch.Size(shape).numel() for size in sizes.values())


@pytest.mark.parametrize("way", WAYS)
def test_between_the_passes_only_what_checkpoints_keep_is_alive(way: str) -> None:
    """The input of each block; without checkpoints, every activation."""
    alive = {}
    for name, run in (("none", lambda block, h: block(h)), ("kept", WAYS[way])):
        found = classification(model(run, depth=3), (2, 3), batch=7)
        loss = extend(found.lossfunc)(extend(found.model)(*found.inputs), found.target)
        alive[name] = storages((7, 2, 4))
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        del loss
    assert alive["kept"] <= 4  # and the output of the last
    assert alive["none"] > 12


def test_in_the_backward_pass_one_block_at_a_time_is_alive() -> None:
    alive: list[int] = []
    found = classification(model(WAYS["one graph"], depth=5), (2, 3), batch=7)
    loss = extend(found.lossfunc)(extend(found.model)(*found.inputs), found.target)

    def count(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            alive.append(storages((7, 2, 4)))

    with backpack(BatchGrad(), extension_hook=count):
        loss.backward()
    assert len(alive) == 5
    assert max(alive) < 5 + 14  # the inputs, and what one block has


def live_after_chunks(way: str, depth: int, budget: int) -> int:
    """Most bytes of activations that are alive while the first block is computed again."""
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
                            for _ in range(depth)])  # fmt: skip
    net = Net(lambda net, x: net.last(run_all(WAYS[way], net.blocks, net.first(x))),
              first=nn.Linear(3, 4), blocks=blocks, last=nn.Linear(4, 3))  # fmt: skip
    found, peak = classification(net, (3,), batch=7), 0
    expected = [d.sum(0) for d in found.expected(oracle.ggn_diagonals)]

    def count(*_: object) -> None:
        nonlocal peak
        tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (7, 4)]
        storages = {o.untyped_storage()._cdata: o.untyped_storage() for o in tensors}
        peak = max(peak, sum(storage.nbytes() for storage in storages.values()))

    set_memory_budget(budget)
    blocks[0][1].register_forward_hook(count)
    found.run(DiagGGNExact(chunk_size=1))
    found.compare("diag_ggn_exact", expected)
    return peak


@pytest.mark.parametrize("way", WAYS)
def test_chunks_keep_what_fits_into_memory(way: str) -> None:
    """Of each further block, the input that its checkpoint keeps; with memory, everything."""
    activation, before = 8 * 7 * 4, memory_budget()
    settle()
    try:
        less, more = (live_after_chunks(way, depth, 3 * activation) for depth in (2, 5))
        assert more - less <= 3 * 1.5 * activation
        less, more = (live_after_chunks(way, depth, before) for depth in (2, 5))
        assert more - less >= 3 * 5 * activation
    finally:
        set_memory_budget(before)


def test_what_a_checkpoint_differentiates_inside_is_not_dropped_while_it_runs() -> None:
    """Its own graph has a checkpoint, too, which runs again before the outer one is through."""

    def block(net: Any, h: Tensor) -> Tensor:
        h = torch.tanh(net.first(h))
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            inner = checkpoint(torch.tanh, leaf.sin(), use_reentrant=False)
            (slope,) = torch.autograd.grad(inner.sum(), leaf)
        return torch.exp(torch.sin(h * slope))

    net = Net(lambda net, x: net.last(checkpoint(block, net, x, use_reentrant=False)),
              first=nn.Linear(3, 4), last=nn.Linear(4, 3))  # fmt: skip
    found, before = classification(net, (3,), batch=5), memory_budget()
    expected = [d.sum(0) for d in found.expected(oracle.ggn_diagonals)]
    try:
        set_memory_budget(1)
        found.run(DiagGGNExact(chunk_size=1))
    finally:
        set_memory_budget(before)
    found.compare("diag_ggn_exact", expected)


class Packed:
    """What hooks of a user's give in the place of a tensor: numbers elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        self.values, self.dtype = tensor.tolist(), tensor.dtype
        self.shape = tensor.shape


def unpack(packed: Packed) -> Tensor:
    return torch.tensor(packed.values, dtype=packed.dtype).reshape(packed.shape)


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "on the host": save_on_cpu,
    "elsewhere": lambda: saved_tensors_hooks(Packed, unpack),
    "as they are": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.host("a hook of it moves tensors to there")
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_of_users(hooks: str) -> None:
    found = problem(lambda block, h: block(h))
    gradients = found.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in found.expected(oracle.ggn_diagonals)]
    with HOOKS[hooks]():
        loss = found.loss()
    for keep in (True, False):
        with backpack(BatchGrad(), DiagGGNExact(), retain_graph=keep):
            loss.backward(retain_graph=keep)
        found.compare("grad_batch", gradients)
        found.compare("diag_ggn_exact", diagonals)


@pytest.mark.host("a hook of it moves tensors to there")
def test_hooks_of_users_take_what_calls_keep() -> None:
    found = problem(lambda block, h: block(h))
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(weakref.ref(output))

    for part in (found.model.first, found.model.blocks[0].norm):
        part.register_forward_hook(note)
    with saved_tensors_hooks(Packed, unpack):
        loss = found.loss()
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    with backpack(BatchGrad()):
        loss.backward()


def test_pooling_returns_indices_through_hooks() -> None:
    pool = Net(lambda net, x: net.last(net.pool(x.unsqueeze(1))[0].flatten(1)),
               pool=nn.MaxPool1d(2, return_indices=True), last=nn.Linear(2, 3))  # fmt: skip
    first = nn.Linear(3, 4)
    both = Net(lambda net, x: checkpoint(net.pool, net.first(x), use_reentrant=False),
               first=first, pool=pool)  # fmt: skip
    classification(both, (3,)).check()


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
def test_disable_around_one_of_the_passes(way: str, around: str) -> None:
    """What is computed again saves what was saved at first."""
    found = problem(WAYS[way])
    plain = [torch.autograd.grad(found.loss(), found.parameters)]
    extend(found.model), extend(found.lossfunc)
    with disable() if around == "forward" else nullcontext():
        loss = found.lossfunc(found.model(*found.inputs), found.target)
    with disable() if around == "backward" else nullcontext():
        loss.backward()
    for p, gradient in zip(found.parameters, plain[0], strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.filterwarnings("ignore:.*reference cycle")
@pytest.mark.parametrize("way", ["one graph", "re-entrant"])
def test_quantities_are_differentiable(way: str) -> None:
    found = []
    for run in (WAYS[way], lambda block, h: block(h)):
        torch.manual_seed(3)
        mine = problem(run)
        with backpack(BatchGrad(), retain_graph=True):
            mine.loss().backward(create_graph=True)
        value = sum(p.grad_batch.square().sum() for p in mine.parameters)  # type: ignore[attr-defined]
        found.append(torch.autograd.grad(value, mine.parameters))
        for p in mine.parameters:
            p.grad = p.grad_batch = None  # type: ignore[attr-defined]
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference)


def test_hessian_through_modules_in_a_checkpoint() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())
    found = []
    for run in (WAYS["one graph"], lambda block, h: block(h)):
        net = Net(lambda net, x, run=run: net.last(run(net.block, net.first(x))),
                  first=nn.Linear(3, 4), block=block, last=nn.Linear(4, 3))  # fmt: skip
        for part in (net.first, net.last):
            part.load_state_dict({k: torch.ones_like(v) / 2 for k, v in part.state_dict().items()})
        torch.manual_seed(5)
        mine = classification(net, (3,))
        mine.run(DiagHessian())
        found.append([value.clone() for value in mine.fields("diag_h")])
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference)


def test_what_was_overwritten_inside_is_refused() -> None:
    """Autograd does not notice it there, and takes what was written for what was saved."""

    def overwrite(net: Any, h: Tensor) -> Tensor:
        h = torch.sin(h)
        result: Tensor = net.second(h)
        h.mul_(2)
        return result

    net = Net(lambda net, x: checkpoint(overwrite, net, net.first(x), use_reentrant=False),
              first=nn.Linear(3, 4), second=nn.Sequential(nn.Linear(4, 3)))  # fmt: skip
    refused = pytest.raises(OverwrittenInputError, match="input was changed in place")
    # Else what is written would come after the last tensor that is saved.
    with refused, set_checkpoint_early_stop(False):
        classification(net, (3,)).run(BatchGrad())


@pytest.mark.parametrize("way", [*WAYS, *HOOKS])
@pytest.mark.host("a hook of it moves tensors to there")
def test_a_node_saves_where_torch_has_no_function(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch 2.6."""
    monkeypatch.setattr(checkpoints, "_make", checkpoints.SavedByNode)
    if way in WAYS:
        problem(WAYS[way]).check()
        test_between_the_passes_only_what_checkpoints_keep_is_alive(way)
    else:
        test_hooks_of_users(way)
        test_hooks_of_users_take_what_calls_keep()


def test_torch_tells_whether_there_are_hooks() -> None:
    """All that torch 2.6 tells by itself; asking changes nothing."""
    assert any_hooks(False) is None
    with save_on_cpu():
        for _ in range(2):
            assert any_hooks(False) == ()
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            assert any_hooks(False) == ()
    assert any_hooks(False) is None
    with disable_saved_tensors_hooks("not here"):
        assert any_hooks(False) is None
        with pytest.raises(RuntimeError, match="not here"), save_on_cpu():
            pass
    with ThreadPoolExecutor(1) as pool, save_on_cpu():
        assert pool.submit(any_hooks, False).result() is None


def test_hooks_are_known_where_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.6: those that were entered on this thread are noted."""
    autograd = torch._C._autograd
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(autograd, name, getattr(autograd, name))  # to have it back
    top = checkpoints.watched_hooks()
    monkeypatch.setattr(_torch, "_top_hooks", top)
    outer, inner = (lambda t: t, lambda t: t), (lambda t: 2 * t, lambda t: t / 2)
    with saved_tensors_hooks(*outer):
        with saved_tensors_hooks(*inner):
            assert top(False) == inner
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(top, False).result() is None
        assert top(False) == outer
    assert top(False) is None
    net = Net(lambda net, x: checkpoint(net.a, x, use_reentrant=False), a=nn.Linear(3, 2))
    loss = extend(nn.MSELoss())(extend(net)(torch.randn(4, 3)), torch.randn(4, 2))
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    weight: Any = net.a.weight
    assert weight.grad_batch.shape == (4, 2, 3)
    oracle.assert_close(weight.grad_batch.sum(0), weight.grad)
