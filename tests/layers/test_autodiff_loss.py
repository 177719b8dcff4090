"""Losses without a rule, against autograd's Hessian and against the rules of the same losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UnsupportedError, UsageError
from backpack_core.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
)
from backpack_layers.autodiff_loss import AutodiffLoss
from tests import oracle
from tests.cases import Problem, mlp
from tests.secondorder.problems import hessians

LABELS = torch.tensor([0, 2, 1, 1])


def focal(x: Tensor, y: Tensor) -> Tensor:
    """The focal loss, by sample (Lin et al., 2017)."""
    log_p = x.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    return -((1 - log_p.exp()) ** 2) * log_p


def dice(x: Tensor, y: Tensor) -> Tensor:
    """One minus the overlap of each sample."""
    p, y = x.sigmoid(), F.one_hot(y, 3).to(x.dtype)
    return 1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)


def quartic(x: Tensor, y: Tensor) -> Tensor:
    """Each sample's entries, ``[N, C]``; convex."""
    return (x - y.unsqueeze(1)) ** 4


class Softplus(torch.autograd.Function):
    """``log(1 + eˣ)``, whose ``backward`` can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid()


class InForward(Softplus):
    """Its slope is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.sigmoid()
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class Once(Softplus):
    """Marked as not to be differentiated."""

    backward = staticmethod(once_differentiable(Softplus.backward))


class Huber(Softplus):
    """Quadratic up to one, with kinks in its slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.huber_loss(x, torch.zeros_like(x), reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.clamp(-1, 1)


def problem(function: Callable[..., Tensor], batch: int = 4, **settings: Any) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(batch, 3)
    return Problem(mlp(), (x,), AutodiffLoss(function, **settings), LABELS[:batch])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", [focal, dice, quartic])
def test_against_autograd(function: Callable[..., Tensor], reduction: str, batch: int) -> None:
    found = problem(function, batch, reduction=reduction, negative="clip")
    blocks = found.expected(oracle.ggn)
    second = found.expected(hessians)
    gradients = found.expected(oracle.individual_gradients)
    found.run(GGNMP(), DiagHessian(), BatchGrad())
    found.compare("grad_batch", gradients)
    for p, hessian in zip(found.parameters, second, strict=True):
        oracle.assert_close(p.diag_h.flatten(), hessian.sum(0).diagonal())
    for p, block in zip(found.parameters, blocks, strict=True):
        v = torch.randn_like(p)
        oracle.assert_close(p.ggnmp(v).flatten(), block.sum(0) @ v.flatten())


@pytest.mark.parametrize("negative", ["clip", "abs"])
@pytest.mark.parametrize("function", [focal, dice, quartic])
def test_roots(function: Callable[..., Tensor], negative: str) -> None:
    found = problem(function, negative=negative)
    plain = copy.deepcopy(found.model)
    rows = oracle.rows(plain, found.inputs)
    loss = copy.deepcopy(found.lossfunc)
    curved = oracle.loss_hessians(lambda x: loss(x, found.target), torch.stack(rows))
    values, vectors = torch.linalg.eigh(curved)
    assert function is not dice or (values < -1e-6).any()
    positive = values.clamp(min=0) if negative == "clip" else values.abs()
    curved = (vectors * positive.unsqueeze(1)) @ vectors.mT
    found.run(SqrtGGNExact(), DiagGGNExact(), BatchDiagGGNExact(), KFLR())
    for p, j in zip(found.parameters, oracle.jacobians(rows, [*plain.parameters()]), strict=True):
        block = torch.einsum("nca,ncd,ndb->nab", j, curved, j)
        root = p.sqrt_ggn_exact.flatten(2)
        oracle.assert_close(torch.einsum("vna,vnb->nab", root, root), block)
        diagonals = block.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        oracle.assert_close(p.diag_ggn_exact_batch, diagonals)
        oracle.assert_close(p.diag_ggn_exact, diagonals.sum(0))
        if p.dim() == 1:
            oracle.assert_close(p.kflr[0], block.sum(0))


def test_negative_eigenvalues_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r'eigenvalue -0\.\d+.*negative="clip"'):
        problem(dice).run(DiagGGNExact())
    found = problem(dice)
    found.run(DiagHessian(), GGNMP())  # which need no root
    found.run(DiagGGNExact(), check="never")  # where nobody looks, it is not a number
    assert found.parameters[0].diag_ggn_exact.isnan().any()


def test_as_the_rule_of_the_same_loss() -> None:
    ours, theirs = problem(F.cross_entropy), problem(focal)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.lossfunc = nn.CrossEntropyLoss()
    for each in (ours, theirs):
        each.run(DiagGGNExact(), KFLR(), DiagHessian(), BatchDiagGGNExact([2, 0, 2]))
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        for field in ("diag_ggn_exact", "diag_h", "diag_ggn_exact_batch"):
            oracle.assert_close(getattr(p, field), getattr(q, field))
        for a, b in zip(p.kflr, q.kflr, strict=True):
            oracle.assert_close(a, b)


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_factors_and_modules(factor: float) -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("power", torch.tensor(4.0))

        def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
            return weight * (x - y.unsqueeze(1)).pow(self.power).sum(1)

    found, same = problem(Margin()), problem(quartic)
    same.model.load_state_dict(found.model.state_dict())
    extend(found.model), extend(found.lossfunc)
    with backpack(DiagGGNExact()):
        (found.lossfunc(found.model(*found.inputs), found.target, weight=factor) * 2).backward()
    same.run(DiagGGNExact())
    for p, q in zip(found.parameters, same.parameters, strict=True):
        oracle.assert_close(p.diag_ggn_exact, 2 * factor * q.diag_ggn_exact)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_draws_of_a_likelihood(reduction: str) -> None:
    torch.manual_seed(0)
    ours = problem(focal)
    ours.lossfunc = AutodiffLoss.of_likelihood(lambda x: Categorical(logits=x), reduction)
    ours.run(DiagGGNExact(), DiagGGNMC(mc_samples=20_000))
    for p in ours.parameters:
        oracle.assert_close(p.diag_ggn_mc, p.diag_ggn_exact, 0.05)
    ours.lossfunc = AutodiffLoss.of_likelihood(lambda x: Normal(x, 0.7), reduction)
    ours.target = torch.randn(4, 3)
    ours.run(DiagGGNExact(), DiagGGNMC(mc_samples=20_000), KFAC(mc_samples=20_000), KFLR())
    for p in ours.parameters:
        oracle.assert_close(p.diag_ggn_mc, p.diag_ggn_exact, 0.05)
        oracle.assert_close(p.kfac[0], p.kflr[0], 0.05)


@pytest.mark.host("numpy")
def test_formulas_that_vmap_cannot_batch() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return Square.apply(x) * grad

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 3 * torch.from_numpy(x.detach().numpy()) ** 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 6 * torch.from_numpy(x.numpy() * grad.numpy())

    ours = problem(lambda x, y: Cube.apply(x - 2).sum(1), negative="clip")
    same = problem(lambda x, y: ((x - 2) ** 3).sum(1), negative="clip")
    same.model.load_state_dict(ours.model.state_dict())
    for each in (ours, same):
        each.run(DiagHessian())
    for p, q in zip(ours.parameters, same.parameters, strict=True):
        oracle.assert_close(p.diag_h, q.diag_h)


def test_samples_that_mix_are_refused() -> None:
    def over_the_batch(x: Tensor, y: Tensor) -> Tensor:
        p, y = x.sigmoid(), F.one_hot(y, 3)
        return 1 - (p * y).sum() / (p.sum() + y.sum())

    with pytest.raises(SampleMixingError, match="by sample"):
        problem(over_the_batch, negative="clip").run(DiagGGNExact())
    correlations = lambda x, y: (x.T @ x / len(x) - torch.eye(3)).square().sum()  # noqa: E731
    for function in (over_the_batch, correlations, lambda x, y: x.norm()):
        with pytest.raises(SampleMixingError, match="gradient or a Hessian"):
            problem(function).run(BatchGrad())


def test_numbers_that_are_sums_over_samples() -> None:
    for function in (lambda x, y: torch.einsum("nc,nc->", x, x), lambda x, y: (x.T @ x).trace()):
        found, same = problem(function), problem(lambda x, y: x.square().sum())
        same.model.load_state_dict(found.model.state_dict())
        for each in (found, same):
            torch.manual_seed(1)
            each.run(BatchGrad(), DiagGGNExact())
        for p, q in zip(found.parameters, same.parameters, strict=True):
            oracle.assert_close(p.grad_batch, q.grad_batch)
            oracle.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)


@pytest.mark.parametrize("rows", [[0, 1, 0, 1], [0, 0, 1, 1]])
def test_rows_of_one_sample_may_meet_in_a_loss(rows: list[int]) -> None:
    model, x = extend(nn.Linear(3, 1)), torch.randn(4, 3)
    lossfunc = extend(AutodiffLoss(lambda s: F.softplus(s[2:] - s[:2]).sum(), reduction="sum"))
    told = torch.tensor(rows)
    if rows == [0, 0, 1, 1]:  # others than those that meet
        with pytest.raises(SampleMixingError), backpack(BatchGrad(), samples=told):
            lossfunc(model(x)).backward()
        return
    with backpack(BatchGrad(), samples=told):
        lossfunc(model(x)).backward()
    for n in range(2):
        s = F.softplus(model(x[n + 2]) - model(x[n])).sum()
        (gradient,) = torch.autograd.grad(s, [model.weight])
        oracle.assert_close(model.weight.grad_batch[n], gradient)


def test_losses_without_second_derivatives() -> None:
    found = problem(lambda x, y: F.multi_margin_loss(x, y, reduction="none"))
    found.run(BatchGrad())
    oracle.assert_close(found.parameters[0].grad_batch.sum(0), found.parameters[0].grad)


def test_draws_of_losses_change_no_others() -> None:
    """What measured passes compute again draws from a copy of the generator."""
    model, lossfunc = mlp(), AutodiffLoss(lambda x, y: quartic(x + torch.randn_like(x), y))
    extend(model), extend(lossfunc)
    torch.manual_seed(0)
    loss = lossfunc(model(torch.randn(4, 3)), LABELS)
    expected = torch.get_rng_state()
    with backpack(BatchGrad()):
        loss.backward()
    assert torch.get_rng_state().equal(expected)


@pytest.mark.parametrize("make", [BatchGrad, DiagGGNExact, DiagHessian])
@pytest.mark.parametrize("is_new", [True, False])
def test_another_function_is_measured(is_new: bool, make: Callable[[], Any]) -> None:
    """Passes with one function say nothing about those with other operations."""

    def flipped(x: Tensor, y: Tensor) -> Tensor:
        return quartic(x.flip(0), y)

    model, lossfunc = extend(mlp()), extend(AutodiffLoss(lambda x, y: quartic(x.flip(1), y)))
    x = torch.randn(4, 3)
    for _ in range(5):
        with backpack(make()):
            lossfunc(model(x), LABELS).backward()
    if is_new:
        lossfunc = extend(AutodiffLoss(flipped))
    lossfunc.function = flipped
    with pytest.raises(SampleMixingError), backpack(make()):
        lossfunc(model(x), LABELS).backward()


def test_random_losses_are_refused() -> None:
    def random(x: Tensor, y: Tensor) -> Tensor:
        return quartic(x + torch.randn_like(x), y)

    for extension in (DiagGGNExact(), DiagHessian()):
        with pytest.raises(UnsupportedError, match="as an argument"):
            problem(random).run(extension)
    noise = torch.randn(4, 3)
    found = problem(lambda x, y: quartic(x + noise, y))
    found.run(DiagGGNExact())
    problem(random).run(BatchGrad(), HMP())


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="likelihood=lambda"):
        problem(quartic).run(KFAC())
    likelihood = lambda x: Categorical(logits=x)  # noqa: E731
    with pytest.raises(UnsupportedError, match="returns a number"):
        problem(F.cross_entropy, likelihood=likelihood).run(KFAC())
    with pytest.raises(UsageError, match=r"torch\.distributions"):
        problem(quartic, likelihood=lambda x: x).run(KFAC())
    with pytest.raises(UsageError, match=r"\[4, \*\]"):
        problem(lambda x, y: x.sum(0)).run(BatchGrad())
    for output in ((LABELS, LABELS), torch.tensor(1.0)):
        with pytest.raises(UsageError, match="one tensor with samples"):
            AutodiffLoss(quartic)(output, LABELS)
    for wrong in (
        {"reduction": "max"},
        {"negative": "zero"},
        {"likelihood": Categorical(logits=LABELS)},
    ):
        with pytest.raises(UsageError):
            AutodiffLoss(quartic, **wrong)
    with pytest.raises(UsageError, match='reduction="none"'):
        problem(F.cross_entropy, reduction="none").loss()
    with pytest.raises(UsageError, match="a loss of output and target"):
        AutodiffLoss(nn.MSELoss)
    assert "negative='refuse'" in repr(AutodiffLoss(quartic))


@pytest.mark.parametrize("function", [Softplus, Huber])
def test_functions_of_users(function: Any) -> None:
    found = problem(lambda x, y: function.apply(3 * x).sum(1))
    expected = found.expected(hessians)
    found.run(DiagHessian())
    for p, hessian in zip(found.parameters, expected, strict=True):
        oracle.assert_close(p.diag_h.flatten(), hessian.sum(0).diagonal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [DiagHessian, DiagGGNExact, GGNMP])
@pytest.mark.parametrize("function", [InForward, Once])
def test_functions_that_lack_a_second_derivative(
    function: Any, kind: Any, dtype: torch.dtype
) -> None:
    model, x = extend(mlp().to(dtype)), torch.randn(4, 3, dtype=dtype)
    lossfunc = extend(AutodiffLoss(lambda x, y: function.apply(x).sum(1)))

    def run() -> None:
        with backpack(kind()):
            lossfunc(model(x), LABELS).backward()
        if kind is GGNMP:  # the Hessian is computed at the first product
            model[0].weight.ggnmp(torch.ones_like(model[0].weight))

    with pytest.raises(UnsupportedError, match=r"backward\(\) cannot be differentiated"):
        run()


@pytest.mark.parametrize("kind", [DiagHessian, DiagGGNExact, KFLR])
def test_operations_that_lack_a_second_derivative(kind: Any) -> None:
    """Torch has none of its CTC loss; quantities of first order do not need it."""

    def ctc(x: Tensor, y: Tensor) -> Tensor:
        log_p, lengths = x.view(4, 3, 1).expand(4, 3, 3).log_softmax(-1), torch.full((4,), 3)
        ends = torch.ones(4, dtype=torch.long)
        found = F.ctc_loss(log_p.transpose(0, 1), y[:, None], lengths, ends, reduction="none")
        return found + x.sum(1)

    model, lossfunc = extend(mlp()), extend(AutodiffLoss(ctc))
    with backpack(BatchGrad()):
        lossfunc(model(torch.randn(4, 3)), LABELS.clamp(min=1)).backward()
    loss = lossfunc(model(torch.randn(4, 3)), LABELS.clamp(min=1))
    refused = pytest.raises(UnsupportedError, match="no second derivative, which curvature needs")
    with refused, backpack(kind()):
        loss.backward()
