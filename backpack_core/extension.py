"""Base classes of extensions and propagators. Imports torch and core's contract, never the engine.

An extension is *what travels backwards* (its propagator) times *what is read off at a parameter*.
"""

from __future__ import annotations

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import bridge
from backpack_core.calls import ModuleCall, Node
from backpack_core.columns import Columns
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.hookspecs import hookimpl
from backpack_core.loss_rule import LossRule
from backpack_core.module_extension import ModuleExtension
from backpack_core.rules import LayerRule

FailMode: TypeAlias = Literal["error", "warning", "silent", "autodiff"]


class Propagator(ABC):
    """What travels backwards, and how it starts at a loss.

    Extensions with equal propagators share one quantity: it is started and pushed once per backward
    pass. So a propagator is a value: a frozen dataclass, say ``LossSqrt(samples=1)``. The type of
    the quantity is the propagator's own business.

    Attributes:
        subsampling: The samples that take part, ``None`` for all. The engine hands every method a
            call that shows those samples only.
    """

    subsampling: tuple[int, ...] | None = None

    @classmethod
    @hookimpl
    def backpack_propagators(cls) -> Iterable[type[Propagator]]:
        """Hand this class to the registry: a propagator class is a plugin by itself."""
        return [cls]

    @abstractmethod
    def start(self, rule: LossRule, call: ModuleCall) -> Any:
        """The quantity at the first input of a loss.

        Args:
            rule: The loss's rule.
            call: The loss's forward execution, with the arriving gradient.
        """

    @abstractmethod
    def propagate(self, rule: LayerRule, call: ModuleCall, quantity: Any) -> dict[int, Any]:
        """Carry the quantity from the output of a call to its inputs.

        Args:
            rule: The layer's rule.
            call: The forward execution.
            quantity: The quantity at the output.

        Returns:
            The quantity at each differentiable input tensor, by position in ``call.inputs``.
        """

    def merge(self, first: Any, second: Any) -> Any:
        """The quantity at a tensor that several consumers reach; refused unless overridden.

        Raises:
            UnsupportedError: Always, here.
        """
        raise UnsupportedError(
            f"{self!r} cannot be added over branches: the net must be a chain of modules."
        )

    def widen(self, quantity: Any, batch_size: int) -> Any:
        """A quantity of the chosen samples as one of the whole batch: autograd nodes know no other.

        Undone by :meth:`narrow`. Only for propagators with ``subsampling``.
        """
        return quantity

    def narrow(self, quantity: Any) -> Any:
        """A quantity of the whole batch as one of the chosen samples."""
        return quantity

    def cross(
        self, node: Node, quantities: dict[int, Any], batch_size: int
    ) -> list[tuple[int, Any]]:
        """Carry quantities through an autograd node that no module call covers.

        Args:
            node: The autograd node, not yet executed.
            quantities: What arrived, by output number of the node, for the whole batch.
            batch_size: Number of samples of this backward pass.

        Returns:
            Pairs (position in ``node.next_functions``, quantity).

        Raises:
            BridgeError: The quantity cannot be carried through this node exactly.
        """  # noqa: DOC202 - what an override returns
        raise bridge.refuse(node, f"{self!r} only passes through modules with a layer rule")

    def move_batch_axis(self, quantity: Any, axis: int) -> Any:
        """The quantity at an output whose samples lie on another axis, with that axis in front.

        Raises:
            UnsupportedError: Always, here.
        """
        raise UnsupportedError(f"{self!r} needs the samples on axis 0 of every output.")

    def present(self, quantity: Any) -> Any:
        """What :meth:`Extension.read` sees of a quantity."""
        return quantity

    def adopt(self, value: Any, like: Any) -> Any:
        """Turn what a :class:`ModuleExtension` returned from ``backpropagate`` into a quantity."""
        return value


class ColumnPropagator(Propagator):
    """A propagator whose quantity is :class:`~backpack_core.columns.Columns`, pushed by ``Jᵀ``.

    Extensions read it as one tensor ``mat`` of shape ``[V, N, *out]``.
    """

    def propagate(self, rule: LayerRule, call: ModuleCall, quantity: Columns) -> dict[int, Columns]:
        """One transposed Jacobian product for all columns."""
        products = rule.jac_t_mat_prod(call, quantity.mat)
        return {i: quantity.split(p) for i, p in enumerate(products) if p is not None}

    def merge(self, first: Columns, second: Columns) -> Columns:
        """Sum root by root."""
        return first.merge(second)

    def widen(self, quantity: Columns, batch_size: int) -> Columns:
        """Zeros for the samples that were left out."""
        mat = quantity.mat
        if self.subsampling is None:
            return quantity
        whole = mat.new_zeros(len(mat), batch_size, *mat.shape[2:])
        whole[:, list(self.subsampling)] = mat
        return quantity.split(whole)

    def narrow(self, quantity: Columns) -> Columns:
        """The chosen samples."""
        if self.subsampling is None:
            return quantity
        return quantity.map(lambda mat: mat[:, list(self.subsampling or ())])

    def cross(
        self, node: Node, quantities: dict[int, Columns], batch_size: int
    ) -> list[tuple[int, Columns]]:
        """Call the node under vmap over the columns."""
        return bridge.cross_columns(node, quantities)

    def move_batch_axis(self, quantity: Columns, axis: int) -> Columns:
        """``[V, *, N, *] → [V, N, *, *]``."""
        return quantity.map(lambda mat: mat.movedim(axis + 1, 1))

    def present(self, quantity: Columns) -> Any:
        """All columns as one tensor ``[V, N, *out]``."""
        return quantity.mat

    def adopt(self, value: Tensor, like: Columns | None) -> Columns:
        """Columns with the roots of ``like`` if their number is unchanged, else with a new one."""
        if like is not None and len(like.mat) == len(value):
            return like.split(value)
        return Columns.start(repr(self), value)


class OutputGradient(ColumnPropagator):
    """What first-order extensions read: the gradient at the output, as a single column."""

    def __init__(self, subsampling: tuple[int, ...] | None = None) -> None:
        """Store which samples take part."""
        self.subsampling = subsampling

    def __eq__(self, other: object) -> bool:
        """Equal to any other with the same samples."""
        return isinstance(other, OutputGradient) and other.subsampling == self.subsampling

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash((OutputGradient, self.subsampling))

    def start(self, rule: LossRule, call: ModuleCall) -> Columns:
        """Nothing starts at a loss: autograd carries the gradient itself."""
        raise UnsupportedError("The output gradient is autograd's own quantity.")


class Extension(ABC):
    """A quantity computed during the backward pass and stored on every parameter.

    Class attributes:
        savefield: Name of the attribute that parameters get.
        shared_parameters: Whether the quantity is a function of ``M = Σ_calls J_θᵀ mat`` alone, so
            that it has a meaning for a parameter that several calls use.
        columns_add: Whether values for disjoint sets of columns can be put together by
            :meth:`combine`, so that columns may go through the net in chunks.
        per_sample: Whether the result is as large as individual gradients. To put together chunks
            then takes as long as to compute them, so columns may take as much memory as the result.
        precedence: Extensions with a higher one read first, so that the others find what those had
            computed: 2 where :func:`ops.per_sample` is formed, 1 where
            :func:`ops.shared_moments` or :func:`ops.shared` is asked for a reduction.
        reads_quantity: Whether :meth:`read` wants the propagator's quantity itself (the
            :class:`~backpack_core.columns.Columns` with their roots, say) and not what
            :meth:`Propagator.present` makes of it.
        is_deferred: Whether nothing can be stored before the whole backward pass is through: then
            what :meth:`read` returns is handed to :meth:`finish`.

    Attributes:
        propagator: What travels backwards for this extension.
        fail_mode: What happens at a module whose type has no rule: ``"autodiff"`` differentiates it
            automatically (exact, slower), ``"error"`` raises, ``"warning"`` and ``"silent"`` leave
            its parameters out.
        chunk_size: How many columns to carry at once; ``None`` leaves it to the memory budget.
    """

    savefield: str = ""
    shared_parameters: ClassVar[bool] = True
    columns_add: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False
    precedence: ClassVar[int] = 0
    reads_quantity: ClassVar[bool] = False
    is_deferred: ClassVar[bool] = False
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
        if not self.savefield.isidentifier():
            raise UsageError(
                f"{type(self).__name__} needs a savefield that is a Python identifier. "
                f"Got {self.savefield!r}."
            )
        if hasattr(Tensor, self.savefield):
            raise UsageError(
                f"{type(self).__name__} would hide torch.Tensor.{self.savefield} of the "
                "parameters: give it another savefield."
            )
        self.propagator = propagator
        self.fail_mode: FailMode = fail_mode
        self.module_extensions: dict[type[Module], ModuleExtension] = {}

    @classmethod
    @hookimpl
    def backpack_extensions(cls) -> Iterable[type[Extension]]:
        """Hand this class to the registry: an extension class is a plugin by itself."""
        return [cls]

    @abstractmethod
    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Any) -> Any:
        """Compute the quantity of one parameter from what arrived at the call's output.

        Args:
            rule: How the module differentiates; dispatch on it with the functions of ``ops``.
            call: The forward execution, with only the chosen samples where subsampling is on.
            name: Name of the parameter.
            mat: What the propagator presents; for columns a tensor ``[V, N, *out]``.

        Returns:
            The value to store. Only the engine writes to parameters.
        """

    def combine(self, first: Any, second: Any) -> Any:
        """The value for all columns from those for two disjoint sets; see ``columns_add``."""
        return first + second

    def finish(self, values: Mapping[Parameter, Any]) -> Mapping[Parameter, Any]:
        """What to store, once the backward pass is through; called only if ``is_deferred``.

        Args:
            values: What :meth:`read` returned last for each parameter.

        Returns:
            The values to store.
        """
        return values

    @property
    def subsampling(self) -> tuple[int, ...] | None:
        """The samples that take part, ``None`` for all."""
        return self.propagator.subsampling

    def get_subsampling(self) -> list[int] | None:
        """The samples that take part as a list, ``None`` for all."""
        return None if self.subsampling is None else list(self.subsampling)

    def set_module_extension(
        self,
        module_type: type[Module],
        module_extension: ModuleExtension,
        overwrite: bool = False,
    ) -> None:
        """Use a module extension for one type of module, in this instance only.

        Args:
            module_type: The module's class; subclasses are not meant.
            module_extension: What computes the quantity there.
            overwrite: Whether a previous choice may be replaced.

        Raises:
            UsageError: An argument has the wrong type, or there is a choice already.
        """
        if not (isinstance(module_type, type) and issubclass(module_type, Module)):
            raise UsageError(
                f"module_type must be a subclass of torch.nn.Module. Got {module_type!r}."
            )
        if not isinstance(module_extension, ModuleExtension):
            raise UsageError(
                "module_extension must be an instance of ModuleExtension. "
                f"Got {module_extension!r}."
            )
        if module_type in self.module_extensions and not overwrite:
            raise UsageError(
                f"{type(self).__name__} has a module extension for {module_type.__name__} already: "
                "pass overwrite=True to replace it."
            )
        self.module_extensions[module_type] = module_extension


class FirstOrderExtension(Extension):
    """An extension of the individual gradients: nothing but the gradient itself travels."""

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`Extension`.
        """
        super().__init__(OutputGradient(as_subsampling(subsampling)), savefield, fail_mode)


class SecondOrderExtension(Extension):
    """An extension that needs a propagated quantity, started at an extended loss."""


def as_subsampling(indices: Sequence[int] | None) -> tuple[int, ...] | None:
    """Normalise a ``subsampling`` argument.

    Args:
        indices: Indices of samples, or ``None``.

    Returns:
        A tuple of integers, or ``None``.

    Raises:
        UsageError: The argument is no sequence of integers, is empty, or has repeated entries.
    """
    if indices is None:
        return None
    try:
        result = tuple(operator.index(i) for i in indices)
    except TypeError:
        raise UsageError(f"subsampling must be a sequence of integers. Got {indices!r}.") from None
    if any(isinstance(i, bool) or str(getattr(i, "dtype", "")) == "torch.bool" for i in indices):
        raise UsageError(f"subsampling takes indices of samples, not a mask. Got {indices!r}.")
    if not result:
        raise UsageError("subsampling is empty: name at least one sample, or pass None for all.")
    if len(set(result)) != len(result):
        raise UsageError(f"subsampling names a sample twice: {list(result)}.")
    return result


def warn_once(seen: set[Any], key: Any, message: str, category: type[Warning]) -> None:
    """Warn the first time ``key`` turns up in ``seen``."""
    if key not in seen:
        seen.add(key)
        warnings.warn(message, category, stacklevel=2)
