"""The layer-rule contract: how one kind of layer differentiates.

A *layer rule* says how one kind of layer differentiates. It is written once, is stateless, and is
used by every extension. Public methods check shapes; a rule author writes the methods whose name
starts with an underscore. Axis letters: ``V`` columns, ``N`` samples, ``S`` shared positions,
``G`` groups, ``I`` and ``O`` features per group.

The bases of layers that know more are those of libraries: of layers with parameters, or with second
derivatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from reprlib import repr as abridged
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.contract.bases import Candidate, base, judge
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_core.record.untouched import ask
from backpack_core.record.view import View

ModuleType = type[Module] | str
MODULE_TYPES: Final = "torch.nn.Module classes or their qualified names ('package.module.Class')"


@base
class LayerRule(ABC):
    """How a layer ``x ↦ f(x)`` differentiates with respect to its input.

    Class attributes:
        module_types: The module classes this rule speaks for, as classes or as qualified names
            (``"package.module.Class"``), so that a rule need not import a heavy library.
        params: Names of the parameters the rule covers (dots allowed: ``"out_proj.weight"``).
            If there are others that are trained, all are read where operations use them.
        transparent: The rule leaves propagation to the autograd graph inside the module: then
            ``_jac_t_mat_prod`` is never called, and modules inside are visited on their own.
        is_loss: Quantities start here; see :class:`~backpack_core.LossRule`.
        reads_inside: Parameters to which autograd may bring the gradient, at :meth:`node_inside`.

    A property that is not declared is assumed absent. The conformance kit checks each of them.

    To write:
        ``_jac_t_mat_prod(view, mat)``: ``J_xᵀ mat``, ``[V, N, *out] → [V, N, *in]``; a tuple for
        several input tensors. Optional: ``check(view)``, ``mixes_samples(view)``,
        ``batch_axis(view, index)``.
    """

    module_types: ClassVar[tuple[ModuleType, ...]] = ()
    params: ClassVar[tuple[str, ...]] = ()
    transparent: ClassVar[bool] = False
    is_loss: ClassVar[bool] = False
    reads_inside: ClassVar[tuple[str, ...]] = ()

    def check(self, view: View) -> None:  # noqa: B027 - most rules refuse nothing
        """Refuse settings of the module that this rule cannot treat exactly.

        Called before every other method, once per call and backward pass; not in a pass that
        takes the plan of an earlier one, where shapes and settings are the same.

        Args:
            view: The forward execution in question.

        Raises:
            UnsupportedError: With the setting that was found and what to use instead.
        """

    def mixes_samples(self, view: View) -> bool:
        """Whether samples of the batch influence each other in this call.

        Per-sample quantities do not exist then, and asking for them raises.
        """
        return False

    def batch_axis(self, view: View, index: int) -> int:
        """Which axis of an output holds the samples; 0 for all but some state outputs.

        The engine moves that axis to the front of ``mat``, ``view.output`` and ``view.grad_output``
        before it calls the rule.
        """
        return 0

    def parameter_names(self, module: Module) -> tuple[str, ...]:
        """The covered parameters of a module; override this if they depend on the module."""
        return self.params

    def node_inside(self, view: View) -> Node | None:
        """The node where the gradient for the parameters of :attr:`reads_inside` arrives.

        First-order extensions read them when autograd gets there, with the gradient in
        ``view.inner``. For other quantities, and if this returns ``None``, they are read at the
        output, like others.
        """
        return None

    def covers(self, module: Module, name: str) -> bool:
        """Whether the rule covers a parameter."""
        return name in self.parameter_names(module)

    def jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        """Transposed input Jacobian, applied to every column of every sample.

        Args:
            view: The forward execution.
            mat: Columns at the output. Shape ``[V, N, *out]``.

        Returns:
            For every input tensor of the call, ``J_xᵀ mat`` of shape ``[V, N, *in]``, or ``None``
            where the input is constant.

        Raises:
            ShapeError: ``mat`` or the result has the wrong shape.
            UnsupportedError: Some samples were asked for, of an input whose axis 0 is another one.
        """
        if not view.is_checked and view.indices is None:
            found = self._jac_t_mat_prod(view, mat)
            return found if isinstance(found, tuple) else (found,)
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
            if product is None and isinstance(result, tuple):
                continue
            if view.indices is not None and not view.has_batch(view.full.inputs[slot]):
                _refuse_uncut(view, tensor)
                products[slot] = None
                continue
            expect(view, self, "_jac_t_mat_prod returned", product, tensor.shape, mat.shape[0])
        return tuple(products)

    @abstractmethod
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """``[V, N, *out] → [V, N, *in]``; a tuple, one entry per input tensor, for several."""


@base
class NoRule(LayerRule):
    """Stands where no rule is installed: what arrives goes through the operations inside."""

    transparent = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")


@judge
def _cannot_speak(candidate: Candidate) -> Iterator[str]:
    """What keeps a rule from speaking for any module."""
    if issubclass(candidate.cls, LayerRule) and not candidate.cls.module_types:
        yield f"module_types must name {MODULE_TYPES}. Got ()"


def _refuse_uncut(view: View, tensor: Tensor) -> None:
    """Raise if columns of some samples go to an input that the view does not cut to these."""
    if tensor.requires_grad:
        raise UnsupportedError(
            f"{view.path} received an input of shape {list(tensor.shape)} that requires a gradient "
            "and whose axis 0 does not hold the samples (an initial state, say), which cannot be "
            "combined with subsampling: detach it, or leave subsampling out."
        )


def is_module_type(item: Any) -> bool:
    """Whether something names a module class: the class, or its qualified name."""
    if isinstance(item, str):
        return "." in item and all(part.isidentifier() for part in item.split("."))
    return isinstance(item, type) and issubclass(item, Module)


def expect(
    view: View,
    speaker: object,
    what: str,
    mat: Any,
    shape: torch.Size,
    columns: int | None = None,
) -> None:
    """Raise unless ``mat`` is ``[V, N, *]`` for ``shape = [N, *]``."""
    is_tensor = isinstance(mat, Tensor)
    is_real = is_tensor and (mat.is_floating_point() or mat.is_complex())
    if is_real and mat.shape[1:] == shape and (columns is None or mat.shape[0] == columns):
        return
    given = f"shape {list(mat.shape)}" if is_tensor else abridged(mat)
    if is_tensor and not is_real:
        given += f" of {mat.dtype}"
    lead = "V" if columns is None else columns
    raise ShapeError(
        f"{type(speaker).__name__}.{what} {given} at {view.path}, expected a tensor "
        f"[{lead}, {', '.join(map(str, shape))}] of {view.dtype}."
    )
