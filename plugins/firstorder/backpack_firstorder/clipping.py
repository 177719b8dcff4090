"""The sum of clipped individual gradients, for differentially private training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import FirstOrderExtension, LayerRule, ModuleCall, ops
from backpack_core.errors import UsageError
from backpack_core.extension import FailMode

_RETAINED, _SCALED = "clipping: retained", "clipping: scaled"
Clipping: TypeAlias = Literal["flat", "per_layer"]


@dataclass(frozen=True, eq=False)
class Handle:
    """What the clipped sum of one parameter needs, kept until all norms are known."""

    rule: LayerRule
    call: ModuleCall
    name: str
    mat: Tensor
    squared_norm: Tensor  # [N]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``Σ_n weights[n] M[n]``. Shape ``[*θ]``."""
        rule, memo = self.rule, self.call.memo
        if isinstance(rule, ops.MaterializedRule):
            rule = ops.MaterializedRule(_scale(rule.product, weights))
        key = (_SCALED, id(self.mat))
        if key not in memo:  # the same columns for all parameters of the call
            memo[key] = _scale(self.mat, weights)
        return ops.per_sample_sum(rule, self.call, self.name, memo[key]).squeeze(0)


class ClippedSumGrad(FirstOrderExtension):
    """Sum of the individual gradients, each clipped to a norm.

    Stored in ``grad_clipped``, shape ``[*θ]``: ``Σ_n g_n min(1, C / ‖g_n‖)`` with the individual
    gradients ``g_n`` as they arrive: ``∇ ℓ_n`` for a sum and ``1/N ∇ ℓ_n`` for a mean, so that with
    a mean loss a bound ``C`` on the gradients of the samples is written ``max_norm=C/N``.

    ``clipping="flat"`` takes the norm over all parameters of the model that the backward pass
    reaches, ``"per_layer"`` over the parameters of each module by itself (Abadi et al., 2016,
    arXiv:1607.00133, section 3.1; McMahan et al., 2018, arXiv:1710.06963).

    No individual gradient is formed where the layer's rule knows contractions: norms during the
    backward pass, and at its end one more product per layer, of the price of a plain gradient
    (Bu et al., 2023, arXiv:2210.00038). Inputs and output gradients of all layers are kept until
    then.
    """

    savefield = "grad_clipped"
    is_deferred: ClassVar[bool] = True

    def __init__(
        self,
        max_norm: float,
        clipping: Clipping = "flat",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            max_norm: The bound ``C``.
            clipping: Over what norms are taken, see the class.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.

        Raises:
            UsageError: The bound is not positive, or the kind of clipping is unknown.
        """
        if not max_norm > 0:
            raise UsageError(f"max_norm must be positive. Got {max_norm!r}.")
        if clipping not in get_args(Clipping):
            raise UsageError(f"clipping must be one of {get_args(Clipping)}. Got {clipping!r}.")
        super().__init__(subsampling, savefield, fail_mode)
        self.max_norm = max_norm
        self.clipping: Clipping = clipping

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Handle:
        """The norms, and what the sum will need."""
        norms = ops.shared(ops.squared_norm, rule, call, name, mat).squeeze(0)
        if _RETAINED not in call.memo:
            call.memo[_RETAINED] = call.retained()
        return Handle(rule, call.memo[_RETAINED], name, mat, norms)

    def finish(self, values: Mapping[Parameter, Any]) -> dict[Parameter, Tensor]:
        """Weights from the norms, then the weighted sums.

        Args:
            values: A :class:`Handle` for each parameter.

        Returns:
            The clipped sum for each parameter.
        """
        groups: dict[Module | None, list[Tensor]] = {}
        for handle in values.values():
            groups.setdefault(self._group(handle), []).append(handle.squared_norm)
        weights = {key: self._weights(norms) for key, norms in groups.items()}
        calls: dict[int, dict[Parameter, Handle]] = {}
        for parameter, handle in values.items():
            calls.setdefault(id(handle.call), {})[parameter] = handle
        result = {}
        for handles in calls.values():
            for parameter, handle in handles.items():
                result[parameter] = handle.weighted_sum(weights[self._group(handle)])
            handle.call.memo.clear()  # what the parameters of a call share is not kept for others
            handle.call.constants.clear()
        return result

    def _group(self, handle: Handle) -> Module | None:
        return None if self.clipping == "flat" else handle.call.module

    def _weights(self, squared_norms: list[Tensor]) -> Tensor:
        """``min(1, C / ‖g_n‖)``. Shape ``[N]``."""
        norm = torch.stack(squared_norms).sum(0).sqrt()
        # A gradient of zero is left alone, whatever the bound.
        return (self.max_norm / norm).clamp(max=1.0)


def _scale(mat: Tensor, weights: Tensor) -> Tensor:
    """``[V, N, *]`` with each sample times its weight, in the dtype of ``mat``."""
    return mat * weights.to(mat.dtype).reshape(1, -1, *[1] * (mat.dim() - 2))
