"""Readings: what a propagator finds at a parameter, and extensions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError
from backpack_core.record.call import path_of
from backpack_core.record.guards import Versions, versions_in

# The attributes that the engine sets.
_OF_ENGINE = "name module parameter rule needs call_cache column_cache is_measured is_part"


class Reading:
    """What a propagator finds at a parameter, for extensions to read.

    Attributes:
        shape: Shape of the parameter, ``[*θ]``.
        name: The parameter's name in its module.
        module: The module.
        parameter: The parameter that results are stored on; set when an extension reads.
        rule: The class of the rule that made the reading, for messages.
        needs: The operations that extensions will call, so that one can prepare for another.
        is_measured: Whether extensions may look at values, as for :attr:`View.is_measured`.
        is_part: Whether it belongs to a chunk of columns that reached only some uses of the
            parameter.
        results: Cached results of operations.
        made: The tensors among the results, with their version counters.
        call_cache: Values computed from the call alone, for all of its columns.
        column_cache: Values that all parameters of the call share, for the same columns.
    """

    name: str = ""
    module: Module | None = None
    parameter: Tensor | None = None
    rule: type = object
    needs: frozenset[Any] = frozenset()
    is_measured: bool = True
    is_part: bool = False

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.results: dict[Any, Any] = {}
        self.made: list[tuple[Tensor, int]] = []
        self.call_cache: dict[Any, Any] = {}
        self.column_cache: dict[Any, Any] = {}

    @property
    def path(self) -> str:
        """The path of the module, for messages."""
        return "" if self.module is None else path_of(self.module)

    def placed_as(self, other: Reading) -> Self:
        """Itself, after taking over what the engine set on another reading (module, name, rule)."""
        for name in _OF_ENGINE.split():
            setattr(self, name, getattr(other, name))
        return self

    def held(self) -> Versions:
        """The tensors that it consists of, with their version counters."""
        return versions_in(self)

    def lasting(self) -> Any:
        """The reading in a form that is valid after the graph is freed. Default: itself."""
        return self

    def of_samples(self, samples: int, kept: dict[Any, Any]) -> Any:
        """The reading with one row for each sample, of a call with several entries per sample.

        Default: itself.

        Args:
            samples: The number of samples.
            kept: The view's ``call_cache``, to which values may be added.
        """
        return self

    def at_leaf(self, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]) -> Any:
        """The reading at a leaf tensor that a module's parameter was computed from.

        Args:
            source: The computed parameter that the module used.
            leaf: The leaf that the result is stored on.
            pull: Pulls columns ``[K, *source]`` back to the leaf, ``[K, *leaf]``.

        Raises:
            UnsupportedError: The reading exists only for parameters that a module uses unchanged.
        """
        raise UnsupportedError(
            f"The parameter {self.name!r} of {self.path} is computed from others (by a "
            f"parametrization, or in a hook), and {type(self).__name__} exists only for "
            "parameters that a module uses unchanged. Remove the parametrization, or leave the "
            "extension out."
        )

    def join(self, others: Sequence[Any]) -> Any:
        """One reading for a parameter with several uses, from this one and those of later visits.

        Raises:
            UnsupportedError: There is no such reading.
        """
        raise UnsupportedError(
            f"The parameter {self.name!r} of {self.path} is used {1 + len(others)} times, and "
            f"{type(self).__name__} has no meaning there: leave the extension out, or untie the "
            "parameter."
        )
