"""Slips of the pen in a plugin: each is found, with the class and the nearest right name."""

from __future__ import annotations

import random
from collections.abc import Callable
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_checks.advice import probable_slips
from backpack_core import (
    Extension,
    LayerRule,
    backpack,
    extend,
    plugins,
    register,
    unregister,
)
from backpack_core.cli.doctor import examine
from backpack_core.contract import bases
from backpack_core.contract.bases import BASES, JUDGES, Candidate
from backpack_core.errors import (
    PluginCodeError,
    PluginConflictError,
    PluginError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import DiagGGNExact
from backpack_core.plugins.registry import registry
from backpack_core.testing import RuleCase, check_case, temporary_plugin
from backpack_products import FirstOrderExtension, ParametricRule
from backpack_products.declarations import _declarations, _near
from backpack_products.derivatives import second_derivative_mat_prod, second_order
from tests.distributions import FakeDistribution

from sick import loaded_here  # isort: skip


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GainRule(ParametricRule):
    module_types = (Gain,)
    params = ("weight",)
    linear_in_params = ("weight",)

    def _jac_t_mat_prod(self, view: Any, mat: Tensor) -> Any:
        return mat * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: Any, name: str, mat: Tensor) -> Any:
        return mat * view.input


class Field(FirstOrderExtension):
    savefield = "field_of_a_test"

    def read(self, product: Any) -> Any:
        return product.samples


def derived(base: type, **declared: Any) -> type:
    return type("Slip", (base,), {"__module__": __name__, **declared})


def helper(self: Any, view: Any, grad_output: Any, mat: Any) -> Any:
    return mat


AT_REGISTRATION = {
    "a string for a tuple": (
        derived(GainRule, params="weight"),
        r"params must be a tuple of names of parameters. Got 'weight': write params = ('weight',)",
    ),
    "a class for a tuple": (derived(GainRule, module_types=Gain), "write module_types = (Gain,)"),
    "a list": (derived(GainRule, params=["weight"]), "params must be a tuple of names"),
    "no name of a class": (derived(GainRule, module_types=("Gain",)), "with 'Gain'"),
    "no type at all": (derived(GainRule, module_types=()), "module_types must name"),
    "a class that is not there": (
        derived(GainRule, module_types=("torch.nn.Linaer",)),
        "module torch.nn is importable and has no such class: did you mean 'Linear'?",
    ),
    "a declaration nobody knows": (
        derived(GainRule, hesian_is_zero=True),
        "hesian_is_zero = True is not known to any base class: did you mean 'hessian_is_zero'?",
    ),
    "a method nobody calls": (
        derived(GainRule, _second_derivative_matprod=helper),
        "_second_derivative_matprod() is not known to any base class: did you mean "
        "'_second_derivative_mat_prod'?",
    ),
    "a flag that is none": (
        derived(GainRule, hessian_is_zero="yes"),
        "hessian_is_zero must be a bool. Got 'yes'",
    ),
    "a declaration of another base": (
        derived(
            LayerRule,
            module_types=(Gain,),
            linear_in_params=("weight",),
            _jac_t_mat_prod=lambda self, view, mat: mat,
        ),
        "linear_in_params = ('weight',) means nothing here: it is a declaration of ParametricRule",
    ),
    "a second derivative of a base that has none": (
        derived(
            LayerRule,
            module_types=(Gain,),
            hessian_is_zero=True,
            _jac_t_mat_prod=lambda self, view, mat: mat,
        ),
        "hessian_is_zero = True means nothing here: it is a declaration of SecondOrderRule",
    ),
    "linear in what it does not cover": (
        derived(GainRule, linear_in_params=("wieght",)),
        "linear_in_params names 'wieght', which is not in params: did you mean 'weight'?",
    ),
    "needs of another kind": (derived(Field, needs=("dense",)), "needs must be a tuple of oper"),
    "a need alone": (derived(Field, needs=print), "needs must be a tuple of operations. Got"),
    "a field of another extension": (
        derived(Field, savefield="grad_batch"),
        "savefield 'grad_batch' is that of BatchGrad of backpack-plugin-firstorder",
    ),
    "a field that is no name": (derived(Field, savefield="a b"), "must be a Python identifier"),
    "a field of torch": (
        derived(Field, savefield="shape"),
        "savefield 'shape' would hide torch.Tensor.shape of the parameters",
    ),
    "a degree that is no number": (
        derived(Field, degree="1"),
        "degree must be a number, or None. Got '1'",
    ),
    "a way to combine that nobody knows": (
        derived(Field, over_batches="average"),
        "over_batches must be 'sum', 'concatenate', a function of two tensors, or an OverBatches. "
        "Got 'average'",
    ),
    "no way to combine": (derived(Field, over_batches=None), "or an OverBatches. Got None"),
    "a parameter of a method too few": (
        derived(GainRule, _param_jac_t_mat_prod=lambda self, view, mat: mat),
        "is called as _param_jac_t_mat_prod(self, view: 'View', name: 'str', mat: 'Tensor')",
    ),
    "a rule with arguments": (
        derived(GainRule, __init__=lambda self, size: None),
        "a rule is made without arguments, as Slip(): missing a required argument: 'size'",
    ),
    "savefeild": (derived(Field, savefeild="x"), "did you mean 'savefield'?"),
    "one need": (derived(Field, need=(print,)), "did you mean 'needs'?"),
    "one type": (
        derived(LayerRule, module_type=(Gain,), _jac_t_mat_prod=lambda self, view, mat: mat),
        "is not known to any base class: did you mean 'module_types'?",
    ),
    "a method that must be there": (
        derived(FirstOrderExtension, savefield="x", raed=lambda self, product: product),
        "does not implement read: did you mean it by 'raed'?",
    ),
}


@pytest.mark.parametrize("name", AT_REGISTRATION)
def test_found_at_registration(name: str) -> None:
    plugins.ensure_loaded()
    kind, expected = AT_REGISTRATION[name]
    with pytest.raises(PluginError) as caught:
        register(kind)
    assert expected in str(caught.value)
    assert "Slip" in str(caught.value)
    assert "?." not in str(caught.value)
    with pytest.raises(PluginError, match="No plugin named"):
        unregister("Slip")  # nothing of it stays behind


def test_a_rule_of_another_base_is_not_taken_to_be_linear() -> None:
    kind = derived(LayerRule, _jac_t_mat_prod=lambda self, view, mat: mat, hessian_is_zero=True)
    assert not second_order(kind()).hessian_is_zero
    with pytest.raises(UnsupportedError, match=r"derive it from backpack_products\.SecondOrder"):
        second_derivative_mat_prod(kind(), SimpleNamespace(path="Gain"), None, None)


def test_judges_are_asked_when_a_class_is_registered_and_at_the_first_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugins.ensure_loaded()
    asked: list[Candidate] = []

    def strict(candidate: Candidate) -> list[str]:
        asked.append(candidate)
        return [] if candidate.module is None else ["it is too general"]

    monkeypatch.setattr(bases, "JUDGES", [*JUDGES, strict])
    model = Gain()
    with temporary_plugin(GainRule):
        assert asked == [(GainRule, None, True)]
        with pytest.raises(PluginError, match=r"GainRule .* of 'GainRule .*: it is too general\."):
            extend(model)
    assert asked[1:] == [(GainRule, model, False)]


def test_without_checks_wrong_kinds_are_refused_and_no_advice_is_given(monkeypatch: Any) -> None:
    plugins.ensure_loaded()
    monkeypatch.setattr(bases, "JUDGES", [each for each in JUDGES if each is not probable_slips])
    with temporary_plugin(derived(GainRule, module_types=("torch.nn.Linaer",))):
        pass
    for name in ("a flag that is none", "a string for a tuple", "a field of torch"):
        kind, expected = AT_REGISTRATION[name]
        with pytest.raises(PluginError, match="Slip") as caught:
            register(kind)
        assert expected in str(caught.value)


@pytest.mark.parametrize("types", [(Gain, f"{__name__}.Gain"), (Gain, Gain)])
def test_a_class_that_is_named_twice(types: tuple[Any, ...]) -> None:
    with temporary_plugin(derived(GainRule, module_types=types)):
        assert type(registry.resolve(Gain()).rule).__name__ == "Slip"


@pytest.mark.parametrize("name", ["no type at all", "a class for a tuple"])
def test_the_kit_says_so_too(name: str) -> None:
    kind, expected = AT_REGISTRATION[name]
    with pytest.raises(UsageError, match="cannot be run") as caught:
        check_case(RuleCase(Gain, lambda n: torch.randn(n, 3), rule=kind))
    assert expected in str(caught.value)


def test_what_was_registered_is_taken_back() -> None:
    assert register(GainRule) is GainRule
    unregister(GainRule)
    with pytest.raises(PluginError, match="No plugin named 'GainRule'"):
        unregister(GainRule)


def test_what_an_author_adds_is_free() -> None:
    free = derived(GainRule, TOLERANCE=1e-3, _helper=helper, _params=("x",), names="weight")
    with temporary_plugin(free):
        pass


def test_what_is_registered_names_the_file() -> None:
    class Sloppy(GainRule):
        params = "weight"  # type: ignore[assignment]

    with pytest.raises(PluginError, match=rf"Sloppy \({__file__}:\d+\): params"):
        register(Sloppy)


@pytest.mark.parametrize("params", [("wieght",), ("gain",), ("wieght", "bias")])
def test_params_that_the_module_does_not_have(params: tuple[str, ...]) -> None:
    kind = derived(GainRule, params=params, linear_in_params=())
    with temporary_plugin(kind), pytest.raises(PluginError) as caught:
        extend(nn.Sequential(Gain()))
    expected = f"params names {params[0]!r}, which a Gain does not have; it has weight"
    assert expected in str(caught.value)
    assert "Slip" in str(caught.value)
    assert "?." not in str(caught.value)


def test_params_of_which_a_module_has_some() -> None:
    kind = derived(GainRule, params=("weight", "bias"))
    with temporary_plugin(kind):
        extend(nn.Sequential(Gain()))


class Uninitialised(Extension):
    savefield = "uninitialised"

    def __init__(self) -> None:
        self.factor = 2

    def read(self, product: Any) -> Any:
        return 0


def test_extension_that_does_not_call_super() -> None:
    with pytest.raises(UsageError, match=r"call super\(\).__init__\(...\) in Uninitialised"):
        backpack(Uninitialised())


def run(*rules: type, extension: Extension, model: nn.Module | None = None) -> None:
    with temporary_plugin(*rules):
        model = extend(model or nn.Sequential(nn.Linear(3, 3), Gain()))
        lossfunc = extend(nn.MSELoss())
        loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 3))
        with backpack(extension):
            loss.backward()


def returning(name: str, value: Any) -> type:
    return derived(GainRule, **{name: lambda *_: value})


@pytest.mark.parametrize("value", [None, 3.0, "text"])
@pytest.mark.parametrize("method", ["_jac_t_mat_prod", "_param_jac_t_mat_prod", "_param_product"])
def test_what_is_no_tensor(method: str, value: Any) -> None:
    with pytest.raises(ShapeError) as caught:
        run(returning(method, value), extension=DiagGGNExact())
    for word in (f"Slip.{method}", f"returned {value!r}", "Gain '1'", "DiagGGNExact"):
        assert word in str(caught.value)


def test_an_extension_that_reads_nothing() -> None:
    silent: Callable[..., Any] = derived(Field, read=lambda self, product: None)
    with pytest.raises(ShapeError, match=r"Slip.read returned None(.|\n)*\[Slip, at Linear '0'"):
        run(extension=silent(), model=nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize("method", ["check", "mixes_samples", "batch_axis", "_jac_t_mat_prod"])
@pytest.mark.parametrize("error", [KeyError, AttributeError, ValueError, OSError, StopIteration])
def test_errors_of_any_type_are_wrapped(method: str, error: type[Exception]) -> None:
    def fails(*_: Any) -> Any:
        raise error("on purpose")

    with pytest.raises(PluginCodeError) as caught:
        run(derived(GainRule, **{method: fails}), extension=DiagGGNExact())
    assert isinstance(caught.value.__cause__, error)
    for word in (error.__name__, "on purpose", f"{__file__}:", "in fails"):
        assert word in str(caught.value)


def test_what_is_not_implemented_can_be_caught_as_such() -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("on purpose")

    with pytest.raises(NotImplementedError, match="on purpose") as caught:
        run(derived(GainRule, _jac_t_mat_prod=fails), extension=DiagGGNExact())
    assert isinstance(caught.value, PluginCodeError)


def test_memory_that_is_used_up_stays_what_it_is() -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    with pytest.raises(torch.OutOfMemoryError):
        run(derived(GainRule, _jac_t_mat_prod=fails), extension=DiagGGNExact())


# What the doctor sees, without a model.

RULE = """
from backpack_core import LayerRule

class SlipRule(LayerRule):
    module_types = ("{name}",)
    def _jac_t_mat_prod(self, view, mat):
        return mat
"""


@pytest.fixture
def doctor(fake_distribution: FakeDistribution, monkeypatch: Any) -> Callable[..., Any]:
    def judge(source: str, target: str) -> Any:
        fake_distribution(
            "backpack-plugin-slip",
            entry_points={"slip": f"slip_module:{target}"},
            modules={"slip_module": source},
        )
        monkeypatch.setattr("backpack_core.cli.doctor.load_isolated", loaded_here)
        # It looks for the models of transformers, whose import takes seconds each.
        monkeypatch.setenv("BACKPACK_BLOCK_PLUGINS", "backpack-plugin-transformers")
        findings = examine(limit=60).findings
        # Families name libraries that may not be installed, which is found, too.
        (found,) = [f for f in findings if "backpack-plugin-slip" in f.who]
        return found

    return judge


def test_doctor_looks_for_classes(doctor: Any) -> None:
    found = doctor(RULE.format(name="torch.nn.Linaer"), "SlipRule")
    assert found.severity == "fault"
    for word in ("SlipRule", "slip_module.py:4", "has no such class", "did you mean 'Linear'?"):
        assert word in found.problem


def test_doctor_looks_for_libraries(doctor: Any) -> None:
    found = doctor(RULE.format(name="no_such_library.Layer"), "SlipRule")
    assert found.severity == "note"
    assert "no_such_library is not installed" in found.problem
    assert "'no_such_library.Layer'" in found.problem


def test_doctor_looks_for_fields(doctor: Any) -> None:
    found = doctor(
        "from backpack_products import FirstOrderExtension\n"
        "class Mine(FirstOrderExtension):\n"
        "    savefield = 'grad_batch'\n"
        "    def read(self, product):\n        return product.samples\n",
        "Mine",
    )
    assert found.severity == "warning"
    assert "Mine both save under 'grad_batch'" in found.problem


def test_conflict_is_told_apart() -> None:
    plugins.ensure_loaded()
    with pytest.raises(PluginConflictError):
        register(AT_REGISTRATION["a field of another extension"][0])


def test_a_library_judges_what_its_classes_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of a class is said with what core says."""
    asked: list[type] = []

    def judged(candidate: Candidate) -> list[str]:
        asked.append(candidate.cls)
        return ["its weight is not known"]

    monkeypatch.setattr(bases, "JUDGES", [*JUDGES, judged])
    with pytest.raises(PluginError, match=r"module_types must .*; its weight is not known"):
        register(derived(GainRule, module_types=()))
    assert [cls.__name__ for cls in asked] == ["Slip"]


def test_quick_comparison_finds_what_difflib_finds() -> None:
    known, draw = [*_declarations((*BASES,))], random.Random(0)
    found = 0
    for _ in range(1000):
        letters = [*draw.choice(known)]
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(letters))
            letters[place : place + draw.randrange(2)] = draw.choice(["", "_", "s", "x"])
        name, least = "".join(letters) or "x", draw.choice([0.8, 0.92])
        expected = {*get_close_matches(name, known, len(known), least)}
        assert expected <= {*_near(name, least)}
        found += len(expected)
    assert found > 500
