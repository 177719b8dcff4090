"""Layer rules for backpack-core: how the modules of torch.nn differentiate."""

from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)
