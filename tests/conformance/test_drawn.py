"""Rules with many hyper-parameters, on settings that hypothesis draws."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from backpack_core.testing import RuleCase, check_case

CHECKS = (
    "jac_t_mat_prod",
    "jac_mat_prod",
    "param_jac_t_mat_prod",
    "operations",
    "affine_form",
    "affine_weight",
    "subsampled_call",
)
PROPAGATION = ("jac_t_mat_prod", "jac_mat_prod", "subsampled_call")
DRAWN = settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SMALL = st.integers(1, 3)


def require_green(case: RuleCase, checks: tuple[str, ...]) -> None:
    faults = [result for result in check_case(case, checks) if not result.ok]
    assert faults == []


def convolution(draw: Any, dims: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Arguments that convolutions and transposed convolutions share, and the shape of a sample."""
    groups = draw(st.integers(1, 2))
    options = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": tuple(draw(SMALL) for _ in range(dims)),
        "stride": tuple(draw(SMALL) for _ in range(dims)),
        "dilation": tuple(draw(st.integers(1, 2)) for _ in range(dims)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    shape = (options["in_channels"], *(draw(st.integers(2, 5)) for _ in range(dims)))
    return options, shape


@DRAWN
@given(st.data())
def test_linear(data: st.DataObject) -> None:
    inputs, outputs, bias = data.draw(SMALL), data.draw(SMALL), data.draw(st.booleans())
    positions = data.draw(st.lists(st.integers(1, 2), max_size=2))
    make = lambda n: torch.randn(n, *positions, inputs)  # noqa: E731
    require_green(RuleCase(lambda: nn.Linear(inputs, outputs, bias), make), CHECKS)


@DRAWN
@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 2))
    options, shape = convolution(data.draw, dims)
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(dims))
    extent = zip(shape[1:], padding, options["dilation"], options["kernel_size"], strict=True)
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in extent))
    kind = (nn.Conv1d, nn.Conv2d)[dims - 1]
    case = RuleCase(lambda: kind(**options, padding=padding), lambda n: torch.randn(n, *shape))
    require_green(case, CHECKS)


@DRAWN
@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 2))
    options, shape = convolution(data.draw, dims)
    limits = [max(s, d) - 1 for s, d in zip(options["stride"], options["dilation"], strict=True)]
    extra = tuple(data.draw(st.integers(0, limit)) for limit in limits)
    padding = tuple(
        data.draw(st.integers(0, d * (k - 1) // 2))
        for d, k in zip(options["dilation"], options["kernel_size"], strict=True)
    )
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dims - 1]
    case = RuleCase(
        lambda: kind(**options, padding=padding, output_padding=extra),
        lambda n: torch.randn(n, *shape),
    )
    require_green(case, CHECKS)


@DRAWN
@given(st.data())
def test_pooling(data: st.DataObject) -> None:
    kernel, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    padding, ceil = data.draw(st.integers(0, kernel // 2)), data.draw(st.booleans())
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(3, 6)))
    kind = data.draw(st.sampled_from([nn.MaxPool1d, nn.AvgPool1d]))
    case = RuleCase(
        lambda: kind(kernel, stride=stride, padding=padding, ceil_mode=ceil),
        lambda n: torch.randn(n, *shape),
    )
    require_green(case, PROPAGATION)
