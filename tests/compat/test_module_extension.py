"""Module extensions: one pair (extension, module type) by hand, as the incumbent has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack_core import backpack, extend
from backpack_core.errors import PluginCodeError, ShapeError, UnsupportedError, UsageError
from backpack_secondorder import diag_ggn
from tests import oracle
from tests.cases import Problem, classification

IO = ("input0", "input1", "output")


class Scale(nn.Module):
    """``y = w x``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleBatchGrad(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])
        self.seen: list[tuple[Any, ...]] = []

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        self.seen.append((ext, module, g_inp, g_out, bpQuantities))
        assert module.output.shape == module.input0.shape
        return (g_out[0] * module.input0).flatten(1).sum(1, keepdim=True)


class ScaleDiagGGN(ModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])
        self.seen: list[tuple[Any, ...]] = []

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        self.seen.append((ext, module, g_inp, g_out, bpQuantities))
        return torch.einsum("vnd,nd->vn", bpQuantities, module.input0).square().sum()[None]

    def backpropagate(
        self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Tensor:
        assert module.output.shape == bpQuantities.shape[1:]
        return bpQuantities * module.weight


def scaled() -> tuple[nn.Sequential, Problem]:
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Tanh(), nn.Linear(4, 3))
    return model, classification(model, (3,))


def test_first_order() -> None:
    model, problem = scaled()
    expected = problem.expected(oracle.individual_gradients)
    by_hand, extension = ScaleBatchGrad(), BatchGrad()
    extension.set_module_extension(Scale, by_hand)
    problem.run(extension)
    problem.compare("grad_batch", expected)
    ((ext, module, g_inp, g_out, quantities),) = by_hand.seen
    assert ext is extension
    assert module is model[1]
    assert g_inp == (None,)
    assert [g.shape for g in g_out] == [(3, 4)]
    assert quantities is None
    assert not any(hasattr(module, name) for name in IO)


def test_second_order() -> None:
    model, problem = scaled()
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    by_hand, extension = ScaleDiagGGN(), DiagGGNExact()
    extension.set_module_extension(Scale, by_hand)
    problem.run(extension)
    problem.compare("diag_ggn_exact", expected)
    ((_, _, g_inp, _, quantities),) = by_hand.seen
    assert g_inp == (None,)
    assert quantities.shape == (3, 3, 4)
    assert not any(hasattr(model[1], name) for name in IO)


def test_only_this_instance_is_meant() -> None:
    """Two extensions with one propagator: the other keeps the layer rules."""
    _, problem = scaled()
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    by_hand, other = DiagGGNExact(), diag_ggn.DiagGGNExact(savefield="ruled")
    by_hand.set_module_extension(Scale, ScaleDiagGGN())
    with pytest.warns(UserWarning, match="Scale '1' has no layer rule"):
        problem.run(by_hand, other)
    problem.compare("diag_ggn_exact", expected)
    problem.compare("ruled", expected)


def test_a_known_layer_can_be_replaced() -> None:
    class Seven(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["bias"])

        def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> int:
            return 7

    problem = classification(nn.Linear(3, 3), (3,))
    extension = BatchGrad()
    extension.set_module_extension(nn.Linear, Seven(), overwrite=True)
    problem.run(extension)
    assert problem.model.bias.grad_batch == 7  # type: ignore[union-attr]
    assert not hasattr(problem.model.weight, "grad_batch")


def test_loss_by_hand() -> None:
    """At a loss, nothing has arrived yet, and what is returned starts the second order."""

    class Squares(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ((x - y) ** 2).sum()

    class Start(ModuleExtension):
        def backpropagate(
            self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
        ) -> Tensor:
            assert bpQuantities is None
            assert module.input1.shape == module.input0.shape
            n, d = module.input0.shape
            return 2**0.5 * torch.eye(d).to(module.input0).unsqueeze(1).expand(d, n, d)

    problem = Problem(nn.Linear(3, 2), (torch.randn(4, 3),), Squares(), torch.randn(4, 2))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    extension = DiagGGNExact()
    extension.set_module_extension(Squares, Start())
    problem.run(extension)
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_loss_of_a_known_type_by_hand(reduction: str) -> None:
    """The layer rule of the loss starts nothing then: what is sent is the module extension's."""

    class Start(ModuleExtension):
        def backpropagate(
            self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
        ) -> Tensor:
            assert bpQuantities is None
            return 3 * torch.ones_like(module.input0).unsqueeze(0)

    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss(reduction=reduction))
    x = torch.randn(4, 3)
    extension = DiagGGNExact()
    extension.set_module_extension(nn.MSELoss, Start(), overwrite=True)
    loss = lossfunc(model(x), torch.randn(4, 2)).sum()
    with backpack(extension):
        loss.backward()
    expected = (9 * x.square()).sum(0).expand(2, 3)
    assert torch.allclose(model.weight.diag_ggn_exact, expected)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_nothing_to_pass_on() -> None:
    _, problem = scaled()
    extension = DiagGGNExact()
    extension.set_module_extension(nn.Tanh, ModuleExtension(), overwrite=True)
    with (
        pytest.warns(UserWarning, match="not been overwritten"),
        pytest.raises(ShapeError, match=r"ModuleExtension.backpropagate returned None at Tanh '2'"),
    ):
        problem.run(extension)


@pytest.mark.parametrize(
    "wrong", [lambda mat: mat[..., :1], lambda mat: mat[:, :2], lambda mat: (mat,)]
)
def test_what_has_another_shape_than_the_input(wrong: Callable[[Tensor], Any]) -> None:
    class Wrong(ScaleDiagGGN):
        def backpropagate(self, *args: Any) -> Any:
            return wrong(super().backpropagate(*args))

    _, problem = scaled()
    extension = DiagGGNExact()
    extension.set_module_extension(Scale, Wrong())
    with pytest.raises(ShapeError, match=r"Wrong.backpropagate returned .* at Scale '1'"):
        problem.run(extension)


def test_exception_inside_leaves_no_inputs_on_the_module() -> None:
    class Failing(ScaleBatchGrad):
        def weight(self, *args: Any) -> Tensor:
            raise KeyError("on purpose")

    model, problem = scaled()
    extension = BatchGrad()
    extension.set_module_extension(Scale, Failing())
    with pytest.raises(PluginCodeError, match="on purpose"):
        problem.run(extension)
    assert not any(hasattr(model[1], name) for name in IO)


def test_frozen_parameter() -> None:
    model, problem = scaled()
    model[1].weight.requires_grad_(False)
    by_hand, extension = ScaleBatchGrad(), BatchGrad()
    extension.set_module_extension(Scale, by_hand)
    problem.run(extension)
    assert not by_hand.seen


def test_overwrite() -> None:
    extension = BatchGrad()
    first, second = ScaleBatchGrad(), ScaleBatchGrad()
    extension.set_module_extension(Scale, first)
    with pytest.raises(UsageError, match=r"for Scale already: pass overwrite=True"):
        extension.set_module_extension(Scale, second)
    assert extension.module_extensions[Scale] is first
    extension.set_module_extension(Scale, second, overwrite=True)
    _, problem = scaled()
    problem.run(extension)
    assert not first.seen
    assert second.seen


def test_wrong_arguments() -> None:
    extension = BatchGrad()
    with pytest.raises(UsageError, match=r"module must be a subclass of torch\.nn\.Module"):
        extension.set_module_extension(Scale(), ScaleBatchGrad())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a ModuleExtension"):
        extension.set_module_extension(Scale, ScaleBatchGrad)  # type: ignore[arg-type]

    class NoMethod(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

    with pytest.raises(NotImplementedError, match=r"NoMethod has no method for 'weight'"):
        NoMethod()


def test_subclasses_are_not_meant() -> None:
    class Other(Scale):
        pass

    by_hand, extension = ScaleBatchGrad(), BatchGrad()
    extension.set_module_extension(Scale, by_hand)
    problem = classification(nn.Sequential(nn.Linear(3, 3), Other()), (3,))
    with pytest.warns(UserWarning, match="Other '1' has no layer rule"):
        problem.run(extension)
    assert not by_hand.seen


def test_several_extensions_see_the_same_io() -> None:
    model, problem = scaled()
    extended = extend(model)
    extension = BatchGrad()
    extension.set_module_extension(Scale, ScaleBatchGrad())
    loss = problem.loss()
    with backpack(extension, DiagGGNExact()), pytest.warns(UserWarning, match="no layer rule"):
        loss.backward()
    assert extended[1].weight.grad_batch.shape == (3, 1)


def test_module_extension_refuses_a_shared_parameter() -> None:
    class Zero(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return torch.zeros(1)

    model, extension = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), BatchGrad()
    model[1].weight = model[0].weight
    extension.set_module_extension(nn.Linear, Zero(), overwrite=True)
    with pytest.raises(UnsupportedError, match="used more than once"):
        classification(model, (3,)).run(extension)
