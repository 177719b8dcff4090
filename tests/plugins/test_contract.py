"""Every hook has a page and a test, and what the pages promise is there."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization as parametrize

from backpack_core import backpack, extend, hookimpl, plugins, register
from backpack_core.errors import (
    PluginCodeError,
    PluginConflictError,
    PluginError,
    PluginVersionError,
    ShapeError,
    UnsupportedError,
)
from backpack_core.plugins import hookspecs, registration
from backpack_core.plugins.registry import registry
from backpack_core.testing import temporary_plugin
from backpack_operations.carrier import Carrier, ParameterResult
from backpack_products import ColumnPropagator, Columns, FirstOrderExtension
from backpack_secondorder.propagators import LossSqrt
from tests.cases import Net

ROOT = Path(__file__).parents[2]
AUTHORS = ROOT / "docs" / "authors"
HOOKS = plugins.hook_names()
CONTRIBUTED = [name for name in HOOKS if name not in hookspecs.OF_PASSES]


def test_there_are_hooks() -> None:
    assert len(CONTRIBUTED) == 4
    assert set(HOOKS) - set(CONTRIBUTED) == hookspecs.OF_PASSES


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_documented(hook: str) -> None:
    """In its own docstring, and on the page of hooks with its exact signature."""
    function = getattr(hookspecs, hook)
    assert inspect.getdoc(function)
    page = (AUTHORS / "hooks.md").read_text(encoding="utf-8")
    signature = f"{hook}({', '.join(inspect.signature(function).parameters)})"
    assert f"`{signature}`" in page


@pytest.mark.parametrize("hook", CONTRIBUTED)
def test_hook_has_a_test(hook: str) -> None:
    assert f"test_{hook}" in globals()


@pytest.mark.parametrize(
    "page",
    [
        "index",
        "layer",
        "extension",
        "propagator",
        "hooks",
        "lookup",
        "performance",
        "testing",
        "publishing",
        "versioning",
    ],
)
def test_page_exists_and_its_links_lead_somewhere(page: str) -> None:
    path = AUTHORS / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page}.md links to {target}"


def test_base_classes_have_their_contract_on_a_page() -> None:
    import backpack_core
    import backpack_products

    text = "".join(p.read_text(encoding="utf-8") for p in AUTHORS.glob("*.md"))
    for name in (*dir(backpack_core), *dir(backpack_products)):
        if name.endswith(("Rule", "Extension", "Propagator")):
            assert f"`{name}`" in text, name


def test_policy_names_the_version_of_the_interface() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert f"version {plugins.API_VERSION}" in text
    assert "backpack_api" in text


class Toy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def provide(**hooks):
    """A plugin object with hook implementations."""
    return type("Provider", (), {name: staticmethod(hookimpl(f)) for name, f in hooks.items()})


def test_backpack_layer_rules() -> None:
    from backpack_core import LayerRule

    class ToyRule(LayerRule):
        module_types = (Toy,)

        def _jac_t_mat_prod(self, view, mat):
            return 2 * mat

    def backpack_layer_rules():
        return [ToyRule]

    with temporary_plugin(provide(backpack_layer_rules=backpack_layer_rules)):
        assert isinstance(registry.resolve(Toy()).rule, ToyRule)
    assert registry.resolve(Toy()).is_fallback


class Count(FirstOrderExtension):
    savefield = "count"

    def read(self, product):
        return product.samples


def test_backpack_extensions() -> None:
    from backpack_core import extensions

    def backpack_extensions():
        return [Count]

    with temporary_plugin(provide(backpack_extensions=backpack_extensions)):
        assert extensions.Count is Count
    assert "Count" not in registry.extensions


def test_backpack_propagators() -> None:
    class Ones(ColumnPropagator):
        def start(self, rule, view):
            return Columns.start("ones", torch.ones_like(view.input).unsqueeze(0))

    def backpack_propagators():
        yield Ones

    with temporary_plugin(provide(backpack_propagators=backpack_propagators)):
        assert [c.value for c in registry.propagators["Ones"]] == [Ones]
    assert "Ones" not in registry.propagators


def test_two_propagators_of_one_name() -> None:
    def provider(kind):
        return provide(backpack_propagators=lambda: [kind])

    own = type(Count().propagator)
    other = type(own.__name__, (own,), {})
    with temporary_plugin(provider(own)), temporary_plugin(provider(other)):
        refused = pytest.raises(PluginConflictError, match="propagator 'OutputGradient'")
        with refused, backpack(Count()):
            pass


class Special(Carrier):
    """Has the same value for every parameter, and sends nothing on."""

    gives_values = True

    def __init__(self, extension, propagator):
        self.speaker = extension

    def starts(self, view):
        return False

    def arrive(self, view, waiting):
        return view.grad_output

    def find(self, view, trained, quantity):
        return (ParameterResult(each.name, each.parameter, "special") for each in trained)

    def send(self, view, quantity):
        return {}


def counted(linear: nn.Linear, extension: FirstOrderExtension) -> object:
    model, lossfunc = extend(linear), extend(nn.MSELoss())
    with backpack(extension):
        lossfunc(model(torch.rand(3, 2)), torch.rand(3, 1)).backward()
    return model.weight.count


@pytest.mark.parametrize("key", [nn.Linear, "torch.nn.Linear"])
def test_backpack_pair_overrides(key) -> None:
    def backpack_pair_overrides():
        return [(Count, key, Special)]

    linear = nn.Linear(2, 1, bias=False)
    with temporary_plugin(provide(backpack_pair_overrides=backpack_pair_overrides)):
        assert counted(linear, Count()) == "special"
    assert counted(linear, Count()) == 3


def test_a_carrier_of_one_instance() -> None:
    extension, linear = Count(), nn.Linear(2, 1, bias=False)
    extension.carriers[nn.Linear] = Special
    assert counted(linear, extension) == "special"
    assert counted(linear, Count()) == 3


def test_backpack_run() -> None:
    seen = []

    def backpack_run(run):
        seen.append(run)

    linear = nn.Linear(2, 1, bias=False)
    with temporary_plugin(provide(backpack_run=backpack_run)):
        counted(linear, Count())
    assert len(seen) == 1
    refused = pytest.raises(PluginCodeError, match=r"must return an Observer\. Got 3")
    with temporary_plugin(provide(backpack_run=lambda run: 3)), refused:
        counted(linear, Count())


def test_backpack_watch() -> None:
    class Watch:
        def __call__(self, module, kind, way, function, *given):
            return function(*given)

        def summary(self, history):
            return "a summary"

    def backpack_watch():
        return Watch

    plugins.ensure_loaded()  # the last that was registered is asked first
    block = backpack(Count())
    with temporary_plugin(provide(backpack_watch=backpack_watch)):
        assert block.summary() == "a summary"


class Same(nn.Linear):
    """Computes what its parent does."""

    def extra_repr(self) -> str:
        return "same"


class Doubled(nn.Linear):
    """Does not."""

    def forward(self, x):
        return 2 * super().forward(x)


def bound(own: bool, extension: FirstOrderExtension) -> AbstractContextManager[object]:
    """A carrier for linear layers: of the instance, or of a plugin."""
    if own:
        extension.carriers[nn.Linear] = Special
        return nullcontext()

    def backpack_pair_overrides():
        return [(Count, nn.Linear, Special)]

    return temporary_plugin(provide(backpack_pair_overrides=backpack_pair_overrides))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("own", [True, False])
def test_a_carrier_speaks_for_what_a_rule_speaks_for(own: bool) -> None:
    changed = nn.Linear(2, 1, bias=False)
    changed.forward = lambda x: 2 * nn.Linear.forward(changed, x)
    made = parametrize(nn.Linear(2, 1), "bias", nn.Identity())
    made.parametrizations.requires_grad_(False)
    extension = Count()
    with bound(own, extension):
        assert counted(Same(2, 1, bias=False), extension) == (3 if own else "special")
        assert counted(Doubled(2, 1, bias=False), extension) == 3
        assert counted(changed, extension) == 3
        assert counted(made, extension) == "special"


@pytest.mark.parametrize("own", [True, False])
def test_a_carrier_at_a_parameter_that_is_computed(own: bool) -> None:
    extension = Count()
    with bound(own, extension), pytest.raises(UnsupportedError, match="computed from others"):
        counted(weight_norm(nn.Linear(2, 1)), extension)


def test_a_carrier_beside_a_parameter_that_an_operation_uses() -> None:
    """What answers for the parameter, which autograd reaches first, answers for nothing else."""
    extension = Count()
    extension.carriers[nn.Linear] = Special
    linear, table = nn.Linear(2, 1, bias=False), nn.Parameter(torch.ones(1))
    net = Net(lambda net, x: net.linear(x) + net.table, linear=linear, table=table)
    model, lossfunc = extend(net), extend(nn.MSELoss())
    with backpack(extension):
        lossfunc(model(torch.rand(3, 2)), torch.rand(3, 1)).backward()
    assert (linear.weight.count, table.count) == ("special", 3)


def test_two_carriers_for_a_pair_are_a_conflict() -> None:
    class Other(Special):
        pass

    def provider(carrier):
        return provide(backpack_pair_overrides=named(lambda: [(Count, nn.Linear, carrier)]))

    def named(function):
        function.__name__ = "backpack_pair_overrides"
        return function

    with (
        temporary_plugin(provider(Special), provider(Other)),
        pytest.raises(PluginConflictError, match=r"pair override for 'Count/torch"),
    ):
        counted(nn.Linear(2, 1, bias=False), Count())


def changing(self, view, trained, quantity):
    view.input.mul_(2)
    return Special.find(self, view, trained, quantity)


CARRIERS = {
    "no carrier": (
        lambda *given: 3,
        PluginError,
        r"Count at Linear '1' made 3, expected a Carrier",
    ),
    "nothing": ({"find": lambda *given: None}, ShapeError, r"Slip\.find returned \[None\] for"),
    "a part": ({"find": lambda *given: ()}, ShapeError, r"find returned \[\] .* None to leave it"),
    "values for readings": ({"gives_values": False}, ShapeError, r"a reading for each.*\[1, 2\]"),
    "no places": ({"send": lambda *given: {1: 0}}, ShapeError, r"send .* of its 1 inputs"),
    "in place": ({"find": changing}, PluginCodeError, r"Slip\.find changed an input of Linear"),
    "other columns": (
        {"send": lambda *given: {0: Columns.start("new", torch.ones(1, 3, 5))}},
        ShapeError,
        r"Slip\.send returned shape \[1, 3, 5\] at Linear '1', expected a tensor \[V, 3, 2\]",
    ),
}


@pytest.mark.parametrize("what", CARRIERS)
def test_what_a_carrier_returns(what: str) -> None:
    wrong, error, said = CARRIERS[what]
    extension = Count()
    make = type("Slip", (Special,), wrong) if isinstance(wrong, dict) else wrong
    extension.carriers[nn.Linear], extension.propagator = make, LossSqrt()
    model = extend(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)))
    loss = extend(nn.MSELoss())(model(torch.rand(3, 2)), torch.rand(3, 1))
    with backpack(extension), pytest.raises(error, match=said):
        loss.backward()


def test_a_carrier_may_leave_a_parameter_out() -> None:
    class Some(Special):
        def find(self, view, trained, quantity):
            given = {"weight": "special"}
            return [ParameterResult(*each[:2], given.get(each.name)) for each in trained]

    extension, linear = Count(), nn.Linear(2, 1)
    extension.carriers[nn.Linear] = Some
    assert counted(linear, extension) == "special"
    assert not hasattr(linear.bias, "count")


@pytest.mark.parametrize("hook", CONTRIBUTED)
@pytest.mark.parametrize("returned", [None, 3, [3], [object]])
def test_a_hook_that_returns_something_else_is_refused(hook: str, returned: object) -> None:
    def wrong():
        return returned

    wrong.__name__ = hook
    with pytest.raises(PluginError, match=hook):
        register(provide(**{hook: wrong}), "wrong")
    assert not registration.manager.has_plugin(":wrong")


@pytest.mark.parametrize("api", [2, (2, 7), (1, 2)])
def test_a_supported_interface(api: object) -> None:
    provider = provide(backpack_extensions=lambda: [Count])
    provider.backpack_api = api
    with temporary_plugin(provider):
        assert "Count" in registry.extensions


@pytest.mark.parametrize("api", ["two", "2", 2.0, (), ("2",), True, {"a": 1}])
def test_an_interface_that_is_no_number(api: object) -> None:
    provider = provide(backpack_extensions=lambda: [Count])
    provider.backpack_api = api
    with pytest.raises(PluginError, match="an integer, or a tuple of several"):
        register(provider, "other")


@pytest.mark.parametrize("api", [0, 1, (3, 4)])
def test_an_unsupported_interface(api: object) -> None:
    provider = provide(backpack_extensions=lambda: [Count])
    provider.backpack_api = api
    with pytest.raises(PluginVersionError, match="speaks version 2"):
        register(provider, "other")
