"""Rules of modules that are one step of a recurrent net: ``LSTMCell``, ``GRUCell``, ``RNNCell``.

A loop calls a module of this kind once per step, and the engine adds up the results of the calls.
The formulas of a step are shared with the layers, in ``recurrent_cells``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import by_slot, slots, tensor
from backpack_layers.once import once_per_columns
from backpack_layers.recurrent_cells import Cell, ElmanCell, GRUCell, LSTMCell, Tables, Weights
from backpack_products.parametric import AffinePairsRule


@dataclass(frozen=True)
class Carried:
    """Columns at everything that a step received.

    Attributes:
        x: At the input. Shape ``[V, N, I]``.
        states: At the hidden and the cell state. Shape ``[V, N, H]``.
        gates: At the input's and at the hidden state's part of the gates, ``[V, N, G·H]`` each.
    """

    x: Tensor
    states: tuple[Tensor, ...]
    gates: dict[str, Tensor]


class StepRule(AffinePairsRule):
    """``h' = cell(W_ih x + b_ih, W_hh h + b_hh)``.

    With ``δ`` the columns at the gates: ``M(W_ih) = δ ⊗ x``; ``h`` for ``W_hh``.
    """

    params = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def parameter_names(self, module: Module) -> tuple[str, ...]:
        """Weights, and biases if there are any."""
        return tuple(name for name in self.params if getattr(module, name) is not None)

    @abstractmethod
    def cell(self, view: View) -> Cell:
        """The step."""

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        shape = view.inputs[slots(view)["input"][0]].shape
        if len(shape) != 2:
            raise UnsupportedError(
                f"{view.path} received an input of shape {list(shape)}, which has no batch axis: "
                "pass [N, I], with N = 1 for one sample."
            )

    def affine_pair(self, view: View, name: str, mat: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gates, and the input or the hidden state."""
        kind, source = name.split("_")
        gates = self._carried(view, mat).gates[source]
        out = gates.reshape(*gates.shape[:2], 1, 1, gates.shape[-1])
        if kind == "bias":
            return out, None
        inputs = tensor(view, "input") if source == "ih" else self._states(view)[0]
        return out, inputs.reshape(len(inputs), 1, 1, inputs.shape[-1])

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        carried = self._carried(view, mat)
        return by_slot(view, {"input": (carried.x,), "hx": carried.states})

    def _states(self, view: View) -> list[Tensor]:
        """The states that the step started from, zeros where none were given."""
        given = slots(view).get("hx")
        if given:
            return [view.tensor_input(slot) for slot in given]
        x, module = tensor(view, "input"), cast(nn.LSTMCell, view.module)
        return [x.new_zeros(len(x), module.hidden_size)] * self.cell(view).states

    def _carried(self, view: View, mat: Tensor) -> Carried:
        return once_per_columns(view, "carried", mat, lambda: self._carry_back(view, mat))

    def _carry_back(self, view: View, mat: Tensor) -> Carried:
        cell, now = self.cell(view), view.once("tables", lambda: self._tables(view))
        # The cell state is the second output.
        hidden, memory = (mat, None) if view.index == 0 else (torch.zeros_like(mat), mat)
        gates, beside, memory = cell.step(now, hidden, memory)
        inner = cell.hidden_gates(now, gates)
        before = inner @ view.parameter("weight_hh")
        states = (before if beside is None else before + beside, memory)[: cell.states]
        return Carried(
            gates @ view.parameter("weight_ih"),
            tuple(state for state in states if state is not None),
            {"ih": gates, "hh": inner},
        )

    def _tables(self, view: View) -> Tables:
        """The tables of :meth:`Cell.tables`, for a sequence of one step."""
        biases = (
            view.parameter(name) if getattr(view.module, name) is not None else None
            for name in ("bias_ih", "bias_hh")
        )
        weights = Weights(view.parameter("weight_ih"), view.parameter("weight_hh"), *biases)
        states = self._states(view)
        sequence, before = tensor(view, "input").unsqueeze(1), states[0].unsqueeze(1)
        after = self.after(view)
        tables = self.cell(view).tables(sequence, before, after, tuple(states), weights)
        return tuple(table[:, 0] for table in tables)

    def after(self, view: View) -> Tensor:
        """The hidden state after the step, ``[N, 1, H]``, if the tables need it."""
        return tensor(view, "input").new_empty(0)


class RNNCellRule(StepRule):
    """One step of an Elman network."""

    module_types = (nn.RNNCell,)

    def cell(self, view: View) -> Cell:
        """With the nonlinearity of the module."""
        return ElmanCell(cast(nn.RNNCell, view.module).nonlinearity)

    def after(self, view: View) -> Tensor:
        """The output."""
        return view.output.unsqueeze(1)


class LSTMCellRule(StepRule):
    """One step of long short-term memory, which returns a hidden state and a cell state."""

    module_types = (nn.LSTMCell,)

    def cell(self, view: View) -> Cell:
        """The same for all modules."""
        return LSTMCell()


class GRUCellRule(StepRule):
    """One step of a gated recurrent unit."""

    module_types = (nn.GRUCell,)

    def cell(self, view: View) -> Cell:
        """The same for all modules."""
        return GRUCell()
