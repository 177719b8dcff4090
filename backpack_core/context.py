"""The context ``backpack(...)``: which extensions run in the backward passes of a block.

The arguments are checked here, so that the engine gets a request that makes sense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from reprlib import repr as abridged
from types import TracebackType
from typing import Any, get_args

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.bases import vet
from backpack_core.contract.extension import Extension
from backpack_core.engine import active
from backpack_core.engine.between import between
from backpack_core.engine.hooks import entry
from backpack_core.errors import NotAnExtensionError, NotExtendedError, UsageError
from backpack_core.plugins.loading import ensure_loaded, missing
from backpack_core.plugins.registration import answer
from backpack_core.record.storage import storage
from backpack_core.record.switch import is_disabled
from backpack_core.record.view import View
from backpack_core.remember import remembered

_CHECKS, _GRADIENTS = get_args(active.Check), get_args(active.Gradient)


class backpack:
    """Activate extensions for the backward passes inside a ``with`` block.

    Example:
        >>> with backpack(DiagGGNExact(), BatchGrad()):
        ...     loss.backward()

    The block applies to the thread that entered it. A nested block replaces the outer one until it
    ends. Several threads may each train a model of their own at the same time. Do not write
    ``await`` or ``yield`` inside the block: what runs meanwhile would run in it, too.
    """

    def __init__(
        self,
        *extensions: Extension,
        extension_hook: active.ExtensionHook | None = None,
        debug: bool = False,
        check: active.Check = "first",
        retain_graph: bool = False,
        beside: Sequence[Tensor] = (),
        observer: Callable[[View], None] | None = None,
        gradient: active.Gradient = "autograd",
        samples: active.Samples | None = None,
        keep_results: bool = False,
    ) -> None:
        """Check and store the request.

        Args:
            extensions: Extension instances to run.
            extension_hook: Called as ``extension_hook(module)`` for every module, after all
                extensions ran on it. The gradients of the module's own parameters are not
                accumulated yet. A parameter that several calls use gets its results at the last of
                these calls.
            debug: Log every step.
            check: When to measure that samples do not mix, and that gradients come from the
                extended losses alone: in the ``"first"`` passes of every structure, ``"always"``,
                or ``"never"``.
            retain_graph: Keep inputs and outputs for another backward pass, even if ``backward()``
                does not retain its graph.
            beside: Terms of the total loss that depend on weights alone, such as a penalty.
                Quantities of single samples, Gauss-Newton and Fisher matrices are then those of the
                other terms. ``.grad`` and ``HMP`` include all terms. ``DiagHessian`` cannot include
                these, and raises an error.
            observer: Called with the :class:`~backpack_core.View` of every output that is visited,
                losses included, before extensions read there.
            gradient: Where the plain gradient of the parameters comes from. ``"autograd"``: from
                autograd, as always. ``"shared"``: if individual gradients or their moments are
                computed anyway, from their sum. This saves up to a third of a plain pass, and the
                gradient is equal up to rounding. It is accumulated at the end of the pass, and
                hooks on parameters are called then. ``"none"``: parameters of extended modules get
                no ``grad``.
                ``"skipped"``: the same, and if no extension needs a gradient, autograd does not run
                at all, so that no gradient hook is called. See ``docs/gradient.md``.
            samples: The sample that each row of the model's input belongs to: a tensor
                ``index[row]`` of shape ``[R]``, with whole numbers from zero up. For a model that
                receives several tensors (in a list, a dictionary, as arguments), a list with an
                entry for each, in their order: a number, or an index of its rows. Quantities are
                then those of ``M = index.max() + 1`` samples: of users with several records, of
                augmentations, of pairs of answers in one batch. Rows of one sample may influence
                each other; those of different samples may not, which is measured. See
                ``docs/checks.md``.
            keep_results: Whether the memory of results is left alone. By default the next pass
                writes into it, if nothing but the parameter holds the result: no name, list, view,
                array or graph. First writes to fresh memory take longer than many computations.
                Say ``True`` if something holds only its address (``data_ptr()``).

        Raises:
            NotAnExtensionError: One of the extensions is a class, or not an extension at all.
            UsageError: Two extensions save under the same name, the hook cannot be called,
                ``check`` or ``gradient`` is not one of the words above, or something in ``beside``
                is not a tensor with a graph.
        """
        for extension in extensions:
            _check_extension(extension)
        for field in (extension.savefield for extension in extensions):
            kinds = [type(each).__name__ for each in extensions if each.savefield == field]
            if len(kinds) > 1:
                raise UsageError(
                    f"{' and '.join(kinds)} both save under {field!r}: give one another savefield."
                )
        for name, called in (("extension_hook", extension_hook), ("observer", observer)):
            if called is not None and not callable(called):
                raise UsageError(f"{name} must be callable. Got {called!r}.")
        for name, word, known in (("check", check, _CHECKS), ("gradient", gradient, _GRADIENTS)):
            if word not in known:
                raise UsageError(f"{name} is one of {', '.join(known)}. Got {word!r}.")
        self._extensions = extensions
        self._watch: Any = None  # once there is one
        self._history: Counter[str] = Counter()
        told: Any = None
        edges: frozenset[tuple[Node, int]] = frozenset()
        if samples is not None or not isinstance(beside, tuple) or beside:
            ensure_loaded()
            told, edges = between().said(samples, beside)
        asked = extension_hook, debug, check, retain_graph, edges, observer, gradient
        self._begin = partial(active.Context, extensions, *asked, told, keep_results)
        self._entered: list[active.Context] = []
        self._around: list[AbstractContextManager[Any]] = []

    def summary(self) -> Any:
        """What each extension took at each module so far: rule or autodiff, time, bytes.

        It also says how many passes used the plan of an earlier pass, and why others did not.

        Example:
            >>> with backpack(DiagGGNExact()) as block:
            ...     loss.backward()
            >>> print(block.summary())

        Raises:
            MissingPluginError: ``backpack-operations``, which takes times, or ``backpack-checks``,
                which adds them up, is not installed or is blocked.
        """
        ensure_loaded()
        if (watch := self._watched()) is None:
            needed = "pip install backpack-checks backpack-operations"
            raise missing(f"block.summary() needs two libraries: {needed}.", "checks")
        return watch.summary(self._history)

    def _watched(self) -> Any:
        """What adds up times; ``None`` if nothing does, or if nothing takes them."""
        if not self._watch and answer("backpack_operation") and (kind := answer("backpack_watch")):
            self._watch = kind()
        return self._watch

    def __repr__(self) -> str:
        """The extensions, and whether it is entered."""
        state = " (entered)" if self._entered else ""
        return f"<backpack{state}: {', '.join(map(repr, self._extensions)) or 'no extensions'}>"

    def __enter__(self) -> backpack:
        """Make this the active context of the thread.

        Raises:
            UsageError: The thread is inside ``disable()``, or inside a compiled function.
        """
        ensure_loaded()
        block = storage().block(bool(self._extensions))
        if is_disabled():
            raise UsageError(
                "backpack(...) was entered inside disable(): nothing is recorded there, so no "
                "quantity could be computed. Leave the disable() block first."
            )
        watch = self._watched()
        groups = active.group(self._extensions, watch)
        context = self._begin(watch, *groups, history=self._history)
        block.__enter__()
        entry.__enter__()
        self._around.append(block)
        self._entered.append(context)
        # If nothing is asked for and no block is around, nobody needs to find this one.
        if active.innermost() or context.retain_graph or not context.is_idle:
            active.push(context)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous context; nothing of this one stays behind.

        Raises:
            NotExtendedError: Extensions were given, but no extended module took part in a backward
                pass of this block.
            UsageError: Some took part, but none of their parameters requires a gradient.
        """
        context = self._entered.pop()
        active.pop(context)
        entry.__exit__(exc_type, exc, traceback)
        self._around.pop().__exit__(exc_type, exc, traceback)
        if exc_type is None and context.extensions:
            _refuse_nothing(context)


def _refuse_nothing(context: active.Context) -> None:
    names = ", ".join(type(e).__name__ for e in context.extensions)
    if "ran" not in context.seen:
        raise NotExtendedError(
            f"backpack({names}) computed nothing: no extended module took part in a backward "
            "pass of this block. Call extend(model) and extend(lossfunc) before the forward "
            "pass, and loss.backward() inside the block (the innermost, if blocks are nested)."
        )
    if "trained" not in context.seen:
        raise UsageError(
            f"backpack({names}) computed nothing: no parameter of the extended modules that took "
            "part requires a gradient. Call requires_grad_(True) on those to train before the "
            "forward pass. If only inputs are trained (a prompt, an image), call backward() "
            "outside the block, or make them parameters of an extended module."
        )


_vet = remembered(vet)  # extensions need not be registered


def _check_extension(extension: object) -> None:
    if isinstance(extension, Extension):
        if "carriers" not in vars(extension):
            kind = type(extension)
            raise UsageError(
                f"{kind.__name__} has not been initialised: call super().__init__(...) in "
                f"{kind.__name__}.__init__ (of {kind.__module__}), before anything else."
            )
        _vet(type(extension))
        _vet(type(extension.propagator))
        return
    if isinstance(extension, type) and issubclass(extension, Extension):
        raise NotAnExtensionError(
            f"backpack(...) takes extension instances. Got the class {extension.__name__}: write "
            f"{extension.__name__}()."
        )
    hint = " Write backpack(*extensions)." if isinstance(extension, (list, tuple, set)) else ""
    raise NotAnExtensionError(
        f"backpack(...) takes extensions, instances of backpack_core.Extension. Got "
        f"{abridged(extension)} of type {type(extension).__name__}.{hint}"
    )
