"""Which checks the kit promises for which kind of thing: the contract. Imports nothing.

A check that is listed here and does not run is a failure, whatever the reason; one that runs and is
not listed cannot exist. The implementations are looked up by name in the modules ``*_checks``.
"""

from __future__ import annotations

from dataclasses import dataclass

KIT_VERSION = 1


@dataclass(frozen=True)
class Promise:
    """One check.

    Attributes:
        name: Of the check, and of the function that makes it.
        states: What holds where the check passes.
        needs: Traits a case must have for the check to mean anything; see ``traits``.
    """

    name: str
    states: str
    needs: frozenset[str] = frozenset()


def _rows(needs: str, table: dict[str, str]) -> tuple[Promise, ...]:
    traits = frozenset(trait.strip() for trait in needs.split(",") if trait.strip())
    return tuple(Promise(name, states, traits) for name, states in table.items())


_PRODUCTS = (
    _rows("", {"mixes_samples": "the answer agrees with the Jacobian's blocks between samples"})
    + _rows("once", {"not_twice_differentiable": "torch refuses the second derivative"})
    + _rows("overwritten", {"overwritten_input": "the rule raises instead of using what is left"})
    + _rows("separate, kept", {"accepts": "check() lets the call pass; the rule has no state"})
    + _rows(
        "separate, kept, input",
        {
            "jac_t_mat_prod": "transposed input Jacobian, for every input tensor",
            "jac_mat_prod": "input Jacobian",
            "jac_adjoint": "the two are adjoint",
        },
    )
    + _rows(
        "separate, kept, parameters",
        {
            "param_jac_t_mat_prod": "transposed parameter Jacobian of each sample",
            "param_jac_mat_prod": "parameter Jacobian of each sample",
            "param_jac_adjoint": "the two are adjoint",
            "param_jac_batch_sum": "summed over samples, it is the gradient of the batch",
            "operations": "every operation on the rule's products equals its definition",
        },
    )
    + _rows(
        "separate, kept, elementwise",
        {"derivative": "φ'(x)"},
    )
    + _rows(
        "separate, kept, twice, elementwise, second derivative", {"second_derivative": "φ''(x)"}
    )
    + _rows(
        "separate, kept, twice, second derivative",
        {"second_derivative_mat_prod": "second derivative contracted with a gradient"},
    )
    + _rows(
        "separate, kept, twice, zero hessian", {"hessian_is_zero": "the second derivative vanishes"}
    )
    + _rows(
        "separate, kept, twice, diagonal hessian",
        {"hessian_is_diagonal": "∂²f_o/∂x_i∂x_j = 0 but for i = j = o"},
    )
    + _rows(
        "separate, kept, twice, linear parameters",
        {"linear_in_params": "∂²f/∂θ² = 0 for the declared parameters"},
    )
    + _rows(
        "separate, kept, affine",
        {
            "affine_form": "affine_input and affine_output reproduce the layer, W x + b",
            "affine_weight": "the arrangement of each parameter is a permutation of its entries",
        },
    )
    + _rows(
        "separate, kept, batch first, constant jacobian",
        {"jacobian_is_constant": "∂f/∂x is the same for all samples, and for another input"},
    )
    + _rows(
        "separate, kept, batch first",
        {"subsampled_call": "products of a subsampled call are those of the chosen samples"},
    )
    + _rows(
        "separate, kept",
        {
            "leaves_arguments_alone": "no method writes to the call, the parameters or its columns",
            "non_contiguous_columns": "strides of the columns do not matter",
            "non_contiguous_input": "strides of the inputs do not matter",
        },
    )
)

_NETWORK = _rows(
    "separate",
    {
        "extensions_mean": "every installed extension on the layer in a small net, mean loss",
        "extensions_sum": "the same for a sum",
        "batch_of_one": "the same for one sample",
        "subsampling": "every extension that takes it, on some samples",
        "frozen_layer": "frozen parameters of the layer get no quantity, others the right one",
        "frozen_surroundings": "the same with everything but the layer frozen",
        "float32": "the same in single precision",
        "bfloat16": "the same in half precision",
        "autocast": "the same under autocast",
        "retain_graph": "a second backward pass through the same graph gives the same",
        "called_twice": "the layer called twice in one graph counts both calls",
        "deepcopy": "a deep copy of the extended net gives the same",
        "pickle": "a pickled and restored extended net gives the same",
        "no_live_calls": "no record survives its graph, with and without a backward pass",
    },
) + _rows(
    "mixing",
    {"mixing_is_refused": "what is read of single samples raises; of the loss, it is right"},
)

RULE_CHECKS: tuple[Promise, ...] = _PRODUCTS + _NETWORK

_REDUCED = {
    "sqrt_hessian": "outer products of the root are the Hessian",
    "sqrt_hessian_sampled": "in expectation also those of the sampled one",
    "hessian_mat_prod": "the Hessian times columns",
    "sum_hessian": "the Hessian summed over samples",
    "arriving_gradient": "all of them scale with the gradient that arrives",
    "started_extensions": "every installed extension on a net that ends in this loss",
}

LOSS_CHECKS: tuple[Promise, ...] = _rows(
    "",
    {
        f"{name}_{reduction}": f"{states}, {reduction} loss"
        for reduction in ("mean", "sum")
        for name, states in _REDUCED.items()
    }
    | {
        "hessian_is_psd": "the declared property is true",
        "samples_are_separate": "no sample's loss depends on another sample's prediction",
        "loss_batch_of_one": "the Hessian for one sample",
        "loss_subsampled_call": "a subsampled call has the chosen samples, scaled as before",
        "loss_non_contiguous_input": "strides of the prediction do not matter",
        "loss_float32": "the root and the Hessian in single precision",
        "loss_leaves_arguments_alone": "no method writes to the call",
    },
)

EXTENSION_CHECKS: tuple[Promise, ...] = _rows(
    "",
    {
        "value_mean": "the value is the oracle's, mean loss",
        "value_sum": "the value is the oracle's, sum",
        "value_batch_of_one": "the value for one sample",
        "value_loss_scaled": "the value for half the loss",
        "value_residual": "the value where branches meet in a functional sum",
        "value_shared_positions": "the value where a weight is shared by positions",
        "value_overwritten": "a second backward pass overwrites the value, and does not add",
        "value_frozen": "frozen parameters get no value",
        "value_called_twice": "a parameter used twice: the value of both, or a refusal",
        "value_float32": "the value in single precision",
        "beside_others": "the value does not depend on other extensions in the same pass",
        "leaves_gradient_alone": ".grad is what it is without the extension",
        "pickle_extension": "the extension can be pickled",
        "extension_no_live_calls": "no record survives its graph",
    },
) + (
    _rows("subsampling", {"value_subsampling": "the value for some of the samples"})
    + _rows("savefield", {"savefield": "the value is stored under the name the user chose"})
)

PROMISED: dict[str, tuple[Promise, ...]] = {
    "rule": RULE_CHECKS,
    "loss": LOSS_CHECKS,
    "extension": EXTENSION_CHECKS,
}
