"""Matrices over a data set as linear operators, against dense ones of all samples at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_core.extensions import KFLR
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.conjugate_gradients import ConvergenceError, conjugate_gradients
from backpack_secondorder.over_data import GGN, Fisher, Hessian
from tests.devices import rng_state, set_rng_state
from tests.oracle import assert_close
from tests.secondorder.data_problems import (
    KINDS,
    LOSSES,
    SIZES,
    by_blocks,
    conv,
    dense_ggn,
    function_of,
    make,
    mlp,
    whole,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("net", [mlp, conv])
def test_dense(net: Callable[[], nn.Module], loss: str, kind: str) -> None:
    given = make(net, loss)
    make_operator, expected = KINDS[kind]
    found = make_operator(*given)
    dense = expected(given)
    assert found.shape == dense.shape
    assert found.dtype == torch.float64
    assert_close(found.dense(), dense)
    assert_close(make_operator(*given, by_parameter=True).dense(), by_blocks(dense, given[0]))
    assert all(p.grad is None and not vars(p) for p in given[0].parameters())


@pytest.mark.parametrize("loss", ["cross entropy", "sum", "weighted", "squares"])
def test_empirical_fisher(loss: str) -> None:
    given = make(loss=loss)
    model, lossfunc, loader = given
    inputs, target = whole(loader)
    run, flat = function_of(model)
    each = type(lossfunc)(
        reduction="sum", **({"weight": lossfunc.weight} if loss == "weighted" else {})
    )
    rows = torch.autograd.functional.jacobian(
        lambda f: torch.stack(
            [each(run(f, x[None]), t[None]) for x, t in zip(inputs, target, strict=True)]
        ),
        flat,
    )
    loss_sum = each(model(inputs), target)
    scale = (lossfunc(model(inputs), target) / loss_sum).detach()
    operator = Fisher(*given, kind="empirical")
    assert_close(operator.dense(), scale * rows.T @ rows)


@pytest.mark.parametrize("loss", ["cross entropy", "sum", "squares", "binary"])
def test_sampled_fisher(loss: str) -> None:
    given = make(loss=loss)
    state = rng_state()
    operator = Fisher(*given, mc_samples=20_000)
    expected, vector = dense_ggn(given), torch.randn(operator.shape[0])
    found = operator @ vector
    assert (found - expected @ vector).norm() < 0.05 * (expected @ vector).norm()
    torch.testing.assert_close(operator @ vector, found, rtol=0, atol=0)
    other = Fisher(*given, mc_samples=20_000, seed=1) @ vector
    assert not torch.equal(other, found)
    set_rng_state(state)
    model, lossfunc, (batch, *_) = given
    once, twice = Fisher(model, lossfunc, [batch]), Fisher(model, lossfunc, [batch, batch])
    assert not torch.allclose(once.dense(), twice.dense())  # draws of their own for each batch
    few = Fisher(*given)
    before = rng_state()
    dense = few.dense()
    assert torch.equal(rng_state(), before)
    assert_close(dense, dense.T)
    assert torch.linalg.matrix_rank(dense) <= sum(SIZES)


def test_forms_of_vectors() -> None:
    given = make()
    operator, dense = GGN(*given), dense_ggn(given)
    matrix = torch.randn(len(dense), 3)
    assert_close(operator @ matrix, dense @ matrix)
    assert_close(operator @ matrix[:, 0], dense @ matrix[:, 0])
    lists = operator.split(matrix.T)
    found = torch.cat([part.flatten(1) for part in operator @ lists], 1)
    assert_close(found, matrix.T @ dense)
    single = [part[0] for part in lists]
    assert [part.shape for part in operator @ single] == [p.shape for p in given[0].parameters()]
    assert_close(torch.cat([p.flatten() for p in operator @ single]), dense @ matrix[:, 0])
    assert (operator @ matrix[:, :0]).shape == (len(dense), 0)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.bfloat16, 600), pytest.param(torch.float16, 1500, marks=pytest.mark.long)],
)
def test_sums_of_many_batches_in_half_precision(dtype: torch.dtype, number: int) -> None:
    torch.manual_seed(0)
    model, x, y = (
        nn.Linear(3, 2).to(dtype),
        torch.randn(number, 3).to(dtype),
        torch.arange(number) % 2,
    )
    vector = torch.randn(8).to(dtype)
    found = GGN(model, nn.CrossEntropyLoss(), list(zip(x.split(1), y.split(1), strict=True)))
    product = found @ vector
    wanted = GGN(model.double(), nn.CrossEntropyLoss(), [(x.double(), y)]) @ vector.double()
    assert product.dtype is dtype
    torch.testing.assert_close(product.double(), wanted, rtol=0.02, atol=0.01)


@pytest.mark.host("scipy")
def test_scipy() -> None:
    given = make()
    dense = dense_ggn(given)
    operator = GGN(*given).to_scipy()
    values = scipy.sparse.linalg.eigsh(operator, k=3, return_eigenvectors=False)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(dense.numpy())[-3:], rtol=1e-8)
    eye = np.eye(len(dense))
    np.testing.assert_allclose(operator @ eye, dense.numpy(), atol=1e-14)
    single = GGN(given[0].float(), given[1], [(x.float(), y) for x, y in given[2]])
    assert single.to_scipy().dtype == np.float32


@pytest.mark.parametrize("is_preconditioned", [False, True])
def test_conjugate_gradients(is_preconditioned: bool) -> None:
    given = make()
    model, lossfunc, loader = given
    operator, rhs = GGN(*given), torch.cat([g.flatten() for g in GGN(*given).gradient()])
    factors = None
    if is_preconditioned:
        extend(model), extend(lossfunc)
        inputs, target = whole(loader)
        with backpack(KFLR()):
            lossfunc(model(inputs), target).backward()
        factors = BlockDiagonal.of(model, "kflr")
    precondition = None if factors is None else lambda v: factors.solve(v, 0.01)
    found = conjugate_gradients(operator, rhs, 0.01, precondition, rtol=1e-10)
    expected = torch.linalg.solve(dense_ggn(given) + 0.01 * torch.eye(len(rhs)), rhs)
    assert_close(found.x, expected, 1e-8)
    assert found.residual <= 1e-10
    with pytest.raises(ConvergenceError, match="in 2 steps"):
        conjugate_gradients(operator, rhs, 0.01, precondition, max_iterations=2)
    early = conjugate_gradients(operator, rhs, 0.01, precondition, max_iterations=2, strict=False)
    assert early.iterations == 2
    nothing = conjugate_gradients(operator, 0 * rhs)
    assert nothing.iterations == 0
    assert not nothing.x.any()
    with pytest.raises(UsageError, match="positive definite"):
        conjugate_gradients(Hessian(*given), torch.randn(len(rhs)))
    with pytest.raises(UsageError, match="divisions at zero in the net"):
        conjugate_gradients(torch.full((2, 2), torch.nan), torch.ones(2))


def test_conjugate_gradients_under_autocast() -> None:
    """In half precision, the residual falls that is updated, and not that of the solution."""
    root = torch.randn(30, 30, dtype=torch.float32)
    matrix, rhs = root @ root.T + 0.1 * torch.eye(30).float(), root[0].clone()
    with torch.autocast(root.device.type, torch.bfloat16):
        found = conjugate_gradients(matrix, rhs, rtol=1e-3)
    assert torch.dist(matrix @ found.x, rhs) < 0.01 * rhs.norm()


def test_gradient() -> None:
    model, lossfunc, loader = make(loss="weighted")
    inputs, target = whole(loader)
    expected = torch.autograd.grad(lossfunc(model(inputs), target), [*model.parameters()])
    for found, other in zip(GGN(model, lossfunc, loader).gradient(), expected, strict=True):
        assert_close(found, other)


def test_batches_in_which_no_sample_counts() -> None:
    model, lossfunc, loader = make()
    expected = dense_ggn((model, lossfunc, loader))
    ignored = (torch.randn(2, 3), torch.full((2,), -100))
    empty = (torch.randn(0, 3), torch.zeros(0, dtype=torch.long))
    assert_close(GGN(model, lossfunc, [empty, *loader, ignored]).dense(), expected)


def test_some_parameters() -> None:
    given = make()
    model = given[0]
    chosen = [model[2].bias, model[0].weight]
    rows = torch.cat([torch.arange(28, 31), torch.arange(12)])
    assert_close(GGN(*given, parameters=chosen).dense(), dense_ggn(given)[rows][:, rows])
    with pytest.raises(UsageError, match="at position 0 of parameters is not a parameter"):
        GGN(*given, parameters=[torch.ones(2)])
    model[0].weight.requires_grad_(False)
    assert GGN(*given).shape == (19, 19)
    with pytest.raises(UsageError, match=r"'0.weight' is frozen"):
        GGN(*given, parameters=chosen)


def test_batches_of_other_kinds_and_functions() -> None:
    given = make()
    model, _, loader = given
    expected = dense_ggn(given)

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), batch["y"]

    batches = [{"x": x, "y": y} for x, y in loader]
    assert_close(GGN(model, given[1], batches, forward=forward).dense(), expected)
    with pytest.raises(UsageError, match="say how to use them"):
        GGN(model, given[1], batches).dense()
    named = [({"input": x}, y) for x, y in loader]
    assert_close(GGN(model, given[1], named).dense(), expected)
    assert_close(GGN(model, given[1], [((x,), y) for x, y in loader]).dense(), expected)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def count(output: Tensor, target: Tensor) -> Tensor:
        return (target >= 0).sum()

    assert_close(GGN(model, loss, loader, normaliser=count).dense(), expected)
    for name, other in (("mean", "squares"), ("sum", "sum of squares")):
        functional = partial(nn.functional.mse_loss, reduction=name)
        data = make(loss=other)
        assert_close(GGN(model, functional, data[2], normaliser=name).dense(), dense_ggn(data))
    with pytest.raises(UsageError, match="no loss rule, so it does not tell what it divides"):
        GGN(model, loss, loader).dense()
    with pytest.raises(UsageError, match=r'tell a likelihood .* kind="empirical"'):
        Fisher(model, loss, loader, normaliser=count).dense()
    with pytest.raises(ShapeError, match="must be a number"):
        GGN(model, nn.CrossEntropyLoss(reduction="none"), loader).dense()
    with pytest.raises(UnsupportedError, match="nothing to sample"):
        Fisher(model, nn.L1Loss(), make(loss="squares")[2]).dense()
    with pytest.raises(ShapeError, match="take the tensor out"):
        GGN(model, given[1], loader, forward=lambda m, b: ({}, b[1])).dense()


def test_everything_at_random_is_refused() -> None:
    model, lossfunc, loader = make()
    random = nn.Sequential(model, nn.Dropout(0.5))
    with pytest.raises(UsageError, match=r"'1', Dropout, is in train mode: call model.eval"):
        GGN(random, lossfunc, loader)
    assert_close(GGN(random.eval(), lossfunc, loader).dense(), GGN(model, lossfunc, loader).dense())
    with pytest.raises(UsageError, match="BatchNorm1d"):
        GGN(nn.Sequential(model, nn.BatchNorm1d(3)), lossfunc, loader)

    class Augmented(list[Any]):
        def __iter__(self) -> Any:
            return ((x + 0.01 * torch.randn_like(x), y) for x, y in super().__iter__())

    operator = GGN(model, lossfunc, Augmented(loader))
    vector = torch.ones(operator.shape[0])
    operator @ vector
    with pytest.raises(UsageError, match="Two passes over the loader differ"):
        operator @ vector

    class Shuffled(list[Any]):
        def __iter__(self) -> Any:
            self.reverse()
            return super().__iter__()

    shuffled = GGN(model, lossfunc, Shuffled(loader))
    assert_close(shuffled @ vector, shuffled @ vector)
    sampled = Fisher(model, lossfunc, Shuffled(loader))
    sampled @ vector
    with pytest.raises(UsageError, match="does not shuffle"):
        sampled @ vector
    once = GGN(model, lossfunc, iter(loader))
    once @ vector
    with pytest.raises(UsageError, match="gave no batch"):
        once @ vector


def test_models_that_write_into_their_inputs() -> None:
    """Every pass gets what the loader has."""
    model, lossfunc, loader = make()

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x.mul_(2))
            return result

    expected = dense_ggn((model, lossfunc, [(2 * x, y) for x, y in loader]))
    operator = GGN(Overwrites(), lossfunc, loader)
    for _ in range(2):
        assert_close(operator.dense(), expected)


def test_parameters_may_change_between_products() -> None:
    given = make()
    operator = GGN(*given)
    operator.dense()
    with torch.no_grad():
        given[0][0].weight.mul_(1.5)
    assert_close(operator.dense(), dense_ggn(given))


def test_memory_of_parameters_may_be_exchanged_between_products() -> None:
    """Their versions do not tell: ``vector_to_parameters`` exchanges the memory, too."""
    model, lossfunc = nn.Linear(3, 2), nn.CrossEntropyLoss()
    loader, vector = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))], torch.ones(8)
    matrix, flat = GGN(model, lossfunc, loader), nn.utils.parameters_to_vector(model.parameters())
    for change in (
        lambda: nn.utils.vector_to_parameters(flat.detach() * 3, model.parameters()),
        lambda: model.weight.data.mul_(0.5),
    ):
        matrix @ vector
        change()
        found = matrix @ torch.eye(8)
        assert torch.allclose(found, GGN(model, lossfunc, loader) @ torch.eye(8))


def test_parameters_that_are_replaced() -> None:
    model, loader = nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]
    matrix = GGN(model, nn.CrossEntropyLoss(), loader)
    model.weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(UsageError, match=r"'weight' is no longer the model's"):
        matrix @ torch.ones(8)
    matrix = GGN(model, nn.CrossEntropyLoss(), loader)
    with torch.inference_mode(), pytest.raises(UsageError, match=r"inside torch\.inference_mode"):
        matrix @ torch.ones(8)


def test_of_extended_models_inside_of_a_context() -> None:
    given = make()
    extend(given[0]), extend(given[1])
    expected = dense_ggn(given)
    with backpack(KFLR()):
        assert_close(GGN(*given).dense(), expected)
        assert all(not vars(p) for p in given[0].parameters())
        given[1](given[0](given[2][0][0]), given[2][0][1]).backward()


def test_bad_vectors() -> None:
    operator = GGN(*make())
    size = operator.shape[0]
    with pytest.raises(ShapeError, match=rf"vector \[{size}\], a matrix"):
        operator @ torch.ones(size + 1)
    with pytest.raises(ShapeError, match="a tensor for each parameter"):
        operator @ [torch.ones(size)]
    with pytest.raises(UsageError, match="convert them"):
        operator @ torch.ones(size, dtype=torch.float32)
    with pytest.raises(UsageError, match="kind must be one of"):
        Fisher(*make(), kind="exact")
    with pytest.raises(UsageError, match="mc_samples"):
        Fisher(*make(), mc_samples=0)


def test_wrong_arguments() -> None:
    model, lossfunc, loader = make()
    for wrong in (None, "model", nn.Linear):
        with pytest.raises(UsageError, match=r"The model must be a torch\.nn\.Module"):
            GGN(wrong, lossfunc, loader)  # type: ignore[arg-type]
    for wrong in (None, "loss", nn.CrossEntropyLoss):
        with pytest.raises(UsageError, match="The loss must be a module"):
            GGN(model, wrong, loader)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='normaliser must be "sum", "mean"'):
        GGN(model, lossfunc, loader, normaliser="average")  # type: ignore[arg-type]
    ignored = [(inputs, torch.full_like(target, -100)) for inputs, target in loader]
    with pytest.raises(UsageError, match="that are not ignored"):
        GGN(model, nn.CrossEntropyLoss(), ignored).gradient()


@pytest.mark.host("scipy")
@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e-22, 1e-18, 1e20, 1e30])
def test_conjugate_gradients_for_a_right_side_of_any_size(size: float) -> None:
    """In single precision, its norm seems to be zero or infinite, and so does the residual."""
    root, rhs = torch.randn(20, 20), torch.randn(20)
    matrix = root @ root.T / 20 + torch.eye(20)
    found = conjugate_gradients(matrix.float(), (size * rhs).float(), rtol=1e-5)
    assert 0 < found.residual < 1e-5
    assert_close(found.x.double() / size, torch.linalg.solve(matrix, rhs), 1e-4)
    with pytest.raises(UsageError, match="right side of conjugate gradients is not finite"):
        conjugate_gradients(matrix, rhs / 0, strict=False)


def test_wrong_arguments_of_conjugate_gradients() -> None:
    operator = GGN(*make())
    rhs = torch.ones(operator.shape[0])
    for wrong in ([rhs], rhs[:3], rhs[:, None], rhs.numpy()):
        with pytest.raises(ShapeError, match="one flat vector"):
            conjugate_gradients(operator, wrong, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"preconditioner must be a function .* Got GGN"):
        conjugate_gradients(operator, rhs, 0.1, operator)  # type: ignore[arg-type]
    for wrong in (None, lambda vector: operator @ vector):
        with pytest.raises(UsageError, match="take a matrix with a shape that multiplies"):
            conjugate_gradients(wrong, rhs, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one number"):
        conjugate_gradients(operator, rhs, "0.1")  # type: ignore[arg-type]
