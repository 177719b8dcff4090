"""The table of checks: what each means something for, and what it rests on.

A check is judged after those it rests on, its grounds. Where one of these failed, it is not judged:
its own message would be about the consequences. So products and declarations come before nets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backpack_core.errors import UnsupportedError
from backpack_core.testing import extension_checks as extension
from backpack_core.testing import loss_checks as loss
from backpack_core.testing import merging_checks as merging
from backpack_core.testing import network_checks as net
from backpack_core.testing import property_checks as properties
from backpack_core.testing import rule_checks as rule
from backpack_core.testing.compare import CheckFailure
from backpack_core.testing.execution import Execution, shared_execution
from backpack_core.testing.traits import traits


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        function: Raises if it finds a fault. Those of rules take an execution, others a case.
        needs: Traits a case must have for the check to mean anything; see ``traits``.
        grounds: Names of the checks that it rests on, as far as a case has them.
    """

    name: str
    function: Callable[[Any], Any]
    needs: frozenset[str]
    grounds: tuple[str, ...]

    def run(self, case: Any) -> None:
        """Raise if there is a fault."""
        if case.kind == "rule":
            rule.agree(self.function(shared_execution(case)), case.tolerances.float64)
        else:
            self.function(case)


def _all(
    needs: str, grounds: str, *functions: Callable[..., Any], **named: Callable[..., Any]
) -> tuple[Check, ...]:
    """Checks that need the same; each has the name of its function, or the one that is given."""
    rests = tuple(grounds.split())
    wanted = frozenset(needs.split(", ") if needs else ())
    made = {**{f.__name__: f for f in functions}, **named}
    return tuple(Check(name, function, wanted, rests) for name, function in made.items())


def _names(checks: tuple[Check, ...]) -> str:
    return " ".join(check.name for check in checks)


_KEPT = "separate, kept"
_PRODUCTS = "jac_t_mat_prod param_jac_t_mat_prod"

# Of methods and declarations.
_BASIC = (
    *_all("", "", properties.mixes_samples),
    *_all("once", "", properties.not_twice_differentiable),
    *_all("overwritten", "", rule.overwritten_input),
    *_all(_KEPT, "", rule.accepts),
    *_all(f"{_KEPT}, twice, zero hessian", "", properties.hessian_is_zero),
    *_all(f"{_KEPT}, twice, diagonal hessian", "", properties.hessian_is_diagonal),
    *_all(f"{_KEPT}, twice, linear parameters", "", properties.linear_in_params),
    *_all(f"{_KEPT}, elementwise", "accepts", properties.derivative),
    *_all(f"{_KEPT}, input", "accepts derivative", rule.jac_t_mat_prod),
    *_all(f"{_KEPT}, affine", "accepts", rule.affine_weight),
    *_all(f"{_KEPT}, affine", "affine_weight", rule.affine_form),
    *_all(f"{_KEPT}, parameters", "accepts mixes_samples affine_form", rule.param_jac_t_mat_prod),
    *_all(
        f"{_KEPT}, batch first, constant jacobian",
        "jac_t_mat_prod",
        properties.jacobian_is_constant,
    ),
    *_all(f"{_KEPT}, input", "jac_t_mat_prod", rule.jac_mat_prod),
    *_all(f"{_KEPT}, parameters", "param_jac_t_mat_prod", rule.param_jac_mat_prod, rule.operations),
    *_all(
        f"{_KEPT}, twice, elementwise, second derivative",
        "accepts hessian_is_zero",
        properties.second_derivative,
    ),
    *_all(
        f"{_KEPT}, twice, second derivative",
        "accepts hessian_is_zero second_derivative",
        properties.second_derivative_mat_prod,
    ),
)
_CALLS = (
    *_all(f"{_KEPT}, batch first", _PRODUCTS, rule.subsampled_call),
    *_all(_KEPT, _PRODUCTS, rule.non_contiguous_columns, rule.non_contiguous_input),
)


def other_mode(run: Execution) -> None:
    """Every method and declaration in eval mode, if the case is in train mode, or the reverse."""
    case, other = run.case, not run.module.training
    twin = replace(case, module_factory=lambda: case.module_factory().train(other))
    try:
        found = traits(twin)
        at = shared_execution(twin)
        at.rule.check(at.view)
    except UnsupportedError:
        return
    # The case's declarations hold in its own mode only.
    declared = {"once", "overwritten"}
    for check in _BASIC + _CALLS:
        if check.needs <= found - declared and check.name not in case.expected_failures:
            try:
                check.run(twin)
            except CheckFailure as failure:
                mode = "train" if other else "eval"
                raise CheckFailure(f"In {mode} mode, {check.name}: {failure}") from None


_RULE = (
    *_BASIC,
    *_CALLS,
    *_all(_KEPT, _PRODUCTS, rule.keeps_dtype, rule.changed_since),
    *_all("", _names(_BASIC + _CALLS), other_mode),
    *_all("separate", _names(_BASIC), extensions_mean=net.exact),
    *_all("separate", "extensions_mean subsampled_call", net.subsampling),
    *_all("separate", "extensions_mean keeps_dtype", net.float32, net.autocast),
    *_all("separate, half precision", "extensions_mean keeps_dtype", net.bfloat16),
    *_all(
        "separate",
        "extensions_mean",
        *(net.frozen_layer, net.frozen_surroundings, net.retain_graph, net.called_twice),
        *(net.deepcopy, net.no_live_calls),
        extensions_sum=partial(net.exact, net={"reduction": "sum"}),
        batch_of_one=partial(net.exact, net={"samples": 1}),
        pickle=net.by_pickle,
    ),
    *_all("separate, several parameters", "extensions_mean", net.partly_frozen),
    *_all("mixing", "mixes_samples", net.mixing_is_refused),
)


def _of_reduction(reduction: str, grounds: str) -> tuple[Check, ...]:
    """What every reduction has: methods, and then their use."""

    def named(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        made = {f"{n}_{reduction}": partial(f, reduction=reduction) for n, f in functions.items()}
        return dict(made)

    methods = _all("", grounds, **named(loss.OF_METHODS))
    uses = {f.__name__: f for f in (loss.arriving_gradient, loss.started_extensions)}
    return methods + _all("", _names(methods), **named(uses))


_SUM = _of_reduction("sum", "samples_are_separate hessian_is_psd")
_MEAN = _of_reduction("mean", f"normalisation {_names(_SUM)}")
_LOSS = (
    *_all("", "", loss.samples_are_separate, loss.hessian_is_psd),
    *_SUM,
    *_all("", "", loss.normalisation),
    *_MEAN,
    *_all(
        "",
        _names(_MEAN),
        *(loss.loss_batch_of_one, loss.loss_subsampled_call, loss.loss_non_contiguous_input),
        *(loss.loss_float32, loss.loss_leaves_arguments_alone, loss.unreduced),
    ),
)

_EXTENSION = (
    *_all("", "", extension.declarations),
    *_all("", "declarations", value_mean=extension.value),
    *_all(
        "",
        "value_mean",
        *(extension.value_partly_frozen, extension.value_loss_scaled, extension.value_float32),
        *(extension.value_bfloat16, extension.value_of_no_samples, extension.value_in_chunks),
        *(extension.value_overwritten, extension.beside_others, extension.pickle_extension),
        *(extension.leaves_gradient_alone, extension.extension_no_live_calls),
        *(merging.degree, merging.samples_add),
        two_halves_mean=partial(merging.two_halves, reduction="mean"),
        two_halves_sum=partial(merging.two_halves, reduction="sum"),
        **{n: partial(extension.value, **given) for n, given in extension.SETTINGS.items()},
    ),
    *_all("subsampling", "value_mean", extension.value_subsampling),
    *_all("savefield", "value_mean", extension.savefield),
)

# By kind of case, grounds first. A test pins each list: what is removed is removed for all authors.
CHECKS = {"rule": _RULE, "loss": _LOSS, "extension": _EXTENSION}
