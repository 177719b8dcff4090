"""What is known of the graph of one backward pass before anything is computed.

Some things can only be seen from above: a parameter that several calls use, and the number of
samples. Whoever walks the graph fills this in; a library knows more, and derives from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph.parameters import Trained, complex_parameter, trained_in
from backpack_core.record.call import Call, CallCaches, Edge, Site, site_at
from backpack_core.record.view import View


@dataclass
class Use:
    """A parameter that calls use.

    Attributes:
        parameter: The parameter.
        call: A call that uses it.
        name: Its name there.
        count: At how many sites calls read it off.
        unruled: At how many sites modules use it that have no rule for it, nor modules inside.
        is_wanted: Whether any extension wants it there.
    """

    parameter: Tensor
    call: Call
    name: str
    count: int = 0
    unruled: int = 0
    is_wanted: bool = True


@dataclass
class Survey:
    """What is known about the graph of one backward pass: here, of a chain of modules with rules.

    Attributes:
        batch_size: Number of samples, the same in every call.
        is_shared: Whether a parameter is used several times.
        widest: Bytes that one column takes at the widest call.
        sites: Every output of a call that is in the graph, as (call, index).
        trained: What those calls are read off at.
        uses: The parameters that they use, by ``id``.
        freed: Parameters of calls that are looked at where operations use them.
        bare: Parameters that are looked at where operations use them, by ``id``.
        outside: What is used outside of the calls that own it, by ``id``.
        leaves: Parameters that are looked at as calls, as the output of a node.
        viewed: Outputs of nodes that are reached past the views that modules returned of them, with
            the edge of the outermost; by node and output number.
        opened: Calls that are gone through node by node, by their rule or in spite of it.
        shards: What a process holds of parameters that calls use whole, by these.
        structure: What tells it from other graphs, once somebody has asked.
        is_planned: Whether all of this is known from an earlier pass.
        is_measured: Whether the pass is measured, so that rules may look at values.
    """

    batch_size: int = 0
    is_shared: bool = False
    widest: int = 0
    sites: dict[tuple[Call, int], Site] = field(default_factory=dict)
    trained: dict[Call, tuple[Trained, ...]] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)
    freed: dict[Call, tuple[Trained, ...]] = field(default_factory=dict)
    bare: dict[int, Any] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    leaves: dict[tuple[Node, int], Site] = field(default_factory=dict)
    viewed: dict[tuple[Node, int], Edge] = field(default_factory=dict)
    opened: set[Call] = field(default_factory=set)
    shards: dict[Tensor, Tensor] = field(default_factory=dict)
    structure: tuple[object, ...] | None = None
    is_planned: bool = False
    is_measured: bool = True

    def site_at(self, edge: Edge) -> Site | None:
        """The call that what is sent to an edge arrives at, in this graph."""
        return site_at(edge)

    def axis_and_positions(self, site: Site) -> tuple[int, int]:
        """Which axis of an output holds the samples; how many of its entries each of them has."""
        return 0, 1

    def sources(self, node: Node) -> list[str]:
        """The paths of the calls whose outputs an operation works on."""
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
        for own in trained:
            use = self.use_of(call, own)
            self.is_shared |= use.count > 0
            use.count += 1

    def use_of(self, call: Call, own: Trained) -> Use:
        """What is known of a parameter that a call uses."""
        name, parameter, _ = own
        use = self.uses.get(id(parameter))
        if use is None:
            if parameter.is_complex():
                raise complex_parameter(f"{name!r} of {call.path}")
            use = self.uses[id(parameter)] = Use(parameter, call, name)
        return use

    def view(self, site: Site, kept: CallCaches, grad: Tensor | None = None) -> View:
        """What rules see at an output, with the gradient there and what calls have computed."""
        call, index, (node, *_), _ = site
        axis, positions = self.axis_and_positions(site)
        known = kept.setdefault(call, {})
        view = View(call, index, grad, node, axis, known, positions, self.batch_size)
        view.is_checked = not self.is_planned
        view.is_measured = self.is_measured
        return view

    def parameters(self) -> dict[int, Tensor]:
        """Those that are read, by ``id``."""
        return {number: use.parameter for number, use in self.uses.items() if use.count}

    def asks_rule(self, call: Call) -> bool:
        """Whether a rule is asked for anything at a call: for parameters, or how to go on.

        A loss matters only where something starts, and is checked there.
        """
        return not call.rule.is_loss and (call not in self.opened or bool(self.trained[call]))

    @property
    def is_readable(self) -> bool:
        """Whether what autograd saved may be read by others, everywhere."""
        return all(call.is_readable for call, _ in self.sites)
