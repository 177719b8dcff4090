"""Checks with a variation of the case: mode, precision, frozen parameters, later changes.

Checks of methods and declarations run again in the other mode, so they are registered earlier.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import Module, Parameter

from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.plugins.declarations import refuse
from backpack_core.record.view import View
from backpack_core.testing import property_checks, rule_checks
from backpack_core.testing.cases import ExtensionCase, LossCase, RuleCase
from backpack_core.testing.checks import CHECKS, of_extension, of_loss, of_rule
from backpack_core.testing.compare import SMALLEST_SCALE, CheckFailure, require
from backpack_core.testing.execution import execute, shared_execution
from backpack_core.testing.extension_checks import compare_values, problem_of, quantity_for
from backpack_core.testing.extensions_run import compare_stored, largest_expected
from backpack_core.testing.loss_checks import agrees, run_loss
from backpack_core.testing.network_checks import COARSE
from backpack_core.testing.rule_checks import check_products, parameter_product, transposed
from backpack_core.testing.traits import traits

_OF_METHODS = (rule_checks.__name__, property_checks.__name__)


@of_rule()
def other_mode(case: RuleCase) -> None:
    """Every method and declaration in eval mode, if the case is in train mode, or the reverse."""
    other = not shared_execution(case).module.training
    twin = replace(case, module_factory=lambda: case.module_factory().train(other))
    try:
        found = traits(twin)
        run = shared_execution(twin)
        run.rule.check(run.view)
    except UnsupportedError:
        return
    # The case's declarations hold in its own mode only.
    declared = {"once", "overwritten"}
    for check in CHECKS["rule"]:
        asked = check.needs <= found - declared and check.name not in case.expected_failures
        if asked and check.run.__module__ in _OF_METHODS:
            try:
                check.run(twin)
            except CheckFailure as failure:
                mode = "train" if other else "eval"
                raise CheckFailure(f"In {mode} mode, {check.name}: {failure}") from failure


@of_rule("separate", "kept")
def keeps_dtype(case: RuleCase) -> None:
    """In single precision, what every product returns is in single precision."""
    run = execute(case, dtype=torch.float32)
    mat = run.columns()
    found = {f"jac_t_mat_prod, input {slot}": m for slot, m in transposed(run, mat).items()}
    for name in run.parameters:
        found[f"param_jac_t_mat_prod of {name!r}"] = parameter_product(run, name, mat)
    for what, product in found.items():
        dtype = mat.dtype if product is None else product.dtype
        require(dtype == mat.dtype, f"{what}: {dtype}, of columns in {mat.dtype}.")


@of_rule("separate", "kept")
def changed_since(case: RuleCase) -> None:
    """Parameters and mode change after the forward pass: products must be those of the forward."""
    run = execute(case)
    require(bool(run.jacobians), "Nothing is differentiated.")  # from before the change, too
    _change(run.module)
    try:
        check_products(run, run.columns())
    except (OverwrittenInputError, UnsupportedError):
        return
    except CheckFailure as failure:
        raise CheckFailure(
            f"{failure} The module has other parameters, and another mode, than in the forward "
            "pass: read what the view shows, which is of then, and keep nothing."
        ) from failure


def _change(module: Module) -> None:
    """Put other parameters into a module, and switch its mode."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, Parameter(2 * parameter.detach() + 1))
    module.train(not module.training)


@of_loss()
def unreduced(case: LossCase) -> None:
    """``reduction="none"``: a different gradient arrives at every entry of the loss."""
    run = run_loss(case, "none")
    weights = torch.linspace(0.5, 1.5, run.value.numel()).reshape(run.value.shape).to(run.value)
    run.value = (run.value * weights).sum()
    with torch.no_grad():
        agrees(case, run, "not reduced", View(run.view.call, grad_output=weights))


@of_extension()
def declarations(case: ExtensionCase) -> None:
    """Every class attribute that extension and propagator set is one that their bases know."""
    extension = case.extension_factory()
    refuse(type(extension))
    refuse(type(extension.propagator))


@of_extension()
def value_partly_frozen(case: ExtensionCase) -> None:
    """Biases are frozen, and then all the rest."""
    given, extension = problem_of(case), case.extension_factory()
    for frozen in (True, False):

        def freeze(net: Module, frozen: bool = frozen) -> None:
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(name.endswith("bias") != frozen)

        net, values = given.run([extension], prepare=freeze)
        compare_values(case, net, values[extension.savefield], given.reference)


@of_extension()
def value_bfloat16(case: ExtensionCase) -> None:
    """Half precision, against the reference; values that it cannot resolve must be finite."""
    given, extension, quantity = problem_of(case), case.extension_factory(), quantity_for(case)
    if quantity is not None and (quantity.cancels or quantity.needs not in COARSE):
        quantity = None
    _, values = given.run([extension], dtype=torch.bfloat16)
    floor = SMALLEST_SCALE if quantity is None else largest_expected(quantity, given.reference)
    allowed, stored = case.tolerances.bfloat16, values[extension.savefield]
    compare_stored(case.label(), stored, quantity, given.reference, allowed, floor)
