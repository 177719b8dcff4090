"""A layer of your own, in two ways, both verified against autograd.

The layer multiplies its input by one learned number. The first way is *module extensions* of the
distribution ``backpack-compat``: one class for each pair (quantity, layer). The second way is a
*layer rule*: two formulas of one line each. Then every installed quantity works on the layer.

Run: ``python examples/custom_module.py``
"""

import torch
from torch import Tensor, nn

from backpack import extensions as before
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack_core import View, backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_core.testing import temporary_plugin
from backpack_products import ParametricRule


class Gain(nn.Module):
    """``y = weight · x``."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        return x * self.weight


# --- first way: a module extension for every quantity -------------------------------------------


class GainBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of the gain."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):
        """``Σ_d g[n, d] x[n, d]``, shape ``[N, 1]``."""
        return (g_out[0] * module.input0).flatten(1).sum(1, keepdim=True)


class GainDiagGGN(ModuleExtension):
    """The diagonal of the GGN of the gain, and the columns at its input."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):
        """Square of ``Jᵀ S``, summed over columns and samples; shape ``[1]``."""
        return (bpQuantities * module.input0).flatten(2).sum(2).square().sum().unsqueeze(0)

    def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):
        """Columns at the input: the Jacobian is the weight times the identity."""
        return bpQuantities * module.weight


# --- second way: one rule for all quantities ----------------------------------------------------


class GainRule(ParametricRule):
    """How the gain differentiates."""

    module_types = (Gain,)
    params = ("weight",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:  # [V, N, *] -> [V, N, *]
        return mat * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return (mat * view.input).flatten(2).sum(2, keepdim=True)  # [V, N, 1]


# --- the check ----------------------------------------------------------------------------------


def make_problem() -> tuple[nn.Sequential, nn.Module, Tensor, Tensor]:
    """A net with the layer at both ends, a loss, and data."""
    torch.manual_seed(0)
    model = nn.Sequential(Gain(2.0), nn.Linear(4, 3), Gain(0.5))
    return model, nn.CrossEntropyLoss(reduction="sum"), torch.randn(10, 4), torch.arange(10) % 3


def autograd_gradients(
    model: nn.Module, lossfunc: nn.Module, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Individual gradients by a loop, flattened over all parameters: ``[N, P]``."""
    rows = []
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        grads = torch.autograd.grad(lossfunc(model(x), y), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def autograd_diag_ggn(model: nn.Module, inputs: Tensor) -> Tensor:
    """Diagonal of the GGN of a sum of cross-entropies, by explicit Jacobians: ``[P]``."""
    total = torch.tensor(0.0)
    for x in inputs.split(1):
        logits = model(x).squeeze(0)
        p = logits.softmax(0).detach()
        hessian = p.diag() - p.outer(p)
        rows = []
        for logit in logits:
            grads = torch.autograd.grad(logit, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
        jacobian = torch.stack(rows)
        total = total + torch.einsum("cp,cd,dp->p", jacobian, hessian, jacobian)
    return total


def ours(first: BatchGrad, second: DiagGGNExact) -> tuple[Tensor, Tensor]:
    """Both quantities in one backward pass, flattened over all parameters."""
    model, lossfunc, inputs, targets = make_problem()
    model, lossfunc = extend(model), extend(lossfunc)
    loss = lossfunc(model(inputs), targets)
    with backpack(first, second):
        loss.backward()
    parameters = list(model.parameters())
    gradients = torch.cat([p.grad_batch.flatten(1) for p in parameters], dim=1)
    return gradients, torch.cat([p.diag_ggn_exact.flatten() for p in parameters])


def with_module_extensions() -> tuple[Tensor, Tensor]:
    """Register one class for each quantity in the extension instances."""
    batch_grad, diag_ggn = before.BatchGrad(), before.DiagGGNExact()
    batch_grad.set_module_extension(Gain, GainBatchGrad())
    diag_ggn.set_module_extension(Gain, GainDiagGGN())
    return ours(batch_grad, diag_ggn)


def with_a_rule() -> tuple[Tensor, Tensor]:
    """Register the rule. An installed package names it in its entry points instead."""
    with temporary_plugin(GainRule):
        result = ours(BatchGrad(), DiagGGNExact())
        model, lossfunc, inputs, targets = make_problem()
        loss = extend(lossfunc)(extend(model)(inputs), targets)
        with backpack(SumGradSquared()):  # comes with the rule, without a line of code
            loss.backward()
    squares = torch.cat([p.sum_grad_squared.flatten() for p in model.parameters()])
    if not torch.allclose(squares, result[0].square().sum(0)):
        raise SystemExit("SumGradSquared differs from the squares of the individual gradients.")
    return result


def main() -> None:
    """Compare both ways with autograd."""
    model, lossfunc, inputs, targets = make_problem()
    gradients = autograd_gradients(model, lossfunc, inputs, targets)
    diagonal = autograd_diag_ggn(model, inputs)
    for way, result in (
        ("module extensions", with_module_extensions()),
        ("layer rule", with_a_rule()),
    ):
        matches = [
            torch.allclose(result[0], gradients, rtol=1e-4, atol=1e-6),
            torch.allclose(result[1], diagonal, rtol=1e-4, atol=1e-6),
        ]
        print(f"{way}: individual gradients match {matches[0]}, GGN diagonal matches {matches[1]}")
        if not all(matches):
            raise SystemExit(f"The {way} differ from autograd.")


if __name__ == "__main__":
    main()
