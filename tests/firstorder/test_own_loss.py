"""Clipping bounds the gradient of a sample's own loss, whatever the loss divides by."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad, BatchL2Grad, ClippedSumGrad
from backpack_core.testing import LossCase
from backpack_data import accumulate, combined
from tests.conformance.cases_losses import CASES
from tests.oracle import assert_close

N = 6
Loss = Callable[..., Tensor]


def net(size: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, size))


def own_gradients(model: nn.Module, loss_of: Callable[[int], Tensor], n: int = N) -> list[Tensor]:
    """``∇ℓ_n`` in a loop over samples, ``[N, *θ]`` for each parameter."""
    rows = [torch.autograd.grad(loss_of(k), [*model.parameters()]) for k in range(n)]
    return [torch.stack(found) for found in zip(*rows, strict=True)]


def norms(gradients: list[Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()


def clipped(gradients: list[Tensor], bound: float, per_layer: bool = False) -> list[Tensor]:
    """Layers are pairs of parameters, a weight and a bias."""
    found = []
    for start in range(0, len(gradients), 2):
        group = gradients[start : start + 2]
        factors = (bound / norms(group if per_layer else gradients)).clamp(max=1.0)
        found += [torch.einsum("n,n...->...", factors, g) for g in group]
    return found


def values(
    model: nn.Module, loss: Callable[[], Tensor], *args: Any, **options: Any
) -> list[Tensor]:
    with backpack(ClippedSumGrad(*args, **options)):
        loss().backward()
    return [p.grad_clipped for p in model.parameters()]


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.grid(3)
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label())
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_every_loss(case: LossCase, reduction: str) -> None:
    if reduction == "batchmean" and case.loss_factory is not nn.KLDivLoss:
        return
    given = case.input_factory(N)
    shape = given[0].shape[1:]
    model = extend(nn.Sequential(net(shape.numel()), nn.Sigmoid(), nn.Unflatten(1, shape)))
    x, rest = torch.randn(N, 4), given[1:]
    alone, lossfunc = (case.loss_factory(reduction=r) for r in ("sum", reduction))
    extend(lossfunc)
    grads = own_gradients(
        model, lambda n: alone(model(x[n : n + 1]), *(r[n : n + 1] for r in rest))
    )
    for bound in (float(norms(grads).mean()), float(norms(grads).max()) / 100, 1e3):
        for clipping in ("flat", "per_layer"):
            wanted = clipped(grads, bound, clipping == "per_layer")
            found = values(model, lambda: lossfunc(model(x), *rest), bound, clipping)
            compare(found, wanted)
            some = [4, 1, 1]
            found = values(model, lambda: lossfunc(model(x), *rest), bound, clipping, some)
            compare(found, clipped([g[some] for g in grads], bound, clipping == "per_layer"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight": torch.tensor([0.5, 3.0, 7.0]).double()}, {"ignore_index": 1}],
)
def test_no_sample_changes_the_value_by_more_than_the_bound(
    options: dict[str, Any], reduction: str
) -> None:
    """Not even by what a mean divides by, which depends on the targets."""
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction, **options))
    model, x, y = extend(net()), 5 * torch.randn(N, 4), torch.arange(N) % 3

    def total(rows: list[int]) -> Tensor:
        found = values(model, lambda: lossfunc(model(x[rows]), y[rows]), 0.5)
        return torch.cat([value.flatten() for value in found])

    everybody = [*range(N)]
    changes = [total(everybody) - total([*everybody[:n], *everybody[n + 1 :]]) for n in everybody]
    sizes = torch.stack(changes).norm(dim=1)
    assert sizes.max() <= 0.5 + 1e-9
    assert (sizes > 0.49).sum() >= 3  # and it is reached


@pytest.mark.host("its share is that of one seed")
def test_the_share_that_is_clipped_is_that_of_norms() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 4, generator=drawn), torch.randint(3, (64,), generator=drawn)
    with backpack(ClippedSumGrad(1.0), BatchL2Grad()):
        lossfunc(model(x), y).backward()
    squares = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0)
    own = squares.sqrt() * 64  # BatchL2Grad has the scale of .grad
    assert 0.1 < (own > 1).double().mean() < 0.9


def test_rows_of_a_sample_are_added() -> None:
    """``[N T, C]``, ignored targets, and masked heads."""
    model, x = extend(net()), torch.randn(N, 3, 4)
    y = torch.randint(3, (N, 3))
    y[0], y[1, 2], y[2, 0] = -100, -100, -100
    mask = torch.rand(N, 3) < 0.5
    mask[3] = True
    mask[4] = False
    steps: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda out: out.flatten(0, 1), y.flatten()),
        (lambda out: out.transpose(1, 2), y),
        (lambda out: out[mask], y[mask]),
    ]
    for reduction in ("mean", "sum"):
        lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
        for number, (step, target) in enumerate(steps):

            def loss(step: Any = step, target: Tensor = target, lossfunc: Any = lossfunc) -> Tensor:
                found: Tensor = lossfunc(step(model(x)), target)
                return found

            keep = mask if number == 2 else torch.ones_like(mask)
            grads = own_gradients(
                model,
                lambda n, keep=keep: F.cross_entropy(  # type: ignore[misc]
                    model(x[n : n + 1])[0][keep[n]], y[n][keep[n]], reduction="sum"
                ),
            )
            bound = float(norms(grads).median())
            found = values(model, loss, bound)
            compare(found, clipped(grads, bound))


def two_losses(
    first: nn.Module, second: nn.Module, a: float = 1.0, b: float = 1.0
) -> tuple[nn.Module, Callable[[], Tensor], Callable[[int], Tensor]]:
    """A weighted sum of two extended losses, and each sample's own one."""
    model, x, y, z = extend(net()), torch.randn(N, 4), torch.arange(N) % 3, torch.randn(N, 3)
    alone = deepcopy(first), deepcopy(second)
    for lossfunc in alone:
        lossfunc.reduction = "sum"  # type: ignore[assignment]
    extend(first), extend(second)

    def loss() -> Tensor:
        out = model(x)
        found: Tensor = a * first(out, y) + b * second(out, z)
        return found

    def own(n: int) -> Tensor:
        out = model(x[n : n + 1])
        found: Tensor = a * alone[0](out, y[n : n + 1]) + b * alone[1](out, z[n : n + 1])
        return found

    return model, loss, own


@pytest.mark.parametrize("numbers", [(1.0, 1.0), (0.25, 3.0), (2.0, -1.0)])
def test_several_losses(numbers: tuple[float, float]) -> None:
    made = (nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="sum"))
    model, loss, own = two_losses(*made, *numbers)
    grads = own_gradients(model, own)
    bound = float(norms(grads).median())
    compare(values(model, loss, bound), clipped(grads, bound))
    # Two means over as much.
    model, x, y = extend(net()), torch.randn(N, 4), torch.arange(N) % 3
    one, other = extend(nn.CrossEntropyLoss()), extend(nn.NLLLoss())
    a, b = numbers
    grads = own_gradients(
        model,
        lambda n: (
            a * F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
            + b * F.nll_loss(model(x[n : n + 1]), y[n : n + 1])
        ),
    )
    bound = float(norms(grads).median())
    found = values(model, lambda: a * one(out := model(x), y) + b * other(out, y), bound)
    compare(found, clipped(grads, bound))


def test_losses_that_divide_by_different_numbers() -> None:
    model, loss, _ = two_losses(nn.CrossEntropyLoss(), nn.MSELoss())
    with pytest.raises(UsageError, match=r"losses divide by 6 and by 18\. Say it.*normaliser="):
        values(model, loss, 1.0)
    model, loss, _ = two_losses(nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum"))
    with pytest.raises(UsageError, match="losses divide by 1 and by 6"):
        values(model, loss, 1.0)
    with backpack(BatchGrad()):
        loss().backward()
    grads = [N * p.grad_batch for p in model.parameters()]
    bound = float(norms(grads).median())
    compare(values(model, loss, bound, normaliser=N), clipped(grads, bound))


UNKNOWN: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], str]] = {
    "function": (lambda m, x, y: F.cross_entropy(m(x), y), "no extended loss took part"),
    "sum by hand": (lambda m, x, y: m(x).square().sum(), "no extended loss took part"),
    "module without a rule": (
        lambda m, x, y: extend(nn.CosineEmbeddingLoss())(m(x), m(x).detach() + 1, y.sign()),
        "no extended loss took part|no loss rule",
    ),
    "root": (
        lambda m, x, y: extend(nn.CrossEntropyLoss())(m(x), y).sqrt(),
        "the operation 'Sqrt.*' is not known to be linear|applied to one, is not known",
    ),
    "none, mean": (
        lambda m, x, y: extend(nn.CrossEntropyLoss(reduction="none"))(m(x), y).mean(),
        "reduction 'none'",
    ),
    "none, sum": (
        lambda m, x, y: extend(nn.CrossEntropyLoss(reduction="none"))(m(x), y).sum(),
        "reduction 'none'",
    ),
    "term beside": (
        lambda m, x, y: extend(nn.CrossEntropyLoss())(out := m(x), y) + out.square().mean(),
        "a term beside extended losses depends on the output of Linear",
    ),
    "term of a function": (
        lambda m, x, y: (
            extend(nn.CrossEntropyLoss())(m(x), y) + F.linear(x, m[0].weight).square().mean()
        ),
        "a term beside extended losses depends on",
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_has_to_be_told(kind: str) -> None:
    loss, message = UNKNOWN[kind]
    model, x, y = extend(net()), torch.randn(N, 4), torch.arange(N) % 3
    with pytest.raises(UsageError, match=message) as caught:
        values(model, lambda: loss(model, x, y), 1.0)
    assert "normaliser=" in str(caught.value)
    with backpack(BatchGrad()):
        loss(model, x, y).backward()
    parts = [p.grad_batch for p in model.parameters()]
    for told, divisor in ((N, N), (None, 1), (torch.tensor(2.5), 2.5)):
        grads = [divisor * part for part in parts]
        bound = float(norms(grads).median())
        found = values(model, lambda: loss(model, x, y), bound, normaliser=told)
        compare(found, clipped(grads, bound))


class Own(nn.Module):
    """A module without a rule: its parameters are read where operations use them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + self.b).tanh()


@pytest.mark.filterwarnings("ignore:Own has no layer rule")
def test_a_term_beside_of_a_module_without_a_rule() -> None:
    model, lossfunc = extend(Own()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    grads = own_gradients(model, lambda n: F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]))
    bound = float(norms(grads).median())
    compare(values(model, lambda: lossfunc(model(x), y), bound), clipped(grads, bound))
    with pytest.raises(UsageError, match="depends on the output of Own"):
        values(model, lambda: lossfunc(out := model(x), y) + out.square().sum(), bound)


def test_a_term_of_the_data_alone() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4, requires_grad=True), torch.arange(N) % 3
    wanted = values(model, lambda: lossfunc(model(x), y), 0.3)
    compare(values(model, lambda: lossfunc(model(x), y) + x.square().sum(), 0.3), wanted)


def test_a_penalty_that_is_handed_over() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    grads = own_gradients(model, lambda n: F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]))
    bound = float(norms(grads).median())
    penalty = sum(p.square().sum() for p in model.parameters())
    assert isinstance(penalty, Tensor)
    with backpack(ClippedSumGrad(bound), beside=[penalty]):
        (lossfunc(model(x), y) + penalty).backward()
    compare([p.grad_clipped for p in model.parameters()], clipped(grads, bound))


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_numbers_in_front_are_a_part_of_the_loss_unless_named(factor: float) -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    grads = own_gradients(model, lambda n: F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]))
    bound = float(norms(grads).median())
    found = values(model, lambda: factor * lossfunc(model(x), y), bound)
    compare(found, clipped([factor * g for g in grads], bound))
    found = values(model, lambda: factor * lossfunc(model(x), y), bound, scale=factor)
    compare(found, clipped(grads, bound))
    found = values(
        model, lambda: factor * F.cross_entropy(model(x), y), bound, scale=factor, normaliser=N
    )
    compare(found, clipped(grads, bound))


def test_micro_batches_of_several_sizes_add_up() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    whole = values(model, lambda: lossfunc(model(x), y), 0.3)
    parts = [
        values(model, lambda s=s: lossfunc(model(x[s]), y[s]) / 2, 0.3, scale=1 / 2)  # type: ignore[misc]
        for s in (slice(0, 1), slice(1, N))
    ]
    compare([a + b for a, b in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_over_batches(reduction: str) -> None:
    """By modules and by functions, over batches of several sizes."""
    model, x, y = net(), torch.randn(N, 4), torch.arange(N) % 3
    grads = own_gradients(model, lambda n: F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]))
    bound = float(norms(grads).median())
    wanted = clipped(grads, bound)
    loader = [(x[:1], y[:1]), (x[1:], y[1:])]
    names = [name for name, _ in model.named_parameters()]

    def function(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction=reduction)

    def told(inputs: Tensor, targets: Tensor) -> float | None:
        return len(targets) if reduction == "mean" else None

    module = nn.CrossEntropyLoss(reduction=reduction)
    for lossfunc, normaliser in ((module, None), (module, told), (function, told)):
        found = accumulate(
            model, lossfunc, loader, ClippedSumGrad(bound), normaliser=normaliser, progress=False
        )
        compare([found[name, "grad_clipped"] for name in names], wanted)
    extend(model), extend(module)
    block = combined(model, ClippedSumGrad(bound))
    for inputs, targets in loader:
        with block:
            module(model(inputs), targets).backward()
    compare([p.grad_clipped for p in model.parameters()], wanted)
    block = combined(model, ClippedSumGrad(bound), normaliser=None)
    for inputs, targets in loader:
        with block:
            F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    compare([p.grad_clipped for p in model.parameters()], wanted)


class Whole(nn.Module):
    """A model that returns its loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.body, self.lossfunc = net(), nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.lossfunc(self.body(x), y)
        return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_that_has_its_loss_and_a_checkpoint(reduction: str) -> None:
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    model = extend(Whole(reduction))
    grads = own_gradients(model, lambda n: F.cross_entropy(model.body(x[n : n + 1]), y[n : n + 1]))
    bound = float(norms(grads).median())
    compare(values(model, lambda: model(x, y), bound), clipped(grads, bound))
    found = values(model, lambda: checkpoint(model, x, y, use_reentrant=False), bound)
    compare(found, clipped(grads, bound))


def test_targets_that_are_all_ignored() -> None:
    model, lossfunc = extend(net()), extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(N, 4), torch.full((N,), -100)
    for value in values(model, lambda: lossfunc(model(x), y), 1.0):
        assert not value.any()


@pytest.mark.host("elsewhere it is not a number, since no pass waits for a device")
def test_divisors_that_begin_to_differ() -> None:
    """In a pass that is not measured. As long as they agree, there is a value."""
    model, x, y = extend(net()), torch.randn(N, 4), torch.arange(N) % 3
    one, other = extend(nn.CrossEntropyLoss()), extend(nn.CrossEntropyLoss())

    def loss(ignored: int) -> Tensor:
        found: Tensor = one(model(x), y) + other(model(x), y.masked_fill(y == ignored, -100))
        return found

    for _ in range(4):
        assert all(value.isfinite().all() for value in values(model, lambda: loss(7), 1.0))
    for _ in range(3):
        with pytest.raises(UsageError, match="losses divide by 4 and by 6"):
            values(model, lambda: loss(0), 1.0)


@pytest.mark.parametrize(
    "wrong", [0, -1.0, float("nan"), float("inf"), True, "mean", torch.ones(2)]
)
def test_normalisers_are_numbers(wrong: Any) -> None:
    with pytest.raises(UsageError, match="normaliser must be what the loss divides by"):
        ClippedSumGrad(1.0, normaliser=wrong)
