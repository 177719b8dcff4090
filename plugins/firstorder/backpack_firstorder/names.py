"""The names of parameters in their model, as ``named_parameters()`` gives them."""

from __future__ import annotations

from typing import Final

from torch.nn import Module

from backpack_core.record.models import MODELS, OWNER_ATTRIBUTE, PATH_ATTRIBUTE, owner_of
from backpack_products import SampleProduct
from backpack_products.substitutes import SUBSTITUTES

_NAMES: Final = "names of parameters"  # the key in the cache of a call


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
    # Looked up in every pass: a parametrization, or another tie, gives a parameter another name.
    if _NAMES not in product.call_cache:
        named = _model_with(module).named_parameters()
        product.call_cache[_NAMES] = {id(tensor): name for name, tensor in named}
    known: dict[int, str] = product.call_cache[_NAMES]
    return known.get(id(parameter)) or _joined(module, product.name)


def _model_with(module: Module) -> Module:
    """The extended model that a module is part of, even if it was put there after ``extend()``."""
    if OWNER_ATTRIBUTE in module.__dict__:
        return owner_of(module)
    models = [reference() for reference in MODELS.valuerefs()]
    return next((m for m in models if m is not None and module in {*m.modules()}), module)


def _joined(module: Module, name: str) -> str:
    path = module.__dict__.get(PATH_ATTRIBUTE)
    return f"{path}.{name}" if path else name
