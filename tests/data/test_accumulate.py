"""Quantities over a loader are those of one batch of all samples."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_core import Extension, extend, is_extended
from backpack_core.errors import (
    MissingPluginError,
    NotAnExtensionError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    KFAC,
    KFLR,
    KFRA,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    GGNGram,
    Jacobians,
    SqrtGGNExact,
    Variance,
)
from backpack_data import Quantities, accumulate, combined
from backpack_data.accumulation import _Run
from backpack_data.states import States
from backpack_products import FirstOrderExtension
from backpack_secondorder.blocks import BlockDiagonal
from tests.data.problems import (
    DETERMINISTIC,
    assert_same,
    batches,
    data,
    expected,
    loss,
    net,
)
from tests.oracle import assert_close


def run(*extensions: Any, sizes: tuple[int, ...] = (3, 3, 1), reduction: str = "mean", **options):
    return accumulate(
        net(), loss(reduction), batches(*data(), *sizes), *extensions, progress=False, **options
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("extension", DETERMINISTIC)
def test_equals_one_batch(extension, reduction):
    wanted = expected([extension()], *data(), reduction)
    found = run(extension(), reduction=reduction)
    assert found.keys() == wanted.keys()
    for place, value in wanted.items():
        assert_same(found[place], value)


@pytest.mark.parametrize("samples", [None])
def test_ekfac_takes_two_passes(samples):
    wanted = expected([EKFAC(mc_samples=samples)], *data())
    found = run(EKFAC(mc_samples=samples))
    for place, value in wanted.items():
        assert_same(found[place].dense(), value.dense(), 1e-9)


def test_the_second_pass_keeps_no_factors(monkeypatch):
    """They take as much memory as the eigenvectors, which it needs."""
    seen: list[weakref.ref[Tensor]] = []

    def pass_(self, number, extensions, given=""):
        if number == 1:
            gc.collect()
            assert seen
            assert not any(factor() is not None for factor in seen)
        found = whole_pass(self, number, extensions, given)
        if number == 0:
            seen.extend(weakref.ref(f) for matrix in found.values() for f in matrix)
        return found

    whole_pass = _Run._pass
    monkeypatch.setattr(_Run, "_pass", pass_)
    assert run(EKFAC())


def test_clipped_sums_add_up():
    wanted = expected([ClippedSumGrad(0.1)], *data(), "sum")
    for reduction in ("sum", "mean"):
        found = run(ClippedSumGrad(0.1), reduction=reduction)
        for place, value in wanted.items():
            assert_same(found[place], value)


@pytest.mark.parametrize("extension", [KFRA, GGNGram, BatchDotGrad, GGNMP])
def test_what_does_not_combine_is_refused(extension):
    with pytest.raises(UnsupportedError, match=f"{extension.__name__} was asked for its value"):
        run(extension())


def test_gradients_and_modules_are_left_alone():
    model, lossfunc = net(), loss()
    accumulate(model, lossfunc, batches(*data(), 4, 3), DiagGGNExact(), progress=False)
    assert all(p.grad is None and not p.__dict__ for p in model.parameters())
    assert not is_extended(model)
    assert not is_extended(lossfunc)


def test_parts_that_are_extended_stay_so():
    model, (x, y) = net(), data()
    assert isinstance(model, nn.Sequential)
    extend(model[4])
    accumulate(model, loss(), [(x, y)], DiagGGNExact(), progress=False)
    assert [is_extended(part) for part in model] == [False] * 4 + [True]


class OfSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.CrossEntropyLoss(reduction="sum")

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.each(output.flatten(0, 1), targets)


def test_the_declared_axis_stays_where_a_part_was_added():
    x, y = torch.randn(3, 3, 4, dtype=torch.float64), torch.arange(9) % 2  # steps first
    model = extend(nn.Sequential(nn.Linear(4, 2).double()), batch_axis=1)
    model.append(nn.Tanh())
    found = accumulate(model, OfSteps(), [(x, y)], BatchGrad(), progress=False)
    for n in range(3):
        single = OfSteps()(model(x[:, n : n + 1]), y.reshape(3, 3)[:, n])
        (wanted,) = torch.autograd.grad(single, model[0].weight)
        assert_same(found["0.weight", "grad_batch"][n], wanted)


class WithHead(nn.Module):
    """A loss with parameters, one of which a function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(3, 3).double(), nn.Parameter(torch.ones(3).double())
        self.each = loss()

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.each(self.head(output * self.scale), targets)


def test_parameters_of_the_loss_are_left_alone():
    lossfunc = WithHead()
    accumulate(net(), lossfunc, batches(*data(), 4, 3), BatchGrad(), progress=False)
    for parameter in lossfunc.parameters():
        assert parameter.grad is None
        assert not vars(parameter)


class Forces(nn.Module):
    """Marks what it receives, as models do that differentiate by it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.requires_grad_())


@pytest.mark.parametrize("is_marked", [True, False])
def test_data_are_left_alone(is_marked: bool):
    (x, y), wanted = data(), run(DiagGGNExact())
    x.requires_grad_(is_marked)
    found = accumulate(Forces(), loss(), [(x, y)], DiagGGNExact(), progress=False)
    assert x.grad is None
    assert x.requires_grad is is_marked
    for (name, field), value in wanted.items():
        assert_same(found[f"net.{name}", field], value)


class Overwrites(nn.Module):
    """Prepares its input in place, as models do that receive a batch of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.add_(0.5).mul_(2))


def test_the_second_pass_sees_the_same_data():
    x, y = data()
    given = [(x.clone(), y)]
    wanted = accumulate(net(), loss(), [(2 * x + 1, y)], EKFAC(None), progress=False)
    found = accumulate(Overwrites(), loss(), given, EKFAC(None), progress=False)
    assert torch.equal(given[0][0], x)
    for (name, field), value in wanted.items():
        assert_same(found[f"net.{name}", field].dense(), value.dense())


class Renamed(KFLR):
    """Values that are no tensors, of an extension that no plugin provides."""

    savefield = "renamed"


def test_extensions_of_ones_own(tmp_path: Path):
    found, wanted = run(Renamed()), run(KFLR())
    for name in net().state_dict():
        assert_same(found[name, "renamed"], wanted[name, "kflr"])
    assert (2 * found).to(dtype=torch.float32).summary().count("renamed") == len(found)
    found.save(tmp_path / "results")
    with pytest.raises(MissingPluginError, match="no installed plugin provides it"):
        Quantities.load(tmp_path / "results")


def test_batches_of_other_forms():
    x, y = data()
    wanted = run(DiagGGNExact())
    model = net()
    pairs = batches(x, y, 3, 3, 1)
    by_name = [{"input": a, "labels": b} for a, b in pairs]
    triples = [(a, b, None) for a, b in pairs]

    def split(item):
        return (item[0],), item[1]

    for items, options in ((by_name, {}), (triples, {"batch": split})):
        found = accumulate(model, loss(), items, DiagGGNExact(), progress=False, **options)
        for place, value in wanted.items():
            assert_same(found[place], value)
    with pytest.raises(UsageError, match="give batch="):
        accumulate(model, loss(), triples, DiagGGNExact(), progress=False)


def test_functional_losses_say_what_they_divide_by():
    from backpack_core.extensions import BatchGrad

    def mean(output, y):
        return nn.functional.cross_entropy(output, y)

    x, y = data()
    wanted = accumulate(net(), nn.CrossEntropyLoss(), [(x, y)], BatchGrad(), progress=False)
    pairs = batches(x, y, 4, 3)
    found = accumulate(
        net(), mean, pairs, BatchGrad(), normaliser=lambda x, y: len(y), progress=False
    )
    for place, value in wanted.items():
        assert_same(found[place], value)
    with pytest.raises(UsageError, match="give normaliser="):
        accumulate(net(), mean, pairs, BatchGrad(), progress=False)


@pytest.mark.parametrize("wrong", [DiagGGNExact, [DiagGGNExact()], "DiagGGNExact"])
def test_what_is_no_extension_is_refused(wrong: Any):
    with pytest.raises(NotAnExtensionError):
        accumulate(net(), loss(), [data(3)], wrong, progress=False)
    with pytest.raises(NotAnExtensionError):
        combined(net(), wrong)


def test_weights_of_zero_are_refused():
    x, _ = data(2)
    with pytest.raises(UsageError, match="which are zero"):
        accumulate(net(), loss(), [(x, torch.full((2,), 2))], DiagGGNExact(), progress=False)


@pytest.mark.host("files are read to there")
def test_results_are_saved_and_calculated_with(tmp_path: Path):
    found = run(KFLR(), DiagGGNExact(), Variance())
    found.save(tmp_path / "all.safetensors")
    loaded = Quantities.load(tmp_path / "all.safetensors")
    assert loaded.keys() == found.keys()
    for place, value in found.items():
        assert_same(loaded[place], value, 0.0)
        assert type(loaded[place]) is type(value)
    for name in ("0.weight", "2.weight"):  # the second has an order of its own
        vector = torch.randn_like(net().get_parameter(name))
        assert_same(loaded[name, "kflr"] @ vector, found[name, "kflr"] @ vector)
    average = found.moving_average(3 * found, 0.5)
    assert_same(average["4.bias", "variance"], 2 * found["4.bias", "variance"])
    assert_same(average["4.bias", "kflr"].dense(), 2 * found["4.bias", "kflr"].dense())
    halves = sum([found, found]) / 4
    assert_same(halves["4.bias", "variance"], 0.5 * found["4.bias", "variance"])
    single = found.to(dtype=torch.float32)
    assert {t.dtype for t in single.tensors().values()} <= {torch.float32, torch.int64}
    assert "0.weight" in found.summary()
    assert list(found.field("variance")) == [n for n, _ in net().named_parameters()]
    with pytest.raises(UsageError, match="cannot be combined"):
        found + run(KFLR())


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(*data(40)), 3, shuffle=True, generator=generator)


class Interrupted(Exception):
    pass


def test_moving_averages_are_those_of_the_values() -> None:
    """The average of Kronecker factors does not go by samples, a sum does."""
    inputs = torch.randn(6, 3, dtype=torch.float64)
    model, (X, y) = nn.Sequential(nn.Linear(3, 2)).double(), (inputs, torch.arange(6) % 2)
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    few, many = (
        accumulate(model, lossfunc, [(X[:n], y[:n])], KFAC(), DiagGGNExact(), progress=False)
        for n in (2, 6)
    )
    average, place = few.moving_average(many, 0.75), ("0.weight", "kfac")
    for mean, a, b in zip(average[place], few[place], many[place], strict=True):
        assert_same(mean, 0.75 * a + 0.25 * b)
    assert not torch.allclose(average[place][1], (0.75 * few + 0.25 * many)[place][1])
    diagonal = "0.weight", "diag_ggn_exact"
    assert_same(average[diagonal], (0.75 * few + 0.25 * many)[diagonal])


@pytest.mark.host("a loader shuffles there")
def test_goes_on_with_the_same_numbers(tmp_path: Path):
    torch.manual_seed(3)
    asked = (KFAC(), DiagGGNMC(), EKFAC(savefield="other"), Variance())
    wanted = accumulate(net(), loss(ignored=-100), loader(), *asked, progress=False)
    torch.manual_seed(3)
    file, left = tmp_path / "state.safetensors", [4, 7, 9, 12, 100]
    found = None
    while found is None:
        steps = iter(range(left.pop(0)))

        def split(item: Any) -> Any:
            if next(steps, None) is None:  # noqa: B023
                raise Interrupted
            return item[0], item[1]

        try:
            found = accumulate(
                net(),
                loss(ignored=-100),
                loader(),
                *asked,
                batch=split,
                state_file=file,
                every=2,
                progress=False,
            )
        except Interrupted:
            torch.manual_seed(len(left))  # another process starts otherwise
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name


def test_states_of_others_are_refused(tmp_path: Path):
    file = tmp_path / "state.safetensors"
    run(DiagGGNExact(), state_file=file)
    with pytest.raises(UsageError, match="state of another run"):
        run(KFLR(), state_file=file)
    model = net()
    with torch.no_grad():
        model.get_parameter("4.bias").add_(1)
    with pytest.raises(UsageError, match="state of another run"):
        accumulate(model, loss(), batches(*data(), 7), DiagGGNExact(), state_file=file)


@pytest.mark.long
def test_killed_at_any_moment(tmp_path: Path):
    """The same in other processes that are killed; ``python -m tests.data.crash`` has 50 kills."""
    from tests.data.crash import crash

    crash(tmp_path, kills=3, seed=0)


def test_what_is_not_there_is_named_and_no_bar_is_drawn_where_nobody_looks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = accumulate(net(), loss("sum"), batches(*data(), 4, 3), DiagGGNExact())
    assert capfd.readouterr().err == ""
    path, field = next(iter(found))
    with pytest.raises(KeyError, match=f"did you mean {path}, {field}"):
        found[path, "diag_ggn"]
    with pytest.raises(KeyError, match="there are"):
        found["nowhere"]  # type: ignore[index]
    assert ("nowhere", field) not in found


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda losses: losses, "has shape [4], and backward() needs a single number: use"),
        (lambda losses: losses.mean().detach(), "has no graph"),
        (lambda losses: losses.mean().detach().item(), "is a tensor of one number"),
    ],
)
def test_a_loss_that_is_not_one_number(change: Any, said: str, capture: bool):
    def lossfunc(output: Tensor, target: Tensor) -> Any:
        return change(nn.functional.cross_entropy(output, target, reduction="none"))

    batch = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    options: dict[str, Any] = {"normaliser": lambda x, y: len(y), "capture": capture}
    with pytest.raises(UsageError, match=re.escape(said)):
        accumulate(nn.Linear(3, 2), lossfunc, [batch], BatchGrad(), **options)


def test_model_and_loss_that_are_swapped():
    with pytest.raises(UsageError, match=r"got CrossEntropyLoss, which has no parameters.*swap"):
        accumulate(loss(), net(), [data(3)], DiagGGNExact(), progress=False)
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module.* Got function"):
        accumulate(lambda x: x, loss(), [data(3)], DiagGGNExact(), progress=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 1}, r"accumulate\(\.\.\., batch\) takes a function"),
        ({"batch": lambda item: item[0]}, r"return \(inputs, targets\)\. Got Tensor"),
        ({"batch": lambda item: [*item, 0]}, r"return \(inputs, targets\)\. Got list of 3"),
        ({"normaliser": "mean"}, r"lambda inputs, targets: len\(targets\)\. Got 'mean'"),
        ({"normaliser": lambda inputs, targets: "mean"}, "a positive number .* Got 'mean'"),
        ({"normaliser": lambda inputs, targets: -1.0}, r"a positive number .* Got -1\.0"),
        ({"normaliser": lambda inputs, targets: 0}, "a positive number .* Got 0"),
        ({"every": "1"}, "every must be a positive number of batches"),
        ({"every": 1.5}, "every must be a positive number of batches"),
        ({"state_file": "."}, "is a folder"),
        ({"dtype": "float64"}, r"such as torch\.float64\. Got 'float64'"),
        ({"dtype": torch.int64}, r"such as torch\.float64\. Got torch\.int64"),
        ({"device": "nowhere"}, "No tensor can be on the device 'nowhere'"),
        ({"device": object()}, "No tensor can be on the device"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        run(DiagGGNExact(), **options)


def test_what_is_no_loss_and_no_loader():
    for wrong in (None, "loss"):
        with pytest.raises(UsageError, match=r"lossfunc\) takes a loss module"):
            accumulate(net(), wrong, batches(*data(), 4, 3), DiagGGNExact())
    for wrong in (None, 3):
        with pytest.raises(UsageError, match="The loader must allow several iterations"):
            accumulate(net(), loss(), wrong, DiagGGNExact())


def test_corrected_eigenvalues_of_parameters_that_a_weight_is_computed_from():
    """The second pass finds what the first one has stored at them, or left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.utils.parametrizations.weight_norm(model[0])
    pairs = [(torch.randn(n, 5), torch.randint(3, (n,))) for n in (4, 2)]
    extensions = EKFAC(None, fail_mode="diagonal"), KFLR(fail_mode="block"), DiagGGNExact()
    found = accumulate(model, nn.CrossEntropyLoss(), pairs, *extensions, progress=False)
    norm, direction = (f"0.parametrizations.weight.original{n}" for n in (0, 1))
    diagonal = found[direction, "diag_ggn_exact"].flatten()
    assert_close(found[direction, "ekfac"].dense(), diagonal.diag())
    assert_close(found[norm, "ekfac"].dense(), found[norm, "kflr"].dense())
    silent = EKFAC(None, fail_mode="silent")
    found = accumulate(model, nn.CrossEntropyLoss(), pairs, silent, progress=False)
    assert {path for path, _ in found} == {"0.bias", norm, "2.weight", "2.bias"}


def test_a_data_set_is_no_loader():
    """Steps of a sequence without an axis of samples would count as samples."""
    steps = TensorDataset(torch.randn(4, 7, 5), torch.randn(4, 7, 3))
    with pytest.raises(UsageError, match="TensorDataset gives single samples"):
        accumulate(nn.Linear(5, 3), nn.MSELoss(), steps, DiagGGNExact(), progress=False)


def test_numbers_of_numpy_and_places_of_any_kind():
    found = run(KFLR(), DiagGGNExact())
    for place, value in (np.float64(2.0) * found).items():
        assert_same(value, 2.0 * found[place])
    for new, decay in ((1, 0.5), ([found], 0.5), (found, None), (found, 1.5)):
        with pytest.raises(UsageError, match=r"The average needs|between 0 and 1"):
            found.moving_average(new, decay)
    for wrong in (0, None, "0.weight", (0, 1)):
        with pytest.raises(KeyError, match="There is no value at"):
            found[wrong]


class AsNumber(FirstOrderExtension):
    """The number of samples, as a number."""

    savefield = "as_number"
    degree = 0
    over_batches = "sum"

    def read(self, product):
        return product.samples


def test_values_that_are_no_tensors():
    with pytest.raises(
        UnsupportedError, match=r"AsNumber stores a value of type int, .* read\(\), or"
    ):
        run(AsNumber())


class Counted(FirstOrderExtension):
    """A one for each sample, which is declared to be added."""

    savefield = "counted"
    degree = 0
    over_batches = "sum"

    def read(self, product):
        return torch.ones(product.samples)


def test_shapes_that_do_not_add():
    for sizes in ((3, 3, 1), (3, 4)):  # one sample would broadcast
        with pytest.raises(ShapeError, match=r"Values of Counted are added .* 'concatenate'"):
            run(Counted(), sizes=sizes)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.bfloat16, 600), pytest.param(torch.float16, 1500, marks=pytest.mark.long)],
)
def test_sums_of_many_batches_in_half_precision(dtype: torch.dtype, number: int):
    torch.manual_seed(0)
    model, x, y = (
        nn.Linear(3, 2).to(dtype),
        torch.randn(number, 3).to(dtype),
        torch.arange(number) % 2,
    )
    double = nn.Linear(3, 2).double()
    double.load_state_dict(model.state_dict())

    def found(model: nn.Module, x: Tensor, size: int) -> Quantities:
        loader = list(zip(x.split(size), y.split(size), strict=True))
        asked = DiagGGNExact(), KFLR()
        return accumulate(model, nn.CrossEntropyLoss(), loader, *asked, progress=False)

    wanted = found(double, x.double(), number).tensors()
    for name, value in found(model, x, 1).tensors().items():
        assert value.dtype is dtype or not value.dim()
        torch.testing.assert_close(value.double(), wanted[name], rtol=0.02, atol=0.002, msg=name)


class Picked(nn.Module):
    """A layer that receives some samples, one that is a table, and a parameter of a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.some = nn.Linear(9, 4).double(), nn.Linear(4, 3).double()
        self.table = nn.Embedding(1, 3).double()
        self.rest = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        where = (x.flatten(1)[:, 0] > 0).nonzero()[:, 0]
        kept = (h @ self.rest).index_add(0, where, self.some(h[where]))
        return kept + self.table(torch.arange(1))


@pytest.mark.parametrize("sizes", [(20,), (3, 9, 8)])
def test_all_samples_count_where_a_layer_receives_some(sizes: tuple[int, ...]):
    model, (x, y) = Picked(), data(20)
    asked = Variance(), KFLR()
    found = accumulate(model, nn.CrossEntropyLoss(), batches(x, y, *sizes), *asked, progress=False)
    for name, parameter in model.named_parameters():
        losses = [nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(20)]
        each = torch.stack([torch.autograd.grad(loss / 20, parameter)[0] for loss in losses])
        assert_same(found[name, "variance"], each.var(0, correction=0))
    h = torch.tanh(model.first(x.flatten(1)))[x[:, 0, 0, 0] > 0].detach()
    assert_same(found["some.weight", "kflr"][1], h.T @ h / 20)


def test_values_of_several_samples_are_not_added() -> None:
    """They would broadcast, if there is only one."""
    x, y = data()
    more, one = (run_of(x[:n], y[:n]) for n in (3, 1))
    with pytest.raises(ShapeError, match="are not added"):
        more + one
    assert_same((more + more)["4.bias", "grad_batch"], 2 * more["4.bias", "grad_batch"])


def run_of(x: Tensor, y: Tensor) -> Quantities:
    return accumulate(net(), loss(ignored=-100), [(x, y)], BatchGrad(), progress=False)


@pytest.mark.parametrize(
    "extension", [BatchL2Grad(per="token"), SqrtGGNExact(), Jacobians()], ids=lambda e: e.savefield
)
def test_texts_of_several_lengths_are_not_joined(extension: Extension) -> None:
    """The error comes with the batch, not after the last one."""
    model, lossfunc = nn.Sequential(nn.Linear(4, 3), Turned()), nn.CrossEntropyLoss()
    seen = list[int]()

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for length in (5, 4, 4, 4):
            seen.append(length)
            yield torch.randn(2, length, 4), torch.randint(3, (2, length))

    with pytest.raises(ShapeError, match="are joined over batches"):
        accumulate(model, lossfunc, loader(), extension, progress=False)
    assert len(seen) == 2


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


@pytest.mark.parametrize("is_whole", [True, False])
def test_names_with_and_without_those_of_compiled_modules(tmp_path: Path, is_whole: bool) -> None:
    """Results of a compiled model are found, and combined, under the names of the plain one."""
    plain = run(KFLR(), DiagGGNExact())
    model: Any = net()
    if is_whole:
        model = torch.compile(model, backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    loader = batches(*data(), 3, 3, 1)
    found = accumulate(model, loss(), loader, KFLR(), DiagGGNExact(), progress=False)
    assert {path for path, _ in found} == {name for name, _ in model.named_parameters()}
    found.save(tmp_path / "found.safetensors")
    loaded = Quantities.load(tmp_path / "found.safetensors")
    total, blocks = plain + loaded, BlockDiagonal(loaded.field("kflr"))
    for (name, _), own in zip(net().named_parameters(), model.named_parameters(), strict=True):
        assert_same(loaded[name, "diag_ggn_exact"], plain[name, "diag_ggn_exact"])
        assert_same(total[own[0], "diag_ggn_exact"], 2 * plain[name, "diag_ggn_exact"])
        assert_same(blocks[name].dense(), plain.field("kflr")[own[0]].dense())
    with pytest.raises(KeyError):
        loaded["0.wight", "kflr"]
    with pytest.raises(KeyError):
        blocks["0.wight"]


@pytest.mark.parametrize("has_file", [False, True])
def test_results_take_the_memory_of_the_states(
    has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take twice as much at the end; a state that a file is written from stays."""
    kept, over = list[States](), States.over
    monkeypatch.setattr(States, "over", lambda *given: kept.append(over(*given)) or kept[-1])
    model, lossfunc = nn.Linear(3, 2), nn.CrossEntropyLoss()
    data = [(torch.randn(n, 3), torch.arange(n) % 2) for n in (4, 3)]
    options: Any = {"state_file": tmp_path / "state"} if has_file else {}
    found = accumulate(model, lossfunc, data, DiagGGNExact(), progress=False, **options)
    ((name, field), value), *_ = found.items()
    (own,) = kept[0].table[name, field].tensors[""]
    assert (own.data_ptr() == value.data_ptr()) is not has_file
    whole = accumulate(
        model, lossfunc, [tuple(map(torch.cat, zip(*data, strict=True)))], DiagGGNExact()
    )
    assert_close(value, whole[name, field])
