"""Methods in a space of random projections, which are small enough to store for every sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from backpack_attribution import forms
from backpack_attribution.manifest import Projected, shown
from backpack_attribution.margins import Margin
from backpack_attribution.methods import (
    Checkpoint,
    Method,
    as_number,
    at_checkpoint,
    joined,
    see_checkpoints,
)
from backpack_attribution.problem import FIELD, Loss, Problem, Split
from backpack_attribution.run import Run, on_cpu
from backpack_core.errors import RangeWarning, UsageError, warn
from backpack_core.extensions import ProjectedGrad
from backpack_firstorder import Projection

Kind: TypeAlias = Literal["kronecker", "gaussian", "rademacher", "sparse"]


def project(
    model: Module,
    lossfunc: Loss,
    loader: Iterable[Any],
    projection: Projection,
    batch: Split | None = None,
) -> dict[str, Tensor]:
    """Projected gradients of all samples of a loader, such as queries for a store.

    Args:
        model: The trained model, in evaluation mode.
        lossfunc: As for :func:`~backpack_attribution.influence`.
        loader: Gives batches.
        projection: The projection.
        batch: Makes ``(inputs, targets)`` from an item of the loader.

    Returns:
        ``[M, dim]`` for each parameter, with the plugins that computed them; stores refuse others.
    """
    problem = Problem(model, lossfunc, batch)
    with problem.extended():
        found = _joined([projections_of(problem, item, projection) for item in loader])
        return Projected(found, problem.plugins(), shown(projection), problem.weights())


def projections_of(problem: Problem, batch: Any, projection: Projection) -> dict[str, Tensor]:
    """Projected gradients of a batch, ``[N, dim]`` each; by token, ``[N · T, dim]``."""
    settings = projection.dim, projection.kind, projection.seed
    found = problem.compute(batch, ProjectedGrad(*settings, savefield=FIELD, per=problem.per))
    return {name: value.flatten(0, -2) for name, value in found.items()}


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: Any = joined(parts)
    return {name: value.cpu() for name, value in found.items()}


class LoGra(Method):
    """Influence functions of projected gradients (Choe et al., 2024, arXiv:2405.13954).

    ``Σ_θ φ_n ᵀ (F + λ)⁻¹ φ_m`` with the projected gradients ``φ`` of a parameter, their second
    moments over the training data, ``F = Σ_n φ_n φ_nᵀ``, and a tenth of their mean eigenvalue.
    """

    def __init__(
        self, dim: int = 64, kind: Kind = "kronecker", seed: int = 0, damping: float = 0.1
    ) -> None:
        """Store the settings.

        Args:
            dim: How many numbers each sample has for a parameter; for ``"kronecker"`` a square.
            kind: See :class:`~backpack_core.extensions.ProjectedGrad`.
            seed: The seed of the projection.
            damping: The damping as a share of the mean eigenvalue of each parameter's ``F``.
        """
        self._projection = Projection(dim, kind, seed)
        require_share(damping)
        self.dim, self.kind, self.seed, self.damping = dim, kind, seed, damping

    @property
    def name(self) -> str:
        """``"logra"``."""
        return "logra"

    def values(self, run: Run) -> Tensor:
        """Scores, ``[N, M]``."""
        train = self._features(run, run.problem, run.train_loader, "training samples")
        queries = self._features(run, run.query, run.query_loader, "queries")
        solved = self._solved(run, train, queries)
        return torch.stack([forms.product(train[name], solved[name].T) for name in solved]).sum(0)

    def own_values(self, run: Run) -> Tensor:
        """Scores for themselves, ``[N]``."""
        train = self._features(run, run.problem, run.train_loader, "training samples")
        solved = self._solved(run, train, train)
        return torch.stack([(train[name] * solved[name]).sum(1) for name in solved]).sum(0)

    def _solved(
        self, run: Run, train: dict[str, Tensor], queries: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """``(F + λ)⁻¹ φ_m`` of each parameter, ``[M, dim]``."""
        moments = {n: run.summed(forms.product(rows.T, rows)) for n, rows in train.items()}
        return inverse_products(moments, queries, self.damping)

    def _features(
        self, run: Run, problem: Problem, loader: Iterable[Any], what: str
    ) -> dict[str, Tensor]:
        with problem.extended():
            batches = run.batches(loader, f"logra: {what}")
            found = _joined([projections_of(problem, b, self._projection) for b in batches])
        # Processes add up moments of the same parameters in one order; some may not reach all.
        dtypes = {
            n: torch.promote_types(p.dtype, torch.float32) for n, p in problem.parameters.items()
        }
        known = {n: torch.zeros(0, self.dim, dtype=d, device="cpu") for n, d in dtypes.items()}
        whole: Any = forms.completed(found, known)
        return {name: whole[name] for name in known}


class TRAK(Method):
    """Data models of a linearised classifier (Park et al., 2023, arXiv:2303.14186).

    ``φ_mᵀ (ΦᵀΦ)⁻¹ φ_n (1 - p_n)`` with projected gradients ``φ`` of the margin
    ``log(p / (1 - p))`` of the right answer, averaged over checkpoints of models that were trained
    on the same kind of data. With several positions, margins are added, and ``1 - p`` averaged. The
    loss is a cross-entropy, or a module with ``reduction`` and losses ``-log p``.
    """

    def __init__(
        self,
        dim: int = 512,
        checkpoints: Sequence[Checkpoint] = (),
        kind: Kind = "rademacher",
        seed: int = 0,
        damping: float = 0.0,
    ) -> None:
        """Store the settings.

        Args:
            dim: How many numbers each sample has.
            checkpoints: State dictionaries, or files of them; default: the present model.
            kind: See :class:`~backpack_core.extensions.ProjectedGrad`.
            seed: The seed of the first checkpoint's projection; the others have the next ones.
            damping: The damping as a share of the mean eigenvalue of ``ΦᵀΦ``; zero in the paper.
        """
        Projection(dim, kind, seed)
        require_share(damping)
        see_checkpoints(checkpoints)
        self.dim, self.kind, self.seed, self.damping = dim, kind, seed, damping
        self._checkpoints = [*checkpoints]

    @property
    def name(self) -> str:
        """``"trak"``."""
        return "trak"

    def values(self, run: Run) -> Tensor:
        """Scores, ``[N, M]``."""
        model = run.problem.model
        states = self._checkpoints or [model.state_dict()]
        total, misses = torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
        for number, state in enumerate(states):
            with at_checkpoint(model, state):
                part, missed = self._at(run, Projection(self.dim, self.kind, self.seed + number))
            total, misses = total + part / len(states), misses + missed / len(states)
        return total * misses.unsqueeze(1)

    def _at(self, run: Run, projection: Projection) -> tuple[Tensor, Tensor]:
        margins = [
            problem.with_loss(Margin(problem.lossfunc)) for problem in (run.problem, run.query)
        ]
        train = self._features(run, margins[0], run.train_loader, projection)
        queries = self._features(run, margins[1], run.query_loader, projection)
        kernel = run.summed(forms.product(train.T, train))
        batches = run.batches(run.train_loader, "trak: training samples")
        with torch.no_grad():
            missed = on_cpu([self._missed(run.problem, batch) for batch in batches])
        solved = inverse_product(kernel, queries, self.damping)
        return forms.product(train, solved.T), missed

    def _features(
        self, run: Run, problem: Problem, loader: Iterable[Any], projection: Projection
    ) -> Tensor:
        """Projections of the whole gradient: the sum over parameters, with independent maps."""
        with problem.extended():
            return on_cpu(
                [
                    torch.stack([*projections_of(problem, batch, projection).values()]).sum(0)
                    for batch in run.batches(loader, "trak")
                ]
            )

    def _missed(self, problem: Problem, batch: Any) -> Tensor:
        """``1 - p`` of each sample, the mean over positions. Shape ``[N]``."""
        output, target = problem.forward(problem.model, batch)
        margins, is_there = Margin(problem.lossfunc).each(output, target)
        counts = is_there.to(margins.dtype)
        first, second = (forms.flat(t).sum(1) for t in (torch.sigmoid(-margins) * counts, counts))
        return first / second.clamp(min=1)


def require_share(damping: Any) -> None:
    """Check a damping that is a share of a mean eigenvalue.

    Raises:
        UsageError: It is not a number from zero on.
    """
    if not 0 <= as_number(damping) < inf:
        raise UsageError(
            "damping is a share of the mean eigenvalue, a number that is zero or positive, and "
            f"finite. Got {damping!r:.80}."
        )


def inverse_products(
    moments: Mapping[str, Tensor], rows: Mapping[str, Tensor], damping: float
) -> dict[str, Tensor]:
    """:func:`inverse_product` for each parameter; zero where its moments are only rounding.

    Signs may cancel whole gradients: those of a cross-entropy add up to zero over the classes. What
    rounding leaves of them would count as much as the gradients of any other parameter. A warning
    names such parameters, since small gradients look the same.

    Args:
        moments: ``F`` of each parameter, of the same samples.
        rows: Vectors ``[M, D]`` of each.
        damping: As there.
    """
    sizes = {name: float(moment.diagonal().amax()) for name, moment in moments.items()}
    largest, found = max(sizes.values()), {}
    for name, row in rows.items():
        wide = torch.promote_types(row.dtype, torch.float32)
        bound = largest * (8 * max(torch.finfo(t).eps for t in (wide, moments[name].dtype))) ** 2
        is_seen = sizes[name] > bound
        if not is_seen and sizes[name] > 0:
            warn(
                f"Projected gradients of the parameter {name!r} are so small beside those of "
                "others that they may be rounding, so it takes no part in the scores. Scale the "
                "inputs of the model, use double precision or another seed, or freeze it.",
                RangeWarning,
            )
        found[name] = (
            inverse_product(moments[name], row, damping) if is_seen else torch.zeros_like(row)
        )
    return found


def inverse_product(moments: Tensor, rows: Tensor, damping: float) -> Tensor:
    """``(F + λ)⁻¹`` times rows ``[M, D]``, in double precision; the pseudo-inverse for a λ of zero.

    Args:
        moments: ``F``, ``[D, D]``.
        rows: Vectors.
        damping: ``λ`` as a share of the mean eigenvalue.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    shifted = values.clamp(min=0) + damping * values.mean()
    bound = len(values) * torch.finfo(moments.dtype).eps * values.amax()
    inverse = torch.where(shifted > bound, 1 / shifted, 0)
    found: Tensor = (rows.double() @ vectors * inverse) @ vectors.T
    return found.to(rows.dtype)
