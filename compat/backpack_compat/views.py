"""Layer rules for a module outside a backward pass: the rule, and a view for its methods.

The incumbent's functions take a module with ``input0``, ``input1``, …, and ``output``; layer rules
take a view of a call. Imports backpack_core only.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import LayerRule, View
from backpack_core._torch import version_of
from backpack_core.errors import SampleMixingError, StoredIOError, UnsupportedError
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, Edge, Stored
from backpack_core.record.state import NO_SETTINGS
from backpack_products import AffineRule, HessianLossRule, ParametricRule

Grads = Any  # tuple[Tensor, ...] | None


def made_view(
    module: Module, args: tuple[Any, ...], output: Tensor, grad_output: Tensor | None = None
) -> View:
    """A view of a forward execution that was not recorded.

    Args:
        module: The module.
        args: What it received.
        output: What it returned.
        grad_output: The gradient at the output; ``None`` for none.
    """
    ensure_loaded()
    resolved = registry.resolve(module)
    inputs = tuple(arg for arg in args if isinstance(arg, Tensor))
    outputs = (output.detach(),)
    parameters = dict(module.named_parameters())
    owned = {**parameters, **dict(module.named_buffers())}
    nowhere: Any = None  # there is a graph, but nothing is sent into it
    stored = Stored(
        args=args,
        kwargs={},
        inputs=inputs,
        outputs=outputs,
        versions=tuple(version_of(t) for t in (*inputs, *outputs, *owned.values())),
        tensors=owned,
        named=len(parameters),
    )
    call = Call(
        module,
        resolved.rule,
        resolved.provenance,
        tuple(Edge(nowhere, 0) if t.is_floating_point() else None for t in inputs),
        stored,
        threading.get_ident(),
        module.training,
        NO_SETTINGS,
        is_rewired=False,
        is_readable=False,
    )
    return View(call, 0, grad_output)


def view_of(module: Module, g_out: Grads = None) -> View:
    """The forward execution whose inputs and output are set on a module.

    Args:
        module: The module.
        g_out: Gradients at the outputs; ``None`` for none.

    Raises:
        StoredIOError: The module has no inputs and output.
    """
    attributes = module.__dict__
    inputs: list[Any] = []
    while f"input{len(inputs)}" in attributes:
        inputs.append(attributes[f"input{len(inputs)}"])
    if not inputs or "output" not in attributes:
        raise StoredIOError(
            f"{type(module).__name__} has no input0 and output: extend it, run a forward pass, and "
            "ask before the backward pass frees them (or inside a hook)."
        )
    return made_view(module, tuple(inputs), attributes["output"], g_out[0] if g_out else None)


def checked_view(module: Module, g_out: Grads) -> View:
    """As :func:`view_of`, but raises an error for settings without an exact result.

    Raises:
        SampleMixingError: Samples of the batch influence each other.
    """
    view, rule = view_of(module, g_out), rule_for(module)
    rule.check(view)
    if rule.mixes_samples(view):
        raise SampleMixingError(
            f"{view.path} makes every sample of the batch influence every other: call eval()."
        )
    return view


def loss_view(module: Module, g_out: Grads) -> View:
    """As :func:`view_of` for a loss, with a gradient of one if none is given."""
    view = checked_view(module, g_out)
    if view.grad_output is None:
        view = view_of(module, (torch.ones_like(view.stored.outputs[0]),))
    return view


def mixes_samples(module: Module) -> bool:
    """Whether samples of a batch influence each other in the module's current state."""
    rule = rule_for(module)
    if "input0" in module.__dict__:
        return rule.mixes_samples(view_of(module))
    nothing = torch.empty(0)
    return rule.mixes_samples(made_view(module, (nothing,), nothing))


def rule_for(module: Module) -> LayerRule:
    """The layer rule for a module's type.

    Raises:
        NotImplementedError: There is none.
    """
    ensure_loaded()
    resolved = registry.resolve(module)
    if resolved.is_fallback:
        raise UnsupportedError(
            f"There is no layer rule for {type(module).__name__}: implement the method with an "
            "underscore in a subclass, or write a layer rule."
        )
    return resolved.rule


def affine_rule_for(module: Module) -> AffineRule:
    """The layer rule of a linear layer or convolution.

    Raises:
        NotImplementedError: The module is none.
    """
    rule = rule_for(module)
    if not isinstance(rule, AffineRule):
        raise UnsupportedError(
            f"{type(module).__name__} has no unfolded input: it is not an affine layer."
        )
    return rule


def parametric_rule_for(module: Module, name: str) -> ParametricRule:
    """The layer rule of a module with a parameter.

    Raises:
        NotImplementedError: The rule does not know the parameter.
    """
    rule = rule_for(module)
    if isinstance(rule, ParametricRule) and rule.covers(module, name):
        return rule
    raise UnsupportedError(
        f"The layer rule for {type(module).__name__} does not know the parameter {name!r}: "
        f"implement _{name}_jac_t_mat_prod in a subclass."
    )


def loss_rule_for(module: Module) -> HessianLossRule:
    """The layer rule of a loss.

    Raises:
        NotImplementedError: The module is none.
    """
    rule = rule_for(module)
    if not isinstance(rule, HessianLossRule):
        raise UnsupportedError(f"{type(module).__name__} is not a loss.")
    return rule


def unfolded(module: Module, view: View) -> Tensor:
    """What the kernel of a convolution sees at each position, ``[N, C·K, S]``."""
    rows: Any = affine_rule_for(module).affine_input(view)  # [N, S, G, I], made as asked for
    patches: Tensor = rows[slice(0, rows.shape[0])]
    return patches.permute(0, 2, 3, 1).flatten(1, 2)
