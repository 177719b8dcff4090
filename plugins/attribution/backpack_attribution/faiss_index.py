"""An index of FAISS over a store, for searches that need not look at every row."""

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
    """The rows of a store, their parts one behind the other, in an index by inner products.

    Attributes:
        index: The index of FAISS.
        identities: Of its rows.
        shapes: Of the parts, in the order in which they are joined.
    """

    def __init__(
        self, store: GradientStore, factory: str = "Flat", rows: int = 4096, train: int = 65536
    ) -> None:
        """Add all rows of a store, in single precision.

        Args:
            store: Small parts pay here: projected gradients.
            factory: As for ``faiss.index_factory``: ``"Flat"`` is exact, ``"IVF256,Flat"`` looks at
                some cells only, ``"PQ64"`` compresses.
            rows: Samples that are added at a time.
            train: How many samples an index that is trained is trained on, at most.

        Raises:
            UsageError: FAISS is not installed, or the store is empty.
        """
        try:
            import faiss
        except ImportError as error:
            raise UsageError(
                "A FaissIndex needs faiss, which is not installed. Run "
                "`pip install 'backpack-attribution[faiss]'`, or use store.search(...), which is "
                "exact and needs nothing."
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
        """The ``k`` samples that the index finds for each query; fewer where it finds fewer.

        Args:
            queries: For each part of the store a tensor ``[M, *θ]``.
            k: How many.

        Raises:
            ShapeError: A query does not fit the part, or a part is left out.
            UsageError: ``k`` is not a positive integer, the store has no such part, or queries were
                computed by other plugins or projected otherwise.
        """
        self._store.count_of(queries)
        if len(queries) != len(self.shapes):
            raise ShapeError(
                f"The index joins the parts {[*self.shapes][:5]}, and queries have to have them "
                f"all. Got {[*queries][:5]}."
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
        parts = [forms.dense(gradients[name]).flatten(1).float() for name in self.shapes]
        return torch.cat(parts, 1).cpu()
