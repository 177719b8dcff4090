"""An index of FAISS over a store, for searches that need not read every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backpack_attribution import forms
from backpack_attribution.forms import Gradients, Value
from backpack_attribution.identities import Identity
from backpack_attribution.scores import Found, require_count
from backpack_attribution.store import GradientStore
from backpack_core.errors import ShapeError, UsageError


class FaissIndex:
    """The rows of a store, with their parts joined, in an index by inner products.

    Attributes:
        index: The index of FAISS.
        identities: The identities of its rows.
        shapes: The shapes of the parts, in the order of joining.
    """

    def __init__(
        self, store: GradientStore, factory: str = "Flat", rows: int = 4096, train: int = 65536
    ) -> None:
        """Add all rows of a store, in single precision.

        Args:
            store: A store with small parts, such as projected gradients.
            factory: As for ``faiss.index_factory``: ``"Flat"`` is exact, ``"IVF256,Flat"`` looks
                only at some cells, ``"PQ64"`` compresses.
            rows: The number of samples that are added at a time.
            train: The largest number of samples to train an index on, if it needs training.

        Raises:
            UsageError: FAISS is not installed, or the store is empty.
        """
        try:
            import faiss
        except ImportError as error:
            raise UsageError(
                "A FaissIndex needs faiss, which is not installed. Run "
                "`pip install 'backpack-attribution[faiss]'`, or use store.search(...), which is "
                "exact and needs no package."
            ) from error
        if not len(store):
            raise UsageError(f"{store.folder} has no samples yet: append some first.")
        self._store, self.shapes, self.identities = store, store.shapes, store.identities
        width = sum(shape.numel() for shape in self.shapes.values())
        self.index: Any = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if not self.index.is_trained:
            self.index.train(self._first(store, train).numpy())
        for block in store.blocks(rows):
            self.index.add(self._flat(block.gradients).numpy())

    def search(self, queries: Mapping[str, Value], k: int = 10) -> Found:
        """The ``k`` samples that the index finds for each query; fewer if it finds fewer.

        Args:
            queries: A tensor ``[M, *θ]`` for each part of the store.
            k: How many samples.

        Raises:
            ShapeError: A query does not fit the part, or a part is left out.
            UsageError: ``k`` is not a positive integer, the store does not have a part, or queries
                were computed by other plugins or projected differently.
        """
        self._store.count_of(queries)
        if len(queries) != len(self.shapes):
            raise ShapeError(
                f"The index joins the parts {[*self.shapes][:5]}, and queries must have all of "
                f"them. Got {[*queries][:5]}."
            )
        require_count(k)
        values, rows = self.index.search(self._flat(queries).numpy(), min(k, len(self.identities)))
        names: list[list[Identity]] = [
            [self.identities[n] for n in row if n >= 0] for row in rows.tolist()
        ]
        return Found(torch.from_numpy(values), names)

    def _first(self, store: GradientStore, count: int) -> Tensor:
        """The first rows of a store; no others are read."""
        found, missing = [], count
        for block in store.blocks(count):
            found.append(self._flat(block.gradients)[:missing])
            missing -= len(found[-1])
            if not missing:
                break
        return torch.cat(found)

    def _flat(self, gradients: Gradients) -> Tensor:
        parts = [forms.flat(forms.dense(gradients[name])).float() for name in self.shapes]
        return torch.cat(parts, 1).cpu()
