"""Many outputs: roots without a superfluous column, truncated ones, and columns condensed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import (
    EKFAC,
    KFLR,
    BatchDiagGGNExact,
    DiagGGNExact,
    DiagGGNMC,
    GGNGram,
    SqrtGGNExact,
    SqrtGGNMC,
)
from backpack_data.state import over_batches
from backpack_layers.linear import LinearRule
from backpack_layers.softmax_root import softmax_root
from backpack_products import SampleProduct
from backpack_products.operations import square_sum
from backpack_secondorder import diag_ggn
from backpack_secondorder.propagators import LossSqrt, MixedSqrt, truncated
from tests import oracle
from tests.secondorder.problems import Net, Problem

CLASSES, WIDTH, N = 12, 4, 3


def hessians(logits: Tensor) -> Tensor:
    """``diag p - p pᵀ`` in double precision. Shape ``[N, C] → [N, C, C]``."""
    p = logits.double().softmax(1)
    return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)


def outer(root: Tensor) -> Tensor:
    """``Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[V, N, *] → [N, D, D]``."""
    flat = root.double().flatten(2)
    return torch.einsum("vna,vnb->nab", flat, flat)


LOGITS = {
    "usual": torch.randn(4, 9),
    "steep": 60 * torch.randn(4, 9),
    "certain": torch.tensor([[0.0, 2000.0, 0.5], [-900.0, 0.0, 900.0]]),
    "excluded": torch.tensor([[0.0, -torch.inf, 0.5], [-torch.inf, 1.0, -torch.inf]]),
    "uniform": torch.zeros(2, 100),
    "one class": torch.randn(3, 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LOGITS)
def test_softmax_root(name: str, dtype: torch.dtype) -> None:
    logits = LOGITS[name].to(dtype).requires_grad_()
    root = softmax_root(logits.unsqueeze(2), logits.new_ones(len(logits), 1, 1))
    classes = logits.shape[1]
    assert root.shape == (max(1, classes - 1), len(logits), classes, 1)
    assert bool((outer(root) - hessians(logits)).abs().max() <= 4 * torch.finfo(dtype).eps)
    (grad,) = torch.autograd.grad(root.sum(), logits)
    assert bool(grad.isfinite().all())


def test_every_entry_of_the_root_is_exact_in_relative_terms() -> None:
    """Where classes are unlikely, too: no sum has terms of two signs."""
    logits = torch.tensor([[0.0, 30.0, 10.0, -20.0]])
    root = softmax_root(logits.unsqueeze(2), torch.ones(1, 1, 1))
    p = logits.softmax(1)[0]
    others = torch.tensor([p[torch.arange(4) != c].sum() for c in range(4)])
    diagonal = outer(root)[0].diagonal()
    assert torch.allclose(diagonal, p * others, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tolerance", [0.01, 0.1, 0.5])
def test_tolerance_bounds_the_trace_that_is_left_out(tolerance: float) -> None:
    logits = 3 * torch.randn(5, 40)
    full = softmax_root(logits.unsqueeze(2), torch.ones(5, 1, 1)).squeeze(3)
    root, exact = truncated(full, tolerance), hessians(logits)
    assert len(root) < 39
    left = exact - outer(root)
    assert float(torch.linalg.eigvalsh(left).min()) > -1e-14
    traces = left.diagonal(dim1=1, dim2=2).sum(1)
    allowed = tolerance * exact.diagonal(dim1=1, dim2=2).sum(1)
    assert bool((traces <= allowed).all())
    # Not one column more than is needed, and at most one more than by eigenvectors.
    fewer = exact - outer(truncated(full, tolerance)[:-1])
    assert bool((fewer.diagonal(dim1=1, dim2=2).sum(1) > allowed).any())
    values = torch.linalg.eigvalsh(exact)
    best = max(int((v.cumsum(0) > t).sum()) for v, t in zip(values, allowed, strict=True))
    assert len(root) <= best + 1


def test_tolerance_keeps_what_is_there() -> None:
    assert truncated(torch.zeros(3, 2, 4), 0.5).shape == (1, 2, 4)
    assert truncated(torch.zeros(3, 0, 4), 0.5).shape == (3, 0, 4)
    assert bool(truncated(torch.full((3, 2, 4), torch.nan), 0.5).isnan().all())


def problem(*body: nn.Module, classes: int = CLASSES, bias: bool = True) -> Problem:
    """A net with a head of few inputs and many outputs."""
    layers = body or (nn.Conv1d(1, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, WIDTH))
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, classes, bias=bias))
    target = torch.randint(0, classes, (N,))
    return Problem(net, (torch.randn(N, 1, 5),), nn.CrossEntropyLoss(), target)


def test_truncated_quantities() -> None:
    """They are those of the truncated root: never above the exact ones, and near them."""
    case, tolerance = problem(), 0.2
    blocks = case.expected(oracle.ggn)
    case.run(
        DiagGGNExact(tolerance=tolerance),
        BatchDiagGGNExact(tolerance=tolerance),
        SqrtGGNExact(tolerance=tolerance),
        KFLR(tolerance=tolerance),
        EKFAC(None, tolerance=tolerance),
        GGNGram(tolerance=tolerance),
    )
    columns = {len(p.sqrt_ggn_exact) for p in case.parameters}  # type: ignore[attr-defined]
    assert len(columns) == 1
    assert columns.pop() < CLASSES - 1
    for p, block in zip(case.parameters, blocks, strict=True):
        own: Any = p
        diagonal = block.diagonal(dim1=1, dim2=2)
        oracle.assert_close(own.diag_ggn_exact_batch.flatten(1), outer_diagonal(own.sqrt_ggn_exact))
        oracle.assert_close(own.diag_ggn_exact, own.diag_ggn_exact_batch.sum(0))
        assert bool((own.diag_ggn_exact_batch.flatten(1) <= diagonal + 1e-14).all())
        assert float((block.sum(0) - outer(own.sqrt_ggn_exact).sum(0)).norm()) > 0
        if p.dim() == 1:
            oracle.assert_close(own.kflr[0], outer(own.sqrt_ggn_exact).sum(0))


def outer_diagonal(root: Tensor) -> Tensor:
    """``Σ_v M²``. Shape ``[N, P]``."""
    return root.flatten(2).square().sum(0)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, 2, "all"])
def test_no_share(tolerance: Any) -> None:
    with pytest.raises(UsageError, match="share of the trace"):
        DiagGGNExact(tolerance=tolerance)


def test_tolerance_of_what_is_sampled() -> None:
    with pytest.raises(UsageError, match="leave one of them out"):
        EKFAC(mc_samples=1, tolerance=0.1)


def test_truncated_roots_of_several_batches() -> None:
    with pytest.raises(UnsupportedError, match="numbers of columns"):
        over_batches(SqrtGGNExact(tolerance=0.1))
    over_batches(SqrtGGNExact())


# Columns behind a narrow head ---------------------------------------------------------------------


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """How many columns went through linear layers, by their number of outputs."""
    found: dict[int, list[int]] = {}
    original = LinearRule._jac_t_mat_prod

    def counted(rule: LinearRule, view: Any, mat: Tensor) -> Tensor:
        found.setdefault(mat.shape[-1], []).append(len(mat))
        return original(rule, view, mat)

    monkeypatch.setattr(LinearRule, "_jac_t_mat_prod", counted)
    return found


def check_exact(case: Problem, *extensions: Any) -> None:
    """Run, and compare diagonals and factors of biases with the oracle."""
    diagonals, blocks = case.expected(oracle.ggn_diagonals), case.expected(oracle.ggn)
    case.run(*extensions, check="never")
    case.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])
    for p, diagonal, block in zip(case.parameters, diagonals, blocks, strict=True):
        own: Any = p
        if hasattr(own, "diag_ggn_exact_batch"):
            oracle.assert_close(own.diag_ggn_exact_batch, diagonal)
        if hasattr(own, "kflr") and p.dim() == 1:
            oracle.assert_close(own.kflr[0], block.sum(0))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_fewer_columns_behind_a_narrow_head(
    carried: dict[int, list[int]], chunk_size: int | None
) -> None:
    kinds = (DiagGGNExact, BatchDiagGGNExact, KFLR)
    check_exact(problem(), *(kind(chunk_size=chunk_size) for kind in kinds))
    assert carried == {CLASSES: [CLASSES - 1], WIDTH: [WIDTH] if chunk_size is None else [2, 2]}


def test_head_behind_an_operation(carried: dict[int, list[int]]) -> None:
    parts = {"body": nn.Linear(5, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}
    net = Net(lambda net, x: net.head(net.body(x).tanh().mean(1)), **parts)
    target = torch.randint(0, CLASSES, (N,))
    case = Problem(net, (torch.randn(N, 2, 5),), nn.CrossEntropyLoss(), target)
    check_exact(case, DiagGGNExact(), BatchDiagGGNExact(), KFLR())
    assert carried[CLASSES] == [CLASSES - 1]
    case.run(DiagGGNExact(subsampling=[2, 0]), check="never")
    expected = [d[[0, 2]].sum(0) for d in case.expected(oracle.ggn_diagonals)]
    case.compare("diag_ggn_exact", expected)


def test_other_losses(carried: dict[int, list[int]]) -> None:
    case = problem()
    case.lossfunc, case.target = nn.MSELoss(), torch.randn(N, CLASSES)
    check_exact(case, DiagGGNExact(), KFLR())
    assert carried[WIDTH] == [WIDTH]


def _branched(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x.flatten(1))
    logits: Tensor = net.head(hidden) + F.pad(hidden, (0, CLASSES - WIDTH))
    return logits


def _tied(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x.flatten(1)) @ net.head.weight.T[:, :WIDTH]
    logits: Tensor = net.head(hidden)
    return logits


def _wide(net: Any, x: Tensor) -> Tensor:
    logits: Tensor = net.wide(net.body(x.flatten(1)).repeat(1, 5))
    return logits


@pytest.mark.parametrize("forward", [_branched, _tied, _wide])
def test_columns_that_are_left_alone(
    carried: dict[int, list[int]], forward: Callable[[Any, Tensor], Tensor]
) -> None:
    parts = {"body": nn.Linear(5, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}
    if forward is _wide:
        parts = {"body": nn.Linear(5, WIDTH), "wide": nn.Linear(5 * WIDTH, CLASSES)}
    target = torch.randint(0, CLASSES, (N,))
    case = Problem(Net(forward, **parts), (torch.randn(N, 1, 5),), nn.CrossEntropyLoss(), target)
    case.model.body.weight.requires_grad_()
    case.inputs[0].requires_grad_()  # so that columns go through the first layer
    check_exact(case, DiagGGNExact(), KFLR(fail_mode="block"))
    assert carried[WIDTH] == [CLASSES - 1]


class Formed(diag_ggn.DiagGGNExact):
    """An extension that says nothing of what may be done to columns."""

    columns_mix = False
    savefield = "formed"

    def read(self, product: SampleProduct) -> Tensor:
        assert product.columns == CLASSES - 1
        return square_sum(product)


@pytest.mark.parametrize("other", [SqrtGGNExact, GGNGram, Formed])
def test_columns_that_somebody_reads(carried: dict[int, list[int]], other: Any) -> None:
    check_exact(problem(), other(), DiagGGNExact())
    assert carried[WIDTH] == [CLASSES - 1]


def test_two_losses_on_one_output(carried: dict[int, list[int]]) -> None:
    case = problem()
    model, first, second = case.model, nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")
    labels, values = case.target, torch.randn(N, CLASSES)
    case.lossfunc = Net(lambda _, out, __: first(out, labels) + 0.5 * second(out, values))
    diagonals = case.expected(oracle.ggn_diagonals)
    extend(model), extend(first), extend(second)
    output = model(*case.inputs)
    with backpack(DiagGGNExact()):
        (first(output, labels) + 0.5 * second(output, values)).backward()
    case.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])
    assert 2 * WIDTH in carried[WIDTH]


def test_gradients_of_curvature_go_through_all_columns(carried: dict[int, list[int]]) -> None:
    case = problem()
    model, lossfunc = extend(case.model), extend(case.lossfunc)
    with backpack(DiagGGNExact(), check="never"):
        loss = lossfunc(model(*case.inputs), case.target)
        torch.autograd.grad(loss, case.parameters, create_graph=True)
    assert carried[WIDTH] == [CLASSES - 1]
    total = sum(p.diag_ggn_exact.sum() for p in model.parameters())  # type: ignore[attr-defined]
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, case.parameters))


def test_sampled_columns_may_be_condensed() -> None:
    assert DiagGGNMC.columns_mix
    assert LossSqrt(samples=3).serving([DiagGGNMC(3)]) == MixedSqrt(samples=3)
    assert LossSqrt(samples=3).serving([DiagGGNMC(3), SqrtGGNMC(3)]) == LossSqrt(samples=3)
    assert LossSqrt(samples=1).serving([DiagGGNMC(1)]) == LossSqrt(samples=1)  # nothing to replace


def test_losses_beside_the_one_behind_the_head(carried: dict[int, list[int]]) -> None:
    """One of another function of the outputs, and one of what the head reads."""
    parts = {"body": nn.Linear(5, WIDTH), "act": nn.Tanh(), "head": nn.Linear(WIDTH, CLASSES)}
    losses = [nn.CrossEntropyLoss(), nn.MSELoss(), nn.MSELoss()]
    labels = torch.randint(0, CLASSES, (N,))
    values, wanted = torch.randn(N, CLASSES), torch.randn(N, WIDTH)
    net, x = Net(lambda net, x: net.head(net.act(net.body(x))), **parts), torch.randn(N, 5)

    def total(hidden: Tensor, logits: Tensor) -> Tensor:
        parts = (
            losses[0](logits, labels),
            losses[1](logits.sin(), values),
            losses[2](hidden, wanted),
        )
        result: Tensor = parts[0] + 2 * parts[1] + 3 * parts[2]
        return result

    expected = [torch.zeros_like(p) for p in net.parameters()]
    for forward, loss, factor in (
        (net.forward, lambda out: losses[0](out, labels), 1),
        (lambda x: net(x).sin(), lambda out: losses[1](out, values), 2),
        (lambda x: net.act(net.body(x)), lambda out: losses[2](out, wanted), 3),
    ):
        hessians = oracle.loss_hessians(loss, forward(x).detach())
        for p, sums in zip(net.parameters(), expected, strict=True):
            for n in range(N):
                jacobian = torch.stack(
                    [
                        torch.zeros_like(p) if g is None else g
                        for c in forward(x)[n]
                        for g in torch.autograd.grad(c, p, retain_graph=True, allow_unused=True)
                    ]
                ).flatten(1)
                diagonal = torch.einsum("ca,cd,da->a", jacobian, hessians[n], jacobian)
                sums += factor * diagonal.reshape(p.shape)
    extend(net)
    for lossfunc in losses:
        extend(lossfunc)
    with backpack(DiagGGNExact(), check="never"):
        hidden = net.act(net.body(x))
        total(hidden, net.head(hidden)).backward()
    for p, sums in zip(net.parameters(), expected, strict=True):
        oracle.assert_close(p.diag_ggn_exact, sums)  # type: ignore[attr-defined]
    assert carried[CLASSES] == [CLASSES - 1, CLASSES]
