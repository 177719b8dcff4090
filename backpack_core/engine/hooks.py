"""Where a backward pass enters the engine: from ``backward()``, and from autograd's hooks.

:func:`announce` sees the call of ``backward()`` and begins the :class:`BackwardPass`. Hooks on
outputs then find it by autograd's graph task. If the call was not seen (inside of another pass, on
another thread), the pass begins at the first hook, and a library handles it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from backpack_core import _torch
from backpack_core._hooks import KEY
from backpack_core._torch import current_node, graph_task_id
from backpack_core.contract.observer import Grads
from backpack_core.engine.active import Context, current, innermost, stacks
from backpack_core.engine.backward import Arguments, BackwardPass
from backpack_core.engine.between import between
from backpack_core.engine.schedule import guarded
from backpack_core.errors import UsageError
from backpack_core.record.call import Call, Edge, Site


class OutputHook:
    """The tensor hook on an output of a call, which runs before all others.

    Attributes:
        hooks: A weak reference to the table of the tensor's hooks, this one among them.
    """

    __slots__ = ("call", "hooks", "index", "output_nr")

    def __init__(self, call: Call, index: int, output_nr: int) -> None:
        self.call = call
        self.index = index
        self.output_nr = output_nr
        self.hooks: Any = None

    def __call__(self, grad: Tensor | None) -> None:
        """Visit the output after all other hooks: autograd goes on with the gradient they leave.

        Args:
            grad: The gradient before other hooks change it.
        """
        context = current(self.call.thread) if stacks else None
        if context is None or context.is_idle:
            if not (_torch.keeps_graph() or (context is not None and context.retain_graph)):
                self.call.release()
            return
        begun = _known_pass(context)
        if begun is not None and begun.passes_by(self.call, self.index):
            return
        # The user's hooks are on the tensor or on its node. A hook that we put on the node here
        # runs after all of them.
        others = [hook for key, hook in (self.hooks() or {}).items() if key != KEY]

        # If a hook before this one fails, or autograd wants the gradient of this output only, this
        # one stays: holding the node, its gradient or the pass would be a reference cycle.
        task, known = graph_task_id(), None if begun is None else weakref.ref(begun)
        given = None if grad is None else weakref.ref(grad)

        def after(grads: tuple[Tensor | None, ...]) -> None:
            if graph_task_id() != task:
                return  # a pass inside of ours, or a later one after ours has failed
            handle.remove()
            edge = Edge(current_node(), self.output_nr)
            found = None if known is None else known()
            found = found or _known_pass(context) or between().pass_inside(context, edge, None)
            changed_by = None if grads[self.output_nr] is (given and given()) else others
            site = Site(self.call, self.index, edge)
            guarded(context.passes, found.between.reach, found, site, grads, changed_by)

        handle = current_node().register_prehook(after)


def _known_pass(context: Context) -> BackwardPass | None:
    """The backward pass that is running, if its call was seen, or a hook has begun it."""
    task, announced = graph_task_id(), context.announced[-1] if context.announced else None
    if announced is not None:
        begun: BackwardPass = announced
        if begun.is_running and begun.schedule.task == task:
            return begun
        if not begun.is_running and task not in context.passes and begun.schedule.is_in(task):
            begun.is_running, context.passes[task] = True, begun
            return begun
    return context.passes.get(task)


def begin(context: Context, arguments: Arguments) -> BackwardPass | None:
    """Begin a pass whose roots are known, before autograd does.

    Args:
        context: What was asked for.
        arguments: What ``backward()`` was called with.

    Returns:
        The pass; ``None`` if nothing was asked for, or if behind the roots there is neither an
        extended module nor a function that may begin a pass (a re-entrant checkpoint).

    Raises:
        UsageError: In inference mode, tensors do not count changes in place.
    """
    if context.is_idle:
        return None
    if context.passes:
        found = between().pass_inside(context, None, arguments)
    else:
        found = (between().passes or BackwardPass)(context, arguments)
    if found.survey.sites and torch.is_inference_mode_enabled():
        raise UsageError(
            "backward() was called inside inference_mode(), where gradients do not count changes "
            "in place, and quantities rely on these counts. Leave inference_mode() first."
        )
    return found if found.is_needed else None


def announce(
    engine: Callable[..., Any],
    roots: Sequence[Any],
    gradients: Grads,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    """Run autograd's engine; if the thread has a context, with a pass of ours around it.

    Args:
        engine: Autograd's engine, which takes the other arguments.
        roots: What is differentiated.
        gradients: The gradient that comes in at each root.
        retain_graph: Whether the graph outlives the pass.
        create_graph: Whether the gradients get a graph.
        inputs: Where to compute gradients; at all leaves if empty.
        allow_unreachable: Whether some inputs may be unreachable.
        accumulate_grad: Whether gradients are added to ``.grad`` instead of being returned.

    Returns:
        What the engine returns.

    Raises:
        UsageError: Several gradients come in at once.
    """

    def run(keep: bool = retain_graph, reach: Sequence[Any] = inputs) -> Any:
        rest = {"allow_unreachable": allow_unreachable, "accumulate_grad": accumulate_grad}
        return engine(roots, gradients, keep, create_graph, tuple(reach), **rest)

    context = innermost()
    if context is None or context.announced or len(roots) != len(gradients):
        return run()  # torch complains about unequal numbers
    if _torch.are_batched(gradients):
        raise UsageError(
            "torch.autograd.grad(..., is_grads_batched=True) brings several gradients at once, "
            "which extensions do not take: call it once for each, or outside of the block."
        )
    context.announced.append(None)  # passes inside of this one are not announced
    try:
        given: dict[str, Any] = {"inputs": inputs or None, "create_graph": create_graph}
        given["accumulate_grad"] = accumulate_grad
        announced = begin(context, Arguments(roots, gradients, given))
        if announced is None:
            return run()
        context.announced[0] = announced
        result: Any = ()
        try:
            if not announced.is_carried():
                options = announced.options()
                keeps = any(extension.keeps_graph for extension in context.extensions)
                result = run(keeps or retain_graph, options["inputs"] or ())
        except BaseException:
            announced.leave()
            raise
        finally:
            context.announced[0] = None
        announced.finish()
        return result
    finally:
        context.announced.clear()


entry: Final = _torch.EngineEntry(announce)
