"""Checks of a rule's declarations and second derivatives, against dense derivatives by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.testing import oracle
from backpack_core.testing.cases import Arguments, RuleCase
from backpack_core.testing.compare import Entries, refuses, require
from backpack_core.testing.layer_run import LayerRun, run_layer
from backpack_products.parametric import ParametricRule
from backpack_products.some_samples import subsample


def _weights(run: LayerRun) -> Tensor:
    return oracle.draw(tuple(run.output.shape), 7)


def _contracted(run: LayerRun, target: Tensor, weights: Tensor) -> Tensor:
    """``Σ_o weights_o ∂²f_o/∂target²`` as a square matrix."""
    found = oracle.hessian((run.output * weights).sum(), target)
    return found.reshape(target.numel(), target.numel()).detach()


def not_twice_differentiable(run: LayerRun) -> None:
    """Check that the oracle for second derivatives fails, as the case declares."""
    # Squared, so that the gradient depends on the input even if the layer is linear.
    value = (run.output.square() * _weights(run)).sum()
    targets = [*(run.live or run.parameters).values()]
    message = "twice_differentiable=False is declared, but torch differentiates twice: remove it."
    refuses(RuntimeError, message, lambda: [oracle.hessian(value, target) for target in targets])


def derivative(run: LayerRun) -> Entries:
    """Compare with the diagonal of the Jacobian, whose other entries must vanish."""
    jacobian = run.jacobians[0].reshape(run.output.numel(), -1)
    diagonal = jacobian.diagonal()
    message = "The layer is not elementwise: an output depends on another entry of the input."
    require(not bool((jacobian - torch.diag(diagonal)).any()), message)
    expected = diagonal.reshape(run.output.shape)
    yield "derivative", run.call("derivative").expand_as(expected), expected


def second_derivative(run: LayerRun) -> Entries:
    """Compare with the second derivative of the sum of all outputs."""
    expected = _contracted(run, run.live[0], torch.ones_like(run.output)).diagonal()
    expected = expected.reshape(run.output.shape)
    yield "second_derivative", run.call("second_derivative").expand_as(expected), expected


def second_derivative_mat_prod(run: LayerRun) -> Entries:
    """Compare with ``Σ_o g_o ∂²f_o/∂x² mat``."""
    weights = _weights(run)
    matrix = _contracted(run, run.live[0], weights)
    for number in (2, 1, 7):
        mat = run.input_columns(number)
        found = run.call("second_derivative_mat_prod", weights, mat)
        what = f"second_derivative_mat_prod of {number} columns"
        yield what, found, (mat.flatten(1) @ matrix).reshape(mat.shape)


def hessian_is_zero(run: LayerRun) -> None:
    """Check that second derivatives in all (pairs of) inputs vanish at a random point."""
    value = (run.output * _weights(run)).sum()
    gradients = oracle.gradients(value, [*run.live.values()], again=True)
    for slot, gradient in zip(run.live, gradients, strict=True):
        for other, block in oracle.jacobians(gradient, run.live).items():
            which = "∂²f/∂x²" if slot == other == 0 else f"∂²f of inputs {slot} and {other}"
            message = f"hessian_is_zero is declared, but {which} does not vanish."
            require(not bool(block.any()), message)


def hessian_is_diagonal(run: LayerRun) -> Entries:
    """Check that the Hessian is diagonal, and that its entry ``i`` depends on output ``i`` only."""
    same = run.output.shape == run.live[0].shape
    require(same, "hessian_is_diagonal is declared, but input and output differ in shape.")
    weights = _weights(run)
    half = weights * (torch.arange(weights.numel()).reshape(weights.shape) % 2)
    found = _contracted(run, run.live[0], half)
    expected = torch.diag(found.diagonal() * half.flatten().ne(0))
    yield "hessian_is_diagonal is declared: ∂²f/∂x²", found, expected


def jacobian_is_constant(run: LayerRun) -> Entries:
    """Check that ``J_0ᵀ c`` is ``J_nᵀ c`` for all samples ``n``, and at another input."""
    column = run.columns()[:, :1]
    mat = column.expand(-1, *run.output.shape)
    found = dict(enumerate(run.call("jac_t_mat_prod", column, view=subsample(run.view, [0]))))
    for where, at in (("", run), (" at another input", run_layer(run.case, _elsewhere(run.case)))):
        for slot, leaf in at.live.items():
            if leaf.shape[:1] == run.output.shape[:1]:
                true = oracle.transposed_product(at.jacobians[slot], mat)
                first = found.get(slot)
                what = f"jacobian_is_constant: Jᵀ mat{where}, input {slot}, from sample 0"
                yield what, None if first is None else first.expand_as(true), true


def _elsewhere(case: RuleCase) -> Arguments:
    """The case's inputs, with other values in the tensors that are differentiated."""
    arguments, other = case.arguments(), case.arguments(seed=9).tensors()
    return arguments.map_numbered(lambda slot, x: other[slot] if case.is_live(slot, x) else x)


def linear_in_params(run: LayerRun) -> None:
    """Check that second derivatives in the declared parameters vanish."""
    assert isinstance(run.rule, ParametricRule)
    declared = set(run.rule.linear_in_params)
    unknown = declared - {*run.rule.params, *run.parameters}
    require(not unknown, f"linear_in_params names {sorted(unknown)}, which params does not.")
    for name in declared & set(run.parameters):
        found = _contracted(run, run.parameters[name], _weights(run))
        scale = max(float(run.jacobians[name].abs().max()), 1.0)
        message = f"linear_in_params is declared for {name!r}, but ∂²f/∂θ² does not vanish."
        require(float(found.abs().max()) <= run.case.tolerances.float64 * scale, message)


def mixes_samples(run: LayerRun) -> None:
    """Compare with the blocks of the Jacobians between different samples."""
    declared, samples = run.rule.mixes_samples(run.view), run.view.batch_size
    mixing = any(
        oracle.mix(run.jacobians[slot], run.output.dim())
        for slot, leaf in run.live.items()
        if leaf.dim() and leaf.shape[0] == samples
    )
    actual = "influence" if mixing else "do not influence"
    message = f"mixes_samples says {declared}, but samples {actual} each other in this call (they "
    message += f"are on axis {run.view.axis} of the output, as batch_axis(view, index) says)."
    require(declared == mixing, message)
