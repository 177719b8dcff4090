"""``backpack(..., samples=index)``: the user says which sample each row belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, ShapeError, UsageError
from backpack_core.extensions import (
    HMP,
    KFRA,
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_operations.carried_ids import CarriedIds
from backpack_products.tuning import memory_budget, set_memory_budget
from tests import oracle
from tests.cases import Net

D, C, T = 3, 3, 2
INDICES = {
    "in order": [0, 1, 2],
    "turned": [2, 0, 1],
    "side by side": [0, 0, 1, 1, 2, 2],
    "pairs": [0, 1, 2, 0, 1, 2],
    "uneven": [0, 2, 1, 0, 2, 2],
    "no multiple": [1, 1, 0, 0, 0, 2, 2],
    "of one": [0, 0, 0],
    "nobody": [0, 3, 3, 0, 1],
}
Rows = Tensor  # which rows take part


def _together(rows: Tensor) -> Tensor:
    """Averages over the rows of each sample, ``[R, R]``."""
    same = (rows[:, None] == rows).to(torch.get_default_dtype())
    return same / same.sum(1, keepdim=True)


@dataclass
class Case:
    """A net, and the loss of some of its rows.

    Attributes:
        net: Makes the model.
        output: What the loss receives, from the model, the data and the samples of its rows.
        data: Makes the data of so many rows.
        rows: How many entries of the loss each row has; zero if each sample has one.
    """

    net: Callable[[], nn.Module]
    output: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda net, x, index: net(x)
    data: Callable[[int], Tensor] = lambda count: torch.randn(count, D)
    rows: int = 1


def _net(function: Callable[..., Any], width: int = 4, **parts: Any) -> nn.Module:
    return Net(function, a=nn.Linear(D, width), b=nn.Linear(width, C), **parts)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _pooled(net: Any, x: Tensor, index: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    count = int(index.max()) + 1 if len(index) else 1
    return net.b(h.new_zeros(count, h.shape[1]).index_add(0, index, h))  # type: ignore[no-any-return]


def _largest(h: Tensor, layer: nn.Module) -> Tensor:
    return torch.tanh(h) + layer(h).max(1, keepdim=True).values  # type: ignore[no-any-return]


def _penalty(net: nn.Module, x: Tensor, index: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    output = net(leaf)
    (gradient,) = torch.autograd.grad(output.sin().sum(), leaf, create_graph=True)
    return output + gradient


CASES = {
    "perceptron": Case(lambda: _net(lambda net, x: net.b(torch.tanh(net.a(x))))),
    "tokens merged": Case(
        lambda: _net(lambda net, x: net.b(torch.tanh(net.a(x)).view(-1, 4))),
        data=lambda count: torch.randn(count, T, D),
        rows=T,
    ),
    "rows of a sample meet": Case(
        lambda: _net(lambda net, x, mean: net.b(torch.tanh(mean @ net.a(x)))),
        output=lambda net, x, index: net(x, _together(index)),
    ),
    "graphs of nodes": Case(lambda: _net(_pooled), lambda net, x, index: net(x, index), rows=0),
    "data are changed first": Case(
        lambda: _net(lambda net, x: net.b(torch.tanh(net.a(x / 2 + 1))))
    ),
    "called twice": Case(
        lambda: _net(lambda net, x: net.b(torch.tanh(net.a(x) * net.a(x.flip(1)))))
    ),
    "a table and a tied weight": Case(
        lambda: _net(
            lambda net, x: ((torch.tanh(net.a(x)) + net.c) @ net.b.weight.T).mean(1) + net.b.bias,
            c=_parameter(T, 4),
        ),
        data=lambda count: torch.randn(count, T, D),
    ),
    "parameters meet data": Case(
        lambda: Net(
            lambda net, x: (x * net.a + net.b) @ net.c,
            a=_parameter(D),
            b=_parameter(D),
            c=_parameter(D, C),
        )
    ),
    "axis 1": Case(
        lambda: Net(lambda net, x: net.b(net.a(x)[0][-1]), a=nn.GRU(D, 4), b=nn.Linear(4, C)),
        lambda net, x, index: net(x.transpose(0, 1).contiguous()),
        lambda count: torch.randn(count, 4, D),
    ),
    "a largest entry": Case(
        lambda: _net(lambda net, x: net.b(_largest(net.a(x), net.c)), c=nn.Linear(4, 4))
    ),
    "penalty": Case(lambda: _net(lambda net, x: net.b(torch.tanh(net.a(x)))), _penalty),
}


PLAIN = pytest.mark.filterwarnings("ignore:Net has no layer rule")


class Told:
    """A case with data whose rows belong to samples."""

    def __init__(self, name: str | Case, index: list[int], reduction: str, is_module: bool) -> None:
        torch.manual_seed(0)
        case = self.case = CASES[name] if isinstance(name, str) else name
        self.index, self.count = torch.tensor(index), max(index) + 1
        self.net = extend(case.net(), batch_axis=1 if name == "axis 1" else 0)
        self.x = case.data(len(index))
        whose = torch.arange(self.count) if not case.rows else self.index
        self.whose = whose.repeat_interleave(max(1, case.rows))
        self.y = torch.randint(C, self.whose.shape)
        self.scale = 1 if reduction == "sum" else 1 / len(self.y)
        self.lossfunc: Any = partial(F.cross_entropy, reduction=reduction)
        if is_module:
            self.lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
        self.parameters = [*self.net.parameters()]
        # Of no rows, a graph has an output all the same.
        self.present = range(self.count) if not case.rows else self.index.unique().tolist()

    def run(self, *extensions: Any, **options: Any) -> None:
        """A pass."""
        loss = self.lossfunc(self.case.output(self.net, self.x, self.index), self.y)
        with backpack(*extensions, samples=self.index, **options):
            loss.backward()

    def output(self, sample: int) -> Tensor:
        """What the net makes of the rows of one sample alone."""
        rows = self.index == sample
        return self.case.output(self.net, self.x[rows], torch.zeros(int(rows.sum()), dtype=int))

    def loss(self, output: Tensor, sample: int) -> Tensor:
        targets = self.y[self.whose == sample]
        return F.cross_entropy(output, targets, reduction="sum") * self.scale

    def gradients(self) -> list[Tensor]:
        """``[M, *θ]`` of each parameter."""
        found = []
        for sample in range(self.count):
            if sample not in self.present:
                found.append([torch.zeros_like(p) for p in self.parameters])
                continue
            loss = self.loss(self.output(sample), sample)
            found.append(torch.autograd.grad(loss, self.parameters))  # type: ignore[arg-type]
        return [torch.stack(each) for each in zip(*found, strict=True)]

    def ggn_diagonals(self) -> list[Tensor]:
        """The same of the diagonals of each sample's Gauss-Newton matrix."""
        found = [torch.zeros(self.count, *p.shape) for p in self.parameters]
        for sample in self.present:
            output = self.output(sample)
            hessian = torch.autograd.functional.hessian(
                partial(self.loss, sample=sample), output.detach()
            ).reshape(output.numel(), output.numel())
            rows = [
                torch.autograd.grad(one, self.parameters, retain_graph=True)
                for one in output.flatten()
            ]
            for total, each in zip(found, zip(*rows, strict=True), strict=True):
                jacobian = torch.stack(each).flatten(1)
                diagonal = torch.einsum("ia,ij,ja->a", jacobian, hessian, jacobian)
                total[sample] = diagonal.view(total.shape[1:])
        return found


@pytest.mark.grid(8)
@PLAIN
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", CASES)
def test_first_order_is_of_the_samples_that_were_told(
    name: str, index: list[int], reduction: str, is_module: bool
) -> None:
    told = Told(name, index, reduction, is_module)
    asked = BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), BatchDotGrad()
    for gradient in ("autograd", "none"):
        told.run(*asked, gradient=gradient)
        for p, grads in zip(told.parameters, told.gradients(), strict=True):
            oracle.assert_close(p.grad_batch, grads)
            oracle.assert_close(p.batch_l2, grads.flatten(1).square().sum(1))
            oracle.assert_close(p.sum_grad_squared, grads.square().sum(0))
            assert (p.variance - grads.var(0, unbiased=False)).abs().max() < 1e-12
            oracle.assert_close(p.batch_dot, grads.flatten(1) @ grads.flatten(1).T)


@pytest.mark.grid(4)
@PLAIN
@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "penalty"])
def test_curvature_is_of_the_samples_that_were_told(
    name: str, index: list[int], size: int | None
) -> None:
    told = Told(name, index, "mean", is_module=True)
    told.run(DiagGGNExact(chunk_size=size), BatchDiagGGNExact(chunk_size=size), SqrtGGNExact())
    for p, diagonals in zip(told.parameters, told.ggn_diagonals(), strict=True):
        oracle.assert_close(p.diag_ggn_exact_batch, diagonals)
        oracle.assert_close(p.diag_ggn_exact, diagonals.sum(0))
        oracle.assert_close(p.sqrt_ggn_exact.square().sum(0), diagonals)


@pytest.mark.grid(4)
@PLAIN
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "penalty"])
def test_full_backward_hooks_change_nothing(name: str, index: list[int]) -> None:
    """They put functions between modules, which hand on what arrives."""
    told = Told(name, index, "mean", is_module=True)
    for module in told.net.children():
        module.register_full_backward_hook(lambda *_: None)
    told.run(BatchGrad(), DiagGGNExact(), check="never")
    grads, diagonals = told.gradients(), told.ggn_diagonals()
    for p, gradient, diagonal in zip(told.parameters, grads, diagonals, strict=True):
        oracle.assert_close(p.grad_batch, gradient)
        oracle.assert_close(p.diag_ggn_exact, diagonal.sum(0))


@PLAIN
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_steps_of_one_sample_behind_hooks() -> None:
    """Only lengths say whose rows there are, and all are of one sample."""
    test_full_backward_hooks_change_nothing("axis 1", INDICES["of one"])


@PLAIN
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_layer_that_makes_weights_has_no_samples(index: list[int], is_hooked: bool) -> None:
    """Its output is as long as the batch, and received parameters alone."""
    width, scale = len(index), _parameter(len(index))
    case = Case(
        lambda: Net(
            lambda net, x: net.b(torch.tanh(net.a(x) * net.c(net.scale))),
            a=nn.Linear(D, width), b=nn.Linear(width, C), c=nn.Linear(width, width), scale=scale,
        )
    )  # fmt: skip
    told = Told(case, index, "mean", is_module=True)
    for module in told.net.children() if is_hooked else ():
        module.register_full_backward_hook(lambda *_: None)
    told.run(BatchGrad(), DiagGGNExact())
    grads, diagonals = told.gradients(), told.ggn_diagonals()
    for p, gradient, diagonal in zip(told.parameters, grads, diagonals, strict=True):
        oracle.assert_close(p.grad_batch, gradient)
        oracle.assert_close(p.diag_ggn_exact, diagonal.sum(0))


def _steps(count: int) -> Tensor:
    return torch.arange(count)


# By the net, a tensor ``[R, R]`` that is made of ``net.c``, a layer, and ``net.d``, ``[R, R]``.
AS_LONG: dict[str, Callable[[Any, int], Tensor]] = {
    "table": lambda net, count: net.c(_steps(count)),
    "table of one row": lambda net, count: net.c(_steps(count).unsqueeze(0))[0],
    "picked": lambda net, count: net.d[_steps(count)],
    "masked": lambda net, count: net.d.masked_fill(_steps(count) > 1, 0.5),
    "of a layer": lambda net, count: nn.functional.linear(net.d, net.c.weight),
}


@PLAIN
@pytest.mark.parametrize("index", [INDICES["side by side"], INDICES["uneven"]])
@pytest.mark.parametrize(
    ("name", "is_added"),
    [*((name, True) for name in AS_LONG), ("picked", False), ("masked", False)],
)
def test_tables_as_long_as_the_batch(name: str, is_added: bool, index: list[int]) -> None:
    """They are added to the positions of each row, or multiply its vectors."""
    width = len(index)

    def forward(net: Any, x: Tensor) -> Tensor:
        h, table = net.a(x), AS_LONG[name](net, width)
        h = torch.tanh(h.unsqueeze(1) + table).mean(1) if is_added else torch.tanh(h) @ table
        return net.b(h)  # type: ignore[no-any-return]

    layers = {"a": nn.Linear(D, width), "b": nn.Linear(width, C), "c": nn.Embedding(width, width)}
    told = Told(
        Case(lambda: Net(forward, **layers, d=_parameter(width, width))), index, "mean", True
    )
    if name in ("picked", "masked"):
        told.net.c.requires_grad_(False)
    told.run(BatchGrad(), DiagGGNExact())
    told.parameters = [p for p in told.parameters if hasattr(p, "grad_batch")]
    grads, diagonals = told.gradients(), told.ggn_diagonals()
    for p, gradient, diagonal in zip(told.parameters, grads, diagonals, strict=True):
        oracle.assert_close(p.grad_batch, gradient)
        oracle.assert_close(p.diag_ggn_exact, diagonal.sum(0))


ALONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added to data": lambda h, x: h + x,
    "times ones": lambda h, x: h * torch.ones(len(x), 1),
    "times data": lambda h, x: (h * (0 * x + 1)).exp(),
}


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("index", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]])
@pytest.mark.parametrize("name", ALONE)
def test_a_small_layer_of_a_function_of_the_data_is_not_a_table(
    name: str, index: list[int], is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows follow the index; if nobody follows them, they are not taken to be in order."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(ALONE[name](net.a(x.sin()), x))  # type: ignore[no-any-return]

    layers = {"a": nn.Linear(D, D), "b": nn.Linear(D, 16 * C)}
    told = Told(Case(lambda: Net(forward, **layers)), index, "mean", is_module=True)
    if not is_followed:
        monkeypatch.setattr(CarriedIds, "at", lambda self, output: None)
        with pytest.raises(ShapeError, match="samples="):
            told.run(BatchGrad())
        return
    told.run(BatchGrad())
    for p, grads in zip(told.parameters, told.gradients(), strict=True):
        oracle.assert_close(p.grad_batch, grads)


@pytest.mark.parametrize("index", [INDICES["uneven"], INDICES["pairs"]])
def test_as_many_passes_as_are_trusted(index: list[int]) -> None:
    told = Told("perceptron", index, "mean", is_module=True)
    for turn in range(5):
        told.index = told.whose = torch.tensor(index).roll(turn)
        told.run(BatchGrad())
        for p, grads in zip(told.parameters, told.gradients(), strict=True):
            oracle.assert_close(p.grad_batch, grads)


def test_little_memory_changes_nothing() -> None:
    told, before = Told("tokens merged", INDICES["uneven"], "sum", is_module=True), memory_budget()
    try:
        set_memory_budget(1)
        told.run(BatchGrad(), BatchDiagGGNExact())
    finally:
        set_memory_budget(before)
    for p, grads, diagonals in zip(
        told.parameters, told.gradients(), told.ggn_diagonals(), strict=True
    ):
        oracle.assert_close(p.grad_batch, grads)
        oracle.assert_close(p.diag_ggn_exact_batch, diagonals)


PAIRS: dict[str, tuple[list[int], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "halves": ([0, 1, 2, 0, 1, 2], lambda z: (z[: len(z) // 2], z[len(z) // 2 :])),
    "chunks": ([0, 1, 2, 0, 1, 2], lambda z: z.chunk(2)),  # type: ignore[dict-item, return-value]
    "steps": ([0, 0, 1, 1, 2, 2], lambda z: (z[::2], z[1::2])),
    "view": ([0, 0, 1, 1, 2, 2], lambda z: z.view(-1, 2).unbind(1)),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize(("index", "split"), PAIRS.values(), ids=PAIRS)
def test_a_preferred_and_a_rejected_answer_are_one_sample(
    index: list[int], split: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    told = Told("perceptron", index, "sum", is_module=False)

    def loss(x: Tensor) -> Tensor:
        chosen, rejected = split(told.net(x).logsumexp(1))
        return -F.logsigmoid(chosen - rejected).sum()

    value = loss(told.x)
    with backpack(BatchGrad(), samples=index):
        value.backward()
    for n in range(3):
        alone = torch.autograd.grad(loss(told.x[told.index == n]), told.parameters)
        for p, grad in zip(told.parameters, alone, strict=True):
            oracle.assert_close(p.grad_batch[n], grad)


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda net, x: net.b(torch.tanh(net.a(x)) - net.a(x).mean(0)),
    "reverse": lambda net, x: net.b(torch.tanh(net.a(x)).flip(0) + net.a(x)),
    "roll": lambda net, x: net.b(torch.tanh(net.a(x)).roll(1, 0) * net.a(x)),
    "softmax": lambda net, x: net.b(net.a(x).softmax(0)),
    "matrix": lambda net, x: net.b(torch.ones(len(x), len(x)) @ net.a(x)),
}


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("index", [[0, 2, 1, 0, 2, 2], [0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("function", MIXING.values(), ids=MIXING)
def test_samples_that_influence_each_other_raise(
    function: Callable[[Any, Tensor], Tensor], index: list[int], is_module: bool
) -> None:
    net, y = extend(_net(function)), torch.randint(C, (len(index),))
    lossfunc: Any = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    loss = lossfunc(net(torch.randn(len(index), D)), y)
    with pytest.raises(SampleMixingError), backpack(BatchGrad(), samples=index):
        loss.backward()


@pytest.mark.parametrize("chosen", [[2, 0], [1, 1], [-1]])
@pytest.mark.parametrize("name", ["in order", "turned", "side by side", "pairs", "no multiple"])
def test_some_of_the_samples(name: str, chosen: list[int]) -> None:
    told = Told("graphs of nodes", INDICES[name], "mean", is_module=True)
    told.run(BatchGrad(subsampling=chosen), BatchDiagGGNExact(subsampling=chosen))
    for p, grads, diagonals in zip(
        told.parameters, told.gradients(), told.ggn_diagonals(), strict=True
    ):
        oracle.assert_close(p.grad_batch, grads[chosen])
        oracle.assert_close(p.diag_ggn_exact_batch, diagonals[chosen])


@pytest.mark.parametrize("chosen", [[0], [2, 0], [1, 1]])
def test_some_of_the_samples_of_a_loss_of_several_rows(chosen: list[int]) -> None:
    told = Told("perceptron", INDICES["no multiple"], "mean", is_module=True)
    told.run(BatchGrad(subsampling=chosen), BatchDiagGGNExact(subsampling=chosen))
    for p, grads, diagonals in zip(
        told.parameters, told.gradients(), told.ggn_diagonals(), strict=True
    ):
        oracle.assert_close(p.grad_batch, grads[chosen])
        oracle.assert_close(p.diag_ggn_exact_batch, diagonals[chosen])


def test_products_with_the_whole_hessian_ask_for_no_samples() -> None:
    told = Told("perceptron", INDICES["uneven"], "mean", is_module=True)
    told.run(HMP())
    plain = Told("perceptron", INDICES["uneven"], "mean", is_module=True)
    with backpack(HMP()):
        plain.lossfunc(plain.net(plain.x), plain.y).backward()
    for p, q in zip(told.parameters, plain.parameters, strict=True):
        v = torch.randn_like(p)
        oracle.assert_close(p.hmp(v), q.hmp(v))


WRONG: dict[str, Any] = {
    "a number": 3,
    "words": ["a", "b"],
    "fractions": [0.0, 1.0],
    "negative": [0, -1],
    "two axes": torch.zeros(2, 2, dtype=torch.long),
    "truth": torch.ones(4, dtype=torch.bool),
}


@pytest.mark.parametrize("index", WRONG.values(), ids=WRONG)
def test_what_is_no_index_is_refused(index: Any) -> None:
    with pytest.raises(UsageError, match="samples=index gives the sample of each row"):
        backpack(BatchGrad(), samples=index)


def test_another_number_of_rows_is_refused() -> None:
    told = Told("perceptron", INDICES["uneven"], "mean", is_module=True)
    told.index = told.index[:-1]
    with pytest.raises(UsageError, match=r"has 5 entries.*received 6 rows"):
        told.run(BatchGrad())


def test_a_loss_of_some_rows() -> None:
    net, lossfunc = extend(_net(lambda net, x: net.b(net.a(x))[:5])), extend(nn.CrossEntropyLoss())
    loss = lossfunc(net(torch.randn(7, D)), torch.randint(C, (5,)))
    with backpack(BatchGrad(), samples=[1, 1, 0, 0, 0, 2, 2]):
        loss.backward()
    assert len(net.a.bias.grad_batch) == 3
    loss = lossfunc(net(torch.randn(6, D)), torch.randint(C, (5,)))
    with pytest.raises(UsageError), backpack(BatchGrad(), samples=[1, 1, 0, 0, 0, 2, 2]):
        loss.backward()


WEIGHTED: dict[str, Callable[..., Tensor]] = {
    "module": lambda net, x: net.a(x).tanh(),
    "its weight": lambda net, x: F.linear(x, net.a.weight).tanh(),
}


@pytest.mark.parametrize("lossfunc", [nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss()])
@pytest.mark.parametrize("way", WEIGHTED)
@pytest.mark.parametrize("picked", [[0, 6, 2], [3, 5, 4], [8, 0, 1, 7, 2, 6], [1]])
@pytest.mark.parametrize("index", [[0, 1, 0], [1, 0, 1], [0, 0, 1], [0, 1, 2]])
def test_entries_that_are_picked_from_one_sample(
    index: list[int], picked: list[int], way: str, lossfunc: nn.Module
) -> None:
    """They may be as many as the rows of the model's input; what belongs to whom is known."""
    net = Net(WEIGHTED[way], a=nn.Linear(D, C, bias=False)).double()
    x, told, places = torch.randn(3, 3, D).double(), torch.tensor(index), torch.tensor(picked)
    places, samples = (places // 3, places % 3), told[places // 3]
    is_of_classes = isinstance(lossfunc, nn.CrossEntropyLoss)
    y = torch.randint(C, (len(picked),)) if is_of_classes else torch.randn(len(picked), C).double()
    logits = net(x).movedim(1, -1)[places]
    scale = len(picked) if is_of_classes else 1
    each = F.cross_entropy if is_of_classes else partial(F.mse_loss, reduction="sum")
    expected = torch.zeros(max(index) + 1, C, D).double()
    for z, target, sample in zip(logits, y, samples, strict=True):
        term = each(z, target) / scale
        expected[sample] += torch.autograd.grad(term, net.a.weight, retain_graph=True)[0]
    extend(net)
    with backpack(BatchGrad(), samples=told):
        extend(lossfunc)(net(x).movedim(1, -1)[places], y).backward()
    oracle.assert_close(net.a.weight.grad_batch, expected)


LISTS: dict[str, tuple[list[int], list[Any]]] = {
    "of one each": ([2, 3, 1], [0, 1, 2]),
    "turned": ([2, 3, 2], [2, 0, 1]),
    "several of one": ([3, 1, 2, 2], [0, 1, 1, 0]),
    "as long as the list": ([3, 2, 3], [1, 1, 0]),
    "rows": ([2, 3], [torch.tensor([0, 1]), torch.tensor([1, 2, 0])]),
    "rows and one": ([2, 3], [torch.tensor([1, 0]), 2]),
    "one row": ([1, 1], [1, 0]),
}


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("function", [torch.cat, lambda xs: torch.cat(xs) / 2 + 1])
@pytest.mark.parametrize(("sizes", "told"), LISTS.values(), ids=LISTS)
def test_tensors_of_a_list_belong_to_the_samples_that_were_told(
    sizes: list[int], told: list[Any], function: Callable[[Any], Tensor], is_module: bool
) -> None:
    torch.manual_seed(0)
    net = extend(_net(lambda net, xs: net.b(torch.tanh(net.a(function(xs))))))
    lossfunc: Any = partial(F.cross_entropy, reduction="sum")
    if is_module:
        lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    items = [torch.randn(size, D) for size in sizes]
    whose = torch.cat([torch.as_tensor(t).expand(n) for t, n in zip(told, sizes, strict=True)])
    y = torch.randint(C, whose.shape)
    loss = lossfunc(net(items), y)
    asked = [BatchGrad(), BatchL2Grad(), *([BatchDiagGGNExact()] if is_module else [])]
    with backpack(*asked, samples=told):
        loss.backward()
    assert len(net.a.bias.grad_batch) == int(whose.max()) + 1
    for sample in range(int(whose.max()) + 1):
        rows = whose == sample
        alone = F.cross_entropy(net([torch.cat(items)[rows]]), y[rows], reduction="sum")
        grads = torch.autograd.grad(alone, [*net.parameters()])
        for p, grad in zip(net.parameters(), grads, strict=True):
            oracle.assert_close(p.grad_batch[sample], grad)
            oracle.assert_close(p.batch_l2[sample], grad.square().sum())


def test_a_list_with_other_entries_than_tensors_is_refused() -> None:
    net = extend(_net(lambda net, xs: net.b(net.a(torch.cat(xs)))))
    loss = net([torch.randn(2, D), torch.randn(3, D)]).square().sum()
    with pytest.raises(UsageError, match=r"has 3 entries.*2 with \[2, 3\] rows"):  # noqa: SIM117
        with backpack(BatchGrad(), samples=[0, 1, 1]):
            loss.backward()


def test_a_quantity_that_needs_one_row_for_each_sample_says_so() -> None:
    told = Told("perceptron", INDICES["uneven"], "mean", is_module=True)
    with pytest.raises(ShapeError, match=r"6 rows, which are those of 3 samples.*Leave samples="):
        told.run(KFRA())


def _pairs(net: Any, x: Tensor) -> Tensor:
    """Rows in pairs, one prediction for each pair."""
    result: Tensor = net.b(torch.tanh(net.a(x)).unflatten(0, (-1, 2)).sum(1))
    return result


# A right index comes first: what its pass shows says nothing about others.
@pytest.mark.parametrize("is_right_before", [True, False])
@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
@pytest.mark.parametrize("index", [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 2, 2]])
def test_an_index_of_other_samples_than_the_model_puts_together_raises(
    index: list[int], extension: Any, is_right_before: bool
) -> None:
    net, lossfunc = extend(_net(_pairs)), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(6, D), torch.randint(C, (3,))
    for right in 3 * [[0, 0, 1, 1, 2, 2]] if is_right_before else ():
        with backpack(extension(), samples=torch.tensor(right)):
            lossfunc(net(x), y).backward()
    with (
        pytest.raises(SampleMixingError, match="First look whether the index"),
        backpack(extension(), samples=torch.tensor(index)),
    ):
        lossfunc(net(x), y).backward()
