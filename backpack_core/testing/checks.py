"""The lists of checks: the cases that each applies to, and the checks that it rests on.

If a prerequisite of a check fails, the check is not judged, because its message would be about a
consequence of that fault. So products and declarations come before nets.

The checks here run extensions in nets. A library brings the checks of the classes that it defines:
those of methods, declarations and losses are in ``backpack_products.conformance``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from backpack_core.errors import UnsupportedError
from backpack_core.testing import net_checks, oracle
from backpack_core.testing.cases import SAMPLES, Case, RuleCase
from backpack_core.testing.compare import agree, finite
from backpack_core.testing.layer_run import LayerRun, shared_run_of, traits
from backpack_core.testing.nets import nets_of

# The kind of the checks of a rule's methods and declarations, which its cases have besides "rule".
METHOD = "method"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        kind: The kind of case that it is for, or ``METHOD``.
        function: Raises an error if it finds a fault, or yields what must be compared.
        subject: Makes the argument of the function from a case.
        needs: Traits that a case must have, or must not, for the check to apply; see ``traits``.
        prerequisites: Names, or kinds, of the checks that it rests on, if they apply to a case.
    """

    name: str
    kind: str
    function: Callable[[Any], Any]
    subject: Callable[[Any], Any]
    needs: frozenset[str]
    prerequisites: frozenset[str]

    def rests_on(self, other: Check) -> bool:
        """Whether a check is a prerequisite."""
        return not self.prerequisites.isdisjoint((other.name, other.kind))

    def run(self, case: Case, where: str = "") -> None:
        """Raise if there is a fault; ``where`` is said about the situation."""
        made = (entry for subject in [self.subject(case)] for entry in self.function(subject) or ())
        agree(made, case.tolerances.float64, where)


# A test pins the list of each kind: a check that is removed is removed for all authors.
_checks: list[Check] = []


def register_checks(
    kind: str,
    table: str,
    functions: Mapping[str, Callable[..., Any]],
    subject: Callable[[Any], Any],
) -> None:
    """Add checks to all cases of a kind.

    Args:
        kind: The kind of case, or ``METHOD``.
        table: Lines ``names of checks | traits that they need | names of prerequisites``.
        functions: The functions, by name; a reduction that they take may follow in the table.
        subject: Makes their argument from a case.
    """
    for line in table.strip().splitlines():
        names, needs, prerequisites = (part.strip() for part in line.split("|"))
        wanted = frozenset(needs.split(", ") if needs else ())
        for name in names.split():
            stem, _, reduction = name.rpartition("_")
            function = functions.get(name) or partial(functions[stem], reduction=reduction)
            before = frozenset(prerequisites.split())
            _checks.append(Check(name, kind, function, subject, wanted, before))
    checks_for.cache_clear()


@cache
def checks_for(kind: str) -> tuple[Check, ...]:
    """The checks for a kind of case, each after those that it rests on."""
    kinds = {kind, METHOD} if kind == RuleCase.kind else {kind}
    found = [check for check in _checks if check.kind in kinds]
    ordered: dict[Check, None] = {}

    def add(check: Check) -> None:
        for other in found if check not in ordered else ():
            if check.rests_on(other):
                add(other)
        ordered[check] = None

    for check in found:
        add(check)
    return tuple(ordered)


# Checks of a rule's methods and declarations, for another case, and of nets around a layer:
SITUATED = """
other_inputs one_sample empty_batch large_inputs | separate, kept | method
other_mode | | method
"""
LAYER = """
mean | separate | method other_inputs one_sample
sum batch_of_one frozen_layer frozen_surroundings retain_graph called_twice | separate | mean
deepcopy pickle no_live_calls | separate | mean
partly_frozen | separate, several parameters | mean
differentiable | separate, kept, twice | mean
subsampling | separate | mean subsampled_call
float32 autocast | separate | mean keeps_dtype
bfloat16 | separate, half precision | mean keeps_dtype
mixing_is_refused | not separate | mixes_samples
"""
EXTENSION = """
declarations | |
mean | | declarations
sum batch_of_one shared_positions single_number residual called_twice no_samples quantity | | mean
frozen_surroundings partly_frozen loss_scaled in_chunks float32 bfloat16 retain_graph | | mean
beside_others leaves_gradient_alone pickle_extension no_live_calls | | mean
differentiable | | retain_graph
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
    for check in [check for check in checks_for(run.case.kind) if check.kind == METHOD]:
        is_wanted = name == "other_mode" or check.name.endswith("t_mat_prod")
        if is_wanted and check.needs <= own_traits and check.name not in run.case.expected_failures:
            check.run(twin, where)


_SITUATED = {name: partial(in_situation, name=name) for name in SITUATIONS}
register_checks("rule", SITUATED, _SITUATED, shared_run_of)
register_checks("rule", LAYER, vars(net_checks), nets_of)
register_checks("extension", EXTENSION, vars(net_checks), nets_of)
