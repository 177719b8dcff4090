"""The release of a batch: the sum with noise, its cost, and a record of the clipping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_privacy.accounting import Accountant, Spent
from backpack_privacy.clipping import Clipping, centred_count
from backpack_privacy.processes import Processes
from backpack_privacy.randomness import Source
from backpack_privacy.sampling import Sampler
from backpack_privacy.sums import Sums

_ROUNDING = 1e-6  # relative amount by which a budget may seem exceeded


@dataclass(frozen=True)
class Record:
    """What clipping did in one step, in this process. It is not private: do not publish it.

    Attributes:
        norms: The norms of the gradients of the samples' own losses, ``[N]`` for each group.
        bounds: The bounds.
        clipped: The share of samples beyond the bound.
    """

    norms: dict[str, Tensor]
    bounds: dict[str, float]
    clipped: dict[str, float]


@dataclass(frozen=True)
class Budget:
    """What may be spent.

    Attributes:
        delta: The probability that more may leak; ``None`` if it was not given.
        steps: How many steps were planned; ``None`` for any number.
        epsilon: The target for all of them; ``None`` if the noise was given.
    """

    delta: float | None = None
    steps: int | None = None
    epsilon: float | None = None

    def check(self, taken: int) -> None:
        """Check that a further step is planned.

        Args:
            taken: How many steps were taken.

        Raises:
            UsageError: All planned steps were taken.
        """
        if self.steps is not None and taken >= self.steps:
            raise UsageError(
                f"All {self.steps} steps that were planned are taken, and a further one would "
                "spend more. Plan more epochs=, or stop here."
            )


class Release:
    """Adds noise, counts, and adapts the bounds.

    Attributes:
        clipping: The bounds.
        noise_multiplier: Standard deviation of the noise, relative to the sensitivity.
        accountant: What was spent.
        processes: The processes that train together.
        records: The records of the last thousand steps.
        steps: How many steps were taken.
    """

    def __init__(
        self,
        clipping: Clipping,
        noise_multiplier: float,
        sampler: Sampler,
        source: Source,
        accountant: Accountant,
        processes: Processes,
    ) -> None:
        """Store the parts."""
        self.clipping, self.noise_multiplier = clipping, noise_multiplier
        self.accountant, self.records, self.steps = accountant, deque[Record](maxlen=1000), 0
        self._sampler, self._source, self.processes = sampler, source, processes
        self._is_new_epoch, self._is_compared = True, False

    def __repr__(self) -> str:
        """The settings, and the progress."""
        return (
            f"noise {self.noise_multiplier:g}, sensitivity {self.clipping.sensitivity:g}, "
            f"{self._sampler.expected:g} of {self._sampler.units} expected in a batch, "
            f"{self.steps} steps taken"
        )

    def check(self) -> None:
        """Refuse clipping that leaves no noise for the sum.

        Raises:
            UsageError: The noisy counts alone spend everything.
        """
        self.clipping.noise_multiplier(self.noise_multiplier)

    def begins(self) -> None:
        """An epoch begins."""
        self._is_new_epoch = True

    def gradients(self, sums: Sums) -> list[Tensor]:
        """The sums over processes with noise, divided by the expected number of samples.

        Raises:
            UsageError: Before the first step, processes differ in what a loaded state sets.
        """
        if not self._is_compared:
            bounds = dict(self.clipping.bounds)
            self.processes.check_settings(
                {"private.steps": self.steps, "The list of bounds": bounds}
            )
            self._is_compared = True
        multiplier = self.clipping.noise_multiplier(self.noise_multiplier)
        found = [total.clone() for total in sums.totals().values()]
        if self.processes.rank == 0 and multiplier:
            for total, noise in zip(found, self._source.normals(found), strict=True):
                total.add_(noise, alpha=multiplier * self.clipping.sensitivity)
        self.processes.add_up(found)
        return [total.div_(self._sampler.expected) for total in found]

    def finish(self, sums: Sums) -> None:
        """Count a step with these sums, and let the bounds follow."""
        norms, bounds = sums.norms, dict(self.clipping.bounds)
        clipped = {name: float((norms[name] > bound).sum()) for name, bound in bounds.items()}
        shares = {name: count / max(1, len(norms[name])) for name, count in clipped.items()}
        self.records.append(Record(norms, bounds, shares))
        if self.clipping.count_noise is not None:
            self._adapt(norms, self.clipping.count_noise)
        self.steps += 1
        if self._sampler.rate is not None or self._is_new_epoch:
            self.accountant.add(self.noise_multiplier, self._sampler.rate)
        self._is_new_epoch = False

    def _adapt(self, norms: dict[str, Tensor], deviation: float) -> None:
        """Tell the clipping the noisy share of samples within the bounds."""
        counts = {n: centred_count(norms[n], c) for n, c in self.clipping.bounds.items()}
        noisy = torch.tensor([*counts.values()], dtype=torch.float64)
        if self.processes.rank == 0 and self.noise_multiplier:
            noisy += deviation * self._source.normal(noisy)
        noisy = noisy.to(next(iter(norms.values())).device)
        self.processes.add_up([noisy])
        shares = (noisy / self._sampler.expected + 0.5).tolist()
        self.clipping.after(dict(zip(counts, shares, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The state needed to continue."""
        return {
            "spent": self.accountant.state_dict(),
            "bounds": self.clipping.state_dict(),
            "source": self._source.state_dict(),
            "steps": self.steps,
            "settings": self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        return {**self.clipping.settings(), "samples (or users)": self._sampler.units}

    def load_state_dict(self, state: dict[str, Any], budget: Budget) -> None:
        """Continue from a state.

        Raises:
            UsageError: The state is of another training, steps were taken here already, or the
                state would exceed the budget.
        """
        self._check_state(state)
        self._check_target(state, budget)
        self.clipping.load_state_dict(state["bounds"])
        self.accountant.load_state_dict(state["spent"])
        self._source.load_state_dict(state["source"])
        self.steps = state["steps"]

    def _check_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise UsageError(
                f"A state is what private.state_dict() returned. Got {type(state).__name__}."
            )
        missing = {"spent", "bounds", "source", "steps", "settings"} - {*state}
        if missing:
            raise UsageError(
                f"The state lacks {', '.join(sorted(missing))}: pass what private.state_dict() "
                "returned. Without it, earlier spending would be forgotten."
            )
        self.clipping.check_state(state["bounds"])
        theirs, ours = state["settings"], self._settings()
        for name in {**ours, **theirs}:
            if theirs.get(name) != ours.get(name):
                raise UsageError(
                    f"The state is of a training with {name} {theirs.get(name)!r}, but this one "
                    f"has {ours.get(name)!r}. Call make_private(...) with the same data and the "
                    "same clipping as before."
                )
        if self.steps:
            raise UsageError(
                f"{self.steps} steps were taken here, and their spending would be forgotten. Load "
                "the state right after make_private(...), before the first step."
            )

    def _check_target(self, state: dict[str, Any], budget: Budget) -> None:
        """Refuse a state that, with the planned steps, would exceed the target."""
        if budget.epsilon is None or budget.delta is None or budget.steps is None:
            return
        left, rate = max(0, budget.steps - state["steps"]), self._sampler.rate
        more = Spent(
            self.noise_multiplier, rate, left if rate else ceil(left / self._sampler.steps)
        )
        found = self.accountant.epsilon_with(state["spent"], more, budget.delta)
        if found > budget.epsilon * (1 + _ROUNDING):
            raise UsageError(
                f"The steps of the state and the {left} that are left of epochs= would spend "
                f"epsilon {found:.3g}, but target_epsilon is {budget.epsilon:g}. Give the target "
                "and the epochs= of the first run, fewer epochs=, or more noise by "
                "noise_multiplier=."
            )


class Spending:
    """The settings of a private training, and the cost of its steps."""

    _release: Release
    _budget: Budget

    @property
    def clipping(self) -> Clipping:
        """The bounds."""
        return self._release.clipping

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise, relative to the sensitivity."""
        return self._release.noise_multiplier

    @property
    def accountant(self) -> Accountant:
        """What was spent."""
        return self._release.accountant

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._release.steps

    def epsilon(self, delta: float | None = None) -> float:
        """What all steps so far have spent.

        Args:
            delta: The probability that more may leak; default: ``target_delta``.

        Raises:
            UsageError: No ``delta`` was given, here or before.
        """
        delta = self._budget.delta if delta is None else delta
        if delta is None:
            raise UsageError(
                "No delta was given. Write private.epsilon(delta), with a tenth of one over the "
                "number of samples, for example."
            )
        return self.accountant.epsilon(delta)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in addition to those of model and optimizer."""
        return self._release.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, before the first step.

        Args:
            state: The result of :meth:`state_dict`.

        Raises:
            UsageError: The state does not fit, steps were taken here, or the target would be
                exceeded.
        """
        self._release.load_state_dict(state, self._budget)
