"""Steps along the natural gradient, from Kronecker factors and from the full matrix.

Both solve the damped ``(F + damping · I) d = gradient`` and go against ``d``. With Kronecker
factors, this is one solve for each parameter. Factors are averaged over steps, and one product with
the generalised Gauss-Newton matrix gives the length of the step (Martens and Grosse, 2015,
arXiv:1503.05671, section 6.4). With that matrix itself, conjugate gradients solve. Amari (1998).

Run: ``python examples/natural_gradient.py``
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFAC
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.conjugate_gradients import conjugate_gradients
from backpack_secondorder.over_data import GGN

STEPS, DAMPING = 8, 0.03


def make_problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A small net, a loss and 512 digits."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data[:512], dtype=torch.float64) / 16
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)).double()
    return extend(model), extend(nn.CrossEntropyLoss()), x, torch.tensor(digits.target[:512])


def move(model: nn.Module, direction: list[Tensor]) -> None:
    """Move the parameters against a direction."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), direction, strict=True):
            parameter -= part


def gradient_steps() -> list[float]:
    """Plain gradient descent, at a rate that is good here."""
    model, lossfunc, x, y = make_problem()
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = lossfunc(model(x), y)
        loss.backward()
        losses.append(loss.item())
        move(model, [1.0 * p.grad for p in model.parameters()])
    return losses


def factored_steps() -> list[float]:
    """The losses with Kronecker factors, averaged over steps."""
    model, lossfunc, x, y = make_problem()
    ggn = GGN(model, lossfunc, [*zip(x.split(128), y.split(128), strict=True)])
    average: BlockDiagonal | None = None
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(KFAC(mc_samples=4)):
            loss.backward()
        losses.append(loss.item())
        latest = BlockDiagonal.of(model, "kfac")
        average = latest if average is None else average.moving_average(latest, 0.5)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        direction = average.solve(gradient, DAMPING)
        curvature = direction @ (ggn @ direction + DAMPING * direction)
        step = (gradient @ direction / curvature) * direction
        move(model, [part.squeeze(0) for part in ggn.split(step.unsqueeze(0))])
    return losses


def full_steps() -> tuple[list[float], list[int]]:
    """The losses with the matrix over all data, and the number of products in each step."""
    model, lossfunc, x, y = make_problem()
    ggn = GGN(model, lossfunc, [*zip(x.split(128), y.split(128), strict=True)])
    losses, products = [], []
    for _ in range(STEPS):
        gradient = torch.cat([part.flatten() for part in ggn.gradient()])
        with torch.no_grad():
            losses.append(lossfunc(model(x), y).item())
        found = conjugate_gradients(ggn, gradient, DAMPING, rtol=1e-3)
        products.append(found.iterations)
        move(model, [part.squeeze(0) for part in ggn.split(found.x.unsqueeze(0))])
    return losses, products


def main() -> None:
    """Compare the losses after each step."""
    gradient, factored, (full, products) = gradient_steps(), factored_steps(), full_steps()
    print("step  gradient  factors  full matrix  products")
    for step, row in enumerate(zip(gradient, factored, full, products, strict=True)):
        print("{:4}  {:8.4f}  {:7.4f}  {:11.4f}  {:8}".format(step, *row))
    if not full[-1] < factored[-1] < gradient[-1]:
        raise SystemExit("Curvature has not helped.")


if __name__ == "__main__":
    main()
