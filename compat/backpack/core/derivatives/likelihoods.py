"""Losses that are negative logarithms of likelihoods. Imports layer rules for modules."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss

from backpack.core.derivatives.basederivatives import BaseLossDerivatives, Subsampling
from backpack.utils.tensors import subsample
from backpack_compat.views import Grads, loss_rule_for, made_view, view_of
from backpack_core.errors import UnsupportedError

__all__ = [
    "BCEWithLogitsDerivatives",
    "CrossEntropyDerivatives",
    "MSEDerivatives",
    "NLLLossDerivatives",
]

_LIKELIHOODS: dict[type[Module], Callable[[Tensor], Distribution]] = {
    MSELoss: lambda x: Normal(x, x.new_tensor(sqrt(0.5))),
    CrossEntropyLoss: lambda x: Categorical(logits=x.movedim(1, -1)),
    BCEWithLogitsLoss: lambda x: Bernoulli(logits=x),
}


class NLLLossDerivatives(BaseLossDerivatives):
    """A loss that is the negative logarithm of a likelihood, ``-c log p(y | x)``.

    A subclass for a new loss writes ``_make_distribution`` (or ``_compute_sampled_grads_manual``,
    for ``use_autograd=False``), and ``_get_mean_normalization`` if the loss is averaged. A loss
    with a layer rule is sampled by that.

    Args:
        use_autograd: Whether gradients of a new likelihood come from automatic differentiation.
    """

    def __init__(self, use_autograd: bool = True) -> None:
        self.use_autograd = use_autograd

    def compute_sampled_grads(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """Gradients of a summed loss, for targets drawn from the likelihood.

        Args:
            subsampled_input: Input of the loss ``[N, *in]``.
            mc_samples: How many targets to draw for each sample.

        Returns:
            Shape ``[mc_samples, N, *in]``.
        """
        if not self._has_own_likelihood:
            return self._by_rule(subsampled_input, mc_samples)
        if self.use_autograd:
            return self._compute_sampled_grads_autograd(subsampled_input, mc_samples)
        return self._compute_sampled_grads_manual(subsampled_input, mc_samples)

    @property
    def _has_own_likelihood(self) -> bool:
        """Whether a subclass defines a distribution; otherwise the layer rule samples."""
        base, own = NLLLossDerivatives, type(self)
        names = ("_make_distribution", "_compute_sampled_grads_manual")
        return self.module_type is None or any(
            getattr(own, name) is not getattr(base, name) for name in names
        )

    def _by_rule(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        assert self.module_type is not None
        loss = self.module_type(reduction="sum")
        x = subsampled_input.detach()
        target = torch.zeros_like(x)
        if isinstance(loss, CrossEntropyLoss):
            target = target.select(1, 0).long()
        value, rule = loss(x, target), loss_rule_for(loss)
        view = made_view(loss, (x, target), value, torch.ones_like(value))
        rule.check(view)
        return rule.sqrt_hessian_sampled(view, mc_samples) * sqrt(mc_samples)

    def _compute_sampled_grads_autograd(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """The same, by differentiating the logarithm of the distribution."""
        x = subsampled_input.detach().requires_grad_()
        gradients: list[Tensor] = []
        with torch.enable_grad():
            distribution = self._make_distribution(x)
            for _ in range(mc_samples):
                target = distribution.sample()
                value = -distribution.log_prob(target).sum()
                gradients += torch.autograd.grad(value, x, retain_graph=True)
        return torch.stack(gradients)

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """The same, by a formula. Shape ``[mc_samples, N, *in]``."""
        raise UnsupportedError(
            f"{type(self).__name__} draws without automatic differentiation: implement "
            "_compute_sampled_grads_manual(subsampled_input, mc_samples)."
        )

    def _make_distribution(self, subsampled_input: Tensor) -> Distribution:
        """The distribution of targets, with ``sample()`` and ``log_prob(value)``.

        Args:
            subsampled_input: Input of the loss ``[N, *in]``.
        """
        if self.module_type not in _LIKELIHOODS:
            raise UnsupportedError(
                f"{type(self).__name__} stands for no particular loss: implement "
                "_make_distribution(subsampled_input)."
            )
        return _LIKELIHOODS[self.module_type](subsampled_input)

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        """The number that a mean divides the sum of losses by, from the input of all samples."""
        raise UnsupportedError(
            "A sampled root of an averaged loss needs _get_mean_normalization(input): implement "
            "it, and return the number that the mean divides the sum by."
        )

    def _verify_support(self, module: Module) -> None:
        """Raise an error if the loss has settings that the distribution lacks; default: never."""

    def _sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
    ) -> Tensor:
        if not self._has_own_likelihood:
            return super()._sqrt_hessian_sampled(module, g_inp, g_out, mc_samples, subsampling)
        self._verify_support(module)
        view = view_of(module)
        drawn = subsample(view.input, subsampling=subsampling)
        root = self.compute_sampled_grads(drawn, mc_samples) / sqrt(mc_samples)
        if getattr(module, "reduction", "sum") == "mean":
            root = root / sqrt(self._get_mean_normalization(view.input))
        return root if not g_out else root * _root_of_gradient(module, g_out[0])


def _root_of_gradient(module: Module, gradient: Tensor) -> Tensor:
    if gradient.dim() or bool(gradient < 0):
        raise UnsupportedError(
            f"A sampled root at {type(module).__name__} takes a single gradient that is not "
            f"negative. Got one of shape {list(gradient.shape)}: reduce the loss to a number, and "
            "do not multiply it by a negative one."
        )
    return gradient.sqrt()


class MSEDerivatives(NLLLossDerivatives):
    """Base of :class:`MSELossDerivatives`."""

    module_type = MSELoss

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        """The number of entries."""
        return input.numel()


class CrossEntropyDerivatives(NLLLossDerivatives):
    """Base of :class:`CrossEntropyLossDerivatives`."""

    module_type = CrossEntropyLoss

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd)

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        """The number of targets."""
        return input.numel() // input.shape[1]


class BCEWithLogitsDerivatives(NLLLossDerivatives):
    """Base of :class:`BCELossWithLogitsDerivatives`."""

    module_type = BCEWithLogitsLoss

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd)

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        """The number of entries."""
        return input.numel()
