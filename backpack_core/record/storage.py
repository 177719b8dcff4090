"""Where the tensors of calls are kept, if torch itself does something with them.

It does in checkpoints and for offloading, where parameters are sharded or computed from others, and
in compiled code. A library knows all of these, and gives a :class:`Storage` by the hook
``backpack_storage``. Core alone keeps tensors in memory, and refuses where that is not enough.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node, version_of
from backpack_core.errors import MissingPluginError, OverwrittenInputError
from backpack_core.record.call import Stored
from backpack_core.record.run import Run

if TYPE_CHECKING:
    from backpack_core.record.execution import Execution
    from backpack_core.record.view import View


class UnpackedTensors(ABC):
    """The tensors of a call that a storage holds, as one visit gets them back.

    Attributes:
        tensors: Those that are back, by slot; slots count inputs first.
    """

    tensors: dict[int, Tensor]

    @abstractmethod
    def tensor(self, slot: int) -> tuple[Tensor, bool]:
        """One with its numbers, and whether it was changed in place since the forward pass."""

    @abstractmethod
    def values(self) -> Stored:
        """All of the call's tensors, with their numbers."""


class Storage:
    """Where tensors are kept: by these methods, in memory, as they are.

    Where that is not all that there is to do, they raise :class:`MissingPluginError`.
    """

    def block(self) -> AbstractContextManager[Any]:
        """What stands around a ``with backpack(...)`` block."""
        return nullcontext()

    # Tensors of calls ----------------------------------------------------------------------------

    def keep(self, stored: Stored, run: Run) -> tuple[Stored, Run, bool]:
        """The form in which a call is stored while hooks take what autograd saves.

        With it, the run as it knows such a call, and whether the hooks give a tensor that they took
        to us, and to autograd once more.
        """
        raise _missing("A forward pass whose saved tensors go through hooks, as in a checkpoint,")

    def unpack(self, stored: Stored) -> UnpackedTensors:
        """What gets the tensors of a call back, in one visit; it has ``saved``."""
        raise _missing("A call that was stored through hooks")

    def is_computed_again(self) -> bool:
        """Whether a checkpoint recomputes now, and has to be recorded as the first time."""
        return False

    def reading(self, node: Node) -> AbstractContextManager[Any]:
        """A block in which what a node saved may be read, and once more later, by autograd."""
        return nullcontext()

    def chunks(self) -> Callable[[int], AbstractContextManager[Any]]:
        """Makes a block for each chunk of columns of a pass.

        It takes how many bytes of what was recomputed may be held for the next chunk.
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
        """A module that computes some of its parameters is extended."""
        raise _missing(f"A parametrization, as of {type(module).__name__},")

    def begin(self, module: Module, execution: Execution) -> None:
        """It begins to run."""
        self.extend(module)

    def end(self, module: Module, execution: Execution) -> None:
        """It has run."""

    def computed(
        self, module: Module, names: Iterable[str], execution: Execution
    ) -> Mapping[str, tuple[Tensor, tuple[Tensor, ...]]]:
        """The parameters that a module computed for an execution, each with its leaves.

        Args:
            module: The module.
            names: The parameters that its rule covers.
            execution: The execution.
        """
        tensors = {name: module.__dict__.get(name) for name in names}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                raise _missing(f"The parameter {name!r}, which a hook computes from others,")
        return {}

    def pull_back(self, mat: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
        """Columns at a leaf ``[K, *leaf]``, from those at what was computed from it.

        Args:
            mat: Shape ``[K, *source]``.
            source: The parameter that a module computed.
            leaf: One of its leaves.

        Raises:
            BridgeError: An operation on the way cannot be called for columns.
        """
        raise _missing("A parameter that is computed from others")

    def shards_in(self, models: Iterable[Module]) -> dict[Tensor, Tensor]:
        """What this process holds of parameters, by the whole ones that layers run with."""
        if "torch.distributed.fsdp" in sys.modules:
            for module in (part for model in models for part in model.modules()):
                if hasattr(type(module), "_get_fsdp_state"):
                    raise _missing("A model whose parameters are sharded")
        return {}

    def hand_over(self, held: Mapping[Tensor, Tensor], shown: set[int], fields: list[str]) -> None:
        """Give the results of whole parameters to their shards.

        Args:
            held: What :meth:`shards_in` found.
            shown: The parameters that models show, by ``id``.
            fields: Names of the results.
        """


def _missing(what: str) -> MissingPluginError:
    return MissingPluginError(
        f"{what} needs backpack-interplay: pip install backpack-interplay, and see that "
        "BACKPACK_LOAD_PLUGINS and BACKPACK_BLOCK_PLUGINS let it load."
    )


_current = Storage()


def storage() -> Storage:
    """The storage of a library; else that of core."""
    return _current


def use(found: Storage | None) -> None:
    """Keep tensors there from now on; ``None`` is what core has."""
    global _current
    _current = found or Storage()


def read(view: View, slot: int, what: str) -> Tensor:
    """An input or output of a call with its numbers; slots count inputs first.

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
