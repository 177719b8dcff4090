"""The privacy cost of training: an adapter for the accountants of ``dp-accounting``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal, TypeAlias

from backpack_core.errors import UsageError

Kind: TypeAlias = Literal["pld", "rdp"] | Callable[[], Any]


@dataclass
class Spent:
    """Equal steps.

    Attributes:
        noise_multiplier: Standard deviation of the noise, relative to the sensitivity.
        rate: The probability that a sample takes part in a step; ``None`` if each takes part in
            one step of every epoch, in any order.
        count: How many steps; without a rate, how many epochs.
    """

    noise_multiplier: float
    rate: float | None
    count: int


class Accountant:
    """Counts the steps that were taken, and computes their cost.

    ``dp-accounting`` (Google) computes epsilons from the list of steps. They hold for neighbours
    that differ by one sample (one user, with ``users=``) that is added or removed; for shuffled
    batches, by one sample that is replaced by nothing.

    Attributes:
        spent: The steps, in order.
    """

    def __init__(self, kind: Kind = "pld") -> None:
        """Choose how to count.

        Args:
            kind: ``"pld"``: privacy loss distributions, the tightest. ``"rdp"``: Rényi differential
                privacy. Or a function that returns a new accountant: an object with
                ``compose(event, count)`` and ``get_epsilon(delta)``, such as one of
                ``dp_accounting``.

        Raises:
            UsageError: The kind is unknown.
        """
        if not callable(kind) and kind not in ("pld", "rdp"):
            raise UsageError(
                "accountant must be 'pld', 'rdp', or a function that returns one of dp_accounting. "
                f"Got {kind!r}."
            )
        self._kind = kind
        self.spent: list[Spent] = []

    def add(self, noise_multiplier: float, rate: float | None) -> None:
        """Count one more step; without a rate, one more epoch."""
        last = self.spent[-1] if self.spent else None
        if last and (last.noise_multiplier, last.rate) == (noise_multiplier, rate):
            last.count += 1
        else:
            self.spent.append(Spent(noise_multiplier, rate, 1))

    def epsilon(self, delta: float) -> float:
        """The cost of all steps together.

        Args:
            delta: The probability that more may leak.

        Raises:
            UsageError: ``delta`` is not between 0 and 1.
        """
        check_delta(delta)
        return self.epsilon_of(self.spent, delta)

    def epsilon_with(self, state: Iterable[dict[str, Any]], more: Spent, delta: float) -> float:
        """The cost of a checkpoint's steps together with some more.

        Args:
            state: The result of :meth:`state_dict`.
            more: The steps that would follow; their count may be zero.
            delta: See :meth:`epsilon`.
        """
        steps = [Spent(**step) for step in state]
        last = steps[-1] if steps else None
        if last and (last.noise_multiplier, last.rate) == (more.noise_multiplier, more.rate):
            last.count += more.count
        elif more.count:
            steps.append(more)
        return self.epsilon_of(steps, delta)

    def epsilon_of(self, steps: Iterable[Spent], delta: float) -> float:
        """The cost of some steps."""
        accountant, steps = self._new(), [*steps]
        if any(step.noise_multiplier == 0 for step in steps):
            return inf
        with _listening():
            for step in steps:
                accountant.compose(_event(step), step.count)
            return float(accountant.get_epsilon(delta)) if steps else 0.0

    def noise_for(self, target: float, delta: float, rate: float | None, count: int) -> float:
        """The smallest noise multiplier that keeps equal steps within a budget.

        Args:
            target: The epsilon not to exceed.
            delta: See :meth:`epsilon`.
            rate: See :class:`Spent`.
            count: How many steps; without a rate, how many epochs.

        Raises:
            UsageError: The target is not positive and finite, or no noise reaches it.
        """
        check_delta(delta)
        if not isinstance(target, (int, float)) or not 0 < target < inf:
            raise UsageError(f"target_epsilon must be positive and finite. Got {target!r}.")
        from dp_accounting import dp_event, mechanism_calibration

        def event(noise: float) -> Any:
            return dp_event.SelfComposedDpEvent(_event(Spent(noise, rate, 1)), count)

        try:
            with _listening(is_search=True):
                found = mechanism_calibration.calibrate_dp_mechanism(
                    self._new, event, target, delta, tol=1e-3
                )
        except mechanism_calibration.NoBracketIntervalFoundError as error:
            raise UsageError(
                f"No noise keeps {count} steps within epsilon {target:g} at delta {delta:g}. Take "
                "fewer epochs, smaller batches, or a larger target."
            ) from error
        return float(found)

    def _new(self) -> Any:
        if callable(self._kind):
            return self._kind()
        from dp_accounting import pld, rdp

        return pld.PLDAccountant() if self._kind == "pld" else rdp.RdpAccountant()

    def state_dict(self) -> list[dict[str, Any]]:
        """The list of steps."""
        return [asdict(step) for step in self.spent]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        """Continue from a list of steps."""
        self.spent = [Spent(**step) for step in state]


def check_delta(delta: Any) -> None:
    """Check that ``delta`` is a probability.

    Raises:
        UsageError: ``delta`` is not between 0 and 1.
    """
    if not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise UsageError(
            f"delta must be a probability, below one over the number of samples. Got {delta!r}."
        )


@contextmanager
def _listening(is_search: bool = False) -> Iterator[None]:
    """A block that reads the log messages of ``dp-accounting``.

    The messages about orders that it leaves out are dropped: those cost only tightness. Another
    message says that rounding has made a divergence negative, and the epsilon becomes zero.

    Args:
        is_search: Whether a search tries noise that may be far from the result.

    Raises:
        UsageError: An epsilon of zero comes from rounding.
    """
    lost: list[str] = []

    def hears(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "Negative Renyi divergence" in message:
            lost.append(message)
        return not (lost and lost[-1] == message) and "Excluding this order" not in message

    logger = logging.getLogger("absl")  # what dp-accounting logs to
    logger.addFilter(hears)
    try:
        yield
    finally:
        logger.removeFilter(hears)
    if lost and not is_search:
        raise UsageError(
            f"The accountant lost all digits: {lost[0]!r}. An epsilon of zero would be wrong: "
            'take accountant="pld", or noise and sampling rates that are less extreme.'
        )


def _event(step: Spent) -> Any:
    from dp_accounting import dp_event

    gaussian = dp_event.GaussianDpEvent(step.noise_multiplier)
    if step.rate is None:
        return gaussian
    return dp_event.PoissonSampledDpEvent(step.rate, gaussian)
