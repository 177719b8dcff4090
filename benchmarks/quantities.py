"""What is computed: names of extensions, the same in this project and in the incumbent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """Extensions that run in one backward pass.

    Attributes:
        name: How it is called on the command line.
        extensions: Class names.
        arguments: For their constructors.
        exact: It has a column for every class.
        square: It carries a matrix of activations by activations, which few convolutions allow.
        random: Two runs differ, so that values cannot be compared.
        curved: It has a column for every activation behind which a module is curved.
        fields: The attributes that parameters get.
    """

    name: str
    extensions: tuple[str, ...]
    fields: tuple[str, ...]
    arguments: tuple[object, ...] = ()
    exact: bool = False
    random: bool = False
    square: bool = False
    curved: bool = False


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("BatchGrad", ("BatchGrad",), ("grad_batch",)),
        Quantity("BatchL2Grad", ("BatchL2Grad",), ("batch_l2",)),
        Quantity("SumGradSquared", ("SumGradSquared",), ("sum_grad_squared",)),
        Quantity("Variance", ("Variance",), ("variance",)),
        Quantity(
            "FirstFour",
            ("BatchGrad", "Variance", "SumGradSquared", "BatchL2Grad"),
            ("grad_batch", "variance", "sum_grad_squared", "batch_l2"),
        ),
        Quantity("BatchDotGrad", ("BatchDotGrad",), ("batch_dot",)),
        Quantity("ClippedSumGrad", ("ClippedSumGrad",), ("grad_clipped",), arguments=(1.0,)),
        Quantity("DiagGGNMC", ("DiagGGNMC",), ("diag_ggn_mc",), random=True),
        Quantity("KFAC", ("KFAC",), ("kfac",), random=True),
        Quantity("BatchDiagGGNMC", ("BatchDiagGGNMC",), ("diag_ggn_mc_batch",), random=True),
        Quantity("SqrtGGNMC", ("SqrtGGNMC",), ("sqrt_ggn_mc",), random=True),
        Quantity("DiagGGNExact", ("DiagGGNExact",), ("diag_ggn_exact",), exact=True),
        Quantity(
            "BatchDiagGGNExact", ("BatchDiagGGNExact",), ("diag_ggn_exact_batch",), exact=True
        ),
        Quantity("SqrtGGNExact", ("SqrtGGNExact",), ("sqrt_ggn_exact",), exact=True),
        Quantity("KFLR", ("KFLR",), ("kflr",), exact=True),
        Quantity("KFRA", ("KFRA",), ("kfra",), exact=True, square=True),
        Quantity(
            "GGNTogether",
            ("DiagGGNExact", "BatchDiagGGNExact", "KFLR"),
            ("diag_ggn_exact", "diag_ggn_exact_batch", "kflr"),
            exact=True,
        ),
        Quantity("DiagHessian", ("DiagHessian",), ("diag_h",), exact=True, curved=True),
    )
}
