"""Helper modules: those of ``backpack_layers.modules``, under the incumbent's submodule names."""

from __future__ import annotations

from typing import Any

from backpack.submodules import submodule
from backpack_layers.modules import (
    Branch,
    Pad,
    Parallel,
    Permute,
    ReduceTuple,
    ScaleModule,
    Slicing,
    SumModule,
)

_TABLE: dict[str, dict[str, Any]] = {
    "branching": {"SumModule": SumModule, "Parallel": Parallel, "_Branch": Branch},
    "pad": {"Pad": Pad},
    "permute": {"Permute": Permute},
    "reduce_tuple": {"ReduceTuple": ReduceTuple},
    "scale_module": {"ScaleModule": ScaleModule},
    "slicing": {"Slicing": Slicing},
}
for _name, _members in _TABLE.items():
    submodule(f"{__name__}.{_name}", _members)
