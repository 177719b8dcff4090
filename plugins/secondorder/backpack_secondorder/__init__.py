"""Second-order extensions for backpack-core: curvature diagonals, factors and products."""

from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)
