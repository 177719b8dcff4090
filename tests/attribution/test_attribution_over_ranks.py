"""Several processes give the scores of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from backpack_attribution import GradientStore, project
from backpack_firstorder import Projection
from tests.attribution.problems import tied, tokens
from tests.attribution.ranks import SAMPLES, scores, start

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)


@pytest.mark.host("gloo joins tensors of there")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_scores_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    wanted = scores(0, 1, tmp_path)
    start(ranks, tmp_path)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"scores-{ranks}-{rank}.pt")
        for name, (values, train) in wanted.items():
            assert found[name][1] == train == [*range(len(values))]
            assert torch.allclose(found[name][0], values, rtol=1e-8, atol=1e-10), name
    stores = [GradientStore(tmp_path / f"store-{n}") for n in (1, ranks)]
    queries = project(tied(), nn.CrossEntropyLoss(), [tokens(3, seed=2)], Projection(5))
    one, several = (store.scores(queries).sorted() for store in stores)
    assert several.train == one.train == [*range(SAMPLES)]
    assert torch.allclose(several.values, one.values, rtol=1e-10, atol=1e-12)
