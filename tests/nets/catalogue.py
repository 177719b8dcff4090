"""All kinds of steps: importing this module fills the table."""

from __future__ import annotations

from importlib import import_module

from tests.nets.kinds import KINDS as KINDS

for _name in (
    "torch_modules",
    "sequence_modules",
    "own_modules",
    "changed_modules",
    "functions",
    "tensor_functions",
    "weight_uses",
    "of_models",
    "idioms",
    "derivatives",
    "in_place",
    "traps",
    "rows",
    "bags",
    "heads",
):
    import_module(f"tests.nets.{_name}")
