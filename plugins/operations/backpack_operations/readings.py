"""What is asked of readings outside of chains. A class of readings has these methods if it can.

``held()`` of :func:`backpack_products.held.held_by` is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backpack_core.contract.propagator import Reading
from backpack_core.errors import UnsupportedError


def of_samples(reading: Reading, samples: int, kept: dict[Any, Any]) -> Reading:
    """The reading with one row for each sample, of a call with several entries per sample.

    The reading itself, unless its class has a method ``of_samples(samples, kept)``.

    Args:
        reading: The reading.
        samples: The number of samples.
        kept: The view's ``call_cache``, to which values may be added.
    """
    own = getattr(reading, "of_samples", None)
    found: Reading = reading if own is None else own(samples, kept)
    return found.placed_as(reading)


def at_leaf(
    reading: Reading, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]
) -> Reading:
    """The reading at a leaf tensor that a module's parameter was computed from.

    Its class has a method ``at_leaf(source, leaf, pull)``.

    Args:
        reading: The reading of the computed parameter.
        source: The computed parameter that the module used.
        leaf: The leaf that the result is stored on.
        pull: Pulls columns ``[K, *source]`` back to the leaf, ``[K, *leaf]``.

    Raises:
        UnsupportedError: The reading exists only for parameters that a module uses unchanged.
    """
    own = getattr(reading, "at_leaf", None)
    if own is None:
        raise UnsupportedError(
            f"The parameter {reading.name!r} of {reading.path} is computed from others (by a "
            f"parametrization, or in a hook), and {type(reading).__name__} exists only for "
            "parameters that a module uses unchanged. Remove the parametrization, or leave the "
            "extension out."
        )
    found: Reading = own(source, leaf, pull)
    return found.placed_as(reading)


def joined(uses: list[Reading]) -> Reading:
    """One reading for all uses of a parameter; they are joined at the first call.

    The class of the readings has a method ``join(others)``, with the readings of later visits.

    Raises:
        UnsupportedError: There is no reading for several uses.
    """
    first, *others = uses
    if others:
        own = getattr(first, "join", None)
        if own is None:
            raise UnsupportedError(
                f"The parameter {first.name!r} of {first.path} is used {len(uses)} times, and "
                f"{type(first).__name__} has no meaning there: leave the extension out, or untie "
                "the parameter."
            )
        whole: Reading = own(others)
        # Not the class's own method: a product would take over the roots of one use.
        uses[:] = [Reading.placed_as(whole, others[-1])]
    return uses[0]
