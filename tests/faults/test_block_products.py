"""Products with blocks of the Hessian and the Gauss-Newton matrix of the whole loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack_core import backpack, extend, unextend
from backpack_core.errors import ShapeError
from backpack_core.extensions import GGNMP, HMP, PCHMP
from tests import oracle
from tests.cases import Problem, classification, mlp
from tests.devices import rng_state, set_rng_state
from tests.faults.block_nets import NETS, normalised, normalised_images
from tests.secondorder.problems import hessians

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


PRODUCTS: dict[str, Callable[..., Any]] = {"ggnmp": GGNMP, "hmp": HMP, "pchmp": PCHMP}


# By autograd, over the whole batch at once.


def hessian(output: Tensor, loss: Tensor, parameter: Tensor, lossfunc: Any) -> Tensor:
    """``∂²ℓ/∂θ²`` by double backward. Shape ``[P, P]``."""
    (slope,) = torch.autograd.grad(loss, parameter, create_graph=True)
    rows = [oracle.gradient(entry, parameter, torch.ones(())) for entry in slope.flatten()]
    return torch.stack([row.flatten() for row in rows])


def gauss_newton(output: Tensor, loss: Tensor, parameter: Tensor, lossfunc: Any) -> Tensor:
    """``Jᵀ ∇²ℓ J`` with the Jacobian of all outputs of all samples. Shape ``[P, P]``."""
    flat = output.flatten()
    jacobian = torch.stack(
        [oracle.gradient(entry, parameter, torch.ones(())).flatten() for entry in flat]
    )
    of_loss = torch.autograd.functional.hessian(lossfunc, output.detach())
    return jacobian.T @ of_loss.reshape(len(flat), len(flat)) @ jacobian


BLOCKS = {"hmp": hessian, "ggnmp": gauss_newton}


def blocks(problem: Problem, field: str) -> list[Tensor]:
    """The block of each trained parameter, from an untouched copy of the model."""
    model, lossfunc = (unextend(copy.deepcopy(m)) for m in (problem.model, problem.lossfunc))
    state = rng_state()
    output = model(*problem.inputs)
    set_rng_state(state)

    def of_output(out: Tensor) -> Tensor:
        result: Tensor = lossfunc(out, problem.target)
        return result

    loss = of_output(output)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [BLOCKS[field](output, loss, p, of_output) for p in trained]


def compare(problem: Problem, field: str, expected: list[Tensor]) -> None:
    """Products with three vectors."""
    for p, block in zip(problem.parameters, expected, strict=True):
        vectors = torch.randn(3, *p.shape)
        products = (vectors.flatten(1) @ block).reshape(vectors.shape)
        oracle.assert_close(getattr(p, field)(vectors), products, problem.rtol)


def check(problem: Problem, field: str) -> None:
    """One pass, compared with autograd."""
    expected = blocks(problem, field)
    problem.run(PRODUCTS[field]())
    compare(problem, field, expected)


# Vectors of the shape of the parameter.


SHAPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        (2, 3),
    ),
    "square": (lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU(), nn.Linear(3, 3)), (3,)),
}


@pytest.mark.parametrize("field", PRODUCTS)
@pytest.mark.parametrize("net", SHAPED)
def test_one_vector(net: str, field: str) -> None:
    make, shape = SHAPED[net]
    problem = classification(make(), shape)
    problem.run(PRODUCTS[field]())
    for p in problem.parameters:
        vectors = torch.randn(2, *p.shape)
        product = getattr(p, field)(vectors[1])
        assert product.shape == p.shape
        oracle.assert_close(product, getattr(p, field)(vectors)[1])


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("net", ["tied", "twice", "own", "recurrent"])
def test_one_vector_where_parameters_are_shared_or_enter_nonlinearly(net: str) -> None:
    problem = classification(NETS[net](), (3,))
    expected = blocks(problem, "ggnmp")
    problem.run(GGNMP())
    for p, block in zip(problem.parameters, expected, strict=True):
        vector = torch.randn_like(p)
        product = (block @ vector.flatten()).reshape(p.shape)
        oracle.assert_close(p.ggnmp(vector), product)  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", PRODUCTS)
def test_vectors_of_another_shape(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(PRODUCTS[field]())
    weight, bias = problem.parameters[:2]
    for p, shape in ((weight, (4,)), (weight, (3, 4)), (weight, (1, 2, 4, 3)), (bias, (3,))):
        with pytest.raises(ShapeError):
            getattr(p, field)(torch.randn(shape))


@pytest.mark.parametrize("field", BLOCKS)
def test_conjugate_gradients(field: str) -> None:
    """As a user writes it down: all with tensors of the parameter's shape."""
    problem = classification(mlp(), (3,))
    expected = blocks(problem, field)
    problem.run(PRODUCTS[field]())
    for p, block in zip(problem.parameters, expected, strict=True):
        assert p.grad is not None
        multiply = getattr(p, field)
        damping = 1.0 + float(torch.linalg.eigvalsh(block).abs().max())
        x, residual = torch.zeros_like(p), p.grad.clone()
        direction = residual.clone()
        for _ in range(2 * p.numel()):
            product = multiply(direction) + damping * direction
            step = residual.square().sum() / (direction * product).sum()
            x, before = x + step * direction, residual
            residual = residual - step * product
            if residual.abs().max() < 1e-15:
                break
            direction = residual + residual.square().sum() / before.square().sum() * direction
        matrix = block + damping * torch.eye(p.numel())
        solution = torch.linalg.solve(matrix, p.grad.flatten()).reshape(p.shape)
        oracle.assert_close(x.detach(), solution, 1e-8)


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("field", BLOCKS)
@pytest.mark.parametrize("net", NETS)
def test_nets(net: str, field: str) -> None:
    check(classification(NETS[net](), (3,), 4), field)


@pytest.mark.parametrize("field", BLOCKS)
def test_normalised_images(field: str) -> None:
    check(classification(normalised_images(), (1, 4, 4), 3), field)


@pytest.mark.parametrize("field", BLOCKS)
@pytest.mark.parametrize("loss", ["squares", "binary", "sum"])
@pytest.mark.parametrize("net", ["normalised", "gated", "twice"])
def test_losses(net: str, loss: str, field: str) -> None:
    problem = classification(NETS[net](), (3,), 3, reduction="sum")
    if loss == "squares":
        problem.lossfunc, problem.target = nn.MSELoss(), torch.randn(3, 3)
    elif loss == "binary":
        problem.lossfunc, problem.target = nn.BCEWithLogitsLoss(), torch.rand(3, 3)
    check(problem, field)


@pytest.mark.parametrize("field", BLOCKS)
@pytest.mark.parametrize("net", ["gelu", "gated", "twice", "own"])
def test_one_sample(net: str, field: str) -> None:
    check(classification(NETS[net](), (3,), 1), field)


@pytest.mark.parametrize("net", ["gelu", "product", "branches", "twice", "own"])
def test_some_samples(net: str) -> None:
    problem = classification(NETS[net](), (3,), 4)
    ggn = [block[[3, 1]].sum(0) for block in problem.expected(oracle.ggn)]
    full = [block[[3, 1]].sum(0) for block in problem.expected(hessians)]
    problem.run(GGNMP(subsampling=[3, 1]), HMP(subsampling=[3, 1]))
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", full)


def test_both_at_once() -> None:
    problem = classification(normalised(), (3,), 4)
    expected = {field: blocks(problem, field) for field in BLOCKS}
    problem.run(GGNMP(), HMP())
    for field in BLOCKS:
        compare(problem, field, expected[field])


# Large features: nothing is formed whose size is their square.


LIMIT = 64 * 2**20


class Limit(TorchDispatchMode):
    """Raises where an operation makes a tensor of more than ``LIMIT`` bytes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation and looks at what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                size = leaf.untyped_storage().nbytes()
                assert size <= LIMIT, f"{func} made {list(leaf.shape)}, {size >> 20} MiB"
        return result


def _convolutions(channels: int, size: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (1, channels, channels):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size**2, classes))


@pytest.mark.parametrize("field", PRODUCTS)
def test_features_of_images(field: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, lossfunc = extend(_convolutions(4, 20, 10)), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(32, 1, 20, 20)), torch.randint(0, 10, (32,)))
    with Limit(), backpack(PRODUCTS[field]()):
        loss.backward()
    with Limit():
        for p in model.parameters():
            product = getattr(p, field)(torch.randn(1, *p.shape))
            assert product.shape == (1, *p.shape)
            assert torch.isfinite(product).all()


@pytest.mark.parametrize("field", BLOCKS)
def test_features_of_small_images(field: str) -> None:
    check(classification(_convolutions(2, 3, 3), (1, 3, 3), 2), field)
