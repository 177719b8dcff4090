"""Parameter groups of a model, and what every group has: a rate, decay of weights, AdamW.

Decay is decoupled (Loshchilov and Hutter, 2019, arXiv:1711.05101): weights shrink by
``lr · weight_decay`` in addition to the step, and the curvature does not contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from backpack_core.errors import UsageError
from backpack_products.ranks import about, require_member, require_same

Method: TypeAlias = Literal["curvature", "adam"]
Group: TypeAlias = dict[str, Any]


class GroupedOptimizer(Optimizer):
    """What all optimizers here have in common.

    A group has these settings:

    - ``lr``: the learning rate;
    - ``weight_decay``: decoupled, as in AdamW;
    - ``method``: ``"curvature"``, or ``"adam"`` for plain AdamW;
    - ``adam_scale``: AdamW steps at the rate ``adam_scale · lr``, so that one schedule serves both;
    - ``adam_betas`` and ``adam_eps``: settings of AdamW.

    Attributes:
        model: The model, without a wrapper.
        may_be_undamped: Whether the damping may be zero.
    """

    may_be_undamped = False

    def __init__(
        self,
        model: Module,
        params: Iterable[Tensor] | Iterable[Group] | None,
        defaults: Mapping[str, Any],
    ) -> None:
        """Make the groups.

        Args:
            model: The model, or ``DistributedDataParallel`` of it.
            params: Parameters or groups, as for other optimizers; default: all that are trained.
            defaults: Settings for groups that lack them.

        Raises:
            UsageError: ``model`` is not a module, a parameter does not belong to it, or a setting
                is out of range.
        """
        if not isinstance(model, Module):
            raise UsageError(
                f"{type(self).__name__}(model, ...) takes the model, and its parameters as "
                f"params=. Got {type(model).__name__}."
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._is_compared = False  # with other processes
        self._names: dict[int, str] = {}
        chosen = [p for p in self.model.parameters() if p.requires_grad]
        if params is None and not chosen:
            raise UsageError("The model has no trained parameter: set requires_grad for some.")
        super().__init__(chosen if params is None else params, dict(defaults))

    @property
    def damping(self) -> float:
        """What is added to the curvature now; may be set.

        Raises:
            UsageError: It is set to what is not positive (or zero, where that is allowed).
        """
        return self._damping

    @damping.setter
    def damping(self, value: float) -> None:
        require_positive("damping", value, or_zero=self.may_be_undamped)
        self._damping = float(value)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as for every optimizer.

        Raises:
            UsageError: A parameter does not belong to the model, or a setting is out of range.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except UsageError:
            self.param_groups.pop()
            raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles, which torch makes without settings and curvature.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{type(self).__name__} cannot be copied or pickled, because it belongs to one model. "
            "Make another one for the copy of the model, and load optimizer.state_dict() there."
        )

    def _compare(self, group: distributed.ProcessGroup, **settings: Any) -> None:
        """Check, before the first step, that the processes train the same model alike.

        Args:
            group: The processes.
            settings: Those for all groups.

        Raises:
            UsageError: Parameters or settings differ. Every process raises this.
        """
        # Optimizers of torch add defaults when they load a state, which groups may lack.
        groups = [{n: _plain(g[n]) for n in self.defaults if n in g} for g in self.param_groups]
        require_same(
            {**about(self.model), "damping": self.damping, **settings, "A group": groups},
            group,
            "Their steps would belong to no model: give all of them the same model, by "
            "DistributedDataParallel, for example, or from the same seed or checkpoint, and an "
            "optimizer with the same settings and the same state.",
        )
        self._is_compared = True

    def _check(self, group: Group) -> None:
        # Modules may have been added since; parameters that were replaced keep their names.
        kept = {id(p): self._names[id(p)] for p in self._all() if id(p) in self._names}
        self._names = {**kept, **{id(p): name for name, p in self.model.named_parameters()}}
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in self._names:
                raise UsageError(
                    f"The tensor {place} of a group, of shape {list(parameter.shape)}, is not "
                    f"a parameter of the model that was passed to {type(self).__name__}."
                )
            if hasattr(parameter, "placements"):
                raise UsageError(
                    f"The parameter {self.name_of(parameter)!r} is sharded (fully_shard), but "
                    f"{type(self).__name__} needs whole ones: use DistributedDataParallel."
                )
        self._check_names(group)
        if group["method"] not in get_args(Method):
            raise UsageError(f"method must be one of {get_args(Method)}. Got {group['method']!r}.")
        for name in ("lr", "weight_decay", "adam_scale"):
            require_positive(name, group[name], or_zero=True)
        require_positive("adam_eps", group["adam_eps"], or_zero=True)
        betas = group["adam_betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise UsageError(f"adam_betas must be a pair of numbers below 1. Got {betas!r}.")
        for beta in betas:
            require_share("adam_betas", beta)

    def _check_names(self, group: Group) -> None:
        """Refuse what would not be read: settings of optimizers, and names that are misspelt.

        Anything else stays, as for every optimizer: schedules keep what they need in groups.
        """
        unknown = next((name for name in _UNKNOWN if group.get(name)), None)
        if unknown is not None:
            raise UsageError(
                f"{unknown!r} is a setting of optimizers of torch, and {type(self).__name__} has "
                f"none of this kind. Settings of a group are {', '.join(self.defaults)}."
            )
        others = {*_settings_of(type(self))} - {*self.defaults, "params"}
        for name in {*group} - {*self.defaults, "params"}:
            near = get_close_matches(name, (*self.defaults, *others), 1, _NEAR)
            near += [own for own in self.defaults if own == f"adam_{name}"]  # as AdamW has it
            if near or name in others:
                meant = (
                    "it is one for all groups." if name in others else f"did you mean {near[0]!r}?"
                )
                raise UsageError(
                    f"{name!r} is not a setting of a group of {type(self).__name__}: {meant} "
                    f"Settings of a group are {', '.join(self.defaults)}."
                )

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter in the model."""
        return self._names[id(parameter)]

    def _all(self, method: Method | None = None) -> list[Tensor]:
        """The parameters of the groups, in their order."""
        groups = (g for g in self.param_groups if method in (None, g["method"]))
        return [p for group in groups for p in group["params"]]

    def _require_present(self) -> None:
        """Refuse a step of parameters that the model has exchanged since.

        Raises:
            UsageError: The model has another parameter in the place of one.
        """
        present = dict(self.model.named_parameters(remove_duplicate=False))
        own = ((present.get(self.name_of(p), p), p) for p in self._all())
        gone = next((p for now, p in own if now is not p), None)
        if gone is not None:
            raise UsageError(
                f"The parameter {self.name_of(gone)!r} is no longer the model's: it was replaced "
                "(by load_state_dict(..., assign=True), for example), so no step would move it. "
                "Make the optimizer again, and load its state."
            )

    def _decay(self, group: Group) -> None:
        """Shrink the weights of a group that have a gradient."""
        if group["weight_decay"]:
            factor = 1 - group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(factor)

    def _adam(self, group: Group, parameters: list[Tensor]) -> None:
        """One step of Adam; weights have decayed already."""
        if not parameters:
            return
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["adam_betas"][0],
            beta2=group["adam_betas"][1],
            lr=group["lr"] * group["adam_scale"],
            weight_decay=0.0,
            eps=group["adam_eps"],
            maximize=False,
        )


def group_of(
    model: Module, group: distributed.ProcessGroup | None
) -> distributed.ProcessGroup | None:
    """The processes that train together: a wrapper's, if none were given.

    Args:
        model: The model, or ``DistributedDataParallel`` of it.
        group: What was given.

    Raises:
        UsageError: It is not a group of this process.
    """
    require_member(group)
    if group is None and isinstance(model, DistributedDataParallel):
        found: distributed.ProcessGroup = model.process_group
        return found
    return group


def _plain(value: Any) -> Any:
    """A setting that may be a tensor, as a number."""
    return float(value) if isinstance(value, Tensor) else value


_UNKNOWN = ("amsgrad", "dampening", "maximize", "nesterov")  # they would change steps, if read
_NEAR = 0.85  # below, there is max_momentum, which a schedule adds


def _settings_of(kind: type) -> Iterator[str]:
    """What the constructors of a class and its bases take by name."""
    for base in kind.__mro__:
        if issubclass(base, GroupedOptimizer) and "__init__" in vars(base):
            yield from signature(vars(base)["__init__"]).parameters


def require_positive(name: str, value: Any, or_zero: bool = False) -> None:
    """Check that a setting is a positive, finite number.

    Args:
        name: The name of the setting.
        value: The setting.
        or_zero: Whether it may be zero.

    Raises:
        UsageError: The setting is something else.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not (number > 0 or (or_zero and number == 0)) or number == float("inf"):
        sign = "not negative" if or_zero else "positive"
        raise UsageError(f"{name} must be a number that is {sign}. Got {value!r}.")


def require_share(name: str, value: Any) -> None:
    """Check that a setting is a number from zero on, and below one.

    Raises:
        UsageError: It is not.
    """
    require_positive(name, value, or_zero=True)
    if value >= 1:
        raise UsageError(f"{name} must be a number below 1. Got {value!r}.")


def require_count(name: str, value: Any) -> None:
    """Check that a setting is a whole number from one on.

    Raises:
        UsageError: The setting is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number, at least one. Got {value!r}.")
