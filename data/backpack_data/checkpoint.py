"""The state file of a run over a data set: written atomically, read to resume the run."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import Extension
from backpack_core.errors import UsageError
from backpack_core.record.nested import iter_tensors
from backpack_data import files
from backpack_data.settings import plain_settings, qualified, settings_of
from backpack_data.shards import local
from backpack_data.states import States
from backpack_products.fingerprint import Fingerprint, agreed
from backpack_products.ranks import checksum


class Checkpoint:
    """What is needed to resume: states, the position in the data, and the state of generators.

    Generators are restored twice: first to their state at the start of the pass, so a loader that
    shuffles gives the same order; then, after the finished batches are skipped, to their state when
    the file was written. Finished batches are compared with those of the file by a checksum.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        model: Module,
        lossfunc: Any,
        loader: Iterable[Any],
        extensions: Sequence[Extension],
    ) -> None:
        """Read the file, if there is one.

        Args:
            path: The file.
            every: It is written after this many batches.
            model: The model; a file of another model is refused.
            lossfunc: The loss; as the model, if it is a module.
            loader: The data; its own generator is restored, too.
            extensions: What is computed; a file of extensions with other settings is refused.

        Raises:
            UsageError: The folder is missing, the path names a folder, or the file holds something
                else.
        """
        self._path, self._every, self._model = path, every, model
        self._generator = getattr(loader, "generator", None)
        self._tensors: dict[str, Tensor] = {}
        self._about: dict[str, Any] = {}
        if not path.parent.is_dir():
            raise UsageError(f"There is no folder {str(path.parent)!r} for the state file.")
        if path.is_dir():
            raise UsageError(f"state_file is a file, and {str(path)!r} is a folder: add a name.")
        if path.exists():
            self._tensors, self._about = files.read(path, "state")
        self._held = {"model": model}
        self._print: dict[str, Any] = {"model": _fingerprint(model)}
        self._print["loss"] = qualified(lossfunc)
        self._print["extensions"] = [settings_of(extension) for extension in extensions]
        if isinstance(lossfunc, Module):
            self._held["loss"] = lossfunc
            parts = " ".join(map(plain_settings, lossfunc.modules()))
            self._print["loss"] = f"{parts} {_fingerprint(lossfunc)}"
        buffers = self._buffers()
        # For a run that has begun, only those that did not change as it ran.
        kept = buffers.keys() & self._about.keys() if self._about else buffers.keys()
        self._print.update({name: buffers[name] for name in sorted(kept)})

    def begin(self, number: int, states: States, plugins: Fingerprint, given: str) -> int:
        """Restore the states of a pass, and return how many of its batches are done.

        Args:
            number: Which of the passes.
            states: Restored.
            plugins: Those that compute.
            given: The checksum of what an earlier pass has found, over all processes.

        Raises:
            UsageError: The file belongs to another model, to another loss, to other extensions, or
                to other plugins; or an earlier pass of all processes has found something else.
        """
        mine = self._print
        found = {k: self._about[k] for k in mine if self._about.get(k, mine[k]) != mine[k]}
        if found:
            wanted = {key: mine[key] for key in found}
            raise self._other(f"it has {json.dumps(found)}, but this run has {json.dumps(wanted)}")
        agreed({str(self._path): self._about.get("plugins", {}), "this run": plugins})
        key = f"given {number}"
        if self._about.setdefault(key, given) != given:
            raise self._other(
                f"pass {number} uses what the pass before it has found on all processes, and that "
                "is different now (batches of another process have changed)"
            )
        self._about.update(mine, plugins=plugins)
        prefix = f"{number}:"
        if f"numbers {number}" in self._about:
            own = {k[len(prefix) :]: t for k, t in self._tensors.items() if k.startswith(prefix)}
            states.restore(own, self._about[f"numbers {number}"], self._model)
            self._set(f"start {number}")
        else:
            self._keep(f"start {number}")
        self._done = self._resumed = int(self._about.get(f"done {number}", 0))
        self._checksum = 0
        return self._done

    def see(self, number: int, place: int, batch: Any) -> None:
        """Take note of the next batch, before it is run or skipped.

        Raises:
            UsageError: The finished batches are not those of the file.
        """
        if place == self._resumed:
            self._resume(number, place, self._about.get(f"all {number}", False))
        for tensor in iter_tensors(batch):
            self._checksum = checksum(local(tensor), self._checksum)

    def after(self, number: int, done: int, states: States) -> None:
        """Write the file after every ``every`` batches."""
        self._done = done
        if done % self._every == 0:
            self._write(number, states)

    def end(self, number: int, batches: int, states: States) -> None:
        """Write the file, with the states of pass ``number`` over all batches.

        Raises:
            UsageError: The batches are not those of the file.
        """
        if batches <= self._resumed:
            self._resume(number, batches, batches < self._resumed)
        self._about[f"all {number}"] = batches > 0
        self._write(number, states)

    def _resume(self, number: int, done: int, is_other: bool) -> None:
        """Restore generators as they were after the finished batches, which were skipped."""
        if is_other or self._about.get(f"data {number}", 0) != self._checksum:
            raise self._other(
                f"the first {self._resumed} batches of pass {number} are in it, and the loader "
                f"gave {'another number of them' if is_other else 'others'} (one that shuffles "
                "needs its generator, DataLoader(..., generator=...))"
            )
        self._set(f"now {number}", loader=False)

    def _other(self, why: str) -> UsageError:
        return UsageError(
            f"{self._path} is the state of another run: {why}. Give another state_file, or remove "
            "it."
        )

    def _write(self, number: int, states: States) -> None:
        prefix = f"{number}:"
        kept = {k: t for k, t in self._tensors.items() if not k.startswith(prefix)}
        self._tensors = {**kept, **{prefix + k: t for k, t in states.tensors().items()}}
        self._about[f"numbers {number}"] = states.numbers()
        self._about[f"done {number}"], self._about[f"data {number}"] = self._done, self._checksum
        self._keep(f"now {number}")
        for name, now in self._buffers().items():
            if self._about.get(name, now) != now:  # it changes as the model runs
                del self._about[name], self._print[name]
        files.write(self._path, "state", self._tensors, self._about)

    def _buffers(self) -> dict[str, str]:
        """Checksums of the buffers of model and loss."""
        return {
            f"buffer {name} of the {role}": f"{checksum(local(buffer)):08x}"
            for role, module in self._held.items()
            for name, buffer in module.named_buffers()
        }

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
    """Tells models apart by modules, names and shapes, parameters, what is trained, and modes.

    Of a module, these are its type and the settings that it shows.
    """
    modes = {
        path: (module.training, qualified(type(module)), module.extra_repr())
        for path, module in model.named_modules()
    }
    buffers = {name: list(buffer.shape) for name, buffer in model.named_buffers()}
    digest = zlib.crc32(repr((modes, buffers)).encode())
    for name, tensor in model.named_parameters():
        about = f"{name} {list(tensor.shape)} {tensor.requires_grad}"
        digest = checksum(local(tensor), zlib.crc32(about.encode(), digest))
    return f"{digest:08x}"


def file_of_rank(path: str | Path, group: distributed.ProcessGroup | None) -> Path:
    """The file name of this rank: by its number among all, since groups may share a name."""
    path = Path(path)
    if group is None:
        return path
    return path.with_name(f"{path.stem}-{distributed.get_rank()}{path.suffix}")
