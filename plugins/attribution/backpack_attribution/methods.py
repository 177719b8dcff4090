"""Methods that score by an inner product of a query's gradient with a training sample's."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from backpack_attribution import forms
from backpack_attribution.forms import Gradients
from backpack_attribution.problem import FIELD, Problem
from backpack_attribution.run import Run
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import GradInner
from backpack_firstorder import SampleGradients

Checkpoint: TypeAlias = Mapping[str, Tensor] | str | Path


class Method(ABC):
    """A way to score training samples for queries.

    Attributes:
        has_tokens: Whether it scores single tokens of the training samples as well.
    """

    has_tokens = False

    @abstractmethod
    def values(self, run: Run) -> Tensor:
        """Scores of the training samples of this process for all queries, ``[N, M]``.

        By token, ``[N · T, M]``, made by :meth:`Run.of_training`.
        """

    def own_values(self, run: Run) -> Tensor:
        """Scores of the training samples of this process for themselves, ``[N]``.

        By token, ``[N · T]``, made by :meth:`Run.of_training`.

        Raises:
            UsageError: The method has no such scores.
        """
        raise UsageError(
            f"{self.name} does not score samples for themselves: take an inner product, such as "
            '"ekfac", or "logra".'
        )

    @property
    def name(self) -> str:
        """The label of the scores."""
        return type(self).__name__

    def __repr__(self) -> str:
        """The settings that are not private."""
        settings = (f"{k}={v!r:.40}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{self.name}({', '.join(settings)})"


class InnerProduct(Method):
    """Scores ``⟨g_n, T q_m⟩`` with a linear ``T``, which subclasses fit and apply.

    It keeps the transformed gradients of the queries, and those of one batch of training samples.
    """

    has_tokens = True

    def __init__(self, queries_at_once: int | None = None) -> None:
        """Store the settings.

        Args:
            queries_at_once: The number of batches of queries that are kept at once; each such part
                takes one pass over the training data. Default: all.
        """
        is_count = isinstance(queries_at_once, int) and not isinstance(queries_at_once, bool)
        if queries_at_once is not None and not (is_count and queries_at_once > 0):
            raise UsageError(
                "queries_at_once must be a positive number of batches, or None for all. Got "
                f"{queries_at_once!r}."
            )
        self.queries_at_once = queries_at_once

    def fit(self, run: Run) -> None:
        """Find ``T`` from the training data."""

    def transform(self, queries: Gradients, run: Run) -> Gradients:
        """``T q_m``, ``[M, *θ]`` for each parameter."""
        return queries

    def values(self, run: Run) -> Tensor:
        """Scores, ``[N, M]``."""
        with run.problem.extended():
            self.fit(run)
            found = [
                self.scores(run, forms.ready(self.transform(queries, run)))
                for queries in self.asked(run)
            ]
        return torch.cat(found, 1)

    def own_values(self, run: Run) -> Tensor:
        """Scores for themselves, ``[N]``: each sample or token is its own query."""
        with run.problem.extended():
            self.fit(run)
            counts: list[int] = []
            pairs = self.transformed(self._parts(run, counts), run)
            found = [self.own(part, queries) for part, queries in pairs]
            rows = torch.cat(found) if found else torch.zeros(0, device="cpu")
            return run.of_training(rows.split(counts))

    def _parts(self, run: Run, counts: list[int]) -> Iterator[Gradients]:
        """Gradients of some training samples at a time; rows of each batch go to ``counts``."""
        for batch in run.batches(run.train_loader, f"{self.name}: training samples"):
            gradients = run.problem.gradients(batch)
            counts.append(_rows_of([*map(len, gradients.values())]))
            step = forms.fitting(gradients)
            for start in range(0, counts[-1], step):
                yield {name: value[start : start + step] for name, value in gradients.items()}

    def transformed(
        self, parts: Iterator[Gradients], run: Run
    ) -> Iterator[tuple[Gradients, Gradients]]:
        """Each part of the samples of this process, and the same as queries, ``T g_n``."""
        return ((part, self.transform(part, run)) for part in parts)

    def own(self, samples: Gradients, queries: Gradients) -> Tensor:
        """Scores of samples for themselves, ``[N]``.

        Args:
            samples: Their gradients, ``[N, *θ]`` for each parameter.
            queries: The same, transformed.
        """
        return torch.stack([forms.own_of(s, queries[name]) for name, s in samples.items()]).sum(0)

    def asked(self, run: Run) -> Iterator[Gradients]:
        """Gradients of the queries, ``[M, *θ]`` for each parameter, as many as are kept at once."""
        waiting: list[Gradients] = []
        with run.query.extended():
            for batch in run.batches(run.query_loader, "queries"):
                waiting.append(run.query.gradients(batch))
                if len(waiting) == self.queries_at_once:
                    yield joined(waiting)
                    waiting = []
        if waiting:
            yield joined(waiting)

    def scores(self, run: Run, queries: Gradients) -> Tensor:
        """Scores of all training samples for transformed queries, ``[N, M]``."""
        batches = run.batches(run.train_loader, f"{self.name}: training samples")
        return run.of_training([self.of_batch(run.problem, batch, queries) for batch in batches])

    def of_batch(self, problem: Problem, batch: Any, queries: Gradients) -> Tensor:
        """Scores of one batch of training samples, ``[N, M]``."""
        return products_of(problem, batch, queries)


class GradDot(InnerProduct):
    """``⟨∇ℓ_n, ∇ℓ_m⟩``: how much a small step on one sample lowers the loss of another."""


class GradCosine(InnerProduct):
    """``⟨∇ℓ_n, ∇ℓ_m⟩ / (‖∇ℓ_n‖ ‖∇ℓ_m‖)``, over all parameters; zero where a gradient is zero."""

    def transform(self, queries: Gradients, run: Run) -> Gradients:
        """``g_m / ‖g_m‖``."""
        return forms.normalised(queries)

    def transformed(
        self, parts: Iterator[Gradients], run: Run
    ) -> Iterator[tuple[Gradients, Gradients]]:
        """Each part twice: scores for themselves need no other vectors."""
        return ((part, part) for part in parts)

    def of_batch(self, problem: Problem, batch: Any, queries: Gradients) -> Tensor:
        """Cosines of one batch of training samples, ``[N, M]``."""
        norms: list[Tensor] = []
        products = products_of(problem, batch, queries, norms)
        return forms.over_norms(products, forms.joint(norms))

    def own(self, samples: Gradients, queries: Gradients) -> Tensor:
        """One, or zero for a gradient of zero; those that are not finite stay so."""
        norms = forms.norm(samples)
        return torch.where(norms == 0, norms, norms / norms)


class TracIn(Method):
    """``Σ_c η_c ⟨∇ℓ_n, ∇ℓ_m⟩`` over checkpoints ``c`` of the training (Pruthi et al., 2020).

    arXiv:2002.08484, equation 1: the sum of the effects of a sample's steps on a query.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        learning_rates: Sequence[float] | None = None,
        method: InnerProduct | None = None,
    ) -> None:
        """Store the settings.

        Args:
            checkpoints: State dictionaries of the model, or files of them.
            learning_rates: The learning rate of each checkpoint; default: one.
            method: What is added up; default: :class:`GradDot`.

        Raises:
            UsageError: ``checkpoints`` is empty, one of them is neither a state nor a file, two are
                the same tensors, or the learning rates are not as many finite numbers.
        """
        if isinstance(checkpoints, (str, Path, Mapping)) or not len(checkpoints):
            raise UsageError("TracIn takes a list of checkpoints, [model.state_dict(), ...].")
        given: Any = [1.0] * len(checkpoints) if learning_rates is None else learning_rates
        is_list = isinstance(given, Iterable) and not isinstance(given, (Mapping, Set))
        if not is_list or len(rates := [*given]) != len(checkpoints):
            raise UsageError(
                "TracIn takes a list with the learning rate of each checkpoint. Got "
                f"{len(checkpoints)} checkpoints, and learning_rates={given!r:.80}."
            )
        if not all(isfinite(as_number(rate)) for rate in rates):
            raise UsageError(f"learning_rates must be finite numbers. Got {rates!r:.80}.")
        see_checkpoints(checkpoints)
        self.learning_rates = rates
        self._checkpoints, self._method = [*checkpoints], method or GradDot()
        self.has_tokens = self._method.has_tokens

    def values(self, run: Run) -> Tensor:
        """Scores, ``[N, M]``."""
        return self._sum(run, self._method.values)

    def own_values(self, run: Run) -> Tensor:
        """Scores for themselves, ``[N]``."""
        return self._sum(run, self._method.own_values)

    def _sum(self, run: Run, values: Callable[[Run], Tensor]) -> Tensor:
        parts = []
        for state, rate in zip(self._checkpoints, self.learning_rates, strict=True):
            with at_checkpoint(run.problem.model, state):
                parts.append(rate * values(run))
        return torch.stack(parts).sum(0)


def products_of(
    problem: Problem, batch: Any, queries: Gradients, norms: list[Tensor] | None = None
) -> Tensor:
    """Inner products of a batch's gradients with queries, ``[N, M]``, in one backward pass.

    By token, ``[N · T, M]``.

    Only the products of a parameter's gradients are kept.

    Args:
        problem: The model and the loss.
        batch: Training samples.
        queries: ``[M, *θ]`` for each parameter; the model's other parameters take no part.
        norms: Norms of each parameter's gradients, ``[N]``, are added to this list.
    """
    parts: list[Tensor] = []

    def add(name: str, gradients: SampleGradients) -> None:
        assert norms is not None
        norms.append(gradients.norm())
        if name in queries:
            parts.append(gradients.inner(queries[name]))

    if norms is None:
        inner = GradInner(lambda name, shape: queries.get(name), savefield=FIELD, per=problem.per)
        parts = [value.flatten(0, -2) for value in problem.compute(batch, inner).values()]
    else:
        problem.consume(batch, add)
    if not parts:
        raise UsageError(
            "A batch reaches none of the parameters that the queries depend on: look at the "
            "results of batch= and of the loss."
        )
    _rows_of([*map(len, norms or parts)])
    return torch.stack(parts).sum(0)


def _rows_of(counts: Sequence[int]) -> int:
    """How many rows all parameters have: samples, or tokens.

    Raises:
        UnsupportedError: Parameters have different numbers of tokens.
    """
    if len({*counts}) > 1:
        raise UnsupportedError(
            "Scores by token are sums over parameters, but some have another number of positions "
            "than others, as behind a pooling. Freeze these, or score whole samples."
        )
    return counts[0]


def _place_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return id(value)
    own: Any = value
    own = own.to_local() if hasattr(own, "to_local") else own  # a shard
    return own.data_ptr(), value.shape


def as_number(value: Any) -> float:
    """A number, also of NumPy or torch; NaN for what is none."""
    try:
        return nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return nan


def see_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    """Check that checkpoints are states of a model or files, and that they differ.

    Raises:
        UsageError: One is something else, or two are the same tensors.
    """
    for given in checkpoints:
        if not isinstance(given, (Mapping, str, Path)):
            raise UsageError(
                "A checkpoint must be a state, copy.deepcopy(model.state_dict()), or a file of "
                f"one. Got {type(given).__name__}."
            )
    states = [state.values() for state in checkpoints if isinstance(state, Mapping)]
    places = {tuple(map(_place_of, state)) for state in states}
    if len(places) < len(states):
        raise UsageError(
            "Two checkpoints are the same tensors, so they have the same values: state_dict() "
            "returns those of the model, which training changes. Keep "
            "copy.deepcopy(model.state_dict())."
        )


@contextmanager
def at_checkpoint(model: Module, state: Checkpoint) -> Iterator[None]:
    """A block that runs the model with the values of a checkpoint, and restores its own.

    Raises:
        UsageError: The checkpoint is not one of the model.
    """
    before = copy.deepcopy(model.state_dict())
    try:
        try:
            model.load_state_dict(_with_all_names(_state(state), model))
        except RuntimeError as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise UsageError(
                f"A checkpoint does not fit the model: {why:.300}. Give what model.state_dict() "
                'returned, such as checkpoint["state_dict"], with names that begin like those of '
                "the model."
            ) from error
        yield
    finally:
        model.load_state_dict(before)


def _with_all_names(state: Mapping[str, Tensor], model: Module) -> dict[str, Tensor]:
    """A state with all names of tied parameters, of which a file may have only one."""
    found = {key.removeprefix("_orig_mod."): value for key, value in state.items()}  # compiled
    names = dict(model.named_parameters(remove_duplicate=False))
    known = {parameter: found[name] for name, parameter in names.items() if name in found}
    return {n: known[p] for n, p in names.items() if p in known} | found


def _state(given: Checkpoint) -> Mapping[str, Tensor]:
    if isinstance(given, Mapping):
        return given
    path = Path(given)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def joined(parts: Iterable[Gradients]) -> Gradients:
    """Samples of several batches, one after the other.

    If a batch does not reach a parameter (an expert without a token, for example), its gradients
    are zero there.

    Raises:
        ShapeError: A batch does not reach a parameter, and others have different numbers of rows.
        UsageError: There are no batches.
    """
    parts = [*parts]
    if not parts:
        raise UsageError("The loader of queries gave no batch.")
    known = {name: value for part in parts for name, value in part.items()}
    whole = [forms.completed(part, known) for part in parts]
    return {name: forms.cat([part[name] for part in whole]) for name in known}
