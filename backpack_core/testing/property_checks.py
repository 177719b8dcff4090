"""Checks of a rule's declarations: second derivatives, properties, and the affine form."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.errors import OverwrittenInputError
from backpack_core.record.structure import iter_tensors, map_tensors
from backpack_core.testing import oracle
from backpack_core.testing.cases import Arguments, RuleCase
from backpack_core.testing.checks import of_rule
from backpack_core.testing.compare import close, require
from backpack_core.testing.execution import Execution, draw, execute, shared_execution
from backpack_products import derivatives
from backpack_products.affine import AffineProduct
from backpack_products.elementwise import ElementwiseRule
from backpack_products.parametric import AffineRule, ParametricRule


def _first(run: Execution) -> Tensor:
    leaf = run.leaves[0]
    assert leaf is not None
    return leaf


def _contracted(run: Execution, target: Tensor, weights: Tensor) -> Tensor:
    """``Σ_o weights_o ∂²f_o/∂target²`` as a square matrix."""
    found = oracle.hessian((run.output * weights).sum(), target)
    return found.reshape(target.numel(), target.numel()).detach()


def _weights(run: Execution) -> Tensor:
    return draw(tuple(run.output.shape), 7)


@of_rule("once")
def not_twice_differentiable(case: RuleCase) -> None:
    """The oracle for second derivatives raises, as the case declares."""
    run = shared_execution(case)
    targets = [leaf for leaf in run.leaves if leaf is not None] or list(run.parameters.values())
    try:
        for target in targets:
            # Squared, so that the gradient depends on the input even if the layer is linear.
            oracle.hessian((run.output.square() * _weights(run)).sum(), target)
    except RuntimeError:
        return
    require(False, "twice_differentiable=False is declared, but torch can: remove it.")


@of_rule("overwritten")
def overwritten_input(case: RuleCase) -> None:
    """The stored input is no longer what the layer received."""
    run = shared_execution(case)
    try:
        with torch.no_grad():
            run.rule.jac_t_mat_prod(run.view, run.columns())
    except OverwrittenInputError:
        return
    require(False, "overwrites_input is declared, but the rule does not raise on it.")


@of_rule("separate", "kept", "elementwise")
def derivative(case: RuleCase) -> None:
    """Against the diagonal of the Jacobian."""
    run = shared_execution(case)
    assert isinstance(run.rule, ElementwiseRule)
    size = run.output.numel()
    with torch.no_grad():
        found = run.rule.derivative(run.view)
    jacobian = run.jacobians[0].reshape(size, -1)
    expected = jacobian.diagonal().reshape(run.output.shape)
    close(found.expand_as(expected), expected, "derivative", case.tolerances.float64)
    require(
        not bool((jacobian - torch.diag(jacobian.diagonal())).any()),
        "The layer is not elementwise: an output depends on another entry of the input.",
    )


@of_rule("separate", "kept", "twice", "elementwise", "second derivative")
def second_derivative(case: RuleCase) -> None:
    """Against the second derivative of the sum of all outputs."""
    run = shared_execution(case)
    assert isinstance(run.rule, ElementwiseRule)
    (gradient,) = oracle.gradients(run.output.sum(), [_first(run)], again=True)
    expected = torch.zeros_like(gradient)
    if gradient.requires_grad:
        (expected,) = oracle.gradients(gradient.sum(), [_first(run)])
    with torch.no_grad():
        found = run.rule.second_derivative(run.view)
    close(found.expand_as(expected), expected, "second_derivative", case.tolerances.float64)


@of_rule("separate", "kept", "twice", "second derivative")
def second_derivative_mat_prod(case: RuleCase) -> None:
    """Against ``Σ_o g_o ∂²f_o/∂x² mat``."""
    run = shared_execution(case)
    weights, mat = _weights(run), run.input_columns()
    expected = mat.flatten(1) @ _contracted(run, _first(run), weights)
    with torch.no_grad():
        found = derivatives.second_derivative_mat_prod(run.rule, run.view, weights, mat)
    what = "second_derivative_mat_prod"
    close(found, expected.reshape(mat.shape), what, case.tolerances.float64)


@of_rule("separate", "kept", "twice", "zero hessian")
def hessian_is_zero(case: RuleCase) -> None:
    """No second derivative at a random point, in any input or any two of them."""
    run = shared_execution(case)
    live = {slot: leaf for slot, leaf in enumerate(run.leaves) if leaf is not None}
    value = (run.output * _weights(run)).sum()
    gradients = oracle.gradients(value, [*live.values()], again=True)
    for slot, gradient in zip(live, gradients, strict=True):
        blocks = oracle.jacobians(gradient, live) if gradient.requires_grad else {}
        for other, block in blocks.items():
            which = "∂²f/∂x²" if slot == other == 0 else f"∂²f of inputs {slot} and {other}"
            require(
                not bool(block.any()), f"hessian_is_zero is declared, but {which} does not vanish."
            )


@of_rule("separate", "kept", "twice", "diagonal hessian")
def hessian_is_diagonal(case: RuleCase) -> None:
    """Diagonal, and entry ``i`` depends on output ``i`` only."""
    run = shared_execution(case)
    require(
        run.output.shape == _first(run).shape,
        "hessian_is_diagonal is declared, but input and output differ in shape.",
    )
    weights = _weights(run)
    half = weights * (torch.arange(weights.numel()).reshape(weights.shape) % 2)
    found = _contracted(run, _first(run), half)
    expected = torch.diag(found.diagonal() * half.flatten().ne(0))
    close(found, expected, "hessian_is_diagonal is declared: ∂²f/∂x²", case.tolerances.float64)


@of_rule("separate", "kept", "batch first", "constant jacobian")
def jacobian_is_constant(case: RuleCase) -> None:
    """``J_nᵀ c = J_0ᵀ c`` for all samples ``n``, at the case's input and at another."""
    run = shared_execution(case)
    column = run.columns()[:, :1]
    mat = column.expand(-1, *run.output.shape)
    with torch.no_grad():
        first = dict(enumerate(run.rule.jac_t_mat_prod(run.view.subsample([0]), column)))
    for where, at in (("", run), (" at another input", execute(case, _elsewhere(case)))):
        with torch.no_grad():
            products = dict(enumerate(at.rule.jac_t_mat_prod(at.view, mat)))
        for slot, leaf in enumerate(at.leaves):
            if leaf is None or leaf.shape[:1] != run.output.shape[:1]:
                continue
            true = oracle.transposed_product(at.jacobians[slot], mat)
            alone, product = first.get(slot), products.get(slot)
            one = torch.zeros_like(true) if alone is None else alone.expand_as(true)
            own = torch.zeros_like(true) if product is None else product
            what = f"jacobian_is_constant is declared: Jᵀ mat{where}, input {slot}"
            close(true, one, f"{what}, the layer's", case.tolerances.float64)
            close(own, one, f"{what}, the rule's", case.tolerances.float64)


def _elsewhere(case: RuleCase) -> Arguments:
    """The case's inputs, with other numbers in the tensors that are differentiated."""
    given, other = case.arguments(), case.arguments(seed=9)
    drawn = iter(enumerate(iter_tensors((other.args, dict(other.kwargs)))))

    def replaced(tensor: Tensor) -> Tensor:
        slot, fresh = next(drawn)
        is_held = not tensor.is_floating_point() or slot in case.constants
        return tensor if is_held else fresh

    args, kwargs = map_tensors((given.args, dict(given.kwargs)), replaced)
    return Arguments(args, kwargs)


@of_rule("separate", "kept", "twice", "linear parameters")
def linear_in_params(case: RuleCase) -> None:
    """No second derivative in the declared parameters."""
    run = shared_execution(case)
    assert isinstance(run.rule, ParametricRule)
    covered = {*run.rule.params, *run.parameters}
    unknown = set(run.rule.linear_in_params) - covered
    require(not unknown, f"linear_in_params names {sorted(unknown)}, which params does not.")
    for name in set(run.rule.linear_in_params) & set(run.parameters):
        found = _contracted(run, run.parameters[name], _weights(run))
        scale = float(run.jacobians[name].abs().max())
        require(
            float(found.abs().max()) <= case.tolerances.float64 * max(scale, 1.0),
            f"linear_in_params is declared for {name!r}, but ∂²f/∂θ² does not vanish.",
        )


@of_rule()
def mixes_samples(case: RuleCase) -> None:
    """Against the blocks of the Jacobians between different samples."""
    run = shared_execution(case)
    declared = run.rule.mixes_samples(run.view)
    mixing = False
    samples = run.view.batch_size
    for slot, leaf in enumerate(run.leaves):
        if leaf is None or not leaf.dim() or leaf.shape[0] != samples:
            continue
        jacobian = run.jacobians[slot].movedim(run.batch_axis, 0)
        blocks = jacobian.movedim(run.output.dim(), 1)
        other = ~torch.eye(samples, dtype=torch.bool)
        mixing |= bool(blocks[other].any())
    found = "influence" if mixing else "do not influence"
    require(
        declared == mixing,
        f"mixes_samples says {declared}, but samples {found} each other in this call.",
    )


@of_rule("separate", "kept", "affine")
def affine_form(case: RuleCase) -> None:
    """``W x + b`` in weight-sharing form is the output, rearranged."""
    run = shared_execution(case)
    rule, view = run.rule, run.view
    assert isinstance(rule, AffineRule)
    with torch.no_grad():
        inputs = rule.affine_input(view)[0 : view.batch_size]
        found = torch.einsum("goi,nsgi->nsgo", _matrix(run, "weight"), inputs)
        if "bias" in run.parameters:
            found = found + _matrix(run, "bias")
        expected = rule.affine_output(view, view.output.unsqueeze(0))[0]
    close(found, expected, "W x + b in affine form", case.tolerances.float64)


def _matrix(run: Execution, name: str) -> Tensor:
    """A parameter as ``[G, O, I]``, or a bias as ``[G, O]``."""
    given = _affine_product(run, name)
    theta = run.parameters[name].detach()
    matrix = torch.empty_like(theta).flatten()
    matrix[given.to_parameter(_numbers(given)).flatten()] = theta.flatten()
    return matrix.reshape(given.sizes)


def _numbers(given: AffineProduct) -> Tensor:
    return torch.arange(given.shape.numel()).reshape(given.sizes)


def _affine_product(run: Execution, name: str) -> AffineProduct:
    assert isinstance(run.rule, AffineRule)
    given = run.rule.param_product(run.view, name, run.columns())
    assert isinstance(given, AffineProduct)
    return given


@of_rule("separate", "kept", "affine")
def affine_weight(case: RuleCase) -> None:
    """The arrangement of a parameter uses every entry once, with any leading axes."""
    run = shared_execution(case)
    for name in run.parameters:
        given = _affine_product(run, name)
        numbers = _numbers(given)
        arranged = given.to_parameter(numbers)
        require(
            arranged.shape == given.shape and arranged.unique().numel() == numbers.numel(),
            f"The arrangement of {name!r} is no permutation of its entries.",
        )
        several = given.to_parameter(torch.stack([numbers, 2 * numbers])[None])
        same = torch.equal(several, torch.stack([arranged, 2 * arranged])[None])
        require(same, f"The arrangement of {name!r} changes with axes in front.")
