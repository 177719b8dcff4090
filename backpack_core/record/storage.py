"""Where the tensors of calls are kept if torch itself packs, shards or computes tensors.

Torch does so in checkpoints, for offloading, for sharded or parametrized models, and in compiled
code. A library knows these cases and provides a :class:`Storage` by the hook ``backpack_storage``.
The core alone keeps tensors in memory, and raises an error if that is not enough.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, version_of
from backpack_core.errors import MissingPluginError, OverwrittenInputError
from backpack_core.record.call import NOTHING, Stored
from backpack_core.record.models import Run
from backpack_core.record.state import nested, tensors_of

if TYPE_CHECKING:
    from backpack_core.record.execution import Execution
    from backpack_core.record.view import View


OwnedTensors: TypeAlias = tuple[
    dict[str, Tensor | None], int | tuple[str, ...], Mapping[str, tuple[Tensor, ...]]
]


class UnpackedTensors(ABC):
    """The tensors of a call that went through saved-tensor hooks, during one visit.

    Attributes:
        tensors: The tensors that have been unpacked, by slot; slots count inputs first.
    """

    tensors: dict[int, Tensor]

    @abstractmethod
    def tensor(self, slot: int) -> tuple[Tensor, bool]:
        """A tensor with its values, and whether it was changed in place since the forward pass."""

    @abstractmethod
    def values(self) -> Stored:
        """All tensors of the call, with their values."""


class Storage:
    """How tensors of calls are kept. This class keeps them in memory, as they are.

    Where more must be done, its methods raise :class:`MissingPluginError`.
    """

    def block(self, is_asked: bool) -> AbstractContextManager[Any]:
        """A context manager around each ``with backpack(...)`` block.

        Args:
            is_asked: Whether the block has extensions.
        """
        return nullcontext()

    def before_hooks_of_all(self, after: Callable[..., Any]) -> Any:
        """Put the hook that records a call before global forward hooks, while the result lives."""
        raise _missing("An extended model, together with a forward hook for all modules,")

    # Tensors of calls ----------------------------------------------------------------------------

    def keep(self, stored: Stored, run: Run) -> tuple[Stored, Run, bool]:
        """The form of a call that is stored while saved-tensor hooks are active.

        With it, the run as this call refers to it, and whether the hooks can unpack a tensor for us
        and once more for autograd.
        """
        raise _missing("A forward pass whose saved tensors go through hooks, as in a checkpoint,")

    def unpack(self, stored: Stored) -> UnpackedTensors:
        """Access to the packed tensors of a call during one visit; called if ``stored.saved``."""
        raise _missing("A call that was stored through hooks")

    def is_computed_again(self) -> bool:
        """Whether a checkpoint recomputes its forward pass now, which must be recorded again."""
        return False

    def reading(self, node: Node) -> AbstractContextManager[Any]:
        """A block in which tensors that a node saved may be read; autograd can read them later."""
        return nullcontext()

    def chunks(self) -> Callable[[int], AbstractContextManager[Any]]:
        """A function that makes a context manager for each chunk of columns of a pass.

        Its argument is how many bytes of recomputed tensors may be kept for the next chunk.
        """
        return lambda _: nullcontext()

    def output_again(self, view: View, stored: Tensor) -> Tensor:
        """The output of a call as a function of its inputs, for ``create_graph=True``.

        Args:
            view: The call, with all samples.
            stored: The output, detached.

        Raises:
            OverwrittenInputError: It cannot be computed again.
        """
        raise _missing(f"create_graph=True where the output of {view.path} is needed")

    # Parameters ----------------------------------------------------------------------------------

    def extend(self, module: Module) -> None:
        """Prepare a module that computes some of its parameters; called when it is extended."""
        raise _missing(f"A parametrization, as of {type(module).__name__},")

    def begin(self, module: Module, execution: Execution) -> None:
        """Called when an execution of such a module begins."""
        self.extend(module)

    def end(self, module: Module, execution: Execution) -> None:
        """Called when an execution of such a module has ended."""

    def tensors(self, module: Module, resolved: Any, execution: Execution) -> OwnedTensors:
        """The tensors of a module that has submodules or computed parameters.

        Args:
            module: The module.
            resolved: Its rule.
            execution: The execution.

        Returns:
            The tensors by name; the names of parameters, or how many come first; and for each
            computed parameter the leaf tensors that it comes from.
        """
        for name in resolved.params:
            tensor = module.__dict__.get(name)
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                raise _missing(f"The parameter {name!r}, which a hook computes from others,")
        return *tensors_of(module, nested(resolved.params)), NOTHING

    def pull_back(self, mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
        """Pull columns ``[K, *source]`` back to ``[K, *leaf]``: one vector-Jacobian product each.

        Args:
            mat: Columns at the computed parameter, ``[K, *source]``.
            source: The parameter that a module computed.
            leaf: One of the leaf tensors that it was computed from.

        Raises:
            BridgeError: An operation in between cannot be differentiated for several columns.
        """
        raise _missing("A parameter that is computed from others")

    def shards_in(self, models: Iterable[Module]) -> dict[Tensor, Tensor]:
        """The shards that this process holds, by the whole parameters that layers run with."""
        if "torch.distributed.fsdp" in sys.modules:
            for module in (part for model in models for part in model.modules()):
                if hasattr(type(module), "_get_fsdp_state"):
                    raise _missing("A model whose parameters are sharded")
        return {}

    def hand_over(self, survey: Any, fields: list[str]) -> None:
        """Store results of whole parameters on their shards; called if there are any.

        Args:
            survey: The survey of the pass.
            fields: Names of the results.
        """


def _missing(what: str) -> MissingPluginError:
    return MissingPluginError(
        f"{what} needs backpack-interplay: pip install backpack-interplay, and see that "
        "BACKPACK_LOAD_PLUGINS and BACKPACK_BLOCK_PLUGINS let it load."
    )


_current = Storage()


def storage() -> Storage:
    """The storage that a library provides; otherwise that of the core."""
    return _current


def use(other: Storage | None) -> None:
    """Use a storage from now on; ``None`` stands for that of the core."""
    global _current
    _current = other or Storage()


def read(view: View, slot: int, what: str) -> Tensor:
    """An input or output of a call, with its values; slots count inputs first.

    Raises:
        OverwrittenInputError: It was changed in place since the forward pass.
    """
    if view.unpacked is not None:
        tensor, is_changed = view.unpacked.tensor(slot)
    else:
        stored = view.stored
        tensor = (*stored.inputs, *stored.outputs)[slot]
        is_changed = version_of(tensor) != stored.versions[slot]
    if is_changed:
        raise OverwrittenInputError(
            f"{view.path}: its {what} was changed in place after it was stored, so derivatives "
            "would be computed from overwritten memory. Use an out-of-place operation, or "
            "clone the tensor before changing it."
        )
    return tensor
