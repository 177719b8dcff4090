"""A plan is taken where the same is decided, and nowhere else; numbers are those of each pass."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend, register, unextend, unregister
from backpack_core.errors import BackpackError, InternalError
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_core.plugins.registry import registry
from backpack_layers.modules import Slicing
from backpack_operations import plan as plans_file
from backpack_operations.between import Operations
from backpack_operations.own_order import Chunks
from backpack_operations.plan import plans
from backpack_operations.straight import StraightTraversal
from backpack_operations.visits import GraphTraversal
from backpack_products.tuning import memory_budget, set_memory_budget
from backpack_transformers.gain import GainRule

pytestmark = pytest.mark.plans
SAMPLES = 3
BEFORE = 6  # of which the third, the fifth and the sixth need not be measured


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class Drawn(nn.Module):
    """Layers, with operations between them that may be others in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4).eval(), nn.Dropout(0.5).eval()
        self.between: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.first(x))
        result: Tensor = self.second(self.drop(self.between(hidden)))
        return result


def _model() -> Drawn:
    torch.manual_seed(0)
    return extend(Drawn())


def _step(
    model: nn.Module, *extensions: Extension, samples: int = SAMPLES, **options: Any
) -> tuple[str, Tensor]:
    """One pass; returns what became of it, and its inputs."""
    inputs = torch.randn(samples, 4)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    block = backpack(*extensions or [BatchGrad()], **options)
    loss = lossfunc(model(inputs), torch.zeros(samples, 4))
    with block:
        loss.backward()
    (how,) = {*block.summary().passes} - {"repeated a recording"}
    return how, inputs


def _warm(model: nn.Module, *extensions: Extension, **options: Any) -> None:
    for _ in range(BEFORE):
        how, _ = _step(model, *extensions, **options)
    assert how == "planned before"


def _see_right(model: nn.Module, inputs: Tensor) -> None:
    """Compare with autograd, one sample at a time."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = [
                torch.autograd.grad(model(x[None]).square().sum(), parameter)[0] for x in inputs
            ]
            torch.testing.assert_close(parameter.grad_batch, torch.stack(rows))  # type: ignore[attr-defined]


def test_the_first_passes_are_measured_and_planned_again() -> None:
    model = _model()
    found = [_step(model)[0] for _ in range(9)]
    again = ["planned", "planned before"]
    assert found == [again[n not in (0, 1, 3, 7)] for n in range(9)]


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_other_numbers_of_samples(samples: int) -> None:
    model = _model()
    _warm(model)
    for _ in range(4):
        _, inputs = _step(model, samples=samples)
        _see_right(model, inputs)


def test_lengths_that_change_at_every_step_find_the_plan_again() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    extend(model)
    lossfunc = extend(nn.MSELoss())
    block = backpack(BatchGrad())
    for length in (11, 13, 17, 19, 23, 29, 31, 37, 41):
        tokens = torch.randint(7, (SAMPLES, length))
        loss = lossfunc(model(tokens), torch.zeros(SAMPLES, length, 2))
        with block:
            loss.backward()
    assert block.summary().passes == {"planned": 4, "planned before": 5}


def _freeze(model: Drawn) -> None:
    model.first.weight.requires_grad_(False)


def _tie(model: Drawn) -> None:
    model.second.weight = model.first.weight


def _untie(model: Drawn) -> None:
    model.second.weight = nn.Parameter(torch.randn(4, 4))


def _widen(model: Drawn) -> None:
    model.first, model.second = nn.Linear(4, 6), nn.Linear(6, 4)
    model.norm = nn.BatchNorm1d(6).eval()
    extend(model)


def _forget_statistics(model: Drawn) -> None:
    model.norm.weight.requires_grad_(False)


def _without_bias(model: Drawn) -> None:
    model.first.bias = None  # type: ignore[assignment]


def _between(function: Callable[[Tensor], Tensor]) -> Callable[[Drawn], None]:
    def change(model: Drawn) -> None:
        model.between = function

    return change


def _hook(model: Drawn) -> None:
    model.first.register_forward_hook(lambda module, args, result: 2 * result)


# What may be another thing in the next pass: it is right, and whether there is a plan for it.
CHANGES: dict[str, tuple[Callable[[Drawn], object], bool]] = {
    "nothing": (lambda model: None, True),
    "weights": (lambda model: [p.data.mul_(2) for p in model.parameters()], True),
    "a parameter of its own": (_untie, True),
    "a frozen parameter": (_freeze, False),
    "a tied parameter": (_tie, False),
    "wider layers": (_widen, False),
    "no bias": (_without_bias, False),
    "a frozen gain": (_forget_statistics, False),
    "another setting": (lambda model: setattr(model.norm, "eps", 0.5), False),
    "another mode": (lambda model: model.drop.train(), False),
    "another function": (_between(torch.relu), False),
    "one function more": (_between(lambda h: h.tanh().sin()), False),
    "one use more": (_between(lambda h: h.tanh() * h), False),
    "the batch turned twice": (_between(lambda h: h.flip(0).flip(0)), False),
    "a view": (_between(lambda h: h.unflatten(1, (2, 2)).flatten(1)), False),
    "a hook on the output": (_hook, False),
}
SAME_NUMBERS = {"another mode"}  # draws others each time


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_passes(change: str) -> None:
    model = _model()
    _warm(model)
    act, is_same = CHANGES[change]
    act(model)
    how, inputs = _step(model)
    assert (how == "planned before") is is_same
    if change not in SAME_NUMBERS:
        _see_right(model, inputs)
        for _ in range(BEFORE):
            _, inputs = _step(model)
            _see_right(model, inputs)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lambda h: h[:, [1, 0, 2, 3]], lambda h: h[:, [0, 1, 3, 2]]),
        (lambda h: h.roll(1, 1), lambda h: h.roll(1, 0)),
        (lambda h: h.transpose(0, 1).T, lambda h: h.transpose(0, 1).transpose(0, 1)),
        (lambda h: h.softmax(1), lambda h: h.softmax(0)),
        (lambda h: h - h.mean(1, keepdim=True), lambda h: h - h.mean(0, keepdim=True)),
        (lambda h: nn.functional.pad(h, (1, 0)), lambda h: nn.functional.pad(h, (0, 1))),
        (lambda h: h.cumsum(1), lambda h: h.cumsum(0)),
        (lambda h: h.flip(1), lambda h: h.flip(0)),
        (lambda h: h.select(1, 0)[:, None], lambda h: h.select(1, 1)[:, None]),
    ],
    ids=["index", "roll", "turn", "softmax", "mean", "pad", "cumsum", "flip", "select"],
)
def test_operations_that_differ_by_what_they_saved(first: Any, then: Any) -> None:
    """As many rows as columns, so that no shape tells them apart."""

    def run(functions: list[Any]) -> str:
        """What became of the last: right, or the class of an error."""
        model, became = _model(), ""
        for function in functions:
            size = function(torch.zeros(4, 4)).shape[1]
            model.second = nn.Linear(size, 4)
            extend(model)
            model.between = function
            try:
                _, inputs = _step(model, samples=4)
            except BackpackError as error:
                became = type(error).__name__
            else:
                _see_right(model, inputs)
                became = "right"
        return became

    assert run([first] * BEFORE) == "right"
    assert run([first] * BEFORE + [then]) == run([then])


def _attention() -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(1)
            found: Tensor = self.layer(x, x, x, need_weights=False)[0]
            return found.squeeze(1)

    return extend(Attention())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_model, StraightTraversal),
        (_attention, GraphTraversal),  # parameters are read inside of it
        (lambda: extend(nn.Sequential(nn.Linear(4, 4), Scaled())), GraphTraversal),
    ],
    ids=["layers", "read inside", "used by operations"],
)
def test_only_straight_graphs_are_visited_without_questions(
    make: Callable[[], nn.Module], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, traversal = list[type](), Operations.traversal

    def noted(self: Operations, *given: Any) -> StraightTraversal:
        found = traversal(self, *given)
        kinds.append(type(found))
        return found

    monkeypatch.setattr(Operations, "traversal", noted)
    _warm(make())
    assert kinds[0] is GraphTraversal
    assert kinds[-1] is kind


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_weights_that_are_computed(name: str) -> None:
    computes = getattr(nn.utils.parametrizations, name)
    model = extend(nn.Sequential(computes(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))).eval()
    _warm(model)
    for change in (
        lambda: None,
        lambda: model[0].bias.requires_grad_(False),
        lambda: computes(model[2]),
    ):
        change()
        for _ in range(BEFORE):
            how, inputs = _step(model)
            _see_right(model, inputs)
        assert how == "planned before"


def test_derivatives_in_a_loss() -> None:
    torch.manual_seed(0)
    model = extend(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    )

    def penalty(x: Tensor, weight: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, weight.expand(len(x), 1), create_graph=True)
        return (gradient.square().sum(1) - 1).square().sum()

    # A pass goes by a plan where data lead to the same, as equal weights do of all samples.
    for number in range(3 * BEFORE):
        inputs = torch.randn(3, 4)
        is_other = number > BEFORE and number % 3 == 0
        weight = torch.rand(3, 1) if is_other else torch.ones(1, 1)
        loss, block = penalty(inputs, weight), backpack(BatchGrad())
        with block:
            loss.backward()
        (how,) = {*block.summary().passes} - {"repeated a recording"}
        if number >= BEFORE and not is_other:
            assert how.startswith("planned")
        weights = weight.expand(3, 1)
        each = [penalty(x[None], w[None]) for x, w in zip(inputs, weights, strict=True)]
        rows = [
            torch.autograd.grad(term, list(model.parameters()), allow_unused=True) for term in each
        ]
        for p, own in zip(model.parameters(), zip(*rows, strict=True), strict=True):
            if own[0] is not None:
                torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]


class Windows(nn.Module):
    """Layers on windows of a sequence, which are rows in another order than that of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights = nn.Parameter(torch.randn(2, 4, 4))
        self.shift, self.is_turned = 1, True

    def forward(self, x: Tensor) -> Tensor:
        """Of ``[N, 4]``, as sequences of four numbers."""
        rows = self.first(x.unsqueeze(2) * torch.ones(4)).roll(self.shift, 1)
        windows = rows.view(-1, 2, 2, 4)
        windows = windows.transpose(0, 1) if self.is_turned else windows
        mixed = torch.tanh(self.second(windows.reshape(-1, 2, 4))).cumsum(1)
        parts = mixed.view(*windows.shape)
        parts = parts.transpose(0, 1) if self.is_turned else parts
        result: Tensor = torch.einsum("nwti,wio->nto", parts, self.weights).flatten(1, 2)
        return result[:, :4]


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_rows_in_another_order_are_planned(samples: int) -> None:
    torch.manual_seed(0)
    model = extend(Windows())
    _warm(model, samples=samples)
    for change in ({}, {"shift": 3}, {"is_turned": False}, {"is_turned": True}, {"shift": -1}):
        vars(model).update(change)
        for _ in range(BEFORE):
            how, inputs = _step(model, samples=samples)
            _see_right(model, inputs)
        assert how == "planned before"


@pytest.mark.parametrize("is_model", [True, False])
def test_runs_on_parts_of_one_batch(is_model: bool) -> None:
    # Two runs on two tensors are of the same samples, and on two parts of one of others.
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    extend(layers if is_model else nn.ModuleList(layers))

    def model(x: Tensor) -> Tensor:
        result: Tensor = layers(x) if is_model else layers[2](layers[1](layers[0](x)))
        return result.square().sum(1)

    def step(first: Tensor, second: Tensor) -> str:
        block = backpack(BatchGrad())
        with block:
            (model(first).sum() * 2 + model(second).sum()).backward()
        (how,) = {*block.summary().passes} - {"repeated a recording"}
        return how

    def rows(*terms: Tensor) -> list[tuple[Tensor, ...]]:
        parameters = list(layers.parameters())
        return [torch.autograd.grad(term, parameters, retain_graph=True) for term in terms]

    for number in range(3 * BEFORE):
        x = torch.randn(5, 4)[1:]
        is_part = number > BEFORE and number % 3 == 0
        first, second = (x[:2], x[2:]) if is_part else (x[:2].clone(), x[2:].clone())
        how = step(first, second)
        if is_part:
            expected = rows(*2 * model(first), *model(second))
        else:
            expected = rows(*(2 * model(first) + model(second)))
            assert number < BEFORE or how.startswith("planned")
        for p, own in zip(layers.parameters(), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]


def test_rows_that_an_index_picks_are_looked_at_each_time() -> None:
    model, orders = _model(), [torch.tensor([2, 0, 1])]
    model.between = lambda h: (
        h[orders[0]].tanh()[orders[0].argsort()] if len(h) == SAMPLES else h.tanh()
    )
    for _ in range(BEFORE):
        how, inputs = _step(model)
        _see_right(model, inputs)
    assert how.startswith("planned before")
    orders[0] = torch.tensor([1, 2, 0])
    how, inputs = _step(model)
    _see_right(model, inputs)
    assert how.startswith("surveyed: data, indices")


def test_an_index_that_is_set_anew() -> None:
    """It is a setting: of the pass that ran with it, and in the key."""
    index = Slicing((slice(None), slice(0, 4)))
    model = extend(nn.Sequential(nn.Linear(4, 6), index, nn.Linear(4, 4)))
    _warm(model, BatchGrad(), DiagGGNExact())
    lossfunc, inputs = extend(nn.MSELoss(reduction="sum")), torch.randn(SAMPLES, 4)
    loss = lossfunc(model(inputs), torch.zeros(SAMPLES, 4))
    with backpack(DiagGGNExact()):
        lossfunc(model(inputs), torch.zeros(SAMPLES, 4)).backward()
        expected = vars(model[0].weight)["diag_ggn_exact"].clone()
    index.slice_info = (slice(None), slice(2, 6))
    with backpack(DiagGGNExact()):
        loss.backward()
    torch.testing.assert_close(vars(model[0].weight)["diag_ggn_exact"], expected)
    index.slice_info = (torch.tensor([1, 0, 2]), slice(2, 6))
    with pytest.raises(BackpackError, match="touches the batch axis"):
        _step(model, BatchGrad(), DiagGGNExact())


def test_columns_go_in_as_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks, before = _model(), list[int](), memory_budget()
    carry = Chunks.carry

    def counted(self: Chunks, *given: Any) -> None:
        chunks.append(len(chunks))
        carry(self, *given)

    monkeypatch.setattr(Chunks, "carry", counted)
    set_memory_budget(2 * SAMPLES * 4 * 8)
    try:
        found = []
        for _ in range(BEFORE):
            chunks.clear()
            how, _ = _step(model, DiagGGNExact())
            found.append((how, len(chunks)))
    finally:
        set_memory_budget(before)
    assert {count for _, count in found} == {found[0][1]}
    assert found[0][1] > 0
    assert found[-1][0] == "planned before"


class Scaled(nn.Module):
    """Has no rule, and a parameter of its own that depends on positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x * self.gain).tanh() * self.gain
        return result


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_parameters_that_operations_use(samples: int) -> None:
    model = extend(nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)))
    found = []
    for _ in range(BEFORE + 1):
        how, inputs = _step(model, BatchGrad(), DiagGGNExact(), samples=samples)
        found.append(how)
        _see_right(model, inputs)
    assert found[-2:] == ["planned before"] * 2
    gain: Any = model[1].gain
    gain.requires_grad_(False)
    how, inputs = _step(model, samples=samples)
    assert how == "planned"
    _see_right(model, inputs)


class Norm(nn.Module):
    """A normalisation of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))


class NormRule(GainRule):
    """Goes through the operations inside."""

    module_types = (Norm,)


class Heads(nn.Module):
    """What the normalisation returns goes to several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), Norm()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.first(x))
        return h + self.left(h) * torch.tanh(self.right(h))


@pytest.mark.filterwarnings("ignore:.*has no layer rule")
@pytest.mark.parametrize("has_rule", [True, False])
def test_outputs_of_opened_modules_that_go_to_several(has_rule: bool) -> None:
    if has_rule:
        register(NormRule)
    try:
        model = extend(Heads())
        found, extensions = [], (BatchGrad(), DiagGGNExact())
        for _ in range(BEFORE + 14):
            how, inputs = _step(model, *extensions)
            found.append(how)
            _see_right(model, inputs)
        assert found[-2:] == ["planned before"] * 2
        planned = [p.diag_ggn_exact for p in model.parameters()]
        loss = extend(nn.MSELoss(reduction="sum"))(model(inputs), torch.zeros(SAMPLES, 4))
        with backpack(*extensions, check="always"):
            loss.backward()
        for here, parameter in zip(planned, model.parameters(), strict=True):
            torch.testing.assert_close(here, parameter.diag_ggn_exact)
    finally:
        if has_rule:
            unregister(NormRule)


def test_other_extensions_have_plans_of_their_own() -> None:
    model = _model()
    _warm(model, BatchGrad())
    assert _step(model, BatchGrad(savefield="another"))[0] == "planned before"
    assert _step(model, SumGradSquared())[0] == "planned"
    assert _step(model, DiagGGNExact())[0] == "planned"
    assert _step(model, BatchGrad(subsampling=[0]))[0] == "planned"


def test_a_pass_that_fails_leaves_no_plan() -> None:
    model = _model()

    def fail(module: nn.Module) -> None:
        raise KeyError(module)

    for _ in range(4):
        with pytest.raises(KeyError):
            _step(model, extension_hook=fail)
    assert plans._plans.get(model) is None


def test_a_plan_is_not_taken_in_passes_that_are_always_measured() -> None:
    model = _model()
    _warm(model)
    assert _step(model, check="always")[0] == "planned"


def test_nothing_is_measured_and_the_second_pass_is_planned() -> None:
    model = _model()
    found = [_step(model, check="never")[0] for _ in range(3)]
    assert found == ["planned", "planned before", "planned before"]
    assert _step(model)[0] == "planned"


def test_new_rules_make_plans_invalid() -> None:
    model = _model()
    _warm(model)
    registry.forget()
    assert _step(model)[0] == "planned"


def test_unextend_forgets_them() -> None:
    model = _model()
    _warm(model)
    unextend(model)
    assert plans._plans.get(model) is None


def test_another_batch_axis_makes_plans_invalid() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))

    def step() -> str:
        block = backpack(BatchGrad())
        with block:
            model(torch.randn(4, 4, 4)).square().sum().backward()
        (how,) = {*block.summary().passes} - {"repeated a recording"}
        return how

    extend(model)
    found = [step() for _ in range(BEFORE)]
    assert found[-1] == "planned before"
    extend(model)
    assert step() == "planned before"
    extend(model, batch_axis={"0": 1})
    assert step().startswith("surveyed")


def test_copies_have_their_own_plans() -> None:
    model = _model()
    _warm(model)
    other = copy.deepcopy(model)
    how, inputs = _step(other)
    assert how == "planned"
    _see_right(other, inputs)


def test_plans_keep_no_model_alive() -> None:
    model = _model()
    _warm(model)
    parameter, alive = weakref.ref(model.first.weight), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert parameter() is None


def test_a_parameter_that_was_replaced_is_not_kept_alive() -> None:
    model = _model()
    _warm(model)
    old = weakref.ref(model.first.weight)
    model.first.weight = nn.Parameter(torch.randn(4, 4))
    _step(model)
    gc.collect()
    assert old() is None


def test_results_of_a_pass_with_another_plan_are_removed() -> None:
    model = _model()
    _warm(model)
    short = nn.Sequential(model.first)
    inputs = torch.randn(SAMPLES, 4)
    for _ in range(2):
        with backpack(BatchGrad()):
            short(inputs).square().sum().backward()
        assert "grad_batch" not in vars(model.second.weight)
        _, inputs = _step(model)
        _see_right(model, inputs)


def test_few_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_file, "MOST", 3)
    model = _model()
    for samples in range(2, 12):
        for _ in range(3):
            _step(model, samples=samples)
    assert len(plans._plans[model]) <= 3
    assert len(plans._known[model]) <= 3


def test_a_plan_that_contradicts_an_earlier_one_raises() -> None:
    model = _model()
    _warm(model)
    table = plans._plans[model]
    for key, plan in [*table.items()]:
        table[key] = replace(plan, steps=tuple([s._replace(names=()) for s in plan.steps]))
    plans._known.clear()
    with pytest.raises(InternalError, match="planned differently"):
        _step(model, check="always")


def test_threads_make_plans_at_once() -> None:
    model, faults = _model(), list[BaseException]()
    _step(model)

    def run(seed: int) -> None:
        try:
            own = copy.deepcopy(model)
            for _ in range(BEFORE):
                _, inputs = _step(own)
                _see_right(own, inputs)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_plan_prints_its_steps() -> None:
    model = _model()
    _warm(model)
    (plan,) = plans._plans[model].values()
    assert "Linear 'first'" in [step.path for step in plan.steps]
    assert "read weight, bias" in [*map(str, plan.steps)]
    _warm(model, DiagGGNExact())
    *_, plan = plans._plans[model].values()
    assert "send to operations by its rule" in [*map(str, plan.steps)]


def test_other_operations_inside_of_a_layer() -> None:
    """Torch has others for an input that is not contiguous; a key knows nothing of that."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain, own_loss = copy.deepcopy(model), nn.MSELoss(reduction="sum")
    extend(model), extend(lossfunc := copy.deepcopy(own_loss))

    def slopes(net: nn.Module, x: Tensor, loss: nn.Module) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return loss(slope.flatten(1), torch.zeros(len(x), 9))

    for number in range(12):
        x = torch.randn(4, 3, 3) if number < 6 else torch.randn(3, 4, 3).transpose(0, 1)
        loss = slopes(model, x, lossfunc)
        with backpack(BatchGrad()) as block:
            loss.backward()
        assert number != 5 or "planned before" in block.summary().passes
        each = [
            torch.autograd.grad(slopes(plain, row[None], own_loss), [*plain.parameters()])
            for row in x
        ]
        for p, rows in zip(model.parameters(), zip(*each, strict=True), strict=True):
            torch.testing.assert_close(p.grad_batch, torch.stack(rows))  # type: ignore[attr-defined]


class Mixed(nn.Module):
    """A gate, and a tensor with the weights of all experts, which data meet outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("nd,kdi->nki", x, self.experts)
        return torch.einsum("nk,nki->ni", self.gate(x).softmax(1), each)


def test_what_a_measurement_looks_at_is_no_part_of_a_plan() -> None:
    """The first plan for other extensions is made in a pass that is not measured."""
    model = extend(Mixed())
    for extension in (BatchGrad, SumGradSquared):
        for _ in range(6):
            _step(model, extension())
    assert _step(model, check="always")[0] == "planned"
    for _ in range(20):
        _, inputs = _step(model)
        _see_right(model, inputs)


def test_parameter_that_was_replaced_before_a_planned_pass() -> None:
    """A function uses it, and the model had it in the forward pass: its result is there."""
    model, lossfunc = extend(TiedFunction()), extend(nn.MSELoss())
    x = torch.randn(4, 3)
    for _ in range(BEFORE):
        with backpack(BatchGrad()):
            lossfunc(model(x), x).backward()
    before = model.second.weight
    del before.grad_batch  # type: ignore[attr-defined]
    loss = lossfunc(model(x), x)
    (gradient,) = torch.autograd.grad(loss, before, retain_graph=True)
    model.second.weight = nn.Parameter(torch.randn(3, 3))
    with backpack(BatchGrad()):
        loss.backward()
    assert hasattr(model.first.weight, "grad_batch")
    torch.testing.assert_close(before.grad_batch.sum(0), gradient)  # type: ignore[attr-defined]


class TiedFunction(nn.Module):
    """A function uses the weight of the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).tanh(), self.second.weight)


class _Positive(nn.Linear):
    """Computes something other than its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.abs(), self.bias)


def test_class_that_was_changed_between_forward_and_backward() -> None:
    model, lossfunc, x = (
        extend(nn.Sequential(nn.Linear(3, 3))),
        extend(nn.MSELoss()),
        torch.ones(2, 3),
    )
    for kind in (nn.Linear, _Positive):
        loss = lossfunc(model(x), 0 * x)
        model[0].__class__ = kind
        with backpack(BatchGrad()):
            loss.backward()
        torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)
        model.zero_grad()
