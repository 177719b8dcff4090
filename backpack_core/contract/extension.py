"""Extensions: which result is computed for each parameter, and the name under which it is stored.

An extension combines *what travels backwards* (its propagator) with *what is read at a parameter*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bases import base
from backpack_core.contract.observer import Observer
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import Normaliser
from backpack_core.errors import UsageError

FailMode: TypeAlias = Literal["error", "warning", "silent", "autodiff"]


@base
class Extension(ABC):
    """A quantity that is computed during the backward pass and stored on every parameter.

    Class attributes:
        savefield: Name of the attribute that parameters get.
        needs: The operations that :meth:`read` calls. The engine knows those of all extensions
            before a pass, so that intermediate results of one can serve others.
        columns_add: Whether :meth:`combine` can combine values for disjoint sets of columns, so
            that columns may go through the net in chunks.
        columns_mix: Whether values depend on the columns only through ``Σ_v M[v, n] ⊗ M[v, n]``,
            so that other columns (or fewer) with the same sum may replace them.
        per_sample: Whether the result is as large as individual gradients. Then columns may take
            as much memory as the result, since combining chunks takes as long as computing them.
        sums_samples: Whether the value is a sum of terms for each sample and column, so that it
            does not matter which rows belong to the same sample.
        is_deferred: Whether results are known only after the backward pass. What :meth:`read`
            returns is then passed to :meth:`finish`.
        keeps_graph: Whether results use the graph after the pass, so that it must not be freed.
        needs_every_parameter: Whether the result is meaningless if a trained parameter of the
            model is left out, as a bound on the norm of all of them is.
        needs_normalisers: Whether :meth:`finish` needs the number that each extended loss divides
            by. ``backward()`` must then be called on a weighted sum of these losses.
        unless_told: If ``needs_normalisers``: what to write if the number is not known, as a
            sentence.
        is_of_everything: Whether the value belongs to everything that ``backward()`` is called on,
            including terms in ``backpack(..., beside=[...])``, for which there is no rule.
        is_whole: Whether nothing is read at parameters. :meth:`attend` then makes an observer of
            the pass, which computes the results and provides what the propagator needs.
        is_of_losses: If ``is_whole``: whether the result belongs to the extended losses, so that
            ``backward()`` must be called on a weighted sum of them. Otherwise it belongs to
            whatever ``backward()`` is called on.
        degree: How values scale with the loss: as its power ``degree``. It is 1 for gradients and
            curvature, 2 for their squares, and ``None`` if no power describes it, as for a
            threshold.
        without_degree: If ``degree`` is ``None``: what to do instead of scaling a value, as a
            sentence.
        over_batches: How values of disjoint batches combine: ``"sum"``, ``"concatenate"`` (samples
            on axis 0), a function of two tensors, or a declaration of
            :mod:`backpack_products.merging` for values of several tensors. Default: they do not
            combine.

    Attributes:
        propagator: What travels backwards for this extension.
        fail_mode: What happens at a module whose type has no rule. ``"autodiff"`` reads its
            parameters at the operations that use them, as autograd does (exact); ``"error"``
            raises; ``"warning"`` and ``"silent"`` leave its parameters out.
        chunk_size: How many columns to propagate at once; ``None`` leaves it to the memory budget.
        carriers: Functions that make a :class:`~backpack_operations.carrier.Carrier` instead of
            the layer rule, by module type; for this instance only.

    To write:
        ``read(product)``: the value of one parameter, from what the propagator found there. An
        ``__init__`` calls ``super().__init__(...)``.
    """

    savefield: str = ""
    needs: tuple[Any, ...] = ()
    columns_add: ClassVar[bool] = False
    columns_mix: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False
    sums_samples: ClassVar[bool] = False
    is_deferred: bool = False
    keeps_graph: ClassVar[bool] = False
    needs_every_parameter: ClassVar[bool] = False
    needs_normalisers: bool = False
    unless_told: ClassVar[str] = ""
    is_of_everything: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False
    is_of_losses: bool = False
    degree: float | None = None
    without_degree: ClassVar[str] = "it declares none. Scale the loss instead."
    over_batches: Any = None
    chunk_size: int | None = None

    def __init__(
        self,
        propagator: Propagator,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            propagator: What travels backwards.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See the class.

        Raises:
            UsageError: The fail mode is unknown, or there is no name to save under.
        """
        if fail_mode not in get_args(FailMode):
            raise UsageError(f"fail_mode must be one of {get_args(FailMode)}. Got {fail_mode!r}.")
        self.savefield = savefield or type(self).savefield
        if not (isinstance(self.savefield, str) and self.savefield.isidentifier()):
            raise UsageError(
                f"{type(self).__name__} needs a savefield that is a Python identifier. "
                f"Got {self.savefield!r}."
            )
        if hasattr(Tensor, self.savefield):
            raise UsageError(
                f"{type(self).__name__} would hide torch.Tensor.{self.savefield} of the "
                "parameters: give it another savefield."
            )
        if not isinstance(propagator, Propagator) or not _has_hash(propagator):
            raise UsageError(
                f"{type(self).__name__} needs a propagator: an instance of a frozen dataclass "
                "derived from Propagator, with fields that can be hashed (a tuple instead of "
                f"a list). Got {propagator!r}."
            )
        self.propagator = propagator
        self.fail_mode: FailMode = fail_mode
        self.carriers: dict[type[Module], Callable[..., Any]] = {}

    def __repr__(self) -> str:
        """The class, where it saves, and what travels."""
        settings = [f"{n}={vars(self).get(n)!r}" for n in ("savefield", "propagator")]
        return f"{type(self).__name__}({', '.join(settings)})"

    @abstractmethod
    def read(self, product: Any) -> Any:
        """Compute the quantity of one parameter.

        Args:
            product: The reading of the propagator: ``M[v, n] = J_θ[n]ᵀ mat[v, n]`` in some form, or
                another :class:`~backpack_core.Reading`.

        Returns:
            The value to store. It must not share memory with anything else. Only the engine writes
            to parameters.
        """

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """The dtype that a result is stored in; default: the parameter's."""
        return parameter.dtype

    def as_stored(self, value: Any, parameter: Tensor) -> Any:
        """A value in the dtype that it is stored in; under autocast it was computed in another."""
        dtype = self.dtype_for(parameter)
        is_rounded = isinstance(value, Tensor) and value.is_floating_point()  # indices are exact
        return value.to(dtype) if is_rounded and value.dtype is not dtype else value

    def combine(self, first: Any, second: Any) -> Any:
        """The value for two disjoint sets of columns, from those of each; see ``columns_add``."""
        return first + second

    def finish(
        self, values: Mapping[Tensor, Any], normalisers: Sequence[Normaliser]
    ) -> Mapping[Tensor, Any]:
        """The values to store, after the backward pass; called only if ``is_deferred``.

        Args:
            values: What :meth:`read` returned, by parameter.
            normalisers: The number that each extended loss divides by, if ``needs_normalisers``.

        Returns:
            The values to store.
        """
        return values

    def attend(self, run: Any) -> Observer:
        """The observer of a backward pass that computes the results; called only if ``is_whole``.

        Args:
            run: The :class:`~backpack_core.engine.backward.BackwardPass`, which begins.

        Raises:
            NotImplementedError: The class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.is_whole is true, so nothing is read at parameters, and "
            "attend(run) must return an observer. Write attend, or give the attribute another name."
        )

    @property
    def subsampling(self) -> tuple[int, ...] | None:
        """The samples that take part, ``None`` for all."""
        return self.propagator.subsampling


def _has_hash(propagator: Propagator) -> bool:
    try:
        hash(propagator)
    except TypeError:
        return False
    return True
