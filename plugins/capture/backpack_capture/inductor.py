"""Compiles a recorded step by Inductor, in another process than the training loop."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backpack_capture.code import AnotherAnswer
from backpack_capture.compiled import NotCompiled, Run
from backpack_capture.compiling import ARTIFACT, REQUEST, Call, Input, Request, Value
from backpack_capture.flags import flagged
from backpack_capture.program import Program, Ref, replaced

_WORKER = (
    "import json, sys; from pathlib import Path; sys.path[:] = json.loads(sys.argv[2]); "
    "from backpack_capture.compiling import main; main(Path(sys.argv[1]))"
)


class Inductor:
    """A program that is being compiled.

    Attributes:
        said: How far it is.
    """

    def __init__(self, program: Program, given: Sequence[Tensor]) -> None:
        """Begin.

        Args:
            program: The program.
            given: The tensors among the arguments.

        Raises:
            NotCompiled: The program cannot be compiled.
        """
        whole = flagged(program, given[0].device if given else torch.device("cpu"))
        self._is_flagged = len(whole.outs) > len(program.outs)
        self._outside = [*whole.known.values(), *whole.fixed.values()]
        inputs = dict(zip(whole.given, given, strict=True)) | whole.known | whole.fixed
        self._folder = Path(tempfile.mkdtemp(prefix="backpack-capture-"))
        (self._folder / REQUEST).write_bytes(pickle.dumps(_request(whole, inputs)))
        self._begun, self._took = time.monotonic(), 0.0
        with open(self._folder / "errors", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(self._folder), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Otherwise a signal from the terminal would reach the C++ compiler, too. It would
                # leave half a library in torch's cache, for each later run to find.
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    @property
    def said(self) -> str:
        """How far it is."""
        if self._took:
            return f"compiled by Inductor in {self._took:.0f} s"
        return f"being compiled by Inductor for {time.monotonic() - self._begun:.0f} s"

    def wait(self, timeout: float | None) -> None:
        """Return when the compiler has ended, or after ``timeout`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def take(self) -> Run | None:
        """The compiled code, if it is ready.

        Raises:
            NotCompiled: The compiler failed.
        """
        code = self._process.poll()
        if code is None:
            return None
        self._took = time.monotonic() - self._begun
        try:
            if code:
                raise NotCompiled(f"Inductor failed: {_last_line(self._folder / 'errors')}")
            from torch._inductor.standalone_compile import CompiledArtifact

            run = CompiledArtifact.load(path=str(self._folder / ARTIFACT), format="binary")
        finally:
            self._end()
        return self._checked(run)

    def _checked(self, run: Run) -> Run:
        outside, is_flagged = self._outside, self._is_flagged

        def checked(*given: Tensor) -> Sequence[Tensor]:
            results = run(*given, *outside)
            if not is_flagged:
                return results
            *results, flag = results
            if bool(flag):
                raise AnotherAnswer
            return results

        return checked


def _request(program: Program, inputs: dict[int, Tensor]) -> Request:
    """What the compiler must know. Equal numbers stand for one tensor."""

    def value(item: Any) -> Any:
        return Value(item.number) if isinstance(item, Ref) else item

    tensors = [
        Input(n, tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for n, t in inputs.items()
    ]
    shown = {program.roots[n] for n in program.outs} | program.written
    copies = [
        Call("clone", "default", [Value(n)], {}, (n,), True)
        for n in program.fixed
        if program.roots[n] in shown
    ]
    calls = [
        Call(
            *_name_of(step.function),
            replaced(list(step.args), value),
            replaced(step.kwargs, value),
            step.outs,
            step.is_single,
        )
        for step in program.operations
    ]
    return Request(
        tensors,
        [*copies, *calls],
        program.outs,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _name_of(function: Any) -> tuple[str, str]:
    return function._schema.name.removeprefix("aten::"), function._overloadname


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a message"


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop the compiler, and remove its files."""
    if process.poll() is None:
        process.terminate()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
