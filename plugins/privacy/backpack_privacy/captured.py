"""Private steps that ``capture`` of ``backpack-capture`` records: whole batches as one graph.

Draws, counts and checks run as always. A graph holds forward pass, loss, and clipped sums. Batches
differ in size, but a graph has one size. So a batch is filled up with copies of its last sample,
and their gradients have the weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import count
from math import ceil, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UsageError
from backpack_privacy.divisors import Noted, divisors_of, noted
from backpack_privacy.shards import is_shard
from backpack_privacy.sums import FIELD, Pass, Told
from backpack_products.nested import map_tensors

if TYPE_CHECKING:
    from backpack_privacy.private import Private

_WIDTH = 1.5  # distance between sizes, in standard deviations of the size


class CapturedPass(Pass):
    """A pass in a block that belongs to the captured step."""

    is_watched = False  # hooks run only in passes of the engine, where ``_Seen`` looks
    _norms: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def rows(self) -> int:
        """How many samples the batch has."""
        return len(self._draw.rows)

    def begin(self, told: Told, normaliser: Any, is_wrapped: bool) -> None:
        """The captured step enters the block."""

    def take(self, norms: Mapping[str, Tensor], said: float, found: Sequence[Noted]) -> None:
        """Take the norms of the samples; those of copies come last.

        Args:
            norms: For each group, shape ``[N]``.
            said: What the loss was said to divide by.
            found: What extended losses say.
        """
        self._norms = {name: all_rows[: self._draw.units] for name, all_rows in norms.items()}
        self._said, self._divisors = said, divisors_of(found, 1.0)

    def found(self) -> tuple[Mapping[Tensor, Tensor], Mapping[str, Tensor]]:
        """See the base class."""
        groups = self._sums.groups
        return {p: vars(p)[FIELD] for p in groups if FIELD in vars(p)}, self._norms


class _Given:
    """What differs from step to step: a step's arguments and results, not its settings."""

    __slots__ = ("bounds", "norms", "real")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing."""
        self.bounds: Tensor | None = None  # one for each group
        self.real: Tensor | None = None  # whether a row is not a copy; shape [N]
        self.norms: dict[str, Tensor] = {}


class CapturedSteps:
    """A captured function of a batch, which takes a private step."""

    def __init__(
        self, private: Private, function: Callable[..., Any], make: Callable[..., Any]
    ) -> None:
        """Store the parts.

        Args:
            private: The training.
            function: Returns the loss of a batch.
            make: Makes a captured step.

        Raises:
            UsageError: The training has users, ``DistributedDataParallel``, or shards.
        """
        if private.loader.has_users:
            raise UsageError(
                "users= says for each batch which rows belong to whom, but a captured step is the "
                "same for all batches. Write private.step(lossfunc(model(inputs), targets))."
            )
        if private.model is not private._inner:
            raise UsageError(
                "DistributedDataParallel exchanges gradients in the backward pass, which a "
                "captured step does not do. Give make_private(...) the model itself: it adds up "
                "sums over processes anyway."
            )
        self._private, self._function, self._make = private, function, make
        if any(map(is_shard, private._named.values())):
            raise UsageError(
                "fully_shard gathers parameters while layers run, which a captured step does not "
                "do. Write private.step(lossfunc(model(inputs), targets))."
            )
        loader, world = private.loader, private._release.processes.world
        is_even = loader.sampler.rate is None and loader.most is None
        self._tile = 1 if is_even else ceil(_WIDTH * sqrt(loader.sampler.expected / world))
        self._most = loader.most
        self._steps: dict[Any, Callable[..., Any]] = {}
        self._given, self._copies = _Given(), _Copies()

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        """Run a batch from the loader.

        Args:
            args: The function's arguments. Tensors as long as the batch have a row for each sample.
            kwargs: The function's keyword arguments.

        Returns:
            Whether the optimizer took a step, as for ``private.step``.
        """
        private = self._private
        with private.recording(kind=CapturedPass):
            begun = private._pass
            assert isinstance(begun, CapturedPass)
            rows = begun.rows
            # A list with an item for each sample would have to grow, too.
            is_listed = any(_has_list(value, rows) for value in (*args, *kwargs.values()))
            size = rows if is_listed else self._size(rows)
            args, kwargs = self._copies.behind((args, kwargs), rows, size)
            bounds = torch.tensor([*private.clipping.bounds.values()], dtype=torch.float64)
            real = torch.arange(size, device=next(iter(private._named.values())).device) < rows
            normaliser = size if private._normaliser == "samples" else private._normaliser
            try:
                _, (norms, losses) = self._step(normaliser)(bounds, real, *args, **kwargs)
            finally:
                self._given.forget()
            begun.take(norms, 1.0 if isinstance(normaliser, str) else normaliser or 1.0, losses)
        if not private.is_complete:
            return False
        private.optimizer.step()
        return True

    def _size(self, rows: int) -> int:
        """The number of rows of a filled-up batch: one of a few sizes, at most ``max_rows``."""
        size = -(-rows // self._tile) * self._tile
        return size if self._most is None else min(size, self._most)

    def _step(self, normaliser: Any) -> Callable[..., Any]:
        """The captured step for a loss that divides by a number."""
        private, function, given = self._private, self._function, self._given
        if normaliser not in self._steps:

            def step(bounds: Tensor, real: Tensor, *args: Any, **kwargs: Any) -> Any:
                given.bounds, given.real = bounds, real
                return function(*args, **kwargs)

            modules = [m for m in (private._inner, private.lossfunc) if isinstance(m, Module)]
            extension = self._extension(normaliser)
            found = partial(_Seen, private.watched, given, not isinstance(normaliser, str))
            self._steps[normaliser] = self._make(
                *(step, *modules, extension), gradient="none", observer=found
            )
        return self._steps[normaliser]

    def _extension(self, normaliser: Any) -> Any:
        from backpack_core.extensions import ClippedSumGrad  # loads the plugins

        given, clipping = self._given, self._private.clipping
        groups = self._private._sums.group_of
        places = {name: place for place, name in enumerate(clipping.bounds)}

        def group_of(parameter: Tensor, module: Module | None) -> str:
            return groups(parameter, module)

        def weights(norms: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
            assert given.bounds is not None
            assert given.real is not None
            given.norms = {str(name): found.detach() for name, found in norms.items()}
            found = {}
            for name, norm in norms.items():
                _check_rows(len(norm), len(given.real))
                bound: Any = given.bounds[places[str(name)]]
                found[name] = clipping.weights(norm, bound) * given.real
            return found

        return ClippedSumGrad(
            torch.inf, group_of, savefield=FIELD, normaliser=normaliser, weights=weights
        )


def _check_rows(seen: int, shown: int) -> None:
    if seen != shown:
        raise UsageError(
            f"The function was given {shown} rows, copies of the last one included, but {seen} "
            "samples took part in the backward pass. Give the model the whole, unchanged batch: "
            "the accounting does not allow for samples that are left out, repeated or put together."
        )


class _Seen:
    """Observes passes of the engine, and checks after each pass what was watched."""

    def __init__(self, watched: Callable[[], None], given: _Given, is_told: bool) -> None:
        self._watched, self._given, self._is_told = watched, given, is_told
        self._losses: list[Noted] = []

    def __call__(self, view: Any) -> None:
        """Note what extended losses divide by, though something else was said."""
        if self._is_told:
            self._losses += noted(view)

    def found(self) -> tuple[dict[str, Tensor], list[Noted]]:
        """The norms of all rows, for each group, and what losses say."""
        self._watched()
        norms, self._given.norms = self._given.norms, {}
        return norms, self._losses


class _Copies:
    """Fills up tensors that have a row for each sample, which are recognised by their length.

    Another tensor, such as weights of classes, may be as long as a batch by chance. A later batch
    of another length shows the places of these tensors.
    """

    def __init__(self) -> None:
        self._filled, self._others = set[int](), set[int]()

    def behind(self, given: Any, rows: int, size: int) -> Any:
        """Arguments that end with copies of the last row, up to ``size`` rows.

        Raises:
            UsageError: A tensor was filled up before, but now differs in length from the batch.
        """
        places = count()  # number the tensors among the arguments, in their order

        def filled(tensor: Tensor) -> Tensor:
            place = next(places)
            if not tensor.dim() or len(tensor) != rows:
                self._others.add(place)
            if place in self._others & self._filled:
                raise UsageError(_chance(tensor, rows))
            if size == rows or place in self._others:
                return tensor
            self._filled.add(place)
            copies = tensor[-1:].expand(size - rows, *tensor.shape[1:])
            return torch.cat([tensor, copies])

        return map_tensors(given, filled)


def _has_list(value: Any, length: int) -> bool:
    """Whether a value is a list of a length, or holds one."""
    if isinstance(value, Mapping):
        return any(_has_list(each, length) for each in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return len(value) == length or any(_has_list(each, length) for each in value)


def _chance(tensor: Tensor, rows: int) -> str:
    return (
        f"An argument of shape {[*tensor.shape]} came with {rows} rows. In an earlier batch it was "
        "as long as the batch, and was filled up as if it had a row for each sample, which may "
        "have changed the gradients of all samples. Pass only rows to the function, and let it "
        "refer to other tensors by name."
    )
