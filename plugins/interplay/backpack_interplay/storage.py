"""The :class:`Storage` of this library, which core asks; the other files have the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointError

from backpack_core._torch import Node, parametrizations_of
from backpack_core.errors import BridgeError
from backpack_core.graph import Survey
from backpack_core.record.call import NOTHING, Stored
from backpack_core.record.execution import Execution
from backpack_core.record.models import Run, owners_of
from backpack_core.record.state import nested, tensors_of
from backpack_core.record.storage import OwnedTensors, Storage, UnpackedTensors
from backpack_core.record.view import View
from backpack_interplay import checkpoints, compiled, parametrized, selective, shards
from backpack_interplay.global_hooks import PlaceOfAll
from backpack_interplay.leaves import leaves_behind, pull_back
from backpack_interplay.replay import output_again
from backpack_interplay.saving import Unpacked, shown_by, through_hooks


class Interplay(Storage):
    """A storage that works with saved-tensor hooks, computed parameters and shards."""

    def __init__(self) -> None:
        checkpoints.let_checkpoints_give_again()
        selective.let_results_stay()

    def block(self, is_asked: bool) -> AbstractContextManager[Any]:
        """The context of a ``backpack(...)`` block, in which compiled functions run eagerly."""
        compiled.refuse_inside()
        return _explained() if is_asked else compiled.uncompiled()

    def before_hooks_of_all(self, after: Callable[..., Any]) -> PlaceOfAll:
        """Put the hook that records a call before global forward hooks, while the result lives."""
        return PlaceOfAll(after)

    def keep(self, stored: Stored, run: Run) -> tuple[Stored, Run, bool]:
        """Store the tensors of a call through the current saved-tensor hooks."""
        hook, kept = checkpoints.saving_hook(), through_hooks(stored)
        run = shown_by(run, stored.inputs, kept.inputs)
        return kept, run, hook is None or hook.unpacks_twice

    def unpack(self, stored: Stored) -> UnpackedTensors:
        """The tensors of a call, unpacked when they are needed."""
        return Unpacked(stored)

    def is_computed_again(self) -> bool:
        """Whether a checkpoint is recomputing."""
        return checkpoints.is_computed_again()

    def reading(self, node: Node) -> AbstractContextManager[Any]:
        """The context in which a node's saved tensors can be read, and later again by autograd."""
        return checkpoints.unpacking_again(node)

    def chunks(self) -> Callable[[int], AbstractContextManager[Any]]:
        """The context of a chunk, after which recomputed tensors are held up to a bound."""
        return checkpoints.Recomputed().within

    def output_again(self, view: View, stored: Tensor) -> Tensor:
        """The output of a call with a graph, computed again."""
        return output_again(view, stored)

    def extend(self, module: Module) -> None:
        """Put hooks on a module's parametrizations."""
        parametrized.extend(module)

    def begin(self, module: Module, execution: Execution) -> None:
        """Have a module's parametrizations compute for an execution that begins."""
        parametrized.begin(module, execution)

    def end(self, module: Module, execution: Execution) -> None:
        """End an execution of a module."""
        parametrized.end(module, execution)

    def tensors(self, module: Module, resolved: Any, execution: Execution) -> OwnedTensors:
        """The tensors of a module that has submodules or computed parameters."""
        if resolved.is_fallback:
            names = parametrizations_of(module) and [n for n, _ in module.named_parameters()]
            inside = tuple(name for name in names if name.startswith("parametrizations."))
            return *tensors_of(module, inside), NOTHING
        owned, count = tensors_of(module, nested(resolved.params))
        sources = parametrized.computed(module, resolved.params, execution)
        computed = {name: leaves_behind(tensor) for name, tensor in sources.items()}
        of_others = {id(leaf) for leaves in computed.values() for leaf in leaves}
        parameters = tuple(owned)[:count]
        owned.update(sources)
        used_directly = [name for name in parameters if id(owned[name]) not in of_others]
        return owned, (*used_directly, *computed), computed

    def pull_back(self, mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
        """Carry columns at a computed tensor back to a leaf."""
        return pull_back(mat, source, leaf)

    def shards_in(self, models: Iterable[Module]) -> dict[Tensor, Tensor]:
        """The shards of ``fully_shard``, by whole parameter."""
        return {whole: part for model in models for whole, part in shards.shards_in(model).items()}

    def hand_over(self, survey: Survey, fields: list[str]) -> None:
        """Move results from whole parameters to shards."""
        models = owners_of(call.module for call in survey.trained)
        shown = {id(parameter) for model in models for parameter in model.parameters()}
        shards.hand_over(survey.shards, shown, fields)


@contextmanager
def _explained() -> Iterator[None]:
    """A block in which compiled functions run eagerly, and errors of checkpoints are explained.

    Raises:
        BridgeError: A checkpoint could not give a saved tensor to us and to autograd.
    """
    with compiled.uncompiled():
        try:
            yield
        except CheckpointError as error:
            raise BridgeError(
                "A quantity was carried through an operation inside checkpoint("
                "use_reentrant=False) that no module covers, and a checkpoint gives each saved "
                "tensor only once. Move the operation into a module and give it a layer rule, or "
                "leave the checkpoint out."
            ) from error
