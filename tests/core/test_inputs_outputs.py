"""What a module receives and returns, and which rule speaks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import (
    AutodiffFallbackWarning,
)
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, classification, mlp


def test_keyword_inputs() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
            h = self.a(input2=right, input1=left)
            result: Tensor = self.b(input=torch.tanh(h))
            return result

    mixed = Mixed()
    model = Net(
        lambda net, x, z: net.m(right=net.r(z), left=net.l(x)),
        m=mixed,
        r=nn.Linear(3, 3),
        l=nn.Linear(3, 3),
    )
    problem = classification(model, (3,))
    problem.inputs = (*problem.inputs, torch.randn(3, 3))
    problem.check()


def test_keyword_inputs_of_the_loss() -> None:
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    problem = classification(model, (3,))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    with backpack(DiagGGNExact()):
        lossfunc(target=problem.target, input=model(problem.inputs[0])).backward()
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("container", ["tuple", "dict", "nested"])
def test_module_that_returns_several_tensors(container: str) -> None:
    def pack(a: Tensor, b: Tensor) -> Any:
        return {"tuple": (a, b), "dict": {"a": a, "b": b}, "nested": [{"x": (a,)}, b]}[container]

    def unpack(value: Any) -> tuple[Tensor, Tensor]:
        if container == "dict":
            return value["a"], value["b"]
        return (value[0]["x"][0], value[1]) if container == "nested" else value

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = unpack(net.leaf(net.stem(x)))
        return net.last(a * b)  # type: ignore[no-any-return]

    leaf = Net(lambda _, x: pack(torch.sin(x), torch.cos(x)))
    model = Net(forward, stem=nn.Linear(3, 4), leaf=leaf, last=nn.Linear(4, 3))
    classification(model, (3,)).check()


def test_module_with_parameters_that_returns_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * self.scale, torch.sin(self.scale + x), x.detach()

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b, _ = net.pair(net.stem(x))
        return net.last(a * b)  # type: ignore[no-any-return]

    model = Net(forward, stem=nn.Linear(3, 4), pair=Pair(), last=nn.Linear(4, 3))
    with pytest.warns(AutodiffFallbackWarning):
        classification(model, (3,)).check()


def test_lstm_with_both_outputs() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        out, (hidden, _) = net.lstm(x)
        return net.last(out[:, -1] + hidden[0] * out[:, 0])  # type: ignore[no-any-return]

    lstm = nn.LSTM(3, 4, batch_first=True)
    classification(Net(forward, lstm=lstm, last=nn.Linear(4, 3)), (2, 3)).check()


class Plain(nn.Linear):
    """No forward of its own."""


class Doubled(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_subclass_without_a_forward_has_its_parents_rule() -> None:
    classification(nn.Sequential(Plain(3, 4), nn.Tanh(), Plain(4, 3)), (3,)).check()


def test_subclass_with_a_forward_has_no_rule_of_its_parent() -> None:
    problem = classification(nn.Sequential(Doubled(3, 4), nn.Tanh(), Doubled(4, 3)), (3,))
    with pytest.warns(AutodiffFallbackWarning, match="Doubled '2' has no layer rule"):
        problem.check()


def test_forward_replaced_on_the_instance() -> None:
    model = mlp()
    plain = model[0].forward
    model[0].forward = lambda x: 3 * plain(x)
    problem = classification(model, (3,))
    reference = classification(
        Net(
            lambda net, x: net.m[2](torch.tanh(3 * F.linear(x, net.m[0].weight, net.m[0].bias))),
            m=mlp(),
        ),
        (3,),
    )
    reference.model.m.load_state_dict(model.state_dict())  # type: ignore[union-attr, operator]
    reference.inputs, reference.target = problem.inputs, problem.target
    expected = reference.expected(oracle.individual_gradients)
    with pytest.warns(AutodiffFallbackWarning):
        problem.run(BatchGrad())
    problem.compare("grad_batch", expected)
