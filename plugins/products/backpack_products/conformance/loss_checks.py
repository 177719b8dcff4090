"""Checks of a loss rule against the Hessian by autograd, in every reduction.

A check takes a case, and possibly a reduction. It raises an error, or yields what must be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import LossCase, seeded
from backpack_core.testing.compare import CheckFailure, Entries, agree, refuses, require, untouched
from backpack_core.testing.layer_run import COLUMNS, run_layer
from backpack_core.testing.nets import Problem
from backpack_core.testing.network import loss_net
from backpack_core.testing.quantities import ALL_NEEDS, installed_extensions
from backpack_products.conformance.product_checks import CHANGED, change
from backpack_products.loss import HessianLossRule, loss_gradient
from backpack_products.some_samples import subsample

_CURVED = ("curvature", "second derivative")
_NONE = "{} gives a value where none exists: raise UnsupportedError."


class LossRun:
    """One run of a loss: the view that its rule gets, and the Hessian of the oracle.

    Attributes:
        rule: The rule.
        view: The call, with an arriving gradient of one.
        leaf: The prediction.
        value: The loss, with the oracle's graph.
    """

    def __init__(
        self, case: LossCase, reduction: str, columns: int = COLUMNS, **options: Any
    ) -> None:
        """Run a loss on its case's inputs, with options of ``run_layer``."""
        run = run_layer(case.as_rule_case(reduction), **options)
        if not isinstance(run.rule, HessianLossRule):
            raise CheckFailure(f"{type(run.rule).__name__} is not a HessianLossRule.")
        self.rule, self.leaf, self.value = run.rule, run.live[0], run.output
        self.mat, self._run = run.input_columns(columns), run
        self.view = self.times(1.0)
        self.rule.check(self.view)

    @cached_property
    def full_hessian(self) -> Tensor:
        """Hessian with respect to all predictions. Shape ``[N, *D, N, *D]``."""
        return oracle.hessian(self.value, self.leaf)

    @cached_property
    def hessian(self) -> Tensor:
        """Hessian of each sample's loss. Shape ``[N, D, D]``."""
        return oracle.own_blocks(self.full_hessian, self.leaf.dim())

    def times(self, factor: float | Tensor) -> View:
        """The view for a multiple of the loss; each entry of an unreduced loss may have its own."""
        with torch.no_grad():
            return View(self._run.view.call, grad_output=torch.ones_like(self.value) * factor)

    def expected(self, method: str) -> Tensor:
        """The expected value of a method for the whole batch, with the samples on axis 0."""
        if method == "gradient":
            return oracle.gradients(self.value, [self.leaf])[0]
        if method != "hessian_mat_prod":
            return self.hessian
        product = torch.einsum("nij,vnj->nvi", self.hessian, self.mat.flatten(2))
        return product.reshape(len(self.leaf), len(self.mat), *self.mat.shape[2:])


shared_run = lru_cache(maxsize=8)(LossRun)  # of a case on its own inputs


def _root(rule: HessianLossRule, view: View) -> Tensor | None:
    """``S Sᵀ``, ``[N, D, D]``; ``None`` if the rule says that the Hessian has no root."""
    try:
        root = rule.sqrt_hessian(view).flatten(2)
    except UnsupportedError:
        if rule.hessian_is_psd:
            raise
        return None
    return torch.einsum("vni,vnj->nij", root, root)


# Methods of a rule, by what is compared: called with rule, view and columns.
METHODS: dict[str, Callable[[HessianLossRule, View, Tensor], Tensor | None]] = {
    "hessian_mat_prod": lambda rule, view, mat: rule.hessian_mat_prod(view, mat).transpose(0, 1),
    "sum_hessian": lambda rule, view, mat: rule.sum_hessian(view),
    "gradient": lambda rule, view, mat: loss_gradient(view),
    "sqrt_hessian": lambda rule, view, mat: _root(rule, view),
}


def products(
    run: LossRun, view: View | None = None, factor: float = 1.0, methods: Iterable[str] = METHODS
) -> Entries:
    """Values of a rule's methods, and those of the oracle.

    Args:
        run: The run that the oracle knows.
        view: The view for the rule, with some samples or all; default: that of the run.
        factor: The view's Hessian is this multiple of the run's.
        methods: Names of the methods; default: all.
    """
    view = view or run.view
    chosen = list(range(len(run.leaf)) if view.indices is None else view.indices)
    mat = run.mat[:, chosen].to(view.input.dtype)
    for name in methods:
        with torch.no_grad():
            found = METHODS[name](run.rule, view, mat)
        expected = run.expected(name)[chosen].to(view.input.dtype) * factor
        if found is not None:
            what = name + ": S Sᵀ" * (name == "sqrt_hessian")
            yield what, found, expected.sum(0) if name == "sum_hessian" else expected


def of_method(case: LossCase, reduction: str, method: str) -> Entries:
    """One method against the dense Hessian, or the gradient."""
    return products(shared_run(case, reduction), methods=[method])


hessian_mat_prod, sum_hessian, gradient, sqrt_hessian = (
    partial(of_method, method=method) for method in METHODS
)


def sqrt_hessian_sampled(case: LossCase, reduction: str) -> None:
    """Compare means over many sampled columns, in units of their standard error."""
    run = shared_run(case, reduction)
    method, number, tolerances = run.rule.sqrt_hessian_sampled, case.samples, case.tolerances
    if not case.sampled:
        refuses(UnsupportedError, _NONE.format("sqrt_hessian_sampled"), method, run.view, 1)
        return
    with torch.no_grad():
        root = seeded(lambda: method(run.view, number), 9)
    good = root.shape == (number, *run.leaf.shape)
    require(good, f"sqrt_hessian_sampled returned shape {list(root.shape)}.")
    flat = root.flatten(1) * number**0.5  # of all samples: those of different ones are independent
    first = flat.T @ flat / number
    second = flat.T.square() @ flat.square() / number
    allowed = tolerances.standard_errors * ((second - first.square()).clamp_min(0) / number).sqrt()
    allowed += 1e-9 * run.hessian.abs().max()
    require(
        bool(((first - run.full_hessian.reshape_as(first)).abs() <= allowed).all()),
        f"The mean of {number} sampled outer products is not the Hessian: it is more than "
        f"{tolerances.standard_errors} standard errors off, in a sample or between samples.",
    )


def arriving_gradient(case: LossCase, reduction: str) -> Entries:
    """Half the loss has half the Hessian; minus the loss has no root."""
    run = LossRun(case, reduction)
    yield from products(run, run.times(0.5), factor=0.5)
    minus = run.times(-1.0)
    yield from products(run, minus, factor=-1.0, methods=["hessian_mat_prod"])
    with torch.no_grad():
        message = _NONE.format("sqrt_hessian of minus the loss")
        refuses(UnsupportedError, message, run.rule.sqrt_hessian, minus)


def started_extensions(case: LossCase, reduction: str) -> None:
    """Run every installed extension on an elementwise layer in front of the loss."""
    rule = shared_run(case, reduction).rule
    may_refuse = {"structure"} | (set() if case.sampled else {"sampling"})
    may_refuse |= set() if rule.hessian_is_psd else {"curvature", "sampling"}
    problem = Problem(partial(loss_net, case, reduction), frozenset(may_refuse))
    # Extensions that start at random columns have no exact value here.
    needs = [need for need in ALL_NEEDS if need not in ("sampling", "structure")]
    extensions, values = problem.run_usable(installed_extensions())
    problem.compare(values, extensions, case.tolerances.float64, needs=needs)
    curved = [(e, problem.quantity_for(e)) for e in reversed(extensions)]
    for extension in {e.propagator: e for e, of in curved if of and of.needs in _CURVED}.values():
        problem.differentiate(extension, case.tolerances.float64)


def normalisation(case: LossCase) -> Entries:
    """Check the factor that a mean puts in front of the sum, by which batches are weighted."""
    mean, total = shared_run(case, "mean"), shared_run(case, "sum")
    yield "the mean", mean.value, total.value * mean.rule.normalisation(mean.view)


def hessian_is_psd(case: LossCase) -> None:
    """Check that no eigenvalue is negative, if that is declared."""
    run = shared_run(case, "sum")
    smallest = float(torch.linalg.eigvalsh(run.hessian).min())
    allowed = -1e-12 * max(float(run.hessian.abs().max()), 1.0)
    declared = run.rule.hessian_is_psd, run.rule.is_convex(run.view)
    for what, is_so in zip(("hessian_is_psd", "is_convex"), declared, strict=True):
        message = f"{what} is declared, but the Hessian has the eigenvalue {smallest:.2e}."
        require(not is_so or smallest >= allowed, message)


def samples_are_separate(case: LossCase) -> None:
    """Check that blocks of the Hessian between samples vanish."""
    run = shared_run(case, "mean")
    mixed = oracle.mix(run.full_hessian, run.leaf.dim())
    require(not mixed, "Predictions of different samples share a loss term.")


def subsampled_call(case: LossCase) -> Entries:
    """Check samples 2 and 0 of a mean, whose factor stays that of the whole batch."""
    run = shared_run(case, "mean")
    return products(run, subsample(run.view, [2, 0]))


def other_inputs(case: LossCase) -> None:
    """Check further inputs, in which each label occurs, of other sizes, with one column or more."""
    for seed in range(12, 28):
        samples, columns = ((5, 1), (1, 7), (5, 7), (0, 2))[seed % 4]
        try:
            inputs = case.as_rule_case("mean").arguments(samples, seed=seed)
            run = LossRun(case, "mean" if samples else "sum", columns, inputs=inputs)
        except Exception:
            if samples:
                raise
            continue  # the loss itself takes no empty batch
        where = f"That is for V = {columns} and N = {samples}, and other inputs."
        agree(products(run), case.tolerances.float64, where)


def non_contiguous_input(case: LossCase) -> Entries:
    """Check a prediction that is every other entry of a larger tensor."""
    return products(LossRun(case, "mean", strided=True))


def float32(case: LossCase) -> None:
    """Compare single precision with the Hessian in double precision."""
    single = LossRun(case, "mean", dtype=torch.float32).view
    agree(products(shared_run(case, "mean"), single), case.tolerances.float32)


def leaves_arguments_alone(case: LossCase) -> None:
    """Check that no argument is changed, and that the rule keeps no state and sees old settings."""
    run = LossRun(case, "mean")
    with untouched(run.rule, run.view.call.module, run.mat, *run.view.stored.inputs):
        list(products(run))
    change(run.view.call.module)
    agree(products(run, run.times(1.0)), case.tolerances.float64, CHANGED)


def unreduced(case: LossCase) -> Entries:
    """Check ``reduction="none"``, where every entry of the loss has another arriving gradient."""
    try:
        case.as_rule_case("none").arguments().call(case.as_rule_case("none").module())
    except Exception:
        return  # there is no such reduction
    run = LossRun(case, "none")
    weights = torch.linspace(0.5, 1.5, run.value.numel()).reshape(run.value.shape).to(run.value)
    run.value, view = (run.value * weights).sum(), run.times(weights)
    yield from products(run, view)
