"""Checks of a loss rule against the Hessian by autograd, in every reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError
from backpack_core.extending import extend
from backpack_core.record.structure import map_tensors
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.cases import SAMPLES, Arguments, LossCase, RuleCase, seeded
from backpack_core.testing.checks import of_loss
from backpack_core.testing.compare import close, require, stateless
from backpack_core.testing.execution import COLUMNS, draw, execute, recorded, shared
from backpack_core.testing.extensions_run import ALL_NEEDS, Problem, installed_extensions
from backpack_core.testing.network import BoundLoss, Shrink
from backpack_core.testing.reference import Reference
from backpack_products.loss import HessianLossRule

# Positions of the target and further arguments of a loss.
ALL_BUT_FIRST = tuple(range(1, 16))


@dataclass(eq=False)
class LossRun:
    """One execution of a loss, as its rule sees it, and its Hessian.

    Attributes:
        rule: The rule.
        view: The call, with an arriving gradient of one.
        leaf: The prediction.
        value: The loss, with its graph.
    """

    rule: HessianLossRule
    view: View
    leaf: Tensor
    value: Tensor

    @cached_property
    def full_hessian(self) -> Tensor:
        """Shape ``[N, D, N, D]``."""
        samples = len(self.leaf)
        return oracle.hessian(self.value, self.leaf).reshape(samples, -1, samples, self.features)

    @property
    def features(self) -> int:
        """``D``, the size of one prediction."""
        return self.leaf[0].numel()

    @cached_property
    def hessian(self) -> Tensor:
        """Of each sample's loss. Shape ``[N, D, D]``."""
        return torch.stack([self.full_hessian[n, :, n] for n in range(len(self.leaf))])

    def arriving(self, factor: float) -> View:
        """The view with another gradient arriving at the loss."""
        with torch.no_grad():
            return View(self.view.call, grad_output=torch.full_like(self.value, factor))

    def columns(self) -> Tensor:
        """Random columns at the prediction."""
        return draw((COLUMNS, *self.leaf.shape), 3)

    def product(self, mat: Tensor) -> Tensor:
        """The Hessian times columns, by the oracle."""
        return torch.einsum("nij,vnj->vni", self.hessian, mat.flatten(2)).reshape(mat.shape)


def run_loss(
    case: LossCase, reduction: str, samples: int = SAMPLES, strided: bool = False
) -> LossRun:
    """Run a loss on its case's inputs."""
    layer = case.as_rule_case(reduction)
    given = layer.arguments(samples)
    if strided:
        first = torch.stack([given.args[0]] * 2, -1).flatten(-2)[..., ::2]
        given = Arguments((first, *given.args[1:]), given.kwargs)
    constant = RuleCase(
        layer.module_factory, layer.input_factory, rule=layer.rule, constants=ALL_BUT_FIRST
    )
    run = execute(constant, given)
    name = type(run.rule).__name__
    require(isinstance(run.rule, HessianLossRule), f"{name} is no HessianLossRule.")
    assert isinstance(run.rule, HessianLossRule)
    leaf = run.leaves[0]
    assert leaf is not None
    found = LossRun(run.rule, run.view, leaf, run.output)
    found.view = found.arriving(1.0)
    run.rule.check(found.view)
    return found


@shared
def shared_run(case: LossCase, reduction: str) -> LossRun:
    """The run of a case on its own inputs."""
    return run_loss(case, reduction)


def _outer(root: Tensor) -> Tensor:
    """``Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[N, D, D]``."""
    flat = root.flatten(2)
    return torch.einsum("vni,vnj->nij", flat, flat)


def _root(run: LossRun, view: View) -> Tensor | None:
    """The exact root, or ``None`` where the Hessian has none and the rule says so."""
    try:
        with torch.no_grad():
            return run.rule.sqrt_hessian(view)
    except UnsupportedError:
        if run.rule.hessian_is_psd:
            raise
        return None


def agrees(
    case: LossCase,
    run: LossRun,
    what: str,
    view: View | None = None,
    chosen: Sequence[int] | None = None,
    factor: float = 1.0,
    tolerance: float | None = None,
) -> None:
    """Root, product, sum and gradient of a view against the oracle.

    Args:
        case: The case.
        run: The run that the oracle knows.
        what: In which situation, for messages.
        view: What the rule sees; default: that of the run.
        chosen: Which samples the view has.
        factor: Its Hessian is this multiple of the run's.
        tolerance: Error that is allowed.
    """
    view, tolerance = view or run.view, tolerance or case.tolerances.float64
    samples = list(range(len(run.leaf)) if chosen is None else chosen)
    expected, mat = factor * run.hessian[samples], run.columns()
    dtype = view.input.dtype
    with torch.no_grad():
        found = {
            "hessian_mat_prod": run.rule.hessian_mat_prod(view, mat[:, samples].to(dtype)),
            "sum_hessian": run.rule.sum_hessian(view),
            "gradient": run.rule.gradient(view),
        }
        root = _root(run, view)
        if root is not None:
            found["S Sᵀ of sqrt_hessian"] = _outer(root)
    of = {
        "hessian_mat_prod": factor * run.product(mat)[:, samples],
        "sum_hessian": expected.sum(0),
        "gradient": factor * oracle.gradients(run.value, [run.leaf])[0][samples],
        "S Sᵀ of sqrt_hessian": expected,
    }
    for name, value in found.items():
        require(value.dtype == dtype, f"{name}, {what}: {value.dtype}, expected {dtype}.")
        close(value, of[name], f"{name}, {what}", tolerance)


def sqrt_hessian(case: LossCase, reduction: str) -> None:
    """Outer products of the root."""
    run = shared_run(case, reduction)
    root = _root(run, run.view)
    if root is not None:
        close(_outer(root), run.hessian, "S Sᵀ", case.tolerances.float64)


def sqrt_hessian_sampled(case: LossCase, reduction: str) -> None:
    """Means over many columns, in units of their standard error."""
    run = shared_run(case, reduction)
    if not case.sampled:
        _refuses(lambda: run.rule.sqrt_hessian_sampled(run.view, 1), "sqrt_hessian_sampled")
        return
    with torch.no_grad():
        root = seeded(lambda: run.rule.sqrt_hessian_sampled(run.view, case.samples), 9)
    require(
        root.shape == (case.samples, *run.leaf.shape),
        f"sqrt_hessian_sampled returned shape {list(root.shape)}.",
    )
    flat = root.flatten(2) * case.samples**0.5
    first = torch.einsum("vni,vnj->nij", flat, flat) / case.samples
    second = torch.einsum("vni,vnj->nij", flat.square(), flat.square()) / case.samples
    error = ((second - first.square()).clamp_min(0) / case.samples).sqrt()
    allowed = case.tolerances.standard_errors * error + 1e-9 * run.hessian.abs().max()
    worst = float(((first - run.hessian).abs() - allowed).max())
    require(
        worst <= 0,
        f"The mean of {case.samples} sampled outer products is not the Hessian: it is more than "
        f"{case.tolerances.standard_errors} standard errors off.",
    )


def hessian_mat_prod(case: LossCase, reduction: str) -> None:
    """Against the dense Hessian."""
    run = shared_run(case, reduction)
    mat = run.columns()
    with torch.no_grad():
        found = run.rule.hessian_mat_prod(run.view, mat)
    close(found, run.product(mat), "hessian_mat_prod", case.tolerances.float64)


def sum_hessian(case: LossCase, reduction: str) -> None:
    """Against the dense Hessian, summed."""
    run = shared_run(case, reduction)
    with torch.no_grad():
        found = run.rule.sum_hessian(run.view)
    close(found, run.hessian.sum(0), "sum_hessian", case.tolerances.float64)


def arriving_gradient(case: LossCase, reduction: str) -> None:
    """Half the loss has half the Hessian; minus the loss has no root."""
    run = run_loss(case, reduction)
    agrees(case, run, "half the loss", run.arriving(0.5), factor=0.5)
    minus, mat = run.arriving(-1.0), run.columns()
    with torch.no_grad():
        found = run.rule.hessian_mat_prod(minus, mat)
    what = "hessian_mat_prod of minus the loss"
    close(found, -run.product(mat), what, case.tolerances.float64)
    _refuses(lambda: run.rule.sqrt_hessian(minus), "sqrt_hessian of minus the loss")


def _refuses(function: object, what: str) -> None:
    try:
        function()  # type: ignore[operator]
    except UnsupportedError:
        return
    require(False, f"{what} gives a value where none exists: raise UnsupportedError.")


def started_extensions(case: LossCase, reduction: str) -> None:
    """Every installed extension, on a single elementwise layer in front of the loss."""
    given = _problem(case, reduction)
    found, values = given.run_usable(installed_extensions())
    # Extensions that start at random columns have no exact value here.
    needs = [need for need in ALL_NEEDS if need not in ("sampling", "structure")]
    given.compare(values, found, case.tolerances.float64, needs=needs)


def _problem(case: LossCase, reduction: str) -> Problem:
    layer = case.as_rule_case(reduction)

    def build(dtype: torch.dtype) -> tuple[Module, Arguments, Module]:
        given = layer.arguments(dtype=dtype)
        first = given.args[0]
        net = seeded(lambda: Shrink(first.shape[1:]), 8).to(dtype)
        return net, Arguments((first,)), BoundLoss(layer.module(dtype), given)

    net, arguments, loss = build(torch.float64)
    reference = Reference(torch.nn.Sequential(net, torch.nn.Flatten()), arguments, loss)
    reference.parameters = {"weight": net.get_parameter("weight")}
    rule = shared_run(case, reduction).rule
    may = {"structure"}
    if not rule.hessian_is_psd:
        may |= {"curvature", "sampling"}
    if not case.sampled:
        may.add("sampling")
    return Problem(build, reference, frozenset(may))


for _reduction in ("mean", "sum"):
    for _check in (
        sqrt_hessian,
        sqrt_hessian_sampled,
        hessian_mat_prod,
        sum_hessian,
        arriving_gradient,
        started_extensions,
    ):
        of_loss(name=f"{_check.__name__}_{_reduction}")(partial(_check, reduction=_reduction))


@of_loss()
def normalisation(case: LossCase) -> None:
    """The factor that a mean puts in front of the sum; batches of a data set are weighted by it."""
    mean, total = shared_run(case, "mean"), shared_run(case, "sum")
    expected = total.value * mean.rule.normalisation(mean.view)
    close(mean.value, expected, "the mean", case.tolerances.float64)


@of_loss()
def hessian_is_psd(case: LossCase) -> None:
    """Where it is declared, no eigenvalue is negative."""
    run = shared_run(case, "sum")
    smallest = float(torch.linalg.eigvalsh(run.hessian).min())
    scale = float(run.hessian.abs().max())
    require(
        not run.rule.hessian_is_psd or smallest >= -1e-12 * max(scale, 1.0),
        f"hessian_is_psd is declared, but the Hessian has the eigenvalue {smallest:.2e}.",
    )


@of_loss()
def samples_are_separate(case: LossCase) -> None:
    """No blocks between samples."""
    run = shared_run(case, "mean")
    samples = len(run.leaf)
    blocks = run.full_hessian.transpose(1, 2)[~torch.eye(samples, dtype=torch.bool)]
    require(not bool(blocks.any()), "Predictions of different samples share a loss term.")


@of_loss()
def loss_batch_of_one(case: LossCase) -> None:
    """One sample, mean."""
    agrees(case, run_loss(case, "mean", samples=1), "one sample")


@of_loss()
def loss_subsampled_call(case: LossCase) -> None:
    """Samples 2 and 0 of a mean: the factor stays that of the whole batch."""
    run, chosen = shared_run(case, "mean"), [2, 0]
    agrees(case, run, f"samples {chosen}", run.view.subsample(chosen), chosen)


@of_loss()
def loss_non_contiguous_input(case: LossCase) -> None:
    """A prediction that is every other entry of a larger tensor."""
    agrees(case, run_loss(case, "mean", strided=True), "strided")


@of_loss()
def loss_float32(case: LossCase) -> None:
    """Against the Hessian in double precision."""
    layer = case.as_rule_case("mean")
    given = layer.arguments(dtype=torch.float32)
    module = extend(layer.module(torch.float32))
    args, kwargs = map_tensors((given.args, dict(given.kwargs)), Tensor.detach)
    value = module(args[0].requires_grad_().clone(), *args[1:], **kwargs)
    single, allowed = recorded(value, torch.ones_like(value)), case.tolerances.float32
    agrees(case, shared_run(case, "mean"), "single precision", single, tolerance=allowed)


@of_loss()
def loss_leaves_arguments_alone(case: LossCase) -> None:
    """Prediction, target and columns come out as they went in, and the rule keeps nothing."""
    run = run_loss(case, "mean")
    mat = run.columns()
    held = [mat, *run.view.stored.inputs]
    before = [tensor.detach().clone() for tensor in held]
    with torch.no_grad(), stateless(run.rule, run.view.call.module):
        _root(run, run.view)
        run.rule.hessian_mat_prod(run.view, mat)
        run.rule.sum_hessian(run.view)
    for tensor, copied in zip(held, before, strict=True):
        require(torch.equal(tensor, copied), "A method wrote to a tensor that it was given.")
