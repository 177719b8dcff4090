"""Trace of the generalised Gauss-Newton matrix, while its diagonal is being freed.

``backpack`` calls ``extension_hook`` with every module as soon as all quantities of its parameters
exist. The hook can reduce and free them at once, so that the quantities of at most one module exist
at a time. Here it sums up the trace of the GGN. The result is compared with the trace taken
afterwards.

Run: ``python examples/extension_hook.py``
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact


def make_problem() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """A small net, a loss and 256 digits."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data[:256], dtype=torch.get_default_dtype()) / 16
    labels = torch.tensor(digits.target[:256])
    model = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
    return extend(model), extend(nn.CrossEntropyLoss()), images, labels


class TraceHook:
    """Sums a diagonal over modules, and frees it."""

    def __init__(self) -> None:
        self.trace = 0.0
        self.most_fields = 0

    def __call__(self, module: nn.Module) -> None:
        """Add the trace of the module's diagonals, and drop them."""
        parameters = [p for p in module.parameters() if hasattr(p, "diag_ggn_exact")]
        self.most_fields = max(self.most_fields, len(parameters))
        for parameter in parameters:
            self.trace += parameter.diag_ggn_exact.sum().item()
            del parameter.diag_ggn_exact


def trace_after_backward() -> float:
    """Keep the whole diagonal, then add it up."""
    model, lossfunc, images, labels = make_problem()
    loss = lossfunc(model(images), labels)
    with backpack(DiagGGNExact()):
        loss.backward()
    return sum(p.diag_ggn_exact.sum().item() for p in model.parameters())


def trace_while_backward() -> tuple[float, int]:
    """Add up the trace module by module, and count the diagonals that existed at once."""
    model, lossfunc, images, labels = make_problem()
    hook = TraceHook()
    loss = lossfunc(model(images), labels)
    with backpack(DiagGGNExact(), extension_hook=hook):
        loss.backward()
    assert not any(hasattr(p, "diag_ggn_exact") for p in model.parameters())
    return hook.trace, hook.most_fields


def main() -> None:
    """Compare both traces."""
    after = trace_after_backward()
    during, most = trace_while_backward()
    print(f"trace of the GGN, taken after backward:  {after:.6f}")
    print(f"trace of the GGN, taken during backward: {during:.6f} (at most {most} diagonals alive)")
    if abs(after - during) > 1e-5 * abs(after):
        raise SystemExit("The traces differ.")


if __name__ == "__main__":
    main()
