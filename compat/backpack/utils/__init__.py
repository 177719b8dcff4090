"""Small functions under the incumbent's submodule names."""

from __future__ import annotations

from typing import Any

from backpack.submodules import submodule
from backpack.utils import classification, parameters, tensors

_TABLE: dict[str, dict[str, Any]] = {
    "convert_parameters": {"vector_to_parameter_list": parameters.vector_to_parameter_list},
    "errors": {"batch_norm_raise_error_if_train": classification.batch_norm_raise_error_if_train},
    "hooks": {"no_op": tensors.no_op},
    "module_classification": {
        "is_loss": classification.is_loss,
        "is_nll": classification.is_nll,
        "is_no_op": classification.is_no_op,
    },
    "subsampling": {"subsample": tensors.subsample},
    "unsqueeze": {"kfacmp_unsqueeze_if_missing_dim": tensors.kfacmp_unsqueeze_if_missing_dim},
    "linear": {
        "extract_weight_diagonal": parameters.extract_weight_diagonal,
        "extract_bias_diagonal": parameters.extract_bias_diagonal,
    },
}
for _name, _members in _TABLE.items():
    submodule(f"{__name__}.{_name}", _members)
