"""How far the individual gradients of a batch agree, over all parameters of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import ShapeError, UsageError


@dataclass(frozen=True, eq=False)
class Agreement:
    """Cosines and noise of ``N`` gradients, all from their Gram matrix.

    Only :attr:`gram` and :attr:`norms` depend on the scale of the loss.

    Attributes:
        gram: ``⟨g_n, g_m⟩`` over all parameters, ``[N, N]``.
    """

    gram: Tensor

    @property
    def norms(self) -> Tensor:
        """``‖g_n‖``, ``[N]``."""
        return self.gram.diagonal().clamp(min=0).sqrt()

    @property
    def cosines(self) -> Tensor:
        """``⟨g_n, g_m⟩ / (‖g_n‖ ‖g_m‖)``, ``[N, N]``; zero where a gradient is zero."""
        norms = self.norms
        return _divided(self.gram, norms[:, None] * norms)

    @property
    def cosine_to_mean(self) -> Tensor:
        """Cosine of the angle between each gradient and the mean, ``[N]``; zero if one is zero."""
        along = self.gram.mean(1)  # ⟨g_n, ḡ⟩
        return _divided(along, self.norms * along.mean().clamp(min=0).sqrt())

    @property
    def noise_scale(self) -> Tensor:
        """The simple noise scale ``tr(Σ) / ‖G‖²``, a number of samples.

        ``Σ`` is the covariance of an individual gradient and ``G`` its expectation; numerator and
        denominator are estimated without bias. The gradient of a batch of about this size has as
        much signal as noise (McCandlish et al., 2018, arXiv:1812.06162, appendix A.1). The value is
        infinite if the batch shows no signal. It is a difference of inner products: in single
        precision, it is right to 10⁻⁶ samples, and zero where rounding leaves less than nothing.

        Raises:
            ShapeError: The batch has one gradient, which says nothing about noise.
        """
        samples = len(self.gram)
        if samples < 2:
            raise ShapeError(
                f"The noise scale compares gradients with each other. Got {samples} of them: "
                "take a batch of at least two samples."
            )
        mean = self.gram.mean()  # ‖ḡ‖²
        noise = (self.gram.diagonal().sum() - samples * mean) / (samples - 1)
        signal = mean - noise / samples
        noisy = (noise / signal).clamp(min=0)
        return torch.where(signal <= 0, torch.inf, noisy)


def agreement(model: Module, savefield: str = "batch_dot") -> Agreement:
    """Sum the results of ``BatchDotGrad`` over the parameters of a model.

    Args:
        model: The model, after a backward pass with ``BatchDotGrad``.
        savefield: The attribute that stores them.

    Raises:
        UsageError: No parameter has the field.
        ShapeError: Parameters have it for different samples.

    Example:
        >>> with backpack(BatchDotGrad(), gradient="shared"):
        ...     loss.backward()
        >>> agreement(model).noise_scale
    """
    grams = [getattr(p, savefield) for p in model.parameters() if hasattr(p, savefield)]
    if not grams:
        raise UsageError(
            f"No parameter has {savefield!r}: go backward inside backpack(BatchDotGrad()) first."
        )
    shapes = {tuple(gram.shape) for gram in grams}
    if len(shapes) > 1:
        raise ShapeError(
            f"Parameters have {savefield!r} of different shapes {sorted(shapes)}, so some come "
            "from another pass: go backward through the whole model once."
        )
    return Agreement(torch.stack([gram.to(grams[0].device) for gram in grams]).sum(0))


def _divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A quotient; zero where the denominator is zero."""
    zero = denominator == 0
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))
