"""Curvature matrices of a loss over a data set, as linear operators.

    ggn = GGN(model, lossfunc, loader)
    ggn @ vector
    scipy.sparse.linalg.eigsh(ggn.to_scipy(), k=10)

Every product goes through the loader once and differentiates the graph of one batch at a time.
Models need not be extended, layers need no rules, and ``.grad`` does not change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import disable
from backpack_core.autocast import without_autocast
from backpack_core.errors import UsageError
from backpack_interplay.compiled import uncompiled
from backpack_products.contexts import suspended
from backpack_products.ranks import about, failing_together, require_member, require_same
from backpack_products.values import at_least_single
from backpack_secondorder.at_output import AtOutput, LossAtOutput, Normaliser
from backpack_secondorder.determinism import (
    Passes,
    require_deterministic,
    require_parameters,
    require_present,
)
from backpack_secondorder.jacobians import (
    Forward,
    Jacobian,
    combined,
    differentiated,
    inputs_and_target,
)
from backpack_secondorder.linear import LinearOperator
from backpack_secondorder.propagators import as_count
from backpack_secondorder.torch_errors import explained

Kind: TypeAlias = Literal["sampled", "empirical"]


class DataOperator(LinearOperator):
    """A curvature matrix of ``ℓ = 1/W Σ_b W_b ℓ_b`` over the batches of a loader.

    ``W_b`` is the divisor of a batch's loss (the number of samples for a mean, the weights of
    the targets for a weighted one), and ``W`` their sum; if the loss is a sum, all are one. So
    the matrix is that of all samples as one batch. Every product goes through the batches in the
    order of the loader, and must see the same data: with random augmentation or dropout, the first
    pass that differs raises an error.
    """

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        loader: Iterable[Any],
        parameters: Sequence[Tensor] | None = None,
        *,
        by_parameter: bool = False,
        forward: Forward | None = None,
        normaliser: Normaliser | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Store the settings; nothing is computed.

        Args:
            model: The model.
            lossfunc: A module, or a function, of output and target.
            loader: Batches ``(inputs, target)``; can be iterated several times. Inputs are a
                tensor, a tuple of arguments, or a dictionary of keyword arguments.
            parameters: The parameters, in the order of the rows; default: all trained parameters
                of the model.
            by_parameter: Whether to keep only the diagonal blocks, one for each parameter.
            forward: For batches of another kind: ``forward(model, batch)`` returns output and
                target.
            normaliser: The divisor of a loss without a rule: ``"sum"``, ``"mean"`` over axis 0, or
                a function of output and target.
            process_group: Processes with a loader each, of at least one batch: the matrix is that
                of all samples. All ask for products together, with the same vectors.

        Raises:
            UsageError: A parameter is not one of the model, or is not trained; a module that is
                random in train mode is in train mode; parameters have several precisions.
        """
        if not isinstance(model, Module):
            raise UsageError(f"The model must be a torch.nn.Module. Got {model!r:.80}.")
        names = {id(p): name for name, p in model.named_parameters()}
        chosen = [p for p in model.parameters() if p.requires_grad]
        self.parameters = chosen if parameters is None else [*parameters]
        self.names = tuple(names.get(id(p), "") for p in self.parameters)
        require_parameters(self.parameters, self.names)
        require_deterministic(model)
        self.shapes = tuple(p.shape for p in self.parameters)
        self.by_parameter = by_parameter
        self._model, self._loader = model, loader
        self._forward = forward or inputs_and_target
        self._loss = LossAtOutput(lossfunc, normaliser)
        self._passes = Passes(self.parameters, in_order=False)
        require_member(process_group)
        self._group, self._is_compared = process_group, False

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the parameters."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device

    def products(self, vectors: list[Tensor]) -> list[Tensor]:
        """One pass over the loader, for all vectors."""
        if not len(vectors[0]):
            return [torch.zeros_like(v) for v in vectors]
        return self._over_batches(lambda batch, index: self._of_batch(batch, index, vectors))

    def gradient(self) -> list[Tensor]:
        """The gradient of the loss over all data, ``[*θ]`` for each parameter."""

        def of_batch(batch: Any, index: int) -> tuple[AtOutput, list[Tensor]]:
            jacobian, at = self._at_output(batch)
            return at, jacobian.transposed_product(at.gradient.detach())

        return self._over_batches(of_batch)

    def loss(self) -> Tensor:
        """The loss over all data, a number without a graph."""

        def of_batch(batch: Any, index: int) -> tuple[AtOutput, list[Tensor]]:
            _, at = self._at_output(batch)
            return at, [at.loss]

        return self._over_batches(of_batch)[0]

    @abstractmethod
    def _of_batch(
        self, batch: Any, index: int, vectors: list[Tensor]
    ) -> tuple[AtOutput, list[Tensor]]:
        """The loss of a batch, and the products with its matrix, ``[V, *θ]``."""

    def _at_output(self, batch: Any, samples: int | None = None) -> tuple[Jacobian, AtOutput]:
        """The Jacobian of the output of a batch, and the loss there."""
        with disable():
            jacobian = Jacobian(self._model, self._forward, batch, self.parameters)
        return jacobian, self._loss.at(jacobian.output, jacobian.target, samples)

    def _over_batches(
        self, of_batch: Callable[[Any, int], tuple[AtOutput, list[Tensor]]]
    ) -> list[Tensor]:
        total: list[Tensor] | None = None
        divisor = 0.0
        self._compare()
        with (
            failing_together(self._group),
            self._passes.one() as record,
            suspended(),
            without_autocast(),
            uncompiled(),  # compiled functions can be differentiated only once
            explained(),
        ):
            require_present(self._model, self.parameters, self.names)
            for index, batch in enumerate(self._loader):
                with torch.enable_grad():
                    at, products = of_batch(batch, index)
                weight = 1.0 if at.normaliser is None else at.normaliser
                if not weight or not len(at.output):
                    continue  # without samples, a mean is NaN
                record(at.loss * weight)
                divisor += weight * (at.normaliser is not None)
                parts = [at_least_single(product.detach()) * weight for product in products]
                total = parts if total is None else _added(total, parts)
        assert total is not None
        if self._group is not None:  # one all-reduce for the sum and its divisor
            flat = torch.cat([*map(torch.flatten, total), total[0].new_tensor([divisor])])
            distributed.all_reduce(flat, group=self._group)
            pieces = flat[:-1].split([part.numel() for part in total])
            total = [piece.reshape_as(part) for piece, part in zip(pieces, total, strict=True)]
            divisor = float(flat[-1])
        return [(part / (divisor or 1)).to(self.dtype) for part in total]

    def _compare(self) -> None:
        """Check, before the first pass, that all processes have the same model.

        Raises:
            UsageError: Models differ. Every process raises this.
        """
        if self._group is None or self._is_compared:
            return
        require_same(
            {**about(self._model), "The list of parameters of the matrix": self.names},
            self._group,
            "A sum over them would be the matrix of no model: give all of them the same one, by "
            "DistributedDataParallel, for example, or from the same seed or checkpoint.",
        )
        self._is_compared = True

    def _columns(
        self,
        vectors: list[Tensor],
        multiply: Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Multiply one vector at a time; with ``by_parameter``, one parameter at a time."""
        results = [torch.empty_like(part) for part in vectors]
        for column in range(len(vectors[0])):
            if not self.by_parameter:
                products = multiply([part[column] for part in vectors], self.parameters)
                for result, product in zip(results, products, strict=True):
                    result[column] = product.detach()
                continue
            for position, parameter in enumerate(self.parameters):
                alone: list[Tensor | None] = [None] * len(vectors)
                alone[position] = vectors[position][column]
                (product,) = multiply(alone, [parameter])
                results[position][column] = product.detach()
        return results

    def __repr__(self) -> str:
        """Size and form."""
        form = " by parameter" if self.by_parameter else ""
        return f"<{type(self).__name__} {list(self.shape)}{form} over a data set>"


class _Curvature(DataOperator):
    """``Σ_n J_nᵀ C_n J_n`` with a matrix ``C_n`` at the output."""

    @abstractmethod
    def _loss_at(self, batch: Any, index: int) -> tuple[Jacobian, AtOutput]:
        """The Jacobian, and the loss at the output with the derivatives that ``C_n`` needs."""

    @abstractmethod
    def _curved(self, at: AtOutput, vector: Tensor) -> Tensor:
        """``C`` times a vector ``[N, *]``."""

    def _of_batch(
        self, batch: Any, index: int, vectors: list[Tensor]
    ) -> tuple[AtOutput, list[Tensor]]:
        jacobian, at = self._loss_at(batch, index)

        def multiply(vector: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
            curved = self._curved(at, jacobian.product(vector))
            return jacobian.transposed_product(curved, parameters)

        return at, self._columns(vectors, multiply)


class GGN(_Curvature):
    """The generalised Gauss-Newton matrix ``Σ_n J_nᵀ ∇²ℓ_n J_n`` over a data set.

    ``J_n`` is the Jacobian of the model's output for a sample in all parameters, ``∇²ℓ_n`` the
    Hessian of its loss there, with the scale of the loss (``1/N`` for a mean). Schraudolph (2002).
    """

    def _loss_at(self, batch: Any, index: int) -> tuple[Jacobian, AtOutput]:
        return self._at_output(batch)

    def _curved(self, at: AtOutput, vector: Tensor) -> Tensor:
        return at.hessian_product(vector)


class Fisher(_Curvature):
    """The Fisher information matrix over a data set, from gradients of samples.

    ``kind="sampled"``: ``c Σ_n 1/M Σ_m J_nᵀ g gᵀ J_n``. ``g`` is the gradient at the output of the
    negative log-likelihood of target ``m`` of ``M``, drawn from the likelihood of the loss. If the
    loss has weights, ``g`` is multiplied by their root. ``c`` is the factor of the reduction
    (``1/N`` for a mean). In expectation it is the generalised Gauss-Newton matrix. The draws are
    the same in every product.

    ``kind="empirical"``: ``c Σ_n ∇ℓ_n ∇ℓ_nᵀ`` with the gradients of the samples' own losses. A
    sample is a row of the output. Kunstner et al. (2019), arXiv:1905.12558, compare both.
    """

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        loader: Iterable[Any],
        parameters: Sequence[Tensor] | None = None,
        *,
        kind: Kind = "sampled",
        mc_samples: int = 1,
        seed: int = 0,
        by_parameter: bool = False,
        forward: Forward | None = None,
        normaliser: Normaliser | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Store the settings.

        Args:
            model: As for :class:`DataOperator`.
            lossfunc: As there; for ``"sampled"``, a module with a loss rule that has a likelihood.
            loader: As there; for ``"sampled"``, batches must come in the same order each time.
            parameters: As there.
            kind: ``"sampled"`` or ``"empirical"``; see the class.
            mc_samples: How many targets to draw for each sample.
            seed: Where the draws of the first batch begin; torch's generator does not change.
            by_parameter: As there.
            forward: As there.
            normaliser: As there.
            process_group: As there; processes draw differently.

        Raises:
            UsageError: The kind is unknown, ``mc_samples`` is not positive, or a reason given
                there.
        """
        if kind not in get_args(Kind):
            raise UsageError(f"kind must be one of {get_args(Kind)}. Got {kind!r}.")
        mc_samples = as_count("mc_samples", mc_samples)
        super().__init__(
            model,
            lossfunc,
            loader,
            parameters,
            by_parameter=by_parameter,
            forward=forward,
            normaliser=normaliser,
            process_group=process_group,
        )
        self._samples, self._seed = (mc_samples if kind == "sampled" else 0), seed
        self._passes.in_order = kind == "sampled"

    def _loss_at(self, batch: Any, index: int) -> tuple[Jacobian, AtOutput]:
        if not self._samples:
            return self._at_output(batch, 0)
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            if self._group is not None:
                index *= distributed.get_world_size(self._group)
                index += distributed.get_rank(self._group)
            torch.manual_seed(1_000_003 * self._seed + index)
            return self._at_output(batch, self._samples)

    def _curved(self, at: AtOutput, vector: Tensor) -> Tensor:
        return at.root_product(vector)


class Hessian(DataOperator):
    """The Hessian of the loss over a data set, with its scale (``1/N`` for a mean).

    Its products differentiate the gradient (Pearlmutter, 1994). In general it is indefinite.
    """

    def _of_batch(
        self, batch: Any, index: int, vectors: list[Tensor]
    ) -> tuple[AtOutput, list[Tensor]]:
        jacobian, at = self._at_output(batch)
        with disable():
            loss = self._loss.function(jacobian.output, jacobian.target)
        gradients = differentiated(loss, self.parameters, create_graph=True)

        def multiply(vector: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
            pairs = [(g, v) for g, v in zip(gradients, vector, strict=True) if v is not None]
            return combined(pairs, parameters)

        return at, self._columns(vectors, multiply)


def _added(total: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    return [a.add_(b) for a, b in zip(total, parts, strict=True)]
