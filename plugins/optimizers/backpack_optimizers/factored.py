"""What K-FAC and EKFAC have in common: averages of factors, and steps by their inverses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import Extension, is_extended
from backpack_core.errors import UsageError
from backpack_optimizers import processes
from backpack_optimizers.damping import LevenbergMarquardt, predicted_change, require_adapting
from backpack_optimizers.groups import (
    Group,
    GroupedOptimizer,
    group_of,
    require_count,
    require_positive,
    require_share,
)
from backpack_optimizers.passes import CapturedPasses, Factors, Joined, joining
from backpack_optimizers.reading import Nothing, factors_of_some
from backpack_optimizers.replay import Replay
from backpack_optimizers.values import (
    all_restored,
    require_finite,
    require_finite_gradients,
    require_same_plugins,
    saved,
    unchanged_on_error,
)
from backpack_products.fingerprint import Fingerprint, agreed_on_ranks, fingerprint
from backpack_secondorder.kronecker import KroneckerFactors

FIELD = "optimizer_factors"


class FactoredOptimizer(GroupedOptimizer):
    """Steps ``-lr · (F + damping · I)⁻¹ g`` with Kronecker-factored curvature ``F``.

    Attributes:
        steps: How many steps were made.
    """

    def __init__(
        self,
        model: Module,
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        lr: float = 0.1,
        damping: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        factor_decay: float = 0.95,
        factors_every: int = 1,
        inverses_every: int = 10,
        kl_clip: float | None = None,
        adapt: LevenbergMarquardt | None = None,
        mc_samples: int | None = 1,
        weight_sharing: str = "expand",
        max_size: int = 8192,
        process_group: distributed.ProcessGroup | None = None,
        method: str = "curvature",
        adam_scale: float = 0.01,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
    ) -> None:
        """Store the settings.

        Args:
            model: The extended model, or ``DistributedDataParallel`` of it.
            params: Parameters or groups; default: all that are trained. Settings of groups are
                ``lr``, ``momentum``, ``weight_decay``, and those after ``process_group``.
            lr: The learning rate.
            damping: Added to the curvature, in the scale of the loss. Larger is closer to gradient
                descent.
            momentum: The momentum of the steps, as in :class:`torch.optim.SGD`.
            weight_decay: Decoupled, as in :class:`torch.optim.AdamW`.
            factor_decay: The share of the past in the average of factors. It is
                ``min(1 - 1/k, factor_decay)`` at the ``k``-th factors of a parameter, so that the
                first ones count like later ones (Martens and Grosse, 2015, section 5).
            factors_every: Factors are computed every this many steps.
            inverses_every: Factors are inverted every this many steps; those of a parameter that
                had none so far at once.
            kl_clip: Bound ``κ`` on ``lr² gᵀ(F + damping · I)⁻¹g``, summed over parameters. This is
                the squared norm of the step in the metric of the curvature, and so about twice the
                divergence between the predictions before and after. A longer step, before momentum,
                is scaled down to the bound (Ba et al., 2017). Default: none.
            adapt: How the damping adapts; ``step`` then needs a closure. The quadratic model is
                that of the factors.
            mc_samples: Targets drawn for each sample; ``None`` for the exact Hessian of the loss,
                which takes a column for every output, like :class:`backpack_core.extensions.KFLR`.
            weight_sharing: How positions share a weight; see
                :class:`backpack_core.extensions.KFAC`. ``"expand"`` gives the factors
                of Grosse and Martens (2016) for convolutions.
            max_size: Parameters with a larger factor step by AdamW.
            process_group: Processes that train together: factors are those of all samples, and each
                inverts a part of them. Gradients are joined, too. Those that
                ``DistributedDataParallel`` has averaged stay this average, without weights for
                batches of different sizes. Default: the group of ``DistributedDataParallel``, or
                this process alone.
            method: ``"curvature"``, or ``"adam"`` for AdamW.
            adam_scale: AdamW steps at the rate ``adam_scale · lr``.
            adam_betas: Setting of AdamW.
            adam_eps: Setting of AdamW.

        Raises:
            UsageError: The model is not extended, or a setting is out of range.
        """
        self._joined = Joined([])
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "method": method}
        adam = {"adam_scale": adam_scale, "adam_betas": adam_betas, "adam_eps": adam_eps}
        super().__init__(model, params, {**settings, **adam})
        if not is_extended(self.model):
            raise UsageError(
                f"{type(self).__name__} computes curvature in the backward pass, so model and loss "
                "must be extended first: model = extend(model), lossfunc = extend(lossfunc)."
            )
        require_adapting(adapt)
        require_share("factor_decay", factor_decay)
        if kl_clip is not None:
            require_positive("kl_clip", kl_clip)
        counts = {"factors_every": factors_every, "inverses_every": inverses_every}
        for name, count in {**counts, "max_size": max_size}.items():
            require_count(name, count)
        self.damping, self.steps = damping, 0
        self._most, self._clip, self._adapt = factor_decay, kl_clip, adapt
        own = {"factor_decay": factor_decay, "kl_clip": kl_clip, "adapt": adapt}
        self._schedule = {**counts, **own, "max_size": max_size}
        self._factors_every, self._inverses_every = factors_every, inverses_every
        self._reading: dict[str, Any] = {"mc_samples": mc_samples, "weight_sharing": weight_sharing}
        self._max_size, self._group = max_size, group_of(model, process_group)
        self._averages: dict[Tensor, KroneckerFactors] = {}
        self._counts: dict[Tensor, int] = {}  # how many factors are in each
        self._block: Callable[[], AbstractContextManager[None]] = self.curvature  # of closures
        self._extensions()  # refuses settings of the extension

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; see the base class."""
        super().add_param_group(param_group)
        self._joined.parameters = self._all()

    def _check(self, group: Group) -> None:
        super()._check(group)
        require_positive("momentum", group["momentum"], or_zero=True)

    @property
    def without_factors(self) -> list[str]:
        """Names of the parameters that step by AdamW, known after the first step."""
        adam = {*self._all("adam")}
        stepped = (p for p in self._all() if "exp_avg" in self.state[p])
        return [self.name_of(p) for p in stepped if p in adam or p not in self._averages]

    def curvature(self, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """A block around one ``loss.backward()``: factors are computed if the step needs them.

        Several passes before one step are joined as one batch, in gradient and factors.

        Args:
            loss_scale: What the loss is multiplied by: ``scaler.get_scale()`` of a gradient scaler.
                (``scaler.unscale_(optimizer)`` divides gradients; this block does not.)
        """
        require_positive("loss_scale", loss_scale)
        return joining(self._joined, self._extensions(), loss_scale)

    def captured(self, function: Callable[..., Any], make: Callable[..., Any]) -> Any:
        """``capture(function, lossfunc, optimizer)``; closures then call the captured step.

        Args:
            function: Returns the loss.
            make: See ``backpack_capture.Host``.
        """
        self._block = nullcontext
        made = partial(make, function, self.model)
        return CapturedPasses(lambda: self._joined, self._extensions, made)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and the passes since the last step."""
        super().zero_grad(set_to_none)
        self._joined.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Clears gradients, computes the loss, calls ``backward()`` and returns the loss.
                It runs inside a block of :meth:`curvature`, or calls a captured step.

        Returns:
            What the closure returned.

        Raises:
            UsageError: Factors are due, but no pass ran inside a block; the block is still open;
                factors are not finite; or the model has exchanged a parameter.
        """
        if self._adapt is not None and closure is None:
            raise UsageError(
                "adapt= compares the loss before and after a step: pass a closure, "
                "optimizer.step(closure), that computes the loss and calls backward()."
            )
        if closure is None and self._joined.is_open:
            raise UsageError(
                "optimizer.step() was called inside of `with optimizer.curvature():`, before its "
                "pass was added to those before: step after the block."
            )
        self._require_present()
        replay = Replay(next((p.device for p in self._all()), torch.device("cpu")))
        loss = self._called(closure, self._block()) if closure is not None else None
        looks = self._adapt is not None and (self.steps + 1) % self._adapt.every == 0
        with torch.no_grad():
            self._observe()
            before = [p.clone() for p in self._all()] if looks else []
            for group in self.param_groups:
                self._decay(group)
            self._move(self._directions())
        self.steps += 1
        if looks and closure is not None:
            self._look(closure, loss, before, replay)
        self._joined.reset()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of an optimizer, with averages and inverses under ``"curvature"``."""
        found = saved(self._tables(), self._all(), self._fingerprint())
        found["counts"] = {
            n: self._counts[p] for n, p in enumerate(self._all()) if p in self._counts
        }
        numbers = {"steps": self.steps, "damping": self.damping}
        return {**super().state_dict(), "curvature": {**found, **numbers}}

    def _fingerprint(self) -> Fingerprint:
        """The plugins that compute the factors."""
        return fingerprint([self.model], self._extensions())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue exactly like the optimizer that saved the state.

        Raises:
            UsageError: The state is that of another kind of optimizer, or of another model, or
                other plugins computed its curvature.
        """
        found = state_dict.get("curvature")
        tables = self._tables()
        if found is None or not set(tables) <= set(found):
            raise UsageError(f"This is not a state of {type(self).__name__}: it has no curvature.")
        require_same_plugins(found, self._fingerprint())
        # All of it is read before anything changes.
        matrices = all_restored(tables, found, self._all(), self.name_of)
        super().load_state_dict(dict(state_dict))
        for name, table in tables.items():
            table.clear()
            table.update(matrices[name])
        self._counts = {self._all()[place]: count for place, count in found["counts"].items()}
        self.steps, self.damping = found["steps"], found["damping"]
        self._joined = Joined(self._all())

    @abstractmethod
    def _tables(self) -> dict[str, dict[Tensor, Any]]:
        """The matrices that are kept, by name and parameter."""

    @abstractmethod
    def _fold(self, found: Mapping[str, Factors]) -> None:
        """Add matrices of new data to the averages."""

    @abstractmethod
    def _invert(self, averages: Mapping[Tensor, KroneckerFactors]) -> None:
        """Decompose averages, all or some."""

    @abstractmethod
    def _solved(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """``(F + damping · I)⁻¹`` times the gradient; ``None`` for a parameter without factors."""

    @abstractmethod
    def _times(self, parameter: Tensor, vector: Tensor) -> Tensor:
        """``F`` times a vector."""

    def _extensions(self) -> Sequence[Extension]:
        """What the next pass computes."""
        if self.steps % self._factors_every:
            return [Nothing()]
        chosen = frozenset(map(id, self._all("curvature")))
        return [factors_of_some(chosen, self._max_size, field=FIELD, **self._reading)]

    def _observe(self) -> None:
        """Add the passes since the last step to the averages, and invert if that is due."""
        if self._group is not None and not self._is_compared:
            agreed_on_ranks(self._fingerprint(), self._group)
            self._compare(self._group, steps=self.steps, **self._schedule)
        self._joined.look(is_step=True)
        is_due = self.steps % self._factors_every == 0
        if (is_due or self._group is not None) and not self._joined.passes:
            if self._group is not None:
                # Others would wait for this one.
                processes.require_alike([], self._joined, self._group)
            raise UsageError(
                f"Step {self.steps + 1} needs curvature, but no pass with a sample ran in a block "
                "of this optimizer since the last step: write with optimizer.curvature(): "
                "loss.backward(), or pass a closure to step."
            )
        if self._group is not None:
            processes.join(self._joined, self._all(), self._group)
        if is_due:
            require_finite(self._joined.values, self.name_of)
        require_finite_gradients(self._all(), self.name_of)
        tables = [*self._tables().values()]
        with unchanged_on_error([*tables, self._counts]):
            if is_due:
                self._fold(self._joined.values)
            is_all = self.steps % self._inverses_every == 0
            self._invert({p: f for p, f in self._averages.items() if is_all or p not in tables[-1]})

    def _directions(self) -> list[tuple[Group, dict[Tensor, Tensor]]]:
        """For each group, gradients in the metric of the curvature, scaled to the bound."""
        found = []
        norm: Any = 0.0
        for group in self.param_groups:
            directions: dict[Tensor, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None or group["method"] == "adam":
                    continue
                solved = self._solved(parameter, parameter.grad)
                if solved is not None:
                    directions[parameter] = solved
                    norm = norm + group["lr"] ** 2 * (parameter.grad * solved).sum()
            found.append((group, directions))
        if self._clip is not None and float(norm) > self._clip:
            scale = (self._clip / float(norm)) ** 0.5
            for _, directions in found:
                directions.update((p, scale * d) for p, d in directions.items())
        return found

    def _move(self, found: list[tuple[Group, dict[Tensor, Tensor]]]) -> None:
        """Add momentum, and step; parameters without a direction step by AdamW."""
        for group, directions in found:
            for parameter, direction in directions.items():
                if group["momentum"]:
                    state = self.state[parameter]
                    before = state.get("momentum")
                    if before is not None:
                        direction = before.mul_(group["momentum"]).add_(direction)
                    state["momentum"] = direction
                parameter.sub_(group["lr"] * direction)
            others = [p for p in group["params"] if p.grad is not None and p not in directions]
            self._adam(group, others)

    def _look(
        self, closure: Callable[[], Any], loss: Any, before: list[Tensor], replay: Replay
    ) -> None:
        """Adapt the damping to the loss after the step."""
        if loss is None:
            raise UsageError("The closure returned None: let it return the loss.")
        assert self._adapt is not None
        parameters, gradients = self._all(), [p.grad for p in self._all()]
        share = self._joined.share
        predicted = predicted_change(parameters, before, self._times, self.damping)
        for parameter in parameters:
            parameter.grad = None
        with replay.again():  # the same dropout
            change = share * float(self._called(closure, nullcontext()) - loss)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._group is not None:
            change = processes.summed(change, self._group)
        self.damping = self._adapt(self.damping, change, predicted)

    def _called(self, closure: Callable[[], Any], block: Any) -> Any:
        with torch.enable_grad(), block:
            loss = closure()
        return loss.detach() if isinstance(loss, Tensor) else loss
