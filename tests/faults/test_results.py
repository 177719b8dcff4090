"""Results belong to their users, and do not outlive the pass they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from tests.cases import Net, Problem, classification, mlp

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


# No two results share memory.


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a result: a tensor, a list of factors, or an eigenbasis."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _tensors(item, f"{name}[{position}]")
    elif hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            yield from _tensors(item, f"{name}.{key}")


def everything(model: nn.Module, fields: list[str]) -> dict[str, Tensor]:
    """Parameters, gradients and results, by name."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        for field in ("data", "grad", *fields):
            found.update(_tensors(getattr(p, field), f"{name}.{field}"))
    return found


def check_memory(problem: Problem, *extensions: Any) -> None:
    """Overwrite one result after the other, and look at the rest."""
    problem.run(*extensions)
    results = everything(problem.model, [extension.savefield for extension in extensions])
    copies = {name: tensor.clone() for name, tensor in results.items()}
    for name, tensor in results.items():
        tensor.fill_(torch.nan)
        changed = [n for n, t in results.items() if n != name and not torch.equal(t, copies[n])]
        assert not changed, f"{name} shares memory with {changed}"
        tensor.copy_(copies[name])


Make = Callable[[], tuple[nn.Module, tuple[int, ...]]]


def _branches() -> Net:
    """Two layers with the same gradient at their outputs."""
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "c": nn.Linear(4, 3)}
    return Net(lambda net, x: net.c(net.a(x) + net.b(x)), **parts)


def _tied() -> Net:
    net = Net(lambda net, x: net.b(net.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    net.b.weight = net.a.weight
    return net


def _own() -> nn.Sequential:
    shifts = [Net(lambda net, x: x + net.shift, shift=nn.Parameter(torch.randn(4))) for _ in "ab"]
    return nn.Sequential(nn.Linear(3, 4), *shifts, nn.Linear(4, 3))


def _embedding() -> Net:
    parts = {"a": nn.Embedding(3, 3), "b": nn.Embedding(3, 3), "c": nn.Linear(3, 3)}
    return Net(lambda net, x: net.c(net.a(x.argmax(1)) + net.b(x.argmax(1))), **parts)


def _recurrent() -> Net:
    parts = {"a": nn.LSTM(2, 3, batch_first=True), "c": nn.Linear(6, 3)}
    return Net(lambda net, x: net.c(net.a(x)[0].flatten(1)), **parts)


NETS: dict[str, Make] = {
    "mlp": lambda: (mlp(), (3,)),
    "biases": lambda: (nn.Sequential(*mlp(), nn.Identity()), (3,)),
    "branches": lambda: (_branches(), (3,)),
    "tied": lambda: (_tied(), (3,)),
    "own": lambda: (_own(), (3,)),
    "normalised": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 3)),
        (3,),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(4, 3)),
        (2, 3),
    ),
    "embedding": lambda: (_embedding(), (3,)),
    "recurrent": lambda: (_recurrent(), (2, 2)),
}

# Each is run twice, with two savefields.
TWICE: dict[str, Callable[[str], Any]] = {
    "BatchGrad": lambda name: BatchGrad(savefield=name),
    "BatchL2Grad": lambda name: BatchL2Grad(savefield=name),
    "BatchDotGrad": lambda name: BatchDotGrad(savefield=name),
    "SumGradSquared": lambda name: SumGradSquared(savefield=name),
    "Variance": lambda name: Variance(savefield=name),
    "ClippedSumGrad": lambda name: ClippedSumGrad(1e6, savefield=name),
    "SqrtGGNExact": lambda name: SqrtGGNExact(savefield=name),
    "SqrtGGNExact_columns": lambda name: SqrtGGNExact(savefield=name, chunk_size=1),
    "SqrtGGNMC": lambda name: SqrtGGNMC(savefield=name),
    "DiagGGNExact": lambda name: DiagGGNExact(savefield=name),
    "BatchDiagGGNExact": lambda name: BatchDiagGGNExact(savefield=name),
}
ON_CHAINS: dict[str, Callable[[str], Any]] = {
    "DiagHessian": lambda name: DiagHessian(savefield=name),
    "BatchDiagHessian": lambda name: BatchDiagHessian(savefield=name),
    "KFAC": lambda name: KFAC(savefield=name),
    "KFLR": lambda name: KFLR(savefield=name),
    "KFLR_expand": lambda name: KFLR("expand", savefield=name),
    "KFRA": lambda name: KFRA(savefield=name),
    "EKFAC": lambda name: EKFAC(savefield=name),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("extension", TWICE)
def test_two_savefields(extension: str, net: str, batch: int) -> None:
    model, shape = NETS[net]()
    make = TWICE[extension]
    check_memory(classification(model, shape, batch), make("one"), make("other"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extension", ON_CHAINS)
def test_two_savefields_of_a_chain(extension: str, batch: int) -> None:
    make = ON_CHAINS[extension]
    check_memory(classification(mlp(), (3,), batch), make("one"), make("other"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("net", NETS)
def test_many_extensions(net: str, batch: int) -> None:
    model, shape = NETS[net]()
    extensions = [make(name) for name, make in TWICE.items()]
    check_memory(classification(model, shape, batch), *extensions)


@pytest.mark.parametrize("batch", [1, 3])
def test_all_kinds_of_factors(batch: int) -> None:
    extensions = [make(name) for name, make in ON_CHAINS.items()]
    check_memory(classification(mlp(), (3,), batch), *extensions)


def test_some_samples_and_all() -> None:
    extensions = [BatchGrad(), BatchGrad([0, 1, 2], "three"), BatchGrad([1], "one")]
    check_memory(classification(mlp(), (3,)), *extensions)


# A result is of the last pass, or there is none.

FIELDS = {"grad_batch": BatchGrad, "diag_ggn_exact": DiagGGNExact, "grad_clipped": ClippedSumGrad}
AFTER = pytest.mark.parametrize("field", FIELDS)


def extension_of(field: str) -> Any:
    """The extension that stores under a name."""
    return FIELDS[field](1.0) if field == "grad_clipped" else FIELDS[field]()


def has(module: nn.Module, field: str) -> list[bool]:
    """Which parameters have the field."""
    return [hasattr(p, field) for p in module.parameters()]


class Heads(nn.Module):
    """A body and two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, side: str) -> Tensor:
        head = self.left if side == "left" else self.right
        result: Tensor = head(torch.tanh(self.body(x)))
        return result


class TwoHeads:
    """An extended model, a loss, and data."""

    def __init__(self) -> None:
        self.model = extend(Heads())
        self.lossfunc = extend(nn.CrossEntropyLoss())

    def loss(self, side: str) -> Tensor:
        """A forward pass on fresh data."""
        output = self.model(torch.randn(3, 3), side)
        result: Tensor = self.lossfunc(output, torch.randint(0, 3, (3,)))
        return result

    def run(self, side: str, *extensions: Any, **options: Any) -> None:
        """A forward and a backward pass."""
        loss = self.loss(side)
        with backpack(*extensions, **options):
            loss.backward()


@AFTER
def test_branch_that_is_not_used(field: str) -> None:
    heads = TwoHeads()
    heads.run("left", extension_of(field))
    heads.run("right", extension_of(field))
    assert has(heads.model.body, field) + has(heads.model.right, field) == [True] * 4
    assert has(heads.model.left, field) == [False] * 2


@AFTER
def test_two_passes_under_one_block(field: str) -> None:
    heads = TwoHeads()
    left, right = heads.loss("left"), heads.loss("right")
    with backpack(extension_of(field)):
        left.backward()
        assert has(heads.model.left, field) == [True] * 2
        right.backward()
    assert has(heads.model.left, field) == [False] * 2
    assert has(heads.model.right, field) == [True] * 2


@AFTER
def test_parameter_that_was_frozen(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    problem.model[0].weight.requires_grad_(False)  # type: ignore[index]
    problem.run(extension_of(field))
    assert has(problem.model, field) == [False, True, True, True]


@AFTER
def test_module_that_was_frozen(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    problem.run(extension_of(field))
    assert has(problem.model, field) == [False, False, True, True]


@AFTER
def test_pass_that_ends_early(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    loss = problem.loss()
    with backpack(extension_of(field)):
        loss.backward(inputs=list(problem.model[2].parameters()))  # type: ignore[index]
    assert has(problem.model, field) == [False, False, True, True]


@AFTER
def test_pass_that_fails(field: str) -> None:
    def fail(module: nn.Module) -> None:
        if isinstance(module, nn.Tanh):
            raise RuntimeError("stop")

    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    loss = problem.loss()
    with (
        pytest.raises(RuntimeError, match="stop"),
        backpack(extension_of(field), extension_hook=fail),
    ):
        loss.backward()
    assert has(problem.model[0], field) == [False, False]  # type: ignore[index]


@AFTER
def test_name_of_another_extension(field: str) -> None:
    """A savefield is cleared whoever filled it."""
    heads = TwoHeads()
    heads.run("left", SumGradSquared(savefield=field))
    heads.run("right", extension_of(field))
    assert has(heads.model.left, field) == [False] * 2


def test_fields_of_other_extensions_stay() -> None:
    heads = TwoHeads()
    heads.run("left", BatchGrad(), BatchGrad(savefield="mine"))
    kept = [(p.grad_batch, p.mine) for p in heads.model.left.parameters()]
    heads.run("right", DiagGGNExact(), BatchGrad())
    for p, (_, mine) in zip(heads.model.left.parameters(), kept, strict=True):
        assert p.mine is mine
        assert not hasattr(p, "grad_batch")


@AFTER
def test_passes_without_the_extension_remove_nothing(field: str) -> None:
    heads = TwoHeads()
    heads.run("left", extension_of(field))
    kept = [getattr(p, field) for p in heads.model.left.parameters()]
    heads.loss("right").backward()
    heads.run("right")
    heads.run("right", Variance())
    assert all(
        getattr(p, field) is value
        for p, value in zip(heads.model.left.parameters(), kept, strict=True)
    )


@AFTER
def test_other_models_are_not_touched(field: str) -> None:
    first, second = TwoHeads(), TwoHeads()
    first.run("left", extension_of(field))
    kept = {p: getattr(p, field) for p in first.model.parameters() if hasattr(p, field)}
    second.run("left", extension_of(field))
    second.run("right", extension_of(field))
    assert len(kept) == 4
    assert all(getattr(p, field) is value for p, value in kept.items())


@AFTER
def test_models_that_were_extended_one_by_one(field: str) -> None:
    """Parts of one module, of which each is a model for itself."""
    left, right = extend(nn.Linear(3, 3)), extend(nn.Linear(3, 3))
    lossfunc = extend(nn.CrossEntropyLoss())
    for part in (left, right):
        loss = lossfunc(part(torch.randn(3, 3)), torch.tensor([0, 1, 2]))
        with backpack(extension_of(field)):
            loss.backward()
    assert has(left, field) + has(right, field) == [True] * 4


@AFTER
@pytest.mark.parametrize("hook", ["extension_hook", "gradient_hook"])
def test_inner_passes_remove_nothing(hook: str, field: str) -> None:
    outer, inner = TwoHeads(), TwoHeads()
    inner.run("left", extension_of(field))
    kept = [getattr(p, field) for p in inner.model.left.parameters()]
    losses = [inner.loss("right")]

    def run(_: object) -> None:
        if losses:
            losses.pop().backward()

    options: dict[str, Any] = {}
    if hook == "extension_hook":
        options["extension_hook"] = run
    else:
        outer.model.body.weight.register_hook(run)
    outer.run("left", extension_of(field), **options)
    assert not losses
    assert has(outer.model.left, field) + has(outer.model.body, field) == [True] * 4
    assert has(inner.model.right, field) == [True] * 2
    for p, value in zip(inner.model.left.parameters(), kept, strict=True):
        assert getattr(p, field) is value


@AFTER
def test_inner_pass_of_the_same_model_removes_nothing(field: str) -> None:
    """What the outer pass stored before stays, where the inner one does not come by."""
    heads = TwoHeads()
    losses = [heads.loss("right")]

    def run(_: object) -> None:
        if losses:
            losses.pop().backward()

    heads.model.left.weight.register_hook(run)
    heads.run("left", extension_of(field))
    assert not losses
    assert has(heads.model.left, field) == [True] * 2
