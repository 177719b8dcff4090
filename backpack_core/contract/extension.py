"""Extensions: which result is read at every parameter, and under which name it is stored.

An extension is *what travels backwards* (its propagator) times *what is read at a parameter*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bases import base
from backpack_core.contract.carrier import CarrierOf
from backpack_core.contract.loss import Normaliser
from backpack_core.contract.observer import Observer
from backpack_core.contract.operation import Operation
from backpack_core.contract.propagator import Propagator
from backpack_core.errors import UsageError

FailMode: TypeAlias = Literal["error", "warning", "silent", "autodiff"]


@base
class Extension(ABC):
    """A quantity computed during the backward pass and stored on every parameter.

    Class attributes:
        savefield: Name of the attribute that parameters get.
        needs: The operations that :meth:`read` asks for. The engine knows them for all extensions
            of a pass beforehand, so that what is formed for one serves the others.
        columns_add: Whether values for disjoint sets of columns can be combined by :meth:`combine`,
            so that columns may go through the net in chunks.
        columns_mix: Whether values depend on the columns through ``Σ_v M[v, n] ⊗ M[v, n]`` only, so
            that other columns, or fewer, with the same sum may take their place.
        per_sample: Whether the result is as large as individual gradients. Combining chunks then
            takes as long as computing them, so columns may take as much memory as the result.
        sums_samples: Whether the value is a sum over samples and columns of what is read of each,
            so that it does not matter which rows are one sample's.
        is_deferred: Whether nothing can be stored before the backward pass has ended. What
            :meth:`read` returns is then handed to :meth:`finish`.
        keeps_graph: Whether results use the graph of the pass later on, so that it is not freed.
        needs_every_parameter: Whether the result means nothing if a trained parameter of the model
            is left out, as with a bound on the norm of all of them.
        needs_normalisers: Whether :meth:`finish` needs to know what the extended losses divide by.
            Then ``backward()`` has to be called on a weighted sum of them.
        unless_told: If ``needs_normalisers``: what to write instead where that is not known, as a
            sentence.
        is_of_everything: Whether the value is one of all that ``backward()`` is called on. Then a
            term in ``backpack(..., beside=[...])`` would belong to it, too, but no rule knows the
            term.
        is_whole: Whether nothing is read at parameters: :meth:`attend` makes an observer of the
            pass, which has the results, and sees to what its propagator asks for.
        is_of_losses: If ``is_whole``: whether the result belongs to the extended losses, so that
            ``backward()`` has to be called on a weighted sum of them; else it belongs to whatever
            that is called on.
        degree: The power of the loss's scale in a value: 1 for gradients and curvature, 2 for their
            squares; ``None`` if there is none, as with a threshold.
        without_degree: If ``degree`` is ``None``: what to do instead of scaling a value, as a
            sentence.
        over_batches: How values of disjoint batches combine: ``"sum"``, ``"concatenate"`` (samples
            on axis 0), a function of two tensors, or what :mod:`backpack_products.merging` has for
            values that are not a single tensor. By default, they do not.

    Attributes:
        propagator: What travels backwards for this extension.
        fail_mode: What happens at a module whose type has no rule: ``"autodiff"`` looks at its
            parameters where operations use them, as autograd differentiates these (exact),
            ``"error"`` raises, ``"warning"`` and ``"silent"`` leave its parameters out.
        chunk_size: How many columns to carry at once; ``None`` leaves it to the memory budget.
        carriers: Functions that make a :class:`~backpack_core.Carrier` instead of the layer
            rule, by module type; for this instance only.

    To write:
        ``read(product)``: the value of one parameter, from what the propagator found there. An
        ``__init__`` calls ``super().__init__(...)``.
    """

    savefield: str = ""
    needs: tuple[Operation[Any], ...] = ()
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
        self.carriers: dict[type[Module], CarrierOf] = {}

    def __repr__(self) -> str:
        """The class, where it saves, and what travels."""
        settings = [f"{n}={vars(self).get(n)!r}" for n in ("savefield", "propagator")]
        return f"{type(self).__name__}({', '.join(settings)})"

    @abstractmethod
    def read(self, product: Any) -> Any:
        """Compute the quantity of one parameter.

        Args:
            product: What the propagator found there: ``M[v, n] = J_θ[n]ᵀ mat[v, n]`` in some form,
                or another :class:`~backpack_core.Reading`.

        Returns:
            The value to store; not to share memory with anything. Only the engine writes to
            parameters.
        """

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """The dtype that a result is stored in; default: the parameter's."""
        return parameter.dtype

    def as_stored(self, value: Any, parameter: Tensor) -> Any:
        """A value in the dtype that it is stored in: under autocast it was computed in another."""
        dtype = self.dtype_for(parameter)
        is_so = not isinstance(value, Tensor) or value.dtype is dtype
        return value if is_so else value.to(dtype)

    def combine(self, first: Any, second: Any) -> Any:
        """The value for all columns, from those of two disjoint sets; see ``columns_add``."""
        return first + second

    def finish(
        self, values: Mapping[Tensor, Any], normalisers: Sequence[Normaliser]
    ) -> Mapping[Tensor, Any]:
        """What to store, once the backward pass is through; called only if ``is_deferred``.

        Args:
            values: What :meth:`read` returned last, by parameter.
            normalisers: What each extended loss divides by, if ``needs_normalisers``.

        Returns:
            The values to store.
        """
        return values

    def attend(self, run: Any) -> Observer:
        """Attend a backward pass; called if ``is_whole``, when that begins.

        Args:
            run: The :class:`~backpack_core.engine.backward.BackwardPass`.
        """
        raise NotImplementedError

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
