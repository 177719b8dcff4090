"""Numbers that say how good a matrix of scores is. Scores are ``[N, M]``, from any program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_attribution.scores import Scores, require_order
from backpack_core.errors import ShapeError, UsageError


class Measured(NamedTuple):
    """A mean over queries.

    Attributes:
        mean: The number.
        standard_error: The standard error of the mean, over queries.
        each: The number of each query, ``[M]``; NaN where it is not defined (a constant).
    """

    mean: float
    standard_error: float
    each: Tensor

    @classmethod
    def over(cls, each: Tensor) -> Measured:
        """The mean of the queries that have a number."""
        found = each[~each.isnan()]
        count = len(found)
        error = found.std().item() / count**0.5 if count > 1 else float("nan")
        return cls(found.mean().item() if count else float("nan"), error, each)

    def __str__(self) -> str:
        """For example ``"0.812 ± 0.006"``."""
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation of columns, ``[S, M]`` and ``[S, M]`` to ``[M]``; ties get mean ranks.

    Raises:
        UsageError: An entry is NaN.
    """
    x, y = (_centred(ranks(t)) for t in (a, b))
    return _cosine(x, y)


def ranks(values: Tensor) -> Tensor:
    """Ranks in each column, from zero; equal values get the mean of their ranks. ``[S, M]``."""
    require_order(values, "What is ranked")
    columns = []
    for column in values.T:
        _, inverse, counts = column.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        columns.append((last - (counts + 1) / 2)[inverse])
    return torch.stack(columns, 1)


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of columns; NaN if one is zero."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=0) * torch.linalg.vector_norm(y, dim=0)
    return (x * y).sum(0) / norms


def lds(scores: Scores | Any, subsets: Any, outputs: Any) -> Measured:
    """Linear datamodelling score (Park et al., 2023, arXiv:2303.14186, definition 2.3).

    Models are trained on subsets ``S`` of the samples. The score is the rank correlation of
    ``Σ_n∈S score[n, m]``, the sum of these samples' scores, with ``-output[S, m]``.

    Args:
        scores: ``[N, M]``; positive if a sample lowers a loss.
        subsets: Which samples each model was trained on, ``[S, N]``, boolean.
        outputs: The loss of each query under each model, ``[S, M]``.

    Raises:
        ShapeError: The shapes do not fit.
        UsageError: A score or a loss is NaN.
    """
    values = _matrix(scores)
    chosen, losses = torch.as_tensor(subsets), torch.as_tensor(outputs).double()
    _require_shapes(values, chosen, losses, "subsets")
    require_order(losses, "outputs")
    return Measured.over(spearman(chosen.double() @ values, -losses))


def leave_one_out(scores: Scores | Any, changes: Any, samples: Sequence[int]) -> Measured:
    """Pearson's correlation of scores with the true change of the loss without a sample.

    Args:
        scores: ``[N, M]``.
        changes: How much each query's loss rises if each of ``samples`` is left out, ``[K, M]``.
        samples: Which rows of the scores were left out, ``K``.

    Raises:
        ShapeError: The shapes do not fit.
        UsageError: A score or a change is not finite.
    """
    values = _matrix(scores)[[*samples]]
    true = torch.as_tensor(changes).double()
    if values.shape != true.shape:
        raise ShapeError(f"changes must be {list(values.shape)}. Got {list(true.shape)}.")
    x, y = _centred(values), _centred(true)
    require_order(x, "Scores, without their mean,")
    require_order(y, "changes, without their mean,")
    return Measured.over(_cosine(x, y))


def brittleness(
    scores: Scores | Any,
    predicted: Any,
    retrain: Callable[[Tensor], Any],
    counts: Sequence[int] = (10, 20, 40, 80, 160, 320),
) -> Measured:
    """How many of the highest samples must be removed until a prediction changes.

    For each query, as in Ilyas et al. (2022, arXiv:2202.00622, section 4.1): a model is trained
    without some of the highest samples. The value is the smallest of ``counts`` that changes its
    prediction, or ``2 · max(counts)`` if none is enough. Fewer is better.

    Args:
        scores: ``[N, M]``.
        predicted: What the model predicts for each query, ``[M]``.
        retrain: A function that trains without some samples and predicts all queries: from a mask
            ``[N]`` of the samples to keep to predictions ``[M]``.
        counts: Numbers of samples, in rising order.
    """
    values, before = _matrix(scores), torch.as_tensor(predicted)
    needed = torch.full((values.shape[1],), 2.0 * max(counts), dtype=torch.float64)
    for query in range(values.shape[1]):
        order = values[:, query].argsort(descending=True)
        for count in counts:
            kept = torch.ones(len(values), dtype=torch.bool)
            kept[order[:count]] = False
            if torch.as_tensor(retrain(kept))[query] != before[query]:
                needed[query] = count
                break
    return Measured.over(needed)


def mislabelled_auc(scores: Scores | Any, is_wrong: Any) -> float:
    """Area under the receiver operating curve of finding wrong labels: one is perfect, ½ is chance.

    Args:
        scores: One for each sample, ``[N]``, high if its label seems wrong: self-influence.
        is_wrong: Which labels are wrong, ``[N]``, boolean.

    Raises:
        UsageError: No label is wrong, or all are; or a score is NaN.
    """
    found = scores.values if isinstance(scores, Scores) else torch.as_tensor(scores)
    values, wrong = found.double().flatten(), torch.as_tensor(is_wrong).bool()
    bad, good = int(wrong.sum()), int((~wrong).sum())
    if not bad or not good or len(values) != len(wrong):
        raise UsageError(
            f"The area needs some wrong and some right labels, and a score for each. Got "
            f"{len(values)} scores, {bad} wrong labels and {good} right ones."
        )
    total = ranks(values.unsqueeze(1)).squeeze(1)[wrong].sum().item() + bad
    return (total - bad * (bad + 1) / 2) / (bad * good)


def recall_at(k: int, scores: Scores | Any, relevant: Any) -> Measured:
    """Share of a query's relevant samples among its ``k`` highest; a share of ``k`` if more are.

    Args:
        k: How many of the highest are looked at.
        scores: ``[N, M]``.
        relevant: Which samples state the fact of each query, ``[N, M]``, boolean.
    """
    values, marks = _matrix(scores), torch.as_tensor(relevant).bool()
    _require_relevant(values, marks)
    top = values.topk(min(k, len(values)), dim=0).indices
    found = marks.gather(0, top).sum(0).double()
    return Measured.over(found / marks.sum(0).clamp(max=k).double())


def mean_reciprocal_rank(scores: Scores | Any, relevant: Any) -> Measured:
    """One over the place (from one) of the first relevant sample in each query's order.

    Args:
        scores: ``[N, M]``.
        relevant: Which samples state the fact of each query, ``[N, M]``, boolean.
    """
    values, marks = _matrix(scores), torch.as_tensor(relevant).bool()
    _require_relevant(values, marks)
    order = values.argsort(dim=0, descending=True)
    first = marks.gather(0, order).int().argmax(0)
    return Measured.over(1 / (first + 1).double())


def _matrix(scores: Any) -> Tensor:
    values = scores.values if isinstance(scores, Scores) else torch.as_tensor(scores)
    if values.dim() != 2 or not len(values):
        raise ShapeError(f"Scores must be [N, M]. Got {list(values.shape)}.")
    require_order(values)
    return values.detach().cpu().double()


def _require_shapes(values: Tensor, subsets: Tensor, outputs: Tensor, what: str) -> None:
    wanted = (len(outputs), values.shape[0]), (len(outputs), values.shape[1])
    if (tuple(subsets.shape), tuple(outputs.shape)) != wanted or subsets.dtype is not torch.bool:
        raise ShapeError(
            f"For scores {list(values.shape)}, {what} must be [S, {values.shape[0]}], boolean, and "
            f"outputs [S, {values.shape[1]}]. Got {list(subsets.shape)}, {subsets.dtype}, and "
            f"{list(outputs.shape)}."
        )


def _require_relevant(values: Tensor, marks: Tensor) -> None:
    if marks.shape != values.shape or not marks.any(0).all():
        raise UsageError(
            f"relevant must be {list(values.shape)}, with at least one sample for each query. Got "
            f"{list(marks.shape)}."
        )
