"""Checks that several passes over a loader see the same data and the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from backpack_core.errors import UsageError


def require_deterministic(model: Module) -> None:
    """Raise an error if a module is random, or if a forward pass changes its statistics.

    Raises:
        UsageError: A dropout or batch normalisation is in train mode.
    """
    for name, module in model.named_modules():
        is_random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (is_random or isinstance(module, _BatchNorm)):
            raise UsageError(
                f"A matrix over a data set needs the same function in every pass, but {name!r}, "
                f"{type(module).__name__}, is in train mode: call model.eval()."
            )


def require_present(model: Module, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise an error if parameters of a matrix were replaced in the model since.

    Raises:
        UsageError: One was.
    """
    present = {id(parameter) for parameter in model.parameters()}
    for parameter, name in zip(parameters, names, strict=True):
        if id(parameter) not in present:
            raise UsageError(
                f"The parameter {name!r} is no longer the model's: it was replaced (by "
                "load_state_dict(..., assign=True), for example). Make the matrix again."
            )


def require_parameters(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise an error if a matrix over these parameters cannot be formed.

    Args:
        parameters: In the order of the rows.
        names: Their names in the model; empty for one that is not there.

    Raises:
        UsageError: There is none, one is not the model's or not trained, or they differ in dtype.
    """
    if not parameters:
        raise UsageError("A matrix over parameters needs at least one that is trained. Got none.")
    for position, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        where = repr(name) if name else f"at position {position} of parameters"
        if not name:
            raise UsageError(f"The tensor {where} is not a parameter of the model.")
        if not parameter.requires_grad:
            raise UsageError(f"The parameter {where} is frozen: leave it out of parameters.")
        if parameter.dtype != parameters[0].dtype or parameter.device != parameters[0].device:
            raise UsageError(
                "Parameters of one matrix must have one precision and device. Got "
                f"{parameters[0].dtype} on {parameters[0].device}, and {parameter.dtype} on "
                f"{parameter.device} for {where}: choose with parameters=[...]."
            )


class Passes:
    """Compares the losses of each pass with those of the first one.

    Attributes:
        in_order: Whether batches must also come in the same order. If not, only the sums of the
            losses are compared.
    """

    def __init__(self, parameters: Sequence[Tensor], in_order: bool) -> None:
        """Begin without a first pass.

        Args:
            parameters: When these change, the next pass counts as the first one.
            in_order: See the class.
        """
        self._parameters, self.in_order = parameters, in_order
        self._known: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    @contextmanager
    def one(self) -> Iterator[Callable[[Tensor], None]]:
        """The context of one pass: a function to be called with the loss of every batch.

        Raises:
            UsageError: The losses differ from those of the first pass, the loader gave no batch, or
                nothing can be differentiated.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("Nothing can be differentiated inside torch.inference_mode().")
        losses: list[Tensor] = []
        yield losses.append
        if not losses:
            raise UsageError(
                "The loader gave no batch with a sample that counts: pass something that can be "
                "iterated several times, such as a DataLoader or a list, with some targets that "
                "are not ignored."
            )
        versions = tuple(p._version for p in self._parameters)
        values = _summary(self._parameters)
        sums = torch.stack([loss.reshape(()) for loss in losses])
        if not self.in_order:
            sums = sums.sum(0, keepdim=True)
        known = self._known
        if known is None or known[0] != versions or not torch.equal(known[1], values):
            self._known = versions, values, sums
            return
        before = known[2]
        bound = 10 * torch.finfo(sums.dtype).eps ** 0.6 * before.abs().max()
        if sums.shape != before.shape or bool((sums - before).abs().max() > bound):
            raise UsageError(
                "Two passes over the loader differ: the losses of the batches "
                f"{'' if self.in_order else 'add up to '}{_text(before)} in the first one, and "
                f"{_text(sums)} now. Take a loader without random augmentation"
                f"{' that does not shuffle' if self.in_order else ''}, and a model without random "
                "numbers. If you changed the model or the data in between, make a new operator."
            )


def _summary(parameters: Sequence[Tensor]) -> Tensor:
    """Numbers that differ for other values; versions do not tell that memory was exchanged."""
    with torch.no_grad():
        return torch.stack([number for p in parameters for number in (p.sum(), p.norm())])


def _text(losses: Tensor) -> str:
    values = ", ".join(f"{value:.8g}" for value in losses[:3].tolist())
    return f"{values}, …" if len(losses) > 3 else values
