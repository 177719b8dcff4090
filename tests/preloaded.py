"""What ranks need before they compute: imported once, by the server that they are forked from."""

import pytest  # noqa: F401  # each of them imports the program that has started them
import torch._dynamo  # noqa: F401  # any optimiser imports it at its first step
import torch.distributed.fsdp  # noqa: F401

import backpack_data  # noqa: F401
from backpack_core.plugins.loading import ensure_loaded

ensure_loaded()
