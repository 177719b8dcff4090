"""Second-order optimizers as ``torch.optim.Optimizer``."""
