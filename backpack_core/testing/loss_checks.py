"""Checks of a loss rule against the Hessian by autograd, in every reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import SAMPLES, Arguments, LossCase, seeded
from backpack_core.testing.compare import CheckFailure, close, require, untouched
from backpack_core.testing.execution import COLUMNS, draw, execute, shared
from backpack_core.testing.extensions_run import ALL_NEEDS, Problem, installed_extensions
from backpack_core.testing.network import BoundLoss, Shrink
from backpack_core.testing.reference import Reference
from backpack_core.testing.rule_checks import strided
from backpack_products.loss import HessianLossRule

# Positions of the target and further arguments of a loss.
ALL_BUT_FIRST = tuple(range(1, 16))


class LossRun:
    """One execution of a loss, as its rule sees it, and its Hessian.

    Attributes:
        case: The case.
        rule: The rule.
        view: The call, with an arriving gradient of one.
        leaf: The prediction.
        value: The loss, with its graph.
    """

    def __init__(
        self,
        case: LossCase,
        reduction: str,
        samples: int = SAMPLES,
        spread: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Run a loss on its case's inputs, which may be spread in memory."""
        layer = replace(case.as_rule_case(reduction), constants=ALL_BUT_FIRST)
        given = layer.arguments(samples, dtype)
        run = execute(layer, given.map(strided) if spread else given, dtype=dtype)
        if not isinstance(run.rule, HessianLossRule):
            raise CheckFailure(f"{type(run.rule).__name__} is not a HessianLossRule.")
        self.case, self.rule, self.leaf, self.value = case, run.rule, run.live[0], run.output
        self.view = run.view
        self.view = self.times(1.0)
        self.rule.check(self.view)

    @cached_property
    def full_hessian(self) -> Tensor:
        """Shape ``[N, *D, N, *D]``."""
        return oracle.hessian(self.value, self.leaf)

    @cached_property
    def hessian(self) -> Tensor:
        """Of each sample's loss. Shape ``[N, D, D]``."""
        return oracle.own_blocks(self.full_hessian, self.leaf.dim())

    def times(self, factor: float | Tensor) -> View:
        """The view in a multiple of the loss, each entry by its own."""
        with torch.no_grad():
            return View(self.view.call, grad_output=torch.ones_like(self.value) * factor)

    def columns(self) -> Tensor:
        """Random columns at the prediction."""
        return draw((COLUMNS, *self.leaf.shape), 3)


# The run of a case on its own inputs.
shared_run = shared(LossRun)

# Methods of a rule, by what is compared: called with rule, view and columns.
METHODS: dict[str, Callable[[HessianLossRule, View, Tensor], Tensor | None]] = {
    "hessian_mat_prod": lambda rule, view, mat: rule.hessian_mat_prod(view, mat),
    "sum_hessian": lambda rule, view, mat: rule.sum_hessian(view),
    "gradient": lambda rule, view, mat: rule.gradient(view),
    "sqrt_hessian": lambda rule, view, mat: _exact_square(rule, view),
}


def _exact_square(rule: HessianLossRule, view: View) -> Tensor | None:
    """``S Sᵀ``, ``[N, D, D]``, or ``None`` where the Hessian has no root and the rule says so."""
    try:
        root = rule.sqrt_hessian(view).flatten(2)
    except UnsupportedError:
        if rule.hessian_is_psd:
            raise
        return None
    return torch.einsum("vni,vnj->nij", root, root)


def agrees(
    run: LossRun,
    view: View | None = None,
    factor: float = 1.0,
    allowed: float = 0.0,
    methods: Sequence[str] = tuple(METHODS),
) -> None:
    """Methods of a rule against the oracle.

    Args:
        run: The run that the oracle knows.
        view: What the rule sees, with some samples or all; default: that of the run.
        factor: Its Hessian is this multiple of the run's.
        allowed: Relative error; default: that of double precision.
        methods: Which methods; default: all.
    """
    view, mat = view or run.view, run.columns()
    samples = list(range(len(run.leaf)) if view.indices is None else view.indices)
    product = torch.einsum("nij,vnj->vni", run.hessian, mat.flatten(2)).reshape(mat.shape)
    expected = {
        "hessian_mat_prod": product[:, samples],
        "sum_hessian": run.hessian[samples].sum(0),
        "gradient": oracle.gradients(run.value, [run.leaf])[0][samples],
        "sqrt_hessian": run.hessian[samples],
    }
    for name in methods:
        with torch.no_grad():
            value = METHODS[name](run.rule, view, mat[:, samples].to(view.input.dtype))
        if value is not None:
            what, kind = name + ": S Sᵀ" * (name == "sqrt_hessian"), view.input.dtype
            require(value.dtype == kind, f"{what}: {value.dtype}, expected {kind}.")
            close(value, factor * expected[name], what, allowed or run.case.tolerances.float64)


def _refuses(function: Callable[..., object], what: str, *arguments: object) -> None:
    try:
        function(*arguments)
    except UnsupportedError:
        return
    require(False, f"{what} gives a value where none exists: raise UnsupportedError.")


def sqrt_hessian_sampled(case: LossCase, reduction: str) -> None:
    """Means over many columns, in units of their standard error."""
    run = shared_run(case, reduction)
    method = run.rule.sqrt_hessian_sampled
    if not case.sampled:
        _refuses(method, "sqrt_hessian_sampled", run.view, 1)
        return
    with torch.no_grad():
        root = seeded(lambda: method(run.view, case.samples), 9)
    good = root.shape == (case.samples, *run.leaf.shape)
    require(good, f"sqrt_hessian_sampled returned shape {list(root.shape)}.")
    flat = root.flatten(2) * case.samples**0.5
    first = torch.einsum("vni,vnj->nij", flat, flat) / case.samples
    second = torch.einsum("vni,vnj->nij", flat.square(), flat.square()) / case.samples
    error = ((second - first.square()).clamp_min(0) / case.samples).sqrt()
    allowed = case.tolerances.standard_errors * error + 1e-9 * run.hessian.abs().max()
    require(
        bool(((first - run.hessian).abs() <= allowed).all()),
        f"The mean of {case.samples} sampled outer products is not the Hessian: it is more than "
        f"{case.tolerances.standard_errors} standard errors off.",
    )


def arriving_gradient(case: LossCase, reduction: str) -> None:
    """Half the loss has half the Hessian; minus the loss has no root."""
    run = LossRun(case, reduction)
    agrees(run, run.times(0.5), factor=0.5)
    minus = run.times(-1.0)
    agrees(run, minus, factor=-1.0, methods=["hessian_mat_prod"])
    with torch.no_grad():
        _refuses(run.rule.sqrt_hessian, "sqrt_hessian of minus the loss", minus)


def started_extensions(case: LossCase, reduction: str) -> None:
    """Every installed extension, on a single elementwise layer in front of the loss."""
    layer, rule = case.as_rule_case(reduction), shared_run(case, reduction).rule

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        given = layer.arguments(dtype=dtype)
        first = given.args[0]
        net = seeded(lambda: Shrink(first.shape[1:]), 8).to(dtype)
        return net, Arguments((first,)), BoundLoss(layer.module(dtype), given)

    net, arguments, loss = build(torch.float64)
    reference = Reference(torch.nn.Sequential(net, torch.nn.Flatten()), arguments, loss)
    reference.parameters = {"weight": net.get_parameter("weight")}
    may = {"structure"} | (set() if case.sampled else {"sampling"})
    may |= set() if rule.hessian_is_psd else {"curvature", "sampling"}
    given = Problem(build, reference, frozenset(may))
    # Extensions that start at random columns have no exact value here.
    needs = [need for need in ALL_NEEDS if need not in ("sampling", "structure")]
    refusals, allowed = given.judge_refusal, case.tolerances.float64
    given.judge(installed_extensions(), allowed, refusals=refusals, needs=needs)


def of_method(case: LossCase, reduction: str, method: str) -> None:
    """One method against the dense Hessian, or the gradient."""
    agrees(shared_run(case, reduction), methods=[method])


hessian_mat_prod, sum_hessian, gradient, sqrt_hessian = (
    partial(of_method, method=method) for method in METHODS
)


def normalisation(case: LossCase) -> None:
    """The factor that a mean puts in front of the sum; batches of a data set are weighted by it."""
    mean, total = shared_run(case, "mean"), shared_run(case, "sum")
    expected = total.value * mean.rule.normalisation(mean.view)
    close(mean.value, expected, "the mean", case.tolerances.float64)


def hessian_is_psd(case: LossCase) -> None:
    """Where it is declared, no eigenvalue is negative."""
    run = shared_run(case, "sum")
    smallest = float(torch.linalg.eigvalsh(run.hessian).min())
    scale = float(run.hessian.abs().max())
    require(
        not run.rule.hessian_is_psd or smallest >= -1e-12 * max(scale, 1.0),
        f"hessian_is_psd is declared, but the Hessian has the eigenvalue {smallest:.2e}.",
    )


def samples_are_separate(case: LossCase) -> None:
    """No blocks between samples."""
    run = shared_run(case, "mean")
    samples = len(run.leaf)
    blocks = run.full_hessian.reshape(samples, -1, samples, run.leaf[0].numel()).transpose(1, 2)
    shared_terms = bool(blocks[~torch.eye(samples, dtype=torch.bool)].any())
    require(not shared_terms, "Predictions of different samples share a loss term.")


def batch_of_one(case: LossCase) -> None:
    """One sample, mean."""
    agrees(LossRun(case, "mean", samples=1))


def subsampled_call(case: LossCase) -> None:
    """Samples 2 and 0 of a mean: the factor stays that of the whole batch."""
    run = shared_run(case, "mean")
    agrees(run, run.view.subsample([2, 0]))


def non_contiguous_input(case: LossCase) -> None:
    """A prediction that is every other entry of a larger tensor."""
    agrees(LossRun(case, "mean", spread=True))


def float32(case: LossCase) -> None:
    """Against the Hessian in double precision."""
    single = LossRun(case, "mean", dtype=torch.float32).view
    agrees(shared_run(case, "mean"), single, allowed=case.tolerances.float32)


def leaves_arguments_alone(case: LossCase) -> None:
    """Prediction, target and columns come out as they went in, and the rule keeps nothing."""
    run = LossRun(case, "mean")
    mat = run.columns()
    given = (mat, *run.view.stored.inputs)
    with torch.no_grad(), untouched(run.rule, run.view.call.module, *given):
        for method in METHODS.values():
            method(run.rule, run.view, mat)


def unreduced(case: LossCase) -> None:
    """``reduction="none"``: a different gradient arrives at every entry of the loss."""
    run = LossRun(case, "none")
    weights = torch.linspace(0.5, 1.5, run.value.numel()).reshape(run.value.shape).to(run.value)
    run.value = (run.value * weights).sum()
    agrees(run, run.times(weights))
