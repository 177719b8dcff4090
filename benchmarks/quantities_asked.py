"""Quantities beside what a user would take instead: ``torch.func``, autograd, torchjd if installed.

Run ``python -m benchmarks.quantities_asked``. Each row is one quantity by two ways in turn, in one
process; the ratio is the other's time over ours, so more than one says that ours is faster. Numbers
are compared first.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, linearize, vjp, vmap

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import (
    JMP,
    NTK,
    BatchDotGrad,
    BatchGrad,
    DiagGGNExact,
    Jacobians,
    TaskDotGrad,
    TaskGrad,
)
from backpack_firstorder.agreement import agreement
from backpack_layers.autodiff_loss import AutodiffLoss
from backpack_secondorder.outputs import SumOutputs

REPEATS, BEFORE = 15, 33  # a pass is written down at the eighth, and compared at few later ones


class Row(NamedTuple):
    """One comparison: what it is, our way, and the other's, which return the same numbers."""

    name: str
    ours: Callable[[], list[Tensor]]
    other: Callable[[], list[Tensor]]
    peer: str = "torch.func"


def run(*extensions: Any, loss: Callable[[], Tensor], **options: Any) -> None:
    """A backward pass; the loss is computed outside of the block."""
    value = loss()
    with backpack(*extensions, **options):
        value.backward()


def _net(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def of_outputs(title: str, net: nn.Sequential, x: Tensor) -> Iterator[Row]:
    """Jacobians, kernels and products of a net's output."""
    state = {name: p.detach().clone() for name, p in net.named_parameters()}
    plain = copy.deepcopy(net)
    extend(net), extend(lossfunc := SumOutputs())
    parameters = [*net.parameters()]
    one = lambda p, row: functional_call(plain, p, (row.unsqueeze(0),)).squeeze(0)  # noqa: E731
    rows = vmap(jacrev(one), (None, 0))

    def stored(extension: Any, field: str) -> list[Tensor]:
        run(extension, loss=lambda: lossfunc(net(x)), gradient="skipped")
        return [getattr(p, field) for p in parameters]

    def kernels() -> list[Tensor]:
        flat = [j.flatten(2) for j in rows(state, x).values()]
        return [torch.einsum("ncp,mdp->ncmd", j, j) for j in flat]

    yield Row(f"Jacobians, {title}", lambda: stored(Jacobians(), "jacobians"),
              lambda: [*rows(state, x).values()])  # fmt: skip
    yield Row(f"NTK, {title}", lambda: stored(NTK(), "ntk"), kernels)

    tangents = {name: torch.randn_like(p) for name, p in state.items()}
    by_parameter = dict(zip(parameters, tangents.values(), strict=True))
    whole = lambda p: functional_call(plain, p, (x,))  # noqa: E731

    run(JMP(), loss=lambda: lossfunc(net(x)), gradient="none")
    jacobian = parameters[0].jmp.whole
    direction = torch.randn_like(plain(x)).detach()
    _, push = linearize(whole, state)
    _, pull = vjp(whole, state)

    def back() -> list[Tensor]:
        found = jacobian.transposed(direction)
        return [found[p] for p in parameters]

    yield Row(f"J v, {title}", lambda: [jacobian.product(by_parameter)], lambda: [push(tangents)])
    yield Row(f"Jᵀ u, {title}", back, lambda: [*pull(direction)[0].values()])


def of_residuals(points: int = 128) -> Iterator[Row]:
    """Jacobians of residuals with a Laplacian."""
    net, x = _net([2, 32, 32, 1]), torch.randn(points, 2)
    plain, state = (
        copy.deepcopy(net),
        {name: p.detach().clone() for name, p in net.named_parameters()},
    )
    extend(net), extend(lossfunc := SumOutputs())

    def residual() -> Tensor:
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        second = [
            torch.autograd.grad(slope[:, i].sum(), at, create_graph=True)[0][:, i] for i in (0, 1)
        ]
        return lossfunc((second[0] + second[1]).unsqueeze(1))

    def ours() -> list[Tensor]:
        run(Jacobians(), loss=residual, gradient="skipped")
        return [p.jacobians.squeeze(1) for p in net.parameters() if hasattr(p, "jacobians")]

    value = lambda p, row: functional_call(plain, p, (row,)).squeeze()  # noqa: E731
    laplacian = lambda p, row: hessian(value, 1)(p, row).trace()  # noqa: E731
    rows = vmap(jacrev(laplacian), (None, 0))
    step = capture(residual, net, lossfunc, Jacobians(), gradient="none")

    def captured() -> list[Tensor]:
        step()
        return [p.jacobians.squeeze(1) for p in net.parameters() if hasattr(p, "jacobians")]

    other = lambda: [*rows(state, x).values()][:-1]  # noqa: E731
    yield Row("Jacobians of a Laplacian", ours, other)
    yield Row("the same, captured", captured, other)


def focal(x: Tensor, y: Tensor) -> Tensor:
    """The focal loss, by sample."""
    log_p = x.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    return -((1 - log_p.exp()) ** 2) * log_p


def of_own_loss(samples: int = 128) -> Iterator[Row]:
    """The Gauss-Newton diagonal of a loss without a rule; Hessians by ``torch.func``."""
    net, x, y = _net([64, 128, 128, 10]), torch.randn(samples, 64), torch.randint(10, (samples,))
    plain, state = copy.deepcopy(net), {n: p.detach().clone() for n, p in net.named_parameters()}
    extend(net), extend(lossfunc := AutodiffLoss(focal, "sum", negative="clip"))

    def ours() -> list[Tensor]:
        run(DiagGGNExact(), loss=lambda: lossfunc(net(x), y), gradient="skipped")
        return [p.diag_ggn_exact for p in net.parameters()]

    one = lambda p, row: functional_call(plain, p, (row.unsqueeze(0),)).squeeze(0)  # noqa: E731
    of_sample = lambda z, y: focal(z.unsqueeze(0), y.unsqueeze(0)).squeeze()  # noqa: E731
    jacobians, curvature = vmap(jacrev(one), (None, 0)), vmap(hessian(of_sample))

    def other() -> list[Tensor]:
        values, vectors = torch.linalg.eigh(curvature(plain(x).detach(), y))
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        found = jacobians(state, x).values()
        return [torch.einsum("ncv,nc...->nv...", root, j).square().sum((0, 1)) for j in found]

    yield Row("DiagGGNExact, focal loss, MLP, 128", ours, other)


def of_gradients(samples: int = 64) -> Iterator[Row]:
    """Gram matrices of gradients, of samples and of several losses."""
    net, x, y = _convolutions(), torch.randn(samples, 3, 16, 16), torch.randint(10, (samples,))
    plain = copy.deepcopy(net)
    extend(net), extend(lossfunc := nn.CrossEntropyLoss(reduction="sum"))

    def ours() -> list[Tensor]:
        run(BatchDotGrad(), loss=lambda: lossfunc(net(x), y), gradient="none")
        return [agreement(net).gram]

    each = lambda: nn.functional.cross_entropy(plain(x), y, reduction="none")  # noqa: E731
    with suppress(ModuleNotFoundError):
        from torchjd.autogram import Engine

        engine = Engine(plain, batch_dim=0)
        yield Row(
            "BatchDotGrad over a CNN, 64", ours, lambda: [engine.compute_gramian(each())],
            "torchjd",
        )  # fmt: skip
    yield from of_tasks()


def of_tasks(tasks: int = 8, samples: int = 128) -> Iterator[Row]:
    """Gradients of losses that share a body, in one pass, and one by one."""
    net, x = _net([64, 256, 256, tasks * 4]), torch.randn(samples, 64)
    plain, y = copy.deepcopy(net), torch.randint(4, (samples, tasks))
    extend(net), extend(lossfunc := nn.CrossEntropyLoss())

    def losses(model: nn.Module, function: Callable[..., Tensor]) -> list[Tensor]:
        outputs = model(x).unflatten(1, (tasks, 4))
        return [function(outputs[:, task], y[:, task]) for task in range(tasks)]

    def total() -> Tensor:
        return torch.stack(losses(net, lossfunc)).sum()

    def rows() -> list[Tensor]:
        run(TaskGrad(), loss=total, gradient="skipped")
        return [p.grad_task for p in net.parameters()]

    def one_by_one() -> list[Tensor]:
        found = [
            torch.autograd.grad(loss, [*plain.parameters()], retain_graph=True)
            for loss in losses(plain, nn.functional.cross_entropy)
        ]
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def product() -> list[Tensor]:
        run(TaskDotGrad(), loss=total, gradient="skipped")
        return [torch.stack([p.task_dot for p in net.parameters()]).sum(0)]

    def gram(parts: list[Tensor]) -> Tensor:
        flat = torch.cat([part.flatten(1) for part in parts], 1)
        return flat @ flat.T

    def products() -> list[Tensor]:
        return [gram(one_by_one())]

    alone = capture(total, net, lossfunc, TaskGrad(), gradient="none")
    step = capture(total, net, lossfunc, TaskGrad(), TaskDotGrad(), gradient="none")

    def captured_alone() -> list[Tensor]:
        alone()
        return [p.grad_task for p in net.parameters()]

    def captured() -> list[Tensor]:
        step()
        own = [*net.parameters()]
        return [p.grad_task for p in own] + [torch.stack([p.task_dot for p in own]).sum(0)]

    yield Row(f"TaskGrad, {tasks} losses, MLP, 128", rows, one_by_one, "autograd")
    yield Row("the same, captured", captured_alone, one_by_one, "autograd")
    yield Row(f"TaskDotGrad, {tasks} losses, MLP, 128", product, products, "autograd")
    both = lambda: [*(found := one_by_one()), gram(found)]  # noqa: E731
    yield Row(f"both, {tasks} losses, captured", captured, both, "autograd")


class Modulated(nn.Module):
    """A constant input, and a convolution whose kernels a code scales for each sample.

    As in StyleGAN2 (Karras et al., 2020, arXiv:1912.04958): samples are groups.
    """

    def __init__(self, channels: int = 32, code: int = 16) -> None:
        super().__init__()
        self.code, self.last = nn.Linear(code, channels), nn.Linear(channels, 10)
        self.table = nn.Parameter(torch.randn(1, channels, 16, 16))
        self.weight = nn.Parameter(torch.randn(1, channels, channels, 3, 3) / channels)

    def forward(self, z: Tensor) -> Tensor:
        """Codes ``[N, code]`` to ``[N, 10]``."""
        samples, channels = len(z), self.code.out_features
        weight = self.weight * (1 + self.code(z)).view(samples, 1, channels, 1, 1)
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = self.table.expand(samples, -1, -1, -1).reshape(1, -1, 16, 16)
        found = nn.functional.conv2d(x, weight.flatten(0, 1), padding=1, groups=samples)
        found = nn.functional.leaky_relu(found, 0.2).view(samples, channels, -1)
        return self.last(found.mean(2))  # type: ignore[no-any-return]


def of_weights(samples: int = 16) -> Iterator[Row]:
    """Individual gradients where weights are computed for each sample."""
    net, z, y = Modulated(), torch.randn(samples, 16), torch.randint(10, (samples,))
    plain, state = copy.deepcopy(net), {n: p.detach().clone() for n, p in net.named_parameters()}
    extend(net), extend(lossfunc := nn.CrossEntropyLoss(reduction="sum"))

    def one(p: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        output = functional_call(plain, p, (row.unsqueeze(0),))
        return nn.functional.cross_entropy(output, target.unsqueeze(0))

    def ours() -> list[Tensor]:
        run(BatchGrad(), loss=lambda: lossfunc(net(z), y))
        return [p.grad_batch for p in net.parameters()]

    each = vmap(grad(one), (None, 0, 0))
    step = capture(lambda: lossfunc(net(z), y), net, lossfunc, BatchGrad())

    def captured() -> list[Tensor]:
        step()
        return [p.grad_batch for p in net.parameters()]

    other = lambda: [*each(state, z, y).values()]  # noqa: E731
    yield Row("BatchGrad, modulated convolution, 16", ours, other)
    yield Row("the same, captured", captured, other)


def rows() -> Iterator[Row]:
    """All comparisons."""
    yield from of_weights()
    yield from of_outputs("MLP 64-128-128-10, 128", _net([64, 128, 128, 10]), torch.randn(128, 64))
    yield from of_outputs("CNN, 32", _convolutions(), torch.randn(32, 3, 16, 16))
    yield from of_residuals()
    yield from of_own_loss()
    yield from of_gradients()


def measure(row: Row) -> tuple[float, float]:
    """Median seconds of CPU time of both, in turn; raises if numbers differ."""
    for _ in range(BEFORE):  # the first passes are also measured, and planned
        row.ours()
    for found, expected in zip(row.ours(), row.other(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=1e-4)
    times: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for kept, function in zip(times, (row.ours, row.other), strict=True):
            start = time.process_time()
            function()
            kept.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Print a line for each row."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for row in rows():
        ours, other = measure(row)
        print(
            f"{row.name:36} ours {1e3 * ours:7.2f} ms   {row.peer:11} {1e3 * other:7.2f} ms   "
            f"{other / ours:5.2f} times"
        )


if __name__ == "__main__":
    main()
