"""Recurrent layers are recorded without their library's kernels, and give the same numbers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests.capture.nets import Last

pytestmark = [
    pytest.mark.usefixtures("reproducible"),
    pytest.mark.filterwarnings("ignore:.*deterministic implementation"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    first = Last(kind(3, 4, num_layers=2, batch_first=True))
    models = [extend(first), extend(copy.deepcopy(first))]
    losses = [extend(nn.CrossEntropyLoss()) for _ in models]
    step = capture(lambda x, y: losses[0](models[0](x), y), models[0], BatchGrad(), DiagGGNExact())
    assert torch.backends.mkldnn.enabled
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # KFAC of several positions
        for _ in range(9):
            x, y = torch.rand(4, 5, 3), torch.randint(3, (4,))
            for model in models:
                model.zero_grad()
            step(x, y)
            with backpack(BatchGrad(), DiagGGNExact()):
                losses[1](models[1](x), y).backward()
            for one, other in zip(*(m.parameters() for m in models), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
                torch.testing.assert_close(one.grad_batch, other.grad_batch)
                torch.testing.assert_close(one.diag_ggn_exact, other.diag_ggn_exact)
    assert torch.backends.mkldnn.enabled
    assert "mkldnn" not in step.code
    assert "6 replays" in step.report(), step.report()
