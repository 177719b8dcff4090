"""What stood where parameters do when a model ran: its own, and what stood in for them.

``torch.func.functional_call`` puts other tensors there, and a parameter may be replaced later.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core._torch import Node

Homes = dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]]
# Tensors that stood in for parameters, by ``id``: each with its module and its name there.
SUBSTITUTES: Homes = {}
# The parameters of models that ran. A model may have lost one since.
PARAMETERS: Homes = {}


def note_parameters(module: Module | None) -> None:
    """Note the parameters of a model that is about to run, and the substitutes among them.

    Hooks of submodules do not see all of them: a parameter of a list, or a tied weight, may belong
    to a submodule that is never called.
    """
    parts = [] if module is None else [module]
    for part in parts:  # the list grows. Submodules may have been added since the last run.
        if part._modules:
            parts += [inner for inner in part._modules.values() if inner is not None]
        parameters: Mapping[str, Tensor | None] = part._parameters
        for name, tensor in parameters.items():
            if tensor is None:
                continue
            homes, key = PARAMETERS if isinstance(tensor, Parameter) else SUBSTITUTES, id(tensor)
            known = homes.get(key)
            if known is None or known[1]() is not part or known[2] != name:
                forget = partial(_forget, homes, key)
                homes[key] = weakref.ref(tensor, forget), weakref.ref(part), name


def forget_parameters(module: Module) -> None:
    """Forget the parameters of a module that belongs to no model any more."""
    for parameter in module._parameters.values():
        PARAMETERS.pop(id(parameter), None)


def _forget(homes: Homes, key: int, reference: weakref.ref[Tensor]) -> None:
    if key in homes and homes[key][0] is reference:
        del homes[key]


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or stood in for one in the forward pass of a model."""
    return isinstance(tensor, Parameter) or id(tensor) in SUBSTITUTES


def computed_substitutes() -> dict[tuple[Node, int], Tensor]:
    """Stand-ins for parameters that were computed from other tensors, by node and output number."""
    if not SUBSTITUTES:
        return {}
    tensors = (reference() for reference, *_ in [*SUBSTITUTES.values()])
    return {(t.grad_fn, t.output_nr): t for t in tensors if t is not None and t.grad_fn is not None}
