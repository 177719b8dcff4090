"""The state file of a run over a data set: written atomically, read to resume the run."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UsageError
from backpack_data import files
from backpack_data.shards import local
from backpack_data.states import States


class Checkpoint:
    """What is needed to resume: states, the position in the data, and the state of generators.

    Generators are restored twice: first to their state at the start of the pass, so a loader that
    shuffles gives the same order; then, after the finished batches are skipped, to their state when
    the file was written.
    """

    def __init__(self, path: Path, every: int, model: Module, loader: Iterable[Any]) -> None:
        """Read the file, if there is one.

        Args:
            path: The file.
            every: It is written after this many batches.
            model: The model; a file of another model is refused.
            loader: The data; its own generator is restored, too.
        """
        self._path, self._every, self._model = path, every, model
        self._generator = getattr(loader, "generator", None)
        self._tensors: dict[str, Tensor] = {}
        self._about: dict[str, Any] = {}
        if path.exists():
            self._tensors, self._about = files.read(path)
        self._print = _fingerprint(model)

    def begin(self, number: int, states: States) -> int:
        """Restore the states of a pass, and return how many of its batches are done.

        Raises:
            UsageError: The file belongs to another model, or to other extensions.
        """
        names = [f"{type(e).__name__} in {e.savefield}" for e in states.extensions]
        mine = {"model": self._print, f"extensions {number}": names}
        found = {key: self._about[key] for key in mine if key in self._about}
        if self._about and any(found[key] != mine[key] for key in found):
            raise UsageError(
                f"{self._path} is the state of another run: it has {json.dumps(found)}, and asked "
                f"for is {json.dumps(mine)}. Give another state_file, or remove it."
            )
        self._about.update(mine)
        prefix = f"{number}:"
        if f"numbers {number}" in self._about:
            own = {k[len(prefix) :]: t for k, t in self._tensors.items() if k.startswith(prefix)}
            states.restore(own, self._about[f"numbers {number}"], self._model)
            self._set(f"start {number}")
        else:
            self._keep(f"start {number}")
        self._current = f"now {number}"
        self._done = int(self._about.get(f"done {number}", 0))
        return self._done

    def seed(self) -> None:
        """Restore generators to their state in the file, after finished batches were skipped."""
        self._set(self._current, loader=False)

    def after(self, number: int, done: int, states: States) -> None:
        """Write the file after every ``every`` batches."""
        self._done = done
        if done % self._every == 0:
            self.end(number, states)

    def end(self, number: int, states: States) -> None:
        """Write the file, with the states of pass ``number`` as they are now."""
        prefix = f"{number}:"
        kept = {k: t for k, t in self._tensors.items() if not k.startswith(prefix)}
        self._tensors = {**kept, **{prefix + k: t for k, t in states.tensors().items()}}
        self._about[f"numbers {number}"] = states.numbers()
        self._about[f"done {number}"] = self._done
        self._keep(f"now {number}")
        files.write(self._path, self._tensors, self._about)

    def _keep(self, name: str) -> None:
        self._tensors[f"random|{name}|cpu"] = torch.get_rng_state()
        if self._generator is not None:
            self._tensors[f"random|{name}|loader"] = self._generator.get_state()
        if torch.cuda.is_available():
            for device, state in enumerate(torch.cuda.get_rng_state_all()):
                self._tensors[f"random|{name}|cuda{device}"] = state

    def _set(self, name: str, loader: bool = True) -> None:
        start = f"random|{name}|"
        for key, state in self._tensors.items():
            device = key.removeprefix(start)
            if key == device:
                continue
            if device == "cpu":
                torch.set_rng_state(state)
            elif device == "loader":
                if loader and self._generator is not None:
                    self._generator.set_state(state)
            else:
                torch.cuda.set_rng_state(state, int(device.removeprefix("cuda")))


def _fingerprint(model: Module) -> str:
    """Tells models apart by names, shapes and values of parameters."""
    digest = 0
    for name, parameter in model.named_parameters():
        data = local(parameter.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = zlib.crc32(f"{name} {list(parameter.shape)}".encode(), digest)
        digest = zlib.crc32(data.numpy().tobytes(), digest)
    return f"{digest:08x}"
