"""Products with Jacobians and curvature by automatic differentiation, from the core."""

from __future__ import annotations

from typing import Any

from backpack.submodules import submodule
from backpack_core import hessianfree as core

_TABLE: dict[str, dict[str, Any]] = {
    "lop": {
        "L_op": core.transposed_jacobian_vector_product,
        "transposed_jacobian_vector_product": core.transposed_jacobian_vector_product,
    },
    "rop": {
        "R_op": core.jacobian_vector_product,
        "jacobian_vector_product": core.jacobian_vector_product,
    },
    "hvp": {"hessian_vector_product": core.hessian_vector_product},
    "ggnvp": {
        "ggn_vector_product": core.ggn_vector_product,
        "ggn_vector_product_from_plist": core.ggn_vector_product_from_plist,
    },
}
for _name, _members in _TABLE.items():
    submodule(f"{__name__}.{_name}", _members)
