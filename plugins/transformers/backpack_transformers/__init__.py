"""Layer rules for backpack-core: layers of the transformers package."""
