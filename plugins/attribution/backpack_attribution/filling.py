"""Fills a store with the gradients of a data set, and prepares queries for influence functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_attribution import forms
from backpack_attribution.forms import Gradients
from backpack_attribution.identities import Identity, tokens_of
from backpack_attribution.manifest import Projected
from backpack_attribution.problem import Loss, Problem, Split
from backpack_attribution.projected import inverse_products, projections_of, require_share
from backpack_attribution.run import Identities, Run
from backpack_attribution.store import GradientStore
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import Projection
from backpack_firstorder.tokens import Per
from backpack_products.fingerprint import agreed_on_ranks, fingerprint_of


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
    per: Per = "sample",
) -> GradientStore:
    """Append the gradients of all samples of a loader that are not in the store.

    After an interruption, start again with the same arguments: stored batches are not computed
    again.

    Args:
        store: Where they go; a shard is written when it is full, and the last one at the end.
        model: The trained model, in evaluation mode.
        lossfunc: As for :func:`~backpack_attribution.influence`.
        loader: Batches, the same in every pass over it.
        projection: Store projected gradients; default: the gradients themselves.
        batch: Makes ``(inputs, targets)`` from an item of the loader.
        identities: As for :func:`~backpack_attribution.influence`.
        progress: Whether to show a bar, if the output is a terminal.
        process_group: Processes that have a part of the data each. Each writes its own shards; open
            the store again to see those of all.
        per: ``"token"`` stores a row for each token, with the identity ``"name:t"``. A store has
            only one kind of rows.

    Returns:
        The store.

    Raises:
        UsageError: The stored rows were computed by other plugins, at other weights or with another
            loss module, were projected differently, or are of the other kind; or processes have
            different plugins.
        ShapeError: The stored rows have other parts than the model's trained parameters.
    """
    problem = Problem(model, lossfunc, batch, per)
    plugins = problem.plugins()
    if process_group is not None:
        agreed_on_ranks(plugins, process_group)
    store.computed_by(plugins, per, projection, problem.weights(), problem.said_of_loss())
    parts = _parts(problem, projection)
    _require_fit(store, parts)
    run = Run(problem, problem, loader, (), progress, process_group)
    names = run.names(loader, identities, is_shared=True)
    first = 0
    with problem.extended(), store:
        for item in run.batches(loader, "gradients"):
            count = run.samples(item)
            own = names[first : first + count]
            first += count
            # A sample's tokens are stored together: the first shows whether all are stored.
            missing = store.missing(own if per == "sample" else [f"{name}:0" for name in own])
            if missing:
                found = forms.completed(_gradients(problem, item, projection), parts)
                tokens = _tokens_in(found, count, per)
                rows = [n * tokens + t for n in missing for t in range(tokens)]
                taken = {name: forms.rows(value, rows) for name, value in found.items()}
                store.append(_names([own[n] for n in missing], tokens, per), taken)
    return store


def _names(samples: list[Identity], tokens: int, per: Per) -> list[Identity]:
    if per == "sample":
        return samples
    return [token for name in samples for token in tokens_of(name, tokens)]


def _tokens_in(gradients: Gradients, samples: int, per: Per) -> int:
    """How many rows a sample has: one, or one for each token."""
    lengths = sorted({len(value) for value in gradients.values()})
    if lengths != [samples] and per == "sample":
        raise ShapeError(
            f"The first tensor of a batch has {samples} entries, but the gradients are those of "
            f"{lengths} samples. Put a tensor with the samples on axis 0 first: give batch=."
        )
    if len(lengths) > 1 or lengths[0] % samples:
        raise ShapeError(
            f"Parameters have gradients of {lengths} tokens for {samples} samples, but a row needs "
            "the same tokens of all parameters. Freeze some, or store whole samples."
        )
    return lengths[0] // samples


def _gradients(problem: Problem, batch: Any, projection: Projection | None) -> Gradients:
    if projection is None:
        return problem.gradients(batch)
    return projections_of(problem, batch, projection)


def _parts(problem: Problem, projection: Projection | None) -> dict[str, Tensor]:
    """The parts of a row, as empty values: all trained parameters.

    Batches may reach different ones: an expert may have no token.
    """
    like = next(iter(problem.parameters.values()))
    sizes = {name: tuple(parameter.shape) for name, parameter in problem.parameters.items()}
    if projection is not None:
        sizes = dict.fromkeys(sizes, (projection.dim,))
    return {name: like.new_zeros(0, *shape) for name, shape in sizes.items()}


def _require_fit(store: GradientStore, parts: dict[str, Tensor]) -> None:
    """Refuse a store of another model, even if all batches are stored and none is computed."""
    own, asked = store.shapes, {name: value.shape[1:] for name, value in parts.items()}
    for name in {**own, **asked} if own and not store.is_empty else ():
        if own.get(name) != asked.get(name):
            has, needs = (
                "no such part" if s is None else [*s] for s in (own.get(name), asked.get(name))
            )
            raise ShapeError(
                f"One store is for one model: for {name!r}, the rows of {store.folder} have {has}, "
                f"and this model's {needs}. Give another folder."
            )


def preconditioned(store: GradientStore, queries: Gradients, damping: float = 0.1) -> Gradients:
    """Queries times ``(F + λ)⁻¹``, with the second moments ``F = Σ_n g_n g_nᵀ`` of a store's rows.

    Inner products with these are influence functions in the space of the store, one block for each
    part, like those of :class:`~backpack_attribution.LoGra`.

    Args:
        store: A store with small parts, such as projected gradients.
        queries: A tensor ``[M, *θ]`` for each part.
        damping: ``λ`` as a share of the mean eigenvalue of each part's ``F``.

    Raises:
        UsageError: The store is empty, the queries were computed by other plugins than the rows, or
            the damping is negative.
    """
    require_share(damping)
    store.count_of(queries)
    if not len(store):
        raise UsageError(f"{store.folder} has no rows yet, so it has no second moments.")
    moments: dict[str, Tensor] = {}
    for block in store.blocks():
        for name in queries:
            rows = forms.flat(forms.dense(block.gradients[name]))
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            moments[name] = moments.get(name, rows.new_zeros(())) + forms.product(rows.T, rows)
    asked = {name: forms.dense(value) for name, value in queries.items()}
    flat = {name: forms.flat(value).cpu() for name, value in asked.items()}
    solved = inverse_products(moments, flat, damping)
    found = {name: solved[name].reshape(asked[name].shape) for name in queries}
    projection, weights = getattr(queries, "projection", None), getattr(queries, "weights", "")
    return Projected(found, fingerprint_of(queries), projection, weights)
