"""The kit's own small net around a layer. Its rules are part of the kit, so it needs no plugin.

    x ── Mix ── layer ── Readout ── SoftmaxLoss

``Mix`` makes the layer's input depend on parameters. ``Readout`` turns any output into two numbers
for each sample. ``SoftmaxLoss`` has a Hessian that is neither constant nor diagonal. Its "sampled"
root has the same numbers each time, so that Monte Carlo quantities have exact values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F

from backpack_core.plugins.registry import CORE, of_rules, registry
from backpack_core.record.nested import iter_tensors
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_core.testing.cases import SAMPLES, Arguments, LossCase, RuleCase, seeded
from backpack_core.testing.oracle import fixed_mixing
from backpack_products.elementwise import ElementwiseRule
from backpack_products.loss import HessianLossRule
from backpack_products.parametric import AffineRule, ParametricRule

CLASSES = 2


class Affine(Module):
    """``y = W x + b``, where all axes from ``start`` on are features."""

    start = -1

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(weight), Parameter(0.1 * torch.randn(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *, in] → [N, *, out]``."""
        return F.linear(x.flatten(self.start), self.weight, self.bias)


class Mix(Affine):
    """An affine map of the last axis, close to the identity."""

    def __init__(self, features: int) -> None:
        noise = torch.randn(features, features) / features**0.5
        super().__init__(torch.eye(features) + 0.3 * noise)


class Readout(Affine):
    """An affine map of all entries of a sample: ``[N, *] → [N, outputs]``."""

    start = 1

    def __init__(self, features: int, outputs: int = CLASSES) -> None:
        super().__init__(torch.randn(outputs, features) / features**0.5)


class Shrink(Module):
    """``y = w ⊙ x`` with weights a little below one, so inputs keep their sign and bounds."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = Parameter(0.8 + 0.2 * torch.rand(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *shape] → [N, *shape]``."""
        return x * self.weight


class Squash(torch.nn.Tanh):
    """``y = tanh x``."""


class SoftmaxLoss(Module):
    """``ℓ = Σ_n (log Σ_c exp x_nc - Σ_c t_c x_nc)`` or its mean, with the same target for all."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C] →`` a number."""
        target = torch.linspace(0.2, 0.8, x.shape[1], dtype=x.dtype, device=x.device)
        terms = x.logsumexp(1) - x @ target
        return terms.mean() if self.reduction == "mean" else terms.sum()


class LabelledLoss(torch.nn.CrossEntropyLoss):
    """Cross-entropy with a label for each sample, for extensions that read labels."""


class BoundLoss(Module):
    """A loss as a function of the prediction alone, flattened or not.

    Attributes:
        loss: The loss.
        arguments: All of its arguments; the first stands for the prediction.
    """

    def __init__(self, loss: Module, arguments: Arguments) -> None:
        super().__init__()
        self.loss, self.arguments, self.reduction = loss, arguments, loss.reduction

    def of(self, batch: slice) -> BoundLoss:
        """The loss of some samples."""
        return BoundLoss(self.loss, self.arguments.map(lambda tensor: tensor[batch]))

    def forward(self, prediction: Tensor) -> Tensor:
        """The loss of ``[N, *]`` or ``[N, D]``."""
        first, *rest = self.arguments.args
        if prediction.shape != first.shape:
            prediction = prediction.reshape(first.shape)
        value: Tensor = self.loss(prediction, *rest, **self.arguments.kwargs)
        return value


class ScaledLoss(Module):
    """``factor`` times a loss; oracles of authors read both attributes."""

    def __init__(self, loss: Any, factor: float) -> None:
        super().__init__()
        self.loss, self.factor, self.reduction = loss, factor, loss.reduction

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C] →`` a number."""
        value: Tensor = self.loss(x) * self.factor
        return value


class AffineMapRule(AffineRule):
    """The rule of :class:`Mix` and :class:`Readout`."""

    module_types = (Mix, Readout)

    def affine_input(self, view: View) -> Tensor:
        """Axes between the first and the last share the weight."""
        module: Any = view.module
        x = view.input.flatten(module.start)
        return x.unsqueeze(1).flatten(1, -2).unsqueeze(2)

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """Columns in the same form."""
        return mat.unsqueeze(2).flatten(2, -2).unsqueeze(3)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return (mat @ view.parameter("weight")).reshape(*mat.shape[:2], *view.input_shape[1:])


class ShrinkRule(ParametricRule):
    """The rule of :class:`Shrink`."""

    module_types = (Shrink,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        product = mat * view.input
        return product if view.parameter(name).dim() else product.flatten(2).sum(2)


class SquashRule(ElementwiseRule):
    """The rule of :class:`Squash`."""

    module_types = (Squash,)

    def derivative(self, view: View) -> Tensor:
        """``1 - y²``."""
        return 1 - view.output.square()

    def second_derivative(self, view: View) -> Tensor:
        """``-2 y (1 - y²)``."""
        return -2 * view.output * self.derivative(view)


class SoftmaxLossRule(HessianLossRule):
    """The rule of both losses, for any target: the Hessian is ``diag(p) - p pᵀ``."""

    module_types = (SoftmaxLoss, LabelledLoss)
    hessian_is_psd = True
    likelihood = "categorical"

    def normalisation(self, view: View) -> float:
        """A mean divides by the size of the whole batch."""
        return 1.0 / view.full.batch_size if view.module.reduction == "mean" else 1.0

    def _sqrt_hessian(self, view: View) -> Tensor:
        p = view.input.softmax(1)
        eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        columns = p.sqrt().T.unsqueeze(2) * (eye.unsqueeze(1) - p)
        root: Tensor = columns * self.normalisation(view) ** 0.5
        return root

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        exact = self._sqrt_hessian(view)
        mixing = fixed_mixing(samples, len(exact)).to(exact)
        return torch.einsum("sv,vnc->snc", mixing, exact)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        p = view.input.softmax(1)
        weighted = p * mat
        product: Tensor = (weighted - p * weighted.sum(2, keepdim=True)) * self.normalisation(view)
        return product


RULES = (AffineMapRule, ShrinkRule, SquashRule, SoftmaxLossRule)

# For ``ExtensionCase(..., loss=LABELLED)``: the labels are the loss's second argument.
LABELLED = LossCase(LabelledLoss, lambda n: (torch.randn(n, CLASSES), torch.randint(CLASSES, (n,))))


def install_own_rules() -> None:
    """Register the rules of the kit's own modules, once per process; they affect no others."""
    if Mix not in registry.rules:
        registry.add(of_rules(RULES), CORE)


class Residual(torch.nn.Sequential):
    """Modules in a row, to which their input is added by a functional sum."""

    def forward(self, x: Tensor) -> Tensor:
        """``[N, *shape] → [N, *shape]``."""
        hidden = x
        for part in self:
            hidden = part(hidden)
        return hidden + x


def block(
    shape: tuple[int, ...],
    shrink: bool,
    single: bool = False,
    residual: bool = False,
    twice: bool = False,
) -> Module:
    """``Squash`` after ``Shrink``, with branches if asked for: ``[N, *shape] → [N, *shape]``.

    Args:
        shape: Shape of a sample.
        shrink: Whether there is a layer that is not affine.
        single: Whether its weight is a single number.
        residual: Whether the input is added, by a functional sum.
        twice: Whether a ``Mix`` is called on the output, and then on its own output.
    """
    row = Residual if residual else torch.nn.Sequential
    parts: OrderedDict[str, Module] = OrderedDict()
    if shrink:
        parts["shrink"] = Shrink(() if single else shape)
    parts["squash"] = Squash()
    if twice:
        parts["again"] = parts["and_again"] = Mix(shape[-1])
    return row(parts)


class SmallNet(Module):
    """A layer between :class:`Mix` and :class:`Readout`; see :func:`build_net`.

    Args:
        case: The layer.
        outputs: The size of the net's output.
        twice: Whether to call the layer on a second input as well, and add the results.
        axis: The axis of the layer's output that holds the samples.
    """

    def __init__(self, case: RuleCase, outputs: int, twice: bool = False, axis: int = 0) -> None:
        super().__init__()
        self.layer, self.nr, self.axis, self.twice = case.module(), case.output_nr, axis, twice
        inputs = case.arguments(SAMPLES)  # of one sample, any axis of length one looks like it
        sizes = {
            str(slot): tensor.shape[-1]
            for slot, tensor in enumerate(inputs.tensors())
            if case.is_live(slot, tensor) and tensor.dim() > 1 and len(tensor) == SAMPLES
        }
        self.mixes = torch.nn.ModuleDict({slot: Mix(size) for slot, size in sizes.items()})
        with disable(), torch.no_grad():
            probe = list(iter_tensors(inputs.call(case.module())))[self.nr]
        self.readout = Readout(probe.movedim(axis, 0).shape[1:].numel(), outputs)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Takes the layer's own arguments; returns ``[N, outputs]``."""
        result = self._branch(1.0, Arguments(args, kwargs))
        return result + self._branch(0.7, Arguments(args, kwargs)) if self.twice else result

    def _branch(self, factor: float, inputs: Arguments) -> Tensor:
        def mixed(slot: int, tensor: Tensor) -> Tensor:
            return self.mixes[str(slot)](tensor * factor) if str(slot) in self.mixes else tensor

        output = list(iter_tensors(inputs.map_numbered(mixed).apply(self.layer)))[self.nr]
        if self.axis:
            output = output.movedim(self.axis, 0)
        result: Tensor = self.readout(output.unsqueeze(1) if output.dim() == 1 else output)
        return result


def build_net(
    case: RuleCase, samples: int = SAMPLES, outputs: int = CLASSES, **options: Any
) -> tuple[SmallNet, Arguments]:
    """The small net around a case's layer in double precision, always the same, and its inputs."""
    net = seeded(lambda: SmallNet(case, outputs, **options), 8)
    return net.double(), case.arguments(samples)


def loss_net(
    case: LossCase, reduction: str, dtype: torch.dtype
) -> tuple[Shrink, Arguments, BoundLoss]:
    """An elementwise layer, always the same, its input, and the case's loss behind it."""
    layer = case.as_rule_case(reduction)
    arguments = layer.arguments(dtype=dtype)
    first = arguments.args[0]
    net = seeded(lambda: Shrink(first.shape[1:]), 8)
    return net.to(dtype), Arguments((first,)), BoundLoss(layer.module(dtype), arguments)
