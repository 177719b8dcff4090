"""Quantities of the joined batch, from several backward passes or several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeAlias

from torch import distributed
from torch.nn import Module

from backpack_core import Extension, backpack
from backpack_core.errors import UnsupportedError, UsageError
from backpack_data.exchange import reduce, reported
from backpack_data.shards import carriers, has_shards, placed
from backpack_data.state import listed, over_batches
from backpack_data.states import States
from backpack_data.weights import Weights, joint
from backpack_products.fingerprint import fingerprint
from backpack_products.merging import declaration
from backpack_products.ranks import require_member

Held: TypeAlias = list[tuple[dict[str, Any], str, Any]]  # attributes, names and values


class combined:
    """Quantities of all backward passes that run inside blocks of this object, as for one batch.

    Example:
        >>> total = combined(model, KFAC(), DiagGGNExact())
        >>> for x, y in micro_batches:
        ...     with total:
        ...         lossfunc(model(x), y).backward()
        >>> model[0].weight.kfac  # as of one backward pass over all of them
        >>> total.reset()

    After each block, the parameters hold the values for all batches so far: those of the mean over
    all samples if the loss is a mean (batches may differ in size), and those of the sum if it is a
    sum. So do not divide the loss by the number of batches. ``.grad`` accumulates as always in
    PyTorch.

    With a process group, values are for the batches of all ranks, which must enter and leave blocks
    together. Values per sample stay on their rank, with the scale of the joined batch.
    """

    def __init__(
        self,
        model: Module,
        *extensions: Extension,
        process_group: distributed.ProcessGroup | None = None,
        normaliser: float | Literal["loss"] | None = "loss",
        gather: bool = False,
        **options: Any,
    ) -> None:
        """Store the request.

        Args:
            model: The model, or what wraps it (``DistributedDataParallel``).
            extensions: What to compute.
            process_group: The processes whose batches are joined; default: this one alone.
            normaliser: What the loss of each batch divides by, if no extended loss tells; ``None``
                for a sum.
            gather: Whether results per sample are gathered from all ranks.
            options: For :class:`backpack_core.backpack`.

        Raises:
            UsageError: There is no extension, or an option is not allowed here.
            UnsupportedError: Values of an extension do not combine, or it takes two passes.
        """
        if not extensions:
            raise UsageError("combined(...) needs an extension: what should be computed?")
        if not isinstance(model, Module):
            raise UsageError(f"combined(model, ...) takes a torch.nn.Module. Got {model!r:.80}.")
        require_member(process_group)
        if "observer" in options:
            raise UsageError("combined(...) observes passes itself: it takes no observer.")
        if normaliser != "loss":
            joint((normaliser,))  # refuses what is not a number
        backpack(*extensions, **options)  # refuses what is not an extension or an option
        for extension in extensions:
            if over_batches(extension, "its value over several batches").first_pass(extension):
                raise UnsupportedError(
                    f"{type(extension).__name__} takes two passes over all batches: use "
                    "accumulate(...), which makes both."
                )
        has_shards(model, process_group)
        self._model, self._group, self._gather = model, process_group, gather
        self._given = None if normaliser == "loss" else (normaliser,)
        self._readers = [declaration(e).reader(e) for e in extensions]
        if self._given is not None:
            self._readers = [declaration(e).of_batch(e, *self._given) for e in self._readers]
        self._options = options
        self._block: backpack | None = None
        self._held: Held = []
        self.reset()

    def reset(self) -> None:
        """Forget all batches; values on the parameters stay."""
        self._states = States.over(self._model, self._readers)

    def __enter__(self) -> combined:
        """Begin one backward pass.

        Raises:
            UsageError: This object is entered already.
        """
        if self._block is not None:
            raise UsageError(
                "combined(...) was entered inside a block of the same object: one block is for one "
                "backward pass. Leave it first, or make a second combined(...)."
            )
        self._weights = Weights(of_losses=self._given is None)
        block = backpack(*self._readers, observer=self._weights, **self._options)
        block.__enter__()
        self._block, self._held = block, self._take()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Add the values of this pass, and store those of all batches."""
        block, self._block = self._block, None
        assert block is not None
        with self._passing():
            block.__exit__(exc_type, exc, traceback)
            if exc_type is None:
                self._add(self._weights)
            else:
                _put(self._held)

    def _take(self) -> Held:
        """Take the values for all batches so far from the parameters: a pass leaves its own."""
        parts = [vars(p) for parts in carriers(self._model).values() for p in parts]
        fields = [e.savefield for e in self._readers]
        return [(own, name, own.pop(name)) for own in parts for name in fields if name in own]

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """A block at the end of a pass, which puts values back if it raises."""
        try:
            yield
        except BaseException:
            _put(self._held)
            raise
        finally:
            self._held = []

    def _add(self, weights: Weights) -> None:
        with reported(self._group):
            new = self._take()
            _put(new)
            if not new and weights.samples(None):
                raise UsageError(
                    "The backward pass left no value on a parameter of the model of combined(...): "
                    "it ran through another model or a copy, or raised an error that was caught "
                    "inside the block. Nothing was added. Make combined(...) for the model that "
                    "runs, and catch errors around the block."
                )
            self._states.add(self._model, weights, self._given)
        _store(self._states, self._model, self._group, self._gather)

    def captured(self, function: Callable[..., Any], make: Callable[..., Any]) -> Any:
        """Captured steps in blocks of this object: ``capture(function, lossfunc, total)``.

        Args:
            function: Returns the loss.
            make: Makes a captured step, see ``backpack_capture.Host``.

        Raises:
            UsageError: An option of the block does not exist for captured steps.
        """
        others = self._options.keys() - {"gradient", "check"}
        if others:
            raise UsageError(
                f"combined(..., {min(others)}=...) is not part of a captured step. Leave it out, "
                "or write `with total: loss.backward()`."
            )
        observer = partial(Weights, self._given is None)
        step = make(function, self._model, *self._readers, observer=observer, **self._options)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._held = self._take()
            with self._passing():
                with reported(self._group):
                    returned, found = step(*args, **kwargs)
                self._add(Weights.of(found))
            return returned

        return run


def _put(held: Held) -> None:
    for attributes, name, value in held:
        attributes[name] = value


def all_reduce(
    model: Module,
    extensions: Extension | Sequence[Extension],
    weights: Weights,
    group: distributed.ProcessGroup | None = None,
    normaliser: float | Literal["loss"] | None = "loss",
    gather: bool = False,
) -> None:
    """Combine over all processes the values that a backward pass stored on the parameters.

    Example:
        >>> weights = Weights()
        >>> with backpack(KFAC(), DiagGGNExact(), observer=weights):
        ...     lossfunc(model(x), y).backward()
        >>> all_reduce(model, [KFAC(), DiagGGNExact()], weights)

    Args:
        model: The model, or what wraps it (``DistributedDataParallel``).
        extensions: The extensions of the block.
        weights: The observer of the pass.
        group: The processes; default: all.
        normaliser: See :class:`combined`.
        gather: Whether results per sample are gathered from all ranks, or stay on theirs.

    Raises:
        UnsupportedError: Values of an extension do not combine, or only together with others that
            were not computed.
        UsageError: The values are combined already.
        LostProcessError: Another process ended.
    """
    if not isinstance(weights, Weights):
        raise UsageError(
            "all_reduce(model, extensions, weights) takes the observer of the pass: weights = "
            f"Weights(), backpack(..., observer=weights). Got {weights!r:.80}."
        )
    group = distributed.group.WORLD if group is None else group
    require_member(group)
    asked = listed(extensions)
    for extension in asked:
        over = over_batches(extension, "its value over several processes")
        if over.reader(extension) is not extension or over.first_pass(extension) is not None:
            raise UnsupportedError(
                f"What {type(extension).__name__} stores is not enough to be combined with "
                "values of other batches: use combined(..., process_group=group) or "
                "accumulate(...), which take part in the pass."
            )
        if extension.savefield in weights.reduced:
            raise UsageError(
                f"{extension.savefield} of this pass was reduced before, so it is that of all "
                "processes already. Call all_reduce(...) once for each pass."
            )
        weights.reduced.add(extension.savefield)
    has_shards(model, group)
    states = States.over(model, asked)
    with reported(group):
        states.add(model, weights, None if normaliser == "loss" else (normaliser,))
    _store(states, model, group, gather)


def _store(
    states: States, model: Module, group: distributed.ProcessGroup | None, gather: bool
) -> None:
    """Store the values of states on the parameters, combined over a group if there is one."""
    if group is not None:
        plugins = fingerprint([model], states.extensions)
        states = reduce(states, group, gather, plugins)
    parameters = carriers(model)
    for path, extension, value in states.values():
        parameter, *_ = parameters[path]
        value = extension.as_stored(value, parameter)
        value = value if group is None else placed(value, extension, parameter)
        for carrier in parameters[path]:
            setattr(carrier, extension.savefield, value)
