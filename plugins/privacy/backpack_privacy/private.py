"""Private training: the user's model, loss and optimizer, with clipped sums and noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from backpack_core.errors import UsageError
from backpack_privacy.captured import CapturedSteps
from backpack_privacy.copies import allow_copies, refuse_copies
from backpack_privacy.given import Given
from backpack_privacy.movement import Movement
from backpack_privacy.refusals import (
    PRIVATE,
    check_finite,
    check_no_closure,
    check_no_gradient,
    check_number,
    check_open,
    check_optimizer,
    check_pass,
    check_stepped,
)
from backpack_privacy.release import Budget, Release, Spending
from backpack_privacy.sampling import Draw, PrivateLoader
from backpack_privacy.scalers import Scalers
from backpack_privacy.sums import Pass, SinglePass, Sums, Told
from backpack_privacy.waiting import Waiting
from backpack_privacy.watching import Buffers, Forwards


class Private(Spending):
    """Made by :func:`make_private`. Model, loss function and optimizer stay the user's objects.

    Two loops are equal:

        >>> for inputs, targets in private.loader:
        ...     private.step(lossfunc(model(inputs), targets))

        >>> for inputs, targets in private.loader:
        ...     with private:  # one backward pass
        ...         lossfunc(model(inputs), targets).backward()
        ...     if private.is_complete:  # always true, unless batches are shown in parts
        ...         optimizer.step()

    Attributes:
        model, lossfunc, optimizer: The user's objects.
        loader: The batches; see :class:`~backpack_privacy.PrivateLoader`.
        records: What clipping did in the last thousand steps, a :class:`Record` for each.
    """

    loader: PrivateLoader

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        optimizer: Optimizer,
        *,
        inner: Module,
        release: Release,
        normaliser: Any,
        budget: Budget,
        checks: int,
        public_buffers: Sequence[str],
    ) -> None:
        """Install the hooks; :func:`make_private` has checked the arguments."""
        self.model, self.lossfunc, self.optimizer = model, lossfunc, optimizer
        self.records = release.records
        self._inner, self._release = inner, release
        self._normaliser, self._budget = normaliser, budget
        self._named = check_optimizer(inner, optimizer)
        self._sums = Sums(self._named, self.clipping, inner)
        release.check()
        self._movement = Movement(optimizer, self._named, checks, release.processes)
        self._buffers = Buffers(inner, public_buffers)
        self._waiting, self._scalers = Waiting(), Scalers(optimizer)
        self._pass: Pass | None = None
        self._told, self._kind = Told(), Pass
        self._is_mean = self._is_filled = self._is_stepped = False
        self._given = Given()
        self._watch = Forwards(inner)
        self._handles = [
            *self._watch.handles,
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        PRIVATE.add(optimizer)
        refuse_copies(optimizer)

    # The loops

    def step(
        self,
        loss: Tensor,
        *,
        scaler: Any = None,
        backward: Callable[[Tensor], Any] | None = None,
        normaliser: float | None = None,
    ) -> bool:
        """Go backward; after the last part of a batch, add noise and step the optimizer.

        Args:
            loss: The loss of the last batch from the loader.
            scaler: A ``torch.amp.GradScaler``. The loss is multiplied by its scale, which clipped
                sums do not contain. A step with sums that overflow is skipped, but counted.
            backward: What to call instead of ``loss.backward()``, such as
                ``accelerator.backward``. With a scaler, it must scale the loss itself. It must not
                multiply it by anything else.
            normaliser: What this loss divides by, if that differs from batch to batch.

        Returns:
            Whether the optimizer took a step.

        Raises:
            UsageError: The loop or the loss cannot be private; the message says what to do.
        """
        check_number(loss)
        scale = 1.0 if scaler is None else scaler.get_scale()
        with self.recording(scale, normaliser, SinglePass if backward is None else Pass):
            if backward is not None:
                _by_function(backward, loss, scale)
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
        if not self.is_complete:
            return False
        if scaler is None:
            self.optimizer.step()
            return True
        return self._step_with(scaler, scale)

    def _step_with(self, scaler: Any, scale: float) -> bool:
        self._fill(scale, is_looked_at=True)
        self._is_filled, self._is_stepped = True, False
        try:
            with self._scalers.stepping(scaler):
                scaler.step(self.optimizer)  # leaves parameters alone if a number is infinite
        except BaseException:
            self._given.take_back()
            raise
        finally:
            self._is_filled = False  # otherwise the step after a failed one would be a plain one
        scaler.update()
        is_stepped = self._is_stepped  # by the scaler, not by what follows
        self._given.take_back()
        self._step_without_samples(self._waiting.take_empty())
        return is_stepped

    @property
    def is_complete(self) -> bool:
        """Whether all parts of the batch have gone backward, so that a step is due."""
        return self._sums.is_complete

    def recording(
        self, scale: float = 1.0, normaliser: float | None = None, kind: type[Pass] = Pass
    ) -> Private:
        """Describe the loss of the next ``with private:``.

        Args:
            scale: What else the loss is multiplied by, see :meth:`step`.
            normaliser: See :meth:`step`.
            kind: The class of the pass.
        """
        self._told, self._kind = Told(scale, normaliser), kind
        return self

    def captured(self, function: Callable[..., Any], make: Callable[..., Any]) -> CapturedSteps:
        """``capture(function, private)``: a captured function of a batch, which takes a step.

        Args:
            function: Returns the loss.
            make: See ``backpack_capture.Host``.
        """
        return CapturedSteps(self, function, make)

    def __enter__(self) -> Private:
        """Begin a backward pass over the batch that was drawn last.

        Raises:
            UsageError: No batch waits, a step is due, a parameter has a plain gradient, the
                optimizer has other parameters, or the budget is spent.
        """
        (told, kind), self._told, self._kind = (self._told, self._kind), Told(), Pass
        if self._pass is not None:
            raise UsageError("`with private:` is one backward pass and cannot be nested.")
        check_open(self.optimizer)
        self._given.take_back()
        check_pass(self._inner, self._named)
        check_stepped(self.optimizer, self._named)  # the step would refuse it, too late
        self._budget.check(self.steps)
        begun = kind(self._sums, self.clipping, self._waiting.take(self._sums))
        begun.begin(told, self._normaliser, self.model is not self._inner)
        self._pass, self._is_mean = begun, told.is_mean(self._normaliser, self.lossfunc)
        self._watch.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the backward pass: take the clipped sums.

        Raises:
            UsageError: The pass was not one over the samples of the batch.
        """
        assert self._pass is not None
        ended, self._pass = self._pass, None
        self._waiting.failed()  # unless this method reaches its end
        ended.end(kind, error, traceback)
        if kind is not None:
            return
        try:
            if ended.is_watched:
                self.watched()
            self._buffers.check()
        except UsageError:
            self._sums.forget()
            raise
        self._waiting.done()

    def watched(self) -> None:
        """Check a finished pass, if hooks have seen its forward pass."""
        self._watch.end(self._is_mean)

    # What the loader says

    def begins(self) -> None:
        """An epoch begins; the rest of the last one is forgotten."""
        if self._pass is not None:  # the pass was opened but did not reach its end
            self._pass.end(RuntimeError, None, None)
            self._pass = None
        self._given.take_back()
        self._buffers.begin()
        self._waiting.forget()
        self._release.begins()
        self._sums.forget()

    def draws(self, draw: Draw) -> None:
        """A batch, or a part of one, is about to be shown.

        Raises:
            UsageError: The batch before was not used.
        """
        self._given.take_back()
        if self._waiting.add(draw, self._sums):
            self._step_without_samples()

    def _step_without_samples(self, count: int = 1) -> None:
        """Take steps of noise, as for every batch, without samples in this process."""
        for _ in range(count):
            self._budget.check(self.steps)
            self._given.take_back()
            check_pass(self._inner, self._named)  # as in processes that have samples
            self._sums.is_complete = True
            self.optimizer.step()

    def ends(self) -> None:
        """All batches of an epoch were shown, and the loop asked for more.

        Raises:
            UsageError: The last one was not used.
        """
        self._waiting.check(self._sums)

    # The step of the optimizer

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Replace plain gradients by private ones."""
        check_no_closure([*args, *kwargs.values()])
        if not self._is_filled:
            self._scalers.check()
        if self._given.enter_again():
            return
        check_stepped(optimizer, self._named)
        if not self._is_filled:
            self._given.take_back()
            check_no_gradient(self._named)
            if not self._sums.is_complete:
                raise UsageError(
                    "optimizer.step() has no private sum of a whole batch for its step. Go "
                    "backward in `with private:`, and step after this block if "
                    "private.is_complete, or call private.step(loss)."
                )
            scale = getattr(optimizer, "grad_scale", None)  # fused optimizers divide by it
            self._fill(1.0 if scale is None else float(scale))
        self._movement.before()
        self._given.enter()

    def _fill(self, scale: float = 1.0, is_looked_at: bool = False) -> None:
        """Set ``.grad`` to the private gradient, and count the step, whatever becomes of it.

        Args:
            scale: What it is multiplied by.
            is_looked_at: Whether a scaler looks for numbers that are not finite.
        """
        gradients = self._release.gradients(self._sums)
        if not is_looked_at:
            check_finite(gradients)
        self._given.give(self._named, gradients, scale)
        self._movement.sees(self._sums)
        self._release.finish(self._sums)
        self._sums.forget()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check whether parameters moved as they should."""
        if not self._given.leave():
            return
        overflow = getattr(optimizer, "found_inf", None)  # fused optimizers look by themselves
        self._is_stepped = overflow is None or not bool(overflow)
        self._given.take_back(is_over=True)
        self._movement.after()
        if not self._is_filled:  # otherwise when the scaler is through
            self._step_without_samples(self._waiting.take_empty())

    @property
    def ahead(self) -> int:
        """How many batches may wait; 1 for loops that ask for one before they use the last one."""
        return self._waiting.ahead

    @ahead.setter
    def ahead(self, count: int) -> None:
        self._waiting.ahead = count

    def close(self) -> None:
        """Remove the hooks: from now on the optimizer takes plain gradients."""
        for handle in self._handles:
            handle.remove()
        self._scalers.close()
        self._given.take_back()
        PRIVATE.discard(self.optimizer)
        allow_copies(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: the spending of two copies would not be added up.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "Private training cannot be copied or pickled: its hooks belong to one optimizer, and "
            "the spending of two copies would not be added up. Save private.state_dict(), and call "
            "make_private(...) for the model and the optimizer that continue."
        )

    def __repr__(self) -> str:
        """The settings, and the progress."""
        return f"<Private: {self._release}>"


def _by_function(backward: Callable[[Tensor], Any], loss: Tensor, scale: float) -> None:
    """Go backward by a function that may multiply the loss by a scaler's number alone.

    Raises:
        UsageError: It multiplies the loss by another number.
    """
    arrived: list[Tensor] = []
    handle = loss.register_hook(arrived.append)
    try:
        backward(loss)
    finally:
        handle.remove()
    for factor in map(float, arrived):
        if not isclose(factor, scale, rel_tol=0.001):
            raise UsageError(
                f"backward= has multiplied the loss by {factor / scale:g}, and the noise stays the "
                "same. Every batch of private.loader is a step, so gradients are not to be added "
                "up over batches: write Accelerator(gradient_accumulation_steps=1), and "
                "make_private(..., max_rows=...) if a batch is too large. If the number is that of "
                "a gradient scaler, pass scaler=."
            )
