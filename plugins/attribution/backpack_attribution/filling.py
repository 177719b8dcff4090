"""Fills a store with the gradients of a data set, and asks it as influence functions do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_attribution import forms
from backpack_attribution.forms import Gradients
from backpack_attribution.problem import Loss, Problem, Split
from backpack_attribution.projected import inverse_product, projections_of
from backpack_attribution.run import Identities, Run
from backpack_attribution.store import GradientStore
from backpack_core.errors import ShapeError
from backpack_firstorder import Projection
from backpack_products.fingerprint import Marked, agreed_on_ranks, fingerprint_of


def fill(
    store: GradientStore,
    model: Module,
    lossfunc: Loss,
    loader: Iterable[Any],
    projection: Projection | None = None,
    *,
    batch: Split | None = None,
    identities: Identities = "place",
    progress: bool = True,
    process_group: distributed.ProcessGroup | None = None,
) -> GradientStore:
    """Append the gradients of all samples of a loader that are not in the store.

    A run that was interrupted is started again with the same arguments: batches that are stored are
    not computed again.

    Args:
        store: Where they go; a shard is written once it is full, and the last one at the end.
        model: The trained model, in evaluation mode.
        lossfunc: As for :func:`~backpack_attribution.influence`.
        loader: Batches, the same in every pass over it.
        projection: Store projected gradients; default: the gradients themselves.
        batch: Makes ``(inputs, targets)`` of what the loader gives.
        identities: As for :func:`~backpack_attribution.influence`.
        progress: Whether to show a bar, where the output is a terminal.
        process_group: Processes that have a part of the data each. Each writes its own shards; open
            the store again to see those of all.

    Returns:
        The store.

    Raises:
        UsageError: What is stored was computed by other plugins, or processes differ in theirs.
    """
    problem = Problem(model, lossfunc, batch)
    plugins = problem.plugins()
    if process_group is not None:
        agreed_on_ranks(plugins, process_group)
    store.computed_by(plugins)
    run = Run(problem, problem, loader, (), progress, process_group)
    names = run.names(loader, identities, is_shared=True)
    first = 0
    with problem.extended(), store:
        for item in run.batches(loader, "gradients"):
            count = run.samples(item)
            own = names[first : first + count]
            first += count
            missing = store.missing(own)
            if missing:
                found = _gradients(problem, item, projection)
                _require_count(found, count)
                rows = {name: forms.rows(value, missing) for name, value in found.items()}
                store.append([own[n] for n in missing], rows)
    return store


def _require_count(gradients: Gradients, samples: int) -> None:
    lengths = {len(value) for value in gradients.values()}
    if lengths != {samples}:
        raise ShapeError(
            f"The first tensor of a batch has {samples} entries, and there are gradients of "
            f"{sorted(lengths)} samples. Put one with the samples on axis 0 first: give batch=."
        )


def _gradients(problem: Problem, batch: Any, projection: Projection | None) -> Gradients:
    if projection is None:
        return problem.gradients(batch)
    return projections_of(problem, batch, projection)


def preconditioned(store: GradientStore, queries: Gradients, damping: float = 0.1) -> Gradients:
    """Queries times ``(F + λ)⁻¹``, with the second moments ``F = Σ_n g_n g_nᵀ`` of a store's rows.

    Inner products with these are influence functions in the space of the store, one block for each
    part, as :class:`~backpack_attribution.LoGra` has them.

    Args:
        store: Small parts pay here: projected gradients.
        queries: For each part a tensor ``[M, *θ]``.
        damping: ``λ`` as a share of the mean eigenvalue of each part's ``F``.

    Raises:
        UsageError: The queries were computed by other plugins than the rows.
    """
    store.count_of(queries)
    moments: dict[str, Tensor] = {}
    for block in store.blocks():
        for name in queries:
            rows = forms.dense(block.gradients[name]).flatten(1)
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            moments[name] = moments.get(name, torch.zeros(())) + rows.T @ rows
    found = {}
    for name, value in queries.items():
        query = forms.dense(value)
        flat = inverse_product(moments[name], query.flatten(1).cpu(), damping)
        found[name] = flat.reshape(query.shape)
    return Marked(found, fingerprint_of(queries))
