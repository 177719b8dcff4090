"""Kronecker factors of weights that are used as they are and transposed, as penalties do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import EKFAC, KFAC, KFLR
from backpack_data import accumulate
from tests import oracle
from tests.nets.passes import budget
from tests.secondorder.factors import SAMPLED_RTOL, SAMPLES

SIZES = [(3, 4, 2), (2, 6, 1), (5, 2, 3), (3, 4, 3, 2), (4, 3, 3, 3), (2, 5, 1, 4)]


class Energy(nn.Module):
    """Outputs of a net, beside the slopes of their sum in the input."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        z = h = x.detach().requires_grad_()
        for number, layer in enumerate(self.layers):
            h = layer(torch.tanh(h) if number else h)
        (slopes,) = torch.autograd.grad(h.sum(), z, create_graph=True)
        return torch.cat([h, slopes], 1)


Uses = list[tuple[Tensor, Tensor]]  # of each layer: data, and what is added to the result


def by_hand(net: Energy, x: Tensor) -> tuple[Tensor, Uses, Uses]:
    """The same for one sample, with zeros added behind every use of a weight."""
    straight, turned, hidden, h = [], [], [], x
    for number, layer in enumerate(net.layers):
        h = torch.tanh(h) if number else h
        hidden.append(h)
        zero = torch.zeros(layer.out_features, requires_grad=True)  # type: ignore[arg-type]
        straight.append((h, zero))
        h = layer(h) + zero
    slope = torch.ones_like(h)
    for number, layer in reversed([*enumerate(net.layers)]):
        zero = torch.zeros(layer.in_features, requires_grad=True)  # type: ignore[arg-type]
        turned.append((slope, zero))
        slope = slope @ layer.weight + zero  # type: ignore[operator]
        slope = slope * (1 - hidden[number].square()) if number else slope
    return torch.cat([h, slope]), straight, turned[::-1]


def square(outputs: Tensor, tensor: Tensor) -> Tensor:
    """``JᵀJ`` of one sample's outputs."""
    rows = [
        torch.autograd.grad(entry, tensor, retain_graph=True, materialize_grads=True)[0].flatten()
        for entry in outputs
    ]
    return torch.stack(rows).T @ torch.stack(rows)


def expected(net: Energy, xs: Tensor, scales: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """``[B + w A', A + B' / w]`` of each weight, for squares of outputs and of slopes."""
    weight, width = len(xs) * max(scales), len(net.layers[-1].bias)  # type: ignore[arg-type]
    roots = torch.tensor([scales[0]] * width + [scales[1]] * xs.shape[1]).mul(2).sqrt()
    found: list[tuple[Tensor, Tensor]] = []
    for layer in range(len(net.layers)):
        outer: Any = 0
        inner: Any = 0
        for x in xs:
            outputs, straight, turned = by_hand(net, x)
            (inp, at_out), (data, at_inp) = straight[layer], turned[layer]
            outer += square(roots * outputs, at_out) + weight * torch.outer(data, data) / len(xs)
            inner += square(roots * outputs, at_inp) / weight + torch.outer(inp, inp) / len(xs)
        found.append((outer.detach(), inner.detach()))
    return found


def loss_of(net: Energy, x: Tensor, reduction: str, factor: float, is_first: bool) -> Tensor:
    """Of the outputs and of the slopes, by losses of their own, in either order."""
    width, lossfunc = len(net.layers[-1].bias), extend(nn.MSELoss(reduction=reduction))  # type: ignore[arg-type]
    outputs = extend(net)(x)
    parts = [outputs[:, :width], outputs[:, width:]][:: 1 if is_first else -1]
    both = [lossfunc(part, torch.zeros_like(part)) for part in parts]
    return factor * (both[0] + both[1])


def scales_of(net: Energy, x: Tensor, reduction: str, factor: float) -> list[float]:
    """What stands in front of the squares of a sample's outputs, and of its slopes."""
    if reduction == "sum":
        return [factor, factor]
    return [factor / len(x) / n for n in (len(net.layers[-1].bias), x.shape[1])]  # type: ignore[arg-type]


def compare(net: Energy, field: str, factors: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (outer, inner) in zip(net.layers, factors, strict=True):
        found = getattr(layer.weight, field)
        oracle.assert_close(found[0], outer)
        oracle.assert_close(found[1], inner)
        oracle.assert_close(found.dense(), torch.kron(outer, inner))


@pytest.mark.grid(6)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, "bytes"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_slopes(
    sizes: tuple[int, ...], chunk_size: Any, reduction: str, is_first: bool
) -> None:
    """Some columns reach one order only; to square weights, both bring data of one shape."""
    net, x = Energy(*sizes), torch.randn(3, sizes[0])
    factors = expected(net, x, scales_of(net, x, reduction, 0.7))
    extension = KFLR(chunk_size=None if chunk_size == "bytes" else chunk_size)
    loss = loss_of(net, x, reduction, 0.7, is_first)
    with budget(1) if chunk_size == "bytes" else nullcontext(), backpack(extension):
        loss.backward()
    compare(net, "kflr", factors)


def test_scale_of_the_loss() -> None:
    """It is that of the first factor alone, and of the weight."""
    net, x = Energy(3, 4, 3, 2), torch.randn(3, 3)
    found: list[Any] = []
    for factor in (1, 5):
        loss = loss_of(net, x, "mean", factor, True)
        with backpack(KFLR()):
            loss.backward()
        found.append([layer.weight.kflr for layer in net.layers])
    for once, more in zip(*found, strict=True):
        for ours, other in zip(5 * once, more, strict=True):
            oracle.assert_close(ours, other)
        oracle.assert_close((5 * once).weight, more.weight)


def test_sampled_columns() -> None:
    net, x = Energy(2, 3, 2), torch.randn(2, 2)
    factors = expected(net, x, scales_of(net, x, "sum", 1))
    loss = loss_of(net, x, "sum", 1, True)
    with backpack(KFAC(SAMPLES)):
        loss.backward()
    for layer, pair in zip(net.layers, factors, strict=True):
        for ours, factor in zip(layer.weight.kfac, pair, strict=True):  # type: ignore[arg-type]
            oracle.assert_close(ours, factor, SAMPLED_RTOL)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 6, 1), (4, 3, 3, 3)], ids=str)
def test_batches_are_one_batch(sizes: tuple[int, ...], reduction: str) -> None:
    """Over a data set; corrected eigenvalues are the diagonal of the block of all samples."""
    net, x = Energy(*sizes), torch.randn(5, sizes[0])
    width = sizes[0] + sizes[-1]
    scale = 1.0 if reduction == "sum" else 1 / 5 / width
    factors = expected(net, x, [scale, scale])
    lossfunc = extend(nn.MSELoss(reduction=reduction))
    loader = [(rows, torch.zeros(len(rows), width)) for rows in (x[:2], x[2:])]
    given = accumulate(extend(net), lossfunc, loader, KFLR(), EKFAC(None), progress=False)
    for number, layer in enumerate(net.layers):
        name = f"layers.{number}.weight"
        for ours, factor in zip(given[name, "kflr"], factors[number], strict=True):
            oracle.assert_close(ours, factor)
        block = sum(2 * scale * square(by_hand(net, row)[0], layer.weight) for row in x)  # type: ignore[arg-type]
        _check_corrected(given[name, "ekfac"], block)  # type: ignore[arg-type]


def _check_corrected(basis: Any, block: Tensor) -> None:
    shape, size = basis.order.shape, block.shape[0]
    rotation = basis.rotate(torch.eye(size).reshape(size, *shape))  # rows of Q
    oracle.assert_close(basis.values.flatten(), (rotation.T @ block @ rotation).diagonal())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_corrected_eigenvalues(sizes: tuple[int, ...], reduction: str) -> None:
    net, x = Energy(*sizes), torch.randn(3, sizes[0])
    given = scales_of(net, x, reduction, 1)
    roots = torch.tensor([given[0]] * sizes[-1] + [given[1]] * sizes[0]).mul(2).sqrt()
    blocks = [
        sum(square(roots * by_hand(net, row)[0], layer.weight) for row in x)  # type: ignore[arg-type]
        for layer in net.layers
    ]
    loss = loss_of(net, x, reduction, 1, True)
    with backpack(EKFAC(None)):
        loss.backward()
    for layer, block in zip(net.layers, blocks, strict=True):
        _check_corrected(layer.weight.ekfac, block)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("size", [3, 4])
def test_a_weight_that_is_only_used_transposed(size: int, chunk_size: int | None) -> None:
    """It has the factors of the map that it is: columns at its inputs, data at its outputs."""
    layer, x, lossfunc = nn.Linear(4, size), torch.randn(3, size), nn.MSELoss(reduction="sum")
    model = extend(Net(layer))
    with backpack(KFLR(chunk_size=chunk_size)):
        extend(lossfunc)(model(x), torch.zeros(3, 4)).backward()
    outer, inner = layer.weight.kflr  # type: ignore[misc]
    oracle.assert_close(outer, 6 * torch.eye(4))
    oracle.assert_close(inner, x.T @ x / 3)
    dense: Tensor = layer.weight.kflr.dense()  # type: ignore[union-attr, operator]
    block = torch.einsum("oipj->oipj", dense.reshape(size, 4, size, 4))
    oracle.assert_close(block, torch.einsum("op,ij->oipj", inner, outer))


class Net(nn.Module):
    """A layer's weight, transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight


class Tied(nn.Module):
    """A table whose rows are looked up, and that gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.table(tokens), self.table.weight)


def block_of(model: Tied, tokens: Tensor, roots: Tensor) -> Tensor:
    rows = zip(roots, tokens, strict=True)
    parts = [square(root @ model(row), model.table.weight) for root, row in rows]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
def test_a_table_that_gives_the_logits(setting: Any, chunk_size: int | None) -> None:
    """Its look-ups are uses of the transpose, at which the data are unit vectors.

    Between two rows of a vocabulary, nothing is stored.
    """
    model, tokens, y = Tied(), torch.tensor([0, 2, 2, 4]), torch.tensor([1, 0, 4, 3])
    extend(model)
    with backpack(KFLR(setting, chunk_size=chunk_size)):
        extend(nn.CrossEntropyLoss())(model(tokens), y).backward()
    table = model.table.weight.detach()
    probs = torch.softmax(table[tokens] @ table.T, 1)
    hessians = (torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]) / 4
    data = F.one_hot(tokens, 5).to(table.dtype)
    outer = (hessians.sum(0) + data.T @ data / 4).diagonal()
    inner = table[tokens].T @ table[tokens] / 4 + table.T @ hessians.sum(0) @ table
    found: Any = model.table.weight
    oracle.assert_close(found.kflr[0], outer)
    oracle.assert_close(found.kflr[1], inner)
    oracle.assert_close(found.kflr.dense(), torch.kron(outer.diag(), inner))
    vectors = torch.randn(2, 5, 3)
    solved = found.kflr.inverse(0.1).matmul(found.kflr.damped(0.1).matmul(vectors))
    oracle.assert_close(solved, vectors)
    root = torch.linalg.cholesky(hessians + 1e-14 * torch.eye(5)).mT
    with backpack(EKFAC(None, setting)):
        extend(nn.CrossEntropyLoss())(model(tokens), y).backward()
    _check_corrected(found.ekfac, block_of(model, tokens, root))


class TwoUses(nn.Module):
    """A weight with two uses that have no factors in common, each of which gives an output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "squared":
            self.layer: nn.Module = nn.Linear(3, 3, bias=False)
        else:
            self.layer = nn.Conv1d(4, 4, 1, groups=2, bias=False)
            self.other = nn.Conv1d(2, 4, 1, bias=False)
            self.other.weight = self.layer.weight
        self.flatten = nn.Flatten()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "squared":
            return self.layer(x[:, :3]), x[:, :3] @ (self.layer.weight * self.layer.weight)
        x = x.unsqueeze(2)
        return self.flatten(self.layer(x)), self.flatten(self.other(x[:, :2]))


def _reached_apart(kind: str, extension: Any) -> tuple[Any, Tensor]:
    """What is stored if columns reach one use or the other, and the exact block."""
    model, x, lossfunc = extend(TwoUses(kind)), torch.randn(2, 4), extend(nn.MSELoss())
    weight: Any = model.layer.weight
    outputs = model(x)
    expected = sum(square(out.flatten(), weight) * 2 / out.numel() for out in outputs)
    loss = sum(lossfunc(out, torch.zeros_like(out)) for out in outputs)
    with backpack(extension):
        loss.backward()  # type: ignore[union-attr]
    return getattr(weight, extension.savefield, None), torch.as_tensor(expected)


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("kind", ["squared", "grouped"])
def test_uses_that_have_no_factors_in_common(kind: str, size: int | None) -> None:
    """Some columns reach one use, others another: the block and its diagonal are those of both."""
    found, block = _reached_apart(kind, KFLR(chunk_size=size, fail_mode="block"))
    assert found.structure == "block"
    oracle.assert_close(found.dense(), block)
    found, block = _reached_apart(kind, KFLR(chunk_size=size, fail_mode="diagonal"))
    assert found.structure == "diagonal"
    oracle.assert_close(found[0], block.diagonal())


@pytest.mark.parametrize("size", [None, 1])
def test_uses_that_have_no_factors_in_common_left_out(size: int | None) -> None:
    found, _ = _reached_apart("grouped", KFLR(chunk_size=size, fail_mode="silent"))
    assert found is None
    with pytest.warns(UserWarning, match="have no common Kronecker factors"):
        found, _ = _reached_apart("grouped", KFLR(chunk_size=size, fail_mode="warning"))
    assert found is None


def test_uses_that_have_no_factors_in_common_refused() -> None:
    """Where nothing is stored instead, or what may not be needed would not fit into memory."""
    with pytest.raises(UnsupportedError, match="travel at once"):
        _reached_apart("grouped", KFLR(chunk_size=1))
    with pytest.raises(UnsupportedError, match="travel at once"), budget(8):
        _reached_apart("grouped", KFLR(chunk_size=1, fail_mode="block"))


def _residuals(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, and the sum of second derivatives of each: ``[N, 2]`` both."""
    z = x.detach().requires_grad_()
    values, found = net(z), []
    for k in range(2):
        (slopes,) = torch.autograd.grad(values[:, k].sum(), z, create_graph=True)
        curvatures = [
            torch.autograd.grad(slopes[:, i].sum(), z, create_graph=True)[0][:, i]
            for i in range(x.shape[1])
        ]
        found.append(sum(curvatures[1:], curvatures[0]))
    return values, torch.stack(found, 1)


@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
def test_second_derivatives_of_the_outputs(setting: Any) -> None:
    """Weights are used in both orders, and several times in each."""
    layers = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    net, x = nn.Sequential(*layers), torch.randn(3, 2)
    weights = [net[0].weight, net[2].weight, net[4].weight]
    blocks: list[Any] = [0, 0, 0]
    for row in x:
        outputs = torch.cat(_residuals(net, row.unsqueeze(0)), 1)[0]
        blocks = [b + 2 * square(outputs, w) for b, w in zip(blocks, weights, strict=True)]
    lossfuncs = [extend(nn.MSELoss(reduction="sum")), extend(nn.MSELoss(reduction="sum"))]
    extend(net)

    def run(extension: Any) -> list[Any]:
        pairs = zip(lossfuncs, _residuals(net, x), strict=True)
        losses = [lossfunc(out, torch.zeros_like(out)) for lossfunc, out in pairs]
        with backpack(extension):
            (losses[0] + losses[1]).backward()
        return [getattr(w, extension.savefield) for w in weights]

    whole = run(KFLR(setting))
    for size in (1, 2):
        for factors, expected in zip(run(KFLR(setting, chunk_size=size)), whole, strict=True):
            for ours, other in zip(factors, expected, strict=True):
                oracle.assert_close(ours, other)
    for basis, block in zip(run(EKFAC(None, setting)), blocks, strict=True):
        _check_corrected(basis, block)
