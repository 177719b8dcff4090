"""What ``extend`` installs and ``unextend`` removes, and hooks of the user around it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, disable, extend, is_extended, unextend
from backpack_core.errors import (
    AutodiffFallbackWarning,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import BatchGrad, DiagGGNExact, ProjectedGrad
from backpack_core.record.call import path_of
from backpack_core.record.models import OWNER_ATTRIBUTE, owner_of
from tests import oracle
from tests.cases import classification, mlp
from tests.leftovers import live_calls


def state(module: nn.Module) -> list[dict[str, Any]]:
    """Every attribute of every module in it, hooks included."""
    return [
        {k: copy.copy(v) for k, v in vars(part).items() if k != OWNER_ATTRIBUTE}
        for part in module.modules()
    ]


def test_extend_returns_the_same_object() -> None:
    model = mlp()
    assert extend(model) is model
    assert type(model) is nn.Sequential
    assert is_extended(model[0])
    assert is_extended(model)


def test_extend_twice_changes_nothing() -> None:
    model = extend(mlp())
    before = state(model)
    assert state(extend(model)) == before
    assert owner_of(model[0]) is model
    problem = classification(model, (3,))
    problem.check()


def test_parts_extended_one_by_one() -> None:
    model = mlp()
    for part in model:
        extend(part)
    classification(model, (3,)).check()


def test_unextend_leaves_nothing_behind() -> None:
    model = mlp()
    before = state(model)
    problem = classification(model, (3,))
    problem.run(BatchGrad())
    assert state(model) != before
    assert unextend(model) is model
    assert state(model) == before
    assert unextend(model) is model  # twice is harmless
    model(problem.inputs[0]).sum().backward()


def test_unextend_keeps_hooks_of_the_user() -> None:
    model = mlp()
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    unextend(extend(model))
    model[0].register_forward_pre_hook(lambda *_: seen.append(0))
    model(torch.randn(2, 3))
    assert seen == [0, 1]


def test_extend_logs_what_it_extends(logged: list[str]) -> None:
    extend(mlp(), debug=True)
    assert logged == ["extend: Linear '0'", "extend: Tanh '1'", "extend: Linear '2'"]


@pytest.mark.parametrize("trained", [True, False])
def test_deepcopy(trained: bool) -> None:
    model = extend(mlp())
    if trained:
        classification(model, (3,)).run(BatchGrad())
    twin = copy.deepcopy(model)
    assert twin[0].weight is not model[0].weight
    assert is_extended(twin[0])
    classification(twin, (3,)).check()


def test_pickle() -> None:
    model = extend(mlp())
    problem = classification(pickle.loads(pickle.dumps(model)), (3,))
    assert is_extended(problem.model[0])  # type: ignore[index]
    problem.check()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    classification(torch.load(file, weights_only=False), (3,)).check()


def test_hooks_registered_after_unpickling_do_not_replace_ours() -> None:
    """Handles of hooks are counted by process: a fresh one starts again at zero."""
    from torch.utils.hooks import RemovableHandle

    model = extend(mlp())
    data = pickle.dumps(model)
    before = RemovableHandle.next_id
    keys = [*model[0]._forward_hooks, *model[0]._forward_pre_hooks]
    try:
        loaded = pickle.loads(data)
        for register in (loaded[0].register_forward_hook, loaded[0].register_forward_pre_hook):
            RemovableHandle.next_id = max(0, min(keys))
            for _ in range(4):
                register(lambda *_: None)
    finally:
        RemovableHandle.next_id = before
    classification(loaded, (3,)).check()


@pytest.mark.parametrize("wrong", [nn.Linear, nn.Linear(2, 2).weight, "model", lambda x: x, None])
def test_extend_takes_modules_only(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"extend\(\.\.\.\) takes an instance of torch\.nn\.Module"
    ):
        extend(wrong)


def test_extend_a_class_says_how() -> None:
    with pytest.raises(UsageError, match=r"Write Linear\(\.\.\.\)"):
        extend(nn.Linear)  # type: ignore[type-var]


def test_names_of_modules_are_those_in_the_extended_model() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))))
    problem = classification(model, (3,))
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d '1\.0'"):
        problem.run(BatchGrad())


# Forward passes that are not recorded.


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, disable])
def test_nothing_is_recorded(context: Any) -> None:
    before = live_calls()
    model = extend(mlp())
    with context():
        output = model(torch.randn(2, 3))
    assert live_calls() <= before
    if context is disable:
        output.sum().backward()  # a plain gradient
        assert model[0].weight.grad is not None


def test_inner_forward_without_gradients_leaves_the_outer_call_alone() -> None:
    class Gate(nn.Module):
        """Own parameter; uses its child once without and once with gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))
            self.child = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.child(x).sign()
            result: Tensor = self.child(x * self.scale) * gate
            return result

    classification(nn.Sequential(nn.Linear(3, 3), Gate()), (3,)).check()


def test_forward_that_survives_an_exception_inside() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))
            self.child = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.child(x[:, :1])
            except RuntimeError:
                x = self.child(x * self.scale)
            return x

    def fail_before_ours(module: nn.Module, args: Any) -> None:
        if args[0].shape[-1] == 1:
            raise RuntimeError("on purpose")

    model = nn.Sequential(nn.Linear(3, 3), Careful())
    classification(model, (3,)).check()
    unextend(model)[1].child.register_forward_pre_hook(fail_before_ours)
    classification(model, (3,)).check()


def test_forward_that_survives_an_interrupt_inside() -> None:
    """Torch calls no hook then, so the child's record stays open above its parent's."""

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))
            self.child = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            handle = self.child.register_forward_hook(interrupt, prepend=True)
            with contextlib.suppress(KeyboardInterrupt):
                self.child(x)
            handle.remove()
            result: Tensor = self.child(torch.sin(x * self.scale))
            return result

    classification(nn.Sequential(nn.Linear(3, 3), Patient()), (3,)).check()


# Hooks of the user.


def _scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


def _cube_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] ** 3


@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("kind", ["forward", "pre", "both"])
def test_user_hooks_are_operations_around_the_module(
    kind: str, position: int, when: str, prepend: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Tanh(), nn.Linear(4, 3))
    if when == "after":
        extend(model)
    if kind != "pre":
        model[position].register_forward_hook(_scale_output, prepend=prepend)
    if kind != "forward":
        model[position].register_forward_pre_hook(_cube_input, prepend=prepend)
    classification(model, (3,)).check()


def test_user_hooks_around_a_module_without_a_rule() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x + self.shift)

    model = nn.Sequential(nn.Linear(3, 3), Shift(), nn.Linear(3, 3))
    model[1].register_forward_hook(_scale_output)
    with pytest.warns(AutodiffFallbackWarning):
        classification(model, (3,)).check()
    model[1].register_forward_pre_hook(_cube_input)
    classification(model, (3,)).check()


def test_module_changed_between_forward_and_backward() -> None:
    """Train and eval mode are those of the forward pass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    problem = classification(model, (3,))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    model.train()
    with backpack(DiagGGNExact()):
        loss.backward()
    problem.compare("diag_ggn_exact", expected)


def _named(model: nn.Module) -> list[Tensor]:
    """Random projections, which depend on the names of parameters."""
    x = torch.ones(2, 3)
    with backpack(ProjectedGrad(4)):
        extend(nn.MSELoss())(model(x), torch.zeros(2, 3)).backward()
    return [parameter.projected_grad for parameter in model.parameters()]  # type: ignore[attr-defined]


def test_unpickled_models_keep_the_names_of_their_parameters() -> None:
    model = extend(mlp())
    loaded = pickle.loads(pickle.dumps(model))
    for ours, right in zip(_named(loaded), _named(model), strict=True):
        torch.testing.assert_close(ours, right)
    assert owner_of(loaded[0]) is loaded
    part = pickle.loads(pickle.dumps(model[0]))
    part(torch.ones(2, 3))
    assert owner_of(part) is part


def test_unpickled_models_keep_the_declared_axis() -> None:
    x, target = torch.randn(4, 4, 3), torch.zeros(16, 3)
    model = extend(mlp(), batch_axis=1)
    found = []
    for each in (model, pickle.loads(pickle.dumps(model))):
        with backpack(BatchGrad()):
            extend(nn.MSELoss())(each(x).reshape(16, 3), target).backward()
        found.append(each[0].weight.grad_batch)
    torch.testing.assert_close(found[1], found[0])


def test_parts_that_were_extended_before_have_the_path_in_the_whole_model() -> None:
    part = extend(nn.Linear(3, 3))
    assert path_of(part) == "Linear"
    extend(nn.Sequential(nn.Tanh(), nn.Sequential(part)))
    assert path_of(part) == "Linear '1.0'"


def test_modules_put_into_a_model_later_have_their_names_there() -> None:
    model = extend(mlp())
    replaced = copy.deepcopy(model)
    replaced[2] = unextend(copy.deepcopy(model[2]))
    for ours, right in zip(_named(replaced), _named(model), strict=True):
        torch.testing.assert_close(ours, right)
