"""The backward passes between two steps, as one pass over all of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose
from typing import Any

import torch
from torch import Tensor

from backpack_core import Extension, backpack
from backpack_core.errors import UsageError
from backpack_data import Weights
from backpack_secondorder.matrix import CurvatureMatrix

Factors = dict[Tensor, CurvatureMatrix]


class Joined:
    """Gradients and matrices of all samples so far, as for one batch.

    If losses are means, passes are averaged with the losses' divisors as weights; sums are added.
    So micro-batches may differ in size, and the loss need not be divided by their number. Gradients
    that were there before the first pass are added, as by autograd.

    Attributes:
        parameters: The parameters whose gradients are joined.
        values: For each field of an extension, the matrices of parameters.
        weight: The sum ``Σ_b W_b`` of the losses' divisors; ``None`` for sums, and before any pass.
        ratios: The losses' divisors, divided by the first one's; empty for sums.
        passes: The number of passes.
        share: The share of this process's loss in that of all.
        is_open: Whether a block around a pass is open.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Begin without passes.

        Args:
            parameters: The parameters whose gradients are joined.
        """
        self.parameters = parameters
        self.values: dict[str, Factors] = {}
        self.weight: float | None = None
        self.is_open = False
        self._before: dict[Tensor, Tensor] | None = None  # gradients that a pass has put aside
        self.reset()

    def reset(self) -> None:
        """Forget all passes; gradients stay."""
        self.values, self.weight, self.passes, self.share = {}, None, 0, 1.0
        self.ratios: list[float] = []
        self._older: dict[Tensor, Tensor] = {}  # gradients before the first pass
        self._own: dict[Tensor, tuple[Tensor, int]] = {}  # after the last pass, and versions
        self._is_changed = False
        if self._before is not None:
            self._before = {}

    def look(self, is_step: bool = False) -> None:
        """Find out whether gradients were changed since the last pass.

        If all are gone, passes are forgotten, as by ``zero_grad()`` of the optimizer.

        Args:
            is_step: Whether a step follows, so that gradients of zero may be those of the passes,
                scaled or clipped in place.
        """
        self._is_changed = any(
            p.grad is not grad or grad._version != version
            for p, (grad, version) in self._own.items()
        )
        grads = (p.grad for p in self._own if p.grad is not None)
        if self._is_changed and not any(is_step or bool(grad.any()) for grad in grads):
            self.reset()

    def begin(self) -> None:
        """Put the gradients so far aside."""
        self.look()
        self._before = {p: self._apart(p, p.grad) for p in self.parameters if p.grad is not None}
        if not self.passes:
            self._older = self._before
        for parameter in self._before:
            parameter.grad = None

    def _apart(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """A gradient in memory that the next pass does not write to.

        It may be a view into a buffer of ``DistributedDataParallel`` (``gradient_as_bucket_view``),
        which puts the gradient of every pass there.
        """
        if not grad._is_view():
            return grad
        copy = grad.clone()
        known, version = self._own.get(parameter, (None, 0))
        if known is grad and version == grad._version:
            self._own[parameter] = copy, copy._version  # if the pass fails, this one is restored
        return copy

    def restore(self) -> None:
        """Restore the gradients before a pass that has failed, or copies of them."""
        if self._before is not None:
            for parameter in self.parameters:
                parameter.grad = self._before.get(parameter)
        self._before = None

    def add(self, found: Mapping[str, Factors], weights: Weights) -> None:
        """Add a pass.

        Args:
            found: Matrices of this pass.
            weights: The observer of the pass.

        Raises:
            UsageError: Passes cannot be joined: some losses are sums and some means, or their
                divisors are not known; or something else has changed a mean's gradients.
        """
        share = self._share(weights)
        before = self._before or {}
        for parameter in self.parameters:
            old, new = before.get(parameter), parameter.grad
            older = self._older.get(parameter)
            if share is not None:
                if old is not None:
                    old = old * share if older is None else older + share * (old - older)
                new = None if new is None else new * (1 - share)
            parameter.grad = new if old is None else old if new is None else old + new
        self._before, self._is_changed = None, False
        grads = [(p, p.grad) for p in self.parameters]
        self._own = {p: (grad, grad._version) for p, grad in grads if grad is not None}
        for field, matrices in found.items():
            known = self.values.setdefault(field, {})
            self.values[field] = joined(known, matrices, share)

    def _share(self, weights: Weights) -> float | None:
        """The share of earlier passes in the mean; ``None`` for a sum, and for the first pass."""
        if weights.fault is not None:
            raise weights.fault
        numbers = [n for n in weights.normalisers if n is not None]
        if not self.passes:
            self.passes = 1
            self.weight = numbers[0] if numbers else None
            self.ratios = [n / numbers[0] for n in numbers]
            self._count = len(weights.normalisers)
            return None
        ratios = [n / numbers[0] for n in numbers]
        is_alike = len(ratios) == len(self.ratios) and self._count == len(weights.normalisers)
        if not self._count or not is_alike or not all(map(isclose, ratios, self.ratios)):
            raise UsageError(
                "Several passes before one step are joined by what their losses divide by, but "
                "that is not known here, or has different ratios: use the same extended loss in "
                "each, extend(nn.CrossEntropyLoss()), or one pass for each step."
            )
        if self.weight is not None and self._is_changed:
            raise UsageError(
                "Gradients were changed between two passes before one step, which are averaged: by "
                "a backward() outside of optimizer.curvature(), or by hand. Do that after the last "
                "pass, or call optimizer.zero_grad() first."
            )
        self.passes += 1
        if self.weight is None:
            return None
        before, self.weight = self.weight, self.weight + numbers[0]
        return before / self.weight


def joined(known: Factors, new: Factors, share: float | None) -> Factors:
    """Matrices of two disjoint batches as for one; a parameter that one does not reach has none."""
    if share is not None:
        known = {p: matrix.scaled(share) for p, matrix in known.items()}
        new = {p: matrix.scaled(1 - share) for p, matrix in new.items()}
    both = {p: known[p] + new[p] for p in known if p in new}
    return {**known, **new, **both}


@contextmanager
def joining(total: Joined, extensions: Sequence[Extension], loss_scale: float) -> Iterator[None]:
    """A block around one backward pass, which is added to the passes before it.

    If anything fails, the gradients of earlier passes are restored.

    Args:
        total: What the pass is added to.
        extensions: What the pass computes.
        loss_scale: What the loss is multiplied by, for instance by a gradient scaler.

    Raises:
        UsageError: The block is inside another one.
    """
    if total.is_open:
        raise UsageError(
            "optimizer.curvature() was entered inside of another of its blocks, which would see no "
            "pass. A closure runs in a block already: leave `with optimizer.curvature():` out of "
            "the closure of optimizer.step(closure)."
        )
    weights = Weights()
    total.is_open = True
    try:
        with adding(total, extensions, loss_scale) as add:
            with backpack(*extensions, observer=weights):
                total.begin()
                yield
            add(weights)
    finally:
        total.is_open = False


@contextmanager
def adding(
    total: Joined, extensions: Sequence[Extension], loss_scale: float = 1.0
) -> Iterator[Callable[[Weights], None]]:
    """A block around a pass that runs elsewhere, and the function that adds it.

    Args:
        total: What the pass is added to.
        extensions: What the pass computes.
        loss_scale: See :func:`joining`.
    """

    def add(weights: Weights) -> None:
        if weights.samples(None) != 0:
            found = {e.savefield: _taken(total.parameters, e.savefield) for e in extensions}
            total.add({field: _scaled(f, 1 / loss_scale) for field, f in found.items()}, weights)

    try:
        yield add
    finally:
        total.restore()  # does nothing after a pass that was added
        for extension in extensions:
            _taken(total.parameters, extension.savefield)


class CapturedPasses:
    """Passes as captured steps: one for each kind of pass that an optimizer asks for."""

    def __init__(
        self,
        total: Callable[[], Joined],
        extensions: Callable[[], Sequence[Extension]],
        make: Callable[..., Any],
    ) -> None:
        """Store what makes the steps.

        Args:
            total: What passes are added to.
            extensions: What the next pass computes.
            make: Makes a captured step of extensions.
        """
        self._total, self._extensions, self._make = total, extensions, make
        self._steps: dict[Any, tuple[Any, Sequence[Extension]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass, and return what the user's function returns."""
        extensions = self._extensions()
        key = *map(_kind, extensions), *map(id, self._total().parameters)
        if key not in self._steps:
            self._steps[key] = self._make(*extensions, observer=Weights), extensions
        step, extensions = self._steps[key]
        with adding(self._total(), extensions) as add:
            self._total().begin()
            returned, found = step(*args, **kwargs)
            add(Weights.of(found))
        return returned


def _kind(extension: Extension) -> Any:
    """A key that differs for different extensions: the class, and what it reads at, or in."""
    bases = getattr(extension, "basis", None) or {}
    chosen: frozenset[int] = getattr(extension, "chosen", frozenset())
    return type(extension), chosen, *[id(basis) for _, basis in bases.values()]


def _taken(parameters: Sequence[Tensor], field: str) -> Factors:
    """Take what the pass left on parameters."""
    taken = ((p, p.__dict__.pop(field, None)) for p in parameters)
    return {p: value for p, value in taken if value is not None}


def _scaled(found: Factors, factor: float) -> Factors:
    """A multiple, at least in single precision."""
    return {
        p: (value.to(torch.float32) if value.dtype.itemsize < 4 else value) * factor
        for p, value in found.items()
    }
