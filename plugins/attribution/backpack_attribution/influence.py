"""Scores of all training samples for all queries, by any method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, distributed
from torch.nn import Module

from backpack_attribution.curvature import Influence
from backpack_attribution.identities import Identity
from backpack_attribution.methods import GradCosine, GradDot, Method
from backpack_attribution.problem import Loss, Problem, Split
from backpack_attribution.projected import TRAK, LoGra
from backpack_attribution.run import Identities, Run
from backpack_attribution.scores import Scores
from backpack_core.errors import ShapeError, UnsupportedError, UsageError, nearest
from backpack_firstorder.tokens import Per

METHODS: dict[str, Callable[[], Method]] = {
    "dot": GradDot,
    "cosine": GradCosine,
    "kfac": lambda: Influence("kfac"),
    "ekfac": Influence,
    "ekfac-cg": lambda: Influence(refine=10),
    "trak": TRAK,
    "logra": LoGra,
}


def influence(
    model: Module,
    lossfunc: Loss,
    train_loader: Iterable[Any],
    query_loader: Iterable[Any],
    method: str | Method = "ekfac",
    *,
    query_lossfunc: Loss | None = None,
    batch: Split | None = None,
    identities: Identities = "place",
    query_identities: Identities = "place",
    progress: bool = True,
    process_group: distributed.ProcessGroup | None = None,
    per: Per = "sample",
) -> Scores:
    """Score every training sample for every query: which of them shaped what the model says?

    Positive scores belong to samples that lower the query's loss. ``.grad`` and the model do not
    change.

    Args:
        model: The trained model, extended or not, in evaluation mode.
        lossfunc: The loss that it was trained with: a module, with its own reduction, or a function
            of output and target that is a sum over samples (for methods without curvature).
        train_loader: Batches of training samples, the same in every pass over it: ``(inputs,
            targets)``, or a dictionary with ``"labels"``, and keywords of the model as its other
            entries.
        query_loader: Batches of queries, in the same form.
        method: ``"dot"``, ``"cosine"``, ``"kfac"``, ``"ekfac"``, ``"ekfac-cg"``, ``"trak"``,
            ``"logra"``, or a :class:`Method` with its own settings.
        query_lossfunc: The function of queries whose change is predicted; default: their loss.
        batch: Makes ``(inputs, targets)`` from an item of the loaders.
        identities: Names of the training samples: ``"place"`` in the data, ``"content"`` (a hash),
            a list of all, or a function of an item of the loader.
        query_identities: Names of the queries, in the same way.
        progress: Whether to show bars, if the output is a terminal.
        process_group: Processes that have a part of the training samples each, and all queries. All
            get the scores of all samples, sorted by identity. Places are dealt in turn, as by a
            ``DistributedSampler`` without shuffling.
        per: ``"token"`` scores each token of the training samples: rows are ``"name:t"`` for token
            ``t`` of a sample. A sample's score is the sum of its tokens' scores (but its cosine is
            not). :class:`~backpack_core.extensions.BatchGrad` defines a token's gradient.

    Raises:
        UsageError: An argument is wrong, or a score is not finite.
        UnsupportedError: With ``per="token"``, the method scores whole samples, or a parameter has
            no tokens.
    """
    problem, chosen = Problem(model, lossfunc, batch, per), _chosen(method, per)
    query = problem.with_loss(query_lossfunc)
    run = Run(problem, query, train_loader, query_loader, progress, process_group)
    train = run.names(train_loader, identities, is_shared=True)
    queries = run.names(query_loader, query_identities, is_shared=False)
    values = chosen.values(run)
    scores = _scores(values, run.names_of_rows(train), queries, chosen.name)
    return _finite(run.gathered(scores))


def self_influence(
    model: Module,
    lossfunc: Loss,
    train_loader: Iterable[Any],
    method: str | Method = "ekfac",
    *,
    batch: Split | None = None,
    identities: Identities = "place",
    progress: bool = True,
    process_group: distributed.ProcessGroup | None = None,
    per: Per = "sample",
) -> Scores:
    """Score every training sample for itself: which ones did the model learn by heart?

    Wrong labels and outliers have the highest scores. The computation avoids values of size ``N²``.

    Args:
        model: As for :func:`influence`.
        lossfunc: As for :func:`influence`.
        train_loader: As for :func:`influence`.
        method: As for :func:`influence`, except for TRAK.
        batch: As for :func:`influence`.
        identities: As for :func:`influence`.
        progress: As for :func:`influence`.
        process_group: As for :func:`influence`.
        per: ``"token"`` scores each token for itself, in rows ``"name:t"``. These scores do not add
            up to the sample's score, which also has the products of different tokens.

    Returns:
        Scores ``[N, 1]``, for the single query ``"itself"``.

    Raises:
        UsageError: An argument is wrong, or a score is not finite.
        UnsupportedError: As for :func:`influence`.
    """
    problem, chosen = Problem(model, lossfunc, batch, per), _chosen(method, per)
    run = Run(problem, problem, train_loader, (), progress, process_group)
    train = run.names(train_loader, identities, is_shared=True)
    values = chosen.own_values(run).unsqueeze(1)
    scores = _scores(values, run.names_of_rows(train), ["itself"], chosen.name)
    return _finite(run.gathered(scores))


def _scores(values: Tensor, train: list[Identity], queries: list[Identity], name: str) -> Scores:
    if tuple(values.shape) != (len(train), len(queries)):
        raise ShapeError(
            f"The first tensors of the batches have {len(train)} entries for training and "
            f"{len(queries)} for queries, but the gradients are those of {values.shape[0]} and "
            f"{values.shape[1]}. Put a tensor with the samples on axis 0 first: give batch=."
        )
    return Scores(values, train, queries, name)


def _finite(scores: Scores) -> Scores:
    bad = ~scores.values.isfinite()
    if bad.any():
        row, column = int(bad.any(1).nonzero()[0]), int(bad.any(0).nonzero()[0])
        whose = f"The scores of the training sample {scores.train[row]!r}"
        if bad[:, column].all():
            whose = f"All scores for the query {scores.queries[column]!r}"
        raise UsageError(f"{whose} are not finite: look at its loss and at the damping.")
    return scores


def _chosen(method: Any, per: Per) -> Method:
    chosen = method if isinstance(method, Method) else _named(method)
    if per == "token" and not chosen.has_tokens:
        raise UnsupportedError(
            f'{chosen.name} scores whole samples: take an inner product for per="token", such as '
            '"ekfac" or "dot".'
        )
    return chosen


def _named(method: Any) -> Method:
    if method == "tracin":
        raise UsageError("TracIn needs checkpoints: method=TracIn([state, ...], learning_rates).")
    if isinstance(method, type):
        raise UsageError(
            f"method must be an object or a name. Write {method.__name__}(...) with its settings."
        )
    if method not in METHODS:
        raise UsageError(
            f"The method {method!r} is unknown{nearest(str(method), METHODS) or '.'} Known are "
            f"{', '.join(METHODS)}, and methods with settings, such as Influence(damping=1e-3)."
        )
    return METHODS[method]()
