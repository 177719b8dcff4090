"""Activations that are computed again in the backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend, is_extended
from backpack_core.errors import BackpackWarning, BridgeError, SampleMixingError, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact, DiagHessian
from backpack_core.record.models import still_running
from tests import oracle
from tests.cases import Net, Problem, classification


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), block, nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        # What is expected is computed by grad(), which re-entrant ones refuse.
        reentrant = self.reentrant and is_extended(self.block)
        h = checkpoint(self.block, self.first(x), use_reentrant=reentrant)
        result: Tensor = self.last(h)
        return result


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(inplace=True))


def test_checkpoint() -> None:
    classification(Checkpointed(block(), reentrant=False), (3,)).check()


def test_max_pooling_inside_checkpoint() -> None:
    """Its rule reads what autograd saved, where that can be read twice."""
    pool = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(2, 4)
    )
    classification(Checkpointed(pool, reentrant=False), (3,)).check()


def test_function_inside_checkpoint() -> None:
    """Such a checkpoint gives each saved tensor once, and autograd itself wants it."""
    classification(Checkpointed(Net(lambda _, x: torch.sin(x)), reentrant=False), (3,)).check()


def test_reentrant_checkpoint() -> None:
    """In an extended model, its graph is a part of the model's."""
    classification(Checkpointed(block(), reentrant=True), (3,)).check()


def test_derivative_inside_checkpoint() -> None:
    """The pass that computes it runs once more where the checkpoint computes again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        def slope(x: Tensor) -> Tensor:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                return torch.autograd.grad(net.energy(at).sum(), at, create_graph=True)[0]

        result: Tensor = checkpoint(slope, x, use_reentrant=False)
        return result

    energy = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    classification(Net(forward, energy=energy), (2,), classes=2).check()


MIXING = {
    "mean of the batch": lambda h: h - h.mean(0, keepdim=True).square(),
    "next sample": lambda h: h.cumsum(0),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian])
@pytest.mark.parametrize("way", MIXING)
def test_samples_that_mix_inside(way: str, extension: Any, reentrant: bool) -> None:
    """As many steps as samples: no length tells."""

    def forward(net: Any, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            result: Tensor = net.inner(MIXING[way](net.first(h)))
            return result

        result: Tensor = net.last(checkpoint(part, x, use_reentrant=reentrant)[:, 0])
        return result

    parts = {name: nn.Linear(3, 3) for name in ("first", "inner", "last")}
    problem = classification(Net(forward, **parts), (3, 3))
    problem.inputs[0].requires_grad_(reentrant)
    with pytest.raises(SampleMixingError):
        problem.run(extension())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", [3, 4])
def test_axes_that_are_swapped_inside(steps: int, reentrant: bool) -> None:
    """The inner layer has the samples on axis 1, and the loss receives its first step."""
    parts = {name: nn.Linear(4, 4) for name in ("first", "inner")}
    inner = Net(lambda net, h: net.inner(net.first(h).transpose(0, 1)), **parts)
    net = Checkpointed(inner, reentrant)
    x, y = torch.randn(3, steps, 3), torch.randint(3, (3,))
    losses = nn.functional.cross_entropy(net(x)[0], y, reduction="none")
    expected = [torch.autograd.grad(of, [*net.parameters()], retain_graph=True) for of in losses]
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchGrad()):
        lossfunc(extend(net)(x)[0], y).backward()
    for parameter, *gradients in zip(net.parameters(), *expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(gradients))


PICKS = {"in order": [0, 2, 5, 7, 8, 11], "in no order": [7, 0, 5, 2, 11, 8]}


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_that_are_picked_inside(reentrant: bool) -> None:
    """The index is not read there: in order is right, and another order is seen in each pass."""
    head = nn.Linear(4, 4)
    head.register_buffer("index", torch.tensor(PICKS["in order"]))
    inner = Net(lambda net, h: net.head(h.flatten(0, 1)[net.head.index]), head=head)
    net, lossfunc = Checkpointed(inner, reentrant), extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(3, 4, 3), torch.randint(3, (6,))
    losses = nn.functional.cross_entropy(net(x), y, reduction="none").view(3, 2).sum(1)
    expected = [torch.autograd.grad(of, [*net.parameters()], retain_graph=True) for of in losses]
    extend(net)
    for number in range(1, 12):
        order = "in order" if number % 3 else "in no order"
        head.index.copy_(torch.tensor(PICKS[order]))
        refused = pytest.raises(SampleMixingError, match="picked inside of a checkpoint")
        with nullcontext() if order == "in order" else refused, backpack(BatchGrad()):
            lossfunc(net(x), y).backward()
        for parameter, *gradients in zip(net.parameters(), *expected, strict=True):
            if order == "in order":
                torch.testing.assert_close(parameter.grad_batch, torch.stack(gradients))


@pytest.mark.parametrize("reentrant", [False, True])
def test_shared_layer(reentrant: bool) -> None:
    """One of its uses lies inside."""
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant)
    model.last = nn.Sequential(model.block[0], nn.Linear(4, 3))
    classification(model, (3,)).check()


class InParts(Checkpointed):
    """Extended part by part, so that no extended model runs: the checkpoint stays as it is."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__(block(), reentrant)
        for part in self.children():
            extend(part)


def loss_of(problem: Problem) -> Tensor:
    result: Tensor = extend(problem.lossfunc)(problem.model(*problem.inputs), problem.target)
    return result


def test_reentrant_checkpoint_of_a_part_first_order() -> None:
    problem = classification(InParts(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    problem.compare("grad_batch", expected)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_reentrant_checkpoint_of_a_shared_part(extension: Any) -> None:
    """What lies inside is a graph of its own, so that the other use is not seen from there."""
    model = InParts()
    model.block = extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model.last = nn.Sequential(model.block[0], extend(nn.Linear(4, 3)))
    loss = loss_of(classification(model, (3,)))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"), backpack(extension()):
        loss.backward()


def test_reentrant_checkpoint_of_a_part_second_order() -> None:
    loss = loss_of(classification(InParts(), (3,)))
    with pytest.raises(BridgeError, match="use_reentrant=False"), backpack(DiagGGNExact()):
        loss.backward()


def test_reentrant_checkpoint_around_a_model_second_order() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    output = checkpoint(model, torch.randn(4, 3, requires_grad=True), use_reentrant=True)
    loss = lossfunc(output, torch.randn(4, 2))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"), backpack(DiagGGNExact()):
        loss.backward()


def test_a_reentrant_checkpoint_that_no_gradient_arrives_at_stays_one() -> None:
    """Parameters inside get no gradient, as without ``extend``."""
    model = Net(lambda net, x: net.last(checkpoint(net.block, x, use_reentrant=True)),
                block=nn.Linear(3, 3), last=nn.Linear(3, 2))  # fmt: skip
    extend(model)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(torch.randn(2, 3)).sum().backward()
    assert model.block.weight.grad is None
    assert model.last.weight.grad is not None


def test_a_shared_gradient_of_parts() -> None:
    """``backward(inputs=...)`` is none that re-entrant checkpoints take, and they are known."""
    problem = classification(InParts(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = loss_of(problem)
    said = pytest.warns(BackpackWarning, match="re-entrant checkpoints take no inputs")
    with said, backpack(BatchGrad(), gradient="shared"):
        loss.backward()
    problem.compare("grad_batch", expected)
    problem.compare("grad", [e.sum(0) for e in expected])


def test_a_class_that_is_made_of_torch_s() -> None:
    class Own(torch.utils.checkpoint.CheckpointFunction):
        pass

    x, block = torch.randn(2, 3, requires_grad=True), nn.Linear(3, 3)
    Own.apply(block, True, x).sum().backward()
    torch.testing.assert_close(x.grad, block.weight.sum(0).expand(2, 3))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_pass_that_was_left(error: type[BaseException]) -> None:
    """A model that raised does not run any more."""

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(False)
            raise error

    with pytest.raises(error), torch.enable_grad():
        extend(nn.Sequential(nn.Linear(3, 3), Raises()))(torch.ones(2, 3))
    assert not still_running()
