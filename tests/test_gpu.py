"""What only a GPU does: kernels of lower precision, and passes that the host runs ahead of.

Its tensors are made there whatever ``--device`` says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import backpack_core.extensions
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, ClippedSumGrad, DiagGGNExact
from tests.cases import Net, names_of_extensions
from tests.core.test_no_waits import CASES, MODELS, OPTIONS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.host("it says itself where tensors are"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
]
N, LENGTH, WIDTH = 4, 5, 16
QUERY = torch.ones((), device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _single_precision(_double_precision: None) -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.cuda.set_sync_debug_mode("default")


WAITING = {"EKFAC"}  # eigenvalues are computed with the host's help


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] not in WAITING])
def test_a_planned_pass_does_not_wait(name: str, kind: str) -> None:
    """The pass 16 is measured, and recordings are compared with the engine at few others."""
    with torch.device("cuda"):
        model, lossfunc, x, target = MODELS[name]()
    extend(model), extend(lossfunc)
    options = {**OPTIONS, "GradInner": {"queries": lambda _, shape: QUERY.expand(2, *shape)}}
    extension = getattr(backpack_core.extensions, kind)(**options.get(kind, {}))
    found: dict[int, set[str]] = {}
    for passes in range(1, 32):
        model.zero_grad()
        flags = torch.backends.cudnn.flags(enabled=name != "recurrent")
        with torch.device("cuda"), sdpa_kernel(SDPBackend.MATH), flags:
            loss = lossfunc(model(x), target)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            with backpack(extension):
                loss.backward()
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in told if "synchronizing" in str(w.message)]
        if waits and passes > 16:
            found[passes] = {Path(w.filename).name for w in waits}
    # Where masks hide a part of the net, passes are measured again: these look at values.
    others = [files for files in found.values() if "dyed.py" not in files]
    assert set().union(*others) <= {"graph.py"}, found
    assert len(found) < 15


def _module(heads: int, **call: Any) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        return net.last(h + net.attention(h, h, h, need_weights=False, **call)[0]).mean(1)

    attention = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
    return Net(
        forward, first=nn.Linear(WIDTH, WIDTH), attention=attention, last=nn.Linear(WIDTH, 3)
    )


def _function(heads: int, **call: Any) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2).flatten(2)
        return net.last(net.out(mixed)).mean(1)

    return Net(
        forward,
        qkv=nn.Linear(WIDTH, 3 * WIDTH),
        out=nn.Linear(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, 3),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "module, two heads": lambda: _module(2),
    "module, heads of four": lambda: _module(4),
    "function": lambda: _function(2),
    "function, heads of four": lambda: _function(4),
    "function, causal": lambda: _function(2, is_causal=True),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(2, (4, 4)), nn.Conv2d(LENGTH, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3),
    ),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(2, (4, 4)), nn.Conv2d(LENGTH, 8, 3, padding=1), nn.GELU(),
        nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3),
    ).to(memory_format=torch.channels_last),
    "lstm": lambda: Net(
        lambda net, x: net.last(net.layer(x)[0].mean(1)),
        layer=nn.LSTM(WIDTH, 8, batch_first=True), last=nn.Linear(8, 3),
    ),
    "norms": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), nn.GroupNorm(1, LENGTH),
        nn.Flatten(), nn.Dropout(0.0), nn.Linear(LENGTH * WIDTH, 3),
    ),
}  # fmt: skip
# The error that rounding leaves, relative to the largest entry.
PRECISIONS = {torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def _fields(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    lossfunc = extend(nn.CrossEntropyLoss())
    clipped = ClippedSumGrad(0.5, normaliser=None)
    for _ in range(3):
        model.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(BatchGrad(), DiagGGNExact(), clipped):
            loss.backward()
    names = ("grad", "grad_batch", "diag_ggn_exact", "grad_clipped")
    return [{name: getattr(p, name) for name in names} for p in model.parameters()]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_kernels_of_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Whatever kernel torch takes: the numbers of a CPU in double precision."""
    model = NETS[name]()
    x, y = torch.randn(N, LENGTH, WIDTH).to(dtype), torch.randint(3, (N,))
    there = extend(copy.deepcopy(model).to("cuda", dtype))
    found = _fields(there, x.to("cuda"), y.to("cuda"))
    # With the parameters as they were rounded.
    right = _fields(extend(model.to(dtype).double()), x.double(), y)
    for ours, expected in zip(found, right, strict=True):
        for field, value in expected.items():
            assert ours[field].device.type == "cuda"
            error = (ours[field].cpu().double() - value).abs().max()
            assert error <= PRECISIONS[dtype] * value.abs().max().clamp(min=1e-3), field


def test_every_extension_is_tried() -> None:
    assert {kind for _, kind in CASES} == {*names_of_extensions()}
