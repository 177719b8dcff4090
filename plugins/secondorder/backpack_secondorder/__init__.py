"""Second-order extensions for backpack-core: curvature diagonals, factors and products."""
