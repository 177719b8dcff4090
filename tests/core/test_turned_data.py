"""Models that put another axis of their input in front, and keep it there or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad
from tests import oracle
from tests.cases import Net

D, C = 4, 3
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda x: x.transpose(0, 1),
    "a copy": lambda x: x.transpose(0, 1).contiguous(),
    "rows": lambda x: x.transpose(0, 1).reshape(-1, 2),
    "steps": lambda x: torch.stack([*x.unbind(1)]),
    "steps, joined": lambda x: torch.cat([x[:, t] for t in range(x.shape[1])]),
}
LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda net, z: torch.tanh(z),
    "recurrent": lambda net, z: net.recurrent(z)[0],
    "attention": lambda net, z: net.attention(z, z, z, need_weights=False)[0],
    "encoder": lambda net, z: net.encoder(z),
}
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "kept": lambda z: z,
    "rows": lambda z: z.reshape(-1, z.shape[-1]),
    "last": lambda z: z[-1],
    "mean": lambda z: z.mean(0),
}


def _net(turn: str, layer: str, end: str) -> nn.Module:
    """Only the parts that take part."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = LAYERS[layer](net, net.embed(TURNS[turn](x)))
        return net.head(ENDS[end](hidden)).reshape(-1, C)  # type: ignore[no-any-return]

    parts: dict[str, dict[str, nn.Module]] = {
        "recurrent": {"recurrent": nn.GRU(D, D)},
        "attention": {"attention": nn.MultiheadAttention(D, 2)},
        "encoder": {"encoder": nn.TransformerEncoderLayer(D, 2, 5, dropout=0.0)},
    }
    return Net(
        forward, embed=nn.Linear(2, D), head=nn.Linear(D, C), **parts.get(layer, {})
    ).double()


CASES = [(turn, layer, end) for turn in TURNS for layer in LAYERS for end in ENDS]
# Rows are no sequence, and have no steps.
CASES = [(t, la, e) for t, la, e in CASES if t in ("a view", "a copy", "steps") or
         (la == "function" and e == "kept")]  # fmt: skip


@pytest.mark.grid(4)
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize(("samples", "steps"), [(3, 2), (3, 3), (1, 2)])
@pytest.mark.parametrize(("turn", "layer", "end"), CASES)
def test_turned_data(
    turn: str, layer: str, end: str, samples: int, steps: int, is_module: bool
) -> None:
    model, x = _net(turn, layer, end), torch.randn(samples, steps, 2).double()
    y = torch.randint(0, C, (1 if end in ("last", "mean") else steps, samples))
    parameters, single = [*model.parameters()], []
    for n in range(samples):
        term = F.cross_entropy(model(x[n : n + 1]), y[:, n], reduction="sum")
        single.append(torch.autograd.grad(term, parameters))
    extend(model)
    plain = nn.CrossEntropyLoss(reduction="sum")
    lossfunc = extend(plain) if is_module else lambda z, t: F.cross_entropy(z, t, reduction="sum")
    with backpack(BatchGrad(), *([BatchDiagGGNExact()] if is_module else []), check="always"):
        lossfunc(model(x), y.flatten()).backward()
    for parameter, expected in zip(parameters, zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(expected))


MIXING: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Softmax(1),
    "normalisation": lambda: nn.LayerNorm([3, D]),
    "convolution": lambda: nn.Conv1d(3, 3, 1),
    "recurrent": lambda: nn.GRU(D, D, batch_first=True),
}


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("turn", ["a view", "a copy"])
@pytest.mark.parametrize("name", MIXING)
def test_layers_that_take_samples_for_steps(
    name: str, turn: str, is_module: bool, steps: int
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        found = net.mixing(net.embed(TURNS[turn](x)))
        hidden = found[0] if name == "recurrent" else found
        return net.head(torch.tanh(hidden)).reshape(-1, C)  # type: ignore[no-any-return]

    parts = {"embed": nn.Linear(2, D), "mixing": MIXING[name](), "head": nn.Linear(D, C)}
    x = torch.randn(3, steps, 2).double()
    output = extend(Net(forward, **parts).double())(x)
    lossfunc = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        lossfunc(output, torch.randint(0, C, (len(output),))).backward()


def test_several_samples_have_the_diagonals_of_single_ones() -> None:
    model, x = _net("a view", "recurrent", "rows"), torch.randn(3, 2, 2).double()
    y, lossfunc = torch.randint(0, C, (2, 3)), extend(nn.CrossEntropyLoss(reduction="sum"))
    extend(model)

    def diagonals(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        with backpack(BatchDiagGGNExact()):
            lossfunc(model(inputs), targets.flatten()).backward()
        return [vars(p)["diag_ggn_exact_batch"].clone() for p in model.parameters()]

    alone = [diagonals(x[n : n + 1], y[:, n]) for n in range(3)]
    for found, expected in zip(diagonals(x, y), zip(*alone, strict=True), strict=True):
        oracle.assert_close(found, torch.cat(expected))
