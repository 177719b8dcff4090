"""Tensors that stand in for parameters, as ``torch.func.functional_call`` puts them there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import Node

# Tensors that stood in for parameters, by ``id``: each with its module and its name there.
SUBSTITUTES: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]] = {}


def note_substitutes(module: Module | None) -> None:
    """Note the substitutes of a model that is about to run.

    Hooks of submodules do not see all of them: a parameter of a list, or a tied weight, may belong
    to a submodule that is never called.
    """
    parts = [] if module is None else [module]
    for part in parts:  # the list grows. Submodules may have been added since the last run.
        if part._modules:
            parts += [inner for inner in part._modules.values() if inner is not None]
        parameters: Mapping[str, Tensor | None] = part._parameters
        for name, tensor in parameters.items():
            if tensor is not None and not isinstance(tensor, Parameter):
                key = id(tensor)
                forget = partial(_forget, key)
                SUBSTITUTES[key] = weakref.ref(tensor, forget), weakref.ref(part), name


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    if key in SUBSTITUTES and SUBSTITUTES[key][0] is reference:
        del SUBSTITUTES[key]


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or stood in for one in the forward pass of a model."""
    return isinstance(tensor, Parameter) or id(tensor) in SUBSTITUTES


def computed_substitutes() -> dict[tuple[Node, int], Tensor]:
    """Stand-ins for parameters that were computed from other tensors, by node and output number."""
    tensors = (reference() for reference, *_ in [*SUBSTITUTES.values()])
    return {(t.grad_fn, t.output_nr): t for t in tensors if t is not None and t.grad_fn is not None}
