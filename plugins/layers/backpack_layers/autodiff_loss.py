"""Any loss that is a sum over samples: its Hessian in the output by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module
from torch.random import fork_rng

from backpack_core.errors import SampleMixingError, UnsupportedError, UsageError
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_layers._loss import check_arguments, finite_sqrt
from backpack_operations.nodes import is_function
from backpack_operations.order import behind
from backpack_products.loss import HessianLossRule
from backpack_products.nested import map_tensors
from backpack_products.values import any_of, at_least_single

Reduction = Literal["mean", "sum", "none"]
Negative = Literal["refuse", "clip", "abs"]
Likelihood = Callable[[Tensor], Distribution]


class AutodiffLoss(Module):
    """Any loss function without a rule of its own.

    Curvature starts at its Hessian in the output, ``[N, D, D]`` for ``D`` numbers per sample.
    Autograd finds it by ``D`` products for all samples at once. So the function must be twice
    differentiable, and a sum over samples; the latter is measured.

    Roots (of ``DiagGGNExact``, ``KFLR``, ``SqrtGGNExact``, ...) come from eigenvalues. Products and
    the Hessian's diagonal (``GGNMP``, ``DiagHessian``) are exact for any ``negative``.

    Args:
        function: A module or function of output and further arguments. It returns the losses of
            the samples, ``[N, *]``, or their mean or sum as a number.
        reduction: How losses ``[N, *]`` are reduced: the sum of each sample's losses, then a mean
            over samples, a sum, or nothing more. If the function returns a number, it says whether
            that is a mean or a sum.
        negative: What is done to negative eigenvalues in roots: ``"refuse"``, ``"clip"`` (set to
            zero) or ``"abs"`` (made positive).
        likelihood: The distribution of targets, from outputs ``[N, *]`` to an object of
            ``torch.distributions``, if each sample's loss is its negative logarithm up to a
            constant. Monte-Carlo quantities (``KFAC``, ``DiagGGNMC``) draw from it, if the function
            returns the losses of the samples.

    Example:
        >>> lossfunc = extend(AutodiffLoss(focal, likelihood=lambda x: Categorical(logits=x)))
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        reduction: Reduction = "mean",
        negative: Negative = "refuse",
        likelihood: Likelihood | None = None,
    ) -> None:
        """Store the settings; see the class.

        Args:
            function: See the class.
            reduction: See the class.
            negative: See the class.
            likelihood: See the class.

        Raises:
            UsageError: A setting is unknown, or ``function`` or ``likelihood`` is not a function.
        """
        super().__init__()
        for name, word, known in (
            ("reduction", reduction, get_args(Reduction)),
            ("negative", negative, get_args(Negative)),
        ):
            if word not in known:
                raise UsageError(f"{name} must be one of {known}. Got {word!r}.")
        if not callable(function) or isinstance(function, type):
            raise UsageError(f"function must be a loss of output and target. Got {function!r}.")
        if likelihood is not None and not callable(likelihood):
            raise UsageError(
                "likelihood must be a function from outputs to a distribution, such as "
                f"lambda x: Categorical(logits=x). Got {likelihood!r}."
            )
        self.function = function
        self.reduction, self.negative, self.likelihood = reduction, negative, likelihood

    @classmethod
    def of_likelihood(cls, likelihood: Likelihood, reduction: Reduction = "mean") -> AutodiffLoss:
        """The negative logarithm of a likelihood, of output and target.

        Args:
            likelihood: From outputs ``[N, *]`` to an object of ``torch.distributions``.
            reduction: See the class.
        """
        return cls(
            lambda output, target: -likelihood(output).log_prob(target),
            reduction,
            likelihood=likelihood,
        )

    def forward(self, output: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """The loss, a number; without a reduction ``[N]``.

        Raises:
            UsageError: The output is not one tensor with samples, or the function did not return a
                number or the losses of the samples.
        """
        given: Any = output
        if not isinstance(given, Tensor) or not given.dim():
            raise UsageError(
                "AutodiffLoss takes one tensor with samples, [N, *], as the output. If the model "
                "returns several, join them, torch.cat([a, b], 1), and take them apart in the "
                f"function. Got {'[]' if isinstance(given, Tensor) else type(given).__name__}."
            )
        losses: Any = self.function(output, *arguments, **keywords)
        if not isinstance(losses, Tensor) or (losses.dim() and len(losses) != len(output)):
            raise UsageError(
                "The function of AutodiffLoss must return a number, or the losses of the samples, "
                f"[{len(output)}, *]. Got "
                f"{list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__}."
            )
        if losses.dim() == 0:
            return self._number(losses)
        each = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
        loss: Tensor = each if self.reduction == "none" else each.sum() * self.normalisation(output)
        return loss

    def _number(self, loss: Tensor) -> Tensor:
        if self.reduction == "none":
            raise UsageError(
                'AutodiffLoss has reduction="none", and its function returns a number: have it '
                "return the losses of the samples, or say which reduction it is."
            )
        return loss

    def normalisation(self, output: Tensor) -> float:
        """The factor in front of the sum over samples."""
        return 1.0 / max(1, len(output)) if self.reduction == "mean" else 1.0

    def extra_repr(self) -> str:
        """The settings."""
        name = "" if isinstance(self.function, Module) else f"{self.function!r}, "
        return f"{name}{self.reduction!r}, negative={self.negative!r}"


class AutodiffLossRule(HessianLossRule):
    """The rule of :class:`AutodiffLoss`, and of loss modules with the same settings."""

    module_types = (AutodiffLoss,)
    calls_others = True

    def check_terms(self, view: View) -> None:
        """The input needs samples."""
        check_arguments(view, axes=1)

    def normalisation(self, view: View) -> float:
        """A mean is over samples."""
        return _module(view).normalisation(view.full.input)

    def check_apart(self, view: View, owners: Tensor | None) -> None:
        """Measure whether the gradient of some samples depends on others, where it has one."""
        x = view.full.input
        # It may draw random numbers, which those of the pass do not depend on.
        with fork_rng([x.device] if x.device.type == "cuda" else []):
            try:
                _see_apart(view, *self._gradient_again(view), owners)
            except SampleMixingError:
                raise
            except RuntimeError:  # torch has no second derivative
                return

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        x, gradient = self._gradient(view)
        if view.indices is None:
            return _differentiated(gradient, x, mat)
        # A sample that was named twice has separate columns each time.
        products = [
            _differentiated(gradient, x, _alone(mat[:, place], n, x))[:, n]
            for place, n in enumerate(view.indices)
        ]
        return torch.stack(products, 1)

    def _sqrt_hessian(self, view: View) -> Tensor:
        size, samples = view.input_shape[1:].numel(), view.batch_size
        eye = torch.eye(size, dtype=view.dtype, device=view.device)
        columns = eye.reshape(size, 1, *view.input_shape[1:]).expand(-1, *view.input_shape)
        blocks = self._hessian_mat_prod(view, columns).reshape(size, samples, size).transpose(0, 1)
        values, vectors = torch.linalg.eigh(at_least_single((blocks + blocks.mT) / 2))
        root = vectors * finite_sqrt(self._positive(view, values)).unsqueeze(1)
        found: Tensor = root.permute(2, 0, 1).reshape(size, *view.input_shape)
        return found.to(view.dtype)

    def _positive(self, view: View, values: Tensor) -> Tensor:
        """Eigenvalues ``[N, D]`` to take roots of; some may be negative if no pass is measured."""
        negative = _module(view).negative
        if negative == "abs":
            return values.abs()
        if negative == "clip":
            return values.clamp(min=0)
        rounding = 100 * values.shape[-1] * torch.finfo(values.dtype).eps
        small = values.abs().amax(-1, keepdim=True) * rounding
        if view.is_measured and any_of(values < -small):
            lowest = float(values.min())
            raise UnsupportedError(
                f"The Hessian of {view.path} in the output has the negative eigenvalue "
                f"{lowest:.3g}, so it has no real square root. Say how to treat negative "
                'eigenvalues, by AutodiffLoss(..., negative="clip") or "abs", or use DiagHessian '
                "or HMP, which need no root."
            )
        return torch.where(values < -small, values, values.clamp(min=0))

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        likelihood = _module(view).likelihood
        if likelihood is None:
            raise UnsupportedError(
                f"{view.path} has no likelihood to draw targets from: write AutodiffLoss(..., "
                "likelihood=lambda output: Categorical(logits=output)), or use the exact quantity "
                "instead of the Monte-Carlo one."
            )
        whole = view.full
        with disable(), torch.no_grad():
            losses = _module(view).function(*whole.args, **whole.kwargs)
        if not losses.dim():
            raise UnsupportedError(
                f"The function of {view.path} returns a number. Sampling needs to know whether "
                "that is a mean over samples or over all their elements: return the losses of the "
                "samples, [N, *], or use the exact quantity instead."
            )
        x = view.input if view.is_differentiable else view.input.detach()
        with torch.enable_grad():
            drawn = x.expand(samples, *x.shape).flatten(0, 1)
            drawn = drawn if drawn.requires_grad else drawn.clone().requires_grad_()
            distribution = likelihood(drawn)
            if not isinstance(distribution, Distribution):
                raise UsageError(
                    "likelihood must return an object of torch.distributions. Got "
                    f"{type(distribution).__name__}."
                )
            surprise = -distribution.log_prob(distribution.sample()).sum()
            (gradient,) = torch.autograd.grad(surprise, drawn, create_graph=view.is_differentiable)
        scale = (self.normalisation(view) / samples) ** 0.5
        found: Tensor = gradient.unflatten(0, (samples, len(x))) * scale
        return found

    def _gradient(self, view: View) -> tuple[Tensor, Tensor]:
        """The output of all samples, and the gradient of the loss there, with its graph."""
        found: tuple[Tensor, Tensor] = view.once("gradient", lambda: self._differentiate(view))
        return found

    def _differentiate(self, view: View) -> tuple[Tensor, Tensor]:
        x, gradient = self._gradient_again(view)
        if view.is_measured:
            point = x.detach().requires_grad_()
            value, again = self._gradient_at(view, point)
            _see_same(view, gradient, again)
            _see_apart(view, x, gradient)
            if any(map(is_function, behind([value.grad_fn]))):
                self._see_slope(view, point, again)
        return x, gradient

    def _gradient_again(self, view: View) -> tuple[Tensor, Tensor]:
        x = view.full.input
        if not (view.is_differentiable and x.requires_grad):
            x = x.detach().requires_grad_()
        return x, self._gradient_at(view, x)[1]

    def _gradient_at(self, view: View, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss at some output, summed, and its gradient there."""
        whole = view.full
        first = whole.values.inputs[0]
        args, kwargs = map_tensors((whole.args, whole.kwargs), lambda t: x if t is first else t)
        with disable(), torch.enable_grad():
            value = whole.module(*args, **kwargs).sum()
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value, gradient

    def _see_slope(self, view: View, x: Tensor, gradient: Tensor) -> None:
        """Raise if a function of the user's differentiates its gradient wrongly, or not at all.

        Its ``backward`` may return what was computed without a graph, in the forward pass for
        example. Differences are compared by sample, since kinks make them wrong at a few.
        """
        step = torch.finfo(x.dtype).eps ** (1 / 3) * (1 + x.detach().abs().amax())
        direction = _noise(x)
        ends = [
            self._gradient_at(view, (x + sign * step * direction).detach().requires_grad_())[1]
            for sign in (1, -1)
        ]
        change = ((ends[0] - ends[1]) / (2 * step)).detach()
        product = _differentiated(gradient, x, direction.unsqueeze(0))[0].detach()
        wrong, size, rounded = (
            t.abs().reshape(len(x), -1).sum(1)
            for t in (change - product, change.abs() + product.abs(), gradient.detach())
        )
        rounding = 100 * torch.finfo(x.dtype).eps / step * rounded
        if any_of((wrong > 0.1 * size + rounding).sum() * 2 > len(x)):
            raise UnsupportedError(
                f"The function of {view.path} uses an autograd.Function whose backward() cannot be "
                "differentiated, so the loss would lack curvature. Write its backward() in "
                "differentiable operations of what it saved by save_for_backward, without "
                "once_differentiable, or write the loss without it."
            )


def _module(view: View) -> AutodiffLoss:
    return cast(AutodiffLoss, view.module)


def _alone(columns: Tensor, sample: int, like: Tensor) -> Tensor:
    """Columns ``[V, *]`` of one sample among zeros for all others."""
    alone = like.new_zeros(len(columns), *like.shape)
    alone[:, sample] = columns
    return alone


def _differentiated(gradient: Tensor, x: Tensor, mat: Tensor) -> Tensor:
    """``∂gradient/∂x`` times columns ``[V, N, *]``: by vmap, or one by one if vmap fails."""
    if not gradient.requires_grad or not len(mat):
        return torch.zeros_like(mat)
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    options["create_graph"] = torch.is_grad_enabled()
    try:
        (found,) = torch.autograd.grad(gradient, x, mat, is_grads_batched=True, **options)
    except RuntimeError:  # the user's formula may hold what vmap cannot batch
        try:
            rows = [torch.autograd.grad(gradient, x, row, **options)[0] for row in mat]
        except RuntimeError as error:
            if "derivative for" not in str(error):
                raise
            raise UnsupportedError(
                "The function of an AutodiffLoss has no second derivative, which curvature needs "
                f"({str(error).splitlines()[0]}). Write it with operations that have one, or leave "
                "curvature out: gradients of samples and their norms do not need it."
            ) from error
        found = torch.stack(rows)
    product: Tensor = found
    return product


def _noise(x: Tensor) -> Tensor:
    """Numbers between 0.5 and 1.5, the same each time."""
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) + 0.5


def _see_same(view: View, gradient: Tensor, again: Tensor) -> None:
    """Raise if two runs of the loss differ: the forward pass was a third one."""
    first, second = gradient.detach(), again.detach()
    bound = torch.finfo(first.dtype).eps ** 0.6 * first.abs().sum()
    if any_of((second - first).abs() > bound):
        raise UnsupportedError(
            f"{view.path} gives another loss when it runs again, as if it drew random numbers, so "
            "its Hessian would be that of another loss. Draw the numbers before, and pass them to "
            "the loss as an argument, or use HMP, which does not run it again."
        )


def _see_apart(view: View, x: Tensor, gradient: Tensor, owners: Tensor | None = None) -> None:
    """Raise if the gradient of some samples depends on others; rows are samples, or have owners."""
    if len(x) < 2:
        return
    owners = torch.arange(len(x)) if owners is None else owners
    chosen = (owners.to(x.device) % 2 == 0).reshape(-1, *[1] * (x.dim() - 1))
    product = _differentiated(gradient, x, (_noise(x) * chosen).unsqueeze(0))[0]
    spilt = (product * ~chosen).abs().amax()
    if any_of(spilt > 1e3 * torch.finfo(x.dtype).eps * product.abs().amax()):
        raise SampleMixingError(
            f"{view.path} makes samples influence each other, so no sample has a gradient or a "
            "Hessian of its own. Return the loss of each sample (compute a Dice loss or a ratio by "
            "sample, not from sums over the batch), or use HMP, which needs no samples."
        )
