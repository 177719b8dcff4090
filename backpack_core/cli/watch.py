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


class Watch:
    """Replaces an extension's ``read``, and notes the forms that it reads at some modules."""

    def __init__(self, modules: set[Module], extension: Extension) -> None:
        """Replace ``read`` of the extension.

        Args:
            modules: The modules to watch.
            extension: The extension; this instance remains watched.
        """
        self.modules = modules
        self.forms: set[type] = set()
        self.read = extension.read
        self._extension = type(extension)
        extension.read = self  # type: ignore[method-assign]

    def __call__(self, product: Any) -> Any:
        """Called instead of ``read``."""
        if product.module in self.modules:
            self.forms.add(_form_of(product))
        return self.read(product)

    def kind(self) -> Kind:
        """The kind of cell in the support matrix; see ``table.Cell``."""
        if BareRule in self.forms:
            return "autodiff"
        fast = any(is_fast(self._extension, form) for form in self.forms)
        return "fast" if fast else "rule"


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
