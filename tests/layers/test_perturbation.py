"""Quantities of what modules receive and return, against autograd with an explicit zero added."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import (
    GGNMP,
    HMP,
    KFLR,
    NTK,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    DiagHMP,
    Jacobians,
    SqrtGGNExact,
    SumGradSquared,
)
from backpack_layers.perturbation import Perturbations, perturb
from tests.cases import Net
from tests.oracle import assert_close

Problem = tuple[nn.Module, Tensor, dict[str, int]]  # model, input, calls by path


def mlp() -> Problem:
    model = nn.Sequential(
        nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)
    )
    return model, torch.randn(5, 4), {"": 1, "2": 1, "3": 1}


def cnn() -> Problem:
    layers = [nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3)]
    return nn.Sequential(*layers), torch.randn(3, 1, 3, 3), {"": 1, "2": 1}


def attention() -> Problem:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    forward = lambda net, x: net.head(net.layer(net.embed(x)).mean(1))  # noqa: E731
    net = Net(forward, embed=nn.Linear(2, 4), layer=layer, head=nn.Linear(4, 3))
    return net, torch.randn(2, 3, 2), {"": 1, "layer": 1, "layer.self_attn": 1, "head": 1}


def twice() -> Problem:
    """A module that is called twice, once by a keyword, beside a residual connection."""
    forward = lambda net, x: net.last(x + net.cell(torch.tanh(net.cell(input=x))))  # noqa: E731
    return (
        Net(forward, cell=nn.Linear(3, 3), last=nn.Linear(3, 3)),
        torch.randn(4, 3),
        {"cell": 2, "last": 1},
    )


PROBLEMS: list[Callable[[], Problem]] = [mlp, cnn, attention, twice]


@contextmanager
def added(model: nn.Module, path: str, at: str, deltas: list[Tensor]) -> Iterator[None]:
    """Add given tensors to what a module receives or returns, one at each call."""
    rest = iter(deltas)
    module = model.get_submodule(path)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = [*args, *kwargs.values()][0]
        with_delta = x + next(rest)
        keywords = {name: with_delta if t is x else t for name, t in kwargs.items()}
        return tuple([with_delta if t is x else t for t in args]), keywords

    def behind(module: nn.Module, args: Any, result: Any) -> Any:
        is_first = isinstance(result, tuple)
        return (result[0] + next(rest), *result[1:]) if is_first else result + next(rest)

    if at == "input":
        hook = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = module.register_forward_hook(behind)
    yield
    hook.remove()


class Oracle:
    """Derivatives in the explicit tensor of one call, ``[N, *]``, flattened to ``[N, D]``."""

    def __init__(self, model: nn.Module, x: Tensor, loss: Any, path: str, at: str, call: int):
        shapes: list[torch.Size] = []

        def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            given = [*args, *kwargs.values()][0] if at == "input" else result
            shapes.append((given[0] if isinstance(given, tuple) else given).shape)

        hook = model.get_submodule(path).register_forward_hook(note, with_kwargs=True)
        model(x)
        hook.remove()
        deltas = [torch.zeros(shape, dtype=x.dtype, requires_grad=True) for shape in shapes]
        self.delta = deltas[call]
        # Torch differentiates the plain formula of attention twice only.
        with added(model, path, at, deltas), sdpa_kernel(SDPBackend.MATH):
            output = model(x)
        size = self.delta.numel()
        value = loss(output)
        (gradient,) = torch.autograd.grad(value, self.delta, create_graph=True)
        self.gradient = gradient.detach()
        rows = [self.row(entry) for entry in gradient.flatten()]
        self.hessian = torch.stack(rows).reshape(size, size)
        self.jacobian = torch.stack([self.row(y) for y in output.flatten()])
        leaf = output.detach().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        second = [torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in first.flatten()]
        outer = torch.stack(second).reshape(output.numel(), output.numel())
        self.ggn = self.jacobian.T @ outer @ self.jacobian

    def row(self, entry: Tensor) -> Tensor:
        if not entry.requires_grad:
            return torch.zeros(self.delta.numel(), dtype=self.delta.dtype)
        found = torch.autograd.grad(entry, [self.delta], retain_graph=True, materialize_grads=True)
        return found[0].flatten()

    def diagonal(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal().reshape(self.delta.shape)

    def shared(self, matrix: Tensor) -> Tensor:
        """The block of one perturbation for all samples, ``[D, D]``."""
        n = len(self.delta)
        return matrix.reshape(n, self.delta.numel() // n, n, -1).sum((0, 2))


def losses(reduction: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Extended, and as a function."""
    y = torch.tensor([0, 2, 1, 1, 0])
    loss: Any = extend(nn.CrossEntropyLoss(reduction=reduction))
    return loss, lambda z: F.cross_entropy(z, y[: len(z)], reduction=reduction)


def perturbed(
    problem: Callable[[], Problem], at: str, reduction: str, *extensions: Any, **options: Any
) -> Iterator[tuple[Any, Oracle]]:
    """Every perturbation with results, and what autograd says of it."""
    torch.manual_seed(0)
    model, x, calls = problem()
    plain, model, x = copy.deepcopy(model).double(), extend(model.double()), x.double()
    module, function = losses(reduction)
    target = torch.tensor([0, 2, 1, 1, 0])[: len(x)]
    with perturb(model, *calls, at=at, alone=True, **options) as received:  # type: ignore[arg-type]
        loss = module(model(x), target)
    with backpack(*extensions):
        loss.backward()
    for path, count in calls.items():
        assert len(received.calls(path)) == count
        for number, value in enumerate(received.calls(path)):
            yield value, Oracle(plain, x, function, path, at, number)


@pytest.mark.parametrize(("at", "reduction"), [("input", "mean"), ("output", "sum")])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_shared(problem: Any, at: str, reduction: str) -> None:
    # Attention is nonlinear in three inputs at once, which diagonals by rules refuse.
    second = [DiagHMP()] if problem is attention else [DiagHessian(), BatchDiagHessian()]
    extensions = (
        *second, DiagGGNExact(), BatchDiagGGNExact(chunk_size=1), BatchGrad(), Jacobians(),
        SqrtGGNExact(), KFLR(fail_mode="block"), HMP(), GGNMP(),
    )  # fmt: skip
    for value, it in perturbed(problem, at, reduction, *extensions):
        ggn, hessian = it.diagonal(it.ggn), it.diagonal(it.hessian)
        assert value.shape == it.delta.shape[1:]
        assert_close(value.diag_ggn_exact, ggn.sum(0))
        assert_close(value.diag_ggn_exact_batch, ggn)
        if problem is attention:
            assert_close(value.diag_hmp, it.shared(it.hessian).diagonal().reshape(value.shape))
        else:
            assert_close(value.diag_h, hessian.sum(0))
            assert_close(value.diag_h_batch, hessian)
        assert_close(value.grad_batch, it.gradient)
        block = it.shared(it.ggn)
        root = value.sqrt_ggn_exact.flatten(0, 1).flatten(1)
        assert_close(root.T @ root, block)
        assert_close(value.kflr[0], block)
        vectors = torch.randn(2, *value.shape, dtype=torch.float64)
        for product, matrix in ((value.hmp, it.shared(it.hessian)), (value.ggnmp, block)):
            assert_close(product(vectors).flatten(1), vectors.flatten(1) @ matrix)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_each(problem: Any) -> None:
    second = DiagHMP() if problem is attention else DiagHessian()
    extensions = second, DiagGGNExact(), HMP(), GGNMP(), SumGradSquared()
    for value, it in perturbed(problem, "input", "mean", *extensions, each=True):
        assert_close(value.diag_ggn_exact, it.diagonal(it.ggn))
        found = value.diag_hmp if problem is attention else value.diag_h
        assert_close(found, it.diagonal(it.hessian))
        assert_close(value.sum_grad_squared, it.gradient.square())
        vectors = torch.randn(2, *value.shape, dtype=torch.float64)
        for product, matrix in ((value.hmp, it.hessian), (value.ggnmp, it.ggn)):
            assert_close(product(vectors).flatten(1), vectors.flatten(1) @ matrix)


def test_sampled_diagonals_agree_in_expectation() -> None:
    for value, it in perturbed(mlp, "input", "mean", DiagGGNMC(mc_samples=20000)):
        assert_close(value.diag_ggn_mc, it.diagonal(it.ggn).sum(0), rtol=0.05)


def turned() -> Problem:
    """Samples lie on axis 1 inside."""
    forward = lambda net, x: net.head(net.cell(x.transpose(0, 1)).tanh().mean(0))  # noqa: E731
    net = Net(forward, cell=nn.Linear(4, 3), head=nn.Linear(3, 3))
    return net, torch.randn(5, 2, 4), {"cell": 1}


def merged() -> Problem:
    """Positions lie on axis 0 with the samples."""
    forward = lambda net, x: net.head(net.cell(x.flatten(0, 1)).tanh().view(5, 2, 3).mean(1))  # noqa: E731
    net = Net(forward, cell=nn.Linear(4, 3), head=nn.Linear(3, 3))
    return net, torch.randn(5, 2, 4), {"cell": 1}


@pytest.mark.parametrize("problem", [turned, merged])
def test_samples_elsewhere(problem: Any) -> None:
    for value, it in perturbed(problem, "input", "mean", DiagGGNExact(), GGNMP(), each=True):
        assert_close(value.diag_ggn_exact, it.diagonal(it.ggn))
        vectors = torch.randn(1, *value.shape, dtype=torch.float64)
        assert_close(value.ggnmp(vectors).flatten(1), vectors.flatten(1) @ it.ggn)
    for extension in (DiagGGNExact(), BatchGrad()):
        with pytest.raises(UnsupportedError, match=r"at Perturbation 'cell'"):
            list(perturbed(problem, "input", "mean", extension))


def test_some_samples_in_each() -> None:
    extension = DiagGGNExact(subsampling=[3, 1])
    for value, it in perturbed(mlp, "input", "sum", extension, each=True):
        mask = torch.tensor([0, 1, 0, 1, 0], dtype=torch.float64).unsqueeze(1)
        assert_close(value.diag_ggn_exact, it.diagonal(it.ggn) * mask)


def test_outputs_and_gradients_stay() -> None:
    torch.manual_seed(0)
    model = extend(mlp()[0])
    loss, _ = losses("mean")
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    plain = model(x)
    loss(plain, y).backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    names = [*model.state_dict()]
    model.zero_grad()
    with perturb(model, "0", "3") as received:
        assert torch.equal(model(x), plain)
        loss(model(x), y).backward()
        first = received["0"]
        model(x)
        assert received["0"] is first  # also in the next pass, with all that lies on it
    assert [*model.state_dict()] == names
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]
    assert torch.equal(model(x), plain)
    assert not any(m._forward_pre_hooks and len(m._forward_pre_hooks) > 1 for m in model.modules())


def test_frozen_parameters_are_trained_again() -> None:
    model, x, _ = mlp()
    model = extend(model)
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    before = [p.requires_grad for p in model.parameters()]
    with perturb(model, "", alone=True) as received:
        value = extend(nn.MSELoss())(model(x), torch.zeros(5, 3))
    assert [p.requires_grad for p in model.parameters()] == before
    with backpack(BatchGrad(), Jacobians(), NTK()):
        value.backward()
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())
    jacobian = received[""].jacobians.flatten(2)
    assert_close(received[""].ntk, torch.einsum("ncp,mdp->ncmd", jacobian, jacobian), 1e-5)


def tokens(net: Any, x: Tensor) -> Any:
    return net.head(net.embed(x).mean(1))


def recomputed(net: Any, x: Tensor) -> Any:
    return net.head(checkpoint(net.cell, net.head(x), use_reentrant=True))


class TestRefusals:
    def test_tokens(self) -> None:
        net = extend(Net(tokens, embed=nn.Embedding(5, 3), head=nn.Linear(3, 2)))
        with perturb(net, "embed"), pytest.raises(UnsupportedError, match="behind the embedding"):
            net(torch.tensor([[1, 2]]))

    def test_checkpoints(self) -> None:
        net = extend(Net(recomputed, cell=nn.Linear(2, 2), head=nn.Linear(2, 2)))
        with perturb(net, "cell"):
            value = net(torch.randn(3, 2)).sum()
            with pytest.raises(UnsupportedError, match="name a module outside the checkpoint"):
                value.backward()

    def test_names(self) -> None:
        net = extend(nn.Sequential(nn.Linear(2, 2)))
        for given, message in (
            ((net, "1"), "no module at '1'"),
            ((net,), "takes paths"),
            ((net, ["0"]), "takes paths"),
            ((net, net[0]), "takes paths"),  # type: ignore[index]
            ((nn.Linear(2, 2), ""), "extended model"),
        ):
            with pytest.raises(UsageError, match=message), perturb(*given):
                pass
        with pytest.raises(UsageError, match='at="output"'), perturb(net, "0", at="outputs"):  # type: ignore[arg-type]
            pass

    def test_what_did_not_run_or_ran_twice(self) -> None:
        model, x, _ = twice()
        received: Mapping[str, Any]
        with perturb(extend(model), "cell", "last") as received:
            pass
        assert isinstance(received, Perturbations)
        with pytest.raises(UsageError, match="'last' did not run"):
            received["last"]
        with perturb(model, "cell") as received:
            model(x)
        with pytest.raises(UsageError, match="ran 2 times"):
            received["cell"]
        with pytest.raises(UsageError, match="was not given 'cel'"):
            received["cel"]

    def test_parts_called_alone(self) -> None:
        net = extend(nn.Sequential(nn.Linear(2, 2)))
        with perturb(net, "0"), pytest.raises(UnsupportedError, match="the part that you call"):
            net[0](torch.randn(1, 2))


def test_arguments_by_place_and_name() -> None:
    torch.manual_seed(0)
    net = extend(nn.MultiheadAttention(4, 2, batch_first=True)).double()
    q, k = torch.randn(2, 3, 4).double(), torch.randn(2, 5, 4).double()
    for argument, shape in ((0, (3, 4)), (1, (5, 4)), ("value", (5, 4))):
        with perturb(net, "", argument=argument) as received:
            net(q, k, value=k)
        assert received[""].shape == shape
    with perturb(net, "", argument="mask"), pytest.raises(UnsupportedError, match=r"'mask'\. It"):
        net(q, k, value=k)
