"""Whether samples stay apart is measured: what is found, what is not, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_checks.dye import DyePropagator
from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UnsupportedError, UsageError
from backpack_core.extensions import BatchGrad, DiagGGNExact, DiagGGNMC
from backpack_core.testing import temporary_plugin
from backpack_layers.loss_regression import MSELossRule
from tests import oracle
from tests.cases import Net, classification, mlp
from tests.core.functional import VmapCube

N, T = 4, 4
Loss = Callable[[Tensor], Tensor]


def run(model: nn.Module, loss: Loss, *extensions: Any, **options: Any) -> Any:
    """One pass of a model on sequences ``[N, T, 3]``."""
    value = loss(extend(model)(torch.randn(N, T, 3)))
    with backpack(*(extensions or (BatchGrad(),)), **options):
        value.backward()
    return list(model.parameters())


# What mixes samples, or looks as if it had some.


def _graph(net: Any, x: Tensor) -> Tensor:
    adjacency = torch.ones(N, N).tril() / N
    return net.b((adjacency @ net.a(x).flatten(1)).view(N, T, 3))  # type: ignore[no-any-return]


def _centred(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h - h.mean(0))  # type: ignore[no-any-return]


def _taken_apart(net: Any, x: Tensor) -> Tensor:
    return net.b(sum(map(torch.tanh, net.a(x).unbind(0))))  # type: ignore[no-any-return]


def _turned(net: Any, x: Tensor) -> Tensor:
    first, *_ = net.a(x).unflatten(2, (3, 1)).permute(2, 1, 0, 3).unbind(0)
    return net.b(torch.tanh(first).expand(N, T, 3))  # type: ignore[no-any-return]


NETS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "taken_apart": _taken_apart,
    "turned": _turned,
    "graph": _graph,
    "centred": _centred,
}


def net(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two linear layers of width 3."""
    return Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))


def test_stacked_queries_keys_and_values() -> None:
    """Samples are off the first axis for a while."""

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.qkv(x).unflatten(2, (3, 1, 3)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(*parts.unbind(0))
        return net.b(h.squeeze(1).mean(1))  # type: ignore[no-any-return]

    parts = {"qkv": nn.Linear(3, 9), "b": nn.Linear(3, 3)}
    classification(Net(forward, **parts), (T, 3), N).check(second=False, check="always")


def squares(output: Tensor) -> Tensor:
    """An extended loss."""
    loss: Tensor = extend(nn.MSELoss())(output, torch.zeros_like(output))
    return loss


@pytest.mark.parametrize("loss", [squares, lambda output: output.square().mean()])
@pytest.mark.parametrize("name", NETS)
def test_gradients_of_samples_that_do_not_exist(name: str, loss: Loss) -> None:
    with pytest.raises(SampleMixingError, match=r"Between Linear '[ab]' and what uses its output"):
        run(net(NETS[name]), loss)


@pytest.mark.parametrize("name", NETS)
def test_curvature_of_samples_that_do_not_exist(name: str) -> None:
    with pytest.raises(SampleMixingError, match=r"Between Linear '[ab]' and what uses its output"):
        run(net(NETS[name]), squares, DiagGGNExact())


SPLIT: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "stacked": lambda h, p: torch.stack([h, p]).sin().unbind(0),
    "joined": lambda h, p: torch.cat([h, p[1:]]).sin().split([N, N - 1]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_parts_beside_those_of_a_parameter(name: str) -> None:
    """The columns of one part are kept apart, as it has no samples; the other part has some."""
    is_centred = False

    def forward(net: Any, x: Tensor) -> Tensor:
        h, p = SPLIT[name](net.a(x).flatten(1), net.p)
        return (h - h.mean(0) if is_centred else h) + p.sum(0)

    model = Net(forward, a=nn.Linear(3, 3), p=nn.Parameter(torch.randn(N, 3 * T)))
    run(model, squares)
    is_centred = True
    with pytest.raises(SampleMixingError, match=r"Between the operation \w+ and its result"):
        run(model, squares)


def test_nothing_is_said_if_nothing_is_asked() -> None:
    run(net(_centred), squares, check="never")
    with pytest.raises(UsageError, match="check is one of first, always, never"):
        backpack(BatchGrad(), check="sometimes")  # type: ignore[arg-type]


@pytest.mark.host("a default device has a line of its own")
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_the_line_is_named_in_anomaly_mode() -> None:
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(SampleMixingError, match=r"Mean \[.*test_dye\.py:\d+\]"),
    ):
        run(net(_centred), squares)


# Functional losses: samples where they are guessed to be.


def _contrastive(output: Tensor) -> Tensor:
    z = output.flatten(1)
    return F.cross_entropy(z @ z.mT, torch.arange(N))


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "contrastive": _contrastive,
    "statistic": lambda output: output.mean(0).square().sum(),
    "spread": lambda output: output.std(0).sum(),
    "even": lambda output: output[:, :2, :2].mean(0).square().sum(),
    "log_of_means": lambda output: output.square().mean((0, 1)).log().sum(),
    "ratio": lambda output: output.sum() / (output.exp().sum() + 1),
    "product": lambda output: output[..., 0].mean() * output[..., 1].exp().mean(),
    "variance": lambda output: output.var(),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda output: output.square().mean(),
    "by_position": lambda output: F.cross_entropy(output.flatten(0, 1), torch.arange(N * T) % 3),
    "time_first": lambda output: F.cross_entropy(
        output.transpose(0, 1).flatten(0, 1), torch.arange(N * T) % 3
    ),
    "transposed": lambda output: output.permute(2, 1, 0).exp().mean(),
    "last": lambda output: output[:, -1].logsumexp(1).sum(),
    "root": lambda output: output.square().mean().sqrt(),
    "ratios": lambda output: sum(y.sum() / y.exp().sum() for y in output),
    "ratios_behind_a_function": lambda output: sum(
        y.sum() / y.exp().sum() for y in VmapCube.apply(output)
    ),
    "rescaled": lambda output: output.exp().sum() * torch.rand((), requires_grad=True).exp(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_is_no_sum(name: str) -> None:
    with pytest.raises(SampleMixingError):
        run(nn.Linear(3, 3), COUPLED[name])


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_is_a_sum(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    for parameter in run(model, SUMS[name]):
        oracle.assert_close(parameter.grad_batch.sum(0), parameter.grad)


# Terms beside the loss.


BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "penalty": lambda output: 0.1 * output.square().sum(),
    "divergence": lambda output: 0.1 * (output.log_softmax(2).exp() * output).sum(),
}


@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_curvature_with_a_term_beside_the_loss(name: str, first: bool, batch: int) -> None:
    model = extend(nn.Linear(3, 3))
    output = model(torch.randn(batch, T, 3))
    beside, loss = BESIDE[name](output), squares(output)
    with pytest.raises(UnsupportedError, match="by a term beside them"), backpack(DiagGGNExact()):
        (beside + loss if first else loss + beside).backward()


@pytest.mark.parametrize("name", BESIDE)
def test_gradients_with_a_term_beside_the_loss(name: str) -> None:
    for parameter in run(nn.Linear(3, 3), lambda output: squares(output) + BESIDE[name](output)):
        oracle.assert_close(parameter.grad_batch.sum(0), parameter.grad)


# In which passes.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was measured so far, as the length."""
    found: list[int] = []
    original = DyePropagator.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        found.append(1)
        original(self, *args, **options)

    monkeypatch.setattr(DyePropagator, "__init__", init)
    return found


def test_passes_that_are_measured(measured: list[int]) -> None:
    problem = classification(mlp(), (3,))
    counts = []
    for _ in range(17):
        problem.run(BatchGrad())
        counts.append(len(measured))
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5]
    for check, more in (("never", 0), ("always", 3)):
        before = len(measured)
        for _ in range(3):
            problem.run(BatchGrad(), check=check)
        assert len(measured) == before + more


class Centred(nn.MSELoss):
    """Not a sum over samples, which its rule claims."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input - input.mean(0), target)


class CentredRule(MSELossRule):
    module_types = (Centred,)


def _against(lossfunc: nn.Module, model: nn.Module, **options: Any) -> None:
    loss = extend(lossfunc)(extend(model)(torch.randn(N, 3)), torch.zeros(N, 3))
    with backpack(BatchGrad(), **options):
        loss.backward()


def test_a_rule_of_a_loss_is_not_believed_before_a_pass_went_well() -> None:
    model = nn.Linear(3, 3)
    with temporary_plugin(CentredRule):
        for _ in range(3):
            with pytest.raises(SampleMixingError, match="axis 0"):
                _against(Centred(), model)


def test_nodes_of_losses_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, original = list[bool](), DyePropagator.goes_inside

    def noted(self: DyePropagator, quantity: Any) -> bool:
        found.append(original(self, quantity))
        return found[-1]

    monkeypatch.setattr(DyePropagator, "goes_inside", noted)
    model = nn.Linear(3, 3)
    for _ in range(5):
        _against(nn.MSELoss(), model)
    assert found == [True, False, False]  # in the passes 1, 2 and 4
    _against(nn.MSELoss(), model, check="always")
    assert found[3:] == [True]


def test_another_structure_is_measured_anew(measured: list[int]) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.b(torch.tanh(h) if net.branch else h)  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.branch = False  # type: ignore[assignment]
    for _ in range(4):
        run(model, squares)
    assert len(measured) == 3
    model.branch = True  # type: ignore[assignment]
    run(model, squares)
    assert len(measured) == 4


@pytest.mark.parametrize("is_shut", [False, True])
def test_a_state_of_zeros_hides_nothing_but_a_gate_does(measured: list[int], is_shut: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        weight = net.weight * net.gate if is_shut else net.weight
        state = x.new_zeros(N, 3)
        for entry in net.a(x).unbind(1):
            state = torch.tanh(entry + state @ weight.T)
        return state

    model = Net(forward, a=nn.Linear(3, 3))
    model.weight = nn.Parameter(torch.randn(3, 3))
    model.register_buffer("gate", torch.zeros(()))
    model = nn.Sequential(model, nn.Linear(3, 2))
    lossfunc = extend(nn.CrossEntropyLoss())
    for _ in range(4):
        run(model, lambda output: lossfunc(output, torch.zeros(N).long()), DiagGGNMC())
    assert len(measured) == (4 if is_shut else 3)


def test_other_lengths_are_the_same_structure(measured: list[int]) -> None:
    model = extend(nn.Linear(3, 3))
    for length in (5, 6, 7, 8):
        output = model(torch.randn(N, length, 3))
        with backpack(BatchGrad()):
            squares(output).backward()
    assert len(measured) == 3


def test_after_an_error_it_is_measured_again() -> None:
    """Who runs a cell once more after an error gets the error again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return h + h.roll(net.shift, 0)  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 3))
    model.shift = 0  # type: ignore[assignment]
    for _ in range(4):
        run(model, squares)
    model.shift = 1  # type: ignore[assignment]
    for _ in range(5):
        with pytest.raises(SampleMixingError):
            run(model, squares)


@pytest.mark.parametrize("whole", [False, True])
def test_merged_positions_and_as_many_classes_as_samples(whole: bool) -> None:
    lossfunc = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, N))
    inputs, target = torch.randn(N, 3, 3), torch.randint(0, N, (3 * N,))
    logits = extend(model)(inputs)
    loss = (extend(lossfunc) if whole else F.cross_entropy)(logits.flatten(0, 1), target)
    with backpack(BatchGrad(), check="always"):
        loss.backward()
    for n in range(N):
        own = F.cross_entropy(model(inputs[n]), target[3 * n : 3 * n + 3]) / N
        for parameter, expected in zip(
            model.parameters(), torch.autograd.grad(own, list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(parameter.grad_batch[n], expected)  # type: ignore[attr-defined]


# What it must not do.


def test_random_numbers_are_the_same() -> None:
    results = []
    for check in ("never", "always"):
        torch.manual_seed(1)
        problem = classification(mlp(), (3,))
        torch.manual_seed(2)
        problem.run(DiagGGNMC(), check=check)
        results.append([*problem.fields("diag_ggn_mc"), torch.rand(2)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_effects_come_once() -> None:
    calls = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            calls.append(1)
            return 2 * grad

    run(net(lambda net, x: net.b(Double.apply(net.a(x)))), squares, check="always")
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_left_alone(reentrant: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: torch.tanh(net.a(y)), net.b(x), use_reentrant=reentrant)
        return h.exp()  # type: ignore[no-any-return]

    for parameter in run(net(forward), squares, check="always"):
        oracle.assert_close(parameter.grad_batch.sum(0), parameter.grad)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_false_alarm(dtype: torch.dtype, scale: float) -> None:
    """Attention with residuals, in every precision: gradients that nearly cancel included."""
    scale = scale if dtype in (torch.float64, torch.float32) else scale**0.2

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x + net.a(x))
        scores = (net.q(h) @ net.k(h).mT).softmax(-1)
        return x + net.b(scores @ h) + net.a(h)  # type: ignore[no-any-return]

    layers = {name: nn.Linear(8, 8) for name in "abqk"}
    model = extend(Net(forward, norm=nn.LayerNorm(8), **layers)).to(dtype)
    output = model(torch.randn(N, 6, 8, dtype=dtype))
    with backpack(BatchGrad(), DiagGGNMC(), check="always"):
        (scale * squares(output)).backward()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1e-40), (torch.float16, 2.0**-18)])
def test_numbers_below_the_normal_range(dtype: torch.dtype, factor: float) -> None:
    """They have few digits left, so the columns differ by more than a normal rounding error."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).to(dtype)
        with torch.no_grad():
            model[2].weight.mul_(factor)
        extend(model), extend(lossfunc := nn.CrossEntropyLoss())
        loss = lossfunc(model(torch.randn(4, 2, dtype=dtype)), torch.randint(3, (4,)))
        with backpack(DiagGGNExact()):
            loss.backward()
