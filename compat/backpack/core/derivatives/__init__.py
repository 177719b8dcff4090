"""Derivatives of layers: one class for each layer, under the incumbent's module and class names.

Layer rules do all computations. The classes (``backpack.core.derivatives.linear.LinearDerivatives``
and so on) differ in their names only, so they are made from a table.
"""

from __future__ import annotations

from typing import Any

from backpack.core.derivatives import basederivatives, families, likelihoods
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseParameterDerivatives
from backpack.core.derivatives.families import (
    AdaptivePoolingDerivatives,
    ConvolutionDerivatives,
    ElementwiseDerivatives,
    LinearLayerDerivatives,
    PoolingDerivatives,
    weight_jac_t_save_memory,
    with_dimensions,
)
from backpack.core.derivatives.likelihoods import (
    BCEWithLogitsDerivatives,
    CrossEntropyDerivatives,
    MSEDerivatives,
    NLLLossDerivatives,
)
from backpack.submodules import make_class, submodule

# Submodule: class name and base class.
_CLASSES: dict[str, tuple[str, type]] = {
    "batchnorm_nd": ("BatchNormNdDerivatives", BaseParameterDerivatives),
    "bcewithlogitsloss": ("BCELossWithLogitsDerivatives", BCEWithLogitsDerivatives),
    "crossentropyloss": ("CrossEntropyLossDerivatives", CrossEntropyDerivatives),
    "dropout": ("DropoutDerivatives", ElementwiseDerivatives),
    "elu": ("ELUDerivatives", ElementwiseDerivatives),
    "embedding": ("EmbeddingDerivatives", BaseParameterDerivatives),
    "flatten": ("FlattenDerivatives", BaseDerivatives),
    "leakyrelu": ("LeakyReLUDerivatives", ElementwiseDerivatives),
    "linear": ("LinearDerivatives", LinearLayerDerivatives),
    "logsigmoid": ("LogSigmoidDerivatives", ElementwiseDerivatives),
    "lstm": ("LSTMDerivatives", BaseParameterDerivatives),
    "mseloss": ("MSELossDerivatives", MSEDerivatives),
    "pad": ("PadDerivatives", BaseDerivatives),
    "permute": ("PermuteDerivatives", BaseDerivatives),
    "relu": ("ReLUDerivatives", ElementwiseDerivatives),
    "rnn": ("RNNDerivatives", BaseParameterDerivatives),
    "scale_module": ("ScaleModuleDerivatives", BaseDerivatives),
    "selu": ("SELUDerivatives", ElementwiseDerivatives),
    "sigmoid": ("SigmoidDerivatives", ElementwiseDerivatives),
    "slicing": ("SlicingDerivatives", BaseDerivatives),
    "sum_module": ("SumModuleDerivatives", BaseDerivatives),
    "tanh": ("TanhDerivatives", ElementwiseDerivatives),
    "zeropad2d": ("ZeroPad2dDerivatives", BaseDerivatives),
}

# Families with a class for any number of dimensions, in a submodule of its own, and one for each of
# 1, 2, 3: (submodule, class, base, submodule of the n-th, class of the n-th).
_DIMENSIONAL = (
    ("convnd", "ConvNDDerivatives", ConvolutionDerivatives, "conv{n}d", "Conv{n}DDerivatives"),
    ("conv_transposend", "ConvTransposeNDDerivatives", ConvolutionDerivatives,
     "conv_transpose{n}d", "ConvTranspose{n}DDerivatives"),
    ("avgpoolnd", "AvgPoolNDDerivatives", PoolingDerivatives,
     "avgpool{n}d", "AvgPool{n}DDerivatives"),
    ("maxpoolnd", "MaxPoolNDDerivatives", PoolingDerivatives,
     "maxpool{n}d", "MaxPool{n}DDerivatives"),
    ("adaptive_avg_pool_nd", "AdaptiveAvgPoolNDDerivatives", AdaptivePoolingDerivatives,
     "adaptive_avg_pool_nd", "AdaptiveAvgPool{n}dDerivatives"),
)  # fmt: skip

DERIVATIVES: dict[str, type[BaseDerivatives]] = {}
"""Every class, by name."""


def _make(where: str, name: str, base: type, **namespace: Any) -> type[BaseDerivatives]:
    cls = make_class(f"{__name__}.{where}", name, (base,), f"See :class:`{base.__name__}`.",
                     **namespace)  # fmt: skip
    DERIVATIVES[name] = cls
    return cls


def _fill() -> None:
    modules: dict[str, dict[str, Any]] = {
        "elementwise": {"ElementwiseDerivatives": ElementwiseDerivatives},
        "nll_base": {"NLLLossDerivatives": NLLLossDerivatives},
        "convnd": {"weight_jac_t_save_memory": weight_jac_t_save_memory},
    }
    for where, (name, base) in _CLASSES.items():
        modules[where] = {name: _make(where, name, base)}
    for where, name, base, where_n, name_n in _DIMENSIONAL:
        general = _make(where, name, base)
        modules.setdefault(where, {})[name] = general
        for n in (1, 2, 3):
            place, own = where_n.format(n=n), name_n.format(n=n)
            cls = _make(place, own, general, **with_dimensions(general, n))
            modules.setdefault(place, {})[own] = cls
    for where, members in modules.items():
        submodule(f"{__name__}.{where}", members)


_fill()

__all__ = ["DERIVATIVES", "basederivatives", "families", "likelihoods"]
