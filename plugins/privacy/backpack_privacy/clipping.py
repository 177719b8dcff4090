"""How much one sample may add: groups of parameters, their bounds, and the weights of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import exp, hypot, inf, sqrt
from typing import Any, Literal, TypeAlias

from torch import Tensor

from backpack_core.errors import UsageError

Groups: TypeAlias = Literal["flat", "per_layer", "per_parameter"]
Weights: TypeAlias = Literal["clip", "automatic"] | Callable[[Tensor, float], Tensor]

STABILITY = 0.01  # what automatic clipping adds to norms: Bu et al. (2023)
_ROUNDING = 1e-5  # relative amount by which a user's weight may exceed the bound


class Clipping:
    """Bounds on what one sample adds to the sum of gradients.

    Parameters are split into groups ``g``. For sample ``n``, the gradient of group ``g`` is
    multiplied by a weight ``w_gn``, such that ``w_gn ‖∇_g ℓ_n‖ ≤ C_g``. So adding or removing a
    sample changes the sum by at most ``sensitivity = √(Σ_g C_g²)``. The noise is proportional to
    this, and the same for all parameters.

    Attributes:
        bounds: ``C_g`` by name of the group, after a call of :meth:`bind`.
        count_noise: Standard deviation of the noise on the number of samples within each bound;
            ``None`` if that number is not needed.
    """

    count_noise: float | None = None

    def __init__(
        self,
        max_norm: float | Mapping[str, float] = 1.0,
        groups: Groups = "flat",
        weights: Weights = "clip",
    ) -> None:
        """Check and store the settings.

        Args:
            max_norm: The sensitivity, which groups share equally, ``C_g = max_norm / √G`` (McMahan
                et al., 2018, arXiv:1710.06963). Or a bound for each group, by a pattern of
                parameters' names, as in ``{"*.lora_*": 1.0, "head.*": 0.5}``: the first pattern
                that fits counts, and every trained parameter must fit one.
            groups: ``"flat"``: one group. ``"per_layer"``: one for each module that owns
                parameters. ``"per_parameter"``: one for each parameter.
            weights: ``"clip"``: ``min(1, C / ‖g‖)`` (Abadi et al., 2016, arXiv:1607.00133).
                ``"automatic"``: ``C / (‖g‖ + 0.01)`` (Bu et al., 2023, arXiv:2206.07136). Or a
                function of norms ``[N]`` and the bound ``C`` that returns weights ``[N]``. It must
                keep ``weights · norms ≤ C``, which is checked in each step.

        Raises:
            UsageError: A bound is not positive and finite, or a setting is unknown.
        """
        if isinstance(max_norm, Mapping):
            if not max_norm or groups != "flat":
                raise UsageError(
                    "max_norm={pattern: bound} names the groups itself: give at least one pattern, "
                    "and leave out groups=."
                )
            for pattern, bound in max_norm.items():
                _check_bound(bound, f"max_norm[{pattern!r}]")
        else:
            _check_bound(max_norm, "max_norm")
        if groups not in ("flat", "per_layer", "per_parameter"):
            raise UsageError(
                f"groups must be 'flat', 'per_layer' or 'per_parameter'. Got {groups!r}. For your "
                "own groups, write max_norm={'pattern of names': bound, ...}."
            )
        if not callable(weights) and weights not in ("clip", "automatic"):
            raise UsageError(f"weights must be 'clip', 'automatic' or a function. Got {weights!r}.")
        self._max_norm, self._groups, self._weights = max_norm, groups, weights
        self.bounds: dict[str, float] = {}

    @property
    def sensitivity(self) -> float:
        """The most that one sample can change the sum by, ``√(Σ_g C_g²)``."""
        return hypot(*self.bounds.values())

    def bind(self, parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
        """Split parameters into groups, and set the bounds.

        Args:
            parameters: The trained parameters by name.

        Returns:
            The name of the group of each parameter.

        Raises:
            UsageError: A parameter fits no pattern, or a pattern fits no parameter.
        """
        found = {parameter: self._group_of(name) for name, parameter in parameters.items()}
        names = [*dict.fromkeys(found.values())]
        if isinstance(self._max_norm, Mapping):
            left = [pattern for pattern in self._max_norm if pattern not in names]
            if left:
                raise UsageError(
                    f"max_norm has a bound for {left[0]!r}, but no trained parameter is left for "
                    f"it. Names of trained parameters are {', '.join([*parameters][:4])}, ..."
                )
            self.bounds = {name: float(self._max_norm[name]) for name in names}
        else:
            self.bounds = {name: self._max_norm / sqrt(len(names)) for name in names}
        return found

    def _group_of(self, name: str) -> str:
        if isinstance(self._max_norm, Mapping):
            found = next((p for p in self._max_norm if fnmatchcase(name, p)), None)
            if found is None:
                raise UsageError(
                    f"The trained parameter {name} fits no pattern of max_norm, so it would have "
                    "no bound. Add a pattern for it ('*' takes all the others), or freeze it."
                )
            return found
        layer = name.rpartition(".")[0]
        return {"flat": "all", "per_layer": layer or "(model)"}.get(self._groups, name)

    def weights(self, norms: Tensor, bound: float) -> Tensor:
        """The weights of samples in a group.

        Args:
            norms: The norms of the group's gradients, shape ``[N]``.
            bound: ``C_g``.

        Raises:
            UsageError: The user's function exceeds the bound.
        """
        return _weights_of(self._weights, norms, bound)

    def weighing(self) -> Callable[[Mapping[Hashable, Tensor]], dict[Hashable, Tensor]]:
        """The function from the norms of all groups to weights, as ``ClippedSumGrad`` takes it."""
        if callable(self._weights) or type(self).weights is not Clipping.weights:
            return self._weigh
        return Weighing(self._weights, tuple(self.bounds.items()))

    def _weigh(self, norms: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        bounds = self.bounds
        return {name: self.weights(found, bounds[str(name)]) for name, found in norms.items()}

    def noise_multiplier(self, total: float) -> float:
        """The noise on the sum, relative to the sensitivity, if a step has ``total`` in all."""
        return total

    def after(self, kept: Mapping[str, float]) -> None:
        """Change the bounds after a step.

        Args:
            kept: The share of samples within the bound of each group, with noise.
        """

    def settings(self) -> dict[str, Any]:
        """The settings, which a checkpoint compares."""
        is_mapping = isinstance(self._max_norm, Mapping)
        return {
            "kind": type(self).__name__,
            "max_norm": dict(self._max_norm) if is_mapping else self._max_norm,  # type: ignore[arg-type]
            "groups": self._groups,
            "weights": "a function" if callable(self._weights) else self._weights,
        }

    def state_dict(self) -> dict[str, float]:
        """The bounds."""
        return dict(self.bounds)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the bounds; those of other groups, if they never change, follow from the settings.

        Raises:
            UsageError: The bounds belong to other groups, and change.
        """
        self.check_state(state)
        if state.keys() == self.bounds.keys():
            self.bounds = dict(state)

    def check_state(self, state: Mapping[str, float]) -> None:
        """Refuse bounds of other groups, if bounds change.

        Raises:
            UsageError: The bounds belong to other groups, and change.
        """
        if state.keys() != self.bounds.keys() and type(self).after is not Clipping.after:
            raise UsageError(
                f"The state has bounds for {', '.join(state)}, but parameters are clipped in the "
                f"groups {', '.join(self.bounds)}. Call make_private(...) with the same clipping."
            )


class AdaptiveClipping(Clipping):
    """Bounds that follow a quantile of the norms, privately (Andrew et al., 2021).

    After each step ``C ← C exp(-rate (b - quantile))``, with ``b`` the noisy share of samples that
    were not clipped (arXiv:1905.03871, algorithm 1). The bounds cost no privacy beyond
    ``noise_multiplier``: the noise of the sum is larger instead, ``(σ^-2 - G (2 σ_b)^-2)^(-1/2)``
    (theorem 1 there, for ``G`` groups), if the number of unclipped samples in each group has noise
    of standard deviation ``σ_b``.
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float] = 1.0,
        groups: Groups = "flat",
        quantile: float = 0.5,
        rate: float = 0.2,
        count_noise: float = 10.0,
    ) -> None:
        """Check and store the settings.

        Args:
            max_norm: The first bounds; see :class:`Clipping`.
            groups: See :class:`Clipping`.
            quantile: The share of samples that should not be clipped.
            rate: How fast bounds move.
            count_noise: ``σ_b``. The paper takes a twentieth of the expected number of samples.

        Raises:
            UsageError: A setting is out of range.
        """
        super().__init__(max_norm, groups)
        if not 0 < quantile < 1:
            raise UsageError(f"quantile must be a share between 0 and 1. Got {quantile!r}.")
        _check_bound(rate, "rate")
        _check_bound(count_noise, "count_noise")
        self.quantile, self.rate, self.count_noise = quantile, rate, count_noise

    def noise_multiplier(self, total: float) -> float:
        """See the class.

        Raises:
            UsageError: The counts alone would take more than the whole budget.
        """
        assert self.count_noise is not None
        if total == 0:
            return 0.0
        left = total**-2 - len(self.bounds) * (2 * self.count_noise) ** -2
        if left <= 0:
            raise UsageError(
                f"The noise of the counts, count_noise={self.count_noise:g} for "
                f"{len(self.bounds)} groups, spends more than noise_multiplier={total:g} allows. "
                f"Give count_noise more than {total * sqrt(len(self.bounds)) / 2:g}."
            )
        return sqrt(1 / left)

    def settings(self) -> dict[str, Any]:
        """See the base class."""
        more = {"quantile": self.quantile, "rate": self.rate, "count_noise": self.count_noise}
        return {**super().settings(), **more}

    def after(self, kept: Mapping[str, float]) -> None:
        """See the class."""
        for name, bound in self.bounds.items():
            self.bounds[name] = bound * exp(-self.rate * (kept[name] - self.quantile))


@dataclass(frozen=True)
class Weighing:
    """A function from norms to weights; equal ones compute the same, so steps are recorded.

    Attributes:
        kind: The argument of :class:`Clipping`.
        bounds: Names of groups, and their bounds.
    """

    kind: str
    bounds: tuple[tuple[str, float], ...]

    def __call__(self, norms: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """The weights ``[N]`` of each group, from norms ``[N]``."""
        bounds = dict(self.bounds)
        return {n: _weights_of(self.kind, found, bounds[str(n)]) for n, found in norms.items()}


def _weights_of(kind: str | Callable[..., Any], norms: Tensor, bound: float) -> Tensor:
    if kind == "clip":
        return (bound * norms.reciprocal()).clamp(max=1.0)  # the same if bound is a tensor
    if not callable(kind):  # automatic
        return bound * (norms + STABILITY).reciprocal()
    found: Tensor = kind(norms, bound)
    _check_weights(found, norms, bound)
    return found


def _check_bound(bound: Any, name: str) -> None:
    is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
    if not is_number or not 0 < bound < inf:
        raise UsageError(f"{name} must be a positive and finite number. Got {bound!r}.")


def _check_weights(found: Any, norms: Tensor, bound: float) -> None:
    if not isinstance(found, Tensor) or found.shape != norms.shape:
        shape = [*found.shape] if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(
            f"weights(norms, bound) must return one weight for each sample, {[*norms.shape]}. "
            f"Got {shape}."
        )
    # A comparison with NaN is false.
    if not ((found * norms).abs() <= bound * (1 + _ROUNDING)).all():
        raise UsageError(
            "weights(norms, bound) gave a sample more than the bound: weight times norm was "
            f"{(found * norms).abs().max():g}, but the bound is {bound:g}. Noise for the bound "
            "would not hide it. End the function with .clamp(max=bound / norms)."
        )


def centred_count(norms: Tensor, bound: float) -> float:
    """``Σ_n (b_n - 1/2)``, with ``b_n = 1`` for a sample within the bound and 0 for others.

    One sample changes it by a half. Shape of ``norms``: ``[N]``.
    """
    return int((norms <= bound).sum()) - len(norms) / 2
