"""Gauss-Newton steps with the whole matrix, by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core.errors import UsageError
from backpack_optimizers.damping import LevenbergMarquardt, require_adapting
from backpack_optimizers.groups import (
    Group,
    GroupedOptimizer,
    group_of,
    require_count,
    require_positive,
)
from backpack_secondorder.conjugate_gradients import Solution, conjugate_gradients
from backpack_secondorder.over_data import GGN


class GaussNewton(GroupedOptimizer):
    """Hessian-free optimization with the Gauss-Newton matrix (Martens, 2010; Schraudolph, 2002).

    A step is ``-lr · s · d`` with ``(G + damping · I) d = g``. ``G`` is the generalised
    Gauss-Newton matrix of the batches, blocks between layers included, known by its products.
    Conjugate gradients find ``d``, and begin at ``warm_start`` times the ``d`` of the step before;
    ``s`` is halved until the loss falls. Models need not be extended, and layers need no rules.

    Every product is a pass over the batches, so a few large batches are best. Dropout and batch
    normalisation in train mode are refused.

    Example:
        >>> optimizer = GaussNewton(model, lossfunc, damping=1e-2)
        >>> for x, y in loader:
        ...     loss = optimizer.step([(x, y)])

    Attributes:
        steps: How many steps were made.
        solution: The last result of conjugate gradients: ``iterations``, ``residual``.
    """

    may_be_undamped = True

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        lr: float = 1.0,
        damping: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        max_iterations: int = 50,
        rtol: float = 1e-2,
        warm_start: float = 0.0,
        halvings: int = 10,
        adapt: LevenbergMarquardt | None = None,
        preconditioner: Callable[[Tensor], Tensor] | None = None,
        process_group: distributed.ProcessGroup | None = None,
        method: str = "curvature",
        adam_scale: float = 0.001,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        forward: Callable[[Module, Any], tuple[Tensor, Any]] | None = None,
        normaliser: Literal["mean", "sum"] | Callable[..., float | Tensor] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            model: The model, or ``DistributedDataParallel`` of it.
            lossfunc: A loss module, or a function of output and target.
            params: Parameters or groups; default: all that are trained. Settings of groups are
                ``lr``, ``weight_decay``, ``method``, ``adam_scale``, ``adam_betas``, ``adam_eps``.
            lr: The learning rate.
            damping: Added to the matrix, in the scale of the loss.
            weight_decay: Decoupled, as in :class:`torch.optim.AdamW`.
            max_iterations: The largest number of iterations of conjugate gradients in a step.
            rtol: Conjugate gradients stop at this residual, relative to the right side.
            warm_start: See the class; 0.95 in Martens (2010), zero to begin from zero.
            halvings: How often the step may be halved; zero to ignore the loss. If the loss does
                not fall at any of these lengths, the parameters do not change.
            adapt: How the damping adapts.
            preconditioner: An approximate inverse of the damped matrix, as a function of a flat
                vector over all parameters that have curvature.
            process_group: Processes with at least one batch each: the step is that of all samples.
                Default: the group of ``DistributedDataParallel``, or this process alone.
            method: ``"curvature"``, or ``"adam"`` for AdamW.
            adam_scale: AdamW steps at the rate ``adam_scale · lr``.
            adam_betas: Setting of AdamW.
            adam_eps: Setting of AdamW.
            forward: How to use batches of another kind, as for
                :class:`backpack_secondorder.over_data.GGN`.
            normaliser: What a loss without a rule divides by, as there.

        Raises:
            UsageError: A setting is out of range.
        """
        for name, number in (("rtol", rtol), ("warm_start", warm_start)):
            require_positive(name, number, or_zero=True)
        require_adapting(adapt)
        require_count("max_iterations", max_iterations)
        require_positive("halvings", halvings, or_zero=True)
        settings = {"lr": lr, "weight_decay": weight_decay, "method": method}
        adam = {"adam_scale": adam_scale, "adam_betas": adam_betas, "adam_eps": adam_eps}
        super().__init__(model, params, {**settings, **adam})
        self.damping, self.steps = damping, 0
        self.solution: Solution | None = None
        self._lossfunc, self._adapt, self._halvings = lossfunc, adapt, halvings
        self._warm_start, self._preconditioner = warm_start, preconditioner
        self._solver: dict[str, Any] = {"max_iterations": max_iterations, "rtol": rtol}
        self._data: dict[str, Any] = {"forward": forward, "normaliser": normaliser}
        self._data["process_group"] = group_of(model, process_group)

    def step(self, batches: Iterable[Any]) -> Tensor:  # type: ignore[override]
        """Make one step.

        Args:
            batches: ``[(inputs, target)]``; several batches of any sizes are taken together. They
                are iterated several times.

        Returns:
            The loss before the step.

        Raises:
            UsageError: ``batches`` is wrong; the model has exchanged a parameter; the loss or a
                gradient is not finite; or a reason given for
                :class:`backpack_secondorder.over_data.GGN`.
        """
        if batches is None or callable(batches) or not isinstance(batches, Iterable):
            raise UsageError(
                "GaussNewton.step takes batches, because it goes through them several times: "
                f"optimizer.step([(x, y)]). Got {type(batches).__name__}."
            )
        self._require_present()
        chosen = [p for p in self._all("curvature") if p.requires_grad]
        if len(by_form(chosen)) > 1:
            raise UsageError(
                "GaussNewton has one matrix, of one precision, on one device, and the parameters "
                f"with curvature have several ({', '.join(map(self.name_of, _firsts(chosen)))}): "
                'put those of all but one into groups with method="adam".'
            )
        if not chosen:
            raise UsageError(
                'No trained parameter has method="curvature", so there is no matrix to step by: '
                "unfreeze one, or take torch.optim.AdamW."
            )
        group = self._data["process_group"]
        if group is not None and not self._is_compared:
            self._compare(
                group, steps=self.steps, **self._solver, halvings=self._halvings, adapt=self._adapt
            )
        ggn = self._matrix(batches, chosen)
        loss = ggn.loss()
        if not bool(loss.isfinite()):
            raise UsageError(
                f"The loss is {float(loss)}, so no step was made: look at the targets and at the "
                "outputs of the model, or leave these batches out."
            )
        gradients = self._gradients(batches)
        for parameter in self._all():
            parameter.grad = gradients.get(parameter)  # frozen ones have none
        with torch.no_grad():
            self._move(ggn, self._direction(ggn), float(loss))
            for group in self.param_groups:
                if group["method"] == "adam":
                    self._decay(group)
                    self._adam(group, [p for p in group["params"] if p.grad is not None])
        self.steps += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of an optimizer, with the damping under ``"curvature"``."""
        numbers = {"steps": self.steps, "damping": self.damping}
        return {**super().state_dict(), "curvature": numbers}

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue exactly like the optimizer that saved the state.

        Raises:
            UsageError: The state is that of another kind of optimizer.
        """
        found = state_dict.get("curvature", {})
        if set(found) != {"steps", "damping"}:
            raise UsageError("This is not a state of GaussNewton: it has no damping.")
        super().load_state_dict(state_dict)
        self.steps, self.damping = found["steps"], found["damping"]

    def _matrix(self, batches: Iterable[Any], parameters: list[Tensor]) -> GGN:
        return GGN(self.model, self._lossfunc, batches, parameters, **self._data)

    def _gradients(self, batches: Iterable[Any]) -> dict[Tensor, Tensor]:
        """The gradients of all trained parameters.

        Raises:
            UsageError: A gradient is not finite.
        """
        found: dict[Tensor, Tensor] = {}
        for alike in by_form(p for p in self._all() if p.requires_grad):  # one matrix for each
            found.update(zip(alike, self._matrix(batches, alike).gradient(), strict=True))
        bad = next(
            (p for p, gradient in found.items() if not bool(gradient.isfinite().all())), None
        )
        if bad is not None:
            raise UsageError(
                f"The gradient of the parameter {self.name_of(bad)!r} is not finite, though the "
                "loss is, so no step was made: look for roots and divisions at zero in the net, or "
                "leave these batches out."
            )
        return found

    def _direction(self, ggn: GGN) -> list[Tensor]:
        """``(G + damping · I)⁻¹ g``, for each parameter."""
        gradient = torch.cat([p.grad.flatten() for p in ggn.parameters if p.grad is not None])
        start = gradient.new_zeros(gradient.shape)
        if self._warm_start and all("direction" in self.state[p] for p in ggn.parameters):
            parts = [self.state[p]["direction"].flatten() for p in ggn.parameters]
            start = self._warm_start * torch.cat(parts).to(gradient)  # of a model since converted
        rest = gradient
        if bool(start.any()):
            rest = gradient - (ggn @ start + self.damping * start)
        self.solution = conjugate_gradients(
            ggn, rest, self.damping, self._preconditioner, strict=False, **self._solver
        )
        flat = start + self.solution.x
        direction = [part.squeeze(0) for part in ggn.split(flat.unsqueeze(0))]
        if self._warm_start:
            for parameter, part in zip(ggn.parameters, direction, strict=True):
                self.state[parameter]["direction"] = part.clone()
        return direction

    def _move(self, ggn: GGN, direction: list[Tensor], loss: float) -> None:
        """Step as far as the loss falls, and adapt the damping to the model's accuracy.

        Weights decay by a share of what they were, as in AdamW; not if no step is made.
        """
        before = [p.clone() for p in ggn.parameters]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        own = [groups[id(p)] for p in ggn.parameters]
        step = [-group["lr"] * d for group, d in zip(own, direction, strict=True)]
        adapts = self._adapt is not None and (self.steps + 1) % self._adapt.every == 0
        predicted = self._predicted(ggn, step) if adapts else 0.0

        is_made = False
        try:
            for halving in range(self._halvings + 1):
                for parameter, start, part in zip(ggn.parameters, before, step, strict=True):
                    parameter.copy_(start + 0.5**halving * part)
                looks = adapts or self._halvings
                change = float(ggn.loss()) - loss if looks else 0.0
                if adapts and not halving and self._adapt is not None:
                    self.damping = self._adapt(self.damping, change, predicted)
                is_made = change <= 0 or not self._halvings
                if is_made:
                    break
        finally:  # batches may raise an error, and steps may be infinite
            for parameter, start, group in zip(ggn.parameters, before, own, strict=True):
                if is_made:
                    parameter.sub_(group["lr"] * group["weight_decay"] * start)
                else:
                    parameter.copy_(start)

    def _predicted(self, ggn: GGN, step: list[Tensor]) -> float:
        """How much the quadratic model changes by a step."""
        curved = ggn @ step
        return sum(
            float(((p.grad + 0.5 * (c + self.damping * s)) * s).sum())
            for p, c, s in zip(ggn.parameters, curved, step, strict=True)
            if p.grad is not None
        )


def by_form(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters of one precision and on one device together."""
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [*found.values()]


def _firsts(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [alike[0] for alike in by_form(parameters)]
