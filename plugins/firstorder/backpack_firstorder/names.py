"""The names of parameters in their model, as ``named_parameters()`` gives them."""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.nn import Module

from backpack_core.record.owner import PATH_ATTRIBUTE, owner_of
from backpack_products import SampleProduct
from backpack_products.substitutes import SUBSTITUTES

_known: WeakKeyDictionary[Module, dict[int, tuple[ref[Tensor], str]]] = WeakKeyDictionary()


def name_of(product: SampleProduct) -> str:
    """The name of a product's parameter in the extended model.

    A tied parameter has its first name. A tensor of ``functional_call`` has the name of the
    parameter that it replaces.
    """
    parameter, module = product.parameter, product.module
    if parameter is None or module is None:
        return product.name
    if id(parameter) in SUBSTITUTES:
        _, owner, name = SUBSTITUTES[id(parameter)]
        home = owner()
        return _joined(module if home is None else home, name)
    model = owner_of(module)
    known_name = _name_in(model, parameter)
    if known_name is None:  # parameters that have been replaced since
        _known.pop(model, None)
        known_name = _name_in(model, parameter)
    return _joined(module, product.name) if known_name is None else known_name


def _name_in(model: Module, parameter: Tensor) -> str | None:
    if model not in _known:
        named = model.named_parameters()
        _known[model] = {id(tensor): (ref(tensor), name) for name, tensor in named}
    known = _known[model].get(id(parameter))
    return known[1] if known is not None and known[0]() is parameter else None


def _joined(module: Module, name: str) -> str:
    path = module.__dict__.get(PATH_ATTRIBUTE)
    return f"{path}.{name}" if path else name
