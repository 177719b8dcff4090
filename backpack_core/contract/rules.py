"""The contract of layer rules: how one kind of layer differentiates; and that of losses.

A layer rule is written once, is stateless, and serves every extension. Public methods check shapes;
authors write the methods whose names start with an underscore. Axis letters: ``V`` columns, ``N``
samples, ``S`` shared positions, ``G`` groups, ``I`` and ``O`` features per group. Libraries have
base classes for layers with parameters or second derivatives. Quantities start at losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from reprlib import repr as abridged
from typing import Any, ClassVar, Final, TypeAlias

from torch import Size, Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.contract.bases import Candidate, base, judge
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_core.record.guards import ask
from backpack_core.record.view import View

ModuleType = type[Module] | str
MODULE_TYPES: Final = "torch.nn.Module classes or their qualified names ('package.module.Class')"


@base
class LayerRule(ABC):
    """How a layer ``x ↦ f(x)`` differentiates with respect to its input.

    Class attributes:
        module_types: The module classes that the rule is for, as classes or as qualified names
            (``"package.module.Class"``), so that a rule need not import a heavy library.
        params: Names of the parameters that the rule covers (dots allowed: ``"out_proj.weight"``).
            If a module has other trained parameters, all of them are read at the operations that
            use them.
        transparent: Whether quantities go through the autograd graph inside the module. Then
            ``_jac_t_mat_prod`` is never called, and submodules are visited on their own.
        is_loss: Whether quantities start here; see :class:`~backpack_core.LossRule`.
        reads_inside: Parameters whose gradient autograd may deliver at :meth:`node_inside`.
        calls_others: Whether methods call code of users, as a loss function that a module was made
            of. Nobody promises what that code depends on, so it is called in every pass.

    Properties that are not declared are assumed to be absent. The conformance kit checks each
    declaration.

    To write:
        ``_jac_t_mat_prod(view, mat)``: ``J_xᵀ mat``, ``[V, N, *out] → [V, N, *in]``; a tuple for
        several input tensors. Optional: ``check(view)``, ``mixes_samples(view)``,
        ``batch_axis(view, index)``, ``input_axis(view)``.
    """

    module_types: ClassVar[tuple[ModuleType, ...]] = ()
    params: ClassVar[tuple[str, ...]] = ()
    transparent: ClassVar[bool] = False
    is_loss: ClassVar[bool] = False
    reads_inside: ClassVar[tuple[str, ...]] = ()
    calls_others: ClassVar[bool] = False

    def check(self, view: View) -> None:  # noqa: B027 - most rules refuse nothing
        """Refuse settings of the module that this rule cannot treat exactly.

        Called before every other method, once per call and backward pass. Not called in a pass with
        the plan of an earlier one, which had the same shapes and settings.

        Args:
            view: The call.

        Raises:
            UnsupportedError: A setting is not supported; the message says what to use instead.
        """

    def mixes_samples(self, view: View) -> bool:
        """Whether samples of the batch influence each other in this call.

        Per-sample quantities do not exist then, and asking for them raises.
        """
        return False

    def batch_axis(self, view: View, index: int) -> int:
        """The axis of an output that holds the samples: 0, except for some outputs that are states.

        The engine moves that axis to the front of ``mat``, ``view.output`` and ``view.grad_output``
        before it calls the rule. Inputs other than the first have samples where the output of the
        same index has: initial states are like final ones.
        """
        return 0

    def input_axis(self, view: View) -> int:
        """The axis of the first input and output on which the module takes the samples. Default: 0.

        If it is another one, ``view.input`` and products with the input have the samples there.
        """
        return 0

    def parameter_names(self, module: Module) -> tuple[str, ...]:
        """The covered parameters of a module; override this if they depend on the module."""
        return self.params

    def node_inside(self, view: View) -> Node | None:
        """The autograd node where the gradient for parameters of :attr:`reads_inside` arrives.

        First-order extensions read these parameters when autograd gets there, with the gradient in
        ``view.inner``. Other quantities read them at the output, as all do if this returns
        ``None``.
        """
        return None

    def covers(self, module: Module, name: str) -> bool:
        """Whether the rule covers a parameter."""
        return name in self.parameter_names(module)

    def jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        """Vector-Jacobian products with the input, for every column of every sample.

        Args:
            view: The call.
            mat: Columns at the output. Shape ``[V, N, *out]``.

        Returns:
            For every input tensor of the call, ``J_xᵀ mat`` of shape ``[V, N, *in]``, or ``None``
            if the input is constant.

        Raises:
            ShapeError: ``mat`` or the result has the wrong shape.
            UnsupportedError: Some samples were asked for, of an input without a batch axis.
        """
        if not view.is_checked and view.indices is None:
            result = self._jac_t_mat_prod(view, mat)
            return result if isinstance(result, tuple) else (result,)
        expect(view, self, "_jac_t_mat_prod is given", mat, view.output_shape)
        result = ask(view, self, "_jac_t_mat_prod", view, mat)
        products: list[Tensor | None] = [*result] if isinstance(result, tuple) else [result]
        if len(products) > len(view.inputs):
            raise ShapeError(
                f"{type(self).__name__}._jac_t_mat_prod returned {len(products)} products at "
                f"{view.path}, which received {len(view.inputs)} tensors: one for each."
            )
        for slot, tensor in enumerate(view.inputs[: len(products)]):
            product = products[slot]
            if product is None and (isinstance(result, tuple) or not tensor.is_floating_point()):
                continue
            if not view.takes_product(slot):
                products[slot] = None
                continue
            expect(view, self, "_jac_t_mat_prod returned", product, tensor.shape, mat.shape[0])
        return tuple(products)

    @abstractmethod
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """``[V, N, *out] → [V, N, *in]``; a tuple, one entry per input tensor, for several."""


@base
class NoRule(LayerRule):
    """Stands in for a missing rule: quantities go through the operations inside the module."""

    transparent = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")


@judge
def _cannot_speak(candidate: Candidate) -> Iterator[str]:
    """The judge of a rule that names no module types."""
    if issubclass(candidate.cls, LayerRule) and not candidate.cls.module_types:
        yield f"module_types must name {MODULE_TYPES}. Got ()"


def is_module_type(item: Any) -> bool:
    """Whether a value names a module class: the class, or its qualified name."""
    if isinstance(item, str):
        return "." in item and all(part.isidentifier() for part in item.split("."))
    return isinstance(item, type) and issubclass(item, Module)


def expect(
    view: View,
    speaker: object,
    what: str,
    mat: Any,
    shape: Size,
    columns: int | None = None,
) -> None:
    """Raise unless ``mat`` is ``[V, N, *]`` for ``shape = [N, *]``."""
    is_tensor = isinstance(mat, Tensor)
    is_real = is_tensor and (mat.is_floating_point() or mat.is_complex())
    if is_real and mat.shape[1:] == shape and (columns is None or mat.shape[0] == columns):
        return
    got = f"shape {list(mat.shape)}" if is_tensor else abridged(mat)
    if is_tensor and not is_real:
        got += f" of {mat.dtype}"
    lead = "V" if columns is None else columns
    raise ShapeError(
        f"{type(speaker).__name__}.{what} {got} at {view.path}, expected a tensor "
        f"[{lead}, {', '.join(map(str, shape))}] of {view.dtype}."
    )


Normaliser: TypeAlias = float | Tensor | None  # what a loss divides by; ``None`` for a sum


@base
class LossRule(LayerRule):
    """A loss ``ℓ(x, target)`` that is a sum over samples: quantities start at its first input.

    To write:
        Nothing. Optional: ``normalisation(view)`` and ``check_terms(view)``.
    """

    is_loss = True

    def check(self, view: View) -> None:
        """Refuse a call in which a term of the loss depends on several samples.

        Raises:
            UnsupportedError: :meth:`check_terms` refuses.
        """
        self.check_terms(view)

    def check_terms(self, view: View) -> None:
        """Refuse a call in which a term of the loss depends on several samples.

        Args:
            view: The loss call.

        Raises:
            UnsupportedError: Such a term was found; the message says what to write instead.
        """

    def normalisation(self, view: View) -> float | Tensor:
        """The factor that the module's reduction puts in front of the sum (``1/N`` for a mean).

        The default is that of a sum. A rule whose modules have a ``reduction`` overrides it:
        batches of a data set are weighted by it.
        """
        return 1.0

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise UnsupportedError(
            f"{view.path} is a loss: quantities start there, and cannot pass through it."
        )


def normaliser_of(view: View) -> Normaliser:
    """The number that a loss divides by; ``None`` for a sum.

    Args:
        view: The loss call.

    Raises:
        UsageError: Neither the module nor its rule gives the number.
        UnsupportedError: The rule refuses the call.
    """
    rule, reduction = view.call.rule, getattr(view.module, "reduction", None)
    assert isinstance(rule, LossRule)
    rule.check_terms(view)  # a target that broadcasts against the output couples samples
    if reduction == "sum":
        return None
    is_defined = type(rule).normalisation is not LossRule.normalisation
    if reduction not in ("mean", "batchmean") or not is_defined:
        raise UsageError(
            f"{view.path} has reduction {reduction!r}, or its rule no normalisation(): what it "
            "divides by in other batches is not known. Use reduction='mean' or 'sum', or give "
            "normaliser=: the number of samples for a mean over them, None for a sum."
        )
    return 1 / rule.normalisation(view)
