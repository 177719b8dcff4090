"""The helper modules of ``backpack_layers.modules``."""

from __future__ import annotations

import torch

from backpack_core.testing import RuleCase
from backpack_layers.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule
from backpack_layers.perturbation import Perturbation
from tests.conformance.layer import layer

CASES: list[RuleCase] = [
    RuleCase(SumModule, lambda n: (torch.randn(n, 2), torch.randn(n, 2))),
    layer(lambda: ScaleModule(0.7, optimize=True), 2, 2, name="ScaleModule, optimised"),
    layer(lambda: ScaleModule(0.7), 4, name="ScaleModule"),
    layer(lambda: Permute(0, 2, 1), 2, 4),
    layer(lambda: Permute(1, 2, init_transpose=True), 2, 4, name="Permute, transpose"),
    layer(lambda: Perturbation(torch.Size((2, 3)), torch.zeros(0)), 2, 3),
    layer(lambda: Pad((1, 2, 0, 1), value=0.3), 1, 2),
    layer(lambda: Slicing((slice(None), slice(1, None, 2))), 5),
    layer(lambda: Slicing((slice(None), 0)), 2, 2, name="Slicing, index"),
    RuleCase(ReduceTuple, lambda n: ((torch.randn(n, 2), torch.randn(n, 4)),), constants=(1,)),
]
