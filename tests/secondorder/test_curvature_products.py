"""Products with the blocks of the generalised Gauss-Newton matrix and of two Hessians."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, disable, extend, quantities
from backpack_core.errors import (
    BridgeError,
    NotExtendedError,
    OverwrittenInputError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import (
    GGNMP,
    HMP,
    JMP,
    PCHMP,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    DiagHMP,
)
from backpack_secondorder.torch_errors import explained
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.leftovers import live_calls
from tests.secondorder.problems import CHAINS, NETS, SETTINGS, chain_curvature, hessians, make


def compare(problem: Problem, field: str, blocks: list[Tensor]) -> None:
    """Products with three vectors, after the graph and its inputs are gone."""
    for p, block in zip(problem.parameters, blocks, strict=True):
        vectors = torch.randn(3, *p.shape)
        expected = (vectors.flatten(1) @ block).reshape(vectors.shape)
        oracle.assert_close(getattr(p, field)(vectors), expected)


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS[1:])
@pytest.mark.parametrize("net", NETS)
def test_exact(net: str, batch: int, reduction: str, loss: str) -> None:
    problem = make(net, batch, reduction, loss)
    ggn = [b.sum(0) for b in problem.expected(oracle.ggn)]
    hessian = [b.sum(0) for b in problem.expected(hessians)]
    problem.run(GGNMP(), HMP())
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", hessian)
    compare(problem, "hmp", hessian)  # and again


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("net", CHAINS)
def test_positive_curvature(net: str, loss: str, modify: Any) -> None:
    problem = make(net, 2, "mean", loss)
    modules = [m if not getattr(m, "inplace", False) else nn.ReLU() for m in problem.model]  # type: ignore[attr-defined]

    def modified(residual: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(residual)
        values = values.clamp(min=0) if modify == "clip" else values.abs()
        return vectors @ torch.diag(values) @ vectors.T

    with disable():
        blocks = chain_curvature(
            modules, lambda out: problem.lossfunc(out, problem.target), problem.inputs[0], modified
        )
    problem.run(PCHMP(modify=modify))
    compare(problem, "pchmp", blocks)


def test_positive_curvature_is_positive() -> None:
    problem = make("normalised", 3)
    problem.run(PCHMP("clip_it", "clip"), PCHMP(savefield="abs_it", modify="abs"))
    for p in problem.parameters:
        eye = torch.eye(p.numel()).reshape(-1, *p.shape)
        for field in ("clip_it", "abs_it"):
            values = torch.linalg.eigvalsh(getattr(p, field)(eye).flatten(1))
            assert values.min() > -1e-12 * values.max()


def test_subsampling() -> None:
    problem = make("convolutions", 4)
    ggn = [b[[3, 1]].sum(0) for b in problem.expected(oracle.ggn)]
    hessian = [b[[3, 1]].sum(0) for b in problem.expected(hessians)]
    problem.run(GGNMP(subsampling=[3, 1]), HMP(subsampling=[3, 1]))
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", hessian)


def test_shared_parameter() -> None:
    """In a row: the loss is no function of the sum over uses, and exact all the same."""
    layer = nn.Linear(3, 3)
    problem = classification(Net(lambda net, x: net.a(net.t(net.a(x))), a=layer, t=nn.Tanh()), (3,))
    ggn = [b.sum(0) for b in problem.expected(oracle.ggn)]
    hessian = [b.sum(0) for b in problem.expected(hessians)]
    problem.run(GGNMP(), HMP())
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", hessian)


def test_modules_without_a_rule() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * self.factor)

    problem = classification(nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 3)), (3,))
    ggn = [b.sum(0) for b in problem.expected(oracle.ggn)]
    hessian = [b.sum(0) for b in problem.expected(hessians)]
    problem.run(GGNMP(), HMP())
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", hessian)


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("layers", [1, 2])
def test_modules_whose_rule_refuses_how_they_were_called(layers: int) -> None:
    """Steps first, and dropout between layers: autograd knows what was dropped."""
    model = Net(
        lambda net, x: net.head(net.inner(x)[0][-1]),
        inner=nn.GRU(2, 2, layers, dropout=0.5 * (layers - 1)),
        head=nn.Linear(2, 3),
    )
    lossfunc, x = extend(nn.MSELoss()), torch.randn(4, 3, 2)
    loss = lossfunc(extend(model)(x), torch.zeros(3, 3))
    weight = model.inner.weight_hh_l0
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    vector = torch.randn_like(weight)
    (expected,) = torch.autograd.grad(gradient, weight, vector, retain_graph=True)
    refused = pytest.raises(UnsupportedError, match="batch_first=False")
    with refused, backpack(PCHMP()):
        loss.backward(retain_graph=True)
    with backpack(GGNMP(), HMP()):
        loss.backward()
    oracle.assert_close(weight.hmp(vector), expected)


def test_nonlinear_operation_between_modules() -> None:
    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    net = Net(lambda net, x: net.b(torch.sigmoid(net.a(x) / 2)), **parts)
    with pytest.raises(BridgeError, match="operation 'Sigmoid'") as error:
        classification(net, (3,)).run(PCHMP())
    where = error.value.backpack_context  # type: ignore[attr-defined]
    assert where == "[PCHMP of backpack-plugin-secondorder 0.1.0, after Linear 'a']"


class Modes(nn.Module):
    """Complex numbers, trained as pairs of real ones, as in state-space models."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.view_as_complex(self.pairs).abs()


@pytest.mark.parametrize("field", ["hmp", "ggnmp", "jmp"])
@pytest.mark.parametrize("place", ["odd place", "other order"])
def test_vectors_of_pairs_that_become_complex(place: str, field: str) -> None:
    """Torch takes pairs only if they lie one behind the other, from an even place on."""
    model, lossfunc = extend(Modes()), extend(nn.MSELoss())
    with backpack(HMP(), GGNMP(), JMP()):
        lossfunc(model(torch.randn(4, 3)), torch.randn(4, 3)).backward()
    vector = torch.randn(7)[1:].view(3, 2) if place == "odd place" else torch.randn(2, 3).T
    multiply = getattr(model.pairs, field)
    oracle.assert_close(multiply(vector), multiply(vector.clone().contiguous()))


def test_loss_that_is_not_extended() -> None:
    problem = make("mlp")
    extend(problem.model)
    loss = F.cross_entropy(problem.model(*problem.inputs), problem.target)
    with (
        pytest.raises(NotExtendedError, match="GGNMP starts at an extended loss") as error,
        backpack(GGNMP()),
    ):
        loss.backward()
    assert error.value.backpack_context == "[GGNMP of backpack-plugin-secondorder 0.1.0]"  # type: ignore[attr-defined]


def two_outputs(loss: nn.Module, outputs: Tensor) -> Tensor:
    """A loss of two outputs of a model, both with gradients."""
    first, second = outputs.chunk(2, 1)
    if isinstance(loss, nn.GaussianNLLLoss):
        return loss(first, torch.ones_like(first), F.softplus(second))
    return loss(first, second)


@pytest.mark.parametrize("loss", [nn.GaussianNLLLoss(), nn.MSELoss(), nn.HuberLoss()])
def test_the_hessian_of_a_loss_with_two_outputs(loss: nn.Module) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4)))
    x, direction = torch.randn(5, 3), torch.randn(4, 3)
    weight, bias = model[0].weight, model[0].bias
    hessian = torch.autograd.functional.hessian(
        lambda value: two_outputs(loss, F.linear(x, value, bias)), weight.detach()
    ).reshape(12, 12)
    lossfunc = extend(copy.deepcopy(loss))
    with backpack(HMP(), DiagHMP()):
        two_outputs(lossfunc, model(x)).backward()
    oracle.assert_close(
        quantities(model)["0.weight"].hmp(direction).flatten(), hessian @ direction.flatten()
    )
    oracle.assert_close(quantities(model)["0.weight"].diag_hmp.flatten(), hessian.diagonal())
    total = two_outputs(lossfunc, model(x))
    refused = pytest.raises(UnsupportedError, match="requires a gradient")
    with refused, backpack(HMP(subsampling=[0])):
        total.backward()


def test_next_to_other_extensions() -> None:
    problem = make("mlp")
    blocks = [b.sum(0) for b in problem.expected(hessians)]
    problem.run(HMP(), DiagHessian(), BatchGrad(), GGNMP(), DiagGGNExact())
    compare(problem, "hmp", blocks)
    for p, block in zip(problem.parameters, blocks, strict=True):
        oracle.assert_close(p.diag_h.flatten(), block.diagonal())


def test_functions_hold_the_graph_until_they_are_dropped() -> None:
    gc.collect()
    before = live_calls()
    problem = make("convolutions")
    loss = problem.run(GGNMP(), HMP())
    del loss
    assert live_calls() > before
    problem.model.zero_grad()
    for p in problem.parameters:
        del p.ggnmp, p.hmp  # type: ignore[attr-defined]
    assert live_calls() == before


def test_after_a_step() -> None:
    """The graph has the parameters of its forward pass: never products at a mixture of two."""
    problem = make("normalised", 2)
    problem.run(GGNMP(), HMP(), PCHMP())
    with torch.no_grad():
        for p in problem.parameters:
            p += 1
    first = problem.parameters[0]
    for field in ("ggnmp", "hmp", "pchmp"):
        with pytest.raises(OverwrittenInputError, match="changed since the backward pass"):
            getattr(first, field)(torch.randn(2, *first.shape))


@pytest.mark.parametrize("passes", [1, 6])
@pytest.mark.parametrize("changed", ["output", "target"])
def test_after_what_a_loss_received_was_overwritten(changed: str, passes: int) -> None:
    """Its Hessian is computed at each product, so it must not be that of the next batch."""
    model = extend(nn.Linear(3, 2))
    lossfunc = extend(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0])))
    for _ in range(passes):  # later passes follow a plan
        given = {"output": model(torch.randn(4, 3)), "target": torch.rand(4, 2)}
        with backpack(GGNMP(), PCHMP()):
            lossfunc(given["output"], given["target"]).backward()
    with torch.no_grad():
        given[changed].mul_(2)
    for field in ("ggnmp", "pchmp"):
        with pytest.raises(OverwrittenInputError, match="input or target was changed in place"):
            getattr(model.weight, field)(torch.randn(2, 3))


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (2, 5, 4, 1)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    problem = make("mlp")
    problem.run(GGNMP())
    expected = r"Expected a vector of shape \[5, 4\], or several as \[V, 5, 4\]"
    with pytest.raises(ShapeError, match=expected):
        problem.parameters[0].ggnmp(torch.randn(shape))  # type: ignore[attr-defined]


def test_what_is_no_tensor() -> None:
    problem = make("mlp")
    problem.run(HMP())
    with pytest.raises(UsageError, match=r"can only multiply tensors. Got \[1\]"):
        problem.parameters[0].hmp([1])  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:backward hook:UserWarning")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_graph_is_neither_copied_nor_pickled(duplicate: Any) -> None:
    """Nor with the model; its state can be saved."""
    problem = make("mlp")
    problem.run(HMP())
    weight: Any = problem.parameters[0]
    with pytest.raises(UsageError, match=r"del parameter.hmp"):
        duplicate(weight.hmp)
    if duplicate is pickle.dumps:
        with pytest.raises(UsageError, match=r"model.state_dict\(\)"):
            pickle.dumps(problem.model)
    torch.save(problem.model.state_dict(), io.BytesIO())


def test_arguments() -> None:
    with pytest.raises(UsageError, match="'clip', 'abs'"):
        PCHMP(modify="square")  # type: ignore[arg-type]
    assert PCHMP(modify="abs").modify == "abs"
    assert [GGNMP("a").savefield, HMP("b").savefield, PCHMP("c").savefield] == ["a", "b", "c"]


@pytest.mark.usefixtures("without_cudnn")
def test_parameters_that_enter_nonlinearly() -> None:
    parts = {"rnn": nn.RNN(2, 3, batch_first=True), "last": nn.Linear(3, 3)}
    problem = classification(Net(lambda net, x: net.last(net.rnn(x)[0][:, -1]), **parts), (2, 2))
    ggn = [b.sum(0) for b in problem.expected(oracle.ggn)]
    hessian = [b.sum(0) for b in problem.expected(hessians)]
    problem.run(GGNMP(), HMP())
    compare(problem, "ggnmp", ggn)
    compare(problem, "hmp", hessian)


@pytest.mark.parametrize("extension", [GGNMP, HMP, PCHMP])
def test_parameters_that_were_frozen_since(extension: Any) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,))
    problem.run(extension())
    weight = problem.parameters[0]
    expected = getattr(weight, extension.savefield)(torch.ones_like(weight))
    problem.run(extension())
    weight.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen after the backward pass"):
        getattr(weight, extension.savefield)(torch.ones_like(weight))
    weight.requires_grad_(True)
    oracle.assert_close(getattr(weight, extension.savefield)(torch.ones_like(weight)), expected)


@pytest.mark.parametrize("extension", [HMP, GGNMP, PCHMP])
def test_a_parameter_that_was_thawed_after_the_forward_pass(extension: Any) -> None:
    """It is a constant in the graph, and has none, as it has no gradient."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net[0].weight.requires_grad_(False)
    problem = classification(net, (3,), classes=2)
    loss = extend(problem.lossfunc)(extend(problem.model)(*problem.inputs), problem.target)
    net[0].weight.requires_grad_(True)
    with backpack(extension()):
        loss.backward()
    vector = torch.ones(1, 3, 3)
    assert not hasattr(net[0].weight, extension.savefield)
    assert net[0].weight.grad is None
    assert getattr(net[0].bias, extension.savefield)(vector[:, 0]).any()


def test_recurrent_layers_of_cudnn_are_named() -> None:
    text = "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not"
    with pytest.raises(UnsupportedError, match="cuDNN's recurrent layers"), explained():
        raise NotImplementedError(f"{text} supported for CuDNN RNNs")
