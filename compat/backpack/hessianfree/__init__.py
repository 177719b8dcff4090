"""Products with Jacobians and curvature by automatic differentiation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack.submodules import submodule
from backpack_secondorder import hessianfree as products
from backpack_secondorder.hessianfree import Tensors


def L_op(
    ys: Tensors, xs: Tensors, ws: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """The transposed Jacobian of ``ys`` in ``xs`` times ``ws``."""
    return products.transposed_jacobian_vector_product(ys, xs, ws, retain_graph, detach)


def R_op(
    ys: Tensors, xs: Tensors, vs: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """The Jacobian of ``ys`` in ``xs`` times ``vs``."""
    return products.jacobian_vector_product(ys, xs, vs, retain_graph, detach)


_TABLE: dict[str, dict[str, Any]] = {
    "lop": {
        "L_op": L_op,
        "transposed_jacobian_vector_product": products.transposed_jacobian_vector_product,
    },
    "rop": {
        "R_op": R_op,
        "jacobian_vector_product": products.jacobian_vector_product,
    },
    "hvp": {"hessian_vector_product": products.hessian_vector_product},
    "ggnvp": {
        "ggn_vector_product": products.ggn_vector_product,
        "ggn_vector_product_from_plist": products.ggn_vector_product_from_plist,
    },
}
for _name, _members in _TABLE.items():
    submodule(f"{__name__}.{_name}", _members)
