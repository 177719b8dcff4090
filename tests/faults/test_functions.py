"""Functions with a backward pass of the user's own between modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.own_functions import OPERATIONS, OneSided, Opaque, Weigh
from tests.faults.problems import KINDS, check

pytestmark = [
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_between_modules(name: str, kind: str) -> None:
    net = Net(
        lambda net, x: net.last(OPERATIONS[name](net.first(x)).flatten(1)),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    check(classification(net, (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_inside_a_module_without_a_rule(name: str, kind: str) -> None:
    own = Net(lambda net, x: OPERATIONS[name](x * net.w), w=nn.Parameter(torch.randn(4)))
    layers = [nn.Linear(3, 4), own, nn.Flatten(), nn.Linear(4, 3)]
    check(classification(nn.Sequential(*layers), (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "reduction"), [(1, "mean"), (4, "sum")])
def test_settings(batch: int, reduction: str, kind: str) -> None:
    net = Net(
        lambda net, x: net.last(OPERATIONS["nonlinear"](OPERATIONS["pair"](net.first(x)))),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    check(classification(net, (3,), batch, reduction=reduction), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_among_the_arguments(kind: str) -> None:
    own = Net(
        lambda net, x: Weigh.apply(torch.arange(1.0, 5.0), 2.0, x, True, net.w),
        w=nn.Parameter(torch.randn(4)),
    )
    check(classification(nn.Sequential(nn.Linear(3, 4), own, nn.Linear(4, 3)), (3,)), kind)


# Behind a gradient of ``None`` there is nothing: a quantity of zero, or none.


def compare_or_nothing(problem: Problem, kind: str) -> None:
    """Compare all parameters that have a gradient; the others have zeros at most."""
    problem.run(BatchGrad() if kind == "gradients" else DiagGGNExact())
    field = "grad_batch" if kind == "gradients" else "diag_ggn_exact"
    if kind == "gradients":
        expected = problem.expected(oracle.individual_gradients)
    else:
        expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    for p, values in zip(problem.parameters, expected, strict=True):
        found = getattr(p, field, None)
        if found is None:
            assert not values.any()
        else:
            oracle.assert_close(found, values)


NOTHING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "branch": lambda net, x: net.last(OneSided.apply(net.first(x), net.inner(net.first(x)))),
    "only": lambda net, x: net.last(Opaque.apply(2.0, net.inner(net.first(x)))),
}


INNER: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "activation": nn.Tanh,
    "own": lambda: Net(lambda net, x: x * net.w, w=nn.Parameter(torch.randn(4))),
}


@pytest.mark.parametrize("kind", ["gradients", "curvature"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", NOTHING)
def test_no_gradient(name: str, inner: str, kind: str) -> None:
    parts = {"first": nn.Linear(3, 4), "inner": INNER[inner](), "last": nn.Linear(4, 3)}
    compare_or_nothing(classification(Net(NOTHING[name], **parts), (3,)), kind)


@pytest.mark.parametrize("look_up", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_options_of_gradients_are_refused(option: str, look_up: Callable[..., Tensor]) -> None:
    """Autograd's gradient is then no derivative; the sum over samples would be equal to it."""
    table, index = nn.Parameter(torch.randn(7, 3)), torch.randint(7, (4, 2))
    lossfunc = extend(nn.CrossEntropyLoss())
    output = look_up(index, table, **{option: True})
    output = output.mean(1) if output.dim() == 3 else output
    with pytest.raises(UnsupportedError, match=f"{option} set, which"), backpack(BatchGrad()):
        lossfunc(output, torch.randint(3, (4,))).backward()
