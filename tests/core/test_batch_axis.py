"""Samples on another axis, where no length tells: one sample, or as many as steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, SampleMixingError, ShapeError, UsageError
from backpack_core.extensions import GGNMP, KFRA, BatchDiagGGNExact, BatchGrad
from backpack_core.testing import oracle as kit
from tests import oracle
from tests.cases import Net

D, C = 3, 2
INNER: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "gru": lambda: nn.GRU(D, D),
    "lstm": lambda: nn.LSTM(D, D),
    "state": lambda: nn.GRU(D, D),
    "attention": lambda: nn.MultiheadAttention(D, 1),
    "encoder": lambda: nn.TransformerEncoderLayer(D, 1, 4, 0.0),
}
SIZES = [(4, 1), (1, 1), (4, 4), (4, 3), (4, 2), (2, 4)]  # steps and samples


class SequenceFirst(nn.Module):
    """Sequences ``[T, N, D]`` to outputs ``[N, C]``."""

    def __init__(self, name: str, mix: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.name, self.mix = name, mix
        self.embed, self.inner, self.head = nn.Linear(D, D), INNER[name](), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        if self.mix is not None:
            hidden = self.mix(hidden)
        given = (hidden,) * 3 if self.name == "attention" else (hidden,)
        found = self.inner(*given)
        if self.name == "state":
            hidden = found[1][-1]
        else:
            hidden = (found[0] if isinstance(found, tuple) else found).mean(0)
        result: Tensor = self.head(torch.tanh(hidden))
        return result


class Steps(nn.Module):
    """All steps of a recurrent layer, one after the other."""

    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0].flatten(0, 1)


def run(model: nn.Module, x: Tensor, y: Tensor, *extensions: Any) -> None:
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y)
    with backpack(*extensions):
        loss.backward()


def data(steps: int, samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, samples, D), torch.randint(0, C, (samples,))


@pytest.mark.parametrize(("steps", "samples"), SIZES)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("is_trained", [True, False])
def test_sequence_first(is_trained: bool, name: str, steps: int, samples: int) -> None:
    model, lossfunc = SequenceFirst(name), nn.CrossEntropyLoss(reduction="sum")
    model.inner.requires_grad_(is_trained)
    x, y = data(steps, samples)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients, diagonals = [], []
    for n in range(samples):
        output = model(x[:, n : n + 1])
        loss = lossfunc(output, y[n : n + 1])
        gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True))
        p = output.detach()[0].softmax(0)
        rows = [torch.autograd.grad(output[0, c], parameters, retain_graph=True) for c in range(C)]
        hessian = p.diag() - p[:, None] * p
        diagonals.append(
            [
                sum(hessian[a, b] * rows[a][i] * rows[b][i] for a in range(C) for b in range(C))
                for i in range(len(parameters))
            ]
        )
    run(extend(model, batch_axis=1), x, y, BatchGrad(), BatchDiagGGNExact())
    for i, parameter in enumerate(parameters):
        oracle.assert_close(parameter.grad_batch, torch.stack([g[i] for g in gradients]))
        oracle.assert_close(parameter.diag_ggn_exact_batch, torch.stack([d[i] for d in diagonals]))


@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
@pytest.mark.parametrize(("steps", "samples"), [(4, 4), (4, 3)])
@pytest.mark.parametrize("is_trained", [True, False])
def test_samples_that_mix(is_trained: bool, extension: Any, steps: int, samples: int) -> None:
    model = extend(SequenceFirst("gru", lambda h: h - h.mean(1, keepdim=True)), batch_axis=1)
    model.inner.requires_grad_(is_trained)
    with pytest.raises(SampleMixingError, match="influence each other"):
        run(model, *data(steps, samples), extension())


def test_without_the_declaration_one_sample_is_many() -> None:
    with pytest.raises(BackpackError):
        run(extend(SequenceFirst("gru")), *data(4, 1), BatchGrad())


@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
@pytest.mark.parametrize("inner", ["linear", "tanh"])
def test_a_view_of_the_input_shows_that_another_axis_is_in_front(
    inner: str, extension: Any
) -> None:
    """As many steps as samples, and nothing is declared: the model turns its input, and back."""
    middle = nn.Linear(D, D) if inner == "linear" else nn.Tanh()
    parts = {"first": nn.Linear(D, D), "middle": middle, "last": nn.Linear(D, C)}
    model = extend(
        Net(
            lambda net, x: net.last(net.middle(net.first(x.transpose(0, 1)))).transpose(0, 1),
            **parts,
        )
    )
    x, lossfunc = torch.randn(4, 4, D), extend(nn.MSELoss(reduction="sum"))
    with backpack(extension()):
        lossfunc(model(x), torch.zeros(4, 4, C)).backward()
    found = [getattr(p, extension().savefield) for p in model.parameters()]
    for n, sample in enumerate(x):
        with backpack(extension()):
            lossfunc(model(sample[None]), torch.zeros(1, 4, C)).backward()
        for all_samples, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(all_samples[n], getattr(p, extension().savefield)[0])


def test_an_average_needs_samples_in_front_of_a_view() -> None:
    model = extend(Net(lambda net, x: net.last(x.transpose(0, 1)).mean(0), last=nn.Linear(D, C)))
    with pytest.raises(ShapeError, match="an axis other than that of the samples in front"):
        run(model, torch.randn(4, 4, D), torch.zeros(4, dtype=torch.long), KFRA())


def test_a_function_as_loss_of_a_model_that_turns_its_input() -> None:
    parts = {"first": nn.Linear(D, D), "last": nn.Linear(D, C)}
    turned = Net(lambda net, x: net.last(net.first(x.transpose(0, 1))).transpose(0, 1), **parts)
    model, x = extend(turned), torch.randn(4, 4, D)
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    for n, sample in enumerate(x):
        expected = torch.autograd.grad(model(sample[None]).square().sum(), [*model.parameters()])
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad_batch[n], gradient)


@pytest.mark.usefixtures("without_cudnn")
def test_a_loss_of_steps_and_samples_merged() -> None:
    """A product with the curvature needs no samples, and so not to know which is whose."""
    model, lossfunc = nn.Sequential(nn.GRU(D, D), Steps()), nn.MSELoss(reduction="sum")
    x, y, weight = data(4, 3)[0], torch.randn(12, D), model[0].weight_hh_l0
    vector = torch.randn_like(weight)
    rows = [torch.autograd.grad(out, weight, retain_graph=True)[0] for out in model(x).flatten()]
    expected = sum(2 * row * (row * vector).sum() for row in rows)
    loss = extend(lossfunc)(extend(model, batch_axis=1)(x), y)
    with backpack(GGNMP()):
        loss.backward()
    oracle.assert_close(weight.ggnmp(vector), expected)


class LanguageModel(nn.Module):
    """Tokens ``[T, N]`` to rows of logits ``[T * N, C]``, merged before the head or behind it."""

    def __init__(self, is_merged_first: bool) -> None:
        super().__init__()
        self.is_merged_first = is_merged_first
        self.embed, self.inner, self.head = nn.Embedding(7, D), nn.LSTM(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(self.embed(x))[0]
        if self.is_merged_first:
            result: Tensor = self.head(hidden.view(-1, D))
            return result
        return self.head(hidden).view(-1, C)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("steps", "samples"), [(4, 3), (4, 2), (2, 4), (3, 3), (4, 1), (1, 4)])
@pytest.mark.parametrize("is_merged_first", [True, False])
@pytest.mark.parametrize("is_module", [True, False])
def test_rows_of_steps_and_samples(
    steps: int, samples: int, is_merged_first: bool, is_module: bool
) -> None:
    model, x = LanguageModel(is_merged_first), torch.randint(0, 7, (steps, samples))
    y, parameters = torch.randint(0, C, (steps * samples,)), [*model.parameters()]
    logits, owners = model(x), torch.arange(samples).repeat(steps)
    p = logits.detach().softmax(1)
    hessian = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(y)
    weights = (p - nn.functional.one_hot(y, C)) / len(y)
    extend(model, batch_axis=1)
    lossfunc = nn.CrossEntropyLoss()
    with backpack(BatchGrad(), *([BatchDiagGGNExact()] if is_module else [])):
        (extend(lossfunc) if is_module else lossfunc)(model(x), y).backward()
    for parameter in parameters:
        jacobian = kit.jacobians(logits, {0: parameter})[0]
        gradient = torch.einsum("rc,rc...->r...", weights, jacobian)
        zeros = parameter.new_zeros(samples, *parameter.shape)
        oracle.assert_close(parameter.grad_batch, zeros.index_add(0, owners, gradient))
        if is_module:
            diagonal = torch.einsum("rc...,rcd,rd...->r...", jacobian, hessian, jacobian)
            expected = zeros.index_add(0, owners, diagonal)
            oracle.assert_close(parameter.diag_ggn_exact_batch, expected)


@pytest.mark.parametrize("samples", [3, 4])
def test_rows_of_steps_and_samples_that_mix(samples: int) -> None:
    model, x = extend(LanguageModel(True), batch_axis=1), torch.randint(0, 7, (4, samples))
    logits = model(x)
    loss = (logits[1:] * logits[:-1]).sum()
    with pytest.raises(SampleMixingError, match="influence each other"), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("shape", [(3, 4), (4, 2)])
def test_a_wrong_declaration(shape: tuple[int, int]) -> None:
    """Samples are on axis 0 after all."""
    model = extend(nn.Sequential(nn.Linear(D, D), nn.Flatten(), nn.LazyLinear(C)), batch_axis=1)
    x, y = torch.randn(*shape, D), torch.randint(0, C, shape[:1])
    with pytest.raises(ShapeError, match="entries on axis 0"):
        run(model, x, y, BatchGrad())


def test_a_part_that_has_samples_in_front() -> None:
    """It costs nothing there; and what is no column needs that everywhere."""

    class Net(SequenceFirst):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(torch.tanh(self.inner(self.embed(x).transpose(0, 1))[:, 0]))
            return result

    x, y = data(4, 4)
    model = Net("linear")
    expected = []
    for n in range(4):
        loss = nn.functional.cross_entropy(model(x[:, n : n + 1]), y[n : n + 1])
        expected.append(torch.autograd.grad(loss, [*model.parameters()]))
    extend(model, batch_axis={"": 1, "inner": 0, "head": 0})
    run(model, x, y, BatchGrad())
    for i, parameter in enumerate(model.parameters()):
        oracle.assert_close(parameter.grad_batch, torch.stack([g[i] for g in expected]))
    with pytest.raises(ShapeError, match="has its samples on axis 1"):
        run(model, x, y, KFRA())


@pytest.mark.parametrize(
    "batch_axis", [-1, True, "1", 1.5, None, [1], {"nobody": 1}, {"": "first"}]
)
def test_what_names_no_axis(batch_axis: Any) -> None:
    with pytest.raises(UsageError, match="batch_axis is the number of an axis"):
        extend(nn.Linear(2, 2), batch_axis=batch_axis)


def test_an_axis_that_the_input_does_not_have() -> None:
    model = extend(nn.Linear(2, 2), batch_axis=2)
    with pytest.raises(UsageError, match=r"batch_axis=2\) .* \[3, 2\]"):
        model(torch.randn(3, 2))
    model(torch.randn(4, 5, 3, 2))


class Owner(nn.Module):
    """A model with parameters of its own: a first state, a gate, a table of positions."""

    def __init__(self, kind: str, steps: int) -> None:
        super().__init__()
        self.kind, self.p = kind, nn.Parameter(torch.randn(steps, 1, D))
        self.g = nn.Parameter(torch.randn(D))
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, C)
        self.cell, self.gru = nn.GRUCell(D, D), nn.GRU(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "steps":
            h, out = self.g.expand(x.shape[1], D), []
            for step in x:
                h = self.cell(step, h)
                out.append(h)
            return torch.stack(out)
        if self.kind == "state":
            state = self.g.expand(1, x.shape[1], D).contiguous()
            return self.head(self.gru(x, state)[0])  # type: ignore[no-any-return]
        if self.kind == "gate behind a layer":
            return self.head(torch.tanh(self.embed(x)) * self.g)  # type: ignore[no-any-return]
        if self.kind == "positions":
            return self.head(torch.tanh(self.embed(x)) + self.p)  # type: ignore[no-any-return]
        return self.head(torch.tanh(x * self.g + self.p))  # type: ignore[no-any-return]


@pytest.mark.grid(3)
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize(("steps", "samples"), [(4, 4), (3, 3), (4, 3), (2, 4), (4, 1)])
@pytest.mark.parametrize(
    "kind", ["steps", "state", "gate behind a layer", "positions", "before any layer"]
)
def test_a_module_with_parameters_of_its_own(
    kind: str, steps: int, samples: int, is_module: bool, is_inside: bool
) -> None:
    """The declaration decides, as without these."""
    model: nn.Module = Owner(kind, steps).double()
    x, lossfunc = torch.randn(steps, samples, D).double(), nn.MSELoss(reduction="sum")
    model = extend(nn.Sequential(model) if is_inside else model, batch_axis=1)
    expected = []
    for n in range(samples):
        loss = model(x[:, n : n + 1]).square().sum()
        own = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        expected.append(own)
    with backpack(BatchGrad(), check="always"):
        out = model(x)
        rows = out.flatten(0, 1)
        loss = extend(lossfunc)(rows, torch.zeros_like(rows)) if is_module else out.square().sum()
        loss.backward()
    for parameter, own in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        if own[0] is not None:
            oracle.assert_close(parameter.grad_batch, torch.stack(own))


@pytest.mark.parametrize(
    "turn",
    [Tensor.t, lambda x: x.transpose(0, -1), lambda x: x.permute(0), lambda x: x.movedim(0, 0)],
    ids=["t", "transpose", "permute", "movedim"],
)
def test_one_axis_cannot_be_turned(turn: Callable[[Tensor], Tensor]) -> None:
    model, lossfunc = extend(nn.Linear(D, 1)), extend(nn.MSELoss())
    x, y = torch.randn(4, D), torch.randn(4)
    with backpack(BatchGrad()):
        lossfunc(turn(model(x).squeeze(1)), y).backward()
    residual = 2 / 4 * (model(x).squeeze(1) - y)
    assert torch.allclose(model.weight.grad_batch[:, 0], residual[:, None] * x)
