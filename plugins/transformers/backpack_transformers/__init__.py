"""Layer rules for backpack-core: layers of the transformers package."""

from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)
