"""Propagators: what travels backwards, how it starts at a loss, and what extensions read of it.

The engine does not know what a quantity is. It asks the propagator for the quantity at a call, at
the call's inputs, at a parameter, and where branches meet, and what can be propagated in chunks.
What it finds at a parameter is a reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.contract.bases import base
from backpack_core.contract.rules import LayerRule, LossRule
from backpack_core.errors import UnsupportedError
from backpack_core.graph import refuse
from backpack_core.record.call import path_of
from backpack_core.record.guards import ask
from backpack_core.record.view import View

# The attributes that the engine sets.
_OF_ENGINE = "name module parameter rule needs call_cache column_cache is_measured is_part"


class Reading:
    """What a propagator finds at a parameter, for extensions to read.

    Outside of chains, further methods are asked for: ``backpack_operations/readings.py`` has them.

    Attributes:
        shape: Shape of the parameter, ``[*θ]``.
        name: The parameter's name in its module.
        module: The module.
        parameter: The parameter that results are stored on; set when an extension reads.
        rule: The class of the rule that made the reading, for messages.
        needs: The operations that extensions will call, so that one can prepare for another.
        is_measured: Whether extensions may look at values, as for :attr:`View.is_measured`.
        is_part: Whether it belongs to a chunk of columns that reached only some uses of the
            parameter.
        results: Cached results of operations.
        made: The tensors among the results, with their version counters.
        call_cache: Values computed from the call alone, for all of its columns.
        column_cache: Values that all parameters of the call share, for the same columns.
    """

    name: str = ""
    module: Module | None = None
    parameter: Tensor | None = None
    rule: type = object
    needs: frozenset[Any] = frozenset()
    is_measured: bool = True
    is_part: bool = False

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.results: dict[Any, Any] = {}
        self.made: list[tuple[Tensor, int]] = []
        self.call_cache: dict[Any, Any] = {}
        self.column_cache: dict[Any, Any] = {}

    @property
    def path(self) -> str:
        """The path of the module, for messages."""
        return "" if self.module is None else path_of(self.module)

    def placed_as(self, other: Reading) -> Self:
        """Itself, after taking over what the engine set on another reading (module, name, rule)."""
        for name in _OF_ENGINE.split():
            setattr(self, name, getattr(other, name))
        return self

    def lasting(self) -> Any:
        """The reading in a form that is valid after the graph is freed. Default: itself."""
        return self


@base
class Propagator(ABC):
    """What travels backwards, and how it starts at a loss.

    Extensions with equal propagators share one quantity, which is propagated once in a backward
    pass. So a propagator is a value: a frozen dataclass, such as ``LossSqrt(samples=1)``. The type
    of the quantity is the propagator's own choice.

    Class attributes:
        travels: Whether quantities are sent on; otherwise each call is read on its own.
        per_sample: Whether quantities belong to single samples, and so do not exist if samples
            influence each other.
        keeps_apart: Whether quantities can have columns for each sample at tensors without
            samples. If not, a net with parameters there raises an error.
        only_at_losses: Whether something is read at losses only, so that it does not matter where
            samples lie at other calls.
        starts_everywhere: Whether each call sends a new quantity, not one that arrived.
        sheds_everywhere: Whether :meth:`shed` may split something off at every call, and
            :meth:`cross` at every node. Otherwise :meth:`shed` is called at losses and for
            residuals only.
        needs_gradient: Whether methods other than :meth:`start` read ``view.grad_output``, which
            may otherwise be ``None``.

    Attributes:
        subsampling: The samples that take part, ``None`` for all. Every method gets a view of
            these samples only.

    To write:
        ``start(rule, view)``, ``propagate(rule, view, quantity)`` and
        ``products(rule, view, names, quantity)``.
    """

    travels: ClassVar[bool] = True
    per_sample: ClassVar[bool] = True
    keeps_apart: ClassVar[bool] = False
    only_at_losses: ClassVar[bool] = False
    starts_everywhere: ClassVar[bool] = False
    sheds_everywhere: ClassVar[bool] = True
    needs_gradient: ClassVar[bool] = True
    subsampling: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        """The class; a dataclass shows its fields."""
        return f"{type(self).__name__}()"

    @abstractmethod
    def start(self, rule: Any, view: View) -> Any:
        """The quantity at the first input of a loss.

        Args:
            rule: The rule of the loss.
            view: The call of the loss, with the gradient that arrives there.
        """

    @abstractmethod
    def propagate(self, rule: LayerRule, view: View, quantity: Any) -> dict[int, Any]:
        """Propagate the quantity from the output of a call to its inputs.

        Args:
            rule: The layer rule.
            view: The call.
            quantity: The quantity at the output.

        Returns:
            The quantity at each differentiable input tensor, by position in ``view.inputs``.
        """

    @abstractmethod
    def products(
        self, rule: Any, view: View, names: Sequence[str], quantity: Any
    ) -> Sequence[Reading]:
        """The readings at parameters; the engine adds to each which parameter it belongs to.

        Args:
            rule: The layer rule; the propagator decides which class of rule it accepts.
            view: The call.
            names: Names of the parameters.
            quantity: The quantity at the call's output.

        Returns:
            A reading for each name, in order.
        """

    def goes_inside(self, quantity: Any) -> bool:
        """Whether a quantity at a loss goes on node by node, instead of by :meth:`propagate`."""
        return False

    def arrive(self, rule: LayerRule, view: View, waiting: Any | None) -> Any | None:
        """The quantity at the output of a call, from what was sent there; at a loss, it starts.

        Args:
            rule: The layer rule.
            view: The call.
            waiting: What was sent there; ``None`` if nothing was.

        Returns:
            The quantity; ``None`` if there is none, which is an error.

        Raises:
            UnsupportedError: Something arrives at a loss, or its rule refuses the call.
        """
        if not isinstance(rule, LossRule):
            return waiting
        if waiting is not None:
            raise loss_behind_a_loss(view)
        if view.is_checked:
            rule.check(view)
        return ask(view, self, "start", rule, view)

    def serving(self, extensions: Sequence[Any]) -> Propagator:
        """The propagator to use for these extensions, which all have this one. Default: itself."""
        return self

    def nothing(self, view: View) -> Any | None:
        """The quantity at an output that the loss does not depend on; ``None`` to raise."""
        return None

    def residual(self, rule: LayerRule, view: View) -> dict[int, Any]:
        """What a call adds to the quantities at its inputs, asked once a call. Default: nothing."""
        return {}

    def merge(self, first: Any, second: Any) -> Any:
        """The quantity at a tensor to which several consumers send; refused by default.

        Raises:
            UnsupportedError: Always, here.
        """
        raise UnsupportedError(
            f"{self!r} cannot be added over branches: the net must be a chain of modules."
        )

    def cross(self, node: Node, quantities: dict[int, Any], there: Any) -> list[tuple[int, Any]]:
        """Propagate quantities through an autograd node that lies between calls.

        Args:
            node: The autograd node, before autograd executes it.
            quantities: What arrived for the whole batch, by output number of the node.
            there: Where samples lie, as the operations library describes it. Where residuals may be
                added, it also has the gradients at the node, and takes columns that do not fit into
                memory.

        Returns:
            Pairs (position in ``node.next_functions``, quantity).

        Raises:
            BridgeError: The quantity cannot be propagated exactly.
        """  # noqa: DOC202 - what an override returns
        raise refuse(node, f"{self!r} only passes through modules with a layer rule")

    def supply(self, quantities: dict[int, Any], grads: Sequence[Tensor | None]) -> dict[int, Any]:
        """What arrived at an autograd node, once its gradients are known. Default: unchanged."""
        return quantities

    def widen(self, quantity: Any, size: int, view: View | None = None) -> Any:
        """Extend a quantity from the chosen samples to the whole batch, with zeros for all others.

        Autograd nodes need the whole batch. :meth:`narrow` is the reverse. Only called for
        propagators with ``subsampling``.

        Args:
            quantity: For the chosen samples.
            size: The length of axis 0 for the whole batch.
            view: Of the chosen samples, where they have several entries of axis 0, or none.
        """
        return quantity

    def split_positions(self, quantity: Any, owners: Tensor | None, samples: int) -> Any:
        """Give the entries of one sample at a loss columns of their own.

        Only called for propagators with ``keeps_apart``, at losses where samples have several
        entries.

        Args:
            quantity: At the loss.
            owners: The sample of each entry of axis 0, ``[R]``; ``None`` if all may belong to one.
            samples: The number of samples.
        """
        return quantity

    def take_apart(self, quantity: Any, positions: int | Tensor) -> Any:
        """Give each sample columns of its own, with zeros for all other samples.

        Args:
            quantity: At the output of a call that has samples.
            positions: How many entries of axis 0 each sample has; or which ones, ``[N, R]``.
        """
        return quantity

    def put_together(self, quantity: Any, positions: int | Tensor) -> Any:
        """The reverse of :meth:`take_apart`; ``positions`` is zero at a tensor without samples."""
        return quantity

    def narrow(self, quantity: Any, view: View | None = None) -> Any:
        """Restrict a quantity of the whole batch to the chosen samples; see :meth:`widen`."""
        return quantity

    def map(self, quantity: Any, function: Callable[[Tensor], Tensor]) -> Any:
        """Apply a linear function of columns ``[V, *]`` to everything in the quantity.

        Raises:
            UnsupportedError: Always, here.
        """
        raise UnsupportedError(
            f"{self!r} needs every output of a module unchanged: samples on axis 0, and no "
            "in-place operation on a view of it."
        )

    def shed(
        self,
        rule: LayerRule | None,
        view: View,
        quantity: Any,
        size: int,
        is_rooted: bool = False,
    ) -> tuple[Any, Iterable[Any]]:
        """Split off columns that can go on alone, so that at most ``size`` columns travel together.

        Args:
            rule: The rule that the quantity goes through next; ``None`` for a residual, which has
                just started at the inputs of the call.
            view: The call.
            quantity: The quantity at the output of the call; at a loss, and for a residual, at its
                input.
            size: How many columns fit into memory at the widest call.
            is_rooted: Whether what goes on must be in the form of :meth:`rooted`, because a
                parameter is used several times, or an operation between modules follows.

        Returns:
            What goes on, and parts that are propagated through the net immediately, one after the
            other. A part must not be one that is later added to something that waits elsewhere.
        """
        return quantity, ()

    def rooted(self, quantity: Any) -> Any:
        """The quantity in a form in which several uses of one parameter can be added.

        Called if a parameter is used several times: contributions with the same root that reach it
        along several paths must be added before they are squared.
        """
        return quantity


def loss_behind_a_loss(view: View) -> UnsupportedError:
    """The error if two losses are on one path, so that it is unclear where the model ends."""
    return UnsupportedError(
        f"{view.path} is a loss, and another loss is computed from its output, so it is not known "
        "where the model ends, and which curvature is meant. Extend only the loss that reads the "
        "model's output, and compute the rest with plain functions that are linear in it; or "
        "extend only the last loss."
    )
