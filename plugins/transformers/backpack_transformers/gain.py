"""Rule of normalisations and scales: the parameter is a gain, of whatever the layer computes."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import ScaleProduct, View
from backpack_core.contract.parametric import ProductRule
from backpack_core.errors import UnsupportedError
from backpack_core.values import any_of, largest
from backpack_transformers.names import GAINS
from backpack_transformers.probe import output_with

# Classes that were looked at: that a class computes what its name says is a fact of the class.
_known: set[type] = set()


class GainRule(ProductRule):
    """``y[..., d] = w_d x̂[..., d] + c[..., d] (+ b_d)``, with ``x̂`` and ``c`` of no parameter.

    All the root mean square norms (with ``w`` or ``1 + w`` in front of what is normalised, with a
    gate or without), layer norms with a forward pass of their own, and layer scales have this form.
    ``x̂`` is what the module computes for ``w = 1`` less what it computes for ``w = 0``, so there is
    one rule for all. Columns go through the autograd graph inside, rounded as the gradient is.
    """

    module_types = GAINS
    params = ("weight", "bias", "lambda1", "scale")
    linear_in_params = params
    transparent = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis, and classes that compute something else by now."""
        parameter = _gain(view)
        if parameter is None:
            return
        if len(view.input_shape) <= view.parameter_itself(parameter).dim():
            raise UnsupportedError(
                f"{view.path} saw an input of shape {list(view.input_shape)}, which has no batch "
                "axis, so there are no samples to speak of: use an input [N, ..., features]."
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
    """Raise unless the output is the gain times the slope, and an offset.

    Raises:
        UnsupportedError: It is not.
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
        # In single precision at best, whatever the dtype.
        rounding = max(torch.finfo(view.dtype).eps, torch.finfo(torch.float32).eps)
        failed = any_of(error > 64 * rounding * largest(slope.abs()).clamp_min(1.0))
    if failed:
        raise UnsupportedError(
            f"{view.path} is a {type(view.module).__name__}, whose {name!r} was a gain in the "
            "version of transformers that backpack-plugin-transformers knows, and is none here: "
            "install that version, freeze the parameter, or update the plugin."
        )
