"""The storage that core asks, as this library has it: each method stands in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.record.call import Stored
from backpack_core.record.execution import Execution
from backpack_core.record.run import Run
from backpack_core.record.storage import Storage, UnpackedTensors
from backpack_core.record.view import View
from backpack_interplay import checkpoints, compiled, parametrized, shards
from backpack_interplay.leaves import leaves_behind, pull_back
from backpack_interplay.replay import output_again
from backpack_interplay.saving import Unpacked, shown_by, through_hooks


class Interplay(Storage):
    """Keeps tensors as torch does: through hooks, in shards, as leaves that others come from."""

    def __init__(self) -> None:
        checkpoints.let_checkpoints_give_again()

    def block(self) -> AbstractContextManager[Any]:
        """Compiled code runs as it was written."""
        compiled.refuse_inside()
        return compiled.uncompiled

    def keep(self, stored: Stored, run: Run) -> tuple[Stored, Run, bool]:
        """Through the hooks that autograd's saved tensors go through."""
        hook, kept = checkpoints.saving_hook(), through_hooks(stored)
        run = shown_by(run, stored.inputs, kept.inputs)
        return kept, run, hook is None or hook.unpacks_twice

    def unpack(self, stored: Stored) -> UnpackedTensors:
        """Unpacks tensors that hooks took."""
        return Unpacked(stored)

    def is_computed_again(self) -> bool:
        """Whether a checkpoint recomputes."""
        return checkpoints.is_computed_again()

    def reading(self, node: Node) -> AbstractContextManager[Any]:
        """Have a checkpoint give what a node saved to us, and to autograd."""
        return checkpoints.unpacking_again(node)

    def chunks(self) -> Callable[[int], AbstractContextManager[Any]]:
        """Hold what is recomputed, as far as there is room."""
        return checkpoints.Recomputed().within

    def output_again(self, view: View, stored: Tensor) -> Tensor:
        """Run the forward once more."""
        return output_again(view, stored)

    def extend(self, module: Module) -> None:
        """Put hooks on its parametrizations."""
        parametrized.extend(module)

    def begin(self, module: Module, execution: Execution) -> None:
        """Its parametrizations compute for this execution."""
        parametrized.begin(module, execution)

    def end(self, module: Module, execution: Execution) -> None:
        """They did."""
        parametrized.end(module, execution)

    def computed(
        self, module: Module, names: Iterable[str], execution: Execution
    ) -> dict[str, tuple[Tensor, tuple[Tensor, ...]]]:
        """By parametrizations, or in a hook before the forward."""
        found = parametrized.computed(module, names, execution)
        return {name: (tensor, leaves_behind(tensor)) for name, tensor in found.items()}

    def pull_back(self, mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
        """By the nodes of the computation."""
        return pull_back(mat, source, leaf)

    def shards_in(self, models: Iterable[Module]) -> dict[Tensor, Tensor]:
        """Those of ``fully_shard``."""
        return {whole: part for model in models for whole, part in shards.shards_in(model).items()}

    def hand_over(self, held: Mapping[Tensor, Tensor], shown: set[int], fields: list[str]) -> None:
        """Move results to them."""
        shards.hand_over(held, shown, fields)
