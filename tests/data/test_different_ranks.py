"""Ranks that differ learn it, and ranks that may differ do not wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from backpack_core import extend
from backpack_core.errors import BackpackError, UsageError
from backpack_core.extensions import EKFAC, KFLR, BatchGrad, DiagGGNExact, DiagHessian
from backpack_data import Quantities, accumulate, combined
from tests.forks import on_ranks

pytestmark = [
    pytest.mark.host("gloo joins tensors of there"),
    pytest.mark.skipif(
        not distributed.is_available() or sys.platform == "win32",
        reason="this torch was built without torch.distributed, or has no gloo over files",
    ),
]
SHARES = ((slice(0, 3), slice(3, 5)), (slice(5, 10),), (slice(10, 14),))


def net(seed: int = 0, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x, y = torch.randn(14, 4), torch.arange(14) % 3
    return [(x[part], y[part]) for part in SHARES[rank]]


def found(loader: Any, *extensions: Any, model: nn.Module | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"progress": False, "timeout": 20.0, **options}
    return accumulate(model or net(), nn.CrossEntropyLoss(), loader, *extensions, **settings)


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except BackpackError as error:
        return str(error)
    return ""


def different(rank: int, folder: Path) -> dict[str, str]:
    """What is said of models and extensions that differ."""
    torch.manual_seed(2)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    frozen, moved, single = net(), nn.Sequential(nn.Identity(), *net()), net()
    frozen[2 * rank].requires_grad_(False)
    models: dict[str, Any] = {
        "The model": net(outputs=3 + rank),
        "The model ": moved if rank else net(),
        "precision": single.float() if rank else single,
        "checksum": net(seed=rank),
        "trained parameters": frozen,
        "train mode": net().train(bool(rank)),
    }
    group = distributed.group.WORLD
    texts = {}
    for name, model in models.items():
        own = x.to(next(model.parameters()).dtype)
        run = lambda m=model, x=own: found(  # noqa: E731
            [(x, y)], DiagGGNExact(), model=m, process_group=group
        )
        texts[name] = said(run)
        if name in ("checksum", "train mode"):
            continue

        def block(model: nn.Module = model, x: Tensor = own) -> None:
            lossfunc = extend(nn.CrossEntropyLoss())
            with combined(extend(model), DiagGGNExact(), process_group=group):
                lossfunc(model(x), y).backward()

        texts[f"{name}/combined"] = said(block)
    extension: Any = DiagHessian() if rank else DiagGGNExact()
    gathered = lambda: found([(x, y)], KFLR(), process_group=group, gather=bool(rank))  # noqa: E731
    texts["gather"] = said(gathered)
    texts["list of extensions"] = said(lambda: found([(x, y)], extension, process_group=group))
    return texts


def test_models_and_extensions_that_differ(tmp_path: Path) -> None:
    for texts in on_ranks(different, tmp_path, tmp_path):
        for name, text in texts.items():
            assert "differs between processes of the group" in text, name
            if name != "precision/combined":
                assert name.partition("/")[0].strip() in text


def part_first(rank: int, folder: Path) -> Any:
    """All ranks together, after two of them had a run of their own, and one had two alone."""
    two, alone = distributed.new_group([0, 1]), distributed.new_group([0])
    if rank < 2:
        found(batches(rank), DiagGGNExact(), process_group=two)
    if rank == 0:
        for _ in range(2):
            found(batches(0), DiagGGNExact(), process_group=alone)
    group = distributed.group.WORLD
    return found(batches(rank), DiagGGNExact(), process_group=group, timeout=10.0).tensors()


def test_runs_of_some_ranks_do_not_count_in_those_of_others(tmp_path: Path) -> None:
    whole = found([batch for rank in range(3) for batch in batches(rank)], DiagGGNExact())
    for tensors in on_ranks(part_first, tmp_path, tmp_path, ranks=3):
        for name, wanted in whole.tensors().items():
            assert torch.allclose(tensors[name], wanted, rtol=1e-12)


def changed_data(rank: int, folder: Path) -> str:
    """A run begins anew on one rank, with other data, and goes on, on the other one."""
    options = {"state_file": folder / "state", "every": 1}
    group = distributed.group.WORLD
    found(batches(rank), EKFAC(None), process_group=group, **options)
    distributed.barrier()
    if rank:
        (folder / "state-1").unlink()
    loader = [(3 * x, y) for x, y in batches(rank)] if rank else batches(rank)
    return said(lambda: found(loader, EKFAC(None), process_group=group, **options))


def test_a_second_pass_does_not_go_on_with_another_first_one(tmp_path: Path) -> None:
    for text in on_ranks(changed_data, tmp_path, tmp_path):
        assert "pass 1 uses what the pass before it has found" in text


def groups_apart(rank: int, folder: Path) -> tuple[Any, Any]:
    """Each rank is a group of its own, with the same name of a file: run, and run again."""
    group = [distributed.new_group([0]), distributed.new_group([1])][rank]
    run = lambda: found(  # noqa: E731
        batches(rank), KFLR(), process_group=group, state_file=folder / "state", every=1
    ).tensors()
    first = run()
    distributed.barrier()
    return first, run()


def test_groups_have_files_of_their_own(tmp_path: Path) -> None:
    for rank, (first, again) in enumerate(on_ranks(groups_apart, tmp_path, tmp_path)):
        wanted = found(batches(rank), KFLR()).tensors()
        assert all(torch.equal(first[name], again[name]) for name in wanted)
        assert all(torch.allclose(first[name], wanted[name]) for name in wanted)


class Positions(nn.Module):
    """A model with an output for each position, which all lie on one axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(0, 1)


def positions(loader: Any, **options: Any) -> Quantities:
    flat = lambda item: (item[0], item[1].flatten())  # noqa: E731
    return found(loader, DiagGGNExact(), model=Positions(), batch=flat, **options)


def texts() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(9, 6, 4), torch.randint(3, (9, 6)))


def sampled(rank: int, folder: Path) -> Any:
    """Targets of positions, and batches without targets, where samplers repeat samples."""
    data, group = texts(), distributed.group.WORLD
    for shuffle in (True, False):
        sampler: Any = DistributedSampler(data, 2, rank, shuffle=shuffle)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        result = positions(loader, process_group=group).tensors()
    squares = lambda output, _: output.square().sum()  # noqa: E731
    without = accumulate(
        *(Positions(), squares, loader, BatchGrad()),
        batch=lambda item: (item[0], None),
        normaliser=lambda *_: None,
        process_group=group,
        gather=True,
        progress=False,
    )
    return result, len(without["layer.weight", "grad_batch"])


def test_samples_are_counted_and_not_targets(tmp_path: Path) -> None:
    whole = positions([texts().tensors]).tensors()
    for tensors, count in on_ranks(sampled, tmp_path, tmp_path):
        assert count == 9
        for name, wanted in whole.items():
            assert torch.allclose(tensors[name], wanted, rtol=1e-12)


def not_members(rank: int, folder: Path) -> list[str]:
    own = distributed.new_group([0])
    groups: list[Any] = [1, "gloo", [0, 1], *([own] if rank else [])]
    runs = [lambda g=g: found(batches(0), KFLR(), process_group=g) for g in groups]
    runs += [lambda g=g: combined(extend(net()), KFLR(), process_group=g) for g in groups]
    return [said(run) for run in runs]


def test_what_is_no_group_of_this_rank(tmp_path: Path) -> None:
    for texts in on_ranks(not_members, tmp_path, tmp_path):
        for text in texts:
            assert "process_group=" in text
    with pytest.raises(UsageError, match="after init_process_group"):
        found(batches(0), KFLR(), process_group=0)
