"""A run is resumed from its own state file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    DiagGGNExact,
    GradInner,
    ProjectedGrad,
    SumGradSquared,
)
from backpack_data import Quantities, accumulate
from tests.data.problems import batches, data, loss


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def normalised(model: nn.Module) -> nn.Module:
    model.eval().get_buffer("2.running_var").mul_(3)
    return model


def smoothed() -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=0.3).double()


def reweighted() -> nn.Module:
    lossfunc = loss()
    lossfunc.get_buffer("weight")[0] = 3.0
    return lossfunc


def begun(path: Path, sizes: tuple[int, ...], **changes: Any) -> Quantities:
    x, y = data()
    given: dict[str, Any] = {
        "model": net().eval(),
        "lossfunc": loss(),
        "loader": batches(x, y, *sizes),
        "extensions": (DiagGGNExact(), EKFAC()),
    }
    given |= changes
    model, extensions = given.pop("model"), given.pop("extensions")
    lossfunc, loader = given.pop("lossfunc"), given.pop("loader")
    options: dict[str, Any] = {"state_file": path, "every": 1, "progress": False}
    options |= {k: given.pop(k) for k in ("normaliser",) if k in given}
    return accumulate(model, lossfunc, loader, *extensions, **options)


def frozen(model: nn.Module) -> nn.Module:
    model.get_parameter("4.bias").requires_grad_(False)
    return model


def of_more() -> list[tuple[Tensor, Tensor]]:
    return [*batches(*data(), 3, 3, 1), *batches(*data(), 7)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loader": batches(data()[0] + 1, data()[1], 3, 3, 1)}, "gave others"),
        ({"loader": batches(*data(), 2, 4, 1)}, "gave others"),
        ({"loader": batches(data()[0][:3], data()[1][:3], 3)}, "another number"),
        ({"loader": of_more()}, "another number"),
        ({"lossfunc": loss("sum")}, "reduction='sum'"),
        ({"lossfunc": smoothed()}, "label_smoothing=0.3"),
        ({"lossfunc": loss(ignored=1)}, "ignore_index=1"),
        ({"lossfunc": nn.CrossEntropyLoss(ignore_index=2)}, '"loss"'),
        ({"lossfunc": reweighted()}, "buffer weight of the loss"),
        ({"model": normalised(net())}, "buffer 2.running_var of the model"),
        ({"model": frozen(net().eval())}, '"model"'),
        ({"extensions": (DiagGGNExact(subsampling=[0]), EKFAC())}, r"subsampling=\(0,\)"),
        ({"extensions": (DiagGGNExact(), EKFAC(weight_sharing="expand"))}, "'expand'"),
    ],
)
def test_of_another_run(changes, said, tmp_path: Path) -> None:
    begun(tmp_path / "state", (3, 3, 1))
    with pytest.raises(UsageError, match=f"state of another run.*{said}"):
        begun(tmp_path / "state", (3, 3, 1), **changes)


def test_of_the_same_run(tmp_path: Path) -> None:
    first = begun(tmp_path / "state", (3, 3, 1))
    again = begun(tmp_path / "state", (3, 3, 1))
    for name, tensor in first.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)


class Counted(nn.Module):
    """Multiplies by a buffer that stays, and has another that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 3).double()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return self.layer(x.flatten(1)) * self.get_buffer("scale")


def test_buffers_that_change_as_the_model_runs_and_those_that_do_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Counted()  # in train mode
    given: dict[str, Any] = {"model": model, "extensions": (DiagGGNExact(),)}
    first = begun(tmp_path / "state", (3, 3, 1), **given)
    for _ in range(2):
        again = begun(tmp_path / "state", (3, 3, 1), **given)
        model.get_buffer("calls").zero_()  # as in another process
    for name, tensor in first.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
    model.get_buffer("scale").mul_(2)
    with pytest.raises(UsageError, match="buffer scale of the model"):
        begun(tmp_path / "state", (3, 3, 1), **given)


def test_names_of_any_characters(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name, part in net().eval().named_children():
        model.add_module(f"a|%7C {name}", part)
    given: dict[str, Any] = {"model": model, "extensions": (KFAC(savefield="kü"),)}
    first = begun(tmp_path / "state", (3, 3, 1), **given)
    again = begun(tmp_path / "state", (3, 3, 1), **given)
    first.save(tmp_path / "results")
    loaded = Quantities.load(tmp_path / "results")
    assert loaded.keys() == first.keys() == again.keys()
    for name, tensor in first.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
        assert torch.equal(loaded.tensors()[name], tensor)
    assert "a|%7C 1.weight" in first.summary()


def test_files_of_two_kinds(tmp_path: Path) -> None:
    results = begun(tmp_path / "state", (3, 3, 1))
    results.save(tmp_path / "results")
    with pytest.raises(UsageError, match="two kinds"):
        Quantities.load(tmp_path / "state")
    with pytest.raises(UsageError, match="two kinds"):  # results would be overwritten
        begun(tmp_path / "results", (3, 3, 1))
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(UsageError, match=r"is not a file of backpack_data"):
        Quantities.load(tmp_path / "text")
    with pytest.raises(UsageError, match="no folder"):
        begun(tmp_path / "nowhere" / "state", (3, 3, 1))


def test_the_order_of_parameters_is_kept(tmp_path: Path) -> None:
    """Files have names in another order, and rows of matrices are in that of the model."""
    found = begun(tmp_path / "state", (3, 3, 1), extensions=(KFAC(),))
    found.save(tmp_path / "results")
    loaded = Quantities.load(tmp_path / "results")
    assert [*loaded] == [*found]
    assert [*loaded.field("kfac")] == [name for name, _ in net().named_parameters()]


def test_the_order_of_a_model_where_batches_differ() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(9, 3) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            result: Tensor = self.heads[which](x.flatten(1))
            return result

    x, y = data()
    loader = [((x, 1), y), ((x, 0), y)]
    model = Heads().double()
    found = accumulate(model, loss(), loader, DiagGGNExact(), progress=False)
    assert [path for path, _ in found] == [name for name, _ in model.named_parameters()]


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_that_are_those_of_all_samples(reduction: str) -> None:
    """Outputs [N, 1] and targets [N] make [N, N] losses: no batch says what the whole is."""
    x, y = data()
    model, lossfunc = nn.Sequential(nn.Flatten(), nn.Linear(9, 1)).double(), nn.MSELoss
    batches = [(x, y.double())]
    with pytest.raises(UnsupportedError, match="target has shape"):
        accumulate(model, lossfunc(reduction=reduction), batches, SumGradSquared(), progress=False)


def test_what_has_no_trained_parameters_or_is_a_class() -> None:
    x, y = data()
    with pytest.raises(UsageError, match="trained parameters"):
        accumulate(net().requires_grad_(False), loss(), [(x, y)], DiagGGNExact())
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        accumulate(net(), loss(), [(x, y)], DiagGGNExact())
    with pytest.raises(UsageError, match=r"write CrossEntropyLoss\(\)"):
        accumulate(net(), nn.CrossEntropyLoss, [(x, y)], DiagGGNExact())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="it is iterated again"):
        accumulate(net().eval(), loss(), iter([(x, y)]), EKFAC(), progress=False)


class Shown(nn.Module):
    """An activation with a setting that it shows."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Slower below zero."""
        return torch.where(x > 0, x, self.slope * x)

    def extra_repr(self) -> str:
        """The setting."""
        return str(self.slope)


class Wrapped(nn.Module):
    """A loss inside of another one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.each = nn.CrossEntropyLoss(**options)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.each(output, target)
        return loss


def queries(value: float) -> dict[str, Tensor]:
    return {name: torch.full((2, *p.shape), value) for name, p in net().named_parameters()}


def divisors(value: float) -> dict[str, Tensor]:
    return {name: torch.full(p.shape, value) for name, p in net().named_parameters()}


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"extensions": (GradInner(queries(1.0)),)}, {"extensions": (GradInner(queries(2.0)),)}),
    ({"extensions": (ProjectedGrad(4),)}, {"extensions": (ProjectedGrad(4, seed=1),)}),
    ({"extensions": (ProjectedGrad(4),)}, {"extensions": (ProjectedGrad(4, "gaussian"),)}),
    (
        {"extensions": (ProjectedGrad(4, divisors=divisors(1.0)),)},
        {"extensions": (ProjectedGrad(4, divisors=divisors(2.0)),)},
    ),
    ({"lossfunc": Wrapped()}, {"lossfunc": Wrapped(ignore_index=1)}),
]


@pytest.mark.parametrize("pair", SETTINGS, ids=["queries", "seed", "kind", "divisors", "inner"])
def test_of_settings_that_are_no_numbers(
    pair: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    """Tensors and objects among the settings, and the settings of a loss in a loss."""
    for _ in range(2):  # an extension may have stored something by then
        begun(tmp_path / "state", (3, 3, 1), **pair[0])
    with pytest.raises(UsageError, match="is the state of another run"):
        begun(tmp_path / "state", (3, 3, 1), **pair[1])


ACTIVATIONS: list[tuple[nn.Module, nn.Module]] = [
    (nn.Tanh(), nn.ReLU()),
    (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    (nn.Dropout(0.1).eval(), nn.Dropout(0.2).eval()),
    (nn.Softplus(1.0), nn.Softplus(2.0)),
    (Shown(0.1), Shown(0.2)),
    (nn.Sequential(nn.Tanh()), nn.Sequential(nn.Sigmoid())),
    (nn.BatchNorm1d(4, 1e-5, affine=False).eval(), nn.BatchNorm1d(4, 1e-3, affine=False).eval()),
]


@pytest.mark.parametrize("pair", ACTIVATIONS, ids=lambda pair: str(pair[1]).replace("\n", ""))
def test_of_other_modules(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    """Modules without parameters are a part of the model."""
    path = tmp_path / "state"

    def model(module: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        found = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Identity(), nn.Linear(4, 3))
        found[2] = module
        return found.double().eval()

    begun(path, (3, 3, 1), model=model(pair[0]), extensions=(DiagGGNExact(),))
    again = begun(path, (3, 3, 1), model=model(pair[0]), extensions=(DiagGGNExact(),))
    assert again.batches == 3
    with pytest.raises(UsageError, match=r'is the state of another run: it has {"model"'):
        begun(path, (3, 3, 1), model=model(pair[1]), extensions=(DiagGGNExact(),))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum()


def cubed(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(3).sum()


def test_of_another_function(tmp_path: Path) -> None:
    def go(lossfunc: Any) -> None:
        begun(
            tmp_path / "state",
            (3, 3, 1),
            lossfunc=lossfunc,
            normaliser=lambda x, y: None,
            extensions=(SumGradSquared(),),
        )

    go(summed)
    with pytest.raises(UsageError, match=r"it has .*summed.*this run has .*cubed"):
        go(cubed)
