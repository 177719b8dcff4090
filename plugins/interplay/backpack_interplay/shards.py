"""Results of parameters that ``fully_shard`` has replaced by whole parameters.

Calls and autograd know the whole ones, users the shards.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module


def shards_in(model: Module) -> dict[Tensor, Tensor]:
    """Parameters of which this process holds a part, by the whole parameter that layers run with.

    ``fully_shard`` puts the whole ones in place while layers run. Empty where torch does not tell:
    results then stay on the whole ones.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    found: dict[Tensor, Tensor] = {}
    for module in model.modules():
        if hasattr(type(module), "_get_fsdp_state"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            one = getattr(state, "_fsdp_param_group", None)
            groups = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
            for parameter in [p for group in groups for p in group.fsdp_params]:
                if hasattr(parameter, "_unsharded_param"):
                    found[parameter._unsharded_param] = parameter.sharded_param
    return found


def hand_over(shards: Mapping[Tensor, Tensor], shown: set[int], fields: list[str]) -> None:
    """Move results from whole parameters to shards.

    Args:
        shards: By whole parameters.
        shown: The parameters that models show, by ``id``. A whole one is among them with
            ``set_reshard_after_backward(False)``, and keeps its results.
        fields: Names of the results.
    """
    for whole, held in shards.items():
        for field in fields:
            if field in whole.__dict__:
                setattr(held, field, whole.__dict__[field])
                if id(whole) not in shown:
                    del whole.__dict__[field]
