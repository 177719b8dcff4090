"""What is noted about a call, as one object, which calls share if the same is noted about them.

A training loop makes the same calls in every pass. So each module remembers what was noted about
its last calls, and one look at all tensors of a call tells whether this holds again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from backpack_core.record.call import Call
from backpack_core.record.models import PATH_ATTRIBUTE
from backpack_core.record.state import TRAITS_ATTRIBUTE
from backpack_operations.traits import KnownTraits
from backpack_products.values import kernels_of, look_of

MOST: Final = 4  # calls that a module remembers: train and eval mode, a last batch that is smaller
_STRIDED = torch.strided
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Unplanned(Exception):
    """No plan can be made of a graph; the message says why."""


class Noted:
    """What is noted about a call; if the same is noted about two calls, they share one object.

    Attributes:
        facts: What a decision may depend on.
        layouts: How each tensor lies in memory, and what else decides which kernels run. Recorded
            passes depend on it, plans do not.
        parameters: The names of the parameters that it used.
    """

    __slots__ = ("__weakref__", "facts", "layouts", "parameters")

    def __init__(self, call: Call, tensors: Iterable[Tensor]) -> None:
        """Note a call.

        Args:
            call: The call.
            tensors: What it received, returned and owns.

        Raises:
            Unplanned: Something about the call cannot be compared.
        """
        stored, rule, module = call.stored, call.rule, call.module
        # Rules live as long as the process, so their id does.
        facts = [type(module), id(rule), module.__dict__.get(PATH_ATTRIBUTE), call.training]
        if not rule.transparent:
            facts.append(call.settings)
        facts += len(stored.inputs), len(stored.outputs)
        for tensor in (*stored.inputs, *stored.outputs):
            if tensor.layout is not _STRIDED or tensor.is_nested:
                raise Unplanned(f"{call.path} has nested or sparse tensors")
            facts += type(tensor), tensor.dtype, tensor.shape
        if stored.kwargs or stored.args is not stored.inputs:
            facts.append(_form((stored.args, stored.kwargs)))
        if stored.tensors:
            own, names = stored.owned, stored.parameters
            facts += names, tuple(own), tuple(stored.frozen)
            for name in names:
                tensor, _ = own[name]
                facts += type(tensor), tensor.requires_grad, tensor.dtype, name in stored.computed
                facts.append(len(stored.computed.get(name, (tensor,))))
            if module._modules and not rule.transparent:  # rules may not cover everything
                facts.append(tuple([p.requires_grad for p in module.parameters()]))
        self.facts, self.parameters = tuple(facts), stored.parameters
        self.layouts = tuple(map(_layout_of, tensors))


_all: WeakValueDictionary[tuple[Any, ...], Noted] = WeakValueDictionary()


def noted_of(call: Call) -> Noted:
    """What is noted about a call.

    Raises:
        Unplanned: Something about the call cannot be compared.
    """
    stored, module = call.stored, call.module
    own = {name: tensor for name, tensor in stored.tensors.items() if tensor is not None}
    tensors = [*stored.inputs, *stored.outputs, *own.values()]
    traits: KnownTraits | None = module.__dict__.get(TRAITS_ATTRIBUTE)
    is_simple = stored.args is stored.inputs and not (stored.kwargs or module._modules)
    if traits is None or not is_simple or stored.computed:
        return _noted(call, tensors)
    about = type(module), id(call.rule), module.__dict__.get(PATH_ATTRIBUTE), call.training
    count = len(stored.inputs), len(tensors)
    seen = *about, call.settings, *count, stored.named, *own, *stored.frozen
    known: list[tuple[Any, Callable[..., bool], Noted]] = traits.noted
    for before, look, noted in known:
        if before == seen and look(*tensors):
            return noted
    noted = _noted(call, tensors)
    known.insert(0, (seen, look_of(tensors), noted))
    del known[MOST:]
    return noted


def _noted(call: Call, tensors: Iterable[Tensor]) -> Noted:
    noted = Noted(call, tensors)
    return _all.setdefault((noted.facts, noted.layouts), noted)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.stride(), tensor.device, kernels_of(tensor)


def _form(value: Any) -> Any:
    """Arguments with a placeholder for each tensor.

    Raises:
        Unplanned: They hold an object that cannot be compared by value.
    """
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return dict, tuple([(key, _form(item)) for key, item in value.items()])
    if type(value) in (tuple, list):
        return type(value), tuple(map(_form, value))
    raise Unplanned(f"a module received a {type(value).__name__}")
