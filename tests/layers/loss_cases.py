"""Losses, over options, reductions, shapes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from handmade import draw, make_view, with_gradient
from torch import Tensor, nn

from backpack_core.record.view import View
from backpack_layers import loss_classification as classification
from backpack_layers import loss_regression as regression
from backpack_products.loss import HessianLossRule

# Monte-Carlo comparisons: columns drawn at once, and how many standard errors an entry may be off.
SAMPLES = 20_000


STANDARD_ERRORS = 6.0


RULES: tuple[type[HessianLossRule], ...] = (
    regression.MSELossRule,
    regression.L1LossRule,
    regression.HuberLossRule,
    regression.SmoothL1LossRule,
    regression.PoissonNLLLossRule,
    regression.GaussianNLLLossRule,
    classification.CrossEntropyLossRule,
    classification.NLLLossRule,
    classification.KLDivLossRule,
    classification.BCEWithLogitsLossRule,
    classification.BCELossRule,
    classification.SoftMarginLossRule,
    classification.MultiLabelSoftMarginLossRule,
)


def rule_for(module: nn.Module) -> HessianLossRule:
    return next(rule() for rule in RULES if type(module) in rule.module_types)


def uniform(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(*shape, dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).double()


@dataclass(frozen=True)
class Case:
    """A loss with options, and the kind of input, target and shape ``[N, *shape]`` it gets."""

    loss: type[nn.Module]
    options: dict[str, Any]
    shape: tuple[int, ...]
    target: str
    reductions: tuple[str, ...] = ("mean", "sum", "none")

    def __str__(self) -> str:
        options = ",".join(self.options)
        return f"{self.loss.__name__}({options})-{self.target}-{list(self.shape)}"

    @property
    def sampled(self) -> bool:
        rule = next(rule for rule in RULES if self.loss in rule.module_types)
        return not rule.hessian_is_zero and self.options.get("beta") != 0

    def view(self, reduction: str, batch: int, scale: float = 1.0) -> View:
        shape = (batch, *self.shape)
        x = draw(*shape)
        extra: tuple[Any, ...] = ()
        if self.loss is nn.BCELoss or self.options.get("log_input") is False:
            x = uniform(*shape)
        if self.target == "class":
            positions = (batch, *self.shape[1:])
            target = torch.randint(0, self.shape[0], positions)
            if "ignore_index" in self.options:
                target.view(-1)[::2] = self.options["ignore_index"]
                target.view(-1)[0] = 1
        elif self.target == "probability":
            target = draw(*shape).softmax(1)
        elif self.target == "label":
            target = labels(*shape)
        elif self.target == "soft label":
            target = uniform(*shape)
        elif self.target == "sign":
            target = 2 * labels(*shape) - 1
        elif self.target == "count":
            target = torch.randint(0, 4, shape)
        else:
            target = draw(*shape)
        if self.target == "variance per element":
            extra = (uniform(*shape),)
        elif self.target == "variance per sample":
            extra = (uniform(*shape[:-1]),)
        elif self.target == "one variance":
            extra = (0.3,)
        module: nn.Module = self.loss(**self.options, reduction=reduction).double()
        view = make_view(module, x, target, *extra)
        # Unreduced, each element arrives with a factor of its own.
        gradient = torch.full_like(view.output, scale)
        if reduction == "none":
            gradient *= 0.2 + torch.rand_like(view.output)
        return with_gradient(view, gradient)


CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)


ELEMENTWISE: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (nn.MSELoss, {}, "real"),
    (nn.L1Loss, {}, "real"),
    (nn.HuberLoss, {}, "real"),
    (nn.HuberLoss, {"delta": 0.4}, "real"),
    (nn.SmoothL1Loss, {}, "real"),
    (nn.SmoothL1Loss, {"beta": 0.4}, "real"),
    (nn.SmoothL1Loss, {"beta": 0.0}, "real"),
    (nn.PoissonNLLLoss, {}, "count"),
    (nn.PoissonNLLLoss, {"full": True}, "count"),
    (nn.PoissonNLLLoss, {"log_input": False, "eps": 1e-2}, "count"),
    (nn.GaussianNLLLoss, {}, "variance per element"),
    (nn.GaussianNLLLoss, {"full": True}, "one variance"),
    (nn.GaussianNLLLoss, {"eps": 0.5}, "variance per element"),
    (nn.BCEWithLogitsLoss, {}, "label"),
    (nn.BCEWithLogitsLoss, {}, "soft label"),
    (nn.BCELoss, {}, "label"),
    (nn.BCELoss, {}, "soft label"),
    (nn.SoftMarginLoss, {}, "sign"),
    (nn.SoftMarginLoss, {}, "real"),
]


WEIGHTED: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (nn.GaussianNLLLoss, {}, "variance per sample"),
    (nn.BCEWithLogitsLoss, {"weight": CLASS_WEIGHT}, "soft label"),
    (nn.BCEWithLogitsLoss, {"weight": CLASS_WEIGHT, "pos_weight": CLASS_WEIGHT}, "soft label"),
    (nn.BCEWithLogitsLoss, {"pos_weight": CLASS_WEIGHT}, "label"),
    (nn.BCELoss, {"weight": CLASS_WEIGHT}, "label"),
    (nn.MultiLabelSoftMarginLoss, {}, "label"),
    (nn.MultiLabelSoftMarginLoss, {"weight": CLASS_WEIGHT}, "label"),
]


CLASSES: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (loss, options, target)
    for loss, target in (
        (nn.CrossEntropyLoss, "class"),
        (nn.CrossEntropyLoss, "probability"),
        (nn.NLLLoss, "class"),
    )
    for options in (
        {},
        {"weight": CLASS_WEIGHT},
        {"ignore_index": 2},
        {"ignore_index": -100, "weight": CLASS_WEIGHT},
        {"label_smoothing": 0.2},
        {"label_smoothing": 0.2, "weight": CLASS_WEIGHT, "ignore_index": -1},
    )
    if not (target == "probability" and "ignore_index" in options)
    if not (loss is nn.NLLLoss and "label_smoothing" in options)
]


CASES = [
    *(
        Case(loss, options, shape, target)
        for loss, options, target in ELEMENTWISE
        for shape in ((), (3,), (2, 3))
    ),
    *(Case(loss, options, (3,), target) for loss, options, target in WEIGHTED),
    *(
        Case(loss, options, shape, target)
        for loss, options, target in CLASSES
        for shape in ((3,), (3, 2), (3, 2, 2))
    ),
    Case(nn.BCEWithLogitsLoss, {"pos_weight": CLASS_WEIGHT[:, None]}, (3, 2), "label"),
    Case(nn.CrossEntropyLoss, {}, (1,), "class"),
    Case(nn.KLDivLoss, {}, (3,), "probability", ("mean", "sum", "none", "batchmean")),
]


SETTINGS = [
    pytest.param(case, reduction, batch, scale, id=f"{case}-{reduction}-N{batch}-times{scale}")
    for case in CASES
    for reduction in case.reductions
    for batch, scale in ((1, 1.0), (4, 0.5))
]


SAMPLED = [
    pytest.param(case, reduction, id=f"{case}-{reduction}")
    for case in CASES
    for reduction in case.reductions
    if case.sampled and case.shape != (2, 3) and len(case.shape) < 3
]
