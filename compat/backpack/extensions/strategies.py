"""Which extension goes by the strategies of ``HBP``. Imports the second-order plugin's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from backpack.extensions.curvature import Curvature
from backpack.extensions.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack_core import Extension
from backpack_core.errors import UnsupportedError
from backpack_secondorder import kfac, kfra
from backpack_secondorder.factors import WeightSharing

_AVERAGE = (LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE)

# Curvature, form of the loss Hessian, and what is carried.
_KNOWN: dict[tuple[str, str, str], Callable[[int, WeightSharing], Extension]] = {
    (Curvature.GGN, LossHessianStrategy.EXACT, BackpropStrategy.SQRT): lambda _, s: kfac.KFLR(s),
    (Curvature.GGN, LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT): kfac.KFAC,
    (Curvature.GGN, *_AVERAGE): lambda _, s: kfra.KFRA(s),
    (Curvature.HESSIAN, *_AVERAGE): lambda _, s: kfra.KFRA(s, residual="exact"),
    (Curvature.PCH_CLIP, *_AVERAGE): lambda _, s: kfra.KFRA(s, residual="clip"),
    (Curvature.PCH_ABS, *_AVERAGE): lambda _, s: kfra.KFRA(s, residual="abs"),
}


@cache
def extension_by(
    curvature: str,
    loss_hessian: str,
    carried: str,
    averaged: str,
    mc_samples: int = 1,
    weight_sharing: WeightSharing = "kfc",
) -> Extension:
    """The extension for a combination of strategies; one object for each.

    Args:
        curvature: Of :class:`Curvature`.
        loss_hessian: Of :class:`LossHessianStrategy`.
        carried: Of :class:`BackpropStrategy`.
        averaged: Of :class:`ExpectationApproximation`.
        mc_samples: Number of samples, for ``SAMPLING``.
        weight_sharing: How positions enter the factors.

    Raises:
        UnsupportedError: Together they define no quantity.
    """
    make = _KNOWN.get((curvature, loss_hessian, carried))
    if make is not None and averaged == ExpectationApproximation.BOTEV_MARTENS:
        return make(mc_samples, weight_sharing)
    asked = (curvature, loss_hessian, carried, averaged)
    if averaged == ExpectationApproximation.CHEN:
        reason = (
            "factors of averaged parameter Jacobians are the curvature of batches of one sample"
        )
    elif curvature != Curvature.GGN:
        reason = "a square root of the Hessian exists only where it is positive semi-definite"
    else:
        reason = "a root is carried for EXACT and SAMPLING, an average for SUM"
    raise UnsupportedError(
        f"HBP{asked} defines no quantity here: {reason}. Use KFAC, KFLR or KFRA, or another "
        "curvature with SUM, BATCH_AVERAGE and BOTEV_MARTENS."
    )
