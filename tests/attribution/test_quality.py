"""The kit: numbers that are known, and tasks that can be trained again."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from backpack_attribution import Influence, Scores, influence, self_influence
from backpack_attribution.quality import (
    brittleness,
    characters,
    digits,
    facts,
    halves,
    lds,
    leave_one_out,
    mean_reciprocal_rank,
    mislabelled_auc,
    recall_at,
    retrained,
    spearman,
)
from backpack_core.errors import ShapeError, UsageError

pytestmark = pytest.mark.host("measures of scores, which lie there")


def test_rank_correlations_are_scipys() -> None:
    a, b = torch.randn(20, 4), torch.randint(4, (20, 4)).double()
    wanted = [spearmanr(x, y).statistic for x, y in zip(a.T, b.T, strict=True)]
    assert torch.allclose(spearman(a, b), torch.tensor(wanted))


def test_lds_of_perfect_useless_and_turned_scores() -> None:
    scores, subsets = torch.randn(12, 3), halves(12, 40)
    assert subsets.sum(1).tolist() == [6] * 40
    outputs = -(subsets.double() @ scores)
    found = lds(scores, subsets, outputs.exp())  # only the order counts
    assert found.mean == pytest.approx(1.0)
    assert lds(-scores, subsets, outputs).mean == pytest.approx(-1.0)
    assert abs(lds(torch.randn(12, 3), subsets, torch.randn(40, 3)).mean) < 0.5
    named = Scores(scores, [*range(12)], [*range(3)])
    assert torch.equal(lds(named, subsets, outputs.exp()).each, found.each)
    assert lds(torch.ones(12, 3), subsets, outputs).mean != lds(scores, subsets, outputs).mean
    with pytest.raises(ShapeError, match=r"subsets must be \[S, 12\], boolean"):
        lds(scores, subsets.double(), outputs)
    with pytest.raises(ShapeError, match=r"Scores must be \[N, M\]"):
        lds(scores[:, 0], subsets, outputs)


def test_wrong_labels_are_scikit_learns() -> None:
    scores, wrong = torch.randn(50).round(decimals=1), torch.rand(50) < 0.3
    assert mislabelled_auc(scores, wrong) == pytest.approx(roc_auc_score(wrong, scores))
    assert mislabelled_auc(wrong.double(), wrong) == 1.0
    with pytest.raises(UsageError, match="0 wrong labels"):
        mislabelled_auc(scores, torch.zeros(50, dtype=torch.bool))


def test_facts_that_are_found() -> None:
    relevant = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 0]], dtype=torch.bool)
    scores = torch.tensor([[3.0, 0.0], [1.0, 1.0], [2.0, 2.0], [0.0, 3.0]])
    assert recall_at(1, scores, relevant).each.tolist() == [1.0, 0.0]
    assert recall_at(2, scores, relevant).each.tolist() == [0.5, 1.0]
    assert recall_at(9, scores, relevant).each.tolist() == [1.0, 1.0]
    assert mean_reciprocal_rank(scores, relevant).each.tolist() == [1.0, 0.5]
    with pytest.raises(UsageError, match="at least one sample for each query"):
        recall_at(1, scores, torch.zeros(4, 2, dtype=torch.bool))


def test_measures_of_what_is_not_a_number() -> None:
    """Sorted, NaN is the largest: a method without any number would find all facts."""
    bad, relevant = torch.full((4, 1), torch.nan), torch.eye(4, dtype=torch.bool)[:, :1]
    good, subsets = torch.arange(4.0).unsqueeze(1), halves(4, 5)
    calls = [
        lambda: recall_at(1, bad, relevant),
        lambda: mean_reciprocal_rank(bad, relevant),
        lambda: mislabelled_auc(bad, relevant[:, 0]),
        lambda: spearman(bad, good),
        lambda: lds(bad, subsets, torch.ones(5, 1)),
        lambda: lds(good, subsets, torch.full((5, 1), torch.nan)),
        lambda: lds(good / 0, subsets, torch.ones(5, 1)),
        lambda: leave_one_out(bad, good, range(4)),
        lambda: leave_one_out(good, good / 0, range(4)),
        lambda: brittleness(bad, [1], lambda kept: [0], (1,)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="must be numbers, and some are NaN"):
            call()
    assert recall_at(1, good.masked_fill(~relevant, -torch.inf), relevant).mean == 1.0


def test_brittleness_is_the_count_at_which_predictions_change() -> None:
    scores = torch.arange(6.0).flip(0).unsqueeze(1)

    def retrain(kept):
        return torch.tensor([int(kept[:3].any())])  # until the first three are gone

    assert brittleness(scores, [1], retrain, (1, 2, 3, 4)).each.tolist() == [3.0]
    assert brittleness(-scores, [1], retrain, (1, 2, 3)).each.tolist() == [6.0]


def test_digits_without_some_of_them(tmp_path) -> None:
    """Influence functions say what a logistic regression of half the digits does."""
    task = digits(samples=120, queries=20)
    model = task.train()
    truth = retrained(task, halves(120, 12), file=tmp_path / "losses", progress=False)
    loaders = task.train_loader(), task.query_loader()
    scores = influence(model, task.lossfunc, *loaders, Influence(damping=task.decay, refine=30))
    found = lds(scores, truth.subsets, truth.outputs)
    assert found.mean > 0.9
    assert found.mean > lds(influence(model, task.lossfunc, *loaders, "dot"), *truth).mean
    again = retrained(task, halves(120, 12), file=tmp_path / "losses", progress=False)
    assert torch.equal(again.outputs, truth.outputs)
    with pytest.raises(UsageError, match="other subsets or seeds"):
        retrained(task, halves(120, 12), (1,), file=tmp_path / "losses")
    others = (
        digits("mlp", 120, 20),
        digits(samples=120, queries=20, decay=0.1),
        task.mislabelled()[0],
    )
    for other in others:
        with pytest.raises(UsageError, match="losses of another task"):
            retrained(other, halves(120, 12), file=tmp_path / "losses")
    chosen = [3, 50, 99]
    without = ~torch.nn.functional.one_hot(torch.tensor(chosen), 120).bool()
    changes = retrained(task, without, progress=False).outputs - task.losses(model)
    assert leave_one_out(scores, changes, chosen).mean > 0.95


def test_wrong_digits_are_found_by_their_influence_on_themselves() -> None:
    task, wrong = digits(samples=200, queries=5).mislabelled(0.1)
    model = task.train()
    method = Influence(damping=task.decay)
    scores = self_influence(model, task.lossfunc, task.train_loader(), method)
    assert mislabelled_auc(scores.values, wrong) > 0.9
    assert mislabelled_auc(scores, wrong) == mislabelled_auc(scores.values, wrong)
    with pytest.raises(UsageError, match="one class for each sample"):
        characters(samples=4, queries=1).mislabelled()


def test_tasks_of_texts() -> None:
    task = characters(samples=8, queries=2, epochs=1)
    model = task.train(torch.arange(8) < 5)
    assert not model.training
    assert task.losses(model).shape == (2,)
    told = facts(count=3, epochs=1)
    assert told.relevant is not None
    for row, marks in enumerate(told.relevant.T):
        stated = [told.texts[n] for n in marks.nonzero().flatten().tolist()]
        assert len(stated) == 2
        answer = told.query_targets[row]
        word = "".join(" abcdefghijklmnopqrstuvwxyz."[c] for c in answer[answer >= 0].tolist())
        assert all(word.strip(" .") in text for text in stated)
    with pytest.raises(UsageError, match="kind must be"):
        digits("tree")  # type: ignore[arg-type]


ORDERED = {
    "perceptron": (lambda: digits("mlp"), 40, 3),
    "letters": (characters, 50, 4),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ORDERED)
def test_order_of_methods(name: str) -> None:
    """Conjugate gradients on exact products above corrected factors above TRAK."""
    make, subsets, seeds = ORDERED[name]
    task = make()
    model = task.train()
    truth = retrained(task, halves(len(task), subsets), range(seeds), progress=False)
    loaders = task.train_loader(), task.query_loader()
    found = {
        method: lds(influence(model, task.lossfunc, *loaders, method), *truth)
        for method in ("ekfac-cg", "ekfac", "trak")
    }
    assert found["ekfac-cg"].mean > found["ekfac"].mean > found["trak"].mean
