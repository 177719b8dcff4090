"""A backend for laplace-torch that computes the curvature of any architecture in one pass.

    from laplace import Laplace
    la = Laplace(model, "classification", hessian_structure="kron", backend=laplace_backend())

Imports laplace-torch where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import Extension, backpack, disable, extend, is_extended
from backpack_core.errors import UnsupportedError, UsageError
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense, square_sum
from backpack_secondorder.covariances import outer
from backpack_secondorder.diag_ggn import DiagGGNExact, DiagGGNMC
from backpack_secondorder.factors import WeightSharing, kronecker_factors
from backpack_secondorder.kfac import KFAC, KFLR
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.output_jacobian import Jacobians
from backpack_secondorder.outputs import SumOutputs
from backpack_secondorder.sqrt_ggn import SqrtGGNExact, SqrtGGNMC

if TYPE_CHECKING:
    from laplace.utils import Kron

Curvature: TypeAlias = Literal["ggn", "ef"]
Pair: TypeAlias = tuple[Tensor, Tensor]
GRADIENTS = "laplace_gradients"


@cache
def laplace_backend(
    curvature: Curvature = "ggn", weight_sharing: WeightSharing = "expand"
) -> type[Any]:
    """The backend to pass to laplace-torch: ``Laplace(model, ..., backend=laplace_backend())``.

    It has every structure (``diag``, ``kron``, ``full``), for regression and classification, for
    all weights, the last layer and subnetworks, and for any architecture that extensions are exact
    for. Numbers have the scale of laplace-torch: those of the summed loss, times its ``factor``.
    The first pass extends the model, or its last layer, which stays extended.

    Args:
        curvature: ``"ggn"``, the generalised Gauss-Newton matrix, which is the Fisher information
            of both likelihoods (``backend_kwargs={"stochastic": True}`` samples it); ``"ef"``, the
            empirical Fisher matrix.
        weight_sharing: How positions that share a weight enter ``kron``; see
            :class:`~backpack_secondorder.kfac.KFAC`.

    Returns:
        A class derived from laplace-torch's interface.

    Raises:
        UsageError: The curvature is unknown.
        ModuleNotFoundError: laplace-torch is not installed.
    """
    if curvature not in get_args(Curvature):
        raise UsageError(f"curvature must be one of {get_args(Curvature)}. Got {curvature!r}.")
    try:
        from laplace.curvature import EFInterface, GGNInterface
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "laplace_backend needs laplace-torch, which is not installed: pip install "
            "laplace-torch."
        ) from error
    bases = (_GGN, GGNInterface) if curvature == "ggn" else (_EmpiricalFisher, EFInterface)
    # laplace-torch assumes that classes with "BackPACK" in their name take no dictionaries.
    return type(f"Native{bases[1].__name__}", bases, {"weight_sharing": weight_sharing})


class _OfGradients(FirstOrderExtension):
    """An extension that stores a function of the product with the gradient."""

    def __init__(self, savefield: str, function: Callable[[SampleProduct], Any]) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute on parameters.
            function: A function of the product.
        """
        super().__init__(savefield=savefield)
        self._function = function

    def read(self, product: SampleProduct) -> Any:
        """The value of the function."""
        return self._function(product)

    def as_stored(self, value: Any, parameter: Tensor) -> Any:
        """Cast to the dtype of the parameter."""
        return value.to(parameter.dtype)


class _Backend:
    """The common base of both curvatures, with the attributes of laplace-torch's interface."""

    weight_sharing: WeightSharing
    model: Any
    _model: Module
    last_layer: bool
    params: Sequence[Tensor]
    lossfunc: Any
    factor: float
    likelihood: str
    subnetwork_indices: Tensor | None

    def jacobians(self, x: Any, enable_backprop: bool = False) -> Pair:
        """The Jacobians ``[N, C, P]`` and outputs ``[N, C]``."""
        if enable_backprop:
            with disable():
                pair: Pair = super().jacobians(x, enable_backprop)  # type: ignore[misc]
            return pair
        _extend(self._model)
        output = self._output(x)
        extension = Jacobians(savefield="laplace_jacobians")
        with backpack(extension, gradient="skipped"):
            extend(SumOutputs())(output).backward()
        rows = self._flat(extension.savefield, tuple(output.shape))
        return self._chosen(rows), output.detach()

    def gradients(self, x: Any, y: Tensor) -> Pair:
        """The per-sample gradients ``[N, P]``, and the loss."""
        loss = self._through(x, y, _individual())
        return self._chosen(self._flat(GRADIENTS, (len(y),))), loss

    def diag(self, x: Any, y: Tensor, **settings: Any) -> Pair:
        """The loss, and the diagonal ``[P]``."""
        extension = self._diagonal()
        loss = self._through(x, y, extension)
        return self.factor * loss, self.factor * self._chosen(self._flat(extension.savefield))

    def full(self, x: Any, y: Tensor, **settings: Any) -> Pair:
        """The loss, and the matrix ``[P, P]``."""
        loss, root = self._root(x, y)
        with torch.no_grad():  # so that half of the matrix is computed, and mirrored
            (matrix,) = outer(self._chosen(root).unsqueeze(1), self.factor)
        return self.factor * loss, matrix

    def kron(self, x: Any, y: Tensor, N: int, **settings: Any) -> tuple[Tensor, Kron]:
        """The loss, and Kronecker factors, scaled to add up over batches of ``N`` samples.

        Raises:
            UnsupportedError: laplace-torch cannot hold the factors of a parameter.
        """
        from laplace.utils import Kron

        extension = self._factored()
        loss = self._through(x, y, extension)
        share = len(y) / N
        taken = [self._taken(parameter, extension.savefield) for parameter in self.params]
        found = []
        for parameter, factors in zip(self.params, taken, strict=True):
            if factors is None:
                raise UnsupportedError(
                    f"The loss does not use a parameter of shape {list(parameter.shape)}, so it "
                    "has no Kronecker factors: freeze it, or use the diagonal."
                )
            found.append(_as_listed(factors, share))
        return self.factor * loss, self.factor * Kron(found)

    def _output(self, x: Any) -> Tensor:
        if self.last_layer:  # layers before the last one are constants
            with torch.no_grad():
                whole, x = self.model.forward_with_features(x)
        with torch.enable_grad():
            output: Tensor = (self._model if self.last_layer else self.model)(x)
        if self.last_layer and torch.dist(output, whole) > 0.01 * whole.norm():
            raise UnsupportedError(
                "The model's output is not that of its last layer: something follows this layer, "
                "or is added to it. Freeze the other parameters, and give subset_of_weights='all'."
            )
        if output.dim() != 2:
            raise UnsupportedError(
                f"The model returns a tensor of shape {list(output.shape)}, but a Laplace "
                "approximation takes outputs [N, C]: reduce the other axes in the model."
            )
        return output

    def _through(self, x: Any, y: Tensor, extension: Extension) -> Tensor:
        """Run one pass with an extension and return the loss."""
        _extend(self._model, self.lossfunc)
        with torch.enable_grad():
            loss: Tensor = self.lossfunc(self._output(x), y)
        try:
            with backpack(extension, gradient="skipped"):
                loss.backward()
        except BaseException:
            for parameter in self.params:
                self._taken(parameter, extension.savefield)
            raise
        return loss.detach()

    def _taken(self, parameter: Tensor, field: str) -> Any:
        return parameter.__dict__.pop(field, None)

    def _flat(self, field: str, axes: tuple[int, ...] = ()) -> Tensor:
        """The results of all parameters, ``[*axes, P]``; zero for those that were not reached."""
        parts = []
        for parameter in self.params:
            result = self._taken(parameter, field)
            if result is None:
                result = parameter.new_zeros(*axes, *parameter.shape)
            parts.append(result.reshape(*axes, parameter.numel()))
        return torch.cat(parts, -1)

    def _chosen(self, rows: Tensor) -> Tensor:
        """The entries of the subnetwork along the last axis."""
        return rows if self.subnetwork_indices is None else rows[..., self.subnetwork_indices]

    def _diagonal(self) -> Extension:
        """The extension that computes the diagonal."""
        raise NotImplementedError

    def _factored(self) -> Extension:
        """The extension that computes Kronecker factors."""
        raise NotImplementedError

    def _root(self, x: Any, y: Tensor) -> Pair:
        """The loss, and ``R`` with the matrix ``RᵀR``, ``[M, P]``."""
        raise NotImplementedError


class _GGN(_Backend):
    """The generalised Gauss-Newton matrix, exact or sampled."""

    stochastic: bool
    num_samples: int

    def _diagonal(self) -> Extension:
        return DiagGGNMC(self.num_samples) if self.stochastic else DiagGGNExact()

    def _factored(self) -> Extension:
        if self.stochastic:
            return KFAC(self.num_samples, self.weight_sharing)
        return KFLR(self.weight_sharing)

    def _root(self, x: Any, y: Tensor) -> Pair:
        extension = SqrtGGNMC(self.num_samples) if self.stochastic else SqrtGGNExact()
        loss = self._through(x, y, extension)
        held = (getattr(p, extension.savefield, None) for p in self.params)
        axes = next((tuple(root.shape[:2]) for root in held if root is not None), (0, 0))
        return loss, self._flat(extension.savefield, axes).flatten(0, 1)


class _EmpiricalFisher(_Backend):
    """``Σ_n g_n g_nᵀ``, as laplace-torch scales it."""

    def _diagonal(self) -> Extension:
        return _OfGradients("laplace_squares", square_sum)

    def _factored(self) -> Extension:
        return _OfGradients("laplace_factors", lambda p: kronecker_factors(p, self.weight_sharing))

    def _root(self, x: Any, y: Tensor) -> Pair:
        loss = self._through(x, y, _individual())
        return loss, self._flat(GRADIENTS, (len(y),))


def _individual() -> Extension:
    """The per-sample gradients, ``[N, *θ]``."""
    return _OfGradients(GRADIENTS, lambda product: dense(product).squeeze(0))


def _as_listed(factors: KroneckerFactors, share: float) -> list[Tensor]:
    """The factors ``[B, A]``, or the block, in laplace-torch's form.

    Raises:
        UnsupportedError: laplace-torch has no form for them.
    """
    is_table = factors.groups == 1 and any(map(factors.is_diagonal, factors))
    if (factors.groups > 1 or factors.order.positions is not None) and not is_table:
        raise UnsupportedError(
            f"laplace-torch has no form for the Kronecker factors of {factors.order}, a layer with "
            "groups or a transposed convolution: use hessian_structure='diag' or 'full'."
        )
    full = [torch.diag_embed(f) if factors.is_diagonal(f) else f for f in factors]
    if factors.order.positions is not None:  # a table: [num, features]
        full.reverse()
        return [full[0] * share, full[1]]
    return full if len(full) == 1 else [full[0], full[1] * share]


def _extend(*modules: Module) -> None:
    """Extend modules that are not extended yet; they stay extended, so that plans are reused."""
    for module in modules:
        if not is_extended(module):
            extend(module)
