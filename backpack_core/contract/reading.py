"""Readings: what extensions read at a parameter, whatever travels. Imports ``record``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError
from backpack_core.record.call import path_of
from backpack_core.record.untouched import Versions, versions_in

# The attributes that the engine sets.
_OF_ENGINE = "name module parameter rule needs call_cache column_cache is_measured"


class Reading:
    """What a propagator finds at a parameter, for extensions to read.

    Attributes:
        shape: Shape of the parameter, ``[*θ]``.
        name: The name of the parameter in its module.
        module: The module.
        parameter: What results are stored on; known when an extension reads.
        rule: The class of the rule that made it, for messages.
        needs: The operations that extensions will ask for, so that one can serve another.
        is_measured: Whether extensions may look at values, as :attr:`View.is_measured` says.
        results: What operations have computed, for whoever asks next.
        made: The tensors among the results, with their versions.
        kept: What was computed from the call alone, for all of its columns.
        beside: What the parameters of a call share for the same columns.
    """

    name: str = ""
    module: Module | None = None
    parameter: Tensor | None = None
    rule: type = object
    needs: frozenset[Any] = frozenset()
    is_measured: bool = True

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
        """This reading, with the place (module, name, rule) of another one."""
        for name in _OF_ENGINE.split():
            setattr(self, name, getattr(other, name))
        return self

    def held(self) -> Versions:
        """The tensors that it is made of, with their versions."""
        return versions_in(self)

    def lasting(self) -> Any:
        """The reading in a form that outlives the graph of the pass. Default: itself."""
        return self

    def of_samples(self, samples: int, kept: dict[Any, Any]) -> Any:
        """The reading at a call that had several entries of axis 0 for each sample.

        Default: itself.

        Args:
            samples: How many samples there are.
            kept: What was computed from the call alone, and may be added to.
        """
        return self

    def at_leaf(self, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]) -> Any:
        """The reading at a leaf that a module's parameter was computed from.

        Args:
            source: What the module used.
            leaf: What the result is stored on.
            pull: Carries columns ``[K, *source]`` back to the leaf, ``[K, *leaf]``.

        Raises:
            UnsupportedError: It exists for parameters that a module uses as they are.
        """
        raise UnsupportedError(
            f"The parameter {self.name!r} of {self.path} is computed from others (by a "
            f"parametrization, or in a hook), and {type(self).__name__} exists for parameters "
            "that a module uses as they are. Remove the parametrization, or leave the extension "
            "out."
        )

    def join(self, others: Sequence[Any]) -> Any:
        """One reading for a parameter with several uses, from this one and those of later visits.

        Raises:
            UnsupportedError: It has no meaning.
        """
        raise UnsupportedError(
            f"The parameter {self.name!r} of {self.path} is used {1 + len(others)} times, and "
            f"{type(self).__name__} has no meaning there: leave the extension out, or untie the "
            "parameter."
        )
