"""Base classes of third-party extensions, on the core's extensions. Imports backpack_core.

Every extension of the core is a virtual subclass of the base classes here, so ``isinstance`` gives
what scripts expect.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.nn import Module

from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.saved_quantities import SavedQuantities
from backpack_core import Extension, LayerRule, LossRule, Propagator, View
from backpack_core.contract.extension import FailMode
from backpack_core.contract.propagator import Reading
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_products import FirstOrderExtension, SecondOrderExtension
from backpack_products.column_propagator import OutputGradient
from backpack_products.extensions import as_subsampling
from backpack_secondorder.whole import GraphExtension

FAIL_ERROR = "ERROR"
FAIL_WARN = "WARNING"
FAIL_SILENT = "SILENT"

# With "autodiff", modules without a layer rule reach the extension: an extension with a table
# raises its own error, and one of the core is exact or raises an error.
_FAIL_MODES: dict[str, FailMode] = {
    FAIL_ERROR: "autodiff",
    FAIL_WARN: "warning",
    FAIL_SILENT: "silent",
}

__all__ = ["BackpropExtension", "FirstOrderBackpropExtension", "SecondOrderBackpropExtension"]


class BackpackNames(Extension):
    """The further methods that every extension has in the incumbent."""

    _saved: SavedQuantities | None = None
    _told_mode: str | None = None

    @property
    def saved_quantities(self) -> SavedQuantities:
        """A store for whatever an extension wants to keep."""
        if self._saved is None:
            self._saved = SavedQuantities()
        return self._saved

    def get_subsampling(self) -> list[int] | None:
        """The samples that take part as a list, ``None`` for all."""
        return None if self.subsampling is None else list(self.subsampling)

    @property
    def _subsampling(self) -> list[int] | None:
        return self.get_subsampling()

    @property
    def _fail_mode(self) -> str:
        """What happens at a module without a rule; by default, as in the incumbent."""
        default = FAIL_ERROR if self.expects_backpropagation_quantities() else FAIL_WARN
        return self._told_mode or default

    @_fail_mode.setter
    def _fail_mode(self, mode: str) -> None:
        if mode not in _FAIL_MODES:
            raise AssertionError(f"no valid fail mode: {mode}")
        self._told_mode, self.fail_mode = mode, _FAIL_MODES[mode]

    def expects_backpropagation_quantities(self) -> bool:
        """Whether something beside the gradient travels backwards."""
        return not isinstance(self.propagator, OutputGradient) or self.is_whole

    @property
    def module_extensions(self) -> dict[type[Module], ModuleExtension]:
        """The module extensions of this instance, by type of module."""
        found: dict[type[Module], Any] = self.carriers
        return {kind: carrier.__self__ for kind, carrier in found.items()}

    def set_module_extension(
        self, module: type[Module], extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Use a module extension for one type of module, in this instance only.

        Args:
            module: The module's class; subclasses are not meant.
            extension: What computes the quantity there.
            overwrite: Whether a previous choice, or a layer rule, may be replaced.

        Raises:
            UsageError: An argument has the wrong type, or the module type has a module extension or
                a layer rule already.
        """
        if not (isinstance(module, type) and issubclass(module, Module)):
            raise UsageError(f"module must be a subclass of torch.nn.Module. Got {module!r}.")
        if not isinstance(extension, ModuleExtension):
            raise UsageError(f"extension must be a ModuleExtension. Got {extension!r}.")
        if self.has_rule_for(module) and not overwrite:
            raise UsageError(
                f"{type(self).__name__} is computed by a layer rule at {module.__name__}, exactly: "
                "pass overwrite=True to replace it by the module extension."
            )
        if module in self.carriers and not overwrite:
            raise UsageError(
                f"{type(self).__name__} has a module extension for {module.__name__} already: pass "
                "overwrite=True to replace it."
            )
        self.carriers[module] = extension.carrier

    def has_rule_for(self, module_type: type[Module]) -> bool:
        """Whether a layer rule already computes the quantity at a type of module."""
        ensure_loaded()
        return not registry.resolve_type(module_type).is_fallback

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Combine quantities of two branches; for the core's extensions the engine does this."""
        return self.propagator.merge(existing, other)


class BackpackGraphNames(BackpackNames, GraphExtension):
    """The same for extensions that are read from the graph of the loss."""

    def set_module_extension(self, *args: Any, **kwargs: Any) -> None:
        """Accepted and ignored: the graph gives exact results for every module."""


class HandedOn(Propagator):
    """Propagates the values that module extensions of a third-party extension return."""

    def __init__(self, extension: BackpropExtension, subsampling: tuple[int, ...] | None) -> None:
        self.extension = extension
        self.subsampling = subsampling

    def __repr__(self) -> str:
        return f"the quantity of {type(self.extension).__name__}"

    def start(self, rule: LossRule, view: View) -> Any:
        """A loss without a module extension starts nothing."""
        self.extension.missing(view)

    def propagate(self, rule: LayerRule, view: View, quantity: Any) -> dict[int, Any]:
        """A module without a module extension stops the quantity."""
        self.extension.missing(view)
        return {}

    def products(self, rule: Any, view: View, names: Sequence[str], quantity: Any) -> list[Reading]:
        """Never read: only module extensions compute results."""
        return [Reading(view.parameter_itself(name).shape) for name in names]

    def merge(self, first: Any, second: Any) -> Any:
        """By the extension's ``accumulate_backpropagated_quantities``."""
        return self.extension.accumulate_backpropagated_quantities(first, second)


class BackpropExtension(BackpackNames):
    """An extension given by a table of module extensions.

    Every extension of the core is a virtual subclass.
    """

    core_base: ClassVar[type] = Extension

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension],
        fail_mode: str = FAIL_ERROR,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute on parameters.
            module_exts: A module extension for each module class.
            fail_mode: What happens at a module whose class is not in the table: ``"ERROR"`` raises
                ``NotImplementedError``, ``"WARNING"`` warns, ``"SILENT"`` goes on.
            subsampling: Indices of the samples to take; default: all.

        Raises:
            AssertionError: The fail mode is unknown.
        """
        samples = as_subsampling(subsampling)
        hands_on = self.expects_backpropagation_quantities()
        propagator = HandedOn(self, samples) if hands_on else OutputGradient(samples)
        super().__init__(propagator, savefield)
        self._fail_mode = fail_mode
        self.carriers = {kind: found.carrier for kind, found in module_exts.items()}

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Extensions of the core count, by their base class there."""
        is_base = "core_base" in cls.__dict__
        return True if is_base and cls.core_base in other.__mro__ else NotImplemented

    def has_rule_for(self, module_type: type[Module]) -> bool:
        """Never: only the table of module extensions counts."""
        return False

    @abstractmethod
    def expects_backpropagation_quantities(self) -> bool:
        """Whether something beside the gradient travels backwards."""

    def read(self, product: Any) -> Any:
        """Only called if the table has no entry.

        Raises:
            UnsupportedError: Always; the fail mode says what happens then.
        """
        raise self._error(product.module)

    def missing(self, view: View) -> None:
        """Raise, warn, or go on at a module that is not in the table, by the fail mode."""
        if self._fail_mode == FAIL_ERROR:
            raise self._error(view.call.module)

    def _error(self, module: Module | None) -> UnsupportedError:
        return UnsupportedError(
            f"Extension saving to {self.savefield} does not have an extension for Module "
            f"{type(module)}: add one to its table, or with set_module_extension."
        )

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Combine the quantities that reach a tensor over two branches.

        Raises:
            NotImplementedError: Not overridden.
        """
        raise NotImplementedError(f"{self}: No accumulation rule for backpropagated info specified")


class FirstOrderBackpropExtension(BackpropExtension):
    """A first-order extension given by a table: only the gradient travels."""

    core_base = FirstOrderExtension

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension],
        fail_mode: str = FAIL_WARN,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        """See :class:`BackpropExtension`."""
        super().__init__(savefield, module_exts, fail_mode=fail_mode, subsampling=subsampling)

    def expects_backpropagation_quantities(self) -> bool:
        """It does not."""
        return False


class SecondOrderBackpropExtension(BackpropExtension):
    """A second-order extension given by a table: its module extensions hand on a quantity."""

    core_base = SecondOrderExtension

    def expects_backpropagation_quantities(self) -> bool:
        """It does."""
        return True
