"""Loss rules against autograd's Hessian, over losses, options, reductions, shapes and scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from handmade import assert_equal, differentiable, draw, make_view, with_gradient
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (
    GGNMP,
    KFAC,
    KFRA,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
)
from backpack_core.record.view import View
from backpack_layers import loss_classification as classification
from backpack_layers import loss_regression as regression
from backpack_products.loss import HessianLossRule
from backpack_products.some_samples import subsample
from tests.layers.loss_cases import (
    CASES,
    CLASS_WEIGHT,
    SAMPLED,
    SAMPLES,
    SETTINGS,
    STANDARD_ERRORS,
    Case,
    labels,
    rule_for,
    uniform,
)

# KLDivLoss says at every mean that "batchmean" is the one to use.
pytestmark = pytest.mark.filterwarnings("ignore:reduction.*batchmean:UserWarning")


def started(module: nn.Module, *args: Any, **kwargs: Any) -> View:
    """A view of a call at which a gradient of one has arrived."""
    view = make_view(module, *args, **kwargs)
    return with_gradient(view, torch.ones_like(view.output))


def hessian_oracle(view: View) -> Tensor:
    """``∇²`` of what arrives, by autograd: shape ``[N, D, N, D]``."""

    def value(x: Tensor) -> Tensor:
        output: Tensor = view.module(x, *view.args[1:])
        assert view.grad_output is not None
        return (output * view.grad_output).sum()

    x = view.input.detach()
    size = x.shape[1:].numel()
    hessian = torch.autograd.functional.hessian(value, x)
    assert isinstance(hessian, Tensor)
    return hessian.reshape(len(x), size, len(x), size)


def blocks(view: View) -> Tensor:
    """The block of each sample, ``[N, D, D]``, after a check that there are no others."""
    hessian = hessian_oracle(view)
    found = torch.einsum("nink->nik", hessian)
    whole = torch.diag_embed(found.movedim(0, -1), dim1=0, dim2=2)
    assert_equal(whole, hessian)
    return found


def gram(columns: Tensor) -> Tensor:
    """``Σ_v s_v s_vᵀ`` of each sample. Shape ``[V, N, *in] → [N, D, D]``."""
    flat = columns.reshape(*columns.shape[:2], columns.shape[2:].numel())
    return torch.einsum("vni,vnk->nik", flat, flat)


def rank(rule: HessianLossRule, shape: torch.Size) -> int:
    """How many columns an exact root has."""
    if rule.hessian_is_zero:
        return 1
    if not isinstance(rule, classification.SoftmaxLossRule):
        return shape.numel()
    return max(1, shape[0] - 1) * shape[1:].numel()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.grid(4)
@pytest.mark.parametrize(("case", "reduction", "batch", "scale"), SETTINGS)
def test_exact(case: Case, reduction: str, batch: int, scale: float) -> None:
    view = case.view(reduction, batch, scale)
    rule = rule_for(view.module)
    rule.check(view)
    expected = blocks(view)
    shape = view.input_shape[1:]

    root = rule.sqrt_hessian(view)
    assert len(root) == rank(rule, shape)
    assert_equal(gram(root), expected)
    assert_equal(rule.sum_hessian(view), expected.sum(0))
    assert_equal(HessianLossRule.sum_hessian(rule, view), expected.sum(0))

    mat = draw(2, *view.input_shape)
    flat = mat.reshape(2, batch, shape.numel())
    product = torch.einsum("nik,vnk->vni", expected, flat)
    assert_equal(rule.hessian_mat_prod(view, mat), product.reshape(mat.shape))


@pytest.mark.parametrize(("case", "reduction"), SAMPLED)
def test_sampled(case: Case, reduction: str) -> None:
    view = case.view(reduction, batch=2, scale=0.5)
    columns = rule_for(view.module).sqrt_hessian_sampled(view, SAMPLES)
    assert columns.shape == (SAMPLES, *view.input_shape)
    flat = columns.reshape(SAMPLES, 2, -1) * SAMPLES**0.5
    outer = torch.einsum("vni,vnk->vnik", flat, flat)
    expected = blocks(view)
    error = outer.std(0) / SAMPLES**0.5
    allowed = STANDARD_ERRORS * error + 1e-10 * expected.abs().max()
    assert bool(((outer.mean(0) - expected).abs() <= allowed).all())
    assert bool((flat.mean(0).abs() <= STANDARD_ERRORS * flat.std(0) / SAMPLES**0.5 + 1e-12).all())
    # The tolerance is tight enough to notice a wrong factor.
    assert float(error.max()) <= 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("case", [c for c in CASES if c.sampled], ids=str)
def test_samples_follow_torch_generator(case: Case) -> None:
    view = case.view("mean", batch=2)
    rule = rule_for(view.module)
    torch.manual_seed(1)
    first = rule.sqrt_hessian_sampled(view, 2)
    torch.manual_seed(1)
    assert torch.equal(rule.sqrt_hessian_sampled(view, 2), first)
    assert first.shape == (2, *view.input_shape)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_subsample_keeps_the_scale_of_the_batch(case: Case, reduction: str) -> None:
    view = case.view(reduction, batch=4)
    rule = rule_for(view.module)
    part = subsample(view, [3, 1])
    rule.check(part)
    expected = blocks(view)[[3, 1]]
    assert_equal(gram(rule.sqrt_hessian(part)), expected)
    assert_equal(rule.sum_hessian(part), expected.sum(0))
    mat = draw(2, *view.input_shape)
    product = rule.hessian_mat_prod(view, mat)[:, [3, 1]]
    assert_equal(rule.hessian_mat_prod(part, mat[:, [3, 1]]), product)
    if case.sampled:
        assert rule.sqrt_hessian_sampled(part, 2).shape == (2, *part.input_shape)


def test_subsample_where_the_target_has_no_batch_axis() -> None:
    # A target [D] with D = N must not be taken for a batch.
    with pytest.warns(UserWarning, match="target size"):
        view = started(nn.HuberLoss(), draw(3, 3), draw(3))
    with pytest.warns(UserWarning, match="target size"):
        expected = blocks(view)[[2]]
    root = regression.HuberLossRule().sqrt_hessian(subsample(view, [2]))
    assert_equal(gram(root), expected)


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss])
def test_keyword_arguments(loss: type[nn.Module]) -> None:
    module, x, target, variance = loss(), draw(2, 3), draw(2, 3).abs(), uniform(2)
    extra = {"var": variance} if loss is nn.GaussianNLLLoss else {}
    name = "log_input" if loss is nn.PoissonNLLLoss else "input"
    rule = rule_for(module)
    by_name = started(module, **{name: x, "target": target, **extra})
    by_position = started(module, x, target, *extra.values())
    mixed = started(module, x, **extra, target=target)
    roots = []
    for view in (by_name, by_position, mixed):
        rule.check(view)
        roots.append(rule.sqrt_hessian(view))
    assert torch.equal(roots[0], roots[1])
    assert torch.equal(roots[0], roots[2])


def test_curvature_is_in_the_dtype_of_the_gradient() -> None:
    module = nn.CrossEntropyLoss(weight=CLASS_WEIGHT.float())
    view = make_view(module, draw(2, 3).float(), torch.tensor([0, 2], dtype=torch.uint8))
    view = with_gradient(view, torch.tensor(1.0, dtype=torch.float64))
    rule = classification.CrossEntropyLossRule()
    assert rule.sqrt_hessian(view).dtype == torch.float64
    assert rule.sqrt_hessian_sampled(view, 1).dtype == torch.float64


def test_root_is_differentiable_where_probabilities_underflow() -> None:
    x = torch.tensor([[0.0, 2000.0, 0.5]], dtype=torch.float64, requires_grad=True)
    view = differentiable(started(nn.CrossEntropyLoss(), x, torch.tensor([1])))
    root = classification.CrossEntropyLossRule().sqrt_hessian(view)
    (grad,) = torch.autograd.grad(root.sum(), x)
    assert bool(grad.isfinite().all())


def test_binary_cross_entropy_at_certain_probabilities() -> None:
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    view = started(nn.BCELoss(reduction="sum"), x, x.clone())
    expected = torch.eye(2, dtype=torch.float64)
    assert_equal(classification.BCELossRule().sum_hessian(view), expected)


def test_refused_arguments() -> None:
    x, y = draw(2, 3), draw(2, 3)
    learned = uniform(2, 3).requires_grad_()
    cases = [
        (started(nn.MSELoss(), x, learned), r"Swap the arguments, lossfunc\(output, target\)"),
        (started(nn.MSELoss(), learned.clone(), learned), "requires a gradient, too: detach it"),
        (started(nn.GaussianNLLLoss(), x, y, learned), "detach the variance"),
        (started(nn.MSELoss(), target=y, input=x), "prediction first"),
        (started(nn.MSELoss(), x[0, 0], y[0, 0]), "no batch axis"),
        (started(nn.CrossEntropyLoss(), x[0], torch.tensor(1)), "no batch axis"),
        (started(nn.NLLLoss(), x[0], torch.tensor(1)), "no batch axis"),
        (started(nn.MultiLabelSoftMarginLoss(), x[None], y[None]), "two axes"),
    ]
    for view, message in cases:
        with pytest.raises(UnsupportedError, match=message):
            rule_for(view.module).check(view)


def test_refuses_what_broadcasts_the_input() -> None:
    with pytest.warns(UserWarning, match="target size"):
        view = started(nn.MSELoss(), draw(4), draw(4, 1))
    with pytest.raises(UnsupportedError, match="target has shape"):
        rule_for(view.module).check(view)
    with pytest.warns(UserWarning, match="target size"):
        linear = [started(nn.L1Loss(), draw(4, 1), draw(4))]
    linear += [started(nn.KLDivLoss(reduction="batchmean"), draw(4, 1), uniform(4))]
    for view in linear:
        with pytest.raises(UnsupportedError, match="samples would share terms"):
            rule_for(view.module).check_terms(view)
    module = nn.MultiLabelSoftMarginLoss(weight=CLASS_WEIGHT)
    view = started(module, draw(4, 1), labels(4, 1))
    with pytest.raises(UnsupportedError, match="weight has shape"):
        rule_for(module).sqrt_hessian(view)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    "extension", [DiagGGNExact, DiagGGNMC, SqrtGGNExact, KFAC, KFRA, DiagHessian, GGNMP]
)
@pytest.mark.parametrize(
    ("lossfunc", "target", "message"),
    [
        (nn.MSELoss(reduction="sum"), torch.zeros(4), "target has shape"),
        (nn.PoissonNLLLoss(reduction="sum"), torch.zeros(4), "target has shape"),
        (nn.PoissonNLLLoss(), torch.zeros(4, 1, requires_grad=True), "requires a gradient"),
    ],
)
def test_what_is_refused_is_refused_in_a_backward_pass(
    lossfunc: nn.Module, target: Tensor, message: str, extension: type[Extension]
) -> None:
    """Outputs [N, 1] and targets [N] make a table of [N, N] losses."""
    model = extend(nn.Linear(2, 1))
    loss = extend(lossfunc)(model(torch.randn(4, 2)), target)
    with pytest.raises(UnsupportedError, match=message), backpack(extension()):  # type: ignore[call-arg]
        loss.backward()


@pytest.mark.parametrize("loss", [nn.L1Loss, nn.SmoothL1Loss, nn.NLLLoss, nn.KLDivLoss])
def test_nothing_to_sample_from_a_linear_loss(loss: type[nn.Module]) -> None:
    module = loss(beta=0.0) if loss is nn.SmoothL1Loss else loss(reduction="sum")
    target = torch.tensor([0, 1]) if loss is nn.NLLLoss else uniform(2, 3)
    view = started(module, draw(2, 3), target)
    with pytest.raises(UnsupportedError, match="nothing to sample"):
        rule_for(module).sqrt_hessian_sampled(view, 1)


def test_indefinite_hessians_have_products_but_no_root() -> None:
    negative = -CLASS_WEIGHT
    cases = [
        started(nn.CrossEntropyLoss(negative, reduction="sum"), draw(2, 3), torch.tensor([0, 1])),
        started(nn.BCEWithLogitsLoss(negative), draw(2, 3), labels(2, 3)),
        started(nn.BCELoss(negative), uniform(2, 3), labels(2, 3)),
    ]
    for view in cases:
        rule = rule_for(view.module)
        rule.check(view)
        assert_equal(rule.sum_hessian(view), blocks(view).sum(0))
        with pytest.raises(UnsupportedError, match="not positive semi-definite"):
            rule.sqrt_hessian(view)
        with pytest.raises(UnsupportedError, match="not positive semi-definite"):
            rule.sqrt_hessian_sampled(view, 1)


def test_a_negative_factor_has_no_root() -> None:
    view = started(nn.MSELoss(), draw(2, 3), draw(2, 3))
    view = with_gradient(view, torch.tensor(-1.0, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="negative number"):
        regression.MSELossRule().sqrt_hessian(view)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("extension", [DiagGGNExact, DiagGGNMC, DiagHessian])
def test_a_mean_over_no_targets(extension: type[Extension], smoothing: float) -> None:
    """The loss is not a number, but its gradient is zero, and so is the curvature."""
    model = extend(nn.Linear(3, 4))
    lossfunc = extend(nn.CrossEntropyLoss(label_smoothing=smoothing))
    with backpack(extension()):
        lossfunc(model(torch.randn(5, 3)), torch.full((5,), -100)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
        assert not getattr(parameter, extension.savefield).any()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_mean_over_targets_that_weigh_nothing(smoothing: float) -> None:
    """Torch divides by zero, so the gradient is not finite, and neither is the curvature."""
    weight, target = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), torch.tensor([1, 1])
    model, lossfunc = nn.Linear(2, 3), nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
    extend(model), extend(lossfunc)
    with backpack(DiagGGNExact(), DiagHessian()):
        lossfunc(model(torch.randn(2, 2)), target).backward()
    for value in (model.bias.diag_ggn_exact, model.bias.diag_h):
        assert not bool(value.isfinite().any())


def _double(view: View) -> View:
    """The same call in double precision."""
    x, *others = (a.double() if a.is_floating_point() else a for a in view.args)
    return started(view.module.double(), x, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gap", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_certain_classes(order: list[int], gap: float, dtype: torch.dtype) -> None:
    """``p - p²`` cancels where a probability is nearly one."""
    logits = torch.tensor([[gap, 0.0, 0.5]])[:, order].to(dtype)
    view = started(nn.CrossEntropyLoss(reduction="sum"), logits, torch.tensor([1]))
    root = gram(classification.CrossEntropyLossRule().sqrt_hessian(_double(view)))[0]
    rule, eye = rule_for(view.module), torch.eye(3, dtype=dtype)
    for found in (rule.hessian_mat_prod(view, eye[:, None])[:, 0], rule.sum_hessian(view)):
        assert found.dtype == dtype
        # The smallest numbers of float16 are multiples of 6e-8.
        bound = 8 * torch.finfo(dtype).eps * root.abs().max() + 1e-7 * (dtype is torch.float16)
        assert float((found.double() - root).abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(
    "loss", [nn.BCEWithLogitsLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss]
)
def test_labels_that_are_nearly_certain(
    loss: type[nn.Module], sign: float, dtype: torch.dtype
) -> None:
    """``σ(8)`` is one in bfloat16, so a label of zero would never be drawn."""
    x = torch.full((100_000, 1), sign * 8.0, dtype=dtype)
    view = started(loss(reduction="sum"), x, torch.ones_like(x))
    columns = rule_for(view.module).sqrt_hessian_sampled(view, 8)
    assert columns.dtype == dtype
    found = 8 * columns.double().square().mean()
    expected = torch.tensor(8.0, dtype=torch.float64).sigmoid()
    expected = expected * (1 - expected)  # 268 labels are expected to differ
    assert abs(float(found / expected) - 1) < 6 / 268**0.5
    assert not bool((columns > 0).all())
    assert not bool((columns < 0).all())


def test_nearly_certain_labels_in_single_precision() -> None:
    """``σ(20)`` is one: every column would be zero."""
    x = torch.full((1, 1), 20.0)
    view = started(nn.BCEWithLogitsLoss(), x, torch.ones_like(x))
    assert bool(rule_for(view.module).sqrt_hessian_sampled(view, 1).all())


def test_draws_of_logits_that_are_no_numbers() -> None:
    x = torch.tensor([[float("nan"), 1.0]], dtype=torch.float64)
    view = started(nn.BCEWithLogitsLoss(reduction="sum"), x, torch.ones_like(x))
    found = rule_for(view.module).sqrt_hessian_sampled(view, 3)
    assert found.isfinite().all(0).tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("module", "x", "target", "expected"),
    [
        (nn.BCELoss(), 0.005, 1.0, 1 / 0.005),
        (nn.BCELoss(), 0.001, 1.0, 1 / 0.001),
        (nn.PoissonNLLLoss(), 12.0, 1.0, math.exp(6)),
        (nn.PoissonNLLLoss(log_input=False), 0.002, 1.0, 1 / 0.002),
    ],
)
def test_squares_beyond_half_precision(
    module: nn.Module, x: float, target: float, expected: float
) -> None:
    """The root is in the range of float16, though the second derivative is not."""
    view = started(module, *(torch.full((1, 1), v, dtype=torch.float16) for v in (x, target)))
    root = rule_for(module).sqrt_hessian(view)
    assert root.dtype == torch.float16
    assert float(root) == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("shape", [(5,), (5, 16_000)])
def test_a_mean_over_more_targets_than_half_precision_counts(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape[0], 2, *shape[1:], dtype=torch.float16)
    view = started(nn.CrossEntropyLoss(), x, torch.zeros(shape, dtype=torch.long))
    rule = classification.CrossEntropyLossRule()
    trace = rule._hessian_mat_prod(
        view, x[None] + torch.tensor([1.0, -1.0]).view(2, *[1] * (x.dim() - 2)).half()
    )
    assert float(rule.normalisation(view)) == pytest.approx(1 / math.prod(shape), rel=1e-3)
    assert float(trace[0, :, 0].double().sum()) == pytest.approx(0.5, rel=0.05)


def test_one_class_that_weighs_nothing() -> None:
    """Torch divides by zero, so neither the gradient nor the curvature is finite."""
    weight = torch.zeros(1, dtype=torch.float64)
    view = started(nn.CrossEntropyLoss(weight), draw(2, 1), torch.zeros(2, dtype=torch.long))
    rule = classification.CrossEntropyLossRule()
    mat = draw(1, 2, 1)
    for found in (
        rule.sqrt_hessian(view),
        rule.hessian_mat_prod(view, mat),
        rule.sum_hessian(view),
    ):
        assert not bool(found.isfinite().any())
