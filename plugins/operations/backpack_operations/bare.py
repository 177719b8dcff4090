"""Parameters that functions use: ``F.linear(x, self.weight)``, a tied weight, a penalty.

Each is treated as a call of the identity that returns the parameter, so that the engine reads it
like any other. The columns ``[V, N, *θ]`` that arrive there, kept apart by sample, are the product.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import memories_of, version_of
from backpack_core.contract.bases import base
from backpack_core.plugins.registry import FALLBACK
from backpack_core.record.call import Call, Edge, Site, Stored
from backpack_core.record.guards import visible_memory
from backpack_core.record.state import NO_SETTINGS
from backpack_core.record.view import View
from backpack_operations.operands import FactoredColumns
from backpack_operations.parameter_owners import owned_by_models
from backpack_operations.survey import GraphSurvey
from backpack_products.columns import ApartColumns
from backpack_products.held import held_by
from backpack_products.parametric import ParametricRule
from backpack_products.product import DenseProduct, SampleProduct


@base
class BareRule(ParametricRule):
    """The rule of the identity ``θ ↦ θ``."""

    def covers(self, module: Module, name: str) -> bool:
        """Return ``True``: there is one parameter."""
        return True

    def apart_products(
        self, view: View, names: Sequence[str], columns: ApartColumns
    ) -> list[SampleProduct]:
        """The arriving columns as a product for the parameter, in factors if they have them."""
        if not isinstance(columns, FactoredColumns):
            return [DenseProduct(columns.mat)]
        product = columns.product()
        # Factors may be views of gradients, which others may change later: their memory is noted.
        visible_memory(view).update(memories_of(tensor for tensor, _ in held_by(product)))
        return [product]

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("nothing lies before a parameter")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        raise AssertionError("a parameter has no samples")


_RULE = BareRule()


def bare_call(module: Module, name: str, parameter: Tensor, provenance: object) -> Call:
    """The call that stands for a parameter.

    Args:
        module: The module that owns the parameter.
        name: Its name there.
        parameter: The parameter.
        provenance: The provider of the rule in messages.
    """
    value = parameter.detach()
    versions = version_of(value), version_of(parameter)
    stored = Stored((), {}, (), (value,), versions, {name: parameter}, 1)
    thread, training = threading.get_ident(), module.training
    return Call(module, _RULE, provenance, (), stored, thread, training, NO_SETTINGS)


def add_leaves(survey: GraphSurvey, owners: Mapping[int, tuple[Module, str]] | None = None) -> None:
    """Add to the survey the parameters at which columns are kept apart, as calls.

    Args:
        survey: What is known about the graph.
        owners: What :func:`owned_by_models` returns, if that is known.
    """
    leaves = [item for item in survey.alignment.leaves.items() if item[0] not in survey.leaves]
    owners = (owners or owned_by_models()) if leaves else {}
    for output, parameter in leaves:
        use = survey.uses.get(id(parameter))
        module, name = owners[id(parameter)] if use is None else (use.call.module, use.name)
        call = bare_call(module, name, parameter, FALLBACK.provenance)
        survey.add_leaf(Site(call, 0, Edge(*output)))
