"""Names of the strategies of Kronecker-factored curvature. Imports nothing."""

from __future__ import annotations

from typing import ClassVar


class _Strategy:
    CHOICES: ClassVar[list[str]] = []
    WHAT: ClassVar[str] = ""

    @classmethod
    def check_exists(cls, strategy: str) -> None:
        """Raise unless a strategy is known.

        Raises:
            AttributeError: It is not.
        """
        if strategy not in cls.CHOICES:
            raise AttributeError(
                f"Unknown {cls.WHAT} strategy: {strategy}. Expecting one of {cls.CHOICES}"
            )


class LossHessianStrategy(_Strategy):
    """What is carried for the loss Hessian."""

    EXACT = "exact"
    SAMPLING = "sampling"
    SUM = "sum"

    CHOICES: ClassVar[list[str]] = [EXACT, SAMPLING, SUM]
    WHAT = "loss Hessian"


class BackpropStrategy(_Strategy):
    """Whether a root is carried for each sample, or one matrix for the batch."""

    SQRT = "sqrt"
    BATCH_AVERAGE = "average"

    CHOICES: ClassVar[list[str]] = [BATCH_AVERAGE, SQRT]
    WHAT = "backpropagation"

    @classmethod
    def is_batch_average(cls, strategy: str) -> bool:
        """Whether it is one matrix for the batch."""
        cls.check_exists(strategy)
        return strategy == cls.BATCH_AVERAGE

    @classmethod
    def is_sqrt(cls, strategy: str) -> bool:
        """Whether it is a root."""
        cls.check_exists(strategy)
        return strategy == cls.SQRT


class ExpectationApproximation(_Strategy):
    """What is averaged over the batch."""

    BOTEV_MARTENS = "E[J^T E(H) J]"
    CHEN = "E(J^T) E(H) E(J)"

    CHOICES: ClassVar[list[str]] = [BOTEV_MARTENS, CHEN]
    WHAT = "EA"

    @classmethod
    def should_average_param_jac(cls, strategy: str) -> bool:
        """Whether parameter Jacobians are averaged, too."""
        cls.check_exists(strategy)
        return strategy == cls.CHEN
