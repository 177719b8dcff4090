"""Runs recorded visits instead of the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from backpack_capture._torch import generator_states, graph_task_id, set_generator_states
from backpack_capture.graph import difference_of
from backpack_capture.nested import Apart
from backpack_capture.saved import inside, layout_of, saved_by
from backpack_capture.visited import (
    Entry,
    Number,
    Result,
    Store,
    Stored,
    Visit,
    finished,
    noted_at_visit,
)
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.location import changed_gradient
from backpack_core.errors import InternalError, OverwrittenInputError, PluginCodeError
from backpack_core.record.call import Site
from backpack_operations.observer import Driver
from backpack_operations.structure import Structure


class Repeated(Driver):
    """Runs a recording."""

    def __init__(
        self,
        entry: Entry,
        run: BackwardPass,
        structure: Structure,
        given: list[list[Stored]],
    ) -> None:
        assert entry.recorded is not None
        self._recorded, self._entry, self._given = entry.recorded, entry, given
        self._parameters, self._next = structure.parameters, 0
        self._between = [*structure.between]
        # Autograd may get to these nodes before the first visit, and free what they have saved.
        first = (*entry.recorded.visits, entry.recorded.last)[0]
        early = [slot for slot in first.late if slot.what == "between"]
        self._early = {slot.key: saved_by(self._between, *slot.key) for slot in early}
        places, sites = [*structure.sites], [*structure.sites.values()]
        self._order = {places[v.place]: number for number, v in enumerate(entry.recorded.visits)}
        self.outputs = self._order
        self._program: Generator[Any, Any, None] = entry.recorded.code.run()  # type: ignore[assignment]
        next(self._program)
        self._arrived: dict[Number, Any] = dict.fromkeys(entry.recorded.arriving)
        for at in self._arrived:
            node = self._between[at] if isinstance(at, int) else inside(sites[at[0]])[at[1]]
            handle = node.register_prehook(self._taking(run, at))
            cast("Any", run.schedule).hooks.append(handle)

    def _taking(self, run: BackwardPass, number: Number) -> Callable[[Any], None]:
        """A hook that notes the gradients that autograd has brought to a node."""
        arrived, schedule = self._arrived, ref(run.schedule)

        def take(grads: Any) -> None:
            found = schedule()
            if found is not None and found.is_in(graph_task_id()):
                arrived[number] = grads

        return take

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """Repeat what was computed at this visit, and store the results."""
        if others is not None and run.context.is_curvature:
            raise changed_gradient(run.view(site, grads[site.edge.output_nr]), others)
        if (site.call, site.index) not in self._order:  # another thread has missed that
            return
        grad, extensions = grads[site.edge.output_nr], run.extensions
        for store, value in self.results(site, grad):
            parameter = self._parameters[store.parameter]
            run.sink.store(extensions[store.extension], parameter, value)
            if grad is None:
                run.sink.unreached.add(id(parameter))

    def results(self, site: Site, grad: Tensor | None) -> list[tuple[Store, Any]]:
        """What a visit computes."""
        number, call = self._next, site.call
        if self._order.get((call, site.index)) != number:
            raise InternalError(f"{call.path} was visited in another order than before.")
        self._next += 1
        given, seen, sent = self._given[number], self._recorded.visits[number], list[Tensor]()
        self._given[number] = []
        for tensor, version in given:
            if tensor._version != version:
                raise _changed(call.path)
            sent.append(tensor)
        return self._run(seen, sent, site, grad)

    def _run(
        self, seen: Visit, sent: list[Tensor], site: Site | None = None, grad: Tensor | None = None
    ) -> list[tuple[Store, Any]]:
        """Run the program up to the next pause, with stored tensors of calls, and late ones."""
        for what, key, layout in seen.late:
            if what == "gradient" and site is not None:
                output = site.call.stored.outputs[site.index]
                sent.append(_laid_out(grad, output.shape, layout, output.dtype))
            elif what == "arriving":
                number, output_nr, *form = key
                arrived = self._arrived[number]
                grad_there = None if arrived is None else arrived[output_nr]
                sent.append(_laid_out(grad_there, form[0], layout, form[1]))
            else:
                own = self._between if what == "between" or site is None else inside(site)
                saved = self._early.pop(key, None) if what == "between" else None
                saved = saved_by(own, *key) if saved is None else saved
                if saved is None:
                    raise _changed("the end of the pass" if site is None else site.call.path)
                sent.append(saved)
        found = self._program.send(sent) if sent else next(self._program)
        return _put_together(seen.stores, found)

    def end(self, run: BackwardPass) -> None:
        """Store the results that waited for the end."""
        for store, value in self.last():
            field = run.extensions[store.extension].savefield
            setattr(self._parameters[store.parameter], field, value)

    def last(self) -> list[tuple[Store, Any]]:
        """What extensions compute at the end."""
        if self._next < len(self._recorded.visits):
            raise InternalError("A backward pass did not reach calls that it reached before.")
        last = self._recorded.last
        return self._run(last, []) if last.stores else []


class Compared(Repeated):
    """Runs a recording and the engine; the engine's results count."""

    def __init__(self, entry: Entry, run: BackwardPass, *what: Any) -> None:
        super().__init__(entry, run, *what)
        self.outputs, run.sink.noted = None, []

    def reach(self, run: BackwardPass, site: Site, grads: Any, others: Any) -> None:
        """Run both; the engine draws the same random numbers."""
        places = self._order
        if (site.call, site.index) not in places:
            self.visit(run, site, grads, others)
            return
        with self._drawing_twice() as ours:
            ours += self.results(site, grads[site.edge.output_nr])
        self.visit(run, site, grads, others)
        rule = type(site.call.rule).__module__
        self._compare(run, ours, noted_at_visit(run), (site.call.path, f"{rule}, or "))

    def end(self, run: BackwardPass) -> None:
        """Run both."""
        with self._drawing_twice() as ours:
            ours += self.last()
        results = noted_at_visit(run)
        self._compare(run, ours, [*results, *finished(run)], ("At the end of the pass", ""))

    @contextmanager
    def _drawing_twice(self) -> Iterator[list[tuple[Store, Any]]]:
        """A block that restores the state of random numbers afterwards."""
        states = generator_states() if self._recorded.is_random else ()
        yield []
        if states:
            set_generator_states(states)

    def _compare(
        self,
        run: BackwardPass,
        ours: list[tuple[Store, Any]],
        noted: list[Result],
        where: tuple[str, str],
    ) -> None:
        extensions = run.extensions
        same = len(ours) == len(noted)
        for (store, value), (extension, parameter, right) in zip(ours, noted, strict=False):
            same &= extensions[store.extension] is extension
            same &= self._parameters[store.parameter] is parameter
            pairs = zip(Apart(value).tensors, Apart(right).tensors, strict=True)
            same &= not any(difference_of(ours, its) for ours, its in pairs)
        if not same:
            who = f"{where[1]}{type(extensions[0]).__module__},"
            self._entry.recorded, self._entry.refusal = None, "it computes something else now"
            raise PluginCodeError(
                f"{where[0]}: the plugin {who} has declared that it only computes, so that the "
                "same operations serve every pass of one structure, but it computed something else "
                f"than before. {self._entry.uses} passes may be wrong. Take "
                'declare_only_computes() out of the plugin, or write check="always". If there is '
                "no plugin but the library's own, please report it."
            )


def _changed(where: str) -> OverwrittenInputError:
    return OverwrittenInputError(
        f"{where}: a tensor that it received, returned or owns, or that an operation has saved, "
        "was changed in place during the backward pass, so derivatives would be computed with "
        "other values. Change it afterwards."
    )


def _put_together(stores: list[Store], found: Any) -> list[tuple[Store, Any]]:
    """Results, each made of some of the tensors that a program has yielded."""
    place, values = 0, list[tuple[Store, Any]]()
    for store in stores:
        if store.size < 0:
            value, place = found[place], place + 1
        else:
            value = store.value.put_together(found[place : place + store.size])
            place += store.size
        values.append((store, value))
    return values


def _laid_out(grad: Tensor | None, shape: torch.Size, layout: Any, dtype: torch.dtype) -> Tensor:
    """A gradient in the memory layout of the recorded one."""
    if grad is not None and layout_of(grad) == layout:
        return grad
    laid = torch.empty_strided(shape, layout[1], dtype=dtype, device=layout[2])
    return laid.zero_() if grad is None else laid.copy_(grad)
