"""Histories of private training against a loop over samples.

A few are drawn here. For a long run of 500, set ``SEEDS`` to 500.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from backpack_capture import capture
from backpack_core.errors import BackpackError
from tests.drawn import Fault, check_refused
from tests.privacy.happenings import HAPPENINGS
from tests.privacy.histories import DELTA, Reference, Setting

SEEDS, BLOCKS = 4, 2
STEPS = 14
GIVES_UP = (  # true, and not what is tried here
    *("has not moved in", "has received only noise"),
    "in a tensor that is computed from weights alone",  # as many positions as rows of users
)


class History:
    """A private training and its reference.

    Attributes:
        told: What has happened.
        queue: The parts of batches that were drawn.
        done: How many of the first batch's parts went backward.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random, self.told = Random(seed), list[Any]()
        self.setting = Setting(self.random, seed)
        self.reference = Reference(self.setting)
        self.model, self.fresh = self.setting.model, copy.deepcopy(self.setting.model)
        for model in (self.model, self.reference.model):
            model.eval()
        self.optimizer = self.setting.optimizer(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** self.random.randint(0, 12))
        self.queue, self.done = deque[Any](), 0
        self.is_restarted = self.is_used = False
        self.moves = True
        self.make()

    def make(self, state: Any = None) -> None:
        self.private = self.setting.private(self.model, self.optimizer)
        self._captured: Any = None
        if state is not None:
            self.private.load_state_dict(state)
        draws = self.private.draws

        def watched(draw: Any) -> None:
            self.queue.append(draw)
            draws(draw)

        self.private.loader._draws = watched

    def refuses(self, call: Callable[[], Any]) -> None:
        """It raises one of our errors, and changes nothing."""
        check_refused(call)

    def begins(self) -> None:
        """A loop over the loader begins."""
        self.queue.clear()
        self.done = 0
        self.reference.is_new = True

    def ends_if_begun(self) -> None:
        """After a failed pass: parts before it are lost, and a whole batch may be tried again."""
        if self.private._waiting._is_begun:
            self.refuses(lambda: self.private.step(self.setting.value(self.model(self.x), self.y)))
            self.is_restarted = True

    def go(self) -> Iterator[None]:
        """The loop, with a pause after each pass."""
        while self.reference.steps < STEPS:
            self.begins()
            self.is_restarted = False
            self.private.ahead = self.setting.ahead
            for x, y in _behind(self.private.loader, self.setting.ahead):
                self.catches_up()
                self.x, self.y = x, y
                if not torch.equal(x, self.setting.x[[*self.queue[self.done].rows]]):
                    raise Fault("rows are others than those that were drawn")
                self.pass_over(x, y)
                yield
                if self.is_restarted or self.reference.steps >= STEPS:
                    break
            self.catches_up()
        self.check_epsilon()

    def pass_over(self, x: Tensor, y: Tensor) -> None:
        self.is_used = False
        while self.random.random() < 0.3 and not self.is_restarted and not self.is_used:
            name = self.random.choice([*HAPPENINGS])
            self.told.append(name)
            HAPPENINGS[name](self, x, y)
            self.catches_up()
        if self.is_restarted or self.is_used:
            return
        before = self.reference.steps
        is_last = self.queue[self.done].is_last
        took = self.take(x, y)
        self.done += 1
        self.catches_up()
        self.told.append(self.reference.steps)
        if took != is_last or (took and self.reference.steps == before):
            raise Fault(f"took a step: {took}")
        if self.random.random() < 0.1 and not self.setting.ahead:
            self.told.append("again")
            self.refuses(lambda: self.private.step(self.setting.value(self.model(x), y)))

    def take(self, x: Tensor, y: Tensor) -> bool:
        """A pass over a part, in one of the ways to write it."""
        way = self.random.choice(["step", "step", "block", "scaler", "captured", "backward"])
        if way == "captured" and (self.setting.users is None):
            if self._captured is None:
                function = lambda x, y: self.setting.value(self.model(x), y)  # noqa: E731
                self._captured = capture(function, self.private)
            return bool(self._captured(x, y))
        value = self.setting.value(self.model(x), y)
        if way == "block":
            with self.private:
                value.backward()
            if self.private.is_complete:
                self.optimizer.step()
                return True
            return False
        options: dict[str, Any] = {"scaler": self.scaler} if way == "scaler" else {}
        if way == "backward":
            options["backward"] = Tensor.backward
        return bool(self.private.step(value, **options))

    # Comparisons ---------------------------------------------------------------------------------

    def catches_up(self) -> None:
        """Let the reference take the steps that were taken, and compare."""
        while self.reference.steps < self.private.steps:
            units: list[list[int]] = []
            is_last = False
            while not is_last:
                draw = self.queue.popleft()
                owners = range(draw.units) if draw.owners is None else draw.owners.tolist()
                rows = [*zip(owners, draw.rows, strict=True)]
                units += [[r for o, r in rows if o == unit] for unit in range(draw.units)]
                is_last = draw.is_last
            self.done = 0
            self.reference.step(units, self.moves)
            self.moves = True
        if self.private.steps != self.reference.steps:
            raise Fault(f"{self.private.steps} steps instead of {self.reference.steps}")
        ours = dict(self.model.named_parameters())
        for name, right in self.reference.model.named_parameters():
            _near(f"the parameter {name}", ours[name].detach(), right.detach())
        if self.private.records and self.reference.norms:
            self._check_record()

    def _check_record(self) -> None:
        record, right = self.private.records[-1], self.reference
        for group, norms in right.norms.items():
            _near(f"norms of {group}", record.norms[group], torch.tensor(norms))
            for kind, found, wanted in (
                ("bound", record.bounds, right.before),
                ("share", record.clipped, right.shares),
                ("next bound", self.private.clipping.bounds, right.bounds),
            ):
                if abs(found[group] - wanted[group]) > 1e-10:
                    raise Fault(f"{kind} of {group}: {found[group]}, not {wanted[group]}")

    def check_epsilon(self) -> None:
        found, right = self.private.epsilon(DELTA), self.reference.epsilon()
        if found != pytest.approx(right, rel=1e-12):
            raise Fault(f"epsilon {found}, not {right}")


def _behind(loader: Any, ahead: int) -> Iterator[Any]:
    """The batches of a loop that asks for one before it works on the last one."""
    batches = deque[Any]()
    for batch in loader:
        batches.append(batch)
        if len(batches) > ahead:
            yield batches.popleft()
    yield from batches


def _near(what: str, found: Tensor, right: Tensor) -> None:
    if found.shape != right.shape:
        raise Fault(f"{what}: shape {[*found.shape]}, not {[*right.shape]}")
    distance = float((found - right).abs().max()) if right.numel() else 0.0
    if not distance <= 1e-10 * (1 + float(right.abs().max() if right.numel() else 0.0)):
        raise Fault(f"{what} is off by {distance:.3g}")


def fault_of(seed: int) -> str:
    """What is wrong in a history, or in two that go on in turns."""
    random, told = Random(seed), list[Any]()
    try:
        histories = [History(s) for s in (seed, seed + 10**6)[: random.choice([1, 1, 2])]]
        told = [history.told for history in histories]
        going = [history.go() for history in histories]
        while going:
            one = random.choice(going)
            if next(one, going) is going:
                going.remove(one)
    except (Fault, BackpackError) as error:
        if any(text in str(error) for text in GIVES_UP):
            return ""
        kind = "" if isinstance(error, Fault) else f"{type(error).__name__}: "
        return f"seed {seed}, {told}: {kind}{error}"
    return ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_histories(block: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(block, SEEDS, BLOCKS):
            fault = fault_of(seed)
            assert not fault, fault
