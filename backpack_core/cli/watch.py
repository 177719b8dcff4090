"""Finds out how a quantity is computed: by watching a run, or from declarations."""

from __future__ import annotations

from typing import Any, get_type_hints

from torch.nn import Module

from backpack_core.cli.table import Kind
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_operations.bare import BareRule
from backpack_products.parametric import ParametricRule, ProductRule
from backpack_products.product import DenseProduct, SampleProduct


def watch(extension: Extension, modules: set[Module]) -> set[type]:
    """Note the forms that an extension reads at some modules, in the set that is returned.

    Args:
        extension: The extension; this instance remains watched.
        modules: The modules.
    """
    forms: set[type] = set()
    read = extension.read

    def watched(product: Any) -> Any:
        if product.module in modules:
            forms.add(_form_of(product))
        return read(product)

    extension.read = watched  # type: ignore[method-assign]
    return forms


def kind_of(extension: type[Extension], forms: set[type]) -> Kind:
    """The kind of cell in a table of what is supported, from the forms that were read."""
    if BareRule in forms:
        return "autodiff"
    return "fast" if any(is_fast(extension, form) for form in forms) else "rule"


def _form_of(product: Any) -> type:
    """The form of a product, or of the products that another reading is made from."""
    if issubclass(product.rule, BareRule):
        return BareRule
    return type(product) if isinstance(product, SampleProduct) else declared_form(product.rule)


def declared_form(rule: type[LayerRule]) -> type[SampleProduct]:
    """The form of a rule's products, from the annotation of its ``_param_product``."""
    if not issubclass(rule, ProductRule):
        return DenseProduct if issubclass(rule, ParametricRule) else SampleProduct
    try:
        form = get_type_hints(rule._param_product).get("return", SampleProduct)
    except NameError:  # imported for type checkers only
        return SampleProduct
    return form if isinstance(form, type) and issubclass(form, SampleProduct) else SampleProduct


def is_fast(extension: type[Extension], form: type[SampleProduct]) -> bool:
    """Whether all operations of an extension have a version for a form: ``M`` is not formed."""
    return bool(extension.needs) and all(need.has_version(form) for need in extension.needs)
