"""Names of curvatures. Imports nothing."""

from __future__ import annotations

from typing import ClassVar


class Curvature:
    """Which matrix is meant, and what it asks of a loss."""

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH_ABS = "pch-abs"
    PCH_CLIP = "pch-clip"

    CHOICES: ClassVar[list[str]] = [HESSIAN, GGN, PCH_CLIP, PCH_ABS]

    @classmethod
    def require_residual(cls, curv_type: str) -> bool:
        """Whether second derivatives of layers matter."""
        return cls._known(curv_type) != cls.GGN

    @classmethod
    def is_pch(cls, curv_type: str) -> bool:
        """Whether it is a positive-curvature Hessian (Chen et al., 2018)."""
        return cls._known(curv_type) in (cls.PCH_ABS, cls.PCH_CLIP)

    @classmethod
    def check_loss_hessian(cls, loss_hessian_is_psd: bool, curv_type: str) -> None:
        """Raise an error if the loss needs a positive semi-definite Hessian, and has none.

        Args:
            loss_hessian_is_psd: Whether the loss has one.
            curv_type: The curvature.

        Raises:
            ValueError: The loss must have one, and does not.
        """
        if cls._known(curv_type) != cls.HESSIAN and not loss_hessian_is_psd:
            raise ValueError(
                f"{curv_type} needs a loss with a positive semi-definite Hessian, but the Hessian "
                "of this one is indefinite."
            )

    @classmethod
    def _known(cls, curv_type: str) -> str:
        if curv_type not in cls.CHOICES:
            raise AttributeError(f"Unknown curvature: {curv_type}. Expecting one of {cls.CHOICES}")
        return curv_type
