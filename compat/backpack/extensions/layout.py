"""Tables of the incumbent's submodules of ``backpack.extensions``, and what fills them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backpack.core.derivatives import DERIVATIVES
from backpack.extensions import builtin, cells
from backpack.extensions.backprop_extension import (
    FirstOrderBackpropExtension,
    SecondOrderBackpropExtension,
)
from backpack.extensions.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.submodules import make_class, submodule

ROOT = "backpack.extensions"

WEIGHT = ["weight"]
BOTH = ["bias", "weight"]
RECURRENT = ["bias_ih_l0", "bias_hh_l0", "weight_ih_l0", "weight_hh_l0"]

# Layer: its derivatives, and its parameters.
LAYERS: dict[str, tuple[str, list[str]]] = {
    "Linear": ("LinearDerivatives", BOTH),
    **{f"Conv{n}d": (f"Conv{n}DDerivatives", BOTH) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (f"ConvTranspose{n}DDerivatives", BOTH) for n in (1, 2, 3)},
    "BatchNormNd": ("BatchNormNdDerivatives", BOTH),
    "Embedding": ("EmbeddingDerivatives", WEIGHT),
    "RNN": ("RNNDerivatives", RECURRENT),
    "LSTM": ("LSTMDerivatives", RECURRENT),
    **{f"MaxPool{n}d": (f"MaxPool{n}DDerivatives", []) for n in (1, 2, 3)},
    **{f"AvgPool{n}d": (f"AvgPool{n}DDerivatives", []) for n in (1, 2, 3)},
    "AdaptiveAvgPoolNd": ("AdaptiveAvgPool{N}dDerivatives", []),
    **{
        name: (f"{name}Derivatives", [])
        for name in [
            "ReLU",
            "Sigmoid",
            "Tanh",
            "ELU",
            "SELU",
            "LeakyReLU",
            "LogSigmoid",
            "Dropout",
            "Flatten",
            "ZeroPad2d",
            "ScaleModule",
            "SumModule",
            "Permute",
            "Pad",
            "Slicing",
            "MSELoss",
            "CrossEntropyLoss",
        ]
    },
    "BCEWithLogitsLoss": ("BCELossWithLogitsDerivatives", []),
}

# Layers by submodule, as most families have them.
_CONV = {f"conv{n}d": f"Conv{n}d" for n in (1, 2, 3)}
_RECURRENT = {"rnn": "RNN LSTM"}
_CONVTRANSPOSE = {f"convtranspose{n}d": f"ConvTranspose{n}d" for n in (1, 2, 3)}
_CONV_TRANSPOSE = {f"conv_transpose{n}d": f"ConvTranspose{n}d" for n in (1, 2, 3)}
_PARAMETRIC = {"linear": "Linear", "batchnorm_nd": "BatchNormNd", "embedding": "Embedding"}
_SIMPLE = {"dropout": "Dropout", "flatten": "Flatten", "padding": "ZeroPad2d"}
_POOLS = {"pooling": "MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d"}
_ACTIVATIONS = {"activations": "ReLU Sigmoid Tanh ELU SELU LeakyReLU LogSigmoid"}
_LOSSES = {"losses": "MSELoss CrossEntropyLoss BCEWithLogitsLoss"}
_INDEXING = {"pad": "Pad", "slicing": "Slicing"}
_CUSTOM = {"custom_module": "ScaleModule SumModule"}
_ADAPTIVE = {"adaptive_avg_pool_nd": "AdaptiveAvgPoolNd"}
_MATPROD = _SIMPLE | {
    "linear": "Linear", "conv2d": "Conv2d", "pooling": "MaxPool2d AvgPool2d",
    "activations": "ReLU Sigmoid Tanh", "losses": "MSELoss CrossEntropyLoss",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The classes of one package: one for each layer, with one or several prefixes.

    Attributes:
        package: Package under ``backpack.extensions``.
        extensions: The extensions that the package holds.
        bases: Base class of the layers' classes, by prefix.
        base_module: Submodule that holds the base classes.
        submodules: Layers, by submodule.
        loss: Base class of the losses' classes, if it is another.
        names: Classes whose name is not prefix and layer: ``{name: layer}``.
        further: Other names of the base classes, by submodule.
    """

    package: str
    extensions: tuple[type, ...]
    bases: dict[str, type]
    base_module: str
    submodules: dict[str, str]
    loss: type | None = None
    names: dict[str, str] = field(default_factory=dict)
    further: dict[str, str] = field(default_factory=dict)


FAMILIES = (
    Family(
        "firstorder.batch_grad", (builtin.BatchGrad,), {"BatchGrad": cells.BatchGradBase},
        "batch_grad_base", _CONV | _CONV_TRANSPOSE | _PARAMETRIC | _RECURRENT,
    ),
    Family(
        "firstorder.batch_l2_grad", (builtin.BatchL2Grad,), {"BatchL2": cells.BatchL2Base},
        "batch_l2_base",
        {"convnd": "Conv1d Conv2d Conv3d",
         "convtransposend": "ConvTranspose1d ConvTranspose2d ConvTranspose3d",
         **_PARAMETRIC, **_RECURRENT},
        names={"BatchL2BatchNorm": "BatchL2BatchNormNd"},
        further={"convnd": "BatchL2ConvND", "convtransposend": "BatchL2ConvTransposeND"},
    ),
    Family(
        "firstorder.gradient", (), {"Grad": cells.GradBaseModule}, "base",
        _CONV | _CONVTRANSPOSE | _PARAMETRIC | _RECURRENT,
    ),
    Family(
        "firstorder.sum_grad_squared", (builtin.SumGradSquared,), {"SGS": cells.SGSBase},
        "sgs_base", _CONV | _CONVTRANSPOSE | _PARAMETRIC | _RECURRENT,
    ),
    Family(
        "firstorder.variance", (builtin.Variance,), {"Variance": cells.VarianceBaseModule},
        "variance_base", _CONV | _CONVTRANSPOSE | _PARAMETRIC | _RECURRENT,
    ),
    Family(
        "secondorder.diag_ggn",
        (builtin.DiagGGN, builtin.DiagGGNExact, builtin.DiagGGNMC, builtin.BatchDiagGGN,
         builtin.BatchDiagGGNExact, builtin.BatchDiagGGNMC),
        {"DiagGGN": cells.DiagGGNBaseModule, "BatchDiagGGN": cells.DiagGGNBaseModule},
        "diag_ggn_base",
        _CONV | _CONVTRANSPOSE | _PARAMETRIC | _RECURRENT | _SIMPLE | _POOLS | _ACTIVATIONS
        | _LOSSES | _INDEXING | _CUSTOM | _ADAPTIVE | {"permute": "Permute"},
        loss=cells.DiagGGNLoss,
        names={"DiagGGNBCEWithLogitsLossDerivatives": "DiagGGNBCEWithLogitsLoss"},
        further={"convnd": "DiagGGNConvND BatchDiagGGNConvND",
                 "convtransposend": "DiagGGNConvTransposeND BatchDiagGGNConvTransposeND"},
    ),
    Family(
        "secondorder.sqrt_ggn", (builtin.SqrtGGN, builtin.SqrtGGNExact, builtin.SqrtGGNMC),
        {"SqrtGGN": cells.SqrtGGNBaseModule}, "base",
        {"convnd": "Conv1d Conv2d Conv3d",
         "convtransposend": "ConvTranspose1d ConvTranspose2d ConvTranspose3d",
         **_PARAMETRIC, **_SIMPLE, **_POOLS, **_ACTIVATIONS, **_LOSSES, **_INDEXING, **_CUSTOM},
        loss=cells.SqrtGGNBaseLossModule,
        names={"SqrtGGNBCEWithLogithsLoss": "SqrtGGNBCEWithLogitsLoss"},
    ),
    Family(
        "secondorder.diag_hessian", (builtin.DiagHessian, builtin.BatchDiagHessian),
        {"DiagH": cells.DiagHBaseModule, "BatchDiagH": cells.BatchDiagHBaseModule}, "diag_h_base",
        _CONV | _CONVTRANSPOSE | {"linear": "Linear"} | _SIMPLE | _POOLS | _ACTIVATIONS | _LOSSES
        | _INDEXING | _ADAPTIVE,
        further={"convnd": "DiagHConvND BatchDiagHConvND", "losses": "DiagHLoss",
                 "convtransposend": "DiagHConvTransposeND BatchDiagHConvTransposeND"},
    ),
    Family(
        "secondorder.hbp", (builtin.HBP, builtin.KFAC, builtin.KFLR, builtin.KFRA),
        {"HBP": cells.HBPBaseModule}, "hbpbase",
        _CONV | _CONV_TRANSPOSE | _MATPROD | _LOSSES | _CUSTOM,
        names={"HBPMaxpool2d": "HBPMaxPool2d"}, further={"losses": "HBPLoss"},
    ),
    *(
        Family(
            f"curvmatprod.{name.lower()}", (extension,), {name: base}, f"{name.lower()}base",
            _MATPROD | further, names={f"{name}Maxpool2d": f"{name}MaxPool2d", **norms},
            further={"losses": f"{name}Loss"},
        )
        for name, extension, base, further, norms in (
            ("GGNMP", builtin.GGNMP, cells.GGNMPBase, {"batchnorm1d": "BatchNormNd"},
             {"GGNMPBatchNorm1d": "GGNMPBatchNormNd"}),
            ("HMP", builtin.HMP, cells.HMPBase, {"batchnorm1d": "BatchNormNd"},
             {"HMPBatchNorm1d": "HMPBatchNormNd"}),
            ("PCHMP", builtin.PCHMP, cells.PCHMPBase, {}, {}),
        )
    ),
)  # fmt: skip

_PACKAGES: dict[str, dict[str, Any]] = {
    "firstorder": {c.__name__: c for f in FAMILIES[:5] for c in f.extensions},
    "firstorder.base": {
        "FirstOrderModuleExtension": cells.FirstOrderModuleExtension,
        "FirstOrderBackpropExtension": FirstOrderBackpropExtension,
    },
    "secondorder": {
        c.__name__: c
        for f in FAMILIES
        if f.package.startswith("secondorder")
        for c in f.extensions
        if not c.__name__.endswith("DiagGGN") and c.__name__ != "SqrtGGN"
    },
    "secondorder.base": {"SecondOrderBackpropExtension": SecondOrderBackpropExtension},
    "curvmatprod": {c.__name__: c for f in FAMILIES[-3:] for c in f.extensions},
}

_STRATEGIES = (LossHessianStrategy, BackpropStrategy, ExpectationApproximation)


def _constructor(base: Any, layer: str, sums: bool) -> Any:
    """The ``__init__`` that gives a layer's class its derivatives and parameters."""
    derivatives, params = LAYERS[layer]
    args: dict[str, Any] = {"params": list(params)} if params else {}
    if params and issubclass(base, cells.DiagGGNBaseModule):
        args["sum_batch"] = sums

    def variance(self: Any) -> None:
        own: Any = DERIVATIVES[derivatives]()
        grad, sgs = cells.GradBaseModule(own, params), cells.SGSBase(own, params)
        base.__init__(self, params, grad, sgs)

    def dimensional(self: Any, N: int) -> None:
        base.__init__(self, DERIVATIVES[derivatives.format(N=N)]())

    def plain(self: Any) -> None:
        base.__init__(self, derivatives=DERIVATIVES[derivatives](), **args)

    if issubclass(base, cells.VarianceBaseModule):
        return variance
    return dimensional if "{N}" in derivatives else plain


def _fill(family: Family) -> None:
    package = f"{ROOT}.{family.package}"
    submodule(package, {c.__name__: c for c in family.extensions})
    bases = dict.fromkeys(family.bases.values())
    submodule(f"{package}.{family.base_module}", {base.__name__: base for base in bases})
    other_names = {regular: name for name, regular in family.names.items()}
    for where in {**family.submodules, **family.further}:
        members: dict[str, Any] = {}
        for name in family.further.get(where, "").split():
            members[name] = next(b for p, b in family.bases.items() if name.startswith(p))
        if where == "losses" and family.loss is not None:
            members[family.loss.__name__] = family.loss
        for layer in family.submodules.get(where, "").split():
            for position, (prefix, base) in enumerate(family.bases.items()):
                if position and not LAYERS[layer][1]:
                    continue  # without parameters, one class serves both
                kind = family.loss if layer.endswith("Loss") and family.loss else base
                name = other_names.get(prefix + layer, prefix + layer)
                members[name] = make_class(
                    f"{package}.{where}", name, (kind,), f"{prefix} at {layer}.",
                    __init__=_constructor(kind, layer, sums=not position),
                )  # fmt: skip
        submodule(f"{package}.{where}", members)


def fill() -> None:
    """Make every submodule."""
    for name in ("firstorder", "secondorder", "curvmatprod"):
        submodule(f"{ROOT}.{name}", _PACKAGES[name])
    for name in ("firstorder.base", "secondorder.base"):
        submodule(f"{ROOT}.{name}", _PACKAGES[name])
    for family in FAMILIES:
        _fill(family)
    hbp = submodule(
        f"{ROOT}.secondorder.hbp.hbp_options", {cls.__name__: cls for cls in _STRATEGIES}
    )
    for package in ("hbp", "diag_ggn", "sqrt_ggn"):  # where scripts import the strategies from
        holder = __import__(f"{ROOT}.secondorder.{package}", fromlist=["_"])
        holder.__dict__.update({cls.__name__: hbp.__dict__[cls.__name__] for cls in _STRATEGIES})
