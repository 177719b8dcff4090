"""The table of checks: the cases that each applies to, and the checks that it builds on.

If a prerequisite of a check fails, the check is not judged, because its message would be about a
consequence of that fault. So products and declarations come before nets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from backpack_core.errors import UnsupportedError
from backpack_core.testing import (
    declaration_checks,
    loss_checks,
    merging_checks,
    net_checks,
    oracle,
    product_checks,
)
from backpack_core.testing.cases import SAMPLES, Case, RuleCase
from backpack_core.testing.compare import agree, finite
from backpack_core.testing.layer_run import LayerRun, shared_run_of, traits
from backpack_core.testing.nets import nets_of


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        function: Raises an error if it finds a fault, or yields what must be compared.
        subject: Makes the argument of the function from a case.
        needs: Traits that a case must have, or must not, for the check to apply; see ``traits``.
        prerequisites: Names of the checks that it builds on, if they apply to a case.
    """

    name: str
    function: Callable[[Any], Any]
    subject: Callable[[Any], Any]
    needs: frozenset[str]
    prerequisites: frozenset[str]

    def run(self, case: Case, where: str = "") -> None:
        """Raise if there is a fault; ``where`` is said about the situation."""
        made = (entry for subject in [self.subject(case)] for entry in self.function(subject) or ())
        agree(made, case.tolerances.float64, where)


# Each line: names of checks | traits that they need | names of prerequisites, which come first.
# Checks of a rule's methods and declarations:
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
affine_weight | separate, kept, affine | accepts
affine_form | separate, kept, affine | affine_weight
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
# Checks of the same in other situations, and of nets around a layer:
LAYER = """
keeps_dtype | separate, kept | jac_t_mat_prod param_jac_t_mat_prod
other_inputs one_sample empty_batch large_inputs | separate, kept | METHODS
other_mode | | METHODS
mean | separate | METHODS other_inputs one_sample
sum batch_of_one frozen_layer frozen_surroundings retain_graph called_twice | separate | mean
deepcopy pickle no_live_calls | separate | mean
partly_frozen | separate, several parameters | mean
differentiable | separate, kept, twice | mean
subsampling | separate | mean subsampled_call
float32 autocast | separate | mean keeps_dtype
bfloat16 | separate, half precision | mean keeps_dtype
mixing_is_refused | not separate | mixes_samples
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
declarations | |
mean | | declarations
sum batch_of_one shared_positions single_number residual called_twice no_samples quantity | | mean
frozen_surroundings partly_frozen loss_scaled in_chunks float32 bfloat16 retain_graph | | mean
beside_others leaves_gradient_alone pickle_extension no_live_calls degree samples_add | | mean
differentiable | | retain_graph
two_halves_mean two_halves_sum | | degree
subsampling | subsampling | mean
savefield | savefield | mean
"""


def _other_mode(case: RuleCase) -> RuleCase:
    module = case.module_factory
    return replace(case, module_factory=lambda: (made := module()).train(not made.training))


def _inputs(case: RuleCase, samples: int = SAMPLES, seed: int = 1, factor: int = 1) -> RuleCase:
    """The case with other inputs, of which those that are differentiated are multiplied."""
    inputs = case.arguments(samples, seed=seed)
    scaled = inputs.map_numbered(lambda slot, x: x * factor if case.is_live(slot, x) else x)
    return replace(case, input_factory=lambda n: scaled)


# Checks that run others for another case, and what is said about it. The layer may refuse it.
SITUATIONS: dict[str, tuple[Callable[[RuleCase], RuleCase], str]] = {
    "other_mode": (_other_mode, "That is in the other mode, train or eval."),
    "other_inputs": (partial(_inputs, samples=5, seed=9), "That is for N = 5 and other inputs."),
    "one_sample": (partial(_inputs, samples=1), "That is for a single sample, N = 1."),
    "empty_batch": (partial(_inputs, samples=0), "That is for N = 0, as Poisson sampling draws."),
    "large_inputs": (partial(_inputs, factor=10_000), "That is for 10,000 times the inputs."),
}


def in_situation(run: LayerRun, name: str) -> None:
    """Check products, and all methods and declarations in the other mode, in another situation."""
    change, where = SITUATIONS[name]
    try:
        run_of_twin = shared_run_of(twin := change(run.case))
        targets = [*run_of_twin.live.values(), *run_of_twin.parameters.values()]
        finite([*oracle.gradients(run_of_twin.output.sum(), targets), run_of_twin.output], "")
    except Exception:
        return  # the layer itself takes nothing like that
    try:
        run_of_twin.rule.check(run_of_twin.view)
    except UnsupportedError:
        return
    own_traits = traits(twin) - {"not twice", "not kept"}  # declared for the case's mode only
    for check in OF_METHODS:
        is_wanted = name == "other_mode" or check.name.endswith("t_mat_prod")
        if is_wanted and check.needs <= own_traits and check.name not in run.case.expected_failures:
            check.run(twin, where)


def _table(text: str, modules: Mapping[ModuleType, Callable[[Any], Any]]) -> Iterator[Check]:
    """The checks of a table; ``modules`` maps modules of check functions to their ``subject``."""
    for line in text.strip().splitlines():
        names, needs, prerequisites = (part.strip() for part in line.split("|"))
        if "METHODS" in prerequisites:
            of_methods = " ".join(check.name for check in OF_METHODS)
            prerequisites = prerequisites.replace("METHODS", of_methods)
        wanted = frozenset(needs.split(", ") if needs else ())
        for name in names.split():
            module, subject = next(pair for pair in modules.items() if _in(pair[0], name))
            yield Check(name, _in(module, name), subject, wanted, frozenset(prerequisites.split()))


def _in(module: ModuleType, name: str) -> Any:
    """The function of a check; a reduction that it takes may follow its name."""
    stem, _, reduction = name.rpartition("_")
    other = stem in vars(module) and partial(vars(module)[stem], reduction=reduction)
    found = vars(module).get(name, other)
    return partial(in_situation, name=name) if name in SITUATIONS and not found else found


_OF_CALLS = dict.fromkeys((product_checks, declaration_checks), shared_run_of)
_RULE: dict[ModuleType, Callable[[Any], Any]] = {**_OF_CALLS, net_checks: nets_of}
OF_METHODS = tuple(_table(METHODS, _RULE))

# By kind of case. A test pins each list: a check that is removed is removed for all authors.
CHECKS = {
    "rule": (*OF_METHODS, *_table(LAYER, _RULE)),
    "loss": tuple(_table(LOSS, {loss_checks: lambda case: case})),
    "extension": tuple(_table(EXTENSION, {net_checks: nets_of, merging_checks: nets_of})),
}
