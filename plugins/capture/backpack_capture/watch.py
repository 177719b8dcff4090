"""What a recorded graph takes for granted, compared before each replay. This must be quick.

Numbers and containers are compared by value, other objects by identity. These objects are held, so
that no other object can get the ``id`` of one that was deleted.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_capture import _torch
from backpack_capture.nested import is_plain
from backpack_core import Extension
from backpack_operations.plan import plans

OF_ALL: Final = frozenset(vars(Module()))
HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks",),
)
_OURS: Final = "_backpack"  # begins the attributes that ``extend`` makes
DEEPEST: Final = 4
# Where hooks come from that record calls, or compute parameters.
_ONLY_COMPUTING: Final = ("backpack_core", "backpack_interplay", "torch.nn.utils")


class Watch:
    """A function, the modules and extensions that it uses, and everything that they refer to.

    Attributes:
        modules: Every module.
        parameters: Their parameters.
        tensors: Their parameters and buffers, by name.
        functions: The user's functions that a step calls.
        classes: The user's classes of modules and other objects.
        names: The attributes that these functions read, or methods of installed classes that they
            call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[Module],
        extensions: Sequence[Extension],
        others: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.bound = getattr(function, "__self__", None)
        called = [function, *others]
        functions, _, _ = code_behind(called)
        found = [self.bound, *[value for f in functions for value in _referred(f)]]
        roots = [*modules, *[m for m in found if isinstance(m, Module)]]
        self.modules = _modules_of(roots)
        self.functions, self.classes, self.names = code_behind([*called, *self.modules])
        self.tensors = _named_tensors(roots)
        self.parameters = [t for t in self.tensors.values() if isinstance(t, torch.nn.Parameter)]
        self.extensions = extensions
        self.outside: dict[int, Tensor] = {}

    def refers_to(self, tensor: Tensor) -> bool:
        """Whether a replacement of a tensor would be noticed; if so, watch the tensor."""
        if tensor.requires_grad:
            return False
        places: list[Any] = [self.bound, *[v for f in self.functions for v in _referred(f)]]
        places += [v for m in self.modules for n, v in vars(m).items() if n not in OF_ALL]
        places += [value for e in self.extensions for value in vars(e).values()]
        found = any(tensor is inside for place in places for inside in _tensors_in(place))
        if found:
            self.outside[id(tensor)] = tensor
        return found

    def plans(self, tensor: Tensor) -> bool:
        """Whether a plan of the models keeps a tensor. What it assumes about values was read."""
        found = (own for model in self.modules for own in plans.tensors(model))
        return any(tensor is own or tensor is own._base for own in found)

    def reason_against(self, gradient: Any) -> str | None:
        """Why steps cannot be replayed now; ``None`` if they can.

        Args:
            gradient: How gradients are computed; those of autograd run hooks.
        """
        if not _torch.is_ordinary():
            return (
                "gradients are off, or a mode of torch is on (a hook of all modules or saved "
                "tensors, anomaly detection, inference mode, a transform, a dispatch mode)"
            )
        for module in self.modules:
            for table in HOOKS[:4]:
                for hook in vars(module)[table].values():
                    if not _computes_only(hook):
                        return f"a hook on {type(module).__name__} may do more than compute"
            if "forward" in vars(module) and not is_compiler(module):
                return f"forward of {type(module).__name__} is replaced on the module itself"
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                return "DistributedDataParallel exchanges gradients"
        for name, tensor in self.tensors.items():
            if _torch.gradient_hooks(tensor) and gradient != "autograd":
                return f"a hook listens to the gradient of {name}, and gradient={gradient!r}"
            if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                return f"{name} is a {type(tensor).__name__}"
            if _torch.is_foreign(tensor):
                return (
                    f"{name} is on {tensor.device}, {tensor.layout}: only dense tensors on a CPU "
                    "or on the current CUDA device are recorded"
                )
            if tensor.grad_fn is not None:
                return f"{name} was computed from other tensors"
        return None


def is_compiler(module: Module) -> bool:
    """Whether a module comes from ``torch.compile``: turned off in steps, it only forwards."""
    return type(module).__module__.startswith("torch._dynamo")


def _computes_only(hook: Any) -> bool:
    """Whether a hook only looks, is ours, or comes from a library that computes parameters."""
    if getattr(getattr(getattr(hook, "func", hook), "__self__", None), "only_looks", False):
        return True
    home = type(hook).__module__ if not isinstance(hook, types.FunctionType) else hook.__module__
    function = getattr(hook, "func", hook)
    names = (home, getattr(function, "__module__", ""))
    return any(str(name).startswith(_ONLY_COMPUTING) for name in names)


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


_INSTALLED: Final = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})


def code_behind(
    values: Sequence[Any],
) -> tuple[list[types.FunctionType], list[type], set[str]]:
    """The user's functions and classes among values, and those that these refer to.

    A method of a class, or a function in an attribute of an object, counts if a function names it,
    or if operations call it; one in an attribute of a module, or in a container, always counts.
    Methods of installed classes are not looked at, but what they name may be read, too.
    """
    functions, classes = dict[int, types.FunctionType](), dict[int, type]()
    installed, named = dict[int, tuple[str, types.FunctionType]](), set[str]()
    first = {id(getattr(value, "__func__", value)) for value in values}  # of any origin
    todo, members, seen = [*values], list[tuple[str, Any]](), dict[int, Any]()
    while todo:
        value = todo.pop()
        is_new = id(value) not in seen and not is_plain(value)
        seen[id(value)] = value
        if not is_new or isinstance(value, Tensor):
            pass
        elif isinstance(value, types.MethodType):
            todo += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, weakref.ref):
            todo.append(value())
        elif isinstance(value, types.FunctionType):
            if id(value) in first or _is_users(value):
                functions[id(value)] = value
                todo += _referred(value)
        else:
            todo += _held(value)
            kind = value if isinstance(value, type) else type(value)
            for base in [k for k in kind.__mro__ if id(k) not in classes and k is not Module]:
                own = [(name, _function_of(f)) for name, f in vars(base).items()]
                members += [(name, f) for name, f in own if _is_users(f)]
                if _is_users_class(base) or any(_is_users(f) for _, f in own):
                    classes[id(base)] = base
                elif not (isinstance(value, Module) or base.__module__.startswith("backpack_")):
                    its = [(n, f) for n, f in own if isinstance(f, types.FunctionType)]
                    installed |= {id(f): (name, f) for name, f in its}
            members += (attributes_of(value) or {}).items()
        if not todo:
            named |= {name for f in functions.values() for name in names_of(f)}
            while called := [f for n, f in installed.values() if n in named or _is_implicit(n)]:
                named |= {name for f in called for name in names_in(f.__code__)}
                for function in called:
                    del installed[id(function)]
            todo = [item for name, item in members if name in named or _is_implicit(name)]
            todo = [item for item in todo if id(item) not in seen]
    return [*functions.values()], [*classes.values()], named


def _held(value: Any) -> list[Any]:
    """What a container holds, or a module in attributes of its own."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value]
    if isinstance(value, dict):
        return [*value.values()]
    is_module = isinstance(value, Module) and not is_compiler(value)
    return [item for name, item in vars(value).items() if name not in OF_ALL] if is_module else []


def _is_implicit(name: str) -> bool:
    """Whether a method is called without its name, by an operation or by torch."""
    return name == "forward" or (name.startswith("__") and name not in ("__init__", "__repr__"))


def _function_of(value: Any) -> Any:
    """The function that an attribute of a class is made of."""
    return getattr(value, "__func__", getattr(value, "fget", value))


def _is_users(function: Any) -> bool:
    """Whether a function is in the user's files, not in an installed package or ours."""
    if not isinstance(function, types.FunctionType):
        return False
    is_ours = str(function.__module__).startswith("backpack_")
    return not is_ours and not function.__code__.co_filename.startswith(_INSTALLED)


def _is_users_class(kind: type) -> bool:
    """The same for a class, which may have no functions."""
    return kind is not object and _is_users_module(sys.modules.get(kind.__module__))


def _is_users_module(module: Any) -> bool:
    """The same for a module of Python."""
    name, path = getattr(module, "__name__", "backpack_"), getattr(module, "__file__", None)
    if name.startswith("backpack_") or name.partition(".")[0] in sys.stdlib_module_names:
        return name == "__main__"
    return not str(path).startswith(_INSTALLED)


def _referred(function: types.FunctionType) -> list[Any]:
    """What a function refers to by a name: variables around it, globals, defaults."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(None)
    table = function.__globals__
    found += [table.get(name) for name in _globals_in(function.__code__)]
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def names_in(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a function, and in the functions inside it.

    A word may be a name, too, as in ``getattr(settings, "scale")``.
    """
    names = [*code.co_names, *_words_in(code)]
    return [*names, *[name for inner in _inside(code) for name in names_in(inner)]]


def _globals_in(code: types.CodeType) -> list[str]:
    """The names of globals in a function, and in the functions inside it.

    Not those of attributes: a script may count its steps in a variable of the same name.
    """
    steps = dis.get_instructions(code)
    names = [str(step.argval) for step in steps if step.opname in _WITH_GLOBALS]
    names += _words_in(code) if _BY_WORDS.intersection(names) else []
    return [*names, *[name for inner in _inside(code) for name in _globals_in(inner)]]


_WITH_GLOBALS: Final = frozenset({
    *("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
})  # fmt: skip
_BY_WORDS: Final = frozenset({"globals", "eval", "exec", "sys"})  # find a global by a word


def _inside(code: types.CodeType) -> list[types.CodeType]:
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]


def _words_in(code: types.CodeType) -> list[str]:
    words = [w for c in code.co_consts for w in (c if isinstance(c, tuple) else (c,))]
    return [w for w in words if isinstance(w, str) and w.isidentifier()]


def names_of(function: types.FunctionType) -> list[str]:
    """The names in a function, and words in the variables that it reads."""
    return [*names_in(function.__code__), *_words_of(function)]


def globals_of(function: types.FunctionType) -> set[str]:
    """The names of the globals that a function reads or writes."""
    names = {*_globals_in(function.__code__)}
    return names.union(_words_of(function)) if names & _BY_WORDS else names


def _words_of(function: types.FunctionType) -> list[str]:
    """Words in the variables that a function reads."""
    return [word for word in _referred(function) if type(word) is str]


_NO_RECORDS: Final = (Module, Tensor, type, types.FunctionType)


# Values --------------------------------------------------------------------------------------


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that consists of them, as settings do; ``None`` for others."""
    kind = type(value)
    is_ours = kind.__module__.startswith("backpack_capture")  # a step counts its replays
    is_foreign = isinstance(value, types.ModuleType) and not _is_users_module(value)
    if is_ours or is_foreign or isinstance(value, _NO_RECORDS):
        return None
    # Our own objects keep in slots what differs from step to step, such as a step's arguments.
    bases = () if kind.__module__.startswith("backpack_") else kind.__mro__
    slots = [vars(base).get("__slots__", ()) for base in bases]
    names = [n for own in slots for n in ((own,) if isinstance(own, str) else own)]
    table: dict[str, Any] | None = vars(value) if hasattr(value, "__dict__") else None
    if table is not None and not names:
        return table
    found = {n: getattr(value, n) for n in names if n[:2] != "__" and hasattr(value, n)}
    return {**found, **(table or {})} if names else None


def _tensors_in(value: Any, deepest: int = DEEPEST) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deepest:
        inner = [*value] if isinstance(value, (list, tuple)) else []
        inner += [*value.values()] if isinstance(value, dict) else []
        inner += (attributes_of(value) or {}).values()
        for item in inner:
            yield from _tensors_in(item, deepest - 1)
