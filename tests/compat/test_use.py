"""Use as in scripts: contexts, ``CTX``, inputs and outputs on modules, warnings."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import backpack as package
from backpack import backpack, disable, extend, hook_store_io, memory_cleanup
from backpack.context import CTX
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, SumGradSquared, Variance
from backpack_core import is_extended
from backpack_core.errors import BackpackWarning
from tests.leftovers import live_calls

X = torch.randn(4, 3, dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0])


def net() -> tuple[nn.Sequential, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    return extend(model), extend(nn.CrossEntropyLoss())


def test_inputs_and_outputs_after_the_forward_pass() -> None:
    model, lossfunc = net()
    output = model(X)
    assert model[0].input0 is X
    assert torch.equal(model[1].input0, model[0].output)
    assert model[2].input0.requires_grad
    assert torch.equal(model[2].output, output)
    loss = lossfunc(output, Y)
    assert torch.equal(lossfunc.input1, Y)
    loss.backward()
    assert not any(hasattr(m, name) for m in model for name in ("input0", "output"))


def test_they_stay_for_another_backward_pass() -> None:
    model, lossfunc = net()
    loss = lossfunc(model(X), Y)
    with backpack(BatchGrad(), retain_graph=True):
        loss.backward(retain_graph=True)
    assert model[0].input0 is X
    with backpack(BatchGrad()):
        loss.backward()
    assert not hasattr(model[0], "input0")


def test_extension_hooks_see_the_call_in_question() -> None:
    shared = nn.Linear(3, 3)
    model, lossfunc = extend(nn.Sequential(shared, nn.Tanh(), shared)), extend(nn.MSELoss())
    seen: list[Tensor] = []

    def hook(module: nn.Module) -> None:
        if module is shared:
            seen.append(module.input0)  # type: ignore[arg-type]
        assert module.output is not None

    target = torch.zeros(4, 3)
    loss = lossfunc(model(X), target)
    with backpack(extension_hook=hook):
        loss.backward()
    assert torch.equal(seen[1], X)
    assert not torch.equal(seen[0], X)


def test_hooks_on_in_place_modules() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)))
    kinds: list[str] = []
    loss = extend(nn.CrossEntropyLoss())(model(X), Y)
    with backpack(DiagGGNExact(), extension_hook=lambda m: kinds.append(type(m).__name__)):
        loss.backward()
    assert kinds == ["CrossEntropyLoss", "Linear", "ReLU", "Linear"]


def test_nothing_stays_alive() -> None:
    gc.collect()
    before = live_calls()
    for _ in range(3):
        model, lossfunc = net()
        loss = lossfunc(model(X), Y)
        del model, lossfunc, loss
    gc.collect()
    assert live_calls() <= before


def test_models_can_be_copied_and_pickled() -> None:
    model, _ = net()
    model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_extended(other[0])
        assert torch.equal(other[0].input0, X)


def test_disable() -> None:
    model, _ = net()
    assert disable.should_store_io()
    with disable():
        assert not disable.should_store_io()
        model(X)
    assert not hasattr(model[0], "input0")
    with torch.no_grad():
        model(X)
    assert not hasattr(model[0], "input0")


def test_an_extended_model_goes_through_torch_func() -> None:
    """Inside a transform nothing is recorded, and nothing is set on modules."""
    model, lossfunc = net()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(functional_call(model, parameters, (x[None],)), y[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters, X, Y)
    assert not hasattr(model[0], "input0")
    with backpack(BatchGrad()):
        lossfunc(model(X), Y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name] / 4, parameter.grad_batch)  # type: ignore[attr-defined]


def test_store_and_clean_by_hand() -> None:
    module = nn.LSTM(3, 2)
    result = module(X.unsqueeze(0))
    hook_store_io(module, (X, None), result)
    assert module.input0 is X
    assert torch.equal(module.output, result[0])
    memory_cleanup(module)
    assert "output" not in module.__dict__
    assert "input0" not in module.__dict__
    memory_cleanup(module)


def test_ctx_speaks_of_the_block() -> None:
    def hook(module: nn.Module) -> None: ...

    extension = BatchGrad()
    assert CTX.get_active_exts() == ()
    with _quiet(), backpack(extension, extension_hook=hook, debug=True, retain_graph=True):
        assert CTX.get_active_exts() == (extension,)
        assert CTX.is_extension_active(BatchGrad)
        assert not CTX.is_extension_active(DiagGGNExact, KFAC)
        assert CTX.get_extension_hook() is hook
        assert CTX.get_debug()
        assert CTX.get_retain_graph()
    assert CTX.get_active_exts() == ()
    assert not CTX.get_retain_graph()
    CTX.get_extension_hook()(nn.Linear(1, 1))


def _quiet() -> Any:
    """A block in which nothing is computed warns; here that is not the matter."""
    return warnings.catch_warnings(action="ignore")


def test_ctx_can_be_set_without_a_block() -> None:
    model, lossfunc = net()
    seen: list[nn.Module] = []
    CTX.set_active_exts([BatchGrad()])
    CTX.set_extension_hook(seen.append)
    lossfunc(model(X), Y).backward()
    CTX.set_active_exts(())
    CTX.set_extension_hook(package.context.no_op)
    assert model[0].weight.grad_batch.shape == (4, 3, 3)
    assert model[0] in seen


def test_ctx_changes_a_block_until_it_ends() -> None:
    model, lossfunc = net()
    with backpack(BatchGrad()):
        with backpack(SumGradSquared()):
            CTX.set_active_exts((Variance(),))
            CTX.set_debug(True)
            CTX.set_retain_graph(True)
            lossfunc(model(X), Y).backward()
            CTX.set_active_exts(())
            assert CTX.get_active_exts() == ()
        assert isinstance(CTX.get_active_exts()[0], BatchGrad)
        assert not CTX.get_debug()
        lossfunc(model(X), Y).backward()
    weight = model[0].weight
    assert hasattr(weight, "variance")
    assert hasattr(weight, "grad_batch")
    assert not hasattr(weight, "sum_grad_squared")


def test_remove_hooks_takes_back_every_extend() -> None:
    model, lossfunc = net()
    handle = model.register_forward_hook(lambda *_: None)
    CTX.add_hook_handle(handle)
    CTX.remove_hooks()
    assert not is_extended(model[0])
    assert not model[0]._forward_hooks
    assert not model._forward_hooks
    model, lossfunc = extend(model), extend(lossfunc)
    with backpack(BatchGrad()):
        lossfunc(model(X), Y).backward()
    assert model[0].weight.grad_batch.shape == (4, 3, 3)


def test_clearing_the_hooks_of_a_module_ends_extending() -> None:
    """As packages do that want a plain model back."""
    model, lossfunc = net()
    for part in model.modules():
        part._forward_hooks.clear()
    for _ in range(2):
        model(X)
    assert not hasattr(model[0], "input0")
    extend(model)
    with backpack(BatchGrad()):
        lossfunc(model(X), Y).backward()
    assert model[0].weight.grad_batch.shape == (4, 3, 3)


def test_hooks_do_not_keep_modules_alive() -> None:
    CTX.remove_hooks()
    net()
    gc.collect()
    CTX.remove_hooks()


def test_a_block_in_which_nothing_is_computed_warns() -> None:
    with pytest.warns(BackpackWarning, match="computed nothing"), backpack(BatchGrad()):
        pass


@pytest.mark.parametrize("wrong", [BatchGrad, "BatchGrad", None])
def test_what_is_no_extension(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"BatchGrad|None"):
        backpack(wrong)


def test_extend_prints(capsys: pytest.CaptureFixture[str]) -> None:
    extend(nn.Linear(1, 1), debug=True)
    assert "[DEBUG] Extending" in capsys.readouterr().out


def test_use_converter() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.linear(x) + x

    model = extend(Residual(), use_converter=True)
    assert hasattr(model, "sum_module0")
    assert model.scale_module0.weight == 0.5
    loss = extend(nn.MSELoss())(model(X), torch.zeros(4, 3))
    with backpack(BatchGrad()):
        loss.backward()
    assert torch.allclose(model.linear.weight.grad_batch.sum(0), model.linear.weight.grad)
