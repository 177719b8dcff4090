"""The diagonal of the Hessian by products: slow, but exact for every architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_core.errors import UsageError
from backpack_secondorder.products import OfLoss, ProductExtension
from backpack_secondorder.whole import GraphReading, LossGraph


class DiagHMP(ProductExtension):
    """Diagonal of the Hessian by products with unit vectors, exact for every architecture.

    Stored in ``diag_hmp``, shape ``[*θ]``: ``∂²ℓ/∂θ_i²``, with the scale of the loss (``1/N`` for a
    mean). Each entry takes one product with the block of its parameter (Pearlmutter, 1994), which
    costs about two backward passes. Use it for what :class:`DiagHessian` refuses: parameters that
    enter nonlinearly or that functions use, recurrent nets, samples that influence each other.
    Freeze the parameters that need no diagonal.
    """

    savefield = "diag_hmp"
    degree = 1
    over_batches = "sum"

    def __init__(
        self,
        savefield: str | None = None,
        subsampling: Sequence[int] | None = None,
        fail_mode: FailMode = "autodiff",
        chunk_size: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute on parameters; default: the class's.
            subsampling: Indices of the samples to take; default: all.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            chunk_size: How many products are computed at a time; default: 16. Each takes the memory
                of a backward pass.

        Raises:
            UsageError: The chunk size is not positive.
        """
        if chunk_size is not None and chunk_size < 1:
            raise UsageError(f"chunk_size must be positive. Got {chunk_size!r}.")
        super().__init__(savefield, subsampling, fail_mode)
        self.chunk_size = chunk_size

    def begin(self) -> GraphReading:
        """A reading that collects the losses, with the samples that take part."""
        return _Diagonals(self.subsampling, self.chunk_size or 16)


class _Diagonals(OfLoss):
    def __init__(self, subsampling: tuple[int, ...] | None, chunk_size: int) -> None:
        super().__init__(subsampling)
        self._chunk_size = chunk_size

    def results(self, graph: LossGraph) -> Mapping[Tensor, Tensor]:
        """The diagonal of each parameter's block."""
        operator = self.operator(graph)
        return {p: operator.diagonal(p, self._chunk_size) for p in graph.parameters}
