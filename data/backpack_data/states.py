"""The states of all parameters and fields, as batches come in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import Extension
from backpack_core.errors import UnsupportedError
from backpack_data import files
from backpack_data.shards import carriers, in_dtype_of
from backpack_data.state import State
from backpack_data.weights import Weights, joint, require_proportional

Place = tuple[str, str]  # path of a parameter, field


@dataclass
class States:
    """The values for some batches, of every parameter and every extension.

    Attributes:
        extensions: The extensions that ran on each batch.
        shapes: Shapes of the parameters, by path.
        table: States, by path and field.
        seen: How many batches had a value at a path and field, or are known to have zeros there.
        batches: How many batches there were.
        normaliser: What the loss of all of them divides by; ``None`` for a sum.
        ratios: Normalisers of several losses, divided by the first one's.
        trained: Paths of the parameters that were trained in these batches; empty before the first.
        samples: How many samples took part in them, by field.
    """

    extensions: tuple[Extension, ...]
    shapes: dict[str, torch.Size]
    table: dict[Place, State] = field(default_factory=dict)
    seen: dict[Place, int] = field(default_factory=dict)
    batches: int = 0
    normaliser: float | None = None
    ratios: tuple[float, ...] = ()
    trained: frozenset[str] = frozenset()
    samples: dict[str, int] = field(default_factory=dict)

    @classmethod
    def over(cls, model: Module, extensions: Sequence[Extension]) -> States:
        """The states before the first batch.

        Raises:
            UnsupportedError: Values of an extension do not combine.
        """
        shapes = {path: parameter.shape for path, parameter in model.named_parameters()}
        return cls(tuple(extensions), shapes)

    def add(
        self,
        model: Module,
        weights: Weights,
        given: tuple[float | None] | None = None,
        is_given_up: bool = False,
    ) -> None:
        """Add the values that a backward pass stored on the parameters, and delete them there.

        Args:
            model: The model.
            weights: The observer of the pass.
            given: The normaliser, if the user gave one.
            is_given_up: Whether the caller no longer needs the values.
        """
        if given is None and weights.fault is not None:
            raise weights.fault
        normaliser, ratios = joint(weights.normalisers if given is None else given)
        held = carriers(model)
        trained = frozenset(path for path, parts in held.items() if parts[0].requires_grad)
        if self.batches:
            self._require_alike(normaliser, ratios)
            self._require_trained(trained)
        new: dict[Place, State] = {}
        for path, (parameter, *others) in held.items():
            for extension in self.extensions:
                if extension.savefield in parameter.__dict__:
                    value = parameter.__dict__.pop(extension.savefield)
                    for other in others:
                        other.__dict__.pop(extension.savefield, None)
                    samples = weights.samples(extension.subsampling)
                    place = path, extension.savefield
                    state = State.of(extension, value, normaliser, samples, is_given_up)
                    for key, (tensor,) in state.tensors.items():
                        state.tensors[key] = [in_dtype_of(parameter, tensor)]
                    new[place] = state
        counts = {e.savefield: weights.samples(e.subsampling) for e in self.extensions}
        self._add_unreached(new, counts)
        for place in new.keys() & self.table.keys():
            self.table[place].require_fit(new[place])
        for place, state in new.items():
            if place in self.table:
                self.table[place].add(state)
            else:
                self.table[place] = state
            self.seen[place] = self.seen.get(place, 0) + 1
        self.batches, self.ratios, self.trained = self.batches + 1, ratios, trained
        if normaliser is not None:
            self.normaliser = (self.normaliser or 0.0) + normaliser
        self.samples = {name: self.samples.get(name, 0) + n for name, n in counts.items()}

    def _add_unreached(self, new: dict[Place, State], counts: Mapping[str, int]) -> None:
        """Add zeros for batches that do not reach a parameter, as an expert without a token.

        Args:
            new: The states of a batch; completed.
            counts: How many samples it has, by field.
        """
        for place, state in self.table.items():
            if place not in new and not state.is_sum and state.counts_unreached:
                new[place] = state.of_unreached(counts[place[1]])
        for place in [*new] if self.batches else ():
            state = new[place]
            if place not in self.table and not state.is_sum and state.counts_unreached:
                self.table[place] = state.of_unreached(self.samples[place[1]])
                self.seen[place] = self.batches

    def _require_alike(self, normaliser: float | None, ratios: tuple[float, ...]) -> None:
        if (normaliser is None) != (self.normaliser is None):
            raise UnsupportedError(
                "The loss of one batch is a sum and that of another is a mean, so their weights "
                "cannot be compared. Use one reduction."
            )
        require_proportional(self.ratios, ratios)

    def _require_trained(self, trained: frozenset[str]) -> None:
        """Refuse a sum that lacks the values of a parameter in some batches."""
        others = sorted(self.trained ^ trained) if self.trained else ()
        if others:
            raise UnsupportedError(
                f"The parameter {others[0]!r} was frozen in some batches and trained in others, so "
                "its values are not those of all: begin anew (reset()) after freezing parameters."
            )

    def values(self, are_given_up: bool = False) -> Iterator[tuple[str, Extension, Any]]:
        """The values for all batches, as triples of path, extension and value.

        Args:
            are_given_up: Whether the states are no longer needed, so their memory may be taken.

        Raises:
            UnsupportedError: A batch did not reach a parameter, and the value is an average over
                the samples that do.
        """
        by_field = {extension.savefield: extension for extension in self.extensions}
        for (path, name), state in self.table.items():
            extension = by_field[name]
            if self.seen[path, name] != self.batches and not state.is_sum:
                raise UnsupportedError(
                    f"{self.seen[path, name]} of {self.batches} batches reached the parameter "
                    f"{path!r}, and its {name!r} is not known where it is not reached: leave the "
                    "extension out, or the parameter, with requires_grad_(False)."
                )
            state.normaliser = self.normaliser
            yield path, extension, state.value(self.shapes[path], are_given_up)

    # Files ---------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is a tensor, by name."""
        found = {}
        for (path, name), state in self.table.items():
            for key, tensors in state.tensors.items():
                for number, tensor in enumerate(tensors):
                    found[files.joined(path, name, key, number)] = tensor.contiguous()
        return found

    def numbers(self) -> dict[str, Any]:
        """Everything else, for JSON."""
        return {
            "batches": self.batches,
            "normaliser": self.normaliser,
            "ratios": self.ratios,
            "samples": self.samples,
            "places": [[*p, self.seen[p], s.samples, s.normaliser] for p, s in self.table.items()],
        }

    def restore(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], model: Module
    ) -> None:
        """Continue from :meth:`tensors` and :meth:`numbers`, on the devices of the model."""
        devices = {path: parameter.device for path, parameter in model.named_parameters()}
        by_field = {extension.savefield: extension for extension in self.extensions}
        self.batches, self.normaliser = numbers["batches"], numbers["normaliser"]
        self.ratios, self.samples = tuple(numbers["ratios"]), dict(numbers["samples"])
        for path, name, seen, samples, normaliser in numbers["places"]:
            self.seen[path, name] = seen
            self.table[path, name] = State(by_field[name], {}, normaliser, samples)
        for key, tensor in sorted(tensors.items(), key=_by_number):
            path, name, part, _ = files.parts_of(key)
            known = self.table[path, name].tensors
            known.setdefault(part, []).append(tensor.to(devices[path]))


def _by_number(item: tuple[str, Tensor]) -> tuple[str, int]:
    start, _, number = item[0].rpartition("|")
    return start, int(number)
