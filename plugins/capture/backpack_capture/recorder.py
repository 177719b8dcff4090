"""Records a real step: every operation of torch, below autograd, with its tensors.

A reason against replaying ends the recording, not the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from backpack_capture._torch import are_equal, generator_states, is_foreign, takes_tensor
from backpack_capture.program import (
    BLANK,
    Assumption,
    Geometry,
    Operation,
    Program,
    Ref,
    numbers,
    refs_in,
)
from backpack_products.host_functions import NAMESPACE
from backpack_products.recycled import SMALLEST

aten = torch.ops.aten
_PLAIN = (int, float, bool, complex, str, type(None))
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# These return the tensor that they get: Python has just made it from data.
LIFTED = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
# These write to running statistics, but do not declare it.
_WRITING = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}
# Values do not show what these do to a tensor.
_REFUSED = {"set_", "resize_", "resize_as_", "resize", "_resize_output_"}
# Other operations than torch's own that depend only on their arguments, and do not change them.
_FUNCTIONS = {"mkldnn::_linear_pointwise"}
_FILLING = {f"aten::{name}" for name in ("ones_like", "zeros_like", "new_zeros", "new_ones")}
_LARGEST = 2**12  # numbers of a tensor that is kept
DISTURBED: Final = (
    "it sets the state of torch's generator, or draws outside operations, or another thread drew "
    "meanwhile"
)
# The places of arguments that rules and torch.nn.grad pass only for their shape.
_SHAPES: Final = {
    aten.convolution_backward.default: (1, 2),
    aten.avg_pool2d_backward.default: (1,),
    aten.avg_pool3d_backward.default: (1,),
    aten._adaptive_avg_pool2d_backward.default: (1,),
    aten._adaptive_avg_pool3d_backward.default: (1,),
}
# These can write into existing memory.
_INTO = (aten.mul.Tensor, aten.bmm.default, aten.mm.default)
_BETWEEN = (
    *("torch._ops", "torch.overrides", "torch.utils._python_dispatch"),
    *("torch._compile", "torch._dynamo.eval_frame"),
    *("backpack_capture.unseen", "backpack_capture.recorder", "backpack_capture.recorded_visits"),
)
_MASKS = (torch.bool, torch.uint8)
_GRADIENT = (
    "it uses the gradient that an earlier step has left, as an optimizer does: a captured step "
    "ends with its backward pass, so call optimizer.step() after the captured step"
)


class Recorder(TorchDispatchMode):
    """Records what is computed on its thread.

    Attributes:
        program: The recording.
        refusal: Why it cannot be replayed; ``None`` if it can.
        drawn: The states of torch's generators after the last draw.
        is_lifting: Whether a tensor is being made of Python numbers that do not come from a tensor.
        reads_are_assumptions: Whether Python may read a value: a replay then reads it again.
        runs_kernels: Whether operations run unchanged, so that any kernel may be called.
        runs_host_functions: Whether a :class:`HostFunction` may be called.
    """

    reads_are_assumptions = True
    runs_kernels: Final = True
    runs_host_functions: Final = True

    def __init__(
        self,
        given: Sequence[Tensor],
        known: Sequence[Tensor],
        is_known: Callable[[Tensor], bool],
        is_fixed: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        """Number the tensors that exist before the step.

        Args:
            given: The tensors among the arguments.
            known: Parameters and buffers.
            is_known: Whether the guard would notice if another tensor were replaced.
            is_fixed: Whether another tensor is a constant.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.refusal: str | None = None
        self.is_lifting = False
        self._numbers: Any = WeakTensorKeyDictionary()
        self._memories: dict[int, int] = {}
        self._is_known, self._is_fixed = is_known, is_fixed
        self._blank: set[int] = set()
        self._outside: set[int] = set()  # constants that existed before
        self.drawn = generator_states()
        for tensor in given:
            self.program.given.append(self._enter(tensor))
        for tensor in known:
            number = self._enter(tensor)
            self.program.known[number] = tensor
            self.note_geometry(number, tensor)  # the guard checks it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        return self.run(func, types, args, kwargs or {})

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The same, as a method that torch does not know."""
        # Torch passes a number to a formula as a number, even if it was saved as a tensor.
        if func is aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]
        if wanted := [n for n, a in enumerate(args) if type(a) is float and takes_tensor(func, n)]:
            self.refusal = self.refusal or "an operation needs a number of autograd's as a tensor"
            made = {n: torch.tensor(args[n], dtype=torch.float64) for n in wanted}
            args = tuple([made.get(n, argument) for n, argument in enumerate(args)])
        if func._schema.name.startswith("profiler::"):
            return func(*args, **kwargs)  # a range of record_function
        if self.refusal is None:
            self.refusal = _reason_against(func, types)
        if self._is_over():
            return func(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            what = "equal" if len(args) == 2 else "item"
            return self.assume(what, args, func(*args, **kwargs))
        if func in LIFTED and args[0] not in self._numbers:
            # Torch reads numbers of tensors in a list at a level that modes do not see.
            is_single = not args[0].dim()
            if not (is_single or self.is_lifting or _caller().startswith("backpack_")):
                self.refusal = "it makes a tensor of Python numbers that may come from tensors"
                return func(*args, **kwargs)
            self.program.fixed[self._enter(args[0])] = args[0].clone()
        args_, kwargs_ = self._refs(args), self._refs(kwargs)
        if self._is_over():
            return func(*args, **kwargs)
        before = [t._version for t in _tensors((args, kwargs))]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and not self.is_undisturbed():
            self.refusal = DISTURBED
        out = func(*args, **kwargs)
        if is_random:
            self.drawn = generator_states()
        if func in LIFTED or func is aten.detach_.default:
            if out is not args[0]:
                self.refusal = "a constant was copied when it was made a tensor"
            return out
        self._note(func, (args, kwargs), (tuple(args_), kwargs_), before, out)
        return out

    def _is_over(self) -> bool:
        return self.refusal is not None

    # Values --------------------------------------------------------------------------------------

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor; ``None``, and a reason, if its origin is not known."""
        number: int | None = self._numbers.get(tensor)
        if number is None and self._is_fixed(tensor):
            number = self._enter(tensor)
            self.program.fixed[number] = tensor
            self._outside.add(number)
        elif number is None:
            if not self._is_known(tensor):
                self.refusal = self.refusal or self._unknown(tensor)
                return None
            number = self._enter(tensor)
            self.program.known[number] = tensor
        elif self._memories[number] != _memory(tensor):
            self.refusal = "the memory of a tensor was exchanged (tensor.data = ...)"
        return number

    def _unknown(self, tensor: Tensor) -> str:
        if any(tensor is known.grad for known in self.program.known.values()):
            return _GRADIENT
        return (
            f"it uses a {'parameter' if tensor.requires_grad else 'tensor'} of shape "
            f"{list(tensor.shape)} that is not an argument, not in the modules passed to "
            "capture(), and not a variable that the function refers to, so a replay would not "
            "notice if it were replaced"
        )

    def is_undisturbed(self) -> bool:
        """Whether torch's generator was not used since the last recorded draw."""
        return are_equal(generator_states(), self.drawn)

    def left(self) -> list[Tensor]:
        """The results of operations that still exist."""
        outside = {*self.program.given, *self.program.known, *self._outside}
        return [t for t, number in [*self._numbers.items()] if number not in outside]

    def assume(self, what: Any, tensors: Sequence[Tensor], answer: Any) -> Any:
        """Note that Python read something from values."""
        found = numbers([self.number_of(tensor) for tensor in tensors])
        if self.refusal is None and not all(map(self.program.is_constant, found)):
            self.program.steps.append(Assumption(what, tuple(found), answer))
        return answer

    def _enter(self, tensor: Tensor, root: int | None = None) -> int:
        number = self.program.new(root)
        self._numbers[tensor] = number
        self._memories[number] = _memory(tensor)
        return number

    def _refs(self, value: Any) -> Any:
        """Nested arguments with references instead of tensors."""
        if isinstance(value, Tensor):
            number = self.number_of(value)
            return None if number is None else Ref(number)
        if isinstance(value, (list, tuple)):
            return [self._refs(item) for item in value]
        if isinstance(value, dict):
            return {name: self._refs(item) for name, item in value.items()}
        if isinstance(value, torch.Generator):
            self.refusal = "it draws numbers with a Generator: draw with torch's own, as layers do"
        elif type(value) not in _PLAIN and not isinstance(value, _PLAIN_OF_TORCH):
            self.refusal = f"an operation has an argument of type {type(value).__name__}"
        return value

    # Operations ----------------------------------------------------------------------------------

    def _note(self, func: Any, given: Any, refs: Any, before: list[int], out: Any) -> None:
        args, kwargs = refs
        is_single = not isinstance(out, (list, tuple))
        got = [(self._numbers[t], t) for t in _tensors(given)]
        roots = {_memory(t): self.program.roots[n] for n, t in got}
        outs = [self._out(value, roots) for value in ([out] if is_single else out)]
        changed = [n for (n, t), v in zip(got, before, strict=True) if t._version != v]
        writes = tuple(dict.fromkeys([*_declared(func, args, kwargs), *changed]))
        shapes = _SHAPES.get(func, ())
        seen = [argument for place, argument in enumerate(args) if place not in shapes]
        reads = {self.program.roots[ref.number] for ref in refs_in([seen, kwargs])}
        self._note_blank(func, out, reads, writes, outs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        step = Operation(func, args, kwargs, tuple(outs), is_single, writes, is_random)
        self.program.steps.append(step)
        if func in _INTO and step.made and _is_large(out, given[0]):
            self.program.large[step.made[0]] = tuple(out.shape)
        is_filled = func._schema.name in _FILLING and out.numel() <= _LARGEST
        if is_filled and step.made:
            self.program.filled[step.made[0]] = out.clone()
        deciding = [self._numbers[t] for t in _deciding(func, given)]
        if not all(map(self.program.is_constant, deciding)):
            made = [t for t in ([out] if is_single else out) if isinstance(t, Tensor)]
            self.assume("shape", made, [tuple(t.shape) for t in made])

    def _note_blank(self, func: Any, out: Any, reads: Any, writes: Any, outs: Any) -> None:
        """Refuse reads of memory that no operation has written: then something else wrote it."""
        roots = self.program.roots
        made = {roots[n] for n in numbers(outs)}
        if func._schema.name in BLANK:
            self._blank |= made if out.numel() else set()
            return
        self._blank -= {roots[n] for n in writes}
        if reads & self._blank - made:
            self.refusal = "it reads memory that no operation has written"

    def _out(self, value: Any, roots: dict[int, int]) -> int | None:
        if not isinstance(value, Tensor):
            if isinstance(value, (list, tuple)):
                self.refusal = "an operation returns lists among other values"
            return None
        if is_foreign(value):
            self.refusal = f"it has a tensor of layout {value.layout} on {value.device}"
        known: int | None = self._numbers.get(value)
        if known is not None:
            return known
        number = self._enter(value, roots.get(_memory(value)))
        self.note_geometry(number, value)
        return number

    def note_geometry(self, number: int, tensor: Tensor) -> None:
        """Note where the entries of a tensor lie."""
        if tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg():
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            offset = int(tensor.storage_offset())
            self.program.geometry[number] = Geometry(shape, stride, offset, tensor.dtype)


def _caller() -> str:
    """The module of the code that called torch."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def _reason_against(func: Any, types: Any) -> str | None:
    name = func._schema.name
    other = [kind for kind in types if kind not in (Tensor, torch.nn.Parameter)]
    if other:
        return f"it has a tensor of type {other[0].__name__}"
    if not (name.startswith(("aten::", f"{NAMESPACE}::")) or name in _FUNCTIONS):
        return f"it calls {name}, and only its author knows what that does"
    if name == "aten::mkldnn_rnn_layer":
        return (
            "its LSTM runs by mkldnn, and mkldnn's buffers cannot be kept as tensors: call the "
            "step inside torch.backends.mkldnn.flags(enabled=False)"
        )
    if name.startswith("aten::_cudnn_rnn"):
        return (
            "its recurrent layer runs by cuDNN, and cuDNN's buffers cannot be kept as tensors: "
            "call the step inside torch.backends.cudnn.flags(enabled=False)"
        )
    if name.removeprefix("aten::") in _REFUSED:
        return f"it calls {name}, which exchanges the memory of a tensor"
    is_read = func in (aten._local_scalar_dense.default, aten.equal.default)
    if torch.Tag.data_dependent_output in func.tags and not is_read:
        return f"it calls {name}, and its result depends on values in a way that is not recorded"
    return None


def _is_large(out: Tensor, args: Sequence[Any]) -> bool:
    """Whether a result is large enough to reuse memory, and has the dtype of its arguments."""
    is_alike = all(isinstance(t, Tensor) and t.dtype is out.dtype for t in args)
    return is_alike and out.nbytes >= SMALLEST and out.is_contiguous()


def _deciding(func: Any, given: tuple[Any, ...]) -> list[Tensor]:
    """The tensors whose values decide the shape of a result: for an index, its masks."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if func is not aten.index.Tensor:
        return _tensors(given)
    return [i for i in given[0][1] if i is not None and i.dtype in _MASKS]


def _declared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The values that an operation declares to overwrite."""
    found: list[Any] = [args[place] for place in _WRITING.get(func, ())]
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [ref.number for ref in refs_in(found)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors([*value.values()])
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _memory(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -1  # it is refused
    found: int = tensor.untyped_storage()._cdata
    return found
