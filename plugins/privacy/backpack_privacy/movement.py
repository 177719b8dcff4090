"""Checks in the first steps that only private gradients move parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from backpack_core.errors import UsageError
from backpack_privacy.copies import twin_of
from backpack_privacy.processes import Processes
from backpack_privacy.shards import local
from backpack_privacy.sums import Sums

# Relative to a step: the optimizer's copy computes the same, up to the order of sums.
_TOLERANCE = 1e-2


class Movement:
    """Compares each step with that of a copy of the optimizer on a copy of the parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Mapping[str, Tensor],
        steps: int,
        processes: Processes,
    ) -> None:
        """Store what is watched.

        Args:
            optimizer: The user's optimizer.
            named: The trained parameters.
            steps: How many steps to check.
            processes: The processes that train together; each has its own samples (and shards).
        """
        self._optimizer, self._named, self._processes = optimizer, named, processes
        self._left = self._steps = steps
        self._still = set(named)  # have not moved so far
        self._noise_only = set(named)  # no sample's gradient has reached them so far
        self._has_samples = False
        self._versions: dict[str, int] = {}  # after the last step
        self._before: dict[str, Tensor] = {}
        self._expected: dict[str, Tensor] = {}

    def sees(self, sums: Sums) -> None:
        """Note which parameters the samples of a step have reached.

        Args:
            sums: The clipped sums, without noise.
        """
        if not self._left:
            return
        totals = sums.totals()
        self._has_samples |= any(map(len, sums.norms.values()))  # of this process
        self._noise_only -= {name for name, p in self._named.items() if totals[p].any()}

    def before(self) -> None:
        """Predict a step: the gradients are known, and the parameters have not changed yet.

        Raises:
            UsageError: Parameters have changed since the last step.
        """
        self._check_unchanged()
        self._versions = {}  # a step that fails may have moved something
        if not self._left:
            return
        twin = twin_of(self._optimizer)  # takes along no hooks
        pairs = zip(_parameters(self._optimizer), _parameters(twin), strict=True)
        twins = dict(pairs)
        for parameter, copy in twins.items():
            copy.grad = None if parameter.grad is None else parameter.grad.clone()
        twin.step()
        self._before = {n: local(p).clone() for n, p in self._named.items()}
        self._expected = {n: local(twins[p]) for n, p in self._named.items()}

    def _check_unchanged(self) -> None:
        """Check that parameters have not changed since the last step."""
        for name, version in self._versions.items():
            found, reached = self._named[name], self._before.get(name)
            is_same = reached is None or torch.equal(reached, local(found))
            if not is_same or found._version != version:
                raise UsageError(
                    f"The parameter {name} was changed between two steps. If its old value was put "
                    "back, training is lost; if another optimizer takes plain gradients, it is not "
                    f"private: remove that code. {_ALL_WELL}"
                )

    def after(self) -> None:
        """Compare after the step.

        Raises:
            UsageError: A parameter moved differently, not at all, or only by noise.
        """
        if self._steps:
            self._versions = {name: p._version for name, p in self._named.items()}
        if not self._left:
            return
        for name, parameter in self._named.items():
            before, expected, found = self._before[name], self._expected[name], local(parameter)
            moved = (found - before).double().norm()
            missed = (found - expected).double().norm()
            if not missed <= _TOLERANCE * (expected - before).double().norm():
                raise UsageError(_otherwise(name, float(moved), float(missed)))
            if moved or not parameter.numel():
                self._still.discard(name)
            before.copy_(found)
        self._expected = {}
        self._left -= 1
        if not self._left:
            self._before = {}
            self._hear()
            self._judge()

    def _hear(self) -> None:
        """Add what the other processes have seen, so that all or none raise an error."""
        seen = [[name not in of for name in self._named] for of in (self._still, self._noise_only)]
        seen.append([self._has_samples] * len(self._named))
        device = next(iter(self._named.values())).device
        counts = torch.tensor(seen, dtype=torch.float32, device=device)
        self._processes.add_up([counts])
        moved, reached, samples = counts.bool().tolist()
        self._still = {name for name, is_so in zip(self._named, moved, strict=True) if not is_so}
        self._noise_only = {n for n, is_so in zip(self._named, reached, strict=True) if not is_so}
        self._has_samples = any(samples)

    def _judge(self) -> None:
        unreached = self._noise_only if self._has_samples else set[str]()
        if self._still - unreached:
            name = min(self._still - unreached)
            dtype = str(self._named[name].dtype).removeprefix("torch.")
            raise UsageError(
                f"The parameter {name} has not moved in {self._steps} steps. Its learning rate is "
                f"zero, or its steps are too small for the precision of {dtype}: raise the "
                f"learning rate, or freeze it. {_ALL_WELL}"
            )
        if unreached:
            name = min(unreached)
            got = "has not moved" if name in self._still else "has received only noise"
            raise UsageError(
                f"The parameter {name} {got} in {self._steps} steps: no sample's loss depends on "
                "it. Is the layer used in forward(), is the adapter switched on, is its input "
                "zero, does an expert get no token? If this is intended, freeze it. "
                f"{_ALL_WELL}"
            )


_ALL_WELL = "(make_private(..., checks=0) turns off these checks.)"


def _otherwise(name: str, moved: float, missed: float) -> str:
    if not moved:
        return (
            f"The parameter {name} did not move, but its private gradient says that it should. "
            "Something put its old value back, or the optimizer's step was replaced. Remove that "
            f"code. {_ALL_WELL}"
        )
    return (
        f"The parameter {name} moved differently than its private gradient says: by {moved:.3g}, "
        f"which misses the optimizer's step by {missed:.3g}. Something else changes it, perhaps "
        "with gradients that have no noise: a second optimizer, a hook, a callback. Remove that "
        f"code. {_ALL_WELL}"
    )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
