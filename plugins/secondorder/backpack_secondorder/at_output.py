"""A loss as a function of the model's output: its derivatives there, and its normaliser."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import View, backpack, extend
from backpack_core.contract.rules import LossRule
from backpack_core.errors import ShapeError, UsageError
from backpack_core.plugins.registry import registry
from backpack_products.contexts import suspended
from backpack_products.loss import with_hessian
from backpack_secondorder.twice import gradients
from backpack_secondorder.whole import GraphExtension, GraphReading, LossGraph

Normaliser: TypeAlias = Literal["mean", "sum"] | Callable[[Tensor, Any], float | Tensor]


@dataclass(frozen=True, eq=False)
class AtOutput:
    """The loss of one batch at an output.

    Attributes:
        output: The output, detached, ``[N, *]``.
        loss: The loss, a number without a graph.
        gradient: ``∂ℓ/∂output`` with its graph, ``[N, *]``.
        normaliser: The number by which the loss divides the sum over samples: ``N`` for a mean,
            ``None`` for a sum.
        root: Columns ``S[m, n]``, ``[M, N, *]``; :meth:`root_product` multiplies with the sum of
            their outer products. ``None`` if no root was asked for.
    """

    output: Tensor
    loss: Tensor
    gradient: Tensor
    normaliser: float | None
    root: Tensor | None

    def hessian_product(self, vector: Tensor) -> Tensor:
        """``∂²ℓ/∂output²`` times a vector ``[N, *]``."""
        if not self.gradient.requires_grad:
            return torch.zeros_like(vector)
        with suspended():
            (product,) = torch.autograd.grad(
                self.gradient, self.output, vector, retain_graph=True, materialize_grads=True
            )
        return product

    def root_product(self, vector: Tensor) -> Tensor:
        """``Σ_m S[m, n] ⟨S[m, n], vector[n]⟩``, shape ``[N, *]``."""
        assert self.root is not None
        root = self.root.flatten(2)
        inner = torch.einsum("mni,ni->mn", root, vector.flatten(1))
        return torch.einsum("mn,mni->ni", inner, root).reshape(vector.shape)


class LossAtOutput:
    """A loss function, with its derivatives at outputs of a model.

    Attributes:
        function: The loss as it was given.
    """

    def __init__(self, lossfunc: Callable[..., Tensor], normaliser: Normaliser | None) -> None:
        """Store the loss.

        Args:
            lossfunc: A module, or a function, of output and target.
            normaliser: The divisor of the loss of a batch: a function of output and target,
                ``"sum"`` for no divisor, ``"mean"`` for the number of samples, or ``None`` to ask
                the rule of the loss.

        Raises:
            UsageError: The loss is not callable, or the normaliser is unknown.
        """
        if not callable(lossfunc) or isinstance(lossfunc, type):
            raise UsageError(
                "The loss must be a module, such as CrossEntropyLoss(), or a function of output "
                f"and target. Got {lossfunc!r}."
            )
        if normaliser not in (None, "sum", "mean") and not callable(normaliser):
            raise UsageError(
                f'normaliser must be "sum", "mean", or a function of output and target. Got '
                f"{normaliser!r}."
            )
        self._normaliser = normaliser
        self.function = lossfunc
        self._has_rule = False
        # A copy, so that the user's loss module is not extended.
        self._lossfunc: Any = lossfunc
        if isinstance(lossfunc, Module):
            self._lossfunc = extend(copy.deepcopy(lossfunc))
            self._has_rule = not registry.resolve_type(type(lossfunc)).is_fallback

    def at(self, output: Tensor, target: Any, samples: int | None = None) -> AtOutput:
        """The loss of a batch at an output, with its derivatives.

        Args:
            output: The model's output, ``[N, *]``.
            target: The target, as the loss expects it.
            samples: How many targets to draw from the likelihood for ``root``; zero for the
                gradients of the samples themselves; ``None`` for no root.

        Raises:
            ShapeError: The loss is not a number.
            UsageError: The loss has no rule, and ``samples`` or the normaliser needs one.
            UnsupportedError: The loss has no likelihood to draw targets from.
        """
        reading = _Reading(self._lossfunc, samples or 0)
        with torch.enable_grad():
            z = output.detach().requires_grad_()
            loss = self._lossfunc(z, target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ShapeError(f"The loss must be a number: reduce it. Got {got}.")
            asked = backpack(DerivativesAtOutput(reading), check="never")
            with asked if self._has_rule else nullcontext():
                (gradient,) = gradients([loss], [z], None, create_graph=True)
        normaliser = self._normaliser_of(z, target, reading)
        root = reading.root
        if samples == 0:
            root = (gradient.detach() * (normaliser or 1.0) ** 0.5).unsqueeze(0)
        elif samples is not None and root is None:
            raise self._unknown("a likelihood to draw targets from", 'or kind="empirical".')
        return AtOutput(z, loss.detach(), gradient, normaliser, root)

    def _normaliser_of(self, output: Tensor, target: Any, reading: _Reading) -> float | None:
        if self._normaliser == "sum":
            return None
        if self._normaliser == "mean":
            return float(len(output))
        if callable(self._normaliser):
            return float(self._normaliser(output, target))
        if reading.scale is None:
            raise self._unknown(
                "what it divides by, so that batches can be weighted",
                'or say it: normaliser="sum", normaliser="mean", or a function of output and '
                "target.",
            )
        return None if reading.is_sum else 1 / float(reading.scale)

    def _unknown(self, what: str, instead: str) -> UsageError:
        name = getattr(self._lossfunc, "__name__", type(self._lossfunc).__name__)
        return UsageError(
            f"The loss {name} has no loss rule, so it does not tell {what}: use a loss module of "
            f"torch.nn, {instead}"
        )


class _Reading(GraphReading):
    def __init__(self, module: Any, samples: int) -> None:
        self._module, self._samples = module, samples
        self.scale: float | Tensor | None = None
        self.is_sum = False
        self.root: Tensor | None = None

    def observe(self, view: View) -> None:
        """Ask the rule of the loss now: the call is freed after its visit."""
        rule = view.call.rule
        if view.call.module is self._module and isinstance(rule, LossRule):
            self.scale = rule.normalisation(view)
            is_plain = type(rule).normalisation is LossRule.normalisation
            self.is_sum = getattr(view.module, "reduction", "sum" if is_plain else "") == "sum"
            if self._samples:
                rule = with_hessian(rule, view)
                self.root = rule.sqrt_hessian_sampled(view, self._samples).detach()

    def results(self, graph: LossGraph) -> Mapping[Tensor, Any]:
        """Store nothing."""
        return {}


class DerivativesAtOutput(GraphExtension):
    """Asks the rule of a loss for its normaliser and for sampled gradients; stores nothing.

    Error messages about the loss name this class as the extension.
    """

    savefield = "at_output"

    def __init__(self, reading: _Reading) -> None:
        super().__init__()
        self._reading = reading

    def begin(self) -> GraphReading:
        """Return the reading that observes this pass."""
        return self._reading
