"""The compilers of recorded graphs, by the word that is passed to ``capture``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack_capture.compiled import Compilation, Compiler
from backpack_capture.cudagraph import CudaGraph, Pool
from backpack_capture.inductor import Inductor
from backpack_capture.program import Program
from backpack_core.errors import UsageError


def compiler_of(word: str | None) -> Compiler | None:
    """The compiler.

    Args:
        word: ``"inductor"``, ``"cudagraphs"``; or ``None`` for none.

    Raises:
        UsageError: The word is unknown, or this machine lacks what the compiler needs.
    """
    if word is None:
        return None
    if word == "inductor":
        if not hasattr(torch._inductor, "standalone_compile"):
            raise UsageError(
                'capture(compile="inductor") needs torch 2.8 or later, because its compiler can '
                f"run in a separate process. This is {torch.__version__}: leave out compile=."
            )
        return Compiler(Inductor, splits=False)
    if word != "cudagraphs":
        raise UsageError(
            f'capture(compile=) must be None, "inductor" or "cudagraphs". Got {word!r}.'
        )
    if not torch.cuda.is_available():
        raise UsageError(
            'capture(compile="cudagraphs") needs a CUDA device, but torch finds none. Leave '
            'out compile=, or use "inductor".'
        )
    pool = Pool()

    def begin(program: Program, given: Sequence[Tensor]) -> Compilation:
        return CudaGraph(program, pool)

    return Compiler(begin)
