"""Module extensions: a quantity written by hand for one pair (extension, module type).

They are the incumbent's way to support a layer, kept for scripts that use it. A layer rule is
shorter and serves every extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError, UsageError

Grads = tuple[Tensor | None, ...]


class ModuleExtension:
    """Computes an extension's quantity for the parameters of one type of module.

    A subclass has one method for each name in ``params``, called as ``(ext, module, g_inp, g_out,
    bpQuantities)``, which returns the value to store. A second-order one also overrides
    :meth:`backpropagate`. ``module.input0``, ``module.input1``, … and ``module.output`` are set
    while it runs; they hold all samples, also where the extension is restricted to some. ``g_inp``
    holds ``None`` for every input, since gradients at inputs do not exist yet.

    Attributes:
        params: Names of the parameters that it computes the quantity for.
        sends_to_every_input: Whether what :meth:`backpropagate` returns goes to every input of the
            module (a sum, say) or to the first only.
    """

    sends_to_every_input: ClassVar[bool] = False

    def __init__(self, params: Sequence[str] | None = None) -> None:
        """Store the parameter names.

        Args:
            params: Names of the parameters, each with a method of that name.

        Raises:
            UsageError: A method is missing.
        """
        self.params: list[str] = list(params or ())
        missing = [name for name in self.params if not callable(getattr(self, name, None))]
        if missing:
            raise UsageError(
                f"{type(self).__name__} names the parameter {missing[0]!r} but has no method "
                f"{missing[0]}(ext, module, g_inp, g_out, bpQuantities)."
            )

    def check(self, ext: Any, module: Module, g_inp: Grads, g_out: Grads) -> None:
        """Refuse settings of the module; called before anything else."""

    def backpropagate(
        self, ext: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any
    ) -> Any:
        """Carry the extension's quantity from the module's output to its first input.

        Args:
            ext: The extension.
            module: The module, with ``input0``, …, and ``output``.
            g_inp: One ``None`` for each input.
            g_out: Gradients at the outputs.
            bpQuantities: The quantity at the output; ``None`` at a loss.

        Returns:
            The quantity at the first input.
        """  # noqa: DOC202 - what an override returns
        raise UnsupportedError(
            f"{type(self).__name__} computes no quantity to pass on from {type(module).__name__}: "
            "override backpropagate(ext, module, g_inp, g_out, bpQuantities)."
        )


class FirstOrderModuleExtension(ModuleExtension):
    """A module extension for first-order extensions: nothing is passed on."""
