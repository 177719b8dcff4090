"""Layer rules for backpack-core: how the modules of torch.nn differentiate."""

from backpack_core.contract.bases import declare_only_computes

declare_only_computes(__name__)
