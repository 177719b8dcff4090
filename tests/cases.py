"""One problem type: a model, data, a loss, and what to expect."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

import backpack_core.extensions
from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle
from tests.devices import rng_state, set_rng_state


class Net(Module):
    """Modules and parameters by name, and a function of the net and its inputs as forward pass."""

    def __init__(self, function: Callable[..., Any], **parts: Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def mlp() -> nn.Sequential:
    """The smallest net with something to pass through."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


@dataclass
class Problem:
    """A model and a loss on given data.

    Attributes:
        model: Maps the inputs to an output ``[N, *out]``.
        inputs: Its input tensors ``[N, *]``.
        lossfunc: A module of output and target.
        target: The target.
        whole: See :func:`tests.oracle.rows`.
        rtol: Relative error that is allowed.
    """

    model: Module
    inputs: tuple[Tensor, ...]
    lossfunc: Module
    target: Tensor
    whole: bool = False
    rtol: float = 1e-10

    def loss(self) -> Tensor:
        """A forward pass of the extended model and loss."""
        extend(self.model), extend(self.lossfunc)
        result: Tensor = self.lossfunc(self.model(*self.inputs), self.target)
        return result

    def run(self, *extensions: Extension, **options: Any) -> Tensor:
        """A forward and a backward pass with extensions; the loss."""
        self.model.zero_grad()
        loss = self.loss()
        with backpack(*extensions, **options):
            loss.backward()
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, each once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def fields(self, name: str) -> list[Any]:
        """What an extension stored, for every trained parameter."""
        return [getattr(p, name) for p in self.parameters]

    def expected(self, quantity: Callable[..., list[Tensor]]) -> list[Tensor]:
        """An oracle, applied to an untouched copy of model and loss."""
        from backpack_core import unextend

        model, lossfunc = (unextend(copy.deepcopy(m)) for m in (self.model, self.lossfunc))
        state = rng_state()

        def forward(*inputs: Tensor) -> Tensor:
            set_rng_state(state)
            output: Tensor = model(*inputs)
            return output

        parameters = [p for p in model.parameters() if p.requires_grad]
        found = quantity(
            forward, lambda out: lossfunc(out, self.target), self.inputs, parameters, self.whole
        )
        set_rng_state(state)
        return found

    def compare(self, name: str, expected: list[Tensor]) -> None:
        """Compare one field of all trained parameters."""
        for ours, reference in zip(self.fields(name), expected, strict=True):
            oracle.assert_close(ours, reference, self.rtol)

    def check(self, first: bool = True, second: bool = True, **options: Any) -> None:
        """Run the exact extensions in one backward pass and compare all with the oracle."""
        extensions: list[Extension] = []
        gradients = diagonals = []
        if first:
            extensions += [BatchGrad(), SumGradSquared()]
            gradients = self.expected(oracle.individual_gradients)
        if second:
            extensions.append(DiagGGNExact())
            diagonals = [d.sum(0) for d in self.expected(oracle.ggn_diagonals)]
        self.run(*extensions, **options)
        if first:
            self.compare("grad_batch", gradients)
            self.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
            self.compare("grad", [g.sum(0) for g in gradients])
        if second:
            self.compare("diag_ggn_exact", diagonals)


def classification(
    model: Module, shape: tuple[int, ...], batch: int = 3, classes: int = 3, **options: Any
) -> Problem:
    """Random data ``[batch, *shape]`` and classes, with the cross-entropy loss."""
    inputs = (torch.randn(batch, *shape),)
    target = torch.randint(0, classes, (batch,))
    return Problem(model, inputs, nn.CrossEntropyLoss(**options), target)


def names_of_extensions() -> list[str]:
    """Every extension of the installed plugins."""
    known = vars(backpack_core.extensions).get("__all__") or dir(backpack_core.extensions)
    kinds = {name: getattr(backpack_core.extensions, name) for name in known if name[0] != "_"}
    return [n for n, k in kinds.items() if isinstance(k, type) and issubclass(k, Extension)]


REDUCTIONS = ("mean", "sum")


BATCHES = (1, 5)


SETTINGS = list(itertools.product(REDUCTIONS, BATCHES))
