"""Some samples only, of losses and layers that receive several entries of each, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_core.testing import oracle as kit
from tests.cases import Net
from tests.oracle import assert_close

N, T, D, C, BOUND = 4, 3, 2, 3, 0.2
Arrange = Callable[[Tensor], Tensor]
MASK = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 0], [1, 0, 0]]).bool()
AS_MANY_AS_SAMPLES = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]]).bool()
ORDER = torch.tensor([7, 2, 11, 0, 5, 9, 1, 10, 3, 6, 8, 4])

ARRANGE: dict[str, Arrange] = {
    "samples first": lambda z: z.flatten(0, 1),
    "positions first": lambda z: z.transpose(0, 1).flatten(0, 1),
    "shuffled": lambda z: z.flatten(0, 1)[ORDER],
    "masked": lambda z: z[MASK],
    "as many as samples": lambda z: z[AS_MANY_AS_SAMPLES],
}


def _of_logits(arrange: Arrange) -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return arrange(net.b(torch.tanh(net.a(x) + net.table)))

    table = nn.Parameter(torch.randn(T, 3))
    return Net(forward, a=nn.Linear(D, 3), table=table, b=nn.Linear(3, C))


def _of_hidden(arrange: Arrange) -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.act(net.a(arrange(x * net.gain))))  # type: ignore[no-any-return]

    gain = nn.Parameter(torch.randn(D))
    return Net(forward, gain=gain, a=nn.Linear(D, 3), act=nn.Tanh(), b=nn.Linear(3, C))


def _of_narrow_head(arrange: Arrange) -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(arrange(net.act(net.a(x))))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(D, 2), act=nn.Sigmoid(), b=nn.Linear(2, 5))


SUMMED = {"positions first", "masked"}  # the others are means
NETS = {"logits": _of_logits, "hidden": _of_hidden, "narrow head": _of_narrow_head}


class Chosen:
    """A net whose rows are arranged before the loss, and what belongs to each sample."""

    def __init__(self, net: str, arrange: str) -> None:
        reduction = "sum" if arrange in SUMMED else "mean"
        self.net = NETS[net](ARRANGE[arrange])
        self.parameters = dict(self.net.named_parameters())
        self.x = torch.randn(N, T, D)
        every = torch.arange(1.0 * N)[:, None, None].expand(N, T, 1)
        self.owners = ARRANGE[arrange](every)[:, 0].long()
        self.y = torch.arange(len(self.owners)) % C
        self.divisor = len(self.y) if reduction == "mean" else 1
        self.lossfunc = nn.CrossEntropyLoss(reduction=reduction)
        self._logits = self.net(self.x)
        self.gradients = self._gradients()

    def _of_each(self, rows: Sequence[Tensor]) -> Tensor:
        found = torch.zeros(N, *rows[0].shape)
        return found.index_add(0, self.owners, torch.stack([*rows]))

    def _losses(self) -> Tensor:
        return F.cross_entropy(self._logits, self.y, reduction="none") / self.divisor

    def _gradients(self) -> dict[str, Tensor]:
        named = self.parameters.items()
        rows = {
            n: [kit.gradients(each, [p], torch.tensor(1.0))[0] for each in self._losses()]
            for n, p in named
        }
        return {name: self._of_each(each) for name, each in rows.items()}

    def ggn(self, name: str) -> Tensor:
        """Shape ``[N, P, P]``."""
        rows = []
        for row in self._logits:
            jacobian = kit.jacobians(row, {name: self.parameters[name]})[name].reshape(len(row), -1)
            p = row.softmax(0).detach()
            rows.append(jacobian.T @ (p.diag() - p.outer(p)) @ jacobian / self.divisor)
        return self._of_each(rows)

    def hessians(self, name: str) -> Tensor:
        """Shape ``[N, P, P]``."""
        parameter = self.parameters[name]
        rows = [kit.hessian(each, parameter).detach() for each in self._losses()]
        size = parameter.numel()
        return self._of_each([row.reshape(size, size) for row in rows])

    def run(self, *extensions: Any) -> None:
        """One pass."""
        loss = extend(self.lossfunc)(extend(self.net)(self.x), self.y)
        with backpack(*extensions):
            loss.backward()


CHOSEN = [[2, 0], [-1, 1, 1]]


def _first_order(chosen: list[int]) -> list[Any]:
    kinds = (BatchGrad, BatchL2Grad, SumGradSquared, Variance, BatchDotGrad)
    return [
        *(kind(subsampling=chosen) for kind in kinds),
        ClippedSumGrad(BOUND, subsampling=chosen, normaliser=None),
    ]


@pytest.mark.parametrize("arrange", ARRANGE)
@pytest.mark.parametrize("net", NETS)
def test_first_order(net: str, arrange: str) -> None:
    case = Chosen(net, arrange)
    for chosen in CHOSEN:
        case.run(*_first_order(chosen))
        single = {name: g[chosen] for name, g in case.gradients.items()}
        norms = torch.stack([g.flatten(1).square().sum(1) for g in single.values()]).sum(0).sqrt()
        weights = (BOUND / norms.clamp_min(1e-300)).clamp(max=1.0)
        for name, g in single.items():
            found: Mapping[str, Tensor] = vars(case.parameters[name])
            assert_close(found["grad_batch"], g)
            assert_close(found["batch_l2"], g.flatten(1).square().sum(1))
            assert_close(found["sum_grad_squared"], g.square().sum(0))
            torch.testing.assert_close(found["variance"], g.var(0, correction=0))
            assert_close(found["batch_dot"], g.flatten(1) @ g.flatten(1).T)
            assert_close(found["grad_clipped"], torch.einsum("n,n...->...", weights, g))


@pytest.mark.parametrize("arrange", ARRANGE)
@pytest.mark.parametrize("net", NETS)
def test_gauss_newton(net: str, arrange: str) -> None:
    case = Chosen(net, arrange)
    matrices = {name: case.ggn(name) for name in case.parameters}
    for chosen in CHOSEN:
        case.run(
            DiagGGNExact(subsampling=chosen),
            BatchDiagGGNExact(subsampling=chosen),
            SqrtGGNExact(subsampling=chosen),
            GGNMP(subsampling=chosen),
        )
        for name, p in case.parameters.items():
            matrix, vector = matrices[name][chosen], torch.randn_like(p)
            diagonal = matrix.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
            found: Any = vars(p)
            assert_close(found["diag_ggn_exact"], diagonal.sum(0))
            assert_close(found["diag_ggn_exact_batch"], diagonal)
            assert_close(found["sqrt_ggn_exact"].square().sum(0), diagonal)
            product = (matrix.sum(0) @ vector.flatten()).view_as(p)
            assert_close(found["ggnmp"](vector), product)
        case.run(BatchDiagGGNExact(subsampling=chosen, chunk_size=len(chosen) - 1))
        for name, p in case.parameters.items():
            diagonal = matrices[name][chosen].diagonal(dim1=1, dim2=2)
            assert_close(vars(p)["diag_ggn_exact_batch"].flatten(1), diagonal)


@pytest.mark.parametrize(
    ("net", "arrange", "chunk_size"),
    [(net, arrange, None if net == "hidden" else 2) for net in NETS for arrange in ARRANGE]
    + [("hidden", arrange, 2) for arrange in ("samples first", "shuffled", "masked")],
)
def test_hessian(net: str, arrange: str, chunk_size: int | None) -> None:
    case = Chosen(net, arrange)
    matrices = {name: case.hessians(name) for name in case.parameters}
    for chosen in (None, *CHOSEN):
        case.run(
            DiagHessian(subsampling=chosen, chunk_size=chunk_size),
            BatchDiagHessian(subsampling=chosen, chunk_size=chunk_size),
            HMP(subsampling=chosen),
        )
        for name, p in case.parameters.items():
            matrix = matrices[name][slice(None) if chosen is None else chosen]
            diagonal = matrix.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
            found: Any = vars(p)
            assert_close(found["diag_h"], diagonal.sum(0), rtol=1e-9)
            assert_close(found["diag_h_batch"], diagonal, rtol=1e-9)
            vector = torch.randn_like(p)
            product = (matrix.sum(0) @ vector.flatten()).view_as(p)
            assert_close(found["hmp"](vector), product, rtol=1e-9)


@pytest.mark.parametrize("extension", [KFLR, KFAC])
def test_kronecker_factors(extension: Any) -> None:
    """They are those of the same positions on an axis of their own."""
    net = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, C))
    x, y, found = torch.randn(N, T, D), torch.randint(C, (N, T)), []
    for is_merged in (True, False):
        torch.manual_seed(1)
        logits = extend(net)(x)
        loss = extend(nn.CrossEntropyLoss())(
            logits.flatten(0, 1) if is_merged else logits.transpose(1, 2),
            y.flatten() if is_merged else y,
        )
        given = {} if extension is KFLR else {"mc_samples": 20_000}
        with backpack(extension(subsampling=[3, 1], **given)):
            loss.backward()
        found.append([vars(p)[extension.savefield] for p in net.parameters()])
    for ours, other in zip(*found, strict=True):
        for left, right in zip(ours, other, strict=True):
            assert_close(left, right, rtol=1e-10 if extension is KFLR else 0.05)


def test_drawn_columns_have_the_right_mean() -> None:
    case = Chosen("hidden", "masked")
    case.run(DiagGGNMC(mc_samples=20_000, subsampling=[0, 1, 1]))
    for name, p in case.parameters.items():
        expected = case.ggn(name)[[0, 1, 1]].sum(0).diagonal()
        assert_close(vars(p)["diag_ggn_mc"].flatten(), expected, rtol=0.05)


def test_a_sample_that_is_not_there() -> None:
    case = Chosen("logits", "samples first")
    with pytest.raises(UsageError, match=r"asks for sample 4, but .* batch of 4 samples"):
        case.run(BatchGrad(subsampling=[4]))
    with pytest.raises(UsageError, match=r"asks for sample -5"):
        case.run(DiagGGNExact(subsampling=[-5]))


class Shuffle(torch.autograd.Function):
    """Merges and moves entries, so that nothing says whose they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(0, 1).flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0).view(ctx.shape)


@pytest.mark.parametrize("extension", [DiagGGNExact, HMP])
def test_entries_of_which_nothing_is_known(extension: Any) -> None:
    net, x = extend(nn.Linear(D, C)), torch.randn(N, T, D)
    logits: Tensor = Shuffle.apply(net(x))  # type: ignore[no-untyped-call]
    loss = extend(nn.CrossEntropyLoss())(logits, torch.arange(N * T) % C)
    with (
        pytest.raises(ShapeError, match=r"which sample each belongs.* leave it out, and choose"),
        backpack(extension(subsampling=[0])),
    ):
        loss.backward()
