"""Rules of recurrent layers: one recursion back through time serves inputs and all parameters."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import GRU, LSTM, RNN, Module, RNNBase
from torch.nn.utils.rnn import PackedSequence

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import (
    arguments,
    by_slot,
    slots,
    tensor,
    whole_call,
)
from backpack_layers.once import once_per_columns
from backpack_layers.recurrent_cells import Cell, ElmanCell, GRUCell, LSTMCell, Tables, Weights
from backpack_products.parametric import AffinePairsRule

_NAME = re.compile(r"(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?")


@dataclass(frozen=True)
class Chain:
    """One direction of one layer, with its steps in the order of their execution.

    Attributes:
        suffix: The end of its parameters' names, such as ``"l0_reverse"``.
        backward: Whether it reads the sequence from its end.
        x: Its inputs. Shape ``[N, T, I]``.
        before: The hidden states its steps start from. Shape ``[N, T, H]``, or ``[N, T, P]`` if the
            layer projects them.
        tables: What its cell computed beforehand for the recursion, see :class:`Cell`.
    """

    suffix: str
    backward: bool
    x: Tensor
    before: Tensor
    tables: Tables


@dataclass(frozen=True)
class Carried:
    """Columns at everything that a recurrent layer received.

    Attributes:
        x: At the input. Shape ``[V, N, T, I]``.
        states: At each initial state. Shape ``[V, layers·directions, N, H]``.
        gates: At the inputs' part of the gates, ``[V, N, T, G·H]`` for each chain, by suffix.
        hidden: At the hidden states, ``[V, N, T, P]``, of chains that project them.
    """

    x: Tensor
    states: tuple[Tensor, ...]
    gates: dict[str, Tensor]
    hidden: dict[str, Tensor]


class RecurrentRule(AffinePairsRule):
    """``h_t = cell(W_ih x_t + b_ih, W_hh h_{t-1} + b_hh)``, stacked in layers and directions.

    With ``δ_t`` the columns at the gates: ``M(W_ih) = Σ_t δ_t ⊗ x_t``; ``h_{t-1}`` for ``W_hh``. A
    projection ``h_t = W_hr m_t`` has those at ``h_t``, and ``m_t``.
    The final states ``[layers·directions, N, H]`` carry their samples on axis 1.
    """

    def parameter_names(self, module: Module) -> tuple[str, ...]:
        """Those of every layer and direction, but not what a hook computes weights from."""
        named = module.named_parameters(recurse=False)
        return tuple(name for name, _ in named if _NAME.fullmatch(name))

    def check(self, view: View) -> None:
        """Refuse layouts without a leading batch axis, packed sequences, and dropout."""
        module = _module(view)
        sequence = arguments(view)["input"]
        if isinstance(sequence, PackedSequence):
            raise UnsupportedError(
                f"{view.path} received a PackedSequence, which has no batch axis: pass the padded "
                "tensor [N, T, I], and pick each sample's last step from the output."
            )
        # The engine has found the samples on axis 1, and as many as take part.
        is_turned = view.axis == 1 and view.samples == sequence.shape[1:2].numel()
        if not (module.batch_first or is_turned):
            raise UnsupportedError(
                f"{view.path} has batch_first=False, so axis 0 holds time steps, not samples: "
                "build it with batch_first=True and pass [N, T, I], or extend(model, batch_axis=1) "
                "if the model has its samples there."
            )
        if sequence.dim() != 3:
            raise UnsupportedError(
                f"{view.path} received a sequence without a batch axis: pass [N, T, I], with N = 1 "
                "for one sample."
            )
        if view.training and module.dropout > 0 and module.num_layers > 1:
            raise UnsupportedError(
                f"{view.path} drops activations between its layers at random "
                f"(dropout={module.dropout}), and does not store what it dropped: call eval() on "
                "it, or build one recurrent layer each with nn.Dropout between."
            )

    def batch_axis(self, view: View, index: int) -> int:
        """Axis 0 of the sequence, axis 1 of initial and final states."""
        return 0 if index == 0 else 1

    def input_axis(self, view: View) -> int:
        """Axis 1 if the module has the time in front."""
        return int(not _module(view).batch_first and len(view.input_shape) == 3)

    @abstractmethod
    def cell(self, view: View) -> Cell:
        """The cell of the layer."""

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        carried = self._carried(view, mat)
        x = carried.x if _module(view).batch_first else carried.x.transpose(1, 2)
        return by_slot(view, {"input": (x,), "hx": carried.states})

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        """The recursion is differentiated: it returns the gradient as a function of the input."""
        x = tensor(view, "input").detach().requires_grad_()
        with torch.enable_grad():
            gradient = self._carry_back(view, grad_output.unsqueeze(0), self._run(view, x)).x
        if not (len(mat) and gradient.requires_grad):  # that of a relu is constant, piece by piece
            return torch.zeros_like(mat)
        columns = [torch.autograd.grad(gradient, x, m[None], retain_graph=True)[0] for m in mat]
        return torch.stack(columns)

    def affine_pair(self, view: View, name: str, mat: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gates of all steps, and inputs or hidden states, in the order of the input."""
        kind, source, suffix = name.split("_", 2)
        carried = self._carried(view, mat)
        chain = next(c for layer in self._chains(view) for c in layer if c.suffix == suffix)
        inputs = {"ih": chain.x, "hh": chain.before, "hr": chain.tables[-1]}[source]
        out = carried.hidden[suffix] if source == "hr" else carried.gates[suffix]
        if source == "hh":
            out = self.cell(view).hidden_gates(chain.tables, out)
        out = _in_order(out, chain.backward, 2).unsqueeze(3)
        if kind == "bias":
            return out, None
        return out, _in_order(inputs, chain.backward, 1).unsqueeze(2)

    def _chains(self, view: View) -> list[list[Chain]]:
        """The chains of every layer, with the samples of this view."""
        whole, chosen = whole_call(view)
        layers = whole.once("chains", lambda: self._run(whole, _sequence(whole)))
        if chosen is None:
            return layers
        return view.once("chains", lambda: [[_select(c, chosen) for c in cs] for cs in layers])

    def _run(self, view: View, x: Tensor) -> list[list[Chain]]:
        """Run the layer again, and keep what the recursion needs."""
        module, cell = _module(view), self.cell(view)
        states = self._initial(view, cell.states)
        layers = []
        for layer in range(module.num_layers):
            chains, outputs = [], []
            for direction in range(_directions(module)):
                suffix = f"l{layer}" + "_reverse" * direction
                weights = _weights(view, suffix)
                position = layer * _directions(module) + direction
                start = tuple(state[position] for state in states)
                steps = _in_order(x, bool(direction), 1)
                # Not by cuDNN: it needs the weights in one block, and has no second derivative.
                with torch.backends.cudnn.flags(enabled=False):
                    after = cell.run(steps, start, weights)
                before = torch.cat([start[0].unsqueeze(1), after[:, :-1]], 1)
                tables = cell.tables(steps, before, after, start, weights)
                chains.append(Chain(suffix, bool(direction), steps, before, tables))
                outputs.append(_in_order(after, bool(direction), 1))
            layers.append(chains)
            x = torch.cat(outputs, -1)
        return layers

    def _initial(self, view: View, count: int) -> list[Tensor]:
        """The initial states, each of shape ``[layers·directions, N, H]``."""
        whole, chosen = whole_call(view)
        given = slots(whole).get("hx")
        if given:
            states = [whole.tensor_input(slot) for slot in given]
            return states if chosen is None else [state[:, chosen] for state in states]
        module, x = _module(view), _sequence(view)
        shape = module.num_layers * _directions(module), len(x)
        sizes = module.proj_size or module.hidden_size, module.hidden_size
        return [x.new_zeros(*shape, size) for size in sizes[:count]]

    def _carried(self, view: View, mat: Tensor) -> Carried:
        return once_per_columns(
            view, "carried", mat, lambda: self._carry_back(view, mat, self._chains(view))
        )

    def _carry_back(self, view: View, mat: Tensor, layers: list[list[Chain]]) -> Carried:
        module, cell = _module(view), self.cell(view)
        at_output = mat if view.index == 0 else None
        gates: dict[str, Tensor] = {}
        hidden: dict[str, Tensor] = {}
        states: list[tuple[Tensor, ...]] = []
        for layer in reversed(range(module.num_layers)):
            at_inputs, at_states = [], []
            for direction, chain in enumerate(layers[layer]):
                position = layer * _directions(module) + direction
                # The states of a layer come behind its outputs: (output, h_n, c_n).
                ends: list[Tensor | None] = [None, None]
                if view.index > 0:
                    ends[view.index - 1] = mat[:, :, position]
                steps = None
                if at_output is not None:
                    part = at_output.chunk(_directions(module), -1)[direction]
                    steps = _in_order(part, chain.backward, 2)
                weights = _weights(view, chain.suffix)
                found, projected, start = _recurse(cell, chain, weights, steps, ends)
                gates[chain.suffix] = found
                if projected is not None:
                    hidden[chain.suffix] = projected
                at_inputs.append(_in_order(found @ weights.ih, chain.backward, 2))
                at_states.append(start)
            states = at_states + states
            at_output = at_inputs[0] if len(at_inputs) == 1 else at_inputs[0] + at_inputs[1]
        assert at_output is not None
        stacked = tuple(torch.stack(parts, 1) for parts in zip(*states, strict=True))
        return Carried(at_output, stacked, gates, hidden)


def _recurse(
    cell: Cell, chain: Chain, weights: Weights, steps: Tensor | None, ends: list[Tensor | None]
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Go back through time.

    Args:
        cell: The cell.
        chain: What happened forwards.
        weights: The parameters.
        steps: Columns at the hidden state of every step, ``[V, N, T, H]``, or ``None``.
        ends: Columns at the last hidden and cell state, ``[V, N, H]``, or ``None``.

    Returns:
        Columns at the gates ``[V, N, T, G·H]``; at the hidden states ``[V, N, T, P]``, or ``None``
        if they are not projected; and at the initial states ``[V, N, H]``.
    """
    hidden, memory = ends
    columns: list[Tensor] = []
    projected: list[Tensor] = []
    for time in reversed(range(chain.x.shape[1])):
        now = tuple(table[:, time] for table in chain.tables)
        if steps is not None:
            hidden = steps[:, :, time] if hidden is None else hidden + steps[:, :, time]
        elif hidden is None:
            assert memory is not None
            hidden = memory.new_zeros(*memory.shape[:-1], weights.hh.shape[-1])
        if weights.hr is not None:
            projected.append(hidden)
            hidden = hidden @ weights.hr
        gates, beside, memory = cell.step(now, hidden, memory)
        hidden = cell.hidden_gates(now, gates) @ weights.hh
        if beside is not None:
            hidden = hidden + beside
        columns.append(gates)
    states = (hidden, memory)[: cell.states]
    at_projections = torch.stack(projected[::-1], 2) if projected else None
    return torch.stack(columns[::-1], 2), at_projections, tuple(s for s in states if s is not None)


def _module(view: View) -> RNNBase:
    return cast(RNNBase, view.module)


def _sequence(view: View) -> Tensor:
    """The input, ``[N, T, I]``."""
    x = tensor(view, "input")
    return x if _module(view).batch_first else x.transpose(0, 1)


def _directions(module: RNNBase) -> int:
    return 2 if module.bidirectional else 1


def _in_order(x: Tensor, backward: bool, axis: int) -> Tensor:
    """Reverse time for a chain that runs backwards."""
    return x.flip(axis) if backward else x


def _weights(view: View, suffix: str) -> Weights:
    def named(kind: str, is_there: bool = True) -> Tensor | None:
        return view.parameter(f"{kind}_{suffix}") if is_there else None

    module = _module(view)
    return Weights(
        view.parameter(f"weight_ih_{suffix}"),
        view.parameter(f"weight_hh_{suffix}"),
        named("bias_ih", module.bias),
        named("bias_hh", module.bias),
        named("weight_hr", module.proj_size > 0),
    )


def _select(chain: Chain, samples: Tensor) -> Chain:
    tables = tuple(table[samples] for table in chain.tables)
    return replace(chain, x=chain.x[samples], before=chain.before[samples], tables=tables)


class RNNRule(RecurrentRule):
    """Elman networks."""

    module_types = (RNN,)

    def cell(self, view: View) -> Cell:
        """With the nonlinearity of the module."""
        return ElmanCell(cast(RNN, view.module).nonlinearity)


class LSTMRule(RecurrentRule):
    """Long short-term memory."""

    module_types = (LSTM,)

    def cell(self, view: View) -> Cell:
        """The same for all modules."""
        return LSTMCell()


class GRURule(RecurrentRule):
    """Gated recurrent units."""

    module_types = (GRU,)

    def cell(self, view: View) -> Cell:
        """The same for all modules."""
        return GRUCell()
