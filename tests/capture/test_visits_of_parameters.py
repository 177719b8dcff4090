"""Repeated passes where operations use parameters, and without autograd: the engine's numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import backpack_core.extensions as known
from backpack_capture import visits
from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact
from tests.capture.nets import NETS
from tests.capture.test_visits import PASSES, Twin, agree_on, by_the_engine, compare
from tests.cases import Net
from tests.core.test_gradient_skipped import Seen


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)


# Parameters that operations use ------------------------------------------------------------------


class Tokens(nn.Module):
    """A class token, added positions, and a scale, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(4, 4)),
        )
        self.a, self.b, self.scale = nn.Linear(5, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), 1, 4), self.a(x)], 1) + self.places
        return self.b((tokens + self.scale * torch.tanh(tokens)).mean(1))


class Modulated(nn.Module):
    """A convolution whose weights are computed for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(3, 2, 2, 2)), nn.Linear(4, 2)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        weights = (self.weight * self.style(x[:, 0]).view(n, 1, 2, 1, 1)).view(n * 3, 2, 2, 2)
        image = x.reshape(1, n * 2, 3, 4)
        return self.head(functional.conv2d(image, weights, groups=n).view(n, 3, -1).mean(2))


class First(nn.Module):
    """A parameter that is used once, before any layer: what is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.a = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.sin(x + self.shift))


OPERATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tokens": (Tokens, (3, 5)),
    "modulated": (Modulated, (6, 4)),
    "first": (First, (5,)),
}
ASKED = {
    name: getattr(known, name)
    for name in ("BatchGrad", "BatchL2Grad", "Variance", "DiagGGNExact", "DiagGGNMC", "KFAC")
}


@pytest.mark.parametrize("extension", ASKED)
@pytest.mark.parametrize("net", OPERATIONS)
def test_parameters_of_operations(net: str, extension: str) -> None:
    torch.manual_seed(0)
    make, shape = OPERATIONS[net]
    model = make()
    batches = [(torch.randn(4, *shape), torch.randint(3, (4,))) for _ in range(PASSES)]
    batches += [(torch.randn(n, *shape), torch.randint(3, (n,))) for n in (3, 4)]
    try:
        with by_the_engine():
            Twin(copy.deepcopy(model)).step(batches[0], ASKED[extension]())
    except BackpackError:
        pytest.skip("it does not exist for this net")
    assert compare(model, batches, ASKED[extension])


class Centres(nn.Module):
    """Parameters that only a function uses, behind the model, and before anything is visited."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.centres = nn.Linear(5, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def _nearest(model: Centres, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(model(x), model.centres), y)


def _centred(model: Centres, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - model.centres[y]).square().sum()


@pytest.mark.parametrize("extension", ["BatchGrad", "BatchL2Grad", "Variance"])
@pytest.mark.parametrize("loss", [_nearest, _centred])
def test_parameters_of_a_function_behind_the_model(loss: Any, extension: str) -> None:
    """Autograd frees what the function has saved before it gets to the model."""
    model, found, repeated = extend(Centres()), list[list[Tensor]](), 0
    for _ in range(PASSES):
        x, y = torch.randn(4, 5), torch.randint(3, (4,))
        asked, found = ASKED[extension](), []
        for is_repeated in (True, False):
            with nullcontext() if is_repeated else by_the_engine(), backpack(asked) as block:
                loss(model, x, y).backward()
            repeated += block._history["repeated a recording"]
            found.append([getattr(p, asked.savefield) for p in model.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    assert repeated


class Attending(nn.Module):
    """Attention first of all, twice side by side, and once behind a layer."""

    def __init__(self, bias: bool = True, heads: int = 2) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.MultiheadAttention(4, heads, bias=bias, batch_first=True) for _ in range(3)
        )
        self.between, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.a(x, x, x, need_weights=False)[0], self.b(x, x, x)[0]
        h = torch.tanh(self.between(one + other))
        return self.head((x + self.c(h, h, h)[0]).mean(1))


@pytest.mark.grid(4)
@pytest.mark.parametrize("extension", ["BatchGrad", "BatchL2Grad", "Variance", "ClippedSumGrad"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "a.in_proj_weight", "c.in_proj_bias", "b"])
def test_projections_of_attention(extension: str, bias: bool, frozen: str) -> None:
    torch.manual_seed(0)
    model = Attending(bias)
    for name, parameter in model.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)
    batches = [(torch.randn(4, 5, 4), torch.randint(3, (4,))) for _ in range(PASSES)]
    batches += [(torch.randn(n, k, 4), torch.randint(3, (n,))) for n, k in ((3, 5), (4, 2))]
    makes = {"ClippedSumGrad": lambda: known.ClippedSumGrad(0.05)}
    assert compare(model, batches, makes.get(extension) or ASKED[extension])


def test_projections_of_attention_in_other_precision() -> None:
    """Inside, autocast adds operations, and their gradients are sums over samples already."""
    torch.manual_seed(0)
    ours, right = Twin(Attending()), Twin(Attending())
    right.model.load_state_dict(ours.model.state_dict())
    for number in range(3 * PASSES):
        batch = torch.randn(4, 5, 4), torch.randint(3, (4,))
        is_low = number in (PASSES + 1, PASSES + 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            found = ours.step(batch, BatchGrad())
            with by_the_engine():
                expected = right.step(batch, BatchGrad())
        for one, other in zip(found[-1], expected[-1], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    assert ours.repeated


def test_projections_of_attention_are_there_when_a_gradient_is() -> None:
    model, there = Attending(), list[bool]()
    ours = Twin(model)
    for number in range(PASSES + 4):
        if number == PASSES:
            assert ours.repeated
            model.a.in_proj_weight.register_post_accumulate_grad_hook(
                lambda p: there.append(torch.allclose(p.grad_batch.sum(0), p.grad))
            )
        ours.step((torch.randn(4, 5, 4), torch.randint(3, (4,))), BatchGrad())
    assert there == [True] * 4


def test_results_of_operations_are_there_when_a_gradient_is() -> None:
    model, there = First(), list[bool]()
    ours = Twin(model)
    for number in range(PASSES + 4):
        if number == PASSES:
            assert ours.repeated
            model.shift.register_post_accumulate_grad_hook(
                lambda p: there.append(torch.allclose(p.grad_batch.sum(0), p.grad))
            )
        ours.step((torch.randn(4, 5), torch.randint(3, (4,))), BatchGrad())
    assert there == [True] * 4


def test_gradients_at_nodes_that_hooks_change() -> None:
    torch.manual_seed(0)
    factor, outs = [1.0], list[Tensor]()

    def forward(net: Any, x: Tensor) -> Tensor:
        scaled = net.scale * net.a(x)
        scaled.register_hook(lambda grad: None if factor[0] == 1.0 else grad * factor[0])
        return net.b(scaled)

    model = Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))
    model.scale = nn.Parameter(torch.rand(4))
    ours = Twin(model)
    for number in range(PASSES + 2):
        factor[0] = 1.0 if number < PASSES - 1 else -2.0
        ours.step((torch.randn(4, 5), torch.randint(3, (4,))), BatchGrad())
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)
    assert ours.repeated
    assert not outs


def test_a_pass_inside_of_a_repeated_one() -> None:
    torch.manual_seed(0)
    model = Tokens()
    ours, batch = Twin(model), (torch.randn(4, 3, 5), torch.randint(3, (4,)))
    batch = batch[0].double(), batch[1]

    def inside(grad: Tensor) -> None:
        with torch.enable_grad():
            (model.scale * batch[0].sum()).sum().backward()

    model.b.register_forward_hook(lambda m, a, out: (out.register_hook(inside), None)[1])
    for _ in range(PASSES):
        ours.step(batch, BatchGrad())
        torch.testing.assert_close(model.a.weight.grad_batch.sum(0), model.a.weight.grad)
    assert not torch.equal(model.scale.grad_batch.sum(0), model.scale.grad)


class Changing(TorchFunctionMode):
    """Puts hooks that change gradients on a share of what a net computes."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self._drawn, self._share = random.Random(seed), share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_made = isinstance(found, Tensor) and found.grad_fn is not None
        if is_made and not found._is_view() and self._drawn.random() < self._share:
            found.register_hook(lambda grad: grad * 1.5)
        return found


@pytest.mark.parametrize("seeds", [range(164, 176), range(430, 442)], ids=str)
def test_random_nets_with_hooks_that_come_later(seeds: range) -> None:
    # The mode is on from the start, since passes under another mode have another plan.
    assert agree_on(seeds, 10, lambda number: Changing(number, 0.25 if number > 5 else 0.0))


# Without autograd --------------------------------------------------------------------------------


def _skipping(make: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    return lambda: make(**options)


CURVATURE = {
    "KFAC": known.KFAC,
    "KFLR": known.KFLR,
    "DiagGGNExact": DiagGGNExact,
    "chunks": lambda: DiagGGNExact(chunk_size=1),
    "DiagGGNMC": known.DiagGGNMC,
    "some": lambda: KFAC(subsampling=[2, 0]),
    "DiagHessian": known.DiagHessian,
    "TaskGrad": known.TaskGrad,
}


FEW = ("mlp", "cnn", "residual", "embedding", "tied", "encoder")


@pytest.mark.grid(6)
@pytest.mark.parametrize("extension", CURVATURE)
@pytest.mark.parametrize(
    "net", [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in NETS]
)
def test_passes_without_autograd(net: str, extension: str) -> None:
    torch.manual_seed(0)
    model, batches = NETS[net].make(), [NETS[net].draw(4) for _ in range(PASSES)]
    batches += [NETS[net].draw(n) for n in (3, 4)]
    make = CURVATURE[extension]
    ours, right = Twin(copy.deepcopy(model)), Twin(model)
    try:
        with by_the_engine():
            Twin(copy.deepcopy(model)).step(batches[0], make())
    except BackpackError:
        pytest.skip("it does not exist for this net")
    for number, batch in enumerate(batches):
        with torch.no_grad():
            for one, other in zip(ours.model.parameters(), right.model.parameters(), strict=True):
                other += 0.01 * number
                one.copy_(other)
        found = ours.step(batch, make(), gradient="skipped")
        with by_the_engine():
            expected = right.step(batch, make(), gradient="skipped")
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    # Chunks of columns use tensors of calls that are visited later; others read checks.
    is_left = extension == "chunks" or net in ("lstm", "slopes")
    assert ours.repeated or is_left


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_autograd_does_not_go_where_a_pass_is_repeated(scale: float) -> None:
    seen = Seen(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), (2,))
    went = list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "FIRST", 3)
        for _ in range(PASSES + 6):
            found = seen.run([KFAC(2)], check="first", loss=lambda loss: loss * scale)
            went.append(bool(seen.count))
    assert went[:2] == [True, True]
    assert not any(went[9:15])
    wanted = seen.run([KFAC(2)], gradient="none", loss=lambda loss: loss * scale)
    torch.testing.assert_close(found, wanted)


def test_other_ways_to_run_a_pass_that_was_repeated() -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(2, 2) for name in "abc"}
    model = extend(Net(lambda net, x: net.c(net.b(x).tanh()) + net.a(x), **layers))
    lossfunc, x, y = extend(nn.MSELoss()), torch.randn(4, 2), torch.randn(4, 2)

    def run(how: str) -> Tensor:
        loss = lossfunc(model(x), y)
        with backpack(DiagGGNExact(), gradient="skipped") as block:
            if how == "grad":
                torch.autograd.grad(loss, [*model.parameters()])
            else:
                loss.backward(inputs=[*model.parameters()] if how == "inputs" else None)
        repeated.append(block._history["repeated a recording"])
        return layers["a"].weight.diag_ggn_exact

    repeated = list[int]()
    ways = ["backward"] * PASSES + ["grad", "backward", "inputs", "backward"] * 8
    found = [run(how) for how in ways]
    for value in found:
        torch.testing.assert_close(value, found[0])
    counts = dict[str, int]()
    for how, count in zip(ways, repeated, strict=True):
        counts[how] = counts.get(how, 0) + count
    assert counts["backward"]
    assert not counts["inputs"]
