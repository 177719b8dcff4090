"""Core alone: rules and quantities of somebody's own over a chain, and what it says of the rest.

A script: it runs where nothing but core is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from backpack_core import (
    Extension,
    LayerRule,
    LossRule,
    Propagator,
    Reading,
    backpack,
    extend,
    register,
)
from backpack_core.errors import MissingPluginError


@register
class LinearRule(LayerRule):
    module_types = (nn.Linear,)
    params = ("weight", "bias")

    def _jac_t_mat_prod(self, view, mat):
        return mat @ view.parameter("weight")

    def at_parameter(self, view, name, mat):
        return mat if name == "bias" else torch.einsum("vno,ni->vnoi", mat, view.input)


@register
class ReLURule(LayerRule):
    module_types = (nn.ReLU,)

    def _jac_t_mat_prod(self, view, mat):
        return mat * (view.output > 0)


@register
class SquaresRule(LossRule):
    module_types = (nn.MSELoss,)

    def normalisation(self, view):
        return 1.0  # only sums are used here

    def gradient(self, view):
        return 2 * (view.input - view.tensor_input(1)) * view.grad_output


class Columns(Reading):
    def __init__(self, mat):
        super().__init__(mat.shape[2:])
        self.mat = mat


@dataclass(frozen=True)
class Sent(Propagator):
    """Columns ``[V, N, *]``: the gradient, or a square root of the Hessian of squares."""

    is_curvature: bool = False

    def start(self, rule, view):
        if not self.is_curvature:
            return rule.gradient(view).unsqueeze(0)
        samples, outputs = view.input.shape
        roots = 2**0.5 * torch.eye(outputs, dtype=view.input.dtype)
        return roots.unsqueeze(1).expand(outputs, samples, outputs)

    def propagate(self, rule, view, quantity):
        (product,) = rule.jac_t_mat_prod(view, quantity)
        return {} if product is None else {0: product}

    def products(self, rule, view, names, quantity):
        return [Columns(rule.at_parameter(view, name, quantity)) for name in names]


class Individual(Extension):
    savefield = "individual"

    def __init__(self):
        super().__init__(Sent())

    def read(self, reading):
        return reading.mat.squeeze(0).clone()


class Diagonal(Extension):
    savefield = "curvature"

    def __init__(self):
        super().__init__(Sent(is_curvature=True))

    def read(self, reading):
        return reading.mat.square().sum((0, 1))


torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
model, lossfunc = extend(net), extend(nn.MSELoss(reduction="sum"))
X, y = torch.rand(5, 3), torch.rand(5, 2)
loss = lossfunc(model(X), y)
with backpack(Individual(), Diagonal()):
    loss.backward()
for parameter in model.parameters():
    diagonal = torch.zeros_like(parameter)
    for n, individual in enumerate(parameter.individual):
        output = model(X[n])
        (grad,) = torch.autograd.grad((output - y[n]).square().sum(), parameter, retain_graph=True)
        assert (individual - grad).abs().max() < 1e-12
        for one in output:
            diagonal += 2 * torch.autograd.grad(one, parameter, retain_graph=True)[0].square()
    assert (parameter.curvature - diagonal).abs().max() < 1e-12


class Around(nn.Module):
    """A module with a layer rule, inside of which another one runs that it does not own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def forward(self, x):
        return 2 * self.inner[0](x)


@register
class AroundRule(LayerRule):
    module_types = (Around,)

    def _jac_t_mat_prod(self, view, mat):
        return 2 * mat @ view.module.inner[0].weight


def refused(output):
    """What is said about a net that is no chain."""
    loss = lossfunc(output, y)
    try:
        with backpack(Individual()):
            loss.backward()
    except MissingPluginError as error:
        return str(error)
    raise AssertionError("The net was taken for a chain.")


nested = nn.Sequential(Around(extend(nn.Linear(3, 3))), nn.Linear(3, 2))
for output in (model[2](torch.tanh(model[0](X))), extend(nested)(X)):
    said = refused(output)
    assert "pip install backpack-operations" in said, said
    print(said)
