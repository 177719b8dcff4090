"""One of several processes that train privately; it writes where it ended."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

from backpack_core.errors import UsageError
from backpack_privacy import AdaptiveClipping, Clipping, make_private
from tests.privacy.problems import loader_of, make
from tests.versions import has_shards

SHARDED = (("shards", True), ("shards", False)) if has_shards else ()
RUNS = (("plain", True), ("replicas", False), *SHARDED)
STEPS = 14  # of them some without samples in one of the processes


def wrap(model: nn.Module, how: str) -> nn.Module:
    """As it is, in ``DistributedDataParallel``, or sharded, a layer apart from the others."""
    if how == "shards":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        fully_shard(model.get_submodule("layer"), mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if how == "replicas" else model


def train(how: str, world: int, adaptive: bool) -> tuple[list[torch.Tensor], int]:
    """The parameters in the end, and how many batches this process saw."""
    model, data = make("tied")
    clipping = AdaptiveClipping(0.5, count_noise=5.0) if adaptive else Clipping(0.5, "per_layer")
    whole = wrap(model, how)
    lossfunc = nn.CrossEntropyLoss()
    private = make_private(
        whole,
        lossfunc,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader_of(data, 2 // world),
        noise_multiplier=0.5,
        clipping=clipping,
        seed=3,
    )
    seen = 0
    while private.steps < STEPS:
        for inputs, targets in private.loader:
            seen += 1
            private.step(lossfunc(whole(inputs), targets))
    found = [p.full_tensor() if how == "shards" else p for p in model.parameters()]
    return [p.detach() for p in found], seen


class Gated(nn.Module):
    """A layer that only large inputs reach."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.layer, self.gated, self.bound = nn.Linear(5, 3), nn.Linear(5, 3, bias=False), bound

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.gated(torch.relu(x - self.bound))


def gated(bound: float) -> str:
    """What is said of a layer that samples of the second process reach, or none."""
    torch.manual_seed(0)
    x = torch.arange(12.0).remainder(2).unsqueeze(1).repeat(1, 5)  # every second sample is its own
    data = TensorDataset(x, torch.arange(12) % 3)
    return refused(Gated(bound), data, size=2, checks=2, sampling="shuffled")


def refused(model: nn.Module, data: Any, size: int = 1, **options: Any) -> str:
    """What is said of a model, when it is made private or in the first steps."""
    chosen = options.pop("chosen", None) or model.parameters()
    optimizer, loader = torch.optim.SGD(chosen, lr=0.1), loader_of(data, size)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_norm": 1.0, **options}
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    try:
        private = make_private(model, lossfunc, optimizer, loader, **settings)
        for inputs, targets in private.loader:
            private.step(lossfunc(model(inputs), targets))
    except UsageError as error:
        return str(error)
    return ""


def refusals(rank: int, world: int) -> list[str]:
    """Of models that differ, and of shards that cannot be added up."""
    found = [refused(*make("tied", seed=rank))]
    model, data = make("tied")
    found.append(refused(wrap(model, "shards"), data, max_rows=2))
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "shards"))
    found.append(refused(fully_shard(make("tied")[0], mesh=mesh), data))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(make("tied")[0], mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    found += [refused(model, data)] if has_shards else []
    found.append(refused(*make("tied"), size=1 + rank))
    found.append(refused(nn.Linear(4, 7 + rank), data))
    found.append(refused(make("tied")[0], Subset(data, range(10 + rank))))
    found += [gated(0.5), gated(1.5), *settings(rank), no_member(rank)]
    return [*found, loaded_on_one(rank, fixed=True), loaded_on_one(rank, fixed=False)]


def loaded_on_one(rank: int, fixed: bool) -> str:
    """Of a state that only one of the processes has loaded."""
    state: dict[str, Any] = {}
    for _ in range(2):
        model, data = make("tied")
        clipping = Clipping(1.0) if fixed else AdaptiveClipping(1.0, count_noise=5.0)
        optimizer, lossfunc = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
        private = make_private(
            *(model, lossfunc, optimizer, loader_of(data, 1)),
            noise_multiplier=1.0,
            clipping=clipping,
        )
        if state and rank:
            private.load_state_dict({**state, "steps": state["steps"] if fixed else 0})
        try:
            for inputs, targets in private.loader:
                private.step(lossfunc(model(inputs), targets))
        except UsageError as error:
            return str(error)
        state = private.state_dict()
    return ""


def settings(rank: int) -> list[str]:
    """Of settings that differ: the first process adds the noise for all."""
    users = torch.arange(12) // (2 + rank)
    owners = {"users": users, "max_records": 1}
    different: list[dict[str, Any]] = [
        {"noise_multiplier": 1.0 + rank},
        {"max_norm": 1.0 + 9 * rank},
        {"sampling": "poisson" if rank else "shuffled"},
        {"users": users},
        {"users": torch.arange(12) // 2 if rank else torch.arange(12) % 6},
        {**owners, "users": torch.arange(12) // 2, "max_records": 1 + rank},
        {"noise_multiplier": None, "target_epsilon": 3.0, "target_delta": 0.01, "epochs": 1 + rank},
        {"checks": 2 * rank},
        {"clipping": Clipping(1.0, "per_layer" if rank else "flat"), "max_norm": None},
    ]
    found = []
    for options in different:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
        found.append(refused(nn.Linear(5, 3), data, **options))
    model = Gated(0.5)
    (model.layer if rank else model.gated).requires_grad_(False)
    chosen = [p for p in model.parameters() if p.requires_grad]
    return [*found, refused(model, data, chosen=chosen)]


def no_member(rank: int) -> str:
    """Of a group that the second process is not in."""
    group = distributed.new_group([0])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
    return refused(nn.Linear(5, 3), data, process_group=group if rank else "gloo")


def work(rank: int, world: int, folder: Path) -> None:
    """What one process does."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),  # a process that waits for another fails, and does not hang
    )
    found = [train(how, world, adaptive) for how, adaptive in RUNS]
    torch.save([found, refusals(rank, world)], folder / f"{rank}.pt")
    distributed.barrier()
    os._exit(0)  # threads of gloo may outlive the interpreter
