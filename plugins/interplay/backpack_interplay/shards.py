"""Moves results from whole parameters to the shards of ``fully_shard``.

FSDP puts whole parameters in place while layers run, so calls and autograd know these. Users know
the shards.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module


def shards_in(model: Module) -> dict[Tensor, Tensor]:
    """The shards of a model that this process holds, by the whole parameters.

    Empty if torch does not tell; results then stay on the whole parameters.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    shards: dict[Tensor, Tensor] = {}
    for module in model.modules():
        if hasattr(type(module), "_get_fsdp_state"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            one = getattr(state, "_fsdp_param_group", None)  # of older versions of torch
            groups = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
            for parameter in [p for group in groups for p in group.fsdp_params]:
                if hasattr(parameter, "_unsharded_param"):
                    shards[parameter._unsharded_param] = parameter.sharded_param
    return shards


def hand_over(shards: Mapping[Tensor, Tensor], shown: set[int], fields: list[str]) -> None:
    """Move results from whole parameters to shards.

    Args:
        shards: The shards, by whole parameter.
        shown: The parameters that models show to the user, by ``id``. With
            ``set_reshard_after_backward(False)``, these include whole ones, which keep results.
        fields: Names of the results.
    """
    for whole, held in shards.items():
        for field in fields:
            if field in whole.__dict__:
                setattr(held, field, whole.__dict__[field])
                if id(whole) not in shown:
                    del whole.__dict__[field]
