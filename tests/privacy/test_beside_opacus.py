"""The same parameters and epsilons as Opacus gives, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from dp_accounting import rdp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from backpack_privacy import Accountant, Clipping, make_private
from tests.privacy.problems import COUNT, loader_of

pytest.importorskip("opacus", reason="an extra: pip install opacus")

STEPS, BOUND, RATE = 10, 0.5, 0.1


class Last(nn.Module):
    """The last position."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3)),
        lambda: torch.randn(COUNT, 5),
    ),
    "images": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
        ),
        lambda: torch.randn(COUNT, 1, 6, 6),
    ),
    "tokens": (
        lambda: nn.Sequential(
            *(nn.Embedding(7, 6), nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), Last()),
            nn.Linear(6, 3, bias=False),
        ),
        lambda: torch.randint(7, (COUNT, 4)),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.Tanh(), Last(), nn.Linear(5, 3)),
        lambda: torch.randn(COUNT, 3, 5),
    ),
}


def make(net: str) -> tuple[nn.Module, TensorDataset]:
    """In single precision, which Opacus supposes."""
    torch.manual_seed(0)
    model, inputs = NETS[net]
    x = inputs()
    x = x.float() if x.is_floating_point() else x
    return model().float(), TensorDataset(x, torch.randint(3, (COUNT,)))


def ours(net: str, kind: Any) -> list[Tensor]:
    model, data = make(net)
    lossfunc, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=RATE)
    private = make_private(
        *(model, lossfunc, optimizer, loader_of(data, COUNT)),
        noise_multiplier=0.0,
        clipping=Clipping(BOUND, kind),
        sampling="shuffled",
        seed=0,
    )
    for _ in range(STEPS):
        for x, y in private.loader:
            private.step(lossfunc(model(x), y))
    return [p.detach() for p in model.parameters()]


def theirs(net: str, is_ghost: bool, kind: str) -> list[Tensor]:
    from opacus import grad_sample, optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, data = make(net)
    count = len([*model.parameters()])
    plain: Any = {"expected_batch_size": COUNT, "noise_multiplier": 0.0, "max_grad_norm": BOUND}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    lossfunc: Any = nn.CrossEntropyLoss()
    wrapped: Any
    if is_ghost:
        wrapped = grad_sample.GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND)
        optimizer = optimizers.DPOptimizerFastGradientClipping(optimizer, **plain)
        lossfunc = DPLossFastGradientClipping(wrapped, optimizer, lossfunc)
    else:
        wrapped = grad_sample.GradSampleModule(model)
        if kind == "flat":
            optimizer = optimizers.DPOptimizer(optimizer, **plain)
        else:  # what is called per layer there is for each parameter
            bounds = [BOUND / sqrt(count)] * count
            optimizer = optimizers.DPPerLayerOptimizer(
                optimizer, **{**plain, "max_grad_norm": bounds}
            )
    for _ in range(STEPS):
        optimizer.zero_grad()
        lossfunc(wrapped(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:::opacus", "ignore:Full backward hook")
@pytest.mark.parametrize(
    ("is_ghost", "kind"), [(False, "flat"), (True, "flat"), (False, "per_parameter")]
)
@pytest.mark.parametrize("net", NETS)
def test_the_same_parameters(net: str, is_ghost: bool, kind: str) -> None:
    pairs = zip(ours(net, kind), theirs(net, is_ghost, kind), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-6


@pytest.mark.filterwarnings("ignore:::opacus")
@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.1, 0.01, 1000), (1.5, 0.05, 100), (4.0, 0.2, 50)]
)
def test_the_same_epsilons(noise: float, rate: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    orders = RDPAccountant.DEFAULT_ALPHAS  # those of dp-accounting are others
    renyi, losses = Accountant(lambda: rdp.RdpAccountant(orders)), Accountant("pld")
    their_renyi, their_losses = RDPAccountant(), PRVAccountant()
    for _ in range(steps):
        for accountant in (renyi, losses):
            accountant.add(noise, rate)
        for accountant in (their_renyi, their_losses):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert renyi.epsilon(1e-5) == pytest.approx(their_renyi.get_epsilon(1e-5), rel=1e-6)
    # Theirs is an upper bound that misses by 0.01 at most.
    assert losses.epsilon(1e-5) == pytest.approx(their_losses.get_epsilon(1e-5), abs=0.011)
