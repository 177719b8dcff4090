"""Results say which plugins computed them, and those of different plugins are not mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_attribution import GradientStore, fill, merge_stores, preconditioned, project
from backpack_core import Extension, LayerRule, backpack, extend, quantities
from backpack_core.errors import UsageError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact, SumGradSquared
from backpack_core.testing.isolation import temporary_plugin
from backpack_data import Quantities, accumulate, combined, unscale
from backpack_firstorder import Projection
from backpack_optimizers import EKFAC
from backpack_privacy import make_private
from backpack_products import fingerprint as module
from backpack_products.fingerprint import Fingerprint, Marked, agreed, fingerprint
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.kronecker import diagonal_matrix, matrix_from_state
from tests import forks

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
LOSS = nn.CrossEntropyLoss()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0])) for _ in range(2)]


def found(**options: Any) -> Quantities:
    return accumulate(MODEL, LOSS, batches(), KFAC(), DiagGGNExact(), progress=False, **options)


def changed(plugins: Fingerprint) -> Fingerprint:
    """As of another release of the layers."""
    return {**plugins, "backpack-plugin-layers": "0.2.0 0123456789ab"}


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Has the code of all plugins be another one from now on."""

    def change() -> None:
        monkeypatch.setattr(module, "_digest", lambda home: "0123456789ab")
        module._marks.cache_clear()  # what was found is the same for the rest of a process

    yield change
    module._marks.cache_clear()


DIFFERENT = r"were computed by different plugins: .*backpack-plugin-layers: 0\.\S+ \S+ and 0\."


def test_it_lists_what_takes_part() -> None:
    own = fingerprint([MODEL, LOSS], [BatchGrad()])
    assert {"backpack-core", "backpack-products", "backpack-plugin-layers"} <= own.keys()
    assert "backpack-plugin-firstorder" in own
    assert not {"backpack-plugin-secondorder", "backpack-plugin-transformers"} & own.keys()
    assert fingerprint([MODEL], [DiagGGNExact]).keys() - own.keys() == {
        "backpack-plugin-secondorder"
    }
    assert all(len(said.split()) == 2 for said in own.values())


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class TwiceRule(LayerRule):
    module_types = (Twice,)

    def _jac_t_mat_prod(self, view: Any, mat: Tensor) -> Tensor:
        return 2 * mat


def test_a_class_of_nobody_counts_by_its_source() -> None:
    class Own(Extension):
        savefield = "own"

    net = nn.Sequential(Twice())
    without = fingerprint([net], [Own])
    (name,) = (name for name in without if name.endswith("Own"))
    assert len(without[name]) == 12
    with temporary_plugin(TwiceRule):
        assert any(name.endswith("TwiceRule") for name in fingerprint([net]))
    assert without == fingerprint([net], [Own])


def test_quantities(tmp_path: Path) -> None:
    first, second = found(), found()
    assert first.plugins == fingerprint([MODEL, LOSS], [KFAC(), DiagGGNExact()])
    assert (0.5 * (first + second)).plugins == first.plugins
    first.save(tmp_path / "first")
    loaded = Quantities.load(tmp_path / "first")
    assert loaded.plugins == first.plugins
    second.plugins = changed(second.plugins)
    for mix in (
        lambda: loaded + second,
        lambda: loaded.moving_average(second, 0.5),
        lambda: BlockDiagonal(loaded.field("kfac")) + BlockDiagonal(second.field("kfac")),
    ):
        with pytest.raises(UsageError, match=DIFFERENT):
            mix()


def test_who_knows_may_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fingerprint([MODEL])
    with pytest.raises(UsageError, match="BACKPACK_MIX_PLUGINS=1"):
        agreed({"a": own, "b": changed(own)})
    monkeypatch.setenv("BACKPACK_MIX_PLUGINS", "1")
    assert agreed({"a": own, "b": changed(own)}) == own
    monkeypatch.setenv("BACKPACK_MIX_PLUGINS", "0")
    with pytest.raises(UsageError, match="a and b were"):
        agreed({"a": own, "nobody": {}, "b": changed(own)})
    assert agreed({"a": {}, "b": own}) == own
    assert agreed({}) == {}


def test_who_is_missing_is_named() -> None:
    own = fingerprint([MODEL])
    with pytest.raises(UsageError, match="mine: none and 1 2") as caught:
        agreed({"a": own, "b": {**own, "mine": "1 2"}})
    assert "layers" not in str(caught.value)


def test_factors(update: Any, tmp_path: Path) -> None:
    blocks = BlockDiagonal(found().field("kfac"))
    state = blocks.state_dict()
    torch.save(state, tmp_path / "blocks.pt")
    loaded = BlockDiagonal.from_state_dict(torch.load(tmp_path / "blocks.pt", weights_only=True))
    assert loaded.plugins == blocks.plugins != {}
    assert list(loaded) == list(blocks)
    assert (loaded + blocks).inverse(0.1).plugins == blocks.plugins
    update()
    again = BlockDiagonal(found().field("kfac"))
    with pytest.raises(UsageError, match=f"This matrix and the other one {DIFFERENT}"):
        loaded.moving_average(again, 0.5)
    by_hand = BlockDiagonal({name: torch.ones(block.order.shape) for name, block in again.items()})
    assert by_hand.plugins == {}
    assert by_hand.map(lambda block: block).plugins == {}


def test_a_single_matrix(update: Any, tmp_path: Path) -> None:
    model: Any = extend(nn.Sequential(nn.Linear(3, 2)).double())
    lossfunc: Any = extend(nn.CrossEntropyLoss())

    def factors() -> Any:
        with backpack(KFAC()):
            lossfunc(model(torch.ones(2, 3).double()), torch.tensor([0, 1])).backward()
        return quantities(model)["0.weight"].kfac

    own = factors()
    torch.save(own.state_dict(), tmp_path / "factors.pt")
    loaded = matrix_from_state(torch.load(tmp_path / "factors.pt", weights_only=True))
    assert loaded.order.plugins == own.order.plugins == fingerprint([model], [KFAC])
    assert (2 * loaded).eigenbasis().inverse(0.1).order.plugins == own.order.plugins
    assert torch.equal((loaded + own)[0], 2 * own[0])
    update()
    mixes: list[Callable[[], Any]] = [
        lambda: loaded + factors(),
        lambda: factors() + 2 * loaded,
        lambda: factors().moving_average(loaded, 0.5),
    ]
    for mix in mixes:
        with pytest.raises(UsageError, match=f"This matrix and the other one {DIFFERENT}"):
            mix()
    by_hand = diagonal_matrix(torch.ones(2, 3))
    assert not by_hand.order.plugins
    assert "plugins" not in by_hand.state_dict()


def test_a_matrix_of_several_batches_can_be_saved_by_itself(tmp_path: Path, update: Any) -> None:
    """Taken out of quantities, left by `combined`, or unscaled."""
    model: Any = extend(nn.Sequential(nn.Linear(3, 4)).double())
    lossfunc: Any = extend(nn.CrossEntropyLoss())
    inputs, targets = torch.ones(2, 3).double(), torch.tensor([0, 1])
    with combined(model, KFAC()):
        lossfunc(model(inputs), targets).backward()
    left = quantities(model)["0.weight"].kfac
    with backpack(KFAC()):
        (2.0 * lossfunc(model(inputs), targets)).backward()
    unscale(model, [KFAC()], 2.0)
    unscaled = quantities(model)["0.weight"].kfac
    assert left.order.plugins == unscaled.order.plugins == fingerprint([model], [KFAC])

    whole, place = found(), ("0.weight", "kfac")
    whole.save(tmp_path / "found")
    taken, read = whole[place], Quantities.load(tmp_path / "found")[place]
    assert taken.order.plugins.items() <= read.order.plugins.items()
    assert read.order.plugins == whole.plugins
    assert (taken + read).order.plugins
    saved = [matrix_from_state(matrix.state_dict()) for matrix in (taken, left, unscaled)]
    update()
    for matrix in (read, *saved):
        with pytest.raises(UsageError, match=f"This matrix and the other one {DIFFERENT}"):
            _ = matrix + found()[place]


def test_states_of_optimizers(update: Any) -> None:
    optimizer, lossfunc = trained()
    with optimizer.curvature():
        lossfunc(optimizer.model(torch.ones(2, 3).double()), torch.tensor([0, 1])).backward()
    optimizer.step()
    state = optimizer.state_dict()
    trained()[0].load_state_dict(state)
    assert "plugins" not in state["curvature"]["factors"][0]
    update()
    text = f"curvature of the state and that of further steps {DIFFERENT}"
    with pytest.raises(UsageError, match=text):
        trained()[0].load_state_dict(state)


def test_a_class_counts_with_those_it_inherits_from() -> None:
    class Own(KFAC):  # type: ignore[misc]
        pass

    both = fingerprint([MODEL], [Own])
    assert fingerprint([MODEL], [KFAC]).items() < both.items()


def test_a_sum_of_two_quantities() -> None:
    """Who takes part may differ, but not in its code."""
    both = accumulate(MODEL, LOSS, batches(), KFAC(), SumGradSquared(), progress=False)
    first = BlockDiagonal(Marked(both.field("kfac"), fingerprint([MODEL], [KFAC])))
    second = BlockDiagonal(
        Marked(both.field("sum_grad_squared"), fingerprint([MODEL], [BatchGrad]))
    )
    assert (first.map(diagonal) + second).plugins == {**first.plugins, **second.plugins}
    second.plugins = changed(second.plugins)
    with pytest.raises(UsageError, match=DIFFERENT):
        first.map(diagonal) + second


def diagonal(block: Any) -> Tensor:
    found: Tensor = block.diagonal()
    return found.reshape(block.order.shape)


def test_state_files(update: Any, tmp_path: Path) -> None:
    found(state_file=tmp_path / "state")
    found(state_file=tmp_path / "state")
    update()
    with pytest.raises(UsageError, match=rf"state and this run {DIFFERENT}"):
        found(state_file=tmp_path / "state")


def test_gradients(update: Any, tmp_path: Path) -> None:
    projection = Projection(4)
    folders = [tmp_path / name for name in ("first", "second")]
    fill(GradientStore(folders[0]), MODEL, LOSS, batches()[:1], projection, progress=False)
    store = GradientStore(folders[0])
    queries = project(MODEL, LOSS, batches(), projection)
    assert len(store.search(queries, 2).identities) == 8
    fill(store, MODEL, LOSS, batches(), projection, progress=False)
    assert len(GradientStore(folders[0])) == 8
    update()
    with pytest.raises(UsageError, match=DIFFERENT):
        fill(store, MODEL, LOSS, batches(), projection, progress=False)
    later = project(MODEL, LOSS, batches(), projection)
    for ask in (store.search, store.scores, partial(preconditioned, store)):
        with pytest.raises(UsageError, match=f"first and the queries {DIFFERENT}"):
            ask(later)
        ask(dict(later))  # of nobody knows whom
    second = GradientStore(folders[1])
    fill(second, MODEL, LOSS, batches(), projection, progress=False, identities="content")
    with pytest.raises(UsageError, match=f"first and .*second {DIFFERENT}"):
        merge_stores(folders, tmp_path / "both")


def one_step() -> None:
    optimizer, lossfunc = trained(process_group=distributed.group.WORLD)
    with optimizer.curvature():
        lossfunc(optimizer.model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()
    optimizer.step()


def trained(**settings: Any) -> Any:
    """An optimizer in front of a step, and the loss."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 2)).double())
    optimizer = EKFAC(model, **settings)
    return optimizer, extend(nn.CrossEntropyLoss())


def private_start() -> None:
    data = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    plain = torch.optim.SGD(model.parameters(), 0.1)
    settings: Any = {"noise_multiplier": 1.0, "max_norm": 1.0}
    make_private(model, nn.CrossEntropyLoss(), plain, DataLoader(data, 2), **settings)


def rank_of_two(rank: int, folder: Path) -> None:
    """A process that computes with plugins of its own."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    if rank:
        module._digest = lambda home: "0123456789ab"  # type: ignore[assignment]
    group = distributed.group.WORLD
    starts: list[Any] = [partial(found, process_group=group), one_step, private_start]
    for number, begin in enumerate(starts):
        try:
            begin()
        except Exception as error:
            (folder / f"{rank}{number}").write_text(f"{type(error).__name__}: {error}")
    distributed.barrier()


@pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)
def test_ranks_compare_before_they_compute(tmp_path: Path) -> None:
    forks.run_ranks(rank_of_two, tmp_path)
    for rank, number in product(range(2), range(3)):
        said = (tmp_path / f"{rank}{number}").read_text()
        assert "rank 0 and those of rank 1 were computed by different plugins" in said
        assert "backpack-core" in said
