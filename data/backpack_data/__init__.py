"""Quantities of several batches: over a data set, over processes, over micro-batches."""

from __future__ import annotations

from backpack_data.accumulation import accumulate as accumulate
from backpack_data.blocks import all_reduce as all_reduce
from backpack_data.blocks import combined as combined
from backpack_data.processes import LostProcessError as LostProcessError
from backpack_data.quantities import Quantities as Quantities
from backpack_data.scaling import unscale as unscale
from backpack_data.weights import Weights as Weights
