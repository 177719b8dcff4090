"""Block-diagonal matrices: the blocks of all parameters as one."""

from __future__ import annotations

import pytest
import torch

from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import EKFAC, KFLR, DiagGGNExact
from backpack_secondorder.blocks import BlockDiagonal
from tests.oracle import assert_close
from tests.secondorder.problems import make

FIELDS = ["kflr", "ekfac", "diag_ggn_exact"]


@pytest.fixture(params=FIELDS)
def blocks(request: pytest.FixtureRequest) -> BlockDiagonal:
    problem = make("transposed", 4)
    problem.run(KFLR(), EKFAC(None), DiagGGNExact())
    return BlockDiagonal.of(problem.model, request.param)


def dense(blocks: BlockDiagonal) -> torch.Tensor:
    return torch.block_diag(*[block.dense() for block in blocks.values()])


@pytest.mark.host("numpy")
def test_as_one_matrix(blocks: BlockDiagonal) -> None:
    matrix = dense(blocks)
    size = len(matrix)
    damped = matrix + 0.1 * torch.eye(size)
    vectors = torch.randn(size, 2)
    assert blocks.shape == matrix.shape
    assert_close(blocks.dense(), matrix)
    assert_close(blocks @ vectors, matrix @ vectors)
    assert_close(blocks.solve(vectors, 0.1), torch.linalg.solve(damped, vectors))
    lists = blocks.split(vectors.T)
    assert_close(
        torch.cat([part.flatten(1) for part in blocks.solve(lists, 0.1)], 1),
        torch.linalg.solve(damped, vectors).T,
    )
    assert_close(blocks.logdet(0.1), torch.logdet(damped))
    assert_close(blocks.trace(), matrix.trace())
    assert_close(blocks.eigenbasis().damped(0.1).dense(), damped)
    assert_close(blocks.eigenbasis().inverse(0.1).dense(), torch.linalg.inv(damped))
    assert_close(blocks.inverse(0.1).dense(), torch.linalg.inv(blocks.damped(0.1).dense()))
    product = torch.from_numpy(blocks.to_scipy() @ vectors.numpy()[:, 0])
    assert_close(product, matrix @ vectors[:, 0])


def test_arithmetic_and_state(blocks: BlockDiagonal) -> None:
    matrix = dense(blocks)
    assert_close((blocks + 2 * blocks).dense(), 3 * matrix)
    assert_close((sum([blocks, blocks]) / 2).dense(), matrix)
    assert_close(blocks.moving_average(3 * blocks, 0.5).dense(), 2 * matrix)
    assert blocks.to(torch.float32).dtype == torch.float32
    in_order_of_names = dict(sorted(blocks.state_dict().items()))  # as safetensors has them
    other = BlockDiagonal.from_state_dict(in_order_of_names)
    assert [*other] == [*blocks]
    assert torch.equal(other.dense(), blocks.dense())


def test_a_parameter_that_is_a_single_number() -> None:
    values = {"gain": torch.tensor(2.0), "weight": torch.tensor([3.0, 4.0])}
    blocks, vectors = BlockDiagonal(values), torch.arange(6.0).reshape(3, 2)
    assert_close(blocks @ vectors, torch.tensor([2.0, 3.0, 4.0])[:, None] * vectors)
    assert_close(blocks @ vectors[:, 0], torch.tensor([2.0, 3.0, 4.0]) * vectors[:, 0])
    alone, both = (
        blocks @ [torch.tensor(1.0), torch.ones(2)],
        blocks @ [torch.ones(3), torch.ones(3, 2)],
    )
    assert [part.shape for part in alone] == [(), (2,)]
    assert [part.shape for part in both] == [(3,), (3, 2)]


@pytest.mark.host("its generator is of there")
def test_draws(blocks: BlockDiagonal) -> None:
    shapes = [block.order.shape for block in blocks.values()]
    assert [draw.shape for draw in blocks.sample(damping=1.0)] == shapes
    assert [draw.shape[1:] for draw in blocks.sample(3, 1.0)] == shapes
    first = blocks.sample(3, 1.0, torch.Generator().manual_seed(1))
    again = blocks.sample(3, 1.0, torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_is_refused(blocks: BlockDiagonal) -> None:
    problem = make("mlp", 2)
    with pytest.raises(UsageError, match=r"'0.weight' has no 'kfac'"):
        BlockDiagonal.of(problem.model, "kfac")
    vars(problem.model[0].weight)["kfac"] = None
    with pytest.raises(UsageError, match=r"'0.weight' has no 'kfca': did you mean 'kfac'\?"):
        BlockDiagonal.of(problem.model, "kfca")
    with pytest.raises(KeyError, match=r"There is no '0.wieght': did you mean '0.weight'\?"):
        _ = blocks["0.wieght"]
    with pytest.raises(UsageError, match="at least one block"):
        BlockDiagonal({})
    names = [*blocks]
    fewer = BlockDiagonal({name: blocks[name] for name in names[:-1]})
    with pytest.raises(UsageError, match="have the same parameters"):
        blocks + fewer
    with pytest.raises(UsageError, match="Got float"):
        blocks + 1.0  # type: ignore[operator]
    with pytest.raises(ShapeError):
        blocks.solve(torch.ones(3))
    for vectors in ("x", dict(blocks), [1.0] * len(blocks), 2.0):
        with pytest.raises(ShapeError, match=r"one for each parameter. Got .* of type"):
            blocks.solve(vectors, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\*vectors\.values"):
        blocks.solve(dict(blocks), 0.1)  # type: ignore[arg-type]
    for count in (-1, 2.5, True):
        with pytest.raises(UsageError, match="count must be"):
            blocks.sample(count, 0.1)  # type: ignore[arg-type]
    found = {(name, "kflr"): block for name, block in blocks.items()}
    for given in (found, [*blocks.values()]):
        with pytest.raises(
            UsageError,
            match=r"take one field of a result of accumulate, BlockDiagonal\(found\.field",
        ):
            BlockDiagonal(given)  # type: ignore[arg-type]


def test_a_damping_for_each_parameter(blocks: BlockDiagonal) -> None:
    with pytest.raises(UsageError, match="damp each block"):
        blocks.logdet(dict.fromkeys(blocks, 1.0))  # type: ignore[arg-type]


def test_of_what_is_no_model(blocks: BlockDiagonal) -> None:
    with pytest.raises(UsageError, match=r"found\.field\('kflr'\)"):
        BlockDiagonal.of(dict(blocks), "kflr")  # type: ignore[arg-type]
