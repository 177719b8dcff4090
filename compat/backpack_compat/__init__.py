"""The implementation of the compatibility layer; ``backpack`` holds the incumbent's names."""

from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)
