"""Models of small packages, each of another kind: tables, sets, densities, equations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from benchmarks.models.trial import SAMPLES, STEPS, VOCABULARY, Trial, classes, ids

ROWS = 5  # points of a set


def made(path: str, **options: Any) -> Callable[[], Module]:
    """A factory of a class, named by ``module:name``."""

    def make() -> Module:
        module, name = path.split(":")
        found: Module = getattr(importlib.import_module(module), name)(**options)
        return found

    return make


def normal(*shape: int) -> Tensor:
    """Numbers for each sample, ``[N, *shape]``."""
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def squares() -> Module:
    """A loss for numbers."""
    return nn.MSELoss(reduction="sum")


def transformer(name: str, options: dict[str, Any]) -> Trial:
    """A decoder of x-transformers, a token for each token."""
    small = {"dim": 8, "depth": 1, "heads": 2, "attn_dim_head": 8, "ff_mult": 1}

    def make() -> Module:
        package: Any = importlib.import_module("x_transformers")
        layers = package.Decoder(**small, **options)
        sizes = {"num_tokens": VOCABULARY, "max_seq_len": 6}
        net: Module = package.TransformerWrapper(**sizes, attn_layers=layers)
        return net

    return Trial(
        f"x-transformers, {name}",
        make,
        lambda: {"x": ids()},
        lambda result: result.transpose(1, 2),
        lambda: classes(STEPS, among=VOCABULARY),
    )


class Flow(Module):
    """The density of a normalising flow of zuko at points, given a context."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.flow: Any = made(f"zuko.flows:{name}", features=2, context=3, **options)()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """The logarithms of densities, ``[N]``."""
        found: Tensor = self.flow(context).log_prob(x)
        return found


def flow(name: str, kind: str, **options: Any) -> Trial:
    """A normalising flow."""
    return Trial(
        f"zuko, {name}",
        lambda: Flow(kind, hidden_features=[6], **options),
        lambda: {"x": normal(2), "context": normal(3)},
        lambda result: result,
        lambda: normal(),
        squares,
    )


class Solved(Module):
    """A differential equation whose right-hand side is a net, solved by torchdiffeq."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The state at the end, by Runge-Kutta steps."""
        odeint: Any = importlib.import_module("torchdiffeq").odeint
        times = torch.linspace(0, 1, 3, dtype=x.dtype)
        ends: Tensor = odeint(lambda _, state: self.net(state), x, times, method="rk4")
        out: Tensor = self.head(ends[-1])
        return out


class Equivariant(Module):
    """A tensor product with weights from a net, and a gate, by e3nn."""

    def __init__(self) -> None:
        super().__init__()
        self.o3: Any = importlib.import_module("e3nn.o3")
        e3nn: Any = importlib.import_module("e3nn.nn")
        sphere = self.o3.Irreps.spherical_harmonics(2)
        self.product = self.o3.FullyConnectedTensorProduct(
            "2x0e+1x1o", sphere, "3x0e+2x1o", shared_weights=False
        )
        self.weights = e3nn.FullyConnectedNet([1, 6, self.product.weight_numel], torch.tanh)
        self.gate = e3nn.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
        self.before = self.o3.Linear("3x0e+2x1o", self.gate.irreps_in)
        self.after = self.o3.Linear(self.gate.irreps_out, "4x0e")
        self.sphere = sphere

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        """Four numbers that do not change if the space is turned."""
        harmonics = self.o3.spherical_harmonics(self.sphere, direction, normalize=True)
        weights = self.weights(direction.norm(dim=-1, keepdim=True))
        out: Tensor = self.after(self.gate(self.before(self.product(x, harmonics, weights))))
        return out


def table(name: str, kind: str, **options: Any) -> Trial:
    """A net for tables, by the authors of rtdl."""
    path = f"rtdl_revisiting_models:{kind}"
    settings = {"d_in": 3, "d_out": 4, "n_blocks": 2, "d_block": 5}
    make = made(path, **{**settings, **options})
    return Trial(f"rtdl, {name}", make, lambda: {"x": normal(3)}, lambda r: r, classes)


def feature_tokens() -> Module:
    """A transformer over the columns of a table."""
    kind: Any = importlib.import_module("rtdl_revisiting_models").FTTransformer
    options = kind.get_default_kwargs()
    options |= {"n_blocks": 2, "d_block": 8, "attention_n_heads": 2, "ffn_d_hidden_multiplier": 1.0}
    net: Module = kind(n_cont_features=3, cat_cardinalities=[4, 5], d_out=4, **options)
    return net


def perceiver() -> Module:
    """Few latent vectors that read a set, by layers that are used twice."""
    small = {"num_latents": 3, "latent_dim": 4, "cross_dim_head": 2, "latent_dim_head": 2}
    options = {"input_channels": 3, "input_axis": 1, "num_freq_bands": 1, "max_freq": 2.0}
    heads = {"cross_heads": 1, "latent_heads": 2, "num_classes": 4, "depth": 2}
    shared = {"weight_tie_layers": True}
    return made("perceiver_pytorch:Perceiver", **options, **small, **heads, **shared)()


TRIALS: list[Trial] = [
    transformer("decoder", {}),
    transformer(
        "rotary, gated, RMSNorm", {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True}
    ),
    transformer(
        "ALiBi, one key head",
        {"alibi_pos_bias": True, "alibi_num_heads": 1, "attn_one_kv_head": True},
    ),
    transformer("hyper-connections", {"num_residual_streams": 2}),
    transformer("gated residuals", {"gate_residual": True}),
    table("MLP", "MLP", dropout=0.0),
    table("ResNet", "ResNet", d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0),
    Trial(
        "rtdl, FT-Transformer",
        feature_tokens,
        lambda: {"x_cont": normal(3), "x_cat": torch.randint(4, (SAMPLES, 2))},
        lambda result: result,
        classes,
    ),
    Trial(
        "Perceiver",
        perceiver,
        lambda: {"data": normal(ROWS, 3)},
        lambda result: result,
        classes,
    ),
    flow("autoregressive", "MAF", transforms=2),
    flow("splines", "NSF", transforms=2),
    Trial(
        "e3nn, equivariant",
        Equivariant,
        lambda: {"x": normal(5), "direction": normal(3)},
        lambda result: result,
        classes,
    ),
    Trial("torchdiffeq, Runge-Kutta", Solved, lambda: {"x": normal(3)}, lambda r: r, classes),
]
