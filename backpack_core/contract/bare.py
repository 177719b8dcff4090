"""Parameters that plain functions use: ``F.linear(x, self.weight)``, a tied weight, a penalty.

They are looked at as a call that returns the parameter itself. What arrives there of every sample
apart is the product.
"""

from __future__ import annotations

import threading

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import version_of
from backpack_core.contract.columns import ApartColumns
from backpack_core.contract.operands import FactoredColumns
from backpack_core.contract.parametric import ParametricRule
from backpack_core.contract.product import DenseProduct, SampleProduct
from backpack_core.contract.rules import LayerRule
from backpack_core.record.call import Call, Stored
from backpack_core.record.state import NO_SETTINGS
from backpack_core.record.view import View


class BareRule(ParametricRule):
    """``θ ↦ θ``."""

    def covers(self, module: Module, name: str) -> bool:
        """The one that there is."""
        return True

    def apart_product(self, view: View, name: str, columns: ApartColumns) -> SampleProduct:
        """What arrives, in the form in which it does."""
        return (
            columns.product() if isinstance(columns, FactoredColumns) else DenseProduct(columns.mat)
        )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("nothing lies before a parameter")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        raise AssertionError("a parameter has no samples")


class NoRule(LayerRule):
    """Stands where no rule is installed: what arrives goes through the operations inside."""

    transparent = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")


_RULE = BareRule()


def bare_call(module: Module, name: str, parameter: Tensor, provenance: object) -> Call:
    """A parameter as a call.

    Args:
        module: What owns it.
        name: What that calls it.
        parameter: The parameter.
        provenance: Who speaks for it, for messages.
    """
    owned = {name: (parameter, version_of(parameter))}
    value = parameter.detach()
    stored = Stored((), {}, (), (value,), (version_of(value),), owned, (name,))
    thread, training = threading.get_ident(), module.training
    return Call(module, _RULE, provenance, (), stored, thread, training, NO_SETTINGS)
