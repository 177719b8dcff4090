"""The cases that authors give to the conformance kit, one for each configuration.

A case says how to build a layer, loss or extension, and its inputs. The kit decides what to check.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bases import vet
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import UsageError
from backpack_core.plugins.loading import ensure_loaded, missing
from backpack_core.plugins.registry import registry
from backpack_core.record.nested import iter_tensors
from backpack_core.testing.isolation import temporary_plugin
from backpack_core.testing.quantities import Quantity
from backpack_products.nested import map_tensors

T = TypeVar("T")

SAMPLES = 3
# The seed of every forward pass, so that random layers draw the same numbers each time.
FORWARD = 2


@dataclass(frozen=True)
class Tolerances:
    """Relative errors (relative to the largest entry) that checks allow.

    Attributes:
        float64: For exact quantities in double precision.
        float32: For single precision, compared with the oracle in double precision.
        bfloat16: For half precision (8 bits of mantissa), and autocast to it.
        standard_errors: For a sampled mean: its distance from the expectation.
    """

    float64: float = 1e-10
    float32: float = 1e-3
    bfloat16: float = 0.2
    standard_errors: float = 6.0


@dataclass(frozen=True)
class Arguments:
    """The arguments of a forward call that has keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Arguments:
        """The same arguments, with floating-point tensors in another dtype."""
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments, with a function applied to every tensor."""
        return Arguments(*map_tensors((self.args, dict(self.kwargs)), function))

    def map_numbered(self, function: Callable[[int, Tensor], Tensor]) -> Arguments:
        """The same arguments, with a function of each tensor and its position."""
        slots = count()
        return self.map(lambda tensor: function(next(slots), tensor))

    def tensors(self) -> list[Tensor]:
        """Every tensor, positional ones first."""
        return list(iter_tensors((self.args, dict(self.kwargs))))

    def apply(self, function: Callable[..., Any]) -> Any:
        """The value of a function for these arguments."""
        return function(*self.args, **self.kwargs)

    def call(self, function: Callable[..., Any]) -> Any:
        """The value of a forward pass, with the same random numbers each time."""
        return seeded(lambda: self.apply(function), FORWARD)


def seeded(function: Callable[[], T], seed: int) -> T:
    """Call a function with seeded generators, and restore their state.

    They are the host's, and that of the default device.
    """
    device = torch.get_default_device()
    others = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        torch.default_generator.manual_seed(seed)
        if others:
            getattr(torch, device.type).manual_seed(seed)
        return function()


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """Base class of all cases.

    Attributes:
        name: The name in the ids of the tests; default: derived from the object that is checked.
        expected_failures: Checks that are known to fail, each with the reason. If one of them
            passes, that is a failure.
        tolerances: The errors that are allowed.
    """

    kind: ClassVar[str]
    name: str = ""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=Tolerances)

    def __post_init__(self) -> None:
        """Refuse wrong arguments.

        Raises:
            UsageError: An object was given instead of a factory that makes it, or the quantity is
                not a :class:`Quantity`.
        """
        for name, value in vars(self).items():
            is_instance = isinstance(value, (Module, Extension, LayerRule)) or not callable(value)
            if name.endswith("_factory") and is_instance:
                wanted = f"{name} is a class or function that makes one each time: lambda: ..."
            elif name == "rule" and value is not None and not isinstance(value, type):
                wanted = "rule is a class"
            elif name == "quantity" and not isinstance(value, (Quantity, type(None))):
                wanted = "quantity is a Quantity: Quantity(lambda reference, name: ...)"
            else:
                continue
            raise UsageError(f"{type(self).__name__}: {wanted}. Got {value!r:.80}.")

    @abstractmethod
    def make(self) -> Module | Extension:
        """A fresh layer, loss or extension."""

    def label(self) -> str:
        """The given name; else the extension's name, or the module's representation on one line."""
        if self.name:
            return self.name
        made = self.make()
        is_module = isinstance(made, Module)
        text = "".join(repr(made).split()) if is_module else type(made).__name__
        return text if len(text) <= 72 else f"{text[:69]}..."


@dataclass(frozen=True, eq=False)
class RuleCase(Case):
    """A layer in one configuration.

    Example:
        >>> RuleCase(lambda: nn.Linear(4, 2), lambda n: torch.randn(n, 4))

    Attributes:
        module_factory: Makes the layer.
        input_factory: Makes the input for a number of samples: a tensor, a tuple of positional
            arguments, or :class:`Arguments`. Samples are on axis 0. Keep the input tiny, and other
            axes different from three, which is the number of samples.
        rule: The rule under test, if no installed plugin provides it.
        constants: Positions, among the tensors passed, of floating-point tensors that are not
            differentiated (a mask, for example).
        output_nr: The index of the output to differentiate, if there are several.
        twice_differentiable: Whether torch can differentiate the layer twice, so that there is an
            oracle for second derivatives. If not, torch must raise an error.
        overwrites_input: Whether the layer overwrites an input that its rule needs. The rule must
            then raise an error, and quantities go through the layer's autograd nodes instead.
    """

    kind: ClassVar[str] = "rule"
    module_factory: Callable[[], Module]
    input_factory: Callable[[int], Any]
    rule: type[LayerRule] | None = None
    constants: tuple[int, ...] = ()
    output_nr: int = 0
    twice_differentiable: bool = True
    overwrites_input: bool = False

    def make(self) -> Module:
        """A fresh layer, the same each time."""
        return seeded(self.module_factory, 0)

    def module(self, dtype: torch.dtype = torch.float64) -> Module:
        """A fresh layer in a dtype."""
        return self.make().to(dtype)

    def arguments(
        self, samples: int = SAMPLES, dtype: torch.dtype = torch.float64, seed: int = 1
    ) -> Arguments:
        """Fresh inputs, the same each time for one seed."""
        value = seeded(lambda: self.input_factory(samples), seed)
        if not isinstance(value, Arguments):
            value = Arguments(value if isinstance(value, tuple) else (value,))
        return value.to(dtype)

    def is_live(self, slot: int, tensor: Tensor) -> bool:
        """Whether the tensor at a position is differentiated."""
        return tensor.is_floating_point() and slot not in self.constants

    def resolve(self, module: Module) -> LayerRule:
        """The rule for the case's module.

        Raises:
            MissingPluginError: There is no rule.
        """
        resolved = registry.resolve(module)
        if resolved.is_fallback:
            raise missing(
                f"No rule speaks for {type(module).__name__}: pass rule=... to RuleCase, or name "
                "it in [project.entry-points.backpack] of its package, and pip install that again.",
                type(module),
            )
        return resolved.rule


@dataclass(frozen=True, eq=False)
class LossCase(Case):
    """A loss in one configuration, in every reduction.

    Example:
        >>> LossCase(nn.MSELoss, lambda n: (torch.randn(n, 2), torch.randn(n, 2)))

    Attributes:
        loss_factory: Makes the loss; called with ``reduction=...``.
        input_factory: Makes prediction, target and further arguments for a number of samples.
        rule: The rule under test, if no installed plugin provides it.
        samples: Number of columns that are drawn to check a sampled root in expectation.
        sampled: Whether the loss has a sampled root; if not, asking for it must raise.
    """

    kind: ClassVar[str] = "loss"
    loss_factory: Callable[..., Module]
    input_factory: Callable[[int], Any]
    rule: type[LayerRule] | None = None
    samples: int = 20_000
    sampled: bool = True

    def make(self) -> Module:
        """The loss with reduction ``"mean"``."""
        return self.as_rule_case("mean").make()

    def as_rule_case(self, reduction: str) -> RuleCase:
        """The loss as a layer, for what layers and losses share; its first input is live alone."""
        make, others = partial(self.loss_factory, reduction=reduction), tuple(range(1, 16))
        return RuleCase(make, self.input_factory, rule=self.rule, constants=others)


@dataclass(frozen=True, eq=False)
class ExtensionCase(Case):
    """An extension with the formula of its quantity.

    Example:
        >>> ExtensionCase(BatchGrad, Quantity(lambda reference, name: reference.gradients(name)))

    Attributes:
        extension_factory: Makes the extension; called with ``subsampling=...`` if it takes that.
        quantity: What it computes; default: what its package registers for its save field, in a
            module ``oracles``.
        loss: The loss of the kit's nets, for example one with labels (``LABELLED``); default: one
            that depends on the prediction alone.
    """

    kind: ClassVar[str] = "extension"
    extension_factory: Callable[..., Extension]
    quantity: Quantity | None = None
    loss: LossCase | None = None

    def __post_init__(self) -> None:
        """Refuse wrong arguments, and give the class those of its quantity."""
        super().__post_init__()
        given = self.quantity.arguments if self.quantity else {}
        if given and isinstance(self.extension_factory, type):
            vars(self).update(extension_factory=partial(self.extension_factory, **given))

    def make(self) -> Extension:
        """The extension with default arguments."""
        if getattr(self.extension_factory, "__abstractmethods__", ()):
            vet(cast(type, self.extension_factory))  # Python does not say what was misspelt
        return self.extension_factory()


@contextmanager
def installed(case: Case) -> Iterator[None]:
    """Register the case's rule inside the block, unless a plugin provides it. May be nested."""
    ensure_loaded()
    rule = getattr(case, "rule", None)
    provided = {type(claim.value) for claims in registry.rules.values() for claim in claims}
    with temporary_plugin(*(() if rule is None or rule in provided else (rule,))):
        yield
