"""First-order extensions for backpack-core: individual gradients and their statistics."""
