"""Checks of a rule, method by method, against dense Jacobians by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from backpack_core.record.structure import iter_tensors, map_tensors
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import Arguments, RuleCase
from backpack_core.testing.checks import of_rule
from backpack_core.testing.compare import close, require, stateless
from backpack_core.testing.execution import Execution, draw, execute, shared_execution
from backpack_core.tuning import memory_budget, set_memory_budget
from backpack_products import derivatives
from backpack_products import operations as ops
from backpack_products.parametric import ParametricRule
from backpack_products.product import SampleProduct


def transposed(run: Execution, mat: Tensor, view: View | None = None) -> dict[int, Tensor | None]:
    """``jac_t_mat_prod`` for every differentiated input; empty if the rule is transparent."""
    slots = [slot for slot, leaf in enumerate(run.leaves) if leaf is not None]
    if run.rule.transparent:
        return {}
    with torch.no_grad():
        found = dict(enumerate(run.rule.jac_t_mat_prod(view or run.view, mat)))
    return {slot: found.get(slot) for slot in slots}


def check_products(run: Execution, mat: Tensor, chosen: Sequence[int] | None = None) -> None:
    """Transposed Jacobians, input and parameters, for all samples or some."""
    _check_input_products(run, mat, chosen)
    _check_parameter_products(run, mat, chosen)


def _check_input_products(run: Execution, mat: Tensor, chosen: Sequence[int] | None = None) -> None:
    for slot, found in transposed(run, _some(mat, chosen), _view(run, chosen)).items():
        expected = _some(oracle.transposed_product(run.jacobians[slot], mat), chosen)
        what = f"jac_t_mat_prod, input {slot}{_of(chosen)}"
        if found is None:
            require(not bool(expected.any()), f"{what}: None, though the output depends on it.")
        else:
            close(found, expected, what, run.case.tolerances.float64)


def _check_parameter_products(
    run: Execution, mat: Tensor, chosen: Sequence[int] | None = None
) -> None:
    for name in run.parameters:
        expected = oracle.per_sample_product(run.jacobians[name], mat, run.batch_axis)
        close(
            parameter_product(run, name, _some(mat, chosen), _view(run, chosen)),
            _some(expected, chosen),
            f"param_jac_t_mat_prod of {name!r}{_of(chosen)}",
            run.case.tolerances.float64,
        )


def _some(mat: Tensor, chosen: Sequence[int] | None) -> Tensor:
    return mat if chosen is None else mat[:, list(chosen)]


def _view(run: Execution, chosen: Sequence[int] | None) -> View:
    return run.view if chosen is None else run.view.subsample(chosen)


def _of(chosen: Sequence[int] | None) -> str:
    return "" if chosen is None else f" of samples {list(chosen)}"


def parameter_product(run: Execution, name: str, mat: Tensor, view: View | None = None) -> Tensor:
    """``param_jac_t_mat_prod`` of one parameter."""
    assert isinstance(run.rule, ParametricRule)
    with torch.no_grad():
        return run.rule.param_jac_t_mat_prod(view or run.view, name, mat)


@of_rule("separate", "kept")
def accepts(case: RuleCase) -> None:
    """``check()`` passes, and the rule is stateless: nothing is kept, and no number drawn."""
    run = shared_execution(case)
    with stateless(run.rule, run.module):
        run.rule.check(run.view)
        _use(run, run.columns())


def _use(run: Execution, mat: Tensor) -> None:
    """Call every product once."""
    transposed(run, mat)
    for name in run.parameters:
        parameter_product(run, name, mat)


@of_rule("separate", "kept", "input")
def jac_t_mat_prod(case: RuleCase) -> None:
    """For every input, against ``Jᵀ mat``."""
    run = shared_execution(case)
    _check_input_products(run, run.columns())


@of_rule("separate", "kept", "input")
def jac_mat_prod(case: RuleCase) -> None:
    """Against ``J mat`` for the first input."""
    run = shared_execution(case)
    mat = run.input_columns()
    with torch.no_grad():
        found = derivatives.jac_mat_prod(run.rule, run.view, mat)
    expected = oracle.product(run.jacobians[0], mat)
    close(found, expected, "jac_mat_prod", case.tolerances.float64)


@of_rule("separate", "kept", "input")
def jac_adjoint(case: RuleCase) -> None:
    """``⟨J u, w⟩ = ⟨u, Jᵀ w⟩`` for the rule's own products."""
    run = shared_execution(case)
    mat, inp = run.columns(), run.input_columns()
    with torch.no_grad():
        left = (derivatives.jac_mat_prod(run.rule, run.view, inp) * mat).flatten(1).sum(1)
    back = transposed(run, mat)[0]
    right = torch.zeros_like(left) if back is None else (back * inp).flatten(1).sum(1)
    close(left, right, "⟨J u, w⟩ against ⟨u, Jᵀ w⟩", case.tolerances.float64)


@of_rule("separate", "kept", "parameters")
def param_jac_t_mat_prod(case: RuleCase) -> None:
    """For every covered parameter, sample by sample."""
    run = shared_execution(case)
    _check_parameter_products(run, run.columns())


@of_rule("separate", "kept", "parameters")
def param_jac_mat_prod(case: RuleCase) -> None:
    """For every covered parameter."""
    run = shared_execution(case)
    assert isinstance(run.rule, ParametricRule)
    for name, theta in run.parameters.items():
        mat = draw((2, *theta.shape), 5)
        with torch.no_grad():
            found = run.rule.param_jac_mat_prod(run.view, name, mat)
        expected = oracle.product(run.jacobians[name], mat)
        close(found, expected, f"param_jac_mat_prod of {name!r}", case.tolerances.float64)


@of_rule("separate", "kept", "parameters")
def param_jac_adjoint(case: RuleCase) -> None:
    """``⟨J_θ u, w⟩ = Σ_n ⟨u, J_θ[n]ᵀ w[n]⟩`` for the rule's own products."""
    run = shared_execution(case)
    assert isinstance(run.rule, ParametricRule)
    mat = run.columns()
    for name, theta in run.parameters.items():
        u = draw((len(mat), *theta.shape), 6)
        with torch.no_grad():
            left = (run.rule.param_jac_mat_prod(run.view, name, u) * mat).flatten(1).sum(1)
        right = (parameter_product(run, name, mat).sum(1) * u).flatten(1).sum(1)
        what = f"⟨J u, w⟩ against ⟨u, Jᵀ w⟩ of {name!r}"
        close(left, right, what, case.tolerances.float64)


@of_rule("separate", "kept", "parameters")
def param_jac_batch_sum(case: RuleCase) -> None:
    """Summed over samples, by hand and by ``batch_sum``: the gradient of the batch."""
    run = shared_execution(case)
    assert isinstance(run.rule, ParametricRule)
    mat = run.columns()
    for name in run.parameters:
        expected = oracle.transposed_product(run.jacobians[name], mat)
        found = parameter_product(run, name, mat).sum(1)
        close(found, expected, f"Σ_n of {name!r}", case.tolerances.float64)
        with torch.no_grad():
            summed = ops.batch_sum(run.rule.param_product(run.view, name, mat))
        close(summed, expected, f"batch_sum of {name!r}", case.tolerances.float64)


# Each operation as a function of a product and of ``M`` itself, formed by the oracle.
_DEFINITIONS: dict[str, tuple[Callable[[SampleProduct], Tensor], Callable[[Tensor], Tensor]]] = {
    "square_sum": (ops.square_sum, lambda m: m.square().sum((0, 1))),
    "per_sample_square_sum": (ops.per_sample_square_sum, lambda m: m.square().sum(0)),
    "squared_norm": (ops.squared_norm, lambda m: m.flatten(2).square().sum(2)),
    "batch_sum": (ops.batch_sum, lambda m: m.sum(1)),
    "dense": (ops.dense, lambda m: m),
    "gram": (ops.gram, lambda m: torch.einsum("vnp,wmp->vnwm", m.flatten(2), m.flatten(2))),
    "weighted_sum": (
        lambda p: ops.weighted_sum(p, draw((2, p.columns, p.samples), 12)),
        lambda m: torch.einsum("kvn,vn...->k...", draw((2, *m.shape[:2]), 12), m),
    ),
}

# What other extensions may need in the same pass.
_PLANS: tuple[frozenset[Any], ...] = (
    frozenset(),
    frozenset({ops.batch_sum, ops.square_sum}),
    frozenset({ops.dense}),
)


@of_rule("separate", "kept", "parameters")
def operations(case: RuleCase) -> None:
    """Each operation against its definition by ``M``, alone and together, with little memory."""
    run = shared_execution(case)
    mat = run.columns()
    assert isinstance(run.rule, ParametricRule)
    for name in run.parameters:
        formed = oracle.per_sample_product(run.jacobians[name], mat, run.batch_axis)
        for budget, needs in product((memory_budget(), 1), _PLANS):
            with _budget(budget), torch.no_grad():
                for what, (operation, definition) in _DEFINITIONS.items():
                    given = run.rule.param_product(run.view, name, mat)
                    given.needs = needs
                    label = f"{what} of {name!r} within {budget} bytes"
                    close(operation(given), definition(formed), label, case.tolerances.float64)


@contextmanager
def _budget(size: int) -> Iterator[None]:
    before = memory_budget()
    set_memory_budget(size)
    try:
        yield
    finally:
        set_memory_budget(before)


@of_rule("separate", "kept", "batch first")
def subsampled_call(case: RuleCase) -> None:
    """Products of ``view.subsample([2, 0])``."""
    run, chosen = shared_execution(case), (2, 0)
    run.rule.check(run.view.subsample(chosen))
    check_products(run, run.columns(), chosen)


@of_rule("separate", "kept")
def leaves_arguments_alone(case: RuleCase) -> None:
    """No argument is changed."""
    run = execute(case)
    mat = run.columns()
    stored = run.view.stored
    held = [mat, *stored.inputs, *stored.outputs, *run.module.parameters()]
    before = [tensor.detach().clone() for tensor in held]
    _use(run, mat)
    for tensor, copy in zip(held, before, strict=True):
        same = torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(copy))
        require(same, "A method wrote to a tensor that it was given.")


@of_rule("separate", "kept")
def non_contiguous_columns(case: RuleCase) -> None:
    """Columns with strides in another order, and columns that share memory."""
    run = shared_execution(case)
    mat = run.columns()
    turned = mat.movedim(0, -1).contiguous().movedim(-1, 0)
    for strided in (turned, mat[:1].expand(3, *mat.shape[1:])):
        check_products(run, strided)


@of_rule("separate", "kept")
def non_contiguous_input(case: RuleCase) -> None:
    """Inputs that are every other entry of a larger tensor."""
    given = case.arguments()
    args, kwargs = map_tensors((given.args, dict(given.kwargs)), _strided)
    run = execute(case, Arguments(args, kwargs))
    require(
        not any(t.numel() > 1 and t.is_contiguous() for t in iter_tensors((args, kwargs))),
        "The kit could not make the inputs non-contiguous.",
    )
    check_products(run, run.columns())


def _strided(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
