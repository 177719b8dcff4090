"""The checks of the conformance kit for what this library defines: rules, their products, losses.

``backpack_core.testing`` imports this package, and has what all checks use: cases, the oracle, nets
and comparisons. Each table says when its checks apply, and what they rest on.
"""

from backpack_core.testing.checks import METHOD, register_checks
from backpack_core.testing.layer_run import LayerRun, more_traits, shared_run_of
from backpack_core.testing.nets import nets_of
from backpack_products.conformance import (
    declaration_checks,
    loss_checks,
    merging_checks,
    product_checks,
)
from backpack_products.derivatives import second_order
from backpack_products.elementwise import ElementwiseRule, has_second_derivative
from backpack_products.parametric import AffineRule

# Each line: names of checks | traits that they need | names of prerequisites.
METHODS = """
mixes_samples | |
not_twice_differentiable | not twice |
overwritten_input | not kept |
accepts | separate, kept |
hessian_is_zero | separate, kept, twice, zero hessian |
hessian_is_diagonal | separate, kept, twice, diagonal hessian |
linear_in_params | separate, kept, twice, linear parameters |
derivative | separate, kept, elementwise | accepts
jac_t_mat_prod | separate, kept, input | accepts derivative
affine_weight | separate, kept, parameters, affine | accepts
affine_form | separate, kept, parameters, affine | affine_weight
param_jac_t_mat_prod | separate, kept, parameters | accepts mixes_samples affine_form
jacobian_is_constant | separate, kept, batch first, constant jacobian | jac_t_mat_prod
called_again | separate, kept | jac_t_mat_prod param_jac_t_mat_prod
jac_mat_prod | separate, kept, input | called_again
param_jac_mat_prod operations | separate, kept, parameters | called_again
second_derivative | separate, kept, twice, elementwise, second derivative | accepts hessian_is_zero
second_derivative_mat_prod | separate, kept, twice, second derivative | second_derivative
subsampled_call | separate, kept, batch first | called_again
non_contiguous_columns non_contiguous_input changed_since | separate, kept | called_again
"""
RULE = """
keeps_dtype | separate, kept | jac_t_mat_prod param_jac_t_mat_prod
"""
LOSS = """
samples_are_separate hessian_is_psd normalisation | |
hessian_mat_prod_sum sqrt_hessian_sum gradient_sum | | samples_are_separate hessian_is_psd
sum_hessian_sum sqrt_hessian_sampled_sum | | hessian_mat_prod_sum sqrt_hessian_sum
arriving_gradient_sum | | sum_hessian_sum sqrt_hessian_sampled_sum gradient_sum
started_extensions_sum | | arriving_gradient_sum
hessian_mat_prod_mean sqrt_hessian_mean gradient_mean | | normalisation arriving_gradient_sum
sum_hessian_mean sqrt_hessian_sampled_mean | | hessian_mat_prod_mean sqrt_hessian_mean
arriving_gradient_mean | | sum_hessian_mean sqrt_hessian_sampled_mean gradient_mean
started_extensions_mean | | arriving_gradient_mean
other_inputs | | arriving_gradient_mean
subsampled_call non_contiguous_input float32 leaves_arguments_alone unreduced | | other_inputs
"""
EXTENSION = """
degree samples_add | | mean
two_halves_mean two_halves_sum | | degree
"""


def _traits(run: LayerRun) -> dict[str, bool]:
    """What the base class and the declarations of a rule say."""
    rule, second = run.rule, second_order(run.rule)
    propagates = not rule.transparent and 0 in run.live
    has_second = propagates and has_second_derivative(rule)
    linear, parameters = {*getattr(rule, "linear_in_params", ())}, {*run.parameters}
    # A rule's second derivative is that in its first input alone.
    in_inputs = has_second and (second.hessian_is_zero or not any(run.live))
    return {
        "zero hessian": propagates and second.hessian_is_zero,
        "constant jacobian": propagates and second.jacobian_is_constant,
        "diagonal hessian": propagates and second.hessian_is_diagonal,
        "second derivative": has_second,
        "every second derivative": parameters <= linear and (in_inputs or not run.live),
        "elementwise": propagates and isinstance(rule, ElementwiseRule),
        "linear parameters": not parameters.isdisjoint(linear),
        "affine": isinstance(rule, AffineRule),
    }


more_traits.append(_traits)
register_checks(
    METHOD, METHODS, {**vars(product_checks), **vars(declaration_checks)}, shared_run_of
)
register_checks("rule", RULE, vars(product_checks), shared_run_of)
register_checks("loss", LOSS, vars(loss_checks), lambda case: case)
register_checks("extension", EXTENSION, vars(merging_checks), nets_of)
