"""Jacobians of the output, products with them, and the tangent kernel, against plain autograd."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import OverwrittenInputError, ShapeError, UnsupportedError, UsageError
from backpack_core.extensions import GGNMP, JMP, NTK, DiagHessian, Jacobians
from backpack_data import accumulate
from backpack_secondorder.outputs import SumOutputs
from tests import oracle
from tests.cases import Net
from tests.secondorder.problems import NETS, make


def explicit(model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    """The Jacobian in each trained parameter, ``[N, C, *θ]``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = oracle.jacobians(rows, parameters)
    return [j.reshape(*j.shape[:2], *p.shape) for j, p in zip(found, parameters, strict=True)]


@pytest.mark.parametrize(("batch", "loss"), [(1, "ce"), (3, "mse")])
@pytest.mark.parametrize("net", NETS)
def test_on_any_net(net: str, batch: int, loss: str) -> None:
    problem = make(net, batch, "mean", loss)
    plain = copy.deepcopy(problem.model)
    expected = explicit(plain, oracle.rows(plain, problem.inputs, problem.whole))
    problem.run(Jacobians(), NTK(), JMP())
    problem.compare("jacobians", expected)
    for p, jacobian in zip(problem.parameters, expected, strict=True):
        flat = jacobian.flatten(2)
        oracle.assert_close(p.ntk, torch.einsum("ncp,mdp->ncmd", flat, flat))
        v, u = torch.randn(2, *p.shape), torch.randn(p.jmp.whole.output_shape)
        forward = torch.einsum("ncp,vp->vnc", flat, v.flatten(1))
        oracle.assert_close(p.jmp(v).flatten(2), forward)
        back = torch.einsum("ncp,nc->p", flat, u.flatten(1))
        oracle.assert_close(p.jmp.transposed(u).flatten(), back)


CONVOLUTIONS = {
    "strides, groups": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5, 5)),
    "transposed": (
        nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), (4, 3, 3),
    ),
    "no offset": (nn.Conv1d(4, 2, 2, dilation=2, bias=False), (4, 6)),
    "a volume": (nn.Conv3d(2, 2, 2), (2, 2, 3, 2)),
    "reflected": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("frozen", ["none", "weight"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_products_through_convolutions(kind: str, frozen: str) -> None:
    layer, shape = copy.deepcopy(CONVOLUTIONS[kind])
    channels = shape[0]
    first = nn.Conv1d(3, channels, 1) if len(shape) == 2 else nn.Linear(shape[-1], shape[-1])
    last = nn.LazyLinear(3)
    net, x = (
        nn.Sequential(first, layer.double(), nn.Flatten(), nn.Tanh(), last),
        torch.randn(3, *(shape if len(shape) > 2 else (3, *shape[1:]))),
    )
    net(x)
    if getattr(layer, frozen, None) is not None:
        getattr(layer, frozen).requires_grad_(False)
    plain = copy.deepcopy(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    jacobians = explicit(plain, oracle.rows(plain, (x,)))
    loss, y = extend(nn.MSELoss(reduction="sum")), torch.randn(3, 3)
    with backpack(JMP(), GGNMP()):
        loss(extend(net)(x), y).backward()
    for p, jacobian in zip(trained, jacobians, strict=True):
        flat, v, u = jacobian.flatten(2), torch.randn_like(p), torch.randn(3, 3)
        forward = flat @ v.flatten()
        oracle.assert_close(p.jmp(v), forward)
        oracle.assert_close(p.jmp.transposed(u), torch.einsum("nc,nc...->...", u, jacobian))
        curved = torch.einsum("nc,ncp->p", 2 * forward, flat)
        oracle.assert_close(p.ggnmp(v).flatten(), curved)
    whole = trained[0].jmp.whole
    vectors = {p: torch.randn_like(p) for p in trained}
    flat = [j.flatten(2) @ v.flatten() for j, v in zip(jacobians, vectors.values(), strict=True)]
    oracle.assert_close(whole.product(vectors), torch.stack(flat).sum(0))
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(OverwrittenInputError):
        whole.product(vectors)


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_the_loss_has_no_part(factor: float) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(4, 3)
    expected = explicit(net, list(net(x)))
    extend(net)
    for lossfunc, more in ((SumOutputs(), ()), (nn.MSELoss(reduction="sum"), (torch.ones(4, 2),))):
        loss = extend(lossfunc)(net(x), *more)
        with backpack(Jacobians(), JMP()):
            (factor * loss).backward()
        for p, jacobian in zip(net.parameters(), expected, strict=True):
            oracle.assert_close(p.jacobians, jacobian)
            v = torch.randn_like(p)
            oracle.assert_close(p.jmp(v), torch.einsum("nc...,...->nc", jacobian, v))


def test_over_a_data_set() -> None:
    """Batches of a loader have targets, which this loss leaves alone."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    loader = [(part, torch.zeros(len(part)).long()) for part in x.split(2)]
    found = accumulate(net, SumOutputs(), loader, Jacobians(), progress=False).field("jacobians")
    for value, jacobian in zip(found.values(), explicit(net, list(net(x))), strict=True):
        oracle.assert_close(value, jacobian)


def test_chunks_samples_and_no_gradient() -> None:
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(6, 5))
    x = torch.randn(4, 1, 4)
    expected = explicit(net, list(net(x)))
    extend(net), extend(lossfunc := SumOutputs())
    chosen = [2, 0, 2]
    with backpack(Jacobians(savefield="alone"), gradient="skipped"):
        lossfunc(net(x)).backward()
    for p, jacobian in zip(net.parameters(), expected, strict=True):
        assert p.grad is None
        oracle.assert_close(p.alone, jacobian)
    some_too = Jacobians(chosen, "some"), NTK(chosen), JMP(None, chosen)
    with backpack(Jacobians(chunk_size=2), *some_too):
        lossfunc(net(x)).backward()
    for p, jacobian in zip(net.parameters(), expected, strict=True):
        some = jacobian[chosen]
        oracle.assert_close(p.jacobians, jacobian)
        oracle.assert_close(p.some, some)
        oracle.assert_close(p.ntk, torch.einsum("ncp,mdp->ncmd", some.flatten(2), some.flatten(2)))
        v, u = torch.randn_like(p), torch.randn(3, 5)
        oracle.assert_close(p.jmp(v), torch.einsum("nc...,...->nc", some, v))
        oracle.assert_close(p.jmp.transposed(u), torch.einsum("nc...,nc->...", some, u))


def laplacian(net: nn.Module, x: Tensor) -> Tensor:
    """``Σ_i ∂²u/∂x_i²`` at each point, ``[N, 1]``."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    parts = [
        torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i]
        for i in range(x.shape[1])
    ]
    return torch.stack(parts, 1).sum(1, keepdim=True)


def test_residuals_of_a_physicist() -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(6, 2)
    plain = copy.deepcopy(net)
    parameters = list(plain.parameters())[:-1]  # no derivative depends on the last bias
    rows = [laplacian(plain, x[n : n + 1])[0] for n in range(len(x))]
    expected = oracle.jacobians(rows, parameters)
    extend(net), extend(lossfunc := SumOutputs())
    loss = lossfunc(laplacian(net, x))  # outside of the block, as it differentiates the net itself
    with backpack(Jacobians(), NTK(), JMP()):
        loss.backward()
    whole = net[0].weight.jmp.whole
    assert len(whole.parameters) == len(parameters)
    vectors = {p: torch.randn_like(p) for p in net.parameters()}
    forward = torch.zeros(6, 1)
    for p, jacobian in zip(list(net.parameters())[:-1], expected, strict=True):
        oracle.assert_close(p.jacobians.flatten(2), jacobian)
        oracle.assert_close(p.ntk, torch.einsum("ncp,mdp->ncmd", jacobian, jacobian))
        forward = forward + jacobian @ vectors[p].flatten()
    oracle.assert_close(whole.product(vectors), forward)


@pytest.mark.plans
@pytest.mark.parametrize("frozen", ["", "0.weight", "2.bias"])
def test_residuals_take_a_plan(frozen: str) -> None:
    """Also where samples are kept apart inside of the layers, since others use their weights."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(net)
    extend(net), extend(lossfunc := SumOutputs())
    for model in (net, plain) if frozen else ():
        model.get_parameter(frozen).requires_grad_(False)
    block = backpack(Jacobians())
    for samples in [6] * 7 + [5] * 7:
        x = torch.randn(samples, 2)
        loss = lossfunc(laplacian(net, x))
        with block:
            loss.backward()
        names = [name for name, p in plain.named_parameters() if p.requires_grad][:-1]
        rows = [laplacian(plain, row.unsqueeze(0))[0] for row in x]
        expected = oracle.jacobians(rows, [plain.get_parameter(name) for name in names])
        for name, jacobian in zip(names, expected, strict=True):
            oracle.assert_close(net.get_parameter(name).jacobians.flatten(2), jacobian)
    assert block.summary().passes["planned before"] >= 4, block.summary()


def test_tied_frozen_and_called_twice() -> None:
    shared = nn.Linear(3, 3)
    net = Net(
        lambda net, x: net.last(torch.tanh(net.a(torch.tanh(net.a(x)))) @ net.a.weight),
        a=shared, last=nn.Linear(3, 2),
    )  # fmt: skip
    net.last.weight.requires_grad_(False)
    x = torch.randn(3, 3)
    expected = explicit(net, list(net(x)))
    extend(net), extend(lossfunc := SumOutputs())
    with backpack(Jacobians(), NTK(), JMP()):
        lossfunc(net(x)).backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    assert not hasattr(net.last.weight, "jacobians")
    for p, jacobian in zip(trained, expected, strict=True):
        oracle.assert_close(p.jacobians, jacobian)
        v = torch.randn_like(p)
        oracle.assert_close(p.jmp(v), torch.einsum("nc...,...->nc", jacobian, v))


def test_second_derivatives_of_the_output() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(3, 2)
    weight = net[0].weight
    value = lambda w: torch.func.functional_call(net, {"0.weight": w}, (x,)).sum()  # noqa: E731
    hessian = torch.func.hessian(value)(weight.detach()).reshape(6, 6)
    extend(net), extend(lossfunc := SumOutputs())
    with backpack(DiagHessian()):
        lossfunc(net(x)).backward()
    oracle.assert_close(weight.diag_h.flatten(), hessian.diagonal())


def test_jmp_where_samples_mix() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    x = torch.randn(4, 3)
    weight = net[0].weight
    jacobian = torch.autograd.functional.jacobian(
        lambda w: torch.func.functional_call(net, {"0.weight": w}, (x,)), weight.detach()
    )
    extend(net), extend(lossfunc := SumOutputs())
    with backpack(JMP()):
        lossfunc(net(x)).backward()
    v = torch.randn_like(weight)
    oracle.assert_close(weight.jmp(v), torch.einsum("ncoi,oi->nc", jacobian, v))


def run(*extensions: Any, joined: bool = False) -> nn.Module:
    net, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    loss = lossfunc(net(x), y)
    with backpack(*extensions):
        (loss + lossfunc(net(2 * x), y) if joined else loss).backward()
    return net


@pytest.mark.parametrize("extension", [Jacobians(), NTK(), JMP()])
def test_two_losses_are_refused(extension: Any) -> None:
    with pytest.raises(UnsupportedError, match="one output"):
        run(extension, joined=True)


def test_wrong_use_of_products() -> None:
    net = run(JMP())
    product, both = net.weight.jmp, [*net.parameters()]
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        product(torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"\[4, 2\]"):
        product.transposed(torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"\[2, 3\]. Got \[3\]"):
        product.whole.product({p: torch.ones(3) for p in both})
    for wrong in ([torch.ones(2, 3)], {nn.Parameter(torch.ones(2)): torch.ones(2)}):
        with pytest.raises(UsageError, match="by parameter"):
            product.whole.product(wrong)
    with pytest.raises(UsageError, match="can only multiply tensors"):
        product([1.0])
    with pytest.raises(UsageError, match=r"del parameter\.jmp"):
        pickle.dumps(product)
    assert product(torch.ones(0, 2, 3)).shape == (0, 4, 2)
    assert "of [4, 2] in 2" in repr(product)


def test_outputs_that_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="view_as_real"):
        SumOutputs()(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"takes one tensor.*Got tuple"):
        SumOutputs()((torch.ones(2), torch.ones(2)))
    with pytest.raises(UsageError, match="reduction must be"):
        SumOutputs("max")


MERGED = {
    "samples first": lambda h: h.flatten(0, 1),
    "positions first": lambda h: h.transpose(0, 1).flatten(0, 1),
    "picked": lambda h: h[torch.tensor([[1, 0], [1, 1], [0, 1], [1, 1]]).bool()],
}
OWNERS = {
    "samples first": [0, 0, 1, 1, 2, 2, 3, 3],
    "positions first": [0, 1, 2, 3, 0, 1, 2, 3],
    "picked": [0, 1, 1, 2, 3, 3],
}


@pytest.mark.parametrize("chosen", [None, [2, 1]])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("kind", MERGED)
def test_numbers_of_several_rows_of_a_sample(
    kind: str, chunk_size: int | None, chosen: list[int] | None
) -> None:
    """They are in the order of memory: row by row."""
    net, outputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), SumOutputs()
    x, owners = torch.randn(4, 2, 3), torch.tensor(OWNERS[kind])
    parameters, rows = list(net.parameters()), MERGED[kind](net(x))
    expected = [p.new_zeros(4, 2, 3, *p.shape) for p in parameters]
    for n in range(4):
        for k, r in enumerate((owners == n).nonzero().flatten().tolist()):
            for c in range(3):
                found = torch.autograd.grad(rows[r, c], parameters, retain_graph=True)
                for whole, part in zip(expected, found, strict=True):
                    whole[n, k, c] = part
    extend(net), extend(outputs)
    with backpack(Jacobians(chosen, chunk_size=chunk_size), NTK(chosen), gradient="none"):
        outputs(MERGED[kind](net(x))).backward()
    for p, whole in zip(parameters, expected, strict=True):
        rows_of = whole.flatten(1, 2)[slice(None) if chosen is None else chosen]
        oracle.assert_close(p.jacobians, rows_of)
        flat = rows_of.flatten(2)
        oracle.assert_close(p.ntk, torch.einsum("ncp,mdp->ncmd", flat, flat))


class Rotated(nn.Module):
    """Rotations by complex numbers, mixed heads: as in language models, before the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(3, 4), nn.Linear(4, 2)
        self.heads = nn.Parameter(torch.randn(2, 2), kind == "heads")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "complex":
            turned = torch.view_as_complex(h.unflatten(-1, (2, 2))) * torch.tensor(1 + 2j)
            h = h + torch.view_as_real(turned).flatten(-2)
        elif self.kind == "heads":
            h = h + torch.einsum("nthd,hg->ntgd", h.unflatten(-1, (2, 2)), self.heads).flatten(-2)
        else:
            h = h + torch.fft.irfft(torch.fft.rfft(h), n=4).cos()
        return self.last(h)


@pytest.mark.parametrize("kind", ["complex", "heads", "transform"])
def test_numbers_of_rows_behind_products(kind: str) -> None:
    """Which rows a sample has shows through operations that leave them where they are."""
    net, outputs = Rotated(kind), extend(SumOutputs())
    x, plain = torch.randn(4, 2, 3), copy.deepcopy(net)
    expected = explicit(plain, oracle.rows(plain, (x,)))
    extend(net)
    with backpack(Jacobians(), gradient="none"):
        outputs(net(x).flatten(0, 1)).backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    for p, jacobian in zip(trained, expected, strict=True):
        oracle.assert_close(p.jacobians, jacobian)


@pytest.mark.parametrize("extension", [Jacobians(), NTK()])
def test_rows_of_unknown_samples(extension: Any) -> None:
    net, outputs = extend(nn.Linear(3, 2)), extend(SumOutputs())
    with (
        pytest.raises(UnsupportedError, match="which sample each row at the loss belongs to"),
        backpack(extension, gradient="none"),
    ):
        outputs(Unknown.apply(net(torch.randn(4, 2, 3))).flatten(0, 1)).backward()


class Unknown(torch.autograd.Function):
    """A function of which nothing is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]
