"""Rules for losses on class targets."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers._loss import (
    ElementwiseLossRule,
    LinearLossRule,
    broadcast,
    check_arguments,
    module_tensor,
    real_sqrt,
    restrict,
    setting,
)
from backpack_layers.arguments import tensor
from backpack_layers.categorical import drawn
from backpack_layers.softmax_root import softmax_root
from backpack_products.loss import HessianLossRule, arriving_factor
from backpack_products.values import at_least_single, has_double


class SoftmaxLossRule(HessianLossRule):
    """``ℓ = -Σ_c q_c log p_c`` at each position, with ``p = softmax(x)``.

    The Hessian ``(Σ_c q_c) (diag p - p pᵀ)`` depends on the target only by its total weight, so
    every option is a factor in front of the Fisher information of the softmax. So labels are
    sampled from ``p``, and the total weight is that of the actual target.

    Positions do not mix: the exact square root has ``V = (C - 1) · positions`` columns, see
    :func:`softmax_root`. One sampled column serves all positions, because their draws are
    independent.
    """

    hessian_is_psd = True
    likelihood = "categorical with probabilities softmax(x)"

    @abstractmethod
    def by_position(self, view: View, x: Tensor) -> Tensor:
        """Numbers at the input, by position: ``[..., N, *in] → [..., N, C, S]``."""

    @abstractmethod
    def at_input(self, view: View, mat: Tensor) -> Tensor:
        """Back from there: ``[..., N, C, S] → [..., N, *in]``."""

    @abstractmethod
    def weight(self, view: View) -> Tensor:
        """The factor in front of ``diag p - p pᵀ``, reduction included. Shape ``[N, 1, S]``."""

    def _sqrt_hessian(self, view: View) -> Tensor:
        factor = real_sqrt(view, self.weight(view))
        half = softmax_root(self.by_position(view, view.input), factor)
        if half.shape[3] != 1:
            half = torch.diag_embed(half, dim1=1, dim2=-1).flatten(0, 1)
        return self.at_input(view, half.to(view.input.dtype))

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        x = self.by_position(view, view.input)
        p = _chances(x)
        positions = p.shape[2]
        rows = p.detach().transpose(1, 2).flatten(0, 1)  # [N · S, C]
        labels = drawn(rows, samples).T.reshape(samples, p.shape[0], 1, positions)
        # One column of logits may be as large as all activations: nobody else needs the chances.
        is_own = samples == 1 and not torch.is_grad_enabled()
        gradient = p.unsqueeze(0) if is_own else p.expand(samples, *p.shape).clone()
        gradient.scatter_add_(2, labels, p.new_full((1,), -1.0).expand(labels.shape))
        factor = real_sqrt(view, self.weight(view) / samples).to(x.dtype)
        columns = gradient * factor if torch.is_grad_enabled() else gradient.mul_(factor)
        return self.at_input(view, columns.to(x.dtype))

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        x = self.by_position(view, view.input)
        p, vectors = _chances(x), self.by_position(view, mat)
        # Equal entries for all classes give zero. Without that of the likeliest class, whose
        # probability may be nearly one, large numbers do not cancel.
        likeliest = p.argmax(1, keepdim=True).expand(len(vectors), -1, -1, -1)
        weighted = p * (vectors - vectors.gather(2, likeliest))
        product = weighted - p * weighted.sum(2, keepdim=True)
        return self.at_input(view, (product * self.weight(view)).to(mat.dtype))


def _chances(x: Tensor) -> Tensor:
    """The softmax of logits ``[N, C, S]``, in their order in memory: reordering takes as long.

    At least in single precision, like the exact root: rounding would change probabilities.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.stride(1) == 1:
        return x.transpose(1, 2).softmax(2, dtype=dtype).transpose(1, 2)
    return x.softmax(1, dtype=dtype)


class CrossEntropyLossRule(SoftmaxLossRule):
    """Classes on axis 1; ``q_c = w_c t_c`` for class weights ``w`` and the smoothed target ``t``.

    ``t`` is one-hot or holds probabilities. Axes 2, 3, ... are positions.
    """

    module_types = (nn.CrossEntropyLoss,)

    def is_convex(self, view: View) -> bool:
        """Without class weights, for targets that are indices: others may be negative."""
        target = tensor(view.full, "target")
        return module_tensor(view, "weight") is None and not target.is_floating_point()

    def check_terms(self, view: View) -> None:
        """The input needs a batch and a class axis."""
        check_arguments(view, axes=2)

    def normalisation(self, view: View) -> float | Tensor:
        """A mean divides by the weights of the targets, or counts positions for probabilities."""
        return _mean_over_targets(view, setting(view, "label_smoothing"))

    def by_position(self, view: View, x: Tensor) -> Tensor:
        """Merge axes 2, 3, ... into one."""
        lead = x.dim() - len(view.input_shape) + 2
        return x.reshape(*x.shape[:lead], x.shape[lead:].numel())

    def at_input(self, view: View, mat: Tensor) -> Tensor:
        """Split them again."""
        return mat.reshape(*mat.shape[:-3], *view.input_shape)

    def weight(self, view: View) -> Tensor:
        """The total weight of the target, and the mean."""
        return _factor(view)

    def sum_hessian(self, view: View) -> Tensor:
        """Sum over samples first, then form the blocks of positions."""
        p = _chances(_by_position(view.input))
        _, classes, positions = p.shape
        scale = arriving_factor(view)
        weighted = p * _factor(view) * (_by_position(scale) if scale.dim() else scale)
        products = torch.einsum("ncs,nds->cds", weighted, p)
        # p_c - p_c² as a sum over the other classes: nothing cancels.
        others = products * (1 - torch.eye(classes, dtype=p.dtype, device=p.device)).unsqueeze(2)
        blocks = torch.diag_embed(others.sum(1).T, dim1=0, dim2=1) - others
        size = classes * positions
        return torch.diag_embed(blocks, dim1=1, dim2=-1).reshape(size, size).to(view.dtype)


class NLLLossRule(LinearLossRule):
    """``ℓ = -w_y x_y`` for log-probabilities ``x``: linear."""

    module_types = (nn.NLLLoss,)
    instead = "For the curvature of a softmax model apply CrossEntropyLoss to the logits."

    def check_terms(self, view: View) -> None:
        """The input needs an axis of classes."""
        check_arguments(view, axes=2)

    def normalisation(self, view: View) -> float | Tensor:
        """A mean divides by the weights of the targets."""
        return _mean_over_targets(view)


class KLDivLossRule(LinearLossRule):
    """``ℓ = t (log t - x)`` for log-probabilities ``x``: linear."""

    module_types = (nn.KLDivLoss,)
    instead = "For the curvature of a softmax model apply CrossEntropyLoss to the logits."

    def normalisation(self, view: View) -> float | Tensor:
        """A mean is over elements, or over samples."""
        if setting(view, "reduction") == "batchmean":
            return 1.0 / max(1, view.full.input_shape[0])
        return super().normalisation(view)


class BCEWithLogitsLossRule(ElementwiseLossRule):
    """``ℓ = -w (a y log σ(x) + (1 - y) log σ(-x))`` with ``w = weight`` and ``a = pos_weight``.

    ``ℓ'' = w (1 + (a - 1) y) σ(x) σ(-x)``: weights are a factor in front of the Fisher information
    of the Bernoulli distribution. Labels are sampled from it, the factor is that of the target.
    """

    module_types = (nn.BCEWithLogitsLoss,)
    likelihood = "Bernoulli with probability σ(x)"
    is_never_negative = True

    def curvature(self, view: View) -> Tensor:
        """``w (1 + (a - 1) y) σ(x) σ(-x)``."""
        return _logistic_curvature(view.input) * self._weight(view)

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``√(w (1 + (a - 1) y)) (σ(x) - b)`` for ``b`` drawn from the likelihood."""
        return _logistic_sample(view.input, samples) * real_sqrt(view, self._weight(view))

    def _weight(self, view: View) -> Tensor:
        positive = module_tensor(view, "pos_weight")
        weight = _element_weight(view)
        if positive is None:
            return weight
        return weight * (1 + (broadcast(view, "pos_weight", positive) - 1) * self.target(view))


class BCELossRule(ElementwiseLossRule):
    """``ℓ = -w (y log x + (1 - y) log(1 - x))`` for probabilities ``x``.

    ``ℓ'' = w (y / x² + (1 - y) / (1 - x)²)`` is not the Fisher information ``w / (x (1 - x))``, so
    random signs are sampled. Torch clamps the logarithms at -100 in the loss, and divides by at
    least 1e-12 in its gradient; the curvature has neither bound.
    """

    module_types = (nn.BCELoss,)

    def curvature(self, view: View) -> Tensor:
        """``w (y / x² + (1 - y) / (1 - x)²)``."""
        x, target = at_least_single(view.input), self.target(view)
        # 0/0 if the target is 0 or 1 and x is at the pole: that term is zero.
        tiny = torch.finfo(x.dtype).tiny
        poles = x.clamp(min=tiny), (1 - x).clamp(min=tiny)
        positive = target / poles[0] / poles[0]
        negative = (1 - target) / poles[1] / poles[1]
        return (positive + negative) * _element_weight(view)


class SoftMarginLossRule(ElementwiseLossRule):
    """``ℓ = log(1 + exp(-y x))`` for labels ``y = ±1``: ``ℓ'' = y² σ(y x) σ(-y x)``."""

    module_types = (nn.SoftMarginLoss,)
    likelihood = "±1 with P(1) = σ(x)"
    is_never_negative = True

    def curvature(self, view: View) -> Tensor:
        """``y² σ(y x) σ(-y x)``."""
        target = self.target(view)
        return _logistic_curvature(target * view.input) * target**2

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``y (σ(y x) - b)`` for ``b`` drawn from the Bernoulli distribution of ``σ(y x)``."""
        target = self.target(view)
        return _logistic_sample(target * view.input, samples) * target


class MultiLabelSoftMarginLossRule(ElementwiseLossRule):
    """``ℓ_n = -Σ_c w_c (y_c log σ(x_c) + (1 - y_c) log σ(-x_c)) / C``."""

    module_types = (nn.MultiLabelSoftMarginLoss,)
    likelihood = "Bernoulli with probability σ(x), independent for each class"
    is_never_negative = True

    def check_terms(self, view: View) -> None:
        """The input is ``[N, C]``."""
        super().check_terms(view)
        if len(view.input_shape) != 2:
            raise UnsupportedError(
                f"Curvature of {view.path} is known for inputs [N, C], but it was called with "
                f"shape {list(view.input_shape)}: flatten or unsqueeze the input to two axes."
            )

    def curvature(self, view: View) -> Tensor:
        """``w_c σ(x) σ(-x) / C``."""
        return _logistic_curvature(view.input) * self._weight(view)

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """``√(w_c / C) (σ(x) - b)`` for ``b`` drawn from the likelihood."""
        return _logistic_sample(view.input, samples) * real_sqrt(view, self._weight(view))

    def normalisation(self, view: View) -> float:
        """A mean is over samples: the one over classes is part of the loss."""
        samples = view.full.input_shape[0] if setting(view, "reduction") == "mean" else 1
        return 1.0 / max(1, samples)

    def _weight(self, view: View) -> Tensor:
        return _element_weight(view) / view.input_shape[1]


def _mean_over_targets(view: View, smoothing: float = 0.0) -> float | Tensor:
    """One over the divisor of a mean, else one."""
    if setting(view, "reduction") != "mean":
        return 1.0
    divisor = _target_weight(view, smoothing)[1]
    return divisor.reciprocal() if isinstance(divisor, Tensor) else 1.0 / max(1, divisor)


def _target_weight(view: View, smoothing: float) -> tuple[Tensor, Tensor | int]:
    """Total weight ``Σ_c q_c`` of each target in the whole batch, and what a mean divides by.

    Returns:
        Shape ``[N, *positions]``, and a number.
    """
    whole = view.full
    return whole.once(f"target weight {smoothing}", lambda: _weigh_targets(whole, smoothing))


def _weigh_targets(whole: View, smoothing: float) -> tuple[Tensor, Tensor | int]:
    x, target = whole.input, tensor(whole, "target")
    weight = module_tensor(whole, "weight")
    if weight is None and target.shape != x.shape:
        kept = target != setting(whole, "ignore_index")
        kept = kept.to(torch.promote_types(x.dtype, torch.float32))
        return kept, kept.sum()
    weight = at_least_single(x.new_ones(x.shape[1]) if weight is None else weight)
    uniform = smoothing * weight.mean()
    if target.shape == x.shape:
        weighted = torch.einsum("nc...,c->n...", at_least_single(target), weight)
        return (1 - smoothing) * weighted + uniform, weighted.numel()
    kept = target != setting(whole, "ignore_index")
    # The ignored index may lie outside the classes.
    weighted = weight[torch.where(kept, target.long(), 0)] * kept
    return (1 - smoothing) * weighted + uniform * kept, weighted.sum()


def _factor(view: View) -> Tensor:
    """The factor in front of ``diag p - p pᵀ``, reduction included. Shape ``[N, 1, positions]``."""
    weight, divisor = _target_weight(view, setting(view, "label_smoothing"))
    if setting(view, "reduction") == "mean":
        # If every target is ignored, torch's gradient is zero; it is NaN if those that count weigh
        # nothing.
        if isinstance(divisor, Tensor) and module_tensor(view.full, "weight") is None:
            divisor = divisor.clamp(min=1)
        elif isinstance(divisor, Tensor):
            target = tensor(view.full, "target")
            divisor = divisor + ~(target != setting(view, "ignore_index")).any()
        weight = weight / divisor
    return _by_position(restrict(view, weight).unsqueeze(1))


def _by_position(x: Tensor) -> Tensor:
    """``[N, C, d1, ...] → [N, C, d1 · ...]``."""
    return x.reshape(*x.shape[:2], x.shape[2:].numel())


def _element_weight(view: View) -> Tensor:
    """The module's ``weight``, or ones, in the shape of the input."""
    weight = module_tensor(view, "weight")
    return torch.ones_like(view.input) if weight is None else broadcast(view, "weight", weight)


def _logistic_curvature(logits: Tensor) -> Tensor:
    """``σ(x) σ(-x)``, without the cancellation of ``1 - σ(x)``."""
    x = at_least_single(logits)
    return x.sigmoid() * (-x).sigmoid()


def _logistic_sample(logits: Tensor, samples: int) -> Tensor:
    """``σ(x) - b`` with ``b`` Bernoulli of probability ``σ(x)``. Shape ``[samples, *]``.

    What is drawn is the less likely value, since the probability of the other may round to one.
    Numbers are drawn in double precision if the device has it, so that rare values get their share.
    """
    x = at_least_single(logits)
    is_likely = x > 0
    rare = torch.where(is_likely, -x, x).sigmoid()
    shape = (samples, *x.shape)
    wide = torch.float64 if has_double(x.device) else x.dtype
    hit = (torch.rand(shape, dtype=wide, device=x.device) < rare.detach()).to(x.dtype)
    return torch.where(is_likely, hit - rare, rare - hit)
