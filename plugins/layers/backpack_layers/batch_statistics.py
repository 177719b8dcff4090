"""Batch normalisation in train mode with the statistics of the batch taken as constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from backpack_core.errors import UnsupportedError, UsageError
from backpack_products.values import at_least_single

_STATISTICS: Final = ("running_mean", "running_var")
_held: WeakSet[Module] = WeakSet()


@contextmanager
def batch_statistics(model: Module, treatment: Literal["constant"]) -> Iterator[Module]:
    """Run batch normalisation in train mode so that derivatives stop at the batch's statistics.

    With the exact derivative of train mode, a sample influences the outputs of all others through
    mean and variance. So no quantity belongs to single samples, and a backward pass raises an
    error. In this block, ``y = (x - μ) / √(σ² + ε) · weight + bias`` takes ``μ`` and ``σ²`` of the
    batch as fixed numbers: a map of each sample alone. Outputs and the update of running statistics
    are those of train mode.

    A checkpoint runs its part again in the backward pass, which must then be in the block, too.

    All derivatives of this forward pass have this meaning, ``.grad`` included: it is the sum of
    ``grad_batch``, not the gradient of train mode. For a training step, run a second forward pass
    outside the block.

    Args:
        model: Holds the modules. Those in eval mode with running statistics are left alone.
        treatment: ``"constant"``, the only treatment.

    Yields:
        The model.

    Raises:
        UsageError: The treatment is unknown, or the model has no batch normalisation or is in
            a block of this kind already.
        UnsupportedError: A module computes its statistics over several processes.

    Example:
        >>> with batch_statistics(model, "constant"):
        ...     loss = lossfunc(model(x), y)
        >>> with backpack(BatchGrad(), gradient="none"):
        ...     loss.backward()
    """
    if treatment != "constant":
        raise UsageError(f'batch_statistics takes "constant" as its treatment. Got {treatment!r}.')
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    _check(modules)
    with ExitStack() as stack:
        for module in modules:
            held = _Held(module)
            before = module.register_forward_pre_hook(held.begin, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(held.end, always_call=True).remove)
            _held.add(module)
            stack.callback(_held.discard, module)
        yield model


def _check(modules: list[_BatchNorm]) -> None:
    if not modules:
        raise UsageError(
            "batch_statistics found no batch normalisation in the model: leave it out."
        )
    for module in modules:
        if isinstance(module, SyncBatchNorm):
            raise UnsupportedError(
                "SyncBatchNorm computes its statistics over all processes, which batch_statistics "
                "does not do. Use BatchNorm, or model.eval()."
            )
        if module in _held:
            raise UsageError("The model is in a block of batch_statistics already: leave one out.")


class _Held:
    """Makes a module run in eval mode with the statistics of the batch, one call at a time.

    So rules and autograd see an affine map of fixed numbers, which are recorded as its buffers.
    """

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        self._before: dict[str, Tensor | None] = {}
        self._mode = module.training

    def begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute the statistics, and use them instead of the running ones."""
        norm = self._module
        if not norm.training and norm.running_mean is not None:
            return
        x = [*args, *kwargs.values()][0].detach()
        with torch.no_grad():
            type(norm).forward(norm, x)  # checks the input, and updates the running statistics
            axes = [axis for axis in range(x.dim()) if axis != 1]
            # An input may be of half precision, and all else in single, as under autocast.
            own = [t for t in (norm.running_mean, norm.weight) if t is not None]
            dtype = own[0].dtype if own else x.dtype
            pair = torch.var_mean(at_least_single(x), axes, correction=0)
            variance, mean = (t.to(dtype) for t in pair)
        self._before = {name: norm._buffers[name] for name in _STATISTICS}
        self._mode, norm.training = norm.training, False
        norm._buffers.update(zip(_STATISTICS, (mean, variance), strict=True))

    def end(self, module: Module, inputs: Any, output: Any) -> None:
        """Restore the running statistics."""
        if self._before:
            self._module._buffers.update(self._before)
            self._module.training, self._before = self._mode, {}
