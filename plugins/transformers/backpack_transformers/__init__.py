"""Layer rules for backpack-core: layers of the transformers package."""

from backpack_core.contract.bases import declare_only_computes

declare_only_computes(__name__)
