"""Runs a recorded step on a CUDA device as one launch.

A CUDA graph reads and writes at fixed addresses. So inputs are copied to where it reads. Results
are copied from where it writes, before the next step overwrites them. Parameters are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from backpack_capture.code import AnotherAnswer, code_of
from backpack_capture.compiled import NotCompiled, Run
from backpack_capture.flags import flagged
from backpack_capture.graph import Snapshot
from backpack_capture.program import Program

WARMING: Final = 2  # runs before the capture, in which libraries choose kernels and allocate


class Pool:
    """Memory that the graphs of one step share: they run one after the other.

    Attributes:
        handle: The memory.
        is_free: An event, recorded when the last graph's results are copied out of the memory.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.is_free = torch.cuda.Event()


class CudaGraph:
    """A program as a CUDA graph, which is captured at the first call.

    Attributes:
        said: What :meth:`~backpack_capture.CapturedStep.report` says about it.
    """

    def __init__(self, program: Program, pool: Pool) -> None:
        """Prepare a program.

        Raises:
            NotCompiled: The program cannot be captured.
        """
        device = _only_device(program)
        whole = flagged(program, device)
        self._is_flagged = len(whole.outs) > len(program.outs)
        self._code = code_of(whole, {}).run
        self._known = [*program.known.values()]
        self._pool, self._is_random = pool, program.is_random
        written = {program.roots[n] for op in program.operations for n in op.writes}
        self._places = [i for i, n in enumerate(program.given) if program.roots[n] in written]
        self._written = [t for n, t in program.known.items() if program.roots[n] in written]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._inputs: list[Tensor] = []
        self._outs: list[Tensor] = []
        self._kinds: list[list[int]] = []
        self.said = "a CUDA graph"

    def wait(self, timeout: float | None) -> None:
        """It is ready at once."""

    def take(self) -> Run | None:
        """It is ready at once."""
        return self

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Replay the graph.

        Args:
            given: The tensors among the arguments of the step.

        Returns:
            Results in their own memory.

        Raises:
            AnotherAnswer: A value differs from the one that was read in the recorded step.
        """
        torch.cuda.current_stream().wait_event(self._pool.is_free)
        # An assignment to parameter.data moves it away from where the graph reads.
        if self._graph is None or self._addresses != [t.data_ptr() for t in self._known]:
            self._capture(given)
        else:
            self._fill(given)
        assert self._graph is not None
        self._graph.replay()
        for place in self._places:
            given[place].copy_(self._inputs[place])
        results = self._copied()
        self._pool.is_free.record()
        if self._is_flagged and bool(results.pop()):
            raise AnotherAnswer
        return results

    def _capture(self, given: Sequence[Tensor]) -> None:
        """Warm up on a separate stream, then capture; the results of both are dropped."""
        # The earlier graph stays until the next one exists. Otherwise the pool's memory is freed, a
        # capture into it fails, and the generator cannot draw any more after that.
        earlier, self._graph, self._outs = self._graph, None, []
        self._inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given
        ]
        self._fill(given)
        written = [*[self._inputs[place] for place in self._places], *self._written]
        before, stream = Snapshot.of(self._is_random, written), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMING):
                self._code(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        before.put_back()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on with their work, for instance loaders that pin memory.
        with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
            self._outs = [*self._code(*self._inputs)]
        self._addresses = [t.data_ptr() for t in self._known]
        kinds: dict[torch.dtype, list[int]] = {}
        for place, out in enumerate(self._outs):
            kinds.setdefault(out.dtype, []).append(place)
        self._kinds = [*kinds.values()]
        self._graph = graph
        del earlier

    def _fill(self, given: Sequence[Tensor]) -> None:
        """Copy arguments to where the graph reads."""
        if given:
            torch._foreach_copy_([*map(_distinct, self._inputs)], [*map(_distinct, given)])

    def _copied(self) -> list[Tensor]:
        """Results in new memory: one launch for each dtype."""
        results = [torch.empty_like(t) for t in self._outs]
        for places in self._kinds:
            torch._foreach_copy_([results[i] for i in places], [self._outs[i] for i in places])
        return results


def _distinct(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that covers its memory exactly once."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _only_device(program: Program) -> torch.device:
    """The CUDA device of all tensors that come from outside; numbers may be the host's.

    Raises:
        NotCompiled: No tensor is on a CUDA device, or they are on several devices.
    """
    tensors = [*program.known.values(), *program.fixed.values()]
    found = {t.device for t in tensors if t.dim() or t.device.type == "cuda"}
    if len(found) == 1 and (device := found.pop()).type == "cuda":
        return device
    raise NotCompiled("its tensors are not all on one CUDA device")
