"""Second-order extensions for backpack-core: curvature diagonals, factors and products."""

from backpack_core.contract.bases import declare_only_computes

declare_only_computes(__name__)
