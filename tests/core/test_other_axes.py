"""Samples that leave axis 0 for a while, as in ``einsum``, and parameters of a single number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, ShapeError, UnsupportedError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Net, classification

T, H, D = 3, 2, 2


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(2, (H, D)).transpose(1, 2)


def _distances(net: Any, q: Tensor) -> Tensor:
    steps = torch.arange(T)
    table: Tensor = net.table(steps.unsqueeze(1) - steps + T)
    return torch.einsum("bhnd,nrd->bhnr", q, table)


def _relative(net: Any, x: Tensor) -> Tensor:
    """Two ways to the query, one of them past a table of distances."""
    q, k = _heads(net.a(x)), _heads(net.b(x))
    return _distances(net, q) + torch.einsum("bhid,bhjd->bhij", q, k)


def _passed_by(net: Any, x: Tensor) -> Tensor:
    q = _heads(net.a(x))
    return torch.cat([_distances(net, q), q], 3)


def _merged_heads(net: Any, x: Tensor) -> Tensor:
    """Modules without parameters between nodes that have samples on other axes."""
    q, k, v = (_heads(m(x)).flatten(0, 1) for m in (net.a, net.b, net.c))
    weights = net.softmax(torch.einsum("bid,bjd->bij", q, k))
    return torch.einsum("bij,bjd->bid", weights, v).unflatten(0, (-1, H))


def _by_position(net: Any, x: Tensor) -> Tensor:
    """Matrices of their own for every position, of which there may be as many as samples."""
    return torch.einsum("bti,tio->bto", torch.tanh(net.a(x)), net.coefficients)


def _sequence_first(net: Any, x: Tensor) -> Tensor:
    """Projections are packed on a first axis of three, of which samples know nothing."""
    h, _ = net.recurrent(torch.cat([x, x.cos()], 1).transpose(0, 1))
    h, _ = net.attention(h, h, h)
    result: Tensor = net.c(h).transpose(0, 1)
    return result


def _packed(net: Any, x: Tensor) -> Tensor:
    """Two projections on a first axis, of positions that are merged with the samples."""
    h = torch.tanh(net.a(x).flatten(0, 1) + net.coefficients[0, :, 0])
    q, k = h.unflatten(1, (2, D)).permute(1, 0, 2).unbind(0)
    result: Tensor = (q * k).unflatten(0, (-1, T))
    return result


def _draws_first(net: Any, x: Tensor) -> Tensor:
    """Several draws of every sample on the first axis, as many as samples by chance."""
    draws = torch.linspace(-1, 1, T * D).view(T, 1, D)
    z = net.a(x[:, 0]).unflatten(1, (H, D))[:, 0] * draws
    return net.narrow(z.flatten(0, 1)).view(T, len(x), -1).logsumexp(0)  # type: ignore[no-any-return]


def _axial(net: Any, x: Tensor) -> Tensor:
    """A softmax along one axis, on the first place; samples and the other one are merged."""
    h = net.a(x.flatten(0, 1)).view(-1, T, H, D).transpose(0, 1).reshape(T, -1, D)
    h = h * net.square(h).sin().softmax(0).sqrt()
    return h.view(T, len(x), H, D).mean(0)  # type: ignore[no-any-return]


def _gated_over_steps(net: Any, x: Tensor) -> Tensor:
    """A matrix over positions, of which there may be as many as samples."""
    u, v = net.a(x).chunk(2, -1)
    v = torch.einsum("ts,nsd->ntd", net.coefficients[:, 0], net.square(v))
    return net.narrow((u * v).mean(1))  # type: ignore[no-any-return]


NETS = {"relative": _relative, "passed_by": _passed_by, "merged_heads": _merged_heads}
NETS |= {"by_position": _by_position, "sequence_first": _sequence_first, "packed": _packed}
NETS |= {"draws_first": _draws_first, "axial": _axial, "gated_over_steps": _gated_over_steps}


@pytest.mark.grid(3)
@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("samples", [1, 2, T, 4])
@pytest.mark.parametrize("name", NETS)
def test_other_axes(name: str, samples: int, check: str) -> None:
    layers = {letter: nn.Linear(2, H * D, bias=letter != "b") for letter in "abc"}
    coefficients = nn.Parameter(torch.randn(T, H * D, 3))
    net = Net(
        lambda net, x: NETS[name](net, x).flatten(1),
        **layers,
        table=nn.Embedding(2 * T, D),
        softmax=nn.Softmax(-1),
        narrow=nn.Linear(D, 3),
        square=nn.Linear(D, D),
        coefficients=coefficients,
        recurrent=nn.GRU(2, 2),
        attention=nn.MultiheadAttention(2, 1, bias=False),
    )
    _check(net, torch.randn(samples, T, 2), check)


@pytest.mark.parametrize("samples", [1, 3])
def test_single_numbers(samples: int) -> None:
    net = Net(
        lambda net, x: net.b(torch.tanh(net.a(x) * net.slope.exp() + net.shift)),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
        slope=nn.Parameter(torch.tensor(0.7)),
        shift=nn.Parameter(torch.tensor(0.2)),
    )
    x = torch.randn(samples, 3)
    individual = _check(net, x, "first")
    norms = (
        torch.stack([g.reshape(samples, -1).square().sum(1) for g in individual.values()])
        .sum(0)
        .sqrt()
    )
    blocks = [block.sum(0) for block in oracle.ggn(net, _loss, [x], list(individual))]
    by_parameter = dict(zip(individual, blocks, strict=True))
    with backpack(
        BatchDotGrad(), Variance(), ClippedSumGrad(float(norms.min()) / 2), KFLR(fail_mode="block")
    ):
        _loss(extend(net)(x)).backward()
    weights = norms.min() / 2 / norms
    for parameter in (net.slope, net.shift):
        rows = individual[parameter]
        oracle.assert_close(parameter.batch_dot, rows.outer(rows))
        oracle.assert_close(parameter.variance, rows.var(0, correction=0))
        oracle.assert_close(parameter.grad_clipped, weights @ rows)
        oracle.assert_close(parameter.kflr.dense(), by_parameter[parameter])


def _loss(output: Tensor) -> Tensor:
    """Curvature in every direction, another for every entry."""
    loss: Tensor = extend(nn.MSELoss())(
        output, torch.linspace(-1, 1, output[0].numel()).expand_as(output)
    )
    return loss


def _check(net: nn.Module, x: Tensor, check: str) -> dict[Any, Tensor]:
    """Compare with one sample after the other; returns individual gradients."""
    firsts = BatchGrad(), BatchL2Grad(), SumGradSquared()
    with backpack(*firsts, DiagGGNExact(), BatchDiagGGNExact(), check=check):
        _loss(extend(net)(x)).backward()
    found, parameters = {}, list(net.parameters())
    each = oracle.individual_gradients(net, _loss, [x], parameters)
    curvature = oracle.ggn_diagonals(net, _loss, [x], parameters)
    for parameter, expected, diagonals in zip(parameters, each, curvature, strict=True):
        if not expected.any():
            continue
        found[parameter] = expected
        oracle.assert_close(parameter.grad_batch, expected)  # type: ignore[attr-defined]
        oracle.assert_close(parameter.batch_l2, expected.reshape(len(x), -1).square().sum(1))  # type: ignore[attr-defined]
        oracle.assert_close(parameter.sum_grad_squared, expected.square().sum(0))  # type: ignore[attr-defined]
        oracle.assert_close(parameter.diag_ggn_exact_batch, diagonals)  # type: ignore[attr-defined]
        oracle.assert_close(parameter.diag_ggn_exact, diagonals.sum(0))  # type: ignore[attr-defined]
    return found


def _steps_first(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.a(x.transpose(0, 1)))  # type: ignore[no-any-return]


def _picked_steps(net: Any, x: Tensor) -> Tensor:
    return net.head(_steps_first(net, x)[torch.tensor([0, 2])]).mean(0)  # type: ignore[no-any-return]


def _behind_each_other(net: Any, x: Tensor) -> Tensor:
    """Two vectors of every sample in one batch, of which there may be two."""
    h = torch.tanh(net.a(x))
    found = net.head(torch.cat([h[:, 0], h.mean(1)])).view(2, len(x), 4)
    return found.amax(0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [_picked_steps, _behind_each_other])
@pytest.mark.parametrize("batch", [2, 3, 4, 5])
def test_what_is_summed_or_picked_from_has_no_samples_in_front(forward: Any, batch: int) -> None:
    """Axis 0 is as long as the batch by chance, where two are picked or put together."""
    model = extend(Net(forward, a=nn.Linear(2, 4), head=nn.Linear(4, 4)))
    x, y = torch.randn(batch, 4 if batch == 5 else 5, 2), torch.randn(batch, 4)
    loss = extend(nn.MSELoss(reduction="sum"))
    with backpack(BatchGrad(), BatchDiagGGNExact(), DiagGGNExact(), check="always"):
        loss(model(x), y).backward()
    for parameter in model.parameters():
        for n in range(batch):
            output = model(x[n : n + 1])[0]
            rows = [torch.autograd.grad(z, parameter, retain_graph=True)[0] for z in output]
            expected = sum(2 * row.square() for row in rows)
            torch.testing.assert_close(vars(parameter)["diag_ggn_exact_batch"][n], expected)
            (own,) = torch.autograd.grad((output - y[n]).square().sum(), [parameter])
            torch.testing.assert_close(vars(parameter)["grad_batch"][n], own)


class _Twice(torch.autograd.Function):
    """Nothing is known of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Twice the input."""
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Twice the gradient."""
        return 2 * grad


def _first_step(net: Any, x: Tensor) -> Tensor:
    return net.head(_Twice.apply(net.a(x))[0]) + net.bias  # type: ignore[no-any-return]


def _over_steps(net: Any, x: Tensor) -> Tensor:
    return net.head(_Twice.apply(net.a(x)).sum(0)) + net.bias  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [_first_step, _over_steps])
@pytest.mark.parametrize("check", ["first", "never"])
def test_an_axis_that_is_gone_is_no_axis_of_samples_before_a_function(
    forward: Any, check: Any
) -> None:
    """As many steps as samples, in front: what a module returned there is not taken for samples."""
    bias = nn.Parameter(torch.randn(4))
    model = extend(Net(forward, a=nn.Linear(2, 4), head=nn.Linear(4, 4), bias=bias))
    loss = extend(nn.MSELoss(reduction="sum"))
    with (
        backpack(BatchGrad(), check=check),
        pytest.raises(SampleMixingError, match="computed from weights alone"),
    ):
        loss(model(torch.randn(3, 3, 2)), torch.randn(3, 4)).backward()


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("is_module", [True, False])
def test_an_output_that_has_another_axis_in_front(is_module: bool, check: Any, steps: int) -> None:
    """Though it is as long as the batch, or a multiple: the model turned it there itself."""
    turned = Net(
        lambda net, x: net.b(torch.tanh(net.a(x)).transpose(0, 1)),
        a=nn.Linear(2, 3),
        b=nn.Linear(3, 2),
    )
    output = extend(turned)(torch.randn(4, steps, 2))
    mean = extend(nn.MSELoss())(output, torch.zeros_like(output))
    loss = mean if is_module else output.square().mean()
    message = "entries on axis 0" if is_module else "on an axis other than the first"
    error = ShapeError if is_module else UnsupportedError
    with backpack(BatchGrad(), check=check), pytest.raises(error, match=message):
        loss.backward()


def _turned_inside() -> Net:
    inner = Net(lambda net, x: torch.tanh(x * net.gain), gain=nn.Parameter(torch.randn(3)))
    return Net(
        lambda net, x: (net.inner(x.transpose(0, 1)) + net.shift).transpose(0, 1),
        inner=inner,
        shift=nn.Parameter(torch.randn(3)),
    )


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_what_the_last_module_returns_has_samples_in_front() -> None:
    """One inside of it may have them elsewhere."""
    model, x = extend(_turned_inside()), torch.randn(3, 3, 3)
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    for n, sample in enumerate(x):
        expected = torch.autograd.grad(model(sample[None]).square().sum(), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad_batch[n], gradient)


def _of_functions() -> Net:
    """No module behind its parameter says where samples are."""
    return Net(lambda net, x: torch.tanh(x @ net.weight), weight=nn.Parameter(torch.randn(3, 3)))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_what_a_function_makes_of_the_last_output_has_other_rows() -> None:
    turned = extend(_of_functions())(torch.randn(3, 3)).transpose(0, 1)
    with backpack(BatchGrad()), pytest.raises(SampleMixingError):
        turned.square().sum(1).sqrt().sum().backward()


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_parts_of_the_last_output_are_of_the_rows_that_they_were_taken_of() -> None:
    """Twice as many entries as there are samples, unevenly."""
    model, x = extend(_of_functions()), torch.randn(3, 3)
    parts = [lambda z: z[0, :1], lambda z: z[1, :2], lambda z: z[2]]
    output = model(x)
    with backpack(BatchGrad()):
        torch.cat([part(output) for part in parts]).square().mean().backward()
    for n, part in enumerate(parts):
        (alone,) = torch.autograd.grad(part(model(x)).square().sum() / 6, model.weight)
        torch.testing.assert_close(model.weight.grad_batch[n], alone)


class Steps(nn.Module):
    """One step after the other, with the time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            out, state = self.recurrent(step[None], state)
        return self.head(out[0])  # type: ignore[no-any-return]


class Bags(nn.Module):
    """Bags of indices, by where they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(5, 3, mode="mean"), nn.Linear(3, 2)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bags(indices, offsets))  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", ["steps", "bags"])
def test_rows_that_a_rule_refuses_where_they_are_as_many_as_samples(
    kind: str, samples: int
) -> None:
    """Of one sample, and of numbers in bags, nodes know as much as the rule."""
    if kind == "steps":
        model: nn.Module = Steps().double()
        x = torch.randn(samples, 3, 2).double()
        whole, rows = (x,), [(x[n : n + 1],) for n in range(samples)]
    else:  # the second bag has two indices, the last one none
        model, first = Bags().double(), torch.zeros(1, dtype=torch.long)
        indices = torch.tensor([4, 1, 2, 0])[:samples]
        offsets = torch.tensor([0, 1, 3])[:samples]
        whole, ends = (indices, offsets), [*offsets[1:].tolist(), samples]
        rows = [(indices[a:b], first) for a, b in zip(offsets.tolist(), ends, strict=True)]
    parameters = [*model.parameters()]
    single = [torch.autograd.grad(model(*row).square().sum(), parameters) for row in rows]
    out = extend(model)(*whole)
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(out, torch.zeros_like(out)).backward()
    for p, gradients in zip(parameters, zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(p)["grad_batch"], torch.stack(gradients))
        assert vars(p)["diag_ggn_exact"].shape == p.shape


INITIAL: dict[str, Any] = {
    "expanded": lambda net, x: net.states.expand(-1, len(x), -1).contiguous(),
    "computed": lambda net, x: (net.states + x.sum(1)[:, :1]).tanh(),
    "turned": lambda net, x: net.first(x[:, 0]).view(len(x), 2, 4).transpose(0, 1).contiguous(),
    "stacked": lambda net, x: torch.stack([net.first(x[:, t])[:, :4] for t in range(2)]),
    "final": lambda net, x: net.encoder(x.flip(1))[1],
}


def _decoded(net: Any, x: Tensor) -> Tensor:
    states = net.initial(net, x)
    is_single = isinstance(net.decoder, nn.LSTM) and isinstance(states, Tensor)
    outputs, final = net.decoder(x, (states, states.sin()) if is_single else states)
    last = final[0] if isinstance(final, tuple) else final
    return net.last(outputs[:, -1]) + last[-1][:, :3]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("name", INITIAL)
@pytest.mark.parametrize("batch", [2, 3])
def test_initial_states_as_many_as_samples(name: str, kind: type[nn.RNNBase], batch: int) -> None:
    """Two layers have initial states ``[2, N, H]``, whose axis 0 may be as long as the batch."""
    options: Any = {"num_layers": 2, "batch_first": True}
    net = Net(
        _decoded,
        states=nn.Parameter(torch.randn(2, 1, 4)),
        first=nn.Linear(3, 8),
        encoder=kind(3, 4, **options),
        decoder=kind(3, 4, **options),
        last=nn.Linear(4, 3),
    )
    net.initial = INITIAL[name]
    unused = {"states", "first", "encoder"} - {
        {"expanded": "states", "computed": "states", "final": "encoder"}.get(name, "first")
    }
    for part in unused:
        delattr(net, part)
    problem = classification(net, (4, 3), batch)
    for _ in range(2):  # the first passes are measured, with other weights of samples each time
        problem.check(second=False)
        problem.check(first=False)
    problem.check(check="never")


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_constant_initial_states_behind_a_layer(kind: type[nn.RNNBase]) -> None:
    """The rule has products for them, too, which go nowhere; also in passes that trust rules."""

    def run(net: Any, x: Tensor) -> Tensor:
        states = torch.ones(1, len(x), 5, dtype=x.dtype)
        given = (states, states) if kind is nn.LSTM else states
        return net.last(net.decoder(net.first(x), given)[0][:, -1])  # type: ignore[no-any-return]

    parts: dict[str, Any] = {"first": nn.Linear(3, 4), "last": nn.Linear(5, 3)}
    problem = classification(Net(run, decoder=kind(4, 5, batch_first=True), **parts), (4, 3), 3)
    for _ in range(3):
        problem.check(first=False)
