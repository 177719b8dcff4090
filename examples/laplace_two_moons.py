"""A Laplace approximation on two moons: one function for Kronecker factors, EKFAC and diagonals.

The posterior about the trained parameters is a Gaussian. Its precision is the curvature of the
summed loss plus the precision of the prior. Matrices of all forms have the same methods, so the
evidence, draws and predictions below are written once. The evidence is compared with that of the
full generalised Gauss-Newton matrix. It also chooses the precision of the prior.
MacKay (1992); Ritter et al. (2018); Immer et al. (2021), arXiv:2104.04975.

Run: ``python examples/laplace_two_moons.py``
"""

from math import log

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

from backpack_core import backpack, disable, extend
from backpack_core.extensions import EKFAC, KFLR, DiagGGNExact
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.over_data import GGN

FIELDS = ("kflr", "ekfac", "diag_ggn_exact")
PRIORS = (0.01, 0.1, 1.0, 10.0)


def train() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A small net on 200 points, trained with the prior of precision 0.1."""
    torch.manual_seed(0)
    points, classes = make_moons(200, noise=0.2, random_state=0)
    x, y = torch.tensor(points, dtype=torch.float64), torch.tensor(classes)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model = extend(nn.Sequential(*model, nn.Linear(16, 2)).double())
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=200, line_search_fn="strong_wolfe", history_size=20
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        with disable():
            loss = lossfunc(model(x), y)
        loss = loss + 0.05 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return model, lossfunc, x, y


def evidence(logdet: Tensor, loss: Tensor, model: nn.Module, prior: float) -> float:
    """``log p(data)`` of the Laplace approximation, from ``log det(F + prior · I)``."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    fit = -loss - 0.5 * prior * flat @ flat
    return float(fit + 0.5 * (len(flat) * log(prior) - logdet))


def predict(model: nn.Module, precision: BlockDiagonal, prior: float, x: Tensor) -> Tensor:
    """Mean probabilities ``[N, 2]`` over draws, by the model linearised about its parameters."""
    parameters = dict(model.named_parameters())
    draws = precision.sample(500, prior, torch.Generator().manual_seed(0))

    def along(direction: dict[str, Tensor]) -> Tensor:
        def run(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, values, (x,))

        detached = {name: p.detach() for name, p in parameters.items()}
        output, change = torch.func.jvp(run, (detached,), (direction,))
        return output + change

    directions = dict(zip(parameters, draws, strict=True))
    return torch.vmap(along)(directions).softmax(-1).mean(0)


def main() -> None:
    """Compare three curvatures with the full matrix."""
    model, lossfunc, x, y = train()
    loss = lossfunc(model(x), y)
    with backpack(KFLR(), EKFAC(None), DiagGGNExact()):
        loss.backward()
    loss = loss.detach()
    full = GGN(model, lossfunc, [(x, y)]).dense()
    eye = torch.eye(len(full), dtype=full.dtype)
    far = torch.tensor([[-4.0, 4.0], [5.0, -4.0]], dtype=x.dtype)
    print(f"{'curvature':16}", *(f"{f'prior {prior}':>12}" for prior in PRIORS), "  far  near")
    exact = [evidence(torch.logdet(full + p * eye), loss, model, p) for p in PRIORS]
    print(f"{'full matrix':16}", *(f"{value:12.2f}" for value in exact))
    for field in FIELDS:
        precision = BlockDiagonal.of(model, field)
        found = [evidence(precision.logdet(p), loss, model, p) for p in PRIORS]
        best = PRIORS[max(range(len(PRIORS)), key=found.__getitem__)]
        with disable(), torch.no_grad():
            near = predict(model, precision, best, x).amax(1).mean()
            away = predict(model, precision, best, far).amax(1).mean()
            certain = model(far).softmax(1).amax(1).mean()
        print(f"{field:16}", *(f"{v:12.2f}" for v in found), f"  {away:.2f}  {near:.2f}")
        if any(v > e + 1e-6 for v, e in zip(found, exact, strict=True)) and field != "kflr":
            raise SystemExit("The determinant of a positive matrix exceeds that of its diagonal.")
        if not away < certain:
            raise SystemExit("Draws are no less certain far from the data than the point estimate.")


if __name__ == "__main__":
    main()
