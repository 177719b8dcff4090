"""Rule of normalisations and scales: their parameter is a gain on what the layer computes."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_products import ScaleProduct
from backpack_products.parametric import ProductRule
from backpack_products.values import any_of, largest
from backpack_transformers.names import GAINS
from backpack_transformers.probe import output_with

# Only classes with a known source: a class may have this name and compute something else.
_known: set[type] = set()


class GainRule(ProductRule):
    """``y[..., d] = w_d x̂[..., d] + c[..., d] (+ b_d)``; ``x̂``, ``c`` depend only on the input.

    This is the form of all root mean square norms (with gain ``w`` or ``1 + w``, with or without a
    gate), of layer norms with a ``forward`` of their own, and of layer scales. One rule serves all:
    ``x̂`` is the module's output for ``w = 1`` minus that for ``w = 0``. Columns go through the
    autograd graph inside the module, so they are rounded like the gradient.
    """

    module_types = GAINS
    params = ("weight", "bias", "lambda1", "scale")
    linear_in_params = params
    transparent = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis, and modules that do not have this form."""
        parameter = _gain(view)
        if parameter is None:
            return
        if len(view.input_shape) <= view.parameter_itself(parameter).dim():
            raise UnsupportedError(
                f"{view.path} saw an input of shape {list(view.input_shape)}, which has no batch "
                "axis, so it has no samples: use an input [N, ..., features]."
            )
        if type(view.module) not in _known:
            _check_form(view, parameter)
            _known.add(type(view.module))

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")

    def _param_product(self, view: View, name: str, mat: Tensor) -> ScaleProduct:
        shape = view.parameter_itself(name).shape
        if name == "bias":
            return ScaleProduct(_by_entry(view, mat, shape), None, shape)
        inp = view.once(name, lambda: _by_entry(view, _slope(view, name), shape).to(view.dtype))
        return ScaleProduct(_by_entry(view, mat, shape), inp, shape)


def _gain(view: View) -> str | None:
    """Name of the gain, if the module has one."""
    for name in ("weight", "lambda1", "scale"):
        if view.module._parameters.get(name) is not None:
            return name
    return None


def _slope(view: View, name: str) -> Tensor:
    """``x̂``, in the shape of the output."""
    parameter = view.parameter_itself(name)
    one = output_with(view, **{name: torch.ones_like(parameter)})
    return one - output_with(view, **{name: torch.zeros_like(parameter)})


def _by_entry(view: View, x: Tensor, shape: torch.Size) -> Tensor:
    """``[..., N, *out] → [..., N, S, D]`` with the entries of the parameter last."""
    lead = x.dim() - len(view.output_shape)
    if _channels_first(view):
        x = x.movedim(lead + 1, -1)
    positions = x.shape[lead + 1 : x.dim() - len(shape)].numel()
    return x.reshape(*x.shape[: lead + 1], positions, shape.numel())


def _channels_first(view: View) -> bool:
    return getattr(view.module, "data_format", "") == "channels_first"


def _check_form(view: View, name: str) -> None:
    """Check that the output is gain times slope plus offset.

    Raises:
        UnsupportedError: The output is something else.
    """
    parameter = view.parameter_itself(name).detach()
    other = torch.where(parameter == 0, 1, parameter + 0.5)
    with torch.no_grad():
        gain = (other - parameter).to(view.dtype)
        if _channels_first(view):
            gain = gain.reshape(-1, *[1] * (len(view.output_shape) - 2))
        change = output_with(view, **{name: other}) - output_with(view, **{name: parameter})
        slope = _slope(view, name).to(view.dtype)
        error = largest((change - slope * gain).abs())
        # The module may compute in single precision for any dtype, so tolerances are for that.
        rounding = max(torch.finfo(view.dtype).eps, torch.finfo(torch.float32).eps)
        failed = any_of(error > 64 * rounding * largest(slope.abs()).clamp_min(1.0))
    if failed:
        raise UnsupportedError(
            f"{view.path} is a {type(view.module).__name__}. Its {name!r} was a gain in the "
            "version of transformers that backpack-plugin-transformers knows, but is not a gain "
            "here: install that version, freeze the parameter, or update the plugin."
        )
