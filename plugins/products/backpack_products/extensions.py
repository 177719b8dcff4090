"""The bases of extensions that read products: of first order, and of second order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from backpack_core.contract.bases import Candidate, base, judge
from backpack_core.contract.extension import Extension, FailMode
from backpack_core.errors import UsageError
from backpack_products.column_propagator import OutputGradient
from backpack_products.declarations import declared
from backpack_products.merging import OverBatches
from backpack_products.values import is_flag


@base
class FirstOrderExtension(Extension):
    """An extension of per-sample gradients: it reads the product with autograd's gradient.

    To write:
        ``read(product)``, with a single column: ``V = 1``.
    """

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to use. Default: all.
            savefield: Name of the attribute of parameters. Default: that of the class.
            fail_mode: See :class:`Extension`.
        """
        super().__init__(OutputGradient(as_subsampling(subsampling)), savefield, fail_mode)


@base
class SecondOrderExtension(Extension):
    """An extension of curvature: its propagator starts at an extended loss.

    To write:
        ``read(product)``, and an ``__init__`` that calls ``super().__init__(propagator)``.
    """


def as_subsampling(indices: Sequence[int] | None) -> tuple[int, ...] | None:
    """Normalise a ``subsampling`` argument.

    Args:
        indices: Indices of samples, or ``None`` for all. A sample may be named several times.

    Returns:
        A tuple of integers, or ``None``.

    Raises:
        UsageError: The argument is not a sequence of integers, or is empty.
    """
    if indices is None:
        return None
    try:
        result = tuple(operator.index(i) for i in indices)
    except TypeError:
        raise UsageError(f"subsampling must be a sequence of integers. Got {indices!r}.") from None
    if any(map(is_flag, indices)):
        raise UsageError(f"subsampling takes indices of samples, not a mask. Got {indices!r}.")
    if not result:
        raise UsageError("subsampling is empty: name at least one sample, or pass None for all.")
    return result


@judge
def _unknown_over_batches(candidate: Candidate) -> Iterator[str]:
    """Yields a sentence if an extension's class declares an unknown ``over_batches``."""
    cls = candidate.cls
    value = declared(cls).get("over_batches", "sum") if issubclass(cls, Extension) else "sum"
    is_known = isinstance(value, OverBatches) or callable(value)
    if not is_known and value not in ("sum", "concatenate"):
        what = "'sum', 'concatenate', a function of two tensors, or an OverBatches"
        yield f"over_batches must be {what}. Got {value!r}"
