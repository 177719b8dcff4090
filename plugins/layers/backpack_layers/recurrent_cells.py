"""One time step of each recurrent cell, backwards. Imports torch only.

What does not depend on the columns is computed beforehand for all steps in parallel, as *tables*.
So a step is a few operations. A cell stacks ``G`` gates in its weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Tables = tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """The parameters of one direction of one layer: ``[G·H, I]``, ``[G·H, H]``, twice ``[G·H]``.

    A layer that projects its hidden states has another one, ``[P, H]``, and ``[G·H, P]`` second.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    hr: Tensor | None = None

    def flat(self) -> list[Tensor]:
        """In the order of arguments of torch's functions."""
        weights = self.ih, self.hh, self.bias_ih, self.bias_hh, self.hr
        return [weight for weight in weights if weight is not None]

    def gates(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of input and hidden state in every step's gates. Shape ``[N, T, G·H]``."""
        return F.linear(x, self.ih, self.bias_ih), F.linear(before, self.hh, self.bias_hh)


class Cell(ABC):
    """One step ``(x_t, h_{t-1}) ↦ h_t``: how it is run, and how columns go back through it."""

    states = 1

    @abstractmethod
    def run(self, x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Tensor:
        """Hidden states of all steps: ``[N, T, I] → [N, T, H]``; states have shape ``[N, H]``."""

    @abstractmethod
    def tables(
        self, x: Tensor, before: Tensor, after: Tensor, state: tuple[Tensor, ...], weights: Weights
    ) -> Tables:
        """What :meth:`step` needs, for all steps.

        Args:
            x: Inputs. Shape ``[N, T, I]``.
            before: Hidden states that the steps started from. Shape ``[N, T, H]``.
            after: Hidden states that they led to. Shape ``[N, T, H]``.
            state: Initial states, shape ``[N, H]`` each.
            weights: The parameters.

        Returns:
            Tensors ``[N, T, ...]``.
        """

    @abstractmethod
    def step(
        self, now: Tables, hidden: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Carry columns through one step.

        Args:
            now: The tables of this step.
            hidden: Columns at ``h_t``, before a projection. Shape ``[V, N, H]``.
            memory: Columns at the cell state ``c_t``, or ``None``. Shape ``[V, N, H]``.

        Returns:
            Columns at the input's part of the gates, shape ``[V, N, G·H]``; columns at ``h_{t-1}``
            along paths that avoid the gates, or ``None``; columns at ``c_{t-1}``, or ``None``.
        """

    def hidden_gates(self, now: Tables, gates: Tensor) -> Tensor:
        """Columns at the hidden state's part of the gates, from those at the input's part.

        For one step, or for all steps with the tables of all.
        """
        return gates


class ElmanCell(Cell):
    """``h_t = φ(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)`` with ``φ`` tanh or ReLU."""

    def __init__(self, nonlinearity: str) -> None:
        self.tanh = nonlinearity == "tanh"

    def run(self, x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Tensor:
        """By torch's function for the nonlinearity."""
        function = torch.rnn_tanh if self.tanh else torch.rnn_relu
        return function(x, state[0][None], *_options(weights))[0]

    def tables(
        self, x: Tensor, before: Tensor, after: Tensor, state: tuple[Tensor, ...], weights: Weights
    ) -> Tables:
        """``φ'``."""
        return (1 - after**2 if self.tanh else (after > 0).to(after.dtype),)

    def step(
        self, now: Tables, hidden: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One gate."""
        return hidden * now[0], None, None


class LSTMCell(Cell):
    """``c_t = f c_{t-1} + i g``, ``h_t = o tanh(c_t)``, gates in the order ``i, f, g, o``."""

    states = 2

    def run(self, x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Tensor:
        """By :func:`torch.lstm`."""
        return torch.lstm(x, [s[None] for s in state], *_options(weights))[0]

    def tables(
        self, x: Tensor, before: Tensor, after: Tensor, state: tuple[Tensor, ...], weights: Weights
    ) -> Tables:
        """``∂gates`` stacked ``[N, T, 4, H]``, ``∂h_t/∂c_t``, ``∂c_t/∂c_{t-1}``.

        And ``h_t`` before a projection, if there is one.
        """
        first, second = weights.gates(x, before)
        i, f, g, o = (first + second).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        memories = [state[1]]
        for forget, new in zip(f.unbind(1), (i * g).unbind(1), strict=True):
            memories.append(torch.addcmul(new, forget, memories[-1]))
        memory = torch.stack(memories, 1)
        squashed = memory[:, 1:].tanh()
        slopes = (
            g * i * (1 - i),
            memory[:, :-1] * f * (1 - f),
            i * (1 - g**2),
            squashed * o * (1 - o),
        )
        tables = torch.stack(slopes, 2), o * (1 - squashed**2), f
        return tables if weights.hr is None else (*tables, o * squashed)

    def step(
        self, now: Tables, hidden: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``i``, ``f``, ``g`` act through ``c_t``, and ``o`` on ``h_t``."""
        slopes, into_memory, forget, *_ = now
        memory = hidden * into_memory if memory is None else memory + hidden * into_memory
        gates = torch.stack([memory, memory, memory, hidden], 2) * slopes
        return gates.flatten(2), None, memory * forget


class GRUCell(Cell):
    """``h_t = (1 - z) n + z h_{t-1}`` with ``n = tanh(… + r (W_hn h_{t-1} + b_hn))``.

    The gates in the order ``r, z, n``.
    """

    def run(self, x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Tensor:
        """By :func:`torch.gru`."""
        return torch.gru(x, state[0][None], *_options(weights))[0]

    def tables(
        self, x: Tensor, before: Tensor, after: Tensor, state: tuple[Tensor, ...], weights: Weights
    ) -> Tables:
        """``∂gates`` stacked ``[N, T, 3, H]``, ``z``, and ``[1, 1, r]`` flat ``[N, T, 3·H]``."""
        first, second = (gates.chunk(3, -1) for gates in weights.gates(x, before))
        r, z = (first[0] + second[0]).sigmoid(), (first[1] + second[1]).sigmoid()
        n = (first[2] + r * second[2]).tanh()
        new = (1 - z) * (1 - n**2)
        slopes = torch.stack([new * second[2] * r * (1 - r), (before - n) * z * (1 - z), new], 2)
        ones = torch.ones_like(r)
        return slopes, z, torch.cat([ones, ones, r], -1)

    def step(
        self, now: Tables, hidden: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All gates are linear in the columns at ``h_t``."""
        slopes, keep, _ = now
        return (hidden.unsqueeze(2) * slopes).flatten(2), hidden * keep, None

    def hidden_gates(self, now: Tables, gates: Tensor) -> Tensor:
        """The hidden state enters the gate ``n`` through ``r``."""
        return gates * now[2]


def _options(
    weights: Weights,
) -> tuple[list[Tensor], bool, int, float, bool, bool, bool]:
    """One layer, one direction, no dropout, the batch axis first."""
    return weights.flat(), weights.bias_ih is not None, 1, 0.0, False, False, True
