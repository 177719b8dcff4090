"""The clipped sums of one batch, which may come in parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import View, backpack
from backpack_core.errors import (
    BackpackError,
    NotExtendedError,
    UnsupportedError,
    UsageError,
)
from backpack_firstorder.clipping import ClippedSumGrad
from backpack_interplay.shards import shards_in
from backpack_privacy.clipping import Clipping
from backpack_privacy.divisors import Divisor, Divisors, divisors_of, noted
from backpack_privacy.refusals import is_half
from backpack_privacy.sampling import Draw

FIELD = "private_sum"


@dataclass(frozen=True)
class Told:
    """What a loop says about the loss of one backward pass.

    Attributes:
        scale: What else the loss is multiplied by.
        normaliser: What it divides by; ``None`` for the argument of ``make_private``.
    """

    scale: float = 1.0
    normaliser: float | None = None

    def is_mean(self, normaliser: Any, lossfunc: Any) -> bool:
        """Whether the loss divides by a number that depends on the batch.

        Args:
            normaliser: The argument of ``make_private``.
            lossfunc: The loss module that ``normaliser="loss"`` asks.
        """
        if self.normaliser is not None or normaliser == "samples":
            return True
        return normaliser == "loss" and getattr(lossfunc, "reduction", "") != "sum"


class Sums:
    """Adds up clipped gradients over the parts of a batch.

    Attributes:
        number: Another one for each object.
        norms: The norms of the samples' gradients so far, for each group.
        divisors: Compares what losses divide by, in all batches.
        is_complete: Whether all parts were added.
        is_partial: Whether some parts were added, but not all.
    """

    def __init__(self, named: Mapping[str, Tensor], clipping: Clipping, model: Module) -> None:
        """Store what is summed.

        Args:
            named: The trained parameters.
            clipping: The bounds.
            model: The model with these parameters.
        """
        self.number = next(_NUMBERS)
        _ALL[self.number] = self
        self._model, self._shards = model, dict[Tensor, Tensor]()
        self._named, self._clipping = named, clipping
        self._groups = clipping.bind(named)
        self.divisors = Divisors()
        self.forget()

    def forget(self) -> None:
        """Begin a batch."""
        self._totals: dict[Tensor, Tensor] = {}
        self.norms: dict[str, Tensor] = {
            name: torch.empty(0, device=next(iter(self._groups)).device)
            for name in self._clipping.bounds
        }
        self.is_complete = self.is_partial = False

    def add(self, draw: Draw, sums: Mapping[Tensor, Tensor], seen: Mapping[str, Tensor]) -> None:
        """Add what a backward pass has computed.

        Args:
            draw: The draw of the pass.
            sums: The sum for each parameter that the pass reached.
            seen: The norms of the samples, for each group.

        Raises:
            UsageError: Other samples took part than those that were drawn.
        """
        for found in sums.values():
            _check_precision(found)  # in every process: otherwise the others wait for this one
        if not draw.units:  # the model ran for other processes
            self.is_complete = True
            return
        counts = {len(norms) for norms in seen.values()}
        if counts != {draw.units}:
            others = ", ".join(map(str, sorted(counts))) or "none"
            raise UsageError(
                f"{draw.units} samples were drawn, but {others} took part in the backward pass. "
                "Give the model the whole, unchanged batch: the accounting does not allow for "
                "samples that are left out, repeated or put together."
            )
        for parameter, found in sums.items():
            known = self._totals.get(parameter)
            # The first part is stored directly: a zero to add it to would be written and read.
            wide = found.to(torch.promote_types(found.dtype, torch.float32))
            self._totals[parameter] = wide if known is None else known.add_(wide)
        some = next(iter(seen.values()))
        for name, known in self.norms.items():  # no sample of the pass reaches the other groups
            norms = seen.get(name, torch.zeros_like(some))
            self.norms[name] = torch.cat([known.to(norms), norms])
        self.is_complete, self.is_partial = draw.is_last, not draw.is_last

    @property
    def groups(self) -> Mapping[Tensor, str]:
        """The name of the group of each trained parameter."""
        return self._groups

    def totals(self) -> dict[Tensor, Tensor]:
        """The sum for each trained parameter, at least in single precision."""
        return {p: self._totals[p] if p in self._totals else _zeros(p) for p in self._groups}

    def group_of(self, parameter: Tensor, module: Module | None) -> str:
        """The group of a parameter.

        Raises:
            UsageError: The parameter was not trained when ``make_private`` was called.
        """
        if parameter not in self._groups and parameter not in self._shards:
            self._shards = shards_in(self._model)
        found = self._groups.get(self._shards.get(parameter, parameter))
        if found is None:
            raise UsageError(
                f"A parameter of shape {[*parameter.shape]} takes part in the loss, but was not "
                "trained when make_private(...) was called. Call it after all parameters are set."
            )
        return found


_NUMBERS = count()
_ALL: WeakValueDictionary[int, Sums] = WeakValueDictionary()


@dataclass(frozen=True)
class GroupOf:
    """The group of a parameter, by the number of its sums: equal ones give the same groups."""

    number: int

    def __call__(self, parameter: Tensor, module: Module | None) -> str:
        """See :meth:`Sums.group_of`."""
        return _ALL[self.number].group_of(parameter, module)


class Summed(NamedTuple):
    """What a pass stores on a parameter.

    Attributes:
        total: The clipped sum, ``[*θ]``.
        norms: The norms of the group, ``[N]``, with its first parameter; ``None`` with others.
    """

    total: Tensor
    norms: Tensor | None


class PrivateSum(ClippedSumGrad):
    """Clipped sums, with the norms that they were clipped by: a recorded pass stores both."""

    def finish(
        self, values: Mapping[Tensor, Any], normalisers: Sequence[Any] = ()
    ) -> dict[Tensor, Summed]:
        """See the base class."""
        sums, norms = self.clipped(values, normalisers)
        left = {name: found.detach() for name, found in norms.items()}
        groups = {p: self.group(p, handle.module) for p, handle in values.items()}
        return {p: Summed(sums[p], left.pop(name, None)) for p, name in groups.items()}


def _zeros(parameter: Tensor) -> Tensor:
    """The shape of the whole parameter, even if it is sharded."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _check_precision(found: Tensor) -> None:
    if is_half(found.dtype):
        raise UsageError(
            "Layers run with parameters in half precision, which rounds sums of gradients by more "
            "than one sample may change them. Leave out param_dtype of MixedPrecisionPolicy, and "
            "compute in torch.autocast."
        )


class Pass:
    """One backward pass over a part of a batch, which clips gradients.

    Attributes:
        is_watched: Whether hooks see its forward pass.
        is_single: Whether ``backward()`` is called once for certain. Otherwise that is checked, and
            the pass repeats no recording.
    """

    is_watched = True
    is_single = False

    def __init__(self, sums: Sums, clipping: Clipping, draw: Draw) -> None:
        """Store the parts of the pass.

        Args:
            sums: Where its sums go.
            clipping: The bounds.
            draw: What was drawn.
        """
        self._sums, self._clipping, self._draw = sums, clipping, draw
        self._said, self._scale, self._divisors = 1.0, 1.0, list[Divisor]()
        self._has_run = False
        self._block = ExitStack()

    def begin(self, told: Told, normaliser: Any, is_wrapped: bool) -> None:
        """Enter the block for the call of ``backward()``.

        Args:
            told: What the loop says about the loss.
            normaliser: The argument of ``make_private``.
            is_wrapped: Whether the model is inside ``DistributedDataParallel``, which refuses
                passes that leave out gradients.
        """
        from backpack_core.extensions import ClippedSumGrad as _  # noqa: F401 - it may not load

        if told.normaliser is not None:
            normaliser = told.normaliser
        elif normaliser == "samples":
            normaliser = len(self._draw.rows)
        extension = PrivateSum(
            torch.inf,
            GroupOf(self._sums.number),
            savefield=FIELD,
            scale=told.scale,
            normaliser=normaliser,
            weights=self._clipping.weighing() if self.is_single else self._weights,
        )
        gradient: Any = "shared" if is_wrapped else "none"
        look = None
        if not isinstance(normaliser, str):
            self._said, self._scale, look = normaliser or 1.0, told.scale, self._look
        block = backpack(extension, gradient=gradient, samples=self._draw.owners, observer=look)
        self._block.enter_context(block)

    def _look(self, view: View) -> None:
        """Note what extended losses divide by, though something else was said."""
        self._divisors += divisors_of(noted(view), self._scale)

    def _weights(self, norms: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        if self._has_run:
            raise UsageError(
                "Two backward passes ran in one `with private:`, and only the last would count. "
                "Add up the losses, and call backward() once."
            )
        self._has_run = True
        return self._clipping.weighing()(norms)

    def found(self) -> tuple[Mapping[Tensor, Tensor], Mapping[str, Tensor]]:
        """The sum for each parameter, and the norms of the samples for each group."""
        groups = self._sums.groups
        values = {p: vars(p)[FIELD] for p in groups if FIELD in vars(p)}
        norms = {groups[p]: v.norms for p, v in values.items() if v.norms is not None}
        return {parameter: value.total for parameter, value in values.items()}, norms

    def end(self, *error: Any) -> None:
        """Leave the block; without an error, take the sums.

        Args:
            error: The arguments of ``__exit__``.

        Raises:
            UsageError: The pass was not one over the samples of the batch.
        """
        try:
            self._block.__exit__(*error)
            if error[0] is None:
                self._sums.add(self._draw, *self.found())
                if self._draw.units:
                    self._sums.divisors.check(self._said, self._divisors)
        except Exception as fault:
            self._sums.forget()
            _explain(fault)
            raise
        finally:
            for parameter in self._sums.groups:
                parameter.grad = None
                vars(parameter).pop(FIELD, None)
        if error[0] is not None:
            self._sums.forget()
            _explain(error[1])


class SinglePass(Pass):
    """The pass of ``private.step(loss)``, which calls ``loss.backward()`` itself."""

    is_single = True


def _explain(error: Any) -> None:
    """Say what an error of the pass means here.

    Raises:
        UsageError: Instead of the error, with the argument of ``make_private``.
    """
    if isinstance(error, BackpackError):  # users know the extension by what it is for
        error.args = (str(error).replace(PrivateSum.__name__, "Private training"), *error.args[1:])
    if isinstance(error, (UnsupportedError, NotExtendedError)):
        is_block = any(text in str(error) for text in ("block of backpack(...)", "of this block"))
        error.__notes__.append("Here, that block is `with private:`." if is_block else _NOTE)
    if isinstance(error, UsageError) and "what the loss divides by" in str(error):
        raise UsageError(
            "It is not known what the loss divides by: the loss module of make_private(...) took "
            "no part, has no rule, or is one of several terms. Write make_private(..., "
            'normaliser="samples") for a mean over samples, or normaliser=None for a sum, or call '
            "that module alone. If the model differentiates by itself, run it before `with "
            "private:`, or call private.step(loss)."
        ) from error


_NOTE = (
    "Nothing was released: no step was taken. If the error names another term than the loss, such "
    "as a penalty on weights, use the optimizer's weight_decay instead, which needs no privacy."
)
