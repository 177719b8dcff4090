"""The autograd graph of one backward pass: its nodes, its parameters, and the survey of it.

Some facts are properties of the whole graph, such as the parameters that several calls use and the
number of samples. A walk through the graph fills the survey in. A library that knows more derives
from it. Imports torch, ``errors`` and ``record`` only; layer rules are reached through the calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from backpack_core._torch import LeafNode, Node
from backpack_core.errors import BridgeError, UnsupportedError, is_library
from backpack_core.record.call import Call, CallCaches, Edge, Site, site_at
from backpack_core.record.view import View

_GIVE_IT_A_RULE = "Move the operation into a module and give it a layer rule."


def is_leaf(node: Node) -> bool:
    """Whether a node accumulates the gradient of a leaf, such as a parameter."""
    return type(node) is LeafNode


def name_of(node: Node) -> str:
    """The name of a node's operation: ``"Mul"`` for ``MulBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def described(node: Node) -> str:
    """The name of the operation, with the user's line if anomaly mode has recorded it."""
    steps = node.metadata.get("traceback_") or ()  # type: ignore[attr-defined]
    for step in reversed(steps):
        match = re.match(r'\s*File "(.+)", line (\d+)', step)
        if match and not is_library(match[1]):
            return f"{name_of(node)} [{match[1]}:{match[2]}]"
    return name_of(node)


def refuse(node: Node, reason: str, advice: str = _GIVE_IT_A_RULE) -> BridgeError:
    """The error for a node that cannot be crossed."""
    error = BridgeError(
        f"Cannot carry the quantity through the operation {name_of(node)!r} ({node.name()}) "
        f"between two modules: {reason}. {advice}"
    )
    error.node = node
    return error


class Trained(NamedTuple):
    """A trained parameter that a call uses.

    Attributes:
        name: Its name in the module.
        parameter: The leaf that the result is stored on.
        used: The tensor that the module used: the parameter, or one that was computed from it.
    """

    name: str
    parameter: Tensor
    used: Tensor


def trained_in(call: Call) -> tuple[tuple[Trained, ...], tuple[Trained, ...]]:
    """The trained parameters of a call that its rule covers, and those that it does not."""
    stored, covers = call.stored, call.rule.covers
    covered: list[Trained] = []
    others: list[Trained] = []
    for name in stored.parameters:
        tensor, _ = stored.owned[name]
        if tensor.requires_grad and name not in stored.frozen:
            group = covered if covers(call.module, name) else others
            for parameter in stored.computed.get(name, (tensor,)):
                # Much faster than Trained(...).
                group.append(tuple.__new__(Trained, (name, parameter, tensor)))
    return tuple(covered), tuple(others)


def complex_parameter(name: str) -> UnsupportedError:
    """The error for a trained parameter with complex values."""
    return UnsupportedError(
        f"The parameter {name} is complex, and quantities are defined for real parameters "
        "only: train its real and its imaginary part as two parameters, or freeze it."
    )


@dataclass
class Use:
    """How a parameter is used.

    Attributes:
        parameter: The parameter.
        call: A call that uses it.
        name: Its name there.
        count: The number of sites where calls with a rule for it use it.
        unruled: The number of sites where a module without such a rule, and without submodules,
            uses it.
        is_wanted: Whether any extension reads it there.
    """

    parameter: Tensor
    call: Call
    name: str
    count: int = 0
    unruled: int = 0
    is_wanted: bool = True


@dataclass
class Survey:
    """The facts about the graph of one pass; this class is for a chain of modules with rules.

    Attributes:
        batch_size: The number of samples.
        is_shared: Whether a parameter is used several times.
        sites: The sites in the graph, by call and index of the output.
        trained: The parameters that are read at each call.
        uses: The parameters that calls use, by ``id``.
        freed: By call, parameters that are read at the operations that use them, because the
            call's rule does not cover them.
        bare: Parameters that are read at operations that use them, by ``id``; a library finds them.
        viewed: By node and output number, for outputs that modules returned views of, if users
            bypass these views: the edge of the outermost view; a library finds them.
        shards: The shards that this process holds, by the whole parameters that calls use.
        structure: What distinguishes the graph from others, once somebody has asked.
        is_planned: Whether these facts were taken from the plan of an earlier pass.
        is_measured: Whether rules may look at values; see ``View.is_measured``.
    """

    batch_size: int = 0
    is_shared: bool = False
    sites: dict[tuple[Call, int], Site] = field(default_factory=dict)
    trained: dict[Call, tuple[Trained, ...]] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)
    freed: dict[Call, tuple[Trained, ...]] = field(default_factory=dict)
    bare: dict[int, Any] = field(default_factory=dict)
    viewed: dict[tuple[Node, int], Edge] = field(default_factory=dict)
    shards: dict[Tensor, Tensor] = field(default_factory=dict)
    structure: tuple[object, ...] | None = None
    is_planned: bool = False
    is_measured: bool = True

    def site_at(self, edge: Edge) -> Site | None:
        """The site where a quantity that is sent to an edge arrives, in this graph."""
        return site_at(edge)

    def axis_and_positions(self, site: Site) -> tuple[int, int]:
        """The axis of an output that holds samples, and how many of its entries each sample has."""
        return 0, 1

    def sources(self, node: Node) -> list[str]:
        """The paths of the calls whose outputs are operands of an operation."""
        sites = [site_at(Edge(child, nr)) for child, nr in node.next_functions if child is not None]
        return list(dict.fromkeys(site.call.path for site in sites if site is not None))

    def note_uses(self, call: Call) -> None:
        """Note which parameters a call uses."""
        trained = self.trained.get(call)
        if trained is None:
            trained, others = trained_in(call)
            self.trained[call] = trained
            if others:
                self.freed[call] = others
        for entry in trained:
            use = self.use_of(call, entry)
            self.is_shared |= use.count > 0
            use.count += 1

    def use_of(self, call: Call, trained: Trained) -> Use:
        """The uses of a parameter of a call."""
        name, parameter, _ = trained
        use = self.uses.get(id(parameter))
        if use is None:
            if parameter.is_complex():
                raise complex_parameter(f"{name!r} of {call.path}")
            use = self.uses[id(parameter)] = Use(parameter, call, name)
        return use

    def view(self, site: Site, kept: CallCaches, grad: Tensor | None = None) -> View:
        """The view of a call at one of its outputs.

        Args:
            site: The output.
            kept: The caches of all calls of the pass.
            grad: The gradient at the output.
        """
        call, index, (node, *_), _ = site
        axis, positions = self.axis_and_positions(site)
        cache = kept.setdefault(call, {})
        view = View(call, index, grad, node, axis, cache, positions, self.batch_size)
        view.is_checked = not self.is_planned  # the pass that made the plan was checked
        view.is_measured = self.is_measured
        return view

    def parameters(self) -> dict[int, Tensor]:
        """The parameters that are read at calls, by ``id``."""
        return {number: use.parameter for number, use in self.uses.items() if use.count}

    def asks_rule(self, call: Call) -> bool:
        """Whether the rule of a call is asked for parameters, or for propagation.

        False for a loss, which matters only if a quantity starts there, and is checked then.
        """
        return not call.rule.is_loss

    @property
    def is_readable(self) -> bool:
        """Whether the tensors that autograd saved may be read at every call."""
        return all(call.is_readable for call, _ in self.sites)
