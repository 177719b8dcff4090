"""Scripts that do not call one model and one loss on one batch: which number is that of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, ShapeError
from backpack_core.extensions import GGNMP, BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact

N, D, C = 4, 3, 3
TOKENS = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()  # twice as many as N
HALVES = torch.tensor([0, 2]), torch.tensor([1, 3])
Losses = list[tuple[Tensor, Tensor]]  # what a loss receives, and whose its rows are
Script = Callable[[nn.Module, nn.Module, Tensor], Losses]


def _halves(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    h = first(x[:, 0])
    return [(second(h[own]), own) for own in HALVES]


def _one_half(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return _halves(first, second, x)[:1]


def _overlapping(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    h = first(x[:, 0])
    return [(second(h[i]), i) for i in (torch.tensor([0, 2, 3]), torch.tensor([1, 2, 3]))]


def _tokens(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return [(second(first(x).view(-1, C)), torch.arange(N).repeat_interleave(3))]


def _masked_tokens(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return [(second(first(x)[TOKENS]), TOKENS.nonzero()[:, 0])]


def _repeated(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    h = first(x[:, 0]).repeat_interleave(2, 0) + torch.arange(2.0 * N)[:, None]
    return [(second(h), torch.arange(N).repeat_interleave(2))]


def _routed(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    out = x.new_zeros(N, C)
    for expert, own in zip((first, second), HALVES, strict=True):
        out[own] = expert(x[own, 0])
    return [(out, torch.arange(N))]


def _some_too(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return [(first(x[:, 0]), torch.arange(N)), (second(x[:2, 0]), torch.arange(2))]


def _joined(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return [(torch.cat([first(x[:3, 0]), second(x[3:, 0])]), torch.arange(N))]


def _detached(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    h = first(x[:, 0]).detach()
    return [(second(h[:3]), torch.arange(3)), (second(h[3:]), torch.arange(3, 4))]


def _two_batches(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    return [(first(x[:, 0]), torch.arange(N)), (second(x[:2, 0].clone()), torch.arange(2))]


def _joined_batches(first: nn.Module, second: nn.Module, x: Tensor) -> Losses:
    out = torch.cat([first(x[:3, 0].clone()), second(x[3:, 0].clone())])
    return [(out, torch.arange(N))]


def _modules() -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C)) for _ in range(2)]
    return [part.double() for part in parts], torch.randn(N, 3, D).double()


def _expected(parts: list[nn.Module], losses: Losses) -> tuple[list[Tensor], list[Tensor]]:
    """Individual gradients and diagonals by single rows of the losses."""
    parameters = [p for part in parts for p in part.parameters()]
    gradients = [torch.zeros(N, *p.shape).double() for p in parameters]
    diagonals = [torch.zeros(N, *p.shape).double() for p in parameters]
    for output, owners in losses:
        for row, owner in zip(output, owners, strict=True):
            for entry in row:
                jacobian = torch.autograd.grad(
                    entry, parameters, retain_graph=True, materialize_grads=True
                )
                for k, j in enumerate(jacobian):
                    gradients[k][owner] += 2 * entry.detach() * j / output.numel()
                    diagonals[k][owner] += 2 * j.square() / output.numel()
    return gradients, diagonals


def _loss(script: Script, parts: list[nn.Module], x: Tensor) -> Tensor:
    lossfunc: Any = extend(nn.MSELoss())
    outputs = [output for output, _ in script(*parts, x)]
    return sum((lossfunc(z, torch.zeros_like(z)) for z in outputs), torch.zeros(()))


@pytest.mark.parametrize(
    "script",
    [
        *(_halves, _one_half, _overlapping, _tokens, _masked_tokens, _repeated, _routed),
        *(_some_too, _joined, _detached),
    ],
)
def test_samples_are_what_came_from_outside(script: Script) -> None:
    parts, x = _modules()
    gradients, diagonals = _expected(parts, script(*parts, x))
    for part in parts:
        extend(part)
    with backpack(BatchGrad(), BatchL2Grad(), BatchDiagGGNExact()):
        _loss(script, parts, x).backward()
    parameters = [p for part in parts for p in part.parameters()]
    assert parameters[-1].grad is not None
    for p, gradient, diagonal in zip(parameters, gradients, diagonals, strict=True):
        if p.grad is None:  # behind what was detached
            continue
        torch.testing.assert_close(p.grad_batch, gradient)  # type: ignore[attr-defined]
        squares = gradient.flatten(1).square().sum(1)
        torch.testing.assert_close(p.batch_l2, squares)  # type: ignore[attr-defined]
        torch.testing.assert_close(p.diag_ggn_exact_batch, diagonal)  # type: ignore[attr-defined]


@pytest.mark.parametrize("script", [_two_batches, _joined_batches])
@pytest.mark.parametrize("check", ["first", "never"])
def test_batches_of_other_samples_are_refused(script: Script, check: Any) -> None:
    parts, x = _modules()
    for part in parts:
        extend(part)
    with (
        pytest.raises(ShapeError, match=r"and another for .* nothing says which"),
        backpack(BatchGrad(), check=check),
    ):
        _loss(script, parts, x).backward()


@pytest.mark.parametrize("check", ["first", "never"])
def test_batches_in_functional_losses_are_refused(check: Any) -> None:
    """Points inside and on the boundary, as physics-informed losses have."""
    (model, _), x = _modules()
    extend(model)
    with pytest.raises(ShapeError, match="nothing says which"), backpack(BatchGrad(), check=check):
        (model(x[:, 0]).square().mean() + model(x[:2, 1].clone()).square().mean()).backward()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_in_extended_losses_are_refused_with_the_cause(rows: int) -> None:
    (model, _), x = _modules()
    points, lossfunc = torch.randn(rows, D).double(), extend(nn.MSELoss())
    inside, border = extend(model)(x[:, 0].clone()), model(points)
    loss = lossfunc(inside, inside.detach()) + lossfunc(border, border.detach())
    with (
        pytest.raises(ShapeError, match="Call the model once for all of them"),
        backpack(DiagGGNExact()),
    ):
        loss.backward()


def test_several_entries_of_each_sample_are_known_by_what_is_made_of_them() -> None:
    (model, head), x = _modules()
    parameters = list(model.parameters())

    def losses() -> Tensor:
        return (model(x.flatten(0, 1)).view(N, 3, C).sum(1) * head(x[:, 0]).detach()).exp().sum(1)

    expected = [torch.autograd.grad(one, parameters, retain_graph=True) for one in losses()]
    extend(model), extend(head)
    with backpack(BatchGrad()):
        (losses() * (head(x[:, 0]).sum(1) * 0 + 1)).sum().backward()
    for k, p in enumerate(parameters):
        rows = torch.stack([gradient[k] for gradient in expected])
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [2, 3])
def test_products_need_no_samples_where_a_loss_has_fewer_rows(rows: int) -> None:
    model, x = nn.Linear(D, C).double(), torch.randn(2 * rows, D).double()
    mean = x.view(rows, 2, D).mean(1)
    p = model(mean).softmax(1).detach()
    hessian = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / rows
    expected = torch.einsum("ni,nab,nj->aibj", mean, hessian, mean)
    model, lossfunc = extend(model), extend(nn.CrossEntropyLoss())
    with backpack(GGNMP()):
        lossfunc(model(x).view(rows, 2, C).mean(1), torch.arange(rows)).backward()
    eye = torch.eye(C * D).double()
    found = model.weight.ggnmp(eye.view(-1, C, D))  # type: ignore[operator]
    torch.testing.assert_close(found.view(C * D, -1), expected.reshape(C * D, -1))


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("samples", [1, 3, 4, 5])
def test_draws_on_a_new_first_axis_are_no_samples(samples: int, is_module: bool) -> None:
    """Exact, or refused: the decoder of a model with latent variables."""
    (encoder, decoder), x = _modules()
    x, draws = torch.randn(samples, D).double(), torch.randn(5, samples, C).double()

    def outputs(n: int | slice) -> Tensor:
        rows: Tensor = decoder(encoder(x[n]) + draws[:, n])
        return rows.flatten(0, 1)

    parameters = [*encoder.parameters(), *decoder.parameters()]
    rows = [slice(n, n + 1) for n in range(samples)]
    expected = [torch.autograd.grad(outputs(n).square().sum(), parameters) for n in rows]
    extend(encoder), extend(decoder)
    lossfunc: Any = extend(nn.MSELoss(reduction="sum")) if is_module else nn.functional.mse_loss
    settings = {} if is_module else {"reduction": "sum"}
    out = outputs(slice(samples))
    try:
        with backpack(BatchGrad()):
            lossfunc(out, torch.zeros_like(out), **settings).backward()
    except BackpackError:
        assert samples > 1
    else:
        for p, *own in zip(parameters, *expected, strict=True):
            torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [torch.tensor([3, 0]), slice(1, 3), slice(1, 4)])
def test_widths_that_are_as_long_as_the_batch(rows: Any) -> None:
    """A module with samples first says that these are on axis 0, whatever the lengths."""
    trunk, head, x = nn.Linear(D, N).double(), nn.Linear(N, N).double(), torch.randn(N, D).double()
    parameters, y = [*trunk.parameters(), *head.parameters()], torch.arange(N)
    expected = [[torch.zeros_like(p) for p in parameters] for _ in range(N)]
    for n in y[rows]:
        out = head(torch.tanh(trunk(x[n : n + 1])))
        loss = nn.functional.cross_entropy(out, y[n : n + 1], reduction="sum")
        expected[n] = [*torch.autograd.grad(loss, parameters)]
    lossfunc: Any = extend(nn.CrossEntropyLoss(reduction="sum"))
    extend(trunk), extend(head)
    with backpack(BatchGrad(), BatchL2Grad()):
        lossfunc(head(torch.tanh(trunk(x))[rows]), y[rows]).backward()
    for p, *own in zip(parameters, *expected, strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]
