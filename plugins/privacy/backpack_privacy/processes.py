"""Private sums over several processes: added up, with noise added once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from backpack_core.errors import UsageError
from backpack_privacy.shards import is_shard
from backpack_products.fingerprint import agreed_on_ranks, fingerprint
from backpack_products.ranks import require_member, require_same


class Processes:
    """The processes that train one model together; only one without ``torch.distributed``.

    Attributes:
        rank: The number of this process.
        world: The number of processes.
    """

    def __init__(self, group: Any = None) -> None:
        """Ask for rank and size.

        Args:
            group: A process group; default: all processes.

        Raises:
            UsageError: It is not a group of this process.
        """
        require_member(group)
        self._group = group
        self._is_many = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank(group) if self._is_many else 0
        self.world = distributed.get_world_size(group) if self._is_many else 1

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their sums over all processes: one message for each dtype."""
        if self.world == 1:
            return
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        for kind in kinds:
            some = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
            flat = torch.cat([tensor.flatten() for tensor in some])
            distributed.all_reduce(flat, group=self._group)
            for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def check_same(self, parameters: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Refuse models and data that differ between processes, before sums over them are taken.

        Args:
            parameters: All parameters of the model, by name. Sharded ones exist only once.
            sizes: Numbers of the model and of the sampling, by name.

        Raises:
            UsageError: They differ. Every process raises this.
        """
        if self.world == 1:
            return
        device = next(iter(parameters.values())).device
        for name, size in sizes.items():
            if self._is_another(torch.tensor(size, device=device)):
                raise UsageError(
                    f"{name} differs between processes, so sums over processes or sampling rates "
                    "would be wrong. Give each process the same model and batch_size, and the "
                    "whole data set: each takes its share of it."
                )
        for name, parameter in parameters.items():
            if not is_shard(parameter) and self._is_another(parameter.detach()):
                raise UsageError(
                    f"The parameter {name} differs between processes, and sums of gradients of "
                    "different models would train none of them. Use DistributedDataParallel, or "
                    "make the model from the same seed or checkpoint in each process."
                )

    def check_settings(self, settings: Mapping[str, object]) -> None:
        """Refuse settings that differ between processes: the first one adds the noise for all.

        Args:
            settings: By name.

        Raises:
            UsageError: They differ. Every process raises this.
        """
        if self.world > 1:
            require_same(
                settings,
                self._group,
                "The noise of one process is to hide the samples of all of them, at one price: "
                "call make_private(...) with the same arguments, and load the same state, on every "
                "process.",
            )

    def check_plugins(self, modules: list[Module]) -> None:
        """Refuse processes that would clip with other code.

        Args:
            modules: The model, and the loss if it is a module.

        Raises:
            UsageError: Plugins differ between processes. Every process raises this.
        """
        from backpack_core.extensions import ClippedSumGrad  # loads the plugins

        if self.world > 1:
            agreed_on_ranks(fingerprint(modules, [ClippedSumGrad]), self._group)

    def _is_another(self, own: Tensor) -> bool:
        """Whether a tensor differs between processes."""
        found = torch.stack([own, -own])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
        return not torch.equal(found[0], -found[1])


def alone(model: Module) -> Module:
    """The model that ``DistributedDataParallel`` wraps; used alone, it exchanges no gradients.

    Private sums are added up once for each step, even if a process has no sample in it. The wrapper
    would exchange plain gradients, which are not needed.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    model.require_backward_grad_sync = False
    model.require_forward_param_sync = False
    found: Module = model.module
    return found
