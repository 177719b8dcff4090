"""Layer rules for backpack-core: how the modules of torch.nn differentiate."""
