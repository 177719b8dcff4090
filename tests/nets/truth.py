"""What plain autograd says about a recipe: loops over samples, rows of Jacobians, second passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _WeightNorm

from tests.nets.catalogue import KINDS
from tests.nets.losses import Losses
from tests.nets.net import DrawnNet, Values, by_sample, data
from tests.nets.recipe import Recipe
from tests.nets.scope import NEED_BATCH, WATCHED, trained, traps

# Where two ways to compute the same by plain autograd differ by more, rounding decides.
AGREEMENT = 1e-9
SHIFT = 1e-13
# Individual gradients that are all smaller are rounding.
SMALLEST = 1e-6


def _normalised(norm: _BatchNorm | _InstanceNorm, x: Tensor) -> Tensor:
    """The same by definition."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    if isinstance(norm, _BatchNorm) and not norm.training:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, variance = norm.running_mean.view(shape), norm.running_var.view(shape)
    else:
        axes = tuple(range(2, x.dim()))
        axes = (0, *axes) if isinstance(norm, _BatchNorm) else axes
        mean, variance = x.mean(axes, True), x.var(axes, False, True)
    found = (x - mean) / (variance + norm.eps).sqrt()
    return found * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else found


def _layer_normalised(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """The same by definition: torch's third derivative has mean and scale for constants."""
    axes = [*range(-len(norm.normalized_shape), 0)]
    variance = x.var(axes, correction=0, keepdim=True)
    found = (x - x.mean(axes, keepdim=True)) / (variance + norm.eps).sqrt()
    found = found if norm.weight is None else found * norm.weight
    return found if norm.bias is None else found + norm.bias


def _cross_entropy(loss: nn.BCELoss, value: Tensor, target: Tensor) -> Tensor:
    """The same by definition: torch's second derivative has 1e-12 beside the probabilities."""
    each = -(target * value.log().clamp(-100) + (1 - target) * (1 - value).log().clamp(-100))
    return each if loss.reduction == "none" else getattr(each, loss.reduction)()


def _weight_norm(norm: _WeightNorm, g: Tensor, v: Tensor) -> Tensor:
    """The same by definition: torch's second derivative is another."""
    axes = [axis for axis in range(v.dim()) if axis != norm.dim % v.dim()]
    return g * v / v.square().sum(axes, keepdim=True).sqrt()


class Unstable(Exception):
    """Plain autograd does not agree with itself, so there is nothing to compare with."""


def difference(ours: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest entry of ``other`` (at least ``floor``)."""
    if not other.numel():
        return 0.0
    scale = max(other.abs().max().item(), floor)
    error = (ours - other).abs().max().item()
    return 0.0 if error == 0.0 else error / scale if scale else float("inf")


def fresh(inputs: Iterable[Any]) -> list[Any]:
    """Copies of tensors, or of lists of them, for a forward pass that may write into them."""
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else fresh(x)
        for x in inputs
    ]


class Truth:
    """Gradients, Jacobians and Hessians of a net that was never extended.

    Attributes:
        gradients: The gradient that ``backward()`` leaves, for every parameter that has one.
        parameters: Those parameters, of a copy of the net.
        traps: What makes some quantities meaningless, see :mod:`tests.nets.scope`.
        normaliser: What the sum of all terms divides by, if that is a number.
    """

    def __init__(self, recipe: Recipe, net: DrawnNet, losses: Losses) -> None:
        """Run the net, and check that autograd agrees with itself.

        Raises:
            Unstable: It does not, or something is not finite.
        """
        self.recipe = recipe
        self.net, self.losses = copy.deepcopy(net), copy.deepcopy(losses)
        for part in self.losses.modules():
            if isinstance(part, nn.BCELoss):
                part.forward = partial(_cross_entropy, part)  # type: ignore[method-assign]
        for part in self.net.modules():
            if type(part) is nn.LayerNorm:
                part.forward = partial(_layer_normalised, part)  # type: ignore[method-assign]
            if isinstance(part, _WeightNorm) and part.dim != -1:
                part.forward = partial(_weight_norm, part)  # type: ignore[method-assign]
        self.inputs = data(recipe)
        self.batch = recipe.batch
        self.needs_batch = any(NEED_BATCH & KINDS[step.kind].traits for step in recipe.steps)
        self.net.watches = WATCHED
        whole = self._forward(self.inputs)
        self.net.watches = frozenset()
        loss = self._loss(whole)
        # Later, each term is of leaves that ask for a gradient, also one of the data alone.
        self.normaliser = self.losses.normaliser
        self.traps = traps(recipe, self.net, self.losses, loss)
        if "mixing" in self.traps and recipe.plan.passes == "told":
            raise Unstable("Rows of one sample may mix.")
        if self.traps >= {"mixing", "table"}:
            raise Unstable("Mixing behind what may be a table goes unnoticed.")
        self.net.watched.clear()
        if self.net.has_shared:
            # An extended module returns a view of what it returns unchanged
            # (docs/design/record.md), so that a hook on that is none on the tensor that it was
            # given.
            raise Unstable("A hook is on a tensor that a module has returned as it was.")
        inside = {step.settings.get("name") for step in recipe.steps}
        if "halves" in inside and recipe.plan.passes == "with_updates":
            raise Unstable("torch updates a parameter that it needs later in the same pass.")
        if "checkpoint" in inside and recipe.plan.passes == "with_other_weights":
            raise Unstable("torch computes again with the weights that the net has by then.")
        lengths = [source.lengths[: recipe.batch] for source in recipe.sources.values()]
        if any({*of} == {1} for of in lengths) and any(
            "picked" in t.settings for t in recipe.terms
        ):
            raise Unstable("Items of one row each, of which one is picked, may be one sample's.")
        loss.backward()
        self.parameters = {n: p for n, p in self.net.named_parameters() if p.grad is not None}
        self.gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for parameter in self.net.parameters():
            parameter.grad = None
        self._see_norms()
        self.names = list(whole)
        self.outputs = {name: value.detach() for name, value in whole.items()}
        self.rows = self._rows()
        self._check(loss)

    def _see_norms(self) -> None:
        """Torch's formula of these is wrong where input and gradient lie in memory in other ways.

        Seen in 2.13, on the CPU, with one sample or an axis of length one.
        """
        norms = [m for m in self.net.modules() if isinstance(m, _BatchNorm | _InstanceNorm)]
        for norm in norms:
            norm.forward = partial(_normalised, norm)  # type: ignore[method-assign]
        if norms:
            self._loss(self._forward(self.inputs)).backward()
        for name, parameter in self.parameters.items() if norms else ():
            assert parameter.grad is not None
            if not difference(parameter.grad, self.gradients[name], 1e-3) < AGREEMENT:
                raise Unstable("Plain autograd is wrong at a normalisation.")
            parameter.grad = None
        for norm in norms:
            del norm.forward

    def _forward(self, inputs: Iterable[Tensor]) -> Values:
        torch.manual_seed(self.recipe.seed)
        return dict(zip(self.net.results, self.net(*fresh(inputs)), strict=True))

    def _loss(self, values: Values) -> Tensor:
        result: Tensor = self.losses(values, trained(self.net))
        return result

    def _rows(self) -> list[list[Tensor]]:
        """The outputs of each sample, computed alone where that is possible."""
        if self.needs_batch:
            whole = self._forward(self.inputs)
            every = [by_sample(whole[name], self.batch) for name in self.names]
            return [[value[n] for value in every] for n in range(self.batch)]
        rows = []
        for n in range(self.batch):
            alone = self._forward([x[n : n + 1] for x in self.inputs])
            is_one = [len(self.outputs[name]) == self.batch for name in self.names]
            pairs = zip(self.names, is_one, strict=True)
            rows.append([alone[name][0] if is_single else alone[name] for name, is_single in pairs])
        return rows

    def _check(self, loss: Tensor) -> None:
        if not self.gradients or not torch.isfinite(loss):
            raise Unstable("The loss depends on no parameter, or is not finite.")
        for k, name in enumerate(self.names):
            rows = torch.stack([row[k].detach() for row in self.rows])
            if not difference(rows, self._each(self.outputs[name]), 1e-3) < AGREEMENT:
                raise Unstable(f"{name} of single samples differs from that of the batch.")
        if not self.scale > SMALLEST:
            raise Unstable("Gradients cancel.")
        for name, gradient in self.gradients.items():
            if "weights" in self.traps:
                continue
            found = self.individual_gradients[name]
            floor = 1e-4 * self.scale
            if not difference(found.sum(0), gradient, floor) < AGREEMENT:
                raise Unstable(f"Gradients of single samples do not add up for {name}.")

    @cached_property
    def scale(self) -> float:
        """The largest entry of any individual gradient."""
        return max(g.abs().max().item() for g in self.individual_gradients.values())

    def _pull(self, n: int, weights: list[Tensor]) -> dict[str, Tensor]:
        """``Σ_k J_kᵀ weights[k]`` for sample ``n``, for every parameter."""
        pairs = [(z, w) for z, w in zip(self.rows[n], weights, strict=True) if z.requires_grad]
        found = torch.autograd.grad(
            [z for z, _ in pairs],
            list(self.parameters.values()),
            [w for _, w in pairs],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self.parameters, found, strict=True))

    def _leaves(self, shift: float = 0.0) -> Values:
        shifted = {n: z + shift * z.abs().max() for n, z in self.outputs.items()}
        return {n: z.requires_grad_() for n, z in shifted.items()}

    def _loss_gradients(self, shift: float = 0.0) -> Tensor:
        """Gradient of the loss in the outputs of each sample. Shape ``[N, D]``."""
        leaves = list((by_name := self._leaves(shift)).values())
        found = torch.autograd.grad(self._loss(by_name), leaves)
        return torch.cat([self._each(g).flatten(1) for g in found], 1)

    def _each(self, value: Tensor) -> Tensor:
        return by_sample(value, self.batch)

    def _shaped(self, n: int, flat: Tensor) -> list[Tensor]:
        """A vector ``[D]`` in the shapes of the outputs of sample ``n``."""
        parts = flat.split([z.numel() for z in self.rows[n]])
        return [part.reshape(z.shape) for part, z in zip(parts, self.rows[n], strict=True)]

    @cached_property
    def individual_gradients(self) -> dict[str, Tensor]:
        """The part of each sample in the gradient. Shape ``[N, *θ]``."""
        weights = _stable(self._loss_gradients)
        found = [self._pull(n, self._shaped(n, w)) for n, w in enumerate(weights)]
        return {n: self._grouped(torch.stack([f[n] for f in found])) for n in self.parameters}

    def _grouped(self, rows: Tensor) -> Tensor:
        """Of the samples that rows belong to, ``[R, *] → [M, *]``."""
        index = torch.tensor(self.recipe.told)
        return rows.new_zeros(max(self.recipe.told) + 1, *rows.shape[1:]).index_add(0, index, rows)

    @cached_property
    def jacobians(self) -> dict[str, Tensor]:
        """Rows for all outputs of a sample together. Shape ``[N, D, P]``."""
        result: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        for n, row in enumerate(self.rows):
            units = torch.eye(sum(z.numel() for z in row))
            found = [self._pull(n, self._shaped(n, unit)) for unit in units]
            for name in result:
                result[name].append(torch.stack([f[name].flatten() for f in found]))
        return {name: torch.stack(rows) for name, rows in result.items()}

    @cached_property
    def rounding(self) -> float:
        """What the rounding of ``p - p²``, for probabilities near one, becomes in curvature."""
        sizes = [jacobian.abs().max().item() for jacobian in self.jacobians.values()]
        return torch.finfo(torch.float64).eps * max(sizes) ** 2

    @cached_property
    def loss_hessians(self) -> Tensor:
        """Hessian of the loss in the outputs of each sample. Shape ``[N, D, D]``.

        Right for losses that do not couple samples.
        """
        return _stable(self._loss_hessians)

    def _loss_hessians(self, shift: float = 0.0) -> Tensor:
        leaves = list((by_name := self._leaves(shift)).values())
        first = torch.autograd.grad(self._loss(by_name), leaves, create_graph=True)
        flat = torch.cat([self._each(g).flatten(1) for g in first], 1)
        if not flat.requires_grad:
            return torch.diag_embed(torch.zeros_like(flat))
        columns = []
        for d in range(flat.shape[1]):
            second = torch.autograd.grad(
                flat[:, d].sum(),
                leaves,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            columns.append(torch.cat([self._each(g).flatten(1) for g in second], 1))
        return torch.stack(columns, 1).detach()

    def ggn(self, name: str) -> Tensor:
        """Block of each sample's generalised Gauss-Newton matrix. Shape ``[N, P, P]``."""
        jacobian = self.jacobians[name]
        return self._grouped(
            torch.einsum("nca,ncd,ndb->nab", jacobian, self.loss_hessians, jacobian)
        )

    def ggn_diagonal(self, name: str) -> Tensor:
        """Its diagonal. Shape ``[N, *θ]``."""
        jacobian = self.jacobians[name]
        diagonal = torch.einsum("nca,ncd,nda->na", jacobian, self.loss_hessians, jacobian)
        return self._grouped(diagonal.reshape(-1, *self.parameters[name].shape))

    @cached_property
    def _differentiable(self) -> list[dict[str, Tensor]]:
        """Gradients of each sample's part of the loss, with a graph; of all where none has one."""
        result = []
        for n in [None] if self.traps - {"beside", "mixing", "hook"} else range(self.batch):
            values = {}
            for k, name in enumerate(self.names):
                rows = [row[k] for row in self.rows]
                if n is not None:
                    rows = [row if m == n else row.detach() for m, row in enumerate(rows)]
                values[name] = torch.stack(rows).reshape(self.outputs[name].shape)
            found = torch.autograd.grad(
                self._loss(values),
                list(self.parameters.values()),
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            result.append(dict(zip(self.parameters, found, strict=True)))
        return result

    def hessian_product(self, name: str, vector: Tensor) -> Tensor:
        """The block of each sample's Hessian times a vector. Shape ``[N, *θ]``."""
        found = [_derivative(g[name], self.parameters[name], vector) for g in self._differentiable]
        return self._grouped(torch.stack(found)) if len(found) == self.batch else torch.stack(found)

    def derivative_of_gradients(self, coefficients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Derivative of ``Σ_θ Σ_n <coefficients[n], g[n]>`` in every parameter."""
        if not coefficients:
            return {}
        total = torch.zeros(())
        for name, weights in coefficients.items():
            for n, weight in enumerate(weights):
                total = total + (self._differentiable[n][name] * weight).sum()
        return {name: _derivative(total, p) for name, p in self.parameters.items()}


def _stable(function: Callable[[float], Tensor]) -> Tensor:
    """The value of a function at no shift of its arguments.

    Raises:
        Unstable: A shift by rounding errors changes it by more than that.
    """
    value = function(0.0)
    if not difference(function(SHIFT), value, SMALLEST) < AGREEMENT:
        raise Unstable("The loss is ill-conditioned.")
    return value


def _derivative(value: Tensor, parameter: nn.Parameter, vector: Tensor | None = None) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(parameter)
    (found,) = torch.autograd.grad(
        value, parameter, vector, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return found
