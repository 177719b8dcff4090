"""Nets in which several uses of a parameter have one form, or several: against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    GGNGram,
    SumGradSquared,
)
from backpack_core.testing import Arguments
from backpack_core.testing.nets import Problem as KitProblem
from backpack_core.testing.network import Readout, Shrink, SoftmaxLoss, install_own_rules
from backpack_core.testing.quantities import installed_extensions
from backpack_products.tuning import memory_budget
from backpack_products.tuning import within_budget as budget
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.oracle import assert_close


def tied(function: Callable[..., Tensor], *shared: tuple[str, str], **parts: Module) -> Net:
    """A net of some modules, where some parameters are others."""
    net = Net(function, **parts)
    for name, other in shared:
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, net.get_parameter(other))
    return net


def embedding_and_its_transpose() -> Net:
    return tied(
        lambda net, x: net.readout(net.out(torch.tanh(net.mix(net.table(x).flatten(1))))),
        ("out.weight", "table.weight"),
        table=nn.Embedding(5, 2),
        mix=nn.Linear(6, 2),
        out=nn.Linear(2, 5, bias=False),
        readout=Readout(5),
    )


def convolution_and_its_transpose() -> Net:
    return tied(
        lambda net, x: net.readout(net.up(net.act(net.down(x)))),
        ("up.weight", "down.weight"),
        down=nn.Conv1d(2, 2, 2),
        act=nn.Softplus(),
        up=nn.ConvTranspose1d(2, 2, 2),
        readout=Readout(6),
    )


def linear_on_tokens_and_on_their_mean() -> Net:
    return tied(
        lambda net, x: net.readout(net.a(x).mean(1) + net.b(x.mean(1))),
        ("b.weight", "a.weight"),
        a=nn.Linear(2, 4),
        b=nn.Linear(2, 4),
        readout=Readout(4),
    )


def gain_of_a_norm_and_of_a_scale() -> Net:
    return tied(
        lambda net, x: net.readout(net.scale(x) + net.norm(x)),
        ("scale.weight", "norm.weight"),
        norm=nn.LayerNorm((3, 2)),
        scale=Shrink((3, 2)),
        readout=Readout(6),
    )


def biases_of_a_linear_layer_and_a_norm() -> Net:
    return tied(
        lambda net, x: net.readout(net.norm(net.linear(x))),
        ("norm.bias", "linear.bias"),
        linear=nn.Linear(2, 2),
        norm=nn.LayerNorm(2),
        readout=Readout(6),
    )


def one_layer_three_times() -> Net:
    return Net(
        lambda net, x: net.readout(net.a(net.act(net.a(net.act(net.a(x)))))),
        a=nn.Linear(2, 2),
        act=nn.Tanh(),
        readout=Readout(6),
    )


def one_recurrent_layer_twice() -> Net:
    return Net(
        lambda net, x: net.readout(net.rnn(net.rnn(x)[0])[0]),
        rnn=nn.GRU(2, 2, batch_first=True),
        readout=Readout(6),
    )


def both_outputs_of_a_recurrent_layer() -> Net:
    def forward(net: Net, x: Tensor) -> Tensor:
        steps, last = net.rnn(x)
        return net.readout(steps + last.transpose(0, 1))  # type: ignore[no-any-return]

    return Net(forward, rnn=nn.GRU(2, 2, batch_first=True), readout=Readout(6))


class Outer(Module):
    """A module that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.weight)


def without_and_with_a_rule() -> Net:
    return tied(
        lambda net, x: net.readout(net.linear(net.outer(x))),
        ("outer.weight", "linear.weight"),
        outer=Outer(),
        linear=nn.Linear(2, 2),
        readout=Readout(6),
    )


SHARED = [
    embedding_and_its_transpose,
    convolution_and_its_transpose,
    linear_on_tokens_and_on_their_mean,
    gain_of_a_norm_and_of_a_scale,
    biases_of_a_linear_layer_and_a_norm,
    one_layer_three_times,
    one_recurrent_layer_twice,
    both_outputs_of_a_recurrent_layer,
    without_and_with_a_rule,
]


def kit_problem(make: Callable[[], Net]) -> KitProblem:
    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        torch.manual_seed(0)
        net = make().to(dtype)
        x = torch.randn(4, 2, 3) if make is convolution_and_its_transpose else torch.randn(4, 3, 2)
        if make is embedding_and_its_transpose:
            return net, Arguments((torch.randint(0, 5, (4, 3)),)), SoftmaxLoss()
        return net, Arguments((x.to(dtype),)), SoftmaxLoss()

    install_own_rules()
    may = frozenset({"structure", "second derivative"})
    return KitProblem(build, may)


@pytest.mark.grid(6)
@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("make", SHARED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("subsampling", [None, (2, 0)])
@pytest.mark.parametrize("size", [None, 1], ids=["at once", "column by column"])
def test_every_extension_with_a_shared_parameter(
    make: Callable[[], Net], subsampling: tuple[int, ...] | None, size: int | None
) -> None:
    given = kit_problem(make)
    options = {} if subsampling is None else {"subsampling": list(subsampling)}
    with budget(size or memory_budget()):
        extensions, found = given.run_usable(installed_extensions(**options))
    reference = given.reference if subsampling is None else given.reference.restricted(subsampling)
    given.compare(found, extensions, 1e-10, reference)
    names = {type(extension).__name__ for extension in extensions}
    assert {"BatchGrad", "DiagGGNExact", "GGNGram", "GGNMP", "HMP"} <= names


def test_kronecker_factors_of_shared_weights() -> None:
    """Compared above; here, that they are not refused."""
    for make in (
        linear_on_tokens_and_on_their_mean,
        one_layer_three_times,
        embedding_and_its_transpose,
    ):
        assert kit_problem(make).run_usable([KFAC()])[0]
    given = kit_problem(convolution_and_its_transpose)
    assert not given.run_usable([KFAC()])[0]
    assert "have no common Kronecker factors" in given.refused["KFAC"]


@pytest.mark.parametrize("extension", [DiagHessian, BatchDiagHessian])
def test_hessian_of_parallel_uses_and_of_uses_in_a_row(
    extension: type[DiagHessian] | type[BatchDiagHessian],
) -> None:
    """Parallel ones are exact; in a row, the loss is no function of the sum of both."""
    assert kit_problem(linear_on_tokens_and_on_their_mean).run_usable([extension()])[0]
    given = kit_problem(one_layer_three_times)
    assert not given.run_usable([extension()])[0]
    assert "used again on the way" in given.refused[extension.__name__]


def test_averages_over_the_batch_have_no_sum() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(UnsupportedError, match=r"'weight' of Linear '.' is used 2 times"):
        classification(model, (3,)).run(KFRA())


def two_heads() -> tuple[Net, Problem, Callable[[Module], Tensor]]:
    """Two heads with one weight, each with a loss of its own; and both losses as one."""
    net = tied(
        lambda net, x: torch.cat([net.a(h := torch.tanh(net.stem(x))), net.b(h)], 1),
        ("b.weight", "a.weight"),
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 2),
    )
    x, y, z = torch.randn(5, 3), torch.randint(0, 2, (5,)), torch.randn(5, 2)
    entropy, squares = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss(reduction="sum"))

    def both(_: Net, out: Tensor, __: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(out[:, :2], y) + nn.MSELoss(reduction="sum")(out[:, 2:], z)

    def loss(model: Module) -> Tensor:
        hidden = torch.tanh(model.stem(x))
        return entropy(model.a(hidden), y) + squares(model.b(hidden), z)

    return net, Problem(net, (x,), Net(both), y), loss


def test_two_losses_at_one_weight() -> None:
    """Columns of each loss reach one use only; the gradient is a single column."""
    net, plain, loss = two_heads()
    gradients = plain.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in plain.expected(oracle.ggn_diagonals)]
    extend(net)
    with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact(), GGNGram()):
        loss(net).backward()
    plain.compare("grad_batch", gradients)
    plain.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
    plain.compare("diag_ggn_exact", diagonals)
    blocks = [b.sum(0) for b in plain.expected(oracle.ggn)]
    for parameter, block in zip(plain.parameters, blocks, strict=True):
        found = parameter.ggn_gram.gram.flatten(0, 1).flatten(1)
        assert_close(torch.linalg.matrix_norm(found), torch.linalg.matrix_norm(block))


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("setting", ["kfc", "expand", "reduce"])
def test_kronecker_factors_of_two_losses_at_one_weight(setting: Any, size: int | None) -> None:
    """``B`` adds up over losses, ``A`` has the positions of both uses, in chunks as at once."""
    net, plain, loss = two_heads()
    blocks = dict(zip(plain.parameters, plain.expected(oracle.ggn), strict=True))
    (x,) = plain.inputs
    hidden = torch.tanh(net.stem(x)).detach()
    extend(net)
    with backpack(KFLR(setting, chunk_size=size), EKFAC(None, setting)):
        loss(net).backward()
    outer, inner = net.a.weight.kflr
    assert_close(outer, (blocks[net.a.bias] + blocks[net.b.bias]).sum(0))
    scale = {"kfc": 2, "expand": 1, "reduce": 1}[setting]  # both uses have the same inputs
    assert_close(inner, scale * hidden.T @ hidden / len(hidden))
    basis = net.a.weight.ekfac
    rotation = basis.with_values(torch.ones_like(basis.values)).rotate(
        torch.eye(8).reshape(8, *net.a.weight.shape)
    )
    block = blocks[net.a.weight].sum(0)
    assert_close(basis.values.flatten(), (rotation.T @ block @ rotation).diagonal())
