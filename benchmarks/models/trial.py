"""A model to try: how it is made, what it is given, and what of its output enters the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_layers.language import CausalLMLoss

SAMPLES, STEPS, VOCABULARY, CLASSES = 3, 5, 11, 4


class Net(Module):
    """A model of any package, as a function of named tensors that returns one tensor ``[N, *]``."""

    def __init__(self, net: Module, output: Callable[[Any], Tensor]) -> None:
        """Wrap a model.

        Args:
            net: The model.
            output: Which tensor of what it returns enters the loss.
        """
        super().__init__()
        self.net = net
        self.output = output

    def forward(self, **inputs: Tensor) -> Tensor:
        """Run the model."""
        found = self.output(self.net(**inputs))
        return found.double()  # some return logits in single precision


@dataclass(frozen=True)
class Trial:
    """One row of the table.

    Attributes:
        name: What the row is called.
        make: Makes the model, in double precision and evaluation mode.
        inputs: Its arguments; all have the samples on axis 0.
        output: See :class:`Net`.
        target: What the loss compares with.
        loss: Makes the loss, a sum over samples.
    """

    name: str
    make: Callable[[], Module]
    inputs: Callable[[], dict[str, Tensor]]
    output: Callable[[Any], Tensor]
    target: Callable[[], Tensor]
    loss: Callable[[], Module] = field(default=lambda: nn.CrossEntropyLoss(reduction="sum"))

    def build(self) -> tuple[Net, dict[str, Tensor], Module, Tensor]:
        """Model, inputs, loss and target: the same each time."""
        torch.manual_seed(0)
        model = Net(self.make().double().eval(), self.output)
        with torch.no_grad():
            for parameter in model.parameters():  # zeros and ones would hide errors
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model, self.inputs(), self.loss(), self.target()


def rounds(output: Tensor) -> bool:
    """Whether a part of what led to a tensor was computed in single precision."""
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(metadata.dtype == torch.float32 for metadata in node._input_metadata):
            return True
        stack += [following for following, _ in node.next_functions]
    return False


def ids(*shape: int) -> Tensor:
    """Tokens. The last of each sequence is different, so that samples differ."""
    return torch.randint(3, VOCABULARY, (SAMPLES, *(shape or (STEPS,))))


def images(channels: int = 3, size: int = 8) -> Tensor:
    """Images."""
    return torch.randn(SAMPLES, channels, size, size, dtype=torch.float64)


def classes(*shape: int, among: int = CLASSES) -> Tensor:
    """Class labels."""
    return torch.randint(0, among, (SAMPLES, *shape))


def logits(result: Any) -> Tensor:
    """The logits, as the model gives them."""
    found: Tensor = result.logits
    return found


def shifted() -> Module:
    """The loss of a model that predicts the next token."""
    return CausalLMLoss("sum")


def unshifted() -> Module:
    """The loss of a model that predicts a token for each position of its decoder."""
    return CausalLMLoss("sum", shift=False)
