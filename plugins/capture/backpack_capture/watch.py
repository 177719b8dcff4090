"""What a recorded graph takes for granted, compared before each replay. It has to be quick.

Numbers and containers are compared by value, other objects by identity. They are held, so that no
other one can get the number of one that is gone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_capture import _torch
from backpack_capture.nested import is_plain
from backpack_core import Extension, memory_budget
from backpack_core.plugins.registry import registry
from backpack_core.record.switch import is_disabled

_OF_ALL: Final = frozenset(vars(Module()))
_HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks",),
)
_OURS: Final = "_backpack"  # begins the attributes that ``extend`` makes
_DEEPEST: Final = 4


class Watch:
    """A function, the modules and extensions that it takes part with, and all they refer to.

    Attributes:
        modules: Every module.
        parameters: Their parameters.
        tensors: Those and their buffers, by name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[Module],
        extensions: Sequence[Extension],
    ) -> None:
        self._functions = list(_functions_behind(function))
        self._bound = getattr(function, "__self__", None)
        found = [self._bound] if isinstance(self._bound, Module) else []
        found += [m for f in self._functions for m in _referred(f) if isinstance(m, Module)]
        self._roots = roots = [*modules, *found]
        self.modules = _modules_of(roots)
        for kind in dict.fromkeys(map(type, self.modules)):
            self._functions += _functions_behind(kind.forward, self._functions)
        self.tensors = _named_tensors(roots)
        self.parameters = [t for t in self.tensors.values() if isinstance(t, torch.nn.Parameter)]
        self._extensions = extensions
        self._watched = [_Watched(module) for module in self.modules]
        self._outside: dict[int, Tensor] = {}
        self._tensors = [*self.tensors.values()]

    def state(self) -> tuple[Any, ...]:
        """Whatever may change, in a form that can be compared."""
        return (
            _torch.modes(),
            registry.generation,
            memory_budget(),
            is_disabled(),
            [watched.state() for watched in self._watched],
            [
                (t.shape, t.stride(), t.dtype, t.requires_grad, t.grad_fn is None)
                for t in self._tensors
            ],
            [*map(_torch.gradient_hooks, self.parameters)],
            [_form(vars(e), 2) for e in self._extensions],
            [_state_of(f) for f in self._functions],
            _form(self._bound),
            [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in self._outside.values()],
        )

    def is_outdated(self) -> bool:
        """Whether other modules are inside now."""
        return [*map(id, _modules_of(self._roots))] != [*map(id, self.modules)]

    def refers_to(self, tensor: Tensor) -> bool:
        """Whether a tensor lies where it would be noticed if it were replaced; watch it, if so."""
        if tensor.requires_grad:
            return False
        places: list[Any] = [self._bound, *[v for f in self._functions for v in _referred(f)]]
        places += [v for m in self.modules for n, v in vars(m).items() if n not in _OF_ALL]
        places += [value for e in self._extensions for value in vars(e).values()]
        found = any(tensor is inside for place in places for inside in _tensors_in(place))
        if found:
            self._outside[id(tensor)] = tensor
        return found

    def reason_against(self) -> str | None:
        """Why no step can be replayed as things are; ``None`` if there is no reason."""
        if not _torch.is_ordinary():
            return (
                "gradients are off, or a mode of torch is on (a hook of all modules or saved "
                "tensors, anomaly detection, inference mode, a transform, a dispatch mode)"
            )
        for module in self.modules:
            for table in _HOOKS[:4]:
                for hook in vars(module)[table].values():
                    if not _computes_only(hook):
                        return f"a hook on {type(module).__name__} may do more than compute"
            if "forward" in vars(module):
                return f"forward of {type(module).__name__} is replaced on the module itself"
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                return "DistributedDataParallel exchanges gradients"
        for name, tensor in self.tensors.items():
            if _torch.gradient_hooks(tensor):
                return f"a hook listens to the gradient of {name}"
            if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                return f"{name} is a {type(tensor).__name__}"
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                return f"{name} is on {tensor.device}, {tensor.layout}: only dense tensors on a CPU"
            if tensor.grad_fn is not None:
                return f"{name} was computed from other tensors"
        return None


class _Watched:
    """One module: how its attributes are compared is found out once."""

    def __init__(self, module: Module) -> None:
        self._module, self._table = module, vars(module)
        plain, other = [], []
        for name, value in self._table.items():
            if name not in _OF_ALL and not name.startswith(_OURS):
                (plain if is_plain(value) else other).append(name)
        # A getter of a single name would return no tuple.
        self._plain = itemgetter("training", *plain, "_modules")
        self._other = other
        self._has_hooks = tuple([name for name in _HOOKS if self._table[name]])

    def state(self) -> tuple[Any, ...]:
        """What may change."""
        table = self._table
        try:
            plain = self._plain(table)[:-1]
            other = [_form(table[name]) for name in self._other]
        except KeyError:
            return ()
        return (
            type(self._module),
            type(self._module).forward,
            len(table),
            plain,
            other,
            [*map(id, table["_modules"].values())],
            [*map(id, table["_parameters"].values())],
            [*map(id, table["_buffers"].values())],
            [(*table[name],) for name in _HOOKS],
        )


def _computes_only(hook: Any) -> bool:
    """Whether a hook is of a library that computes parameters in it, or ours."""
    home = type(hook).__module__ if not isinstance(hook, types.FunctionType) else hook.__module__
    function = getattr(hook, "func", hook)
    names = (home, getattr(function, "__module__", ""))
    return any(str(name).startswith(("backpack_core", "torch.nn.utils")) for name in names)


def _modules_of(roots: Sequence[Module]) -> list[Module]:
    return list({id(m): m for root in roots for m in root.modules()}.values())


def _named_tensors(roots: Sequence[Module]) -> dict[str, Tensor]:
    found, known = dict[str, Tensor](), set[int]()
    for root in roots:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if id(tensor) not in known:
                known.add(id(tensor))
                while name in found:
                    name += "_"
                found[name] = tensor
    return found


# Functions -----------------------------------------------------------------------------------


def _functions_behind(function: Any, known: Sequence[Any] = ()) -> Iterator[types.FunctionType]:
    """A function, and those of the user's that it refers to."""
    seen, todo = set(map(id, known)), [function]
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            if str(value.__module__).partition(".")[0] not in _LIBRARIES:
                yield value
                todo += [v for v in _referred(value) if callable(v)]


_LIBRARIES: Final = ("torch", "backpack_core", "builtins", "functools", "numpy", "math", "einops")


def _referred(function: types.FunctionType) -> list[Any]:
    """What a function refers to by a name: variables around it, globals, defaults."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(None)
    table = function.__globals__
    found += [table.get(name) for name in _names_in(function.__code__)]
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _names_in(code: types.CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *[name for c in inner for name in _names_in(c)]]


def _state_of(function: types.FunctionType) -> tuple[Any, ...]:
    return id(function.__code__), [_form(value) for value in _referred(function)]


# Values --------------------------------------------------------------------------------------


def _form(value: Any, deepest: int = _DEEPEST) -> Any:
    """A value in a form that tells it from others: numbers and containers by value."""
    if is_plain(value):
        return value
    if isinstance(value, (list, tuple)) and deepest:
        return type(value), [_form(item, deepest - 1) for item in value]
    if isinstance(value, dict) and deepest:
        return dict, [(k, _form(v, deepest - 1)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), {*value}
    if _is_record(value) and deepest:
        return _Same(value), [(k, _form(v, deepest - 1)) for k, v in vars(value).items()]
    return _Same(value)


class _Same:
    """An object that equals itself alone, and is held."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _is_record(value: Any) -> bool:
    """Whether an object is its attributes, as settings are."""
    is_other = isinstance(value, (Module, Tensor, type, types.ModuleType)) or callable(value)
    return not is_other and hasattr(value, "__dict__")


def _tensors_in(value: Any, deepest: int = _DEEPEST) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and deepest:
        for item in value:
            yield from _tensors_in(item, deepest - 1)
    elif isinstance(value, dict) and deepest:
        yield from _tensors_in([*value.values()], deepest)
    elif deepest and _is_record(value):
        yield from _tensors_in([*vars(value).values()], deepest - 1)
