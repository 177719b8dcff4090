"""Derivatives of losses, and likelihoods of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import extend
from backpack.core.derivatives import DERIVATIVES
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from tests.oracle import assert_close

N, V = 3, 2


LOSSES: dict[str, tuple[type[nn.Module], Callable[[], Tensor], int]] = {
    "MSELossDerivatives": (nn.MSELoss, lambda: torch.randn(N, 4), 4),
    "CrossEntropyLossDerivatives": (nn.CrossEntropyLoss, lambda: torch.arange(N), 4),
    "BCELossWithLogitsDerivatives": (
        nn.BCEWithLogitsLoss,
        lambda: torch.tensor([[0.0], [1.0], [1.0]]),
        1,
    ),
}


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: str, scale: float | None) -> None:
    kind, target, features = LOSSES[name]
    d: Any = DERIVATIVES[name]()
    module, x, y = extend(kind(reduction=reduction)), torch.randn(N, features), target()
    x.requires_grad_()
    module(x, y)
    full = torch.autograd.functional.hessian(lambda x: module.forward(x, y), x)
    hessians = (scale or 1.0) * torch.stack([full[n, :, n] for n in range(N)])
    g_out = None if scale is None else (torch.tensor(scale),)
    root = d.sqrt_hessian(module, None, g_out)
    assert_close(torch.einsum("vni,vnj->nij", root, root), hessians)
    few = d.sqrt_hessian(module, None, g_out, subsampling=[2, 0])
    assert_close(torch.einsum("vni,vnj->nij", few, few), hessians[[2, 0]])
    assert_close(d.sum_hessian(module, None, g_out), hessians.sum(0))
    mat = torch.randn(V, N, features)
    product = d.make_hessian_mat_prod(module, None, g_out)
    assert_close(product(mat), torch.einsum("nij,vnj->vni", hessians, mat))
    assert_close(product(mat[0]), torch.einsum("nij,nj->ni", hessians, mat[0]))
    assert d.hessian_is_psd()
    many = d.sqrt_hessian_sampled(module, None, g_out, mc_samples=20_000)
    # standard error below 1 % of the largest entry
    error = torch.einsum("vni,vnj->nij", many, many) - hessians
    assert error.abs().max() < 0.05 * hessians.abs().max()
    assert d.compute_sampled_grads(x, 5).shape == (5, N, features)


def test_the_summed_hessian_has_the_axes_of_one_input() -> None:
    d: Any = DERIVATIVES["CrossEntropyLossDerivatives"]()
    module, x = extend(nn.CrossEntropyLoss()), torch.randn(N, 4, 3)
    y = torch.randint(4, (N, 3))
    x.requires_grad_()
    module(x, y)
    full = torch.autograd.functional.hessian(lambda x: module.forward(x, y), x)
    assert_close(d.sum_hessian(module, None, None), sum(full[n, :, :, n] for n in range(N)))


def test_no_particular_loss() -> None:
    d: Any = NLLLossDerivatives()
    linear = extend(nn.Linear(3, 2))
    linear(torch.randn(N, 3))
    with pytest.raises(NotImplementedError, match="no particular loss"):
        d.compute_sampled_grads(torch.zeros(1, 1), 1)
    with pytest.raises(NotImplementedError, match="_compute_sampled_grads_manual"):
        NLLLossDerivatives(use_autograd=False).compute_sampled_grads(torch.zeros(1, 1), 1)
    with pytest.raises(NotImplementedError):
        d.hessian_is_psd()
    with pytest.raises(NotImplementedError, match="not a loss"):
        d.sqrt_hessian(linear, None, None)


@pytest.mark.parametrize("name", LOSSES)
def test_distributions(name: str) -> None:
    """The negative logarithm of the likelihood is the loss, up to a constant."""
    kind, target, features = LOSSES[name]
    d: Any = DERIVATIVES[name]()
    first, second, y = torch.randn(N, features), torch.randn(N, features), target()
    drops = [-d._make_distribution(x).log_prob(y).sum() for x in (first, second)]
    lossfunc = kind(reduction="sum")
    assert_close(drops[0] - drops[1], lossfunc(first, y) - lossfunc(second, y))
    mean = kind(reduction="mean")(first, y)
    assert_close(lossfunc(first, y) / d._get_mean_normalization(first), mean)


class Likelihood(nn.PoissonNLLLoss):
    """A loss that no rule of its own is needed for."""


class Poisson(NLLLossDerivatives):
    def _make_distribution(self, subsampled_input: Tensor) -> Any:
        return torch.distributions.Poisson(subsampled_input.exp())

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel()


def sampled(x: Tensor, samples: int, scale: float | None = None, reduction: str = "sum") -> Tensor:
    """A root for the samples 2 and 0, which is the same for one seed of torch."""
    module = extend(Likelihood(reduction=reduction))
    module(x, torch.ones_like(x))
    g_out = None if scale is None else (torch.tensor(scale),)
    torch.manual_seed(0)
    root: Tensor = Poisson().sqrt_hessian_sampled(module, None, g_out, samples, subsampling=[2, 0])
    return root


def test_a_likelihood_of_one_s_own() -> None:
    x = torch.randn(N, 2, requires_grad=True)
    root = sampled(x, 20_000)
    found = torch.einsum("vni,vnj->nij", root, root)
    expected = torch.diag_embed(x.detach().exp())[[2, 0]]
    # The standard error of a squared Poisson deviation is about 1.5 % here.
    assert (found - expected).abs().max() < 0.08 * expected.abs().max()


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scale_of_a_likelihood_of_one_s_own(reduction: str, scale: float | None) -> None:
    x = torch.randn(N, 2, requires_grad=True)
    factor = (scale or 1.0) / (x.numel() if reduction == "mean" else 1)
    assert_close(sampled(x, 5, scale, reduction), factor**0.5 * sampled(x, 5))


def test_a_likelihood_of_one_s_own_refuses() -> None:
    x = torch.randn(N, 2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="_get_mean_normalization"):
        NLLLossDerivatives._get_mean_normalization(x)
    with pytest.raises(NotImplementedError, match="negative"):
        sampled(x, 1, scale=-1.0)
