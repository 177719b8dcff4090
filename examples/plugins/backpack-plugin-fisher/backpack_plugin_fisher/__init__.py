"""The empirical Fisher matrix: outer products of individual gradients, as a root that travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backpack_core import LossRule, View
from backpack_core.contract.extension import FailMode
from backpack_core.errors import UnsupportedError
from backpack_products import ColumnPropagator, Columns, SampleProduct, SecondOrderExtension
from backpack_products.extensions import as_subsampling
from backpack_products.loss import loss_factor, loss_gradient
from backpack_products.operations import dense, square_sum
from torch import Tensor


@dataclass(frozen=True)
class EmpiricalFisherRoot(ColumnPropagator):
    """One column ``S_n = √c ∇ℓ_n`` at the input of a loss ``c Σ_n ℓ_n``, pushed by ``Jᵀ``.

    Its outer products are the empirical Fisher matrix of type 2, ``c Σ_n ∇ℓ_n ∇ℓ_nᵀ``, with targets
    of the data instead of targets drawn from the model (Kunstner, Balles, Hennig, 2019,
    arXiv:1905.12558, equation 3). ``c`` is the reduction of the loss times the arriving gradient.

    Attributes:
        subsampling: The samples that take part; ``None`` for all.
    """

    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Columns:
        """The column at the input of the loss, ``[1, N, *in]``.

        Raises:
            UnsupportedError: The loss is multiplied by a negative number.
        """
        factor = loss_factor(view)
        if bool((factor < 0).any()):
            raise UnsupportedError(
                f"{view.path} is multiplied by a negative number, so its empirical Fisher matrix "
                "has no real root: call backward() on the loss itself."
            )
        column = loss_gradient(view) / factor.sqrt()
        return Columns.start("empirical Fisher", column.where(factor > 0, 0.0).unsqueeze(0))


class _FisherExtension(SecondOrderExtension):
    """An extension of the root of the empirical Fisher matrix."""

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule.
        """
        root = EmpiricalFisherRoot(as_subsampling(subsampling))
        super().__init__(root, savefield, fail_mode)


class DiagFisher(_FisherExtension):
    """Diagonal of the empirical Fisher matrix.

    Stored in ``diag_fisher``, shape ``[*θ]``: ``c Σ_n (∇_θ ℓ_n)²`` for a loss ``c Σ_n ℓ_n``.
    """

    savefield = "diag_fisher"
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """Contract the product, without forming ``[V, N, *θ]`` if its form allows that."""
        return square_sum(product)


class SqrtFisher(_FisherExtension):
    """Root of the empirical Fisher matrix.

    Stored in ``sqrt_fisher``, shape ``[N, *θ]``: ``√c ∇_θ ℓ_n`` for a loss ``c Σ_n ℓ_n``.
    """

    savefield = "sqrt_fisher"
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        """The products themselves."""
        return dense(product).squeeze(0)
