"""Weights computed for each sample: nobody forms a column for each where groups are samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import Extension, backpack, extend, quantities
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import (
    NTK,
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    Jacobians,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_operations import apart
from backpack_operations.runs import Lie, run_behind
from backpack_products.columns import Columns, InRuns

N = 3
Function = Callable[..., Tensor]

# Operations, and the shapes of their operands; six entries may be three samples' on any axis.
OPERATIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "view": (lambda x: x.view(3, 4), ((1, 6, 2),)),
    "transpose": (lambda x: x.transpose(0, 2), ((2, 6, 3),)),
    "permute": (lambda x: x.permute(2, 0, 1), ((2, 6, 3),)),
    "t": (lambda x: x.t(), ((6, 3),)),
    "add": (lambda x, y: x + y, ((6, 3), (3,))),
    "mul": (lambda x, y: x * y, ((2, 6, 3), (6, 1))),
    "expand": (lambda x: x.expand(6, 3, 2), ((1, 3, 2),)),
    "repeat": (lambda x: x.repeat(3, 1, 2), ((2, 3, 2),)),
    "mm": (torch.mm, ((6, 3), (3, 3))),
    "bmm": (torch.bmm, ((6, 3, 2), (6, 2, 3))),
    "addmm": (torch.addmm, ((6,), (3, 2), (2, 6))),
    "baddbmm": (torch.baddbmm, ((3, 1, 6), (3, 6, 2), (3, 2, 6))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, groups=3), ((3, 6, 4), (6, 2, 2), (6,))),
    "conv2d": (lambda x, w: F.conv2d(x, w, groups=6), ((1, 6, 3, 3), (6, 1, 2, 2))),
    "conv, wider": (lambda x, w: F.conv1d(x, w, groups=3), ((1, 3, 4), (12, 1, 2))),
    "conv, dense": (lambda x, w: F.conv1d(x, w), ((3, 6, 3), (3, 6, 2))),
    "transposed": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, groups=3), ((1, 6, 3), (6, 2, 2), (6,)),
    ),
    "upsampled": (lambda x: F.interpolate(x, scale_factor=2), ((1, 6, 3, 3),)),
    "pooled": (lambda x: F.avg_pool2d(x, 2), ((3, 6, 4, 6),)),
    "largest": (lambda x: F.max_pool2d(x, 2), ((3, 6, 4, 6),)),
    "padded": (lambda x: F.pad(x, (1, 2)), ((3, 6, 3),)),
    "normalised": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((1, 6, 5), (6,), (6,)),
    ),
    "of layers": (lambda x, w: F.layer_norm(x, (3,), w), ((6, 3), (3,))),
    "softmax": (lambda x: x.softmax(1), ((3, 6, 3),)),
    "sum": (lambda x: x.sum(1), ((6, 3, 3),)),
    "mean": (lambda x: x.mean((0, 2), keepdim=True), ((2, 6, 3),)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), ((2, 6, 3),)),
    "select": (lambda x: x.select(1, 1), ((6, 2, 3),)),
    "slice": (lambda x: x.narrow(1, 0, 3), ((6, 4, 3),)),
    "cat": (lambda x, y: torch.cat([x, y], 1), ((6, 2), (6, 1))),
    "relu": (torch.relu, ((6, 3),)),
    "sin": (torch.sin, ((1, 6, 2),)),
}  # fmt: skip
# How often something is known of an operand; none of these is lost.
KNOWN = 109


def _is_of_one(mat: Tensor, sample: int, run: int) -> bool:
    """Whether something is non-zero only where a sample's runs are."""
    return not mat.reshape(-1, N, run)[:, [n for n in range(N) if n != sample]].any()


def _known(function: Function, shapes: tuple[tuple[int, ...], ...]) -> int:
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    result = function(*operands)
    node, found = result.grad_fn, 0
    assert node is not None
    leaves: dict[Any, Tensor] = {}
    for position, (child, _) in enumerate(node.next_functions):
        for x in operands:
            if getattr(child, "variable", None) is x:
                leaves[position] = x
    runs = [r for r in range(1, 1 + result.numel()) if result.numel() % (N * r) == 0]
    for run in runs:
        for position, operand in leaves.items():
            behind = run_behind(node, 0, position, N, run)
            found += behind is not None
            for sample in range(N) if behind else ():
                grad = torch.zeros(result.numel() // run // N, N, run)
                grad[:, sample] = torch.randn(len(grad), run)
                (sent,) = torch.autograd.grad(
                    result, operand, grad.view_as(result), retain_graph=True
                )
                assert behind
                assert _is_of_one(sent, sample, behind)
    return found


def test_what_an_operation_sends_is_of_the_samples_that_are_said() -> None:
    known = {name: _known(*case) for name, case in OPERATIONS.items()}
    assert sum(known.values()) == KNOWN, known


def test_runs_that_end_on_several_axes_are_nowhere() -> None:
    assert Lie.of((2, 6, 4), 3, 8) == (1, 2)
    assert Lie.of((2, 6, 4), 3, 4) == (1, 1)
    assert Lie.of((2, 6, 4), 3, 2) is None
    assert Lie.of((6, 1, 1), 3, 2) == (0, 2)
    assert Lie.of((2, 2, 4), 4, 4) is None


def test_columns_in_runs_are_those_of_samples() -> None:
    block = torch.randn(2, 2, 6, 4)
    columns = InRuns(Columns.start("test", block), 3, 8)
    formed = columns.mat
    assert formed.shape == (2, 3, 2, 6, 4)
    assert not columns.is_in_front
    assert torch.equal(formed.sum(1), block)
    assert torch.equal(formed[:, 1, :, 2:4], block[:, :, 2:4])
    assert not formed[:, 1, :, :2].any()
    assert not formed[:, 1, :, 4:].any()
    twice = columns.merge(InRuns(columns.plain, 3, 8))
    assert isinstance(twice, InRuns)
    assert torch.equal(twice.mat, 2 * formed)
    other = columns.merge(InRuns(columns.plain, 3, 4))
    assert torch.equal(other.mat.sum(1), 2 * block)
    assert not isinstance(other, InRuns)
    assert columns.to(torch.float32).mat.dtype == torch.float32


class Net(nn.Module):
    """A net with weights that a code makes for each sample, and a constant input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.code, self.last = nn.Linear(4, 4), nn.Linear(2, 2)
        self.layer = nn.Conv2d(2, 2, 1)
        self.table = nn.Parameter(torch.randn(1, 2, 3, 3))
        self.weight = nn.Parameter(torch.randn(1, 2, 2, 2, 2))
        self.gain = nn.Parameter(torch.randn(2, 1, 1))
        self.way = forward

    def forward(self, z: Tensor) -> Tensor:
        found: Tensor = self.way(self, z)
        result: Tensor = self.last(found.flatten(2).sin().mean(2))
        return result


def _weights(net: Any, z: Tensor) -> Any:
    """One kernel for each sample, demodulated: ``[N, O, I, 2, 2]``."""
    weight = net.weight * net.code(z)[:, :2].reshape(-1, 1, 2, 1, 1)
    return weight * (weight.square().sum((2, 3, 4), keepdim=True) + 0.1).rsqrt()


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(1, -1, *x.shape[2:])
    found = F.conv2d(rows, weight.flatten(0, 1), groups=len(x))
    return found.view(len(x), -1, *found.shape[2:])


def _modulated(net: Any, z: Tensor) -> Any:
    x = F.interpolate(net.table.expand(len(z), -1, -1, -1), scale_factor=2)
    return _grouped(x, _weights(net, z)) + net.gain


def _transposed(net: Any, z: Tensor) -> Any:
    x, weight = net.table.repeat(len(z), 1, 1, 1), _weights(net, z).transpose(1, 2)
    rows = x.view(1, -1, *x.shape[2:])
    found = F.conv_transpose2d(rows, weight.reshape(-1, 2, 2, 2), stride=2, groups=len(z))
    blur = torch.full((1, 1, 2, 2), 0.25).expand(2 * len(z), 1, 2, 2)
    found = F.conv2d(F.pad(found, (1, 0, 1, 0)), blur, groups=2 * len(z))
    return found.view(len(z), 2, *found.shape[2:])


def _filters(net: Any, z: Tensor) -> Any:
    x = net.layer(net.table.expand(len(z), -1, -1, -1))
    kernels = (net.code(z) + net.weight[0, 0, 0].flatten()).view(-1, 1, 2, 2)
    kernels = kernels.expand(-1, 2, -1, -1).reshape(-1, 1, 2, 2)
    found = F.conv2d(x.reshape(1, -1, 3, 3), kernels, groups=2 * len(z))
    return F.leaky_relu(found, 0.1).view(len(z), 2, 2, 2) * net.gain


def _batched(net: Any, z: Tensor) -> Any:
    grid = net.table.flatten(2).expand(len(z), -1, -1).transpose(1, 2)  # [N, 9, 2]
    found = torch.bmm(torch.sin(grid), net.code(z).view(-1, 2, 2)).transpose(1, 2)
    return found * net.weight.mean() + net.gain[0]


def _normalised(net: Any, z: Tensor) -> Any:
    x = F.instance_norm(net.table.expand(len(z), -1, -1, -1) * net.gain)
    scale, shift = net.code(z)[:, :, None, None].chunk(2, 1)
    return net.layer(x * (1 + scale) + shift) * net.weight.mean()


def _twice(net: Any, z: Tensor) -> Any:
    x = net.table.expand(len(z), -1, -1, -1)
    found = _grouped(x, _weights(net, z))
    return _grouped(F.avg_pool2d(x, 2) + found[..., :1, :1].detach(), _weights(net, z)[..., :1, :1])


NETS = [_modulated, _transposed, _filters, _batched, _normalised, _twice]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("forward", NETS)
def test_nets_with_weights_for_each_sample(
    forward: Callable[[Any, Tensor], Tensor], reduction: str
) -> None:
    net, z, y = extend(Net(forward)), torch.randn(N, 4), torch.randn(N, 2)
    loss = extend(nn.MSELoss(reduction=reduction))
    outputs, scale = net(z), 2 / (y.numel() if reduction == "mean" else 1)
    with backpack(BatchGrad(), BatchL2Grad(), DiagGGNExact()):
        loss(outputs, y).backward()
    used = {n: p for n, p in net.named_parameters() if _gradient(net(z).sum(), p).any()}
    assert len(used) > 4
    for name, p in used.items():
        found = quantities(net)[name]
        rows = torch.stack(
            [torch.stack([_gradient(entry, p) for entry in net(z[n : n + 1])[0]]) for n in range(N)]
        )
        each = torch.einsum("nc...,nc->n...", rows, scale * (outputs - y).detach())
        torch.testing.assert_close(found.grad_batch, each, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.batch_l2, each.flatten(1).square().sum(1))
        diagonal = scale * rows.square().sum((0, 1))
        torch.testing.assert_close(found.diag_ggn_exact, diagonal, rtol=1e-10, atol=1e-10)


def _gradient(of: Tensor, parameter: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, parameter, retain_graph=True, allow_unused=True)
    return torch.zeros_like(parameter) if found is None else found


@pytest.mark.parametrize("subsampling", [[1], [2, 0], [1, 1]])
def test_some_of_the_samples(subsampling: list[int]) -> None:
    net, loss = extend(Net(_modulated)), extend(nn.MSELoss())
    z, y = torch.randn(N, 4), torch.randn(N, 2)
    with backpack(BatchGrad()):
        loss(net(z), y).backward()
    whole = [p.grad_batch for p in net.parameters() if hasattr(p, "grad_batch")]
    with backpack(BatchGrad(subsampling=subsampling)):
        loss(net(z), y).backward()
    found = [p.grad_batch for p in net.parameters() if hasattr(p, "grad_batch")]
    for some, all_of_them in zip(found, whole, strict=True):
        torch.testing.assert_close(some, all_of_them[subsampling])


@pytest.mark.parametrize("forward", [_modulated, _transposed])
def test_nobody_has_columns_of_its_own_where_groups_are_samples(
    forward: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, loss, seen = extend(Net(forward)), extend(nn.MSELoss()), set[str]()
    push = apart._push_apart

    def noting(node: Any, *args: Any) -> Any:
        seen.add(node.name())
        return push(node, *args)

    monkeypatch.setattr(apart, "_push_apart", noting)
    with backpack(BatchGrad()):
        loss(net(torch.randn(N, 4)), torch.randn(N, 2)).backward()
    assert not seen & {"ConvolutionBackward0", "ViewBackward0", "UpsampleNearest2DBackward0"}


def test_groups_that_are_no_samples_mix_these() -> None:
    def mixed(net: Any, z: Tensor) -> Tensor:
        x = net.table.expand(len(z), -1, -1, -1) * net.code(z)[:, :2, None, None]
        weight = net.weight[0].repeat(2, 2, 1, 1)  # [4, 4, 2, 2]: two samples in a group
        found = F.conv2d(x.reshape(1, -1, 3, 3), weight.repeat(len(z) // 2, 1, 1, 1), groups=2)
        return found.view(len(z), 2, 2, 2)

    net, loss = extend(Net(mixed)), extend(nn.MSELoss())
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        loss(net(torch.randn(4, 4)), torch.randn(4, 2)).backward()


QUANTITIES: list[Callable[[], Extension]] = [
    BatchGrad,
    SumGradSquared,
    Variance,
    BatchDotGrad,
    Jacobians,
    NTK,
    BatchDiagGGNExact,
    SqrtGGNExact,
    lambda: DiagGGNExact(subsampling=[0, 2]),
    lambda: Jacobians(subsampling=[1]),
]


@pytest.mark.parametrize("forward", [_transposed, _filters])
def test_every_quantity_is_that_of_columns_for_each_sample(
    forward: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, loss = extend(Net(forward)), extend(nn.CrossEntropyLoss())
    z, y = torch.randn(N, 4), torch.randint(2, (N,))
    for make in QUANTITIES:
        found: list[list[Any]] = []
        for runs in (apart._runs, lambda *args: {}):
            with monkeypatch.context() as changed:
                changed.setattr(apart, "_runs", runs)
                extension = make()
                with backpack(extension):
                    loss(net(z), y).backward()
            fields = [getattr(p, extension.savefield, None) for p in net.parameters()]
            found.append([_as_tensors(field) for field in fields])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def _as_tensors(field: Any) -> list[Tensor]:
    if field is None:
        return []
    return [field] if isinstance(field, Tensor) else [*field]
