"""Quantities over a data set, one batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from backpack_core import Extension, backpack
from backpack_core.engine.active import Check
from backpack_core.errors import UsageError
from backpack_data.arguments import (
    require_kinds,
    require_model,
    require_number,
    require_result,
)
from backpack_data.batches import Batch, Kept, made_by, output_of, split
from backpack_data.borrowed import extended, same_gradients
from backpack_data.captured import CapturedBatches
from backpack_data.checkpoint import Checkpoint, file_of_rank
from backpack_data.exchange import reduce
from backpack_data.processes import Heartbeat, InStep
from backpack_data.quantities import Quantities
from backpack_data.shards import carriers, has_shards, local, placed, wholes_by_shard
from backpack_data.state import named, over_batches
from backpack_data.states import States
from backpack_data.weights import Weights, joint
from backpack_interplay.compiled import uncompiled
from backpack_products.fingerprint import Fingerprint, fingerprint
from backpack_products.merging import OverBatches, declaration
from backpack_products.nested import map_tensors
from backpack_products.ranks import about, digest, require_member

Loss = Callable[[Any, Any], Tensor]
Given: TypeAlias = tuple[float | None] | None  # what the user says that a loss divides by


def accumulate(
    model: Module,
    lossfunc: Loss,
    loader: Iterable[Any],
    *extensions: Extension,
    batch: Callable[[Any], Batch] | None = None,
    normaliser: Callable[[Any, Any], float | None] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    state_file: str | Path | None = None,
    every: int = 100,
    progress: bool = True,
    check: Check = "first",
    process_group: distributed.ProcessGroup | None = None,
    gather: bool = False,
    timeout: float = 600.0,
    capture: bool | Literal["inductor", "cudagraphs"] = False,
) -> Quantities:
    """Quantities of the loss over all samples of a loader, in the memory of one batch.

    For a mean, the loss over all samples is ``1/W Σ_b W_b ℓ_b`` with ``W = Σ_b W_b``, where the
    loss ``ℓ_b`` of a batch divides by ``W_b``. So a smaller last batch, class weights and ignored
    targets get the right weight. For a sum, it is ``Σ_b ℓ_b``. Each quantity is combined as its
    extension declares (``degree``, ``over_batches``). ``.grad`` does not change, nor do attributes
    of the parameters with other names. Extensions that need two passes over the data (``EKFAC``)
    get them.

    Args:
        model: The model, extended or not. It is run in its current mode (train, eval).
        lossfunc: A loss module; or a function of output and targets, with ``normaliser``.
        loader: Gives batches, the same in every pass over it: ``(inputs, targets)``, or a
            dictionary with ``"labels"``, whose other entries the model takes as keywords and whose
            output may have ``logits``.
        extensions: What to compute.
        batch: Makes ``(inputs, targets)`` of what the loader gives. A tuple of inputs are
            positional arguments, a dictionary keywords.
        normaliser: What the loss divides by for given inputs and targets (the number of samples of
            a mean), ``None`` for a sum; default: what the rule of the extended loss says.
        device: The device of the results; default: that of each parameter.
        dtype: The dtype of the results; default: that of each value.
        state_file: File for the state of the run. If the file exists, the run resumes from it, with
            the same numbers as without the interruption; the arguments must be the same. The file
            is kept at the end. The state of another model, loss, extension or of other data is
            refused.
        every: The file is written after this many batches.
        progress: Whether to show a bar if the output is a terminal.
        check: See :class:`backpack_core.backpack`.
        process_group: The group of processes that share the data, each with a loader of its part.
            Results are those of all samples, on every rank. Samples that a ``DistributedSampler``
            repeats count once.
        gather: Whether results per sample are gathered from all ranks, in their order, or stay on
            the rank of the sample.
        timeout: A process that has no new batch for this many seconds counts as lost.
        capture: Whether batches run as captured steps of ``backpack-capture``, with the same
            numbers: recorded after a few batches, and replayed without the engine. A word is passed
            on as ``compile=`` of its ``capture``.

    Raises:
        UsageError: An argument is wrong, or a batch has no weight.
        UnsupportedError: Values of an extension do not combine.
        LostProcessError: Another process ended before it was through its part of the data.
    """
    require_model(model, lossfunc)
    require_kinds(lossfunc, loader, batch, normaliser, every)
    require_result(device, dtype)
    require_member(process_group)
    if not extensions:
        raise UsageError("accumulate(...) needs an extension: what should be computed?")
    backpack(*extensions)  # refuses what is not an extension
    for extension in extensions:
        over_batches(extension, "its value over a data set")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    is_sharded = has_shards(model, process_group)
    if is_sharded and process_group is None:
        raise UsageError(
            "The model is sharded (fully_shard), so all processes run every batch together: give "
            "process_group=."
        )
    if is_sharded and capture:
        raise UsageError(
            "The model is sharded (fully_shard): its parameters are gathered anew in every pass, "
            "and a captured step cannot do that. Leave capture= out."
        )
    with extended(model, lossfunc):
        run = _Run(model, lossfunc, loader, batch, normaliser, progress, check)
        run.group, run.gather, run.timeout = process_group, gather, timeout
        run.is_sharded = is_sharded
        if capture:
            run.captured = CapturedBatches(model, lossfunc, capture, check)
        if state_file is not None:
            file = file_of_rank(state_file, process_group)
            run.checkpoint = Checkpoint(file, every, model, lossfunc, loader, extensions)
        return run(extensions).to(device, dtype)


class _Run:
    """The passes over the data."""

    group: distributed.ProcessGroup | None = None
    checkpoint: Checkpoint | None = None
    captured: CapturedBatches | None = None
    gather, timeout, is_sharded = False, 600.0, False

    def __init__(
        self,
        model: Module,
        lossfunc: Loss,
        loader: Iterable[Any],
        batch: Callable[[Any], Batch] | None,
        normaliser: Callable[[Any, Any], float | None] | None,
        progress: bool,
        check: Check,
    ) -> None:
        self.model, self.lossfunc, self.loader = model, lossfunc, loader
        self.batch = partial(made_by, batch) if batch else split
        self.normaliser, self.progress, self.check = normaliser, progress, check
        self.of_loss: list[Tensor] = []
        if isinstance(lossfunc, Module):
            self.of_loss += lossfunc.parameters()
        self.trained = [p for p in model.parameters() if p.requires_grad]
        # Hooks that step an optimizer must not run in this pass.
        self.is_hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.trained)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.plugins: Fingerprint = {}
        self.compared: dict[str, str] = {}  # with the other processes

    def __call__(self, extensions: Sequence[Extension]) -> Quantities:
        modules = [m for m in (self.model, self.lossfunc) if isinstance(m, Module)]
        self.plugins = fingerprint(modules, extensions)
        if self.group is not None:
            self.compared = about(self.model)
            self.compared["The list of extensions"] = ", ".join(named(extensions))
        result = self._pass(1, *self._prepared(extensions))
        kinds = {extension.savefield: type(extension).__name__ for extension in extensions}
        shapes = {path: p.shape for path, p in self.model.named_parameters()}
        over = {e.savefield: e.over_batches for e in extensions}
        own = {field: way for field, way in over.items() if isinstance(way, OverBatches)}
        numbers = result.batches, result.normaliser
        return Quantities(dict(result), shapes, kinds, *numbers, own, self.plugins)

    def _prepared(self, extensions: Sequence[Extension]) -> tuple[list[Extension], str]:
        """The extensions of the second pass, after a first one for those that need two.

        What the first pass has found is freed, unless these extensions hold it.

        Returns:
            The extensions, and the checksum of what the first pass has found.
        """
        firsts = [declaration(extension).first_pass(extension) for extension in extensions]
        known: list[dict[Tensor, Any]] = [{} for _ in extensions]
        parts: list[Tensor] = []
        if any(first is not None for first in firsts):
            found = self._pass(0, [first for first in firsts if first is not None])
            parameters: dict[str, Tensor] = dict(self.model.named_parameters())
            if self.is_sharded:  # parameters as the layers will see them
                used = wholes_by_shard(self.model)
                held = carriers(self.model)
                parameters = {path: used.get(ps[0], ps[0]) for path, ps in held.items()}
            for number, first in enumerate(firsts):
                if first is not None:
                    field = found.field(first.savefield)
                    known[number] = {parameters[path]: value for path, value in field.items()}
                    apart = (declaration(first).take_apart(value) for value in field.values())
                    parts += [local(t) for tensors in apart for t in tensors.values()]
        seconds = [
            declaration(extension).second_pass(extension, values)
            for extension, values in zip(extensions, known, strict=True)
        ]
        return seconds, digest(parts)

    def _pass(self, number: int, extensions: Sequence[Extension], given: str = "") -> Quantities:
        """One pass over the loader.

        Args:
            number: Which of the passes.
            extensions: What it computes.
            given: The checksum of what an earlier pass has found, over all processes.
        """
        readers = [declaration(extension).reader(extension) for extension in extensions]
        states = States.over(self.model, readers)
        if self.captured is not None:
            self.captured.begin()
        kept, heartbeat = Kept(self.loader), Heartbeat(self.group, self.timeout)
        in_step = InStep(self.group if self.is_sharded else None, heartbeat)
        with heartbeat.told(), in_step.told():
            heartbeat.compare(self.plugins, self.compared)
            begin = None if self.checkpoint is None else self.checkpoint.begin
            done = 0 if begin is None else begin(number, states, self.plugins, given)
            self._batches(number, done, readers, states, kept, heartbeat, in_step)
        heartbeat.wait()
        if self.group is not None:
            states = reduce(states, self.group, self.gather, self.plugins)
        if not states.batches:
            raise UsageError(
                "The loader gave no batch, so nothing is computed. Give a DataLoader or a list: "
                "it is iterated again, which an iterator or a generator does not allow."
            )
        parameters, are_given_up = carriers(self.model), self.checkpoint is None
        values = {
            (path, e.savefield): e.as_stored(value, parameters[path][0])
            for path, e, value in states.values(are_given_up)
        }
        if self.is_sharded:
            values = self._placed(values, readers)
        kinds = {e.savefield: type(e).__name__ for e in readers}
        return Quantities(values, states.shapes, kinds, states.batches, states.normaliser)

    def _batches(
        self,
        number: int,
        done: int,
        readers: Sequence[Extension],
        states: States,
        kept: Kept,
        heartbeat: Heartbeat,
        in_step: InStep,
    ) -> None:
        """All batches of a pass that are not done yet."""
        place = -1
        bar = tqdm(self.loader, desc=f"pass {number}", disable=None if self.progress else True)
        for place, item in enumerate(bar):
            whole, (inputs, targets) = kept.of(item, self.batch)
            if self.checkpoint is not None:
                self.checkpoint.see(number, place, whole)
            if place < done:
                continue
            if inputs is not None:
                self._add(states, in_step(partial(self._one, readers, inputs, targets)))
            elif self.is_sharded:
                in_step(partial(self._one, readers, *whole))
            self._forget(readers)
            if self.checkpoint is not None:
                self.checkpoint.after(number, place + 1, states)
            heartbeat.beat(place)
        in_step.end(None if place < 0 else partial(self._one, readers, *whole))
        self._forget(readers)
        if self.checkpoint is not None:
            self.checkpoint.end(number, place + 1, states)

    def _add(self, states: States, seen: tuple[Weights, Given]) -> None:
        """Add the values of a batch; other processes need not wait for this one meanwhile."""
        states.add(self.model, *seen, is_given_up=True)

    def _forget(self, readers: Sequence[Extension]) -> None:
        """Leave no value on the parameters."""
        for parameters in (*carriers(self.model).values(), self.of_loss):
            for parameter in parameters:
                for extension in readers:
                    parameter.__dict__.pop(extension.savefield, None)

    def _placed(self, values: dict[Any, Any], readers: Sequence[Extension]) -> dict[Any, Any]:
        """Results as shards, if parameters are sharded."""
        kinds = {extension.savefield: extension for extension in readers}
        parameters = carriers(self.model)
        return {
            (path, name): placed(value, kinds[name], parameters[path][0])
            for (path, name), value in values.items()
        }

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy on the device: a model may write into it, and the next pass gets the loader's."""
        copy = tensor.to(self.device, copy=True)
        return copy.detach().requires_grad_(tensor.requires_grad) if tensor.is_leaf else copy

    def _one(
        self, readers: Sequence[Extension], inputs: Any, targets: Any
    ) -> tuple[Weights, Given]:
        """One batch: stores values on the parameters, and returns what they weigh."""
        inputs, targets = map_tensors((inputs, targets), self._own)
        given: Given = None
        if self.normaliser is not None:
            given = (self.normaliser(inputs, targets),)
        known = readers
        if given is not None:
            joint(given)  # refuses what is not a number
            readers = [declaration(e).of_batch(e, *given) for e in readers]
        with same_gradients([*self.model.parameters(), *self.of_loss]):
            if self.captured is not None:
                is_alike = all(e is old for e, old in zip(readers, known, strict=True))
                key = None if is_alike else given
                batch = inputs, targets
                return self.captured(readers, key, given is None, batch), given
            return self._by_engine(readers, inputs, targets, given is None), given

    def _by_engine(
        self, readers: Sequence[Extension], inputs: Any, targets: Any, of_losses: bool
    ) -> Weights:
        with torch.enable_grad(), uncompiled():  # a compiled graph has no modules
            loss = self.lossfunc(output_of(self.model, inputs), targets)
        require_number(loss)
        weights = Weights(of_losses)
        with backpack(*readers, check=self.check, observer=weights, gradient="skipped"):
            if self.is_hooked:
                torch.autograd.grad(loss, self.trained, allow_unused=True)
            else:
                loss.backward()
        return weights
