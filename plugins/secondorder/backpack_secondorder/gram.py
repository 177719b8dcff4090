"""Eigenvalues and eigenvectors of the generalised Gauss-Newton matrix from its Gram matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from backpack_core.autocast import without_autocast
from backpack_core.contract.extension import FailMode
from backpack_core.contract.rules import Normaliser
from backpack_core.errors import OverwrittenInputError, UsageError
from backpack_products import SampleProduct, SecondOrderExtension
from backpack_products.columns import Root
from backpack_products.extensions import as_subsampling
from backpack_products.held import held_by
from backpack_products.merging import Refused
from backpack_products.operations import gram, weighted_sum
from backpack_secondorder.linalg import eigh
from backpack_secondorder.propagators import LossSqrt


@dataclass(eq=False)
class Spectrum:
    """Nonzero eigenvalues of ``G = Σ_v Σ_n M[v, n] M[v, n]ᵀ`` over all parameters.

    Attributes:
        gram: ``⟨M[v, n], M[w, m]⟩``, summed over parameters. Shape ``[V, N, V, N]``.
    """

    gram: Tensor

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        size = self.gram.shape[0] * self.gram.shape[1]
        values, vectors = eigh(self.gram.reshape(size, size))
        return values.flip(0), vectors.flip(1)

    @property
    def eigenvalues(self) -> Tensor:
        """The ``V·N`` eigenvalues that may differ from zero, largest first."""
        return self._eigen[0]

    def weights(self, count: int) -> Tensor:
        """The coefficients of the leading eigenvectors in ``M``. Shape ``[count, V, N]``.

        Raises:
            UsageError: There are not as many eigenvalues that differ from zero.
        """
        values, vectors = self._eigen
        tolerance = torch.finfo(values.dtype).eps * len(values) * values[:1].abs().sum()
        rank = int((values > tolerance).sum())
        if not 1 <= count <= rank:
            raise UsageError(
                f"{count} eigenvectors were asked for, but the matrix has rank {rank}: ask for 1 "
                f"to {rank}."
            )
        chosen = vectors[:, :count] / values[:count].sqrt()
        return chosen.T.reshape(count, *self.gram.shape[:2])


@dataclass(eq=False)
class GramBlock:
    """The Gram matrix of one parameter, and its part of the eigenvectors.

    Attributes:
        gram: The Gram matrix of only this parameter, for the ``V`` columns that reach it. Shape
            ``[V, N, V, N]``.
        spectrum: The spectrum over all parameters, the same object on each.
    """

    gram: Tensor
    _product: SampleProduct
    _places: Tensor = field(init=False)
    spectrum: Spectrum = field(init=False)

    def __post_init__(self) -> None:
        """Note the versions of the factors: some are what a layer received."""
        product = self._product
        self._held = [entry for entry in held_by(product) if entry[0] is not product.parameter]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has tensors of its own, with versions of their own."""
        vars(self).update(state)
        self.__post_init__()

    def eigenvectors(self, count: int) -> Tensor:
        """This parameter's part of the leading eigenvectors.

        Args:
            count: How many.

        Returns:
            Shape ``[count, *θ]``; largest eigenvalue first. Over all parameters together, they are
            orthonormal.

        Raises:
            UsageError: There are not as many eigenvalues that differ from zero.
            OverwrittenInputError: What the layer received was changed in place since the pass.
        """
        if any(not t.is_inference() and t._version != version for t, version in self._held):
            raise OverwrittenInputError(
                "What a layer received was changed in place since the backward pass, so the "
                "eigenvectors would be others: compute them first, or run another pass."
            )
        weights = self.spectrum.weights(count)[:, self._places]
        weights = weights.to(self._product.like.dtype)
        with torch.set_grad_enabled(self.gram.requires_grad), without_autocast():
            return weighted_sum(self._product, weights).to(self.gram.dtype)


class GGNGram(SecondOrderExtension):
    """Spectrum of the generalised Gauss-Newton matrix of all parameters together.

    The matrix is ``Σ_v Σ_n M[v, n] M[v, n]ᵀ``. It shares its nonzero eigenvalues with the Gram
    matrix ``⟨M[v, n], M[w, m]⟩`` of size ``V·N`` (``V`` columns of the root of the loss Hessian),
    which needs no ``M`` in affine layers. Stored in ``ggn_gram``, a :class:`GramBlock`:

    - ``param.ggn_gram.spectrum.eigenvalues``: the same for every parameter, largest first;
    - ``param.ggn_gram.eigenvectors(k)``: the parameter's part of the leading ``k`` eigenvectors;
    - ``param.ggn_gram.gram``: the Gram matrix of the parameter's own block.

    The matrix covers all parameters that get the quantity. Values are stored at the end of the
    backward pass. They scale as the loss. Dangel et al. (2022), ViViT, arXiv:2106.02624.
    """

    savefield = "ggn_gram"
    degree = 1
    over_batches = Refused(
        "no batch's Gram matrix has entries between samples of two batches: take SqrtGGNExact, "
        "which combines batches, or products with the matrix over a data set."
    )
    is_deferred = True
    needs = (gram,)

    def __init__(
        self,
        mc_samples: int | None = None,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        tolerance: float = 0.0,
    ) -> None:
        """Store the settings.

        Args:
            mc_samples: Number of samples from the model's likelihood for each datum; default: the
                exact loss Hessian.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
            tolerance: Share of the trace of the exact loss Hessian that may be left out; see
                :class:`~backpack_secondorder.square_root.ExactExtension`.
        """
        samples = as_subsampling(subsampling)
        propagator = LossSqrt(samples=mc_samples, subsampling=samples, tolerance=tolerance)
        super().__init__(propagator, savefield, fail_mode)

    def read(self, product: SampleProduct) -> GramBlock:
        """The Gram matrix of this parameter, and ``M`` or its factors, for eigenvectors."""
        return GramBlock(gram(product).clone(), product)

    def finish(
        self, values: Mapping[Tensor, GramBlock], normalisers: Sequence[Normaliser] = ()
    ) -> Mapping[Tensor, GramBlock]:
        """Add up the Gram matrices.

        Parameters may see columns of different losses, so each root has its own rows and columns
        in the sum.

        Args:
            values: The contribution of every parameter.
            normalisers: Not used.

        Returns:
            The values, with the spectrum.
        """
        if not values:
            return values
        blocks = list(values.values())
        starts: dict[Root, int] = {}
        total = 0
        for block in blocks:
            for root, count in block._product.roots.items():
                if root not in starts:
                    starts[root] = total
                    total += count
        samples = blocks[0].gram.shape[1]
        # Under autocast, layers differ in the precision of their columns.
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in values))
        whole = blocks[0].gram.new_zeros(total, samples, total, samples, dtype=dtype)
        for parameter, block in values.items():
            block.gram = block.gram.to(parameter.dtype)
            ranges = [
                torch.arange(starts[root], starts[root] + count, device=whole.device)
                for root, count in block._product.roots.items()
            ]
            block._places = torch.cat(ranges)
            grid = block._places[:, None], block._places[None, :]
            whole.transpose(1, 2)[grid] += block.gram.transpose(1, 2).to(dtype)
        spectrum = Spectrum(whole)
        for block in blocks:
            block.spectrum = spectrum
        return values
