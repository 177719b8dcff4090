"""What older versions of torch cannot do: tests leave it out, and say why."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


def is_older(version: str) -> bool:
    """Whether this is torch before a version, such as ``"2.8"``."""
    return bool(TorchVersion(torch.__version__) < version)


# Without a GPU, torch 2.6 raises an AttributeError at the first forward pass of fully_shard.
has_shards = not is_older("2.7") or torch.cuda.is_available()
needs_shards = pytest.mark.skipif(
    not has_shards, reason="fully_shard of torch 2.6 has no forward pass on a CPU"
)
needs_compiler = pytest.mark.skipif(
    not hasattr(torch._inductor, "standalone_compile"),
    reason='capture(compile="inductor") needs torch 2.8 or later, as its error says',
)
