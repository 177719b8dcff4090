"""The plugins' extensions with the incumbent's signatures. Imports the plugins.

They have the incumbent's settings, and Kronecker factors also have ``weight_sharing``, which
chooses the factors of layers with positions. For all other settings use
``backpack_core.extensions``.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from backpack.extensions.backprop_extension import BackpackGraphNames, BackpackNames
from backpack.extensions.curvature import Curvature
from backpack.extensions.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.extensions.strategies import extension_by
from backpack_compat.roots import EveryColumn
from backpack_core import Extension
from backpack_firstorder import individual, moments
from backpack_products.extensions import as_subsampling
from backpack_secondorder import diag_ggn, diag_hessian, kfac, kfra, products, sqrt_ggn
from backpack_secondorder.factors import WeightSharing, kronecker_factors
from backpack_secondorder.propagators import LossSqrt

EXACT, SAMPLING = LossHessianStrategy.EXACT, LossHessianStrategy.SAMPLING
BOTEV_MARTENS = ExpectationApproximation.BOTEV_MARTENS


class BatchGrad(BackpackNames, individual.BatchGrad):
    """Individual gradients, in ``grad_batch``."""

    def __init__(self, subsampling: list[int] | None = None) -> None:
        super().__init__(subsampling=subsampling)


class BatchL2Grad(BackpackNames, individual.BatchL2Grad):
    """Squared norms of individual gradients, in ``batch_l2``."""

    def __init__(self) -> None:
        super().__init__()


class SumGradSquared(BackpackNames, moments.SumGradSquared):
    """Sum of squared individual gradients, in ``sum_grad_squared``."""

    def __init__(self) -> None:
        super().__init__()


class Variance(BackpackNames, moments.Variance):
    """Variance of the individual gradients, in ``variance``."""

    def __init__(self) -> None:
        super().__init__()


class ByLossHessian(BackpackNames):
    """Extensions that carry the root of the loss Hessian, exact or sampled.

    Args:
        loss_hessian_strategy: ``LossHessianStrategy.EXACT`` or ``SAMPLING``; the latter needs a
            method ``get_num_mc_samples``.
        savefield: Name of the attribute on parameters.
        subsampling: Indices of the samples to take; default: all.
    """

    VALID_LOSS_HESSIAN_STRATEGIES = (EXACT, SAMPLING)
    _mc_samples: int = 1

    def __init__(
        self,
        loss_hessian_strategy: str,
        savefield: str,
        subsampling: list[int] | None = None,
    ) -> None:
        if loss_hessian_strategy not in self.VALID_LOSS_HESSIAN_STRATEGIES:
            raise ValueError(
                f"Unknown hessian strategy: {loss_hessian_strategy}. Valid strategies: "
                f"{list(self.VALID_LOSS_HESSIAN_STRATEGIES)}"
            )
        self.loss_hessian_strategy = loss_hessian_strategy
        if loss_hessian_strategy == EXACT:
            propagator: LossSqrt = EveryColumn(subsampling=as_subsampling(subsampling))
        else:
            samples = self.get_num_mc_samples()
            propagator = LossSqrt(samples, as_subsampling(subsampling))
        Extension.__init__(self, propagator, savefield)

    def get_loss_hessian_strategy(self) -> str:
        """Which root of the loss Hessian is carried."""
        return self.loss_hessian_strategy

    def get_num_mc_samples(self) -> int:
        """Number of Monte-Carlo samples."""
        return self._mc_samples


class DiagGGN(ByLossHessian):
    """Base of the diagonals of the generalised Gauss-Newton matrix."""

    read = diag_ggn.DiagGGNExact.read
    columns_add = diag_ggn.DiagGGNExact.columns_add
    degree = diag_ggn.DiagGGNExact.degree
    over_batches = diag_ggn.DiagGGNExact.over_batches

    def __init__(self, loss_hessian_strategy: str, savefield: str) -> None:
        super().__init__(loss_hessian_strategy, savefield)


class DiagGGNExact(DiagGGN, diag_ggn.DiagGGNExact):
    """Diagonal of the generalised Gauss-Newton matrix, in ``diag_ggn_exact``."""

    def __init__(self) -> None:
        super().__init__(EXACT, "diag_ggn_exact")


class DiagGGNMC(DiagGGN, diag_ggn.DiagGGNMC):
    """The same by Monte Carlo, in ``diag_ggn_mc``."""

    def __init__(self, mc_samples: int = 1) -> None:
        self._mc_samples = mc_samples
        super().__init__(SAMPLING, "diag_ggn_mc")


class BatchDiagGGN(ByLossHessian):
    """Base of the diagonals of single samples."""

    read = diag_ggn.BatchDiagGGNExact.read
    columns_add = diag_ggn.BatchDiagGGNExact.columns_add
    degree = diag_ggn.BatchDiagGGNExact.degree
    over_batches = diag_ggn.BatchDiagGGNExact.over_batches

    def __init__(self, loss_hessian_strategy: str, savefield: str) -> None:
        super().__init__(loss_hessian_strategy, savefield)


class BatchDiagGGNExact(BatchDiagGGN, diag_ggn.BatchDiagGGNExact):
    """Diagonals of single samples, in ``diag_ggn_exact_batch``."""

    def __init__(self) -> None:
        super().__init__(EXACT, "diag_ggn_exact_batch")


class BatchDiagGGNMC(BatchDiagGGN, diag_ggn.BatchDiagGGNMC):
    """The same by Monte Carlo, in ``diag_ggn_mc_batch``."""

    def __init__(self, mc_samples: int = 1) -> None:
        self._mc_samples = mc_samples
        super().__init__(SAMPLING, "diag_ggn_mc_batch")


class SqrtGGN(ByLossHessian):
    """Base of the square roots of the generalised Gauss-Newton matrix."""

    read = sqrt_ggn.SqrtGGNExact.read
    combine = sqrt_ggn.SqrtGGNExact.combine
    columns_add = sqrt_ggn.SqrtGGNExact.columns_add
    degree = sqrt_ggn.SqrtGGNExact.degree
    over_batches = sqrt_ggn.SqrtGGNExact.over_batches


class SqrtGGNExact(SqrtGGN, sqrt_ggn.SqrtGGNExact):
    """Square root of the generalised Gauss-Newton matrix, in ``sqrt_ggn_exact``."""

    def __init__(self, subsampling: list[int] | None = None) -> None:
        super().__init__(EXACT, "sqrt_ggn_exact", subsampling)


class SqrtGGNMC(SqrtGGN, sqrt_ggn.SqrtGGNMC):
    """The same by Monte Carlo, in ``sqrt_ggn_mc``."""

    def __init__(self, mc_samples: int = 1, subsampling: list[int] | None = None) -> None:
        self._mc_samples = mc_samples
        super().__init__(SAMPLING, "sqrt_ggn_mc", subsampling)


class DiagHessian(BackpackNames, diag_hessian.DiagHessian):
    """Diagonal of the Hessian, in ``diag_h``."""

    def __init__(self) -> None:
        super().__init__()


class BatchDiagHessian(BackpackNames, diag_hessian.BatchDiagHessian):
    """Diagonals of the Hessians of single samples, in ``diag_h_batch``."""

    def __init__(self) -> None:
        super().__init__()


class HBP(BackpackNames):
    """Kronecker factors by strategies.

    Args:
        curv_type: ``Curvature.GGN``; with ``SUM`` and ``BATCH_AVERAGE`` any other, too, by a
            :class:`KFRA` with residuals.
        loss_hessian_strategy: ``EXACT`` (:class:`KFLR`), ``SAMPLING`` (:class:`KFAC`), or ``SUM``
            (:class:`KFRA`).
        backprop_strategy: ``BATCH_AVERAGE`` with ``SUM``, otherwise ``SQRT``.
        ea_strategy: ``ExpectationApproximation.BOTEV_MARTENS``.
        savefield: Name of the attribute on parameters.
        weight_sharing: How positions enter the factors; see :class:`backpack_core.extensions.KFAC`.
            The default gives those of BackPACK for convolutions.
    """

    columns_add = True
    needs = (kronecker_factors,)
    degree = kfac.KFAC.degree
    _mc_samples: int = 1

    def __init__(
        self,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
        weight_sharing: WeightSharing = "kfc",
    ) -> None:
        strategies = (curv_type, loss_hessian_strategy, backprop_strategy, ea_strategy)
        self.curv_type, self.loss_hessian_strategy, self.backprop_strategy, self.ea_strategy = (
            strategies
        )
        self.weight_sharing = weight_sharing
        self._asked = (*strategies, self.get_num_mc_samples(), weight_sharing)
        if self.over_batches is None:
            self.over_batches = self._base.over_batches
        propagator = self._base.propagator
        # Diagonals and roots share the columns.
        propagator = EveryColumn() if propagator == LossSqrt() else propagator
        Extension.__init__(self, propagator, savefield)

    @property
    def _base(self) -> Extension:
        return extension_by(*self._asked)

    def read(self, product: Any) -> Any:
        """The factors."""
        return self._base.read(product)

    def as_stored(self, value: Any, parameter: Tensor) -> Any:
        """In the dtype of the parameter."""
        return self._base.as_stored(value, parameter)

    def combine(self, first: Any, second: Any) -> Any:
        """Factors for the columns of both."""
        return self._base.combine(first, second)

    def get_curv_type(self) -> str:
        """Which curvature is approximated."""
        return self.curv_type

    def get_loss_hessian_strategy(self) -> str:
        """Which form of the loss Hessian is carried."""
        return self.loss_hessian_strategy

    def get_backprop_strategy(self) -> str:
        """Whether a root or an average is carried."""
        return self.backprop_strategy

    def get_ea_strategy(self) -> str:
        """How the expectation is approximated."""
        return self.ea_strategy

    def get_num_mc_samples(self) -> int:
        """Number of Monte-Carlo samples."""
        return self._mc_samples


class KFAC(HBP, kfac.KFAC):
    """Kronecker factors with a sampled loss Hessian, in ``kfac``."""

    def __init__(self, mc_samples: int = 1, weight_sharing: WeightSharing = "kfc") -> None:
        self._mc_samples = mc_samples
        strategies = (Curvature.GGN, SAMPLING, BackpropStrategy.SQRT, BOTEV_MARTENS)
        super().__init__(*strategies, "kfac", weight_sharing)


class KFLR(HBP, kfac.KFLR):
    """Kronecker factors with the exact loss Hessian, in ``kflr``."""

    def __init__(self, weight_sharing: WeightSharing = "kfc") -> None:
        strategies = (Curvature.GGN, EXACT, BackpropStrategy.SQRT, BOTEV_MARTENS)
        super().__init__(*strategies, "kflr", weight_sharing)


class KFRA(HBP, kfra.KFRA):
    """Kronecker factors by averages over the batch, in ``kfra``."""

    def __init__(self, weight_sharing: WeightSharing = "kfc") -> None:
        average = (LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE)
        super().__init__(Curvature.GGN, *average, BOTEV_MARTENS, "kfra", weight_sharing)


class GGNMP(BackpackGraphNames, products.GGNMP):
    """Products with blocks of the generalised Gauss-Newton matrix, in ``ggnmp``."""

    def __init__(self, savefield: str = "ggnmp") -> None:
        super().__init__(savefield=savefield)


class HMP(BackpackGraphNames, products.HMP):
    """Products with blocks of the Hessian, in ``hmp``."""

    def __init__(self, savefield: str = "hmp") -> None:
        super().__init__(savefield=savefield)


class PCHMP(BackpackGraphNames, products.PCHMP):
    """Products with blocks of the positive-curvature Hessian, in ``pchmp``."""

    def __init__(self, savefield: str = "pchmp", modify: Literal["clip", "abs"] = "clip") -> None:
        self._modify = modify
        super().__init__(savefield=savefield, modify=modify)

    def get_modification_mode(self) -> str:
        """``"clip"`` or ``"abs"``."""
        return self._modify
