"""Weights that are computed from other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from backpack_core import backpack, disable, extend
from backpack_core.errors import AutodiffFallbackWarning, UnsupportedError
from backpack_core.extensions import (
    BatchGrad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagHessian,
    GGNGram,
    SqrtGGNExact,
)
from backpack_core.plugins.registry import registry
from tests import oracle
from tests.cases import Net, classification


class Shift(nn.Module):
    """A module without a rule, with a table that it sums."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Add the sum."""
        return x + self.shift.sum(0)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("kind", ["parametrization", "weight_norm", "pruning"])
def test_what_computes_a_weight_after_extend(kind: str, is_removed: bool) -> None:
    """And may be gone by the time of the backward pass."""
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2))), extend(nn.MSELoss(reduction="sum"))
    if kind == "parametrization":
        parametrize.register_parametrization(model[0], "weight", Doubled())
    elif kind == "weight_norm":
        parametrizations.weight_norm(model[0])
    else:
        prune.random_unstructured(model[0], "weight", amount=0.5)
    leaves, x, y = [*model.parameters()], torch.randn(4, 3), torch.randn(4, 2)
    rows = [lossfunc(model(x[n : n + 1]), y[n : n + 1]) for n in range(4)]
    single = [torch.autograd.grad(row, leaves) for row in rows]
    loss = lossfunc(model(x), y)
    if is_removed and kind == "pruning":
        prune.remove(model[0], "weight")
    elif is_removed:
        parametrize.remove_parametrizations(model[0], "weight")
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for leaf, gradients in zip(leaves, zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(leaf)["grad_batch"], torch.stack(gradients))
        assert "diag_ggn_exact" in vars(leaf)


@pytest.mark.parametrize("kind", ["parametrization", "weight_norm", "pruning"])
def test_a_computed_weight_where_samples_lie_on_another_axis(kind: str) -> None:
    """The rule does not fit there, so the weight is read where the computation uses its leaves."""
    layer = nn.Linear(2, 2)
    if kind == "parametrization":
        parametrize.register_parametrization(layer, "weight", Doubled())
    elif kind == "weight_norm":
        parametrizations.weight_norm(layer)
    else:
        prune.random_unstructured(layer, "weight", amount=0.5)

    def forward(net: Net, x: Tensor) -> Tensor:
        steps = net.step(net.first(x).view(-1, 4, 2).transpose(0, 1)).tanh()  # [T, N, 2]
        return net.last(steps.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    model = extend(Net(forward, first=nn.Linear(3, 8), step=layer, last=nn.Linear(8, 3)))
    lossfunc, leaves = extend(nn.MSELoss(reduction="sum")), [*model.parameters()]
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    rows = [lossfunc(model(x[n : n + 1]), y[n : n + 1]) for n in range(5)]
    single = [torch.autograd.grad(row, leaves) for row in rows]
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    for leaf, gradients in zip(leaves, zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(leaf)["grad_batch"], torch.stack(gradients))


def test_a_module_inside_of_one_with_a_rule() -> None:
    """Nobody has seen its parameters: no quantity leaves them out in silence."""
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2))), extend(nn.MSELoss())
    model[0].inner = nn.Linear(2, 2)  # type: ignore[assignment]
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    with pytest.raises(UnsupportedError, match="does not know"), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weight(parametrize: Any) -> None:
    classification(nn.Sequential(nn.Linear(3, 3), parametrize(nn.Linear(3, 3))), (3,)).check()


@pytest.mark.parametrize("tied", [False, True])
def test_parametrized_weight_and_what_is_computed_after_the_pass(tied: bool) -> None:
    """The graph of the parametrization is gone by then."""
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh(), layer if tied else nn.Linear(3, 3))
    problem = classification(model, (3,))
    problem.run(BatchGrad(), ClippedSumGrad(0.1), GGNGram(), SqrtGGNExact())
    gradients = problem.fields("grad_batch")
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    weights = (0.1 / norms).clamp(max=1)
    assert (weights < 1).any()
    problem.compare("grad_clipped", [torch.einsum("n,n...->...", weights, g) for g in gradients])
    roots = [root.flatten(2) for root in problem.fields("sqrt_ggn_exact")]
    gram = sum(torch.einsum("vnp,wmp->vnwm", root, root) for root in roots)
    found = problem.parameters[0].ggn_gram.spectrum  # type: ignore[attr-defined]
    values = found.eigenvalues.sort().values
    flat = torch.as_tensor(gram).flatten(2).flatten(0, 1)
    expected = torch.linalg.eigvalsh(flat.reshape(len(flat), -1))
    oracle.assert_close(values, expected[-len(values) :], 1e-8)


def test_parametrized_weight_of_another_kind_of_quantity() -> None:
    model = nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 3)))
    message = r"'weight' of Linear '1' is computed from others by.*remove the parametrization"
    with pytest.raises(UnsupportedError, match=message):
        classification(model, (3,)).run(DiagHessian())


@pytest.mark.parametrize("name", ["", "parametrizations.weight", "parametrizations.weight.0"])
def test_a_hook_that_changes_what_a_parametrization_computes(name: str) -> None:
    """It may come between passes of a trusted structure."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model, lossfunc = extend(nn.Sequential(layer, nn.Tanh())), extend(nn.MSELoss())
    for number in range(6):
        if number == 3:
            layer.get_submodule(name).register_forward_hook(lambda part, given, out: 1.3 * out)
        model.zero_grad()
        loss = lossfunc(model(torch.randn(5, 4)), torch.randn(5, 3))
        with backpack(BatchGrad()):
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            oracle.assert_close(parameter.grad_batch.sum(0), parameter.grad)


def test_parametrized_module_without_a_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(Shift(), "shift"))
    with pytest.warns(AutodiffFallbackWarning, match="Shift '1'"):
        classification(model, (3,)).check()


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_weight_norm_by_hooks_of_a_module_without_a_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Shift())
    same = copy.deepcopy(model)
    parametrizations.weight_norm(same[1], "shift")
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1], "shift")
    x, found = torch.randn(4, 3), []
    for net in map(extend, (same, model)):
        with backpack(BatchGrad()):
            net(x).sum().backward()
        found.append([p.grad_batch for p in net.parameters()])
    for ours, reference in zip(*found, strict=True):
        oracle.assert_close(ours, reference)


def test_parametrized_weight_that_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 3)))
    for name, p in model[1].named_parameters():
        p.requires_grad_(name == "bias")
    classification(model, (3,)).check()


def test_weight_norm_by_hooks() -> None:
    """The weight is a function of two parameters, computed in a pre-hook."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    problem = classification(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer, nn.Linear(3, 3)), (3,)
    )

    # torch cannot copy such a module, so the oracle works on the original.
    def forward(x: Tensor) -> Tensor:
        with disable():
            output: Tensor = problem.model(x)
        return output

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, problem.target)

    arguments = (forward, loss, problem.inputs, problem.parameters)
    gradients = oracle.individual_gradients(*arguments)
    diagonals = [d.sum(0) for d in oracle.ggn_diagonals(*arguments)]
    problem.run(BatchGrad(), DiagGGNExact())
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)
    assert [n for n, p in layer.named_parameters() if hasattr(p, "grad_batch")] == [
        "bias",
        "weight_g",
        "weight_v",
    ]


class Counted(nn.Module):
    """Counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return 2 * weight


def test_extending_computes_no_parameter() -> None:
    """Also not when a rule is looked up for the first time: it may draw, or take a step."""
    layer, counted = nn.Linear(3, 2), Counted()
    parametrize.register_parametrization(layer, "weight", counted)
    counted.count = 0
    registry.forget()
    extend(layer)
    assert not counted.count
