"""The automatic rule: parameters of modules without a layer rule, by ``torch.func``.

The module's forward is replayed for single samples, without our hooks, and differentiated. This is
exact for every module that can be replayed. One that draws random numbers inside cannot, and that
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import vjp, vmap

from backpack_core import _hooks
from backpack_core._torch import is_symbolic, parametrized, quiet_vmap, version_of
from backpack_core.contract.parametric import ParametricRule
from backpack_core.errors import BackpackError, OverwrittenInputError, UnsupportedError
from backpack_core.graph.bridge import agree, random_weights
from backpack_core.record.state import State
from backpack_core.record.structure import iter_tensors, map_tensors
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_core.values import any_of, largest


class AutodiffRule(ParametricRule):
    """Stands in where no rule is installed: parameters by replay, propagation by the bridge."""

    transparent = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        _check_hooks(view, name)
        forward = _replay(view, name)
        parameter = view.parameter(name)

        def one_sample(columns: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            output, pullback = vjp(lambda p: forward(p, inputs), parameter)[:2]
            product: Tensor = vmap(lambda column: pullback(column)[0])(columns)
            return product, output

        with replaying(view):
            batched, axes = _batched_inputs(view)
            try:
                # With the samples elsewhere, torch cannot place what does not depend on them.
                result, output = vmap(one_sample, in_dims=(1, axes), randomness="error")(
                    mat, batched
                )
                product = result.transpose(0, 1)
                is_exact = _agrees_with_the_batch(view, name, mat, result)
            except RuntimeError as error:
                if "random" in str(error):
                    raise
                is_exact = False
            if not is_exact:
                product, output = _one_by_one(view, name, mat)
        _check_replay(view, name, output)
        return product


def _agrees_with_the_batch(view: View, name: str, mat: Tensor, product: Tensor) -> bool:
    """Whether the products fit to one plain derivative of the whole batch: vmap has been wrong.

    Both are linear in ``mat``, so random weights of all columns and samples tell.

    Args:
        view: The call.
        name: Name of the parameter.
        mat: Columns ``[V, N, *out]``.
        product: The products, ``[N, V, *θ]``.
    """
    if is_symbolic(product):
        return True
    weights = random_weights(product.shape[:2], mat.device)
    with torch.enable_grad():
        parameter = view.parameter(name).detach().requires_grad_()
        output = _of_batch(view, name, parameter)
        column = torch.einsum("nv,vn...->n...", weights.to(mat.dtype), mat.detach())
        expected = _gradient(output, parameter, column)
    return agree(weights, product.detach(), expected, column.abs().sum())


def _of_batch(view: View, name: str, parameter: Tensor) -> Tensor:
    """The output of a replay of the whole batch, its samples in front."""
    # Detached: a forward may return an input, whose hooks are not the replay's.
    inputs = tuple(tensor.detach() for tensor in _batched_inputs(view)[0])
    return _replay(view, name, whole=True)(parameter, inputs)


def _gradient(output: Tensor, parameter: Tensor, column: Tensor, graph: bool = False) -> Tensor:
    """Zero where the output does not depend on the parameter."""
    if not output.requires_grad:
        return torch.zeros_like(parameter)
    (found,) = torch.autograd.grad(
        output, parameter, column, retain_graph=True, create_graph=graph, materialize_grads=True
    )
    return found


def _one_by_one(view: View, name: str, mat: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a loop, for modules that vmap cannot trace: fused cells, branches on values."""
    forward = _replay(view, name, as_trained=True)
    create_graph = view.is_differentiable
    inputs, axes = _batched_inputs(view)
    products, outputs = [], []
    with torch.enable_grad():
        parameter = view.parameter(name)
        if not (create_graph and parameter.requires_grad):
            parameter = parameter.detach().requires_grad_()
        for n, columns in enumerate(mat.unbind(1)):
            sample = [t if axis is None else t[n] for t, axis in zip(inputs, axes, strict=True)]
            output = forward(parameter, tuple(sample))
            outputs.append(output)
            products += [_gradient(output, parameter, column, create_graph) for column in columns]
    stacked = torch.stack(products).unflatten(0, (mat.shape[1], mat.shape[0])).transpose(0, 1)
    values = torch.stack(outputs)
    return (stacked, values) if create_graph else (stacked.detach(), values.detach())


def _batched_inputs(view: View) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Every input tensor, and the axis of the samples in it (``None`` where it has none)."""
    given = view.stored.inputs
    tensors = tuple(view.tensor_input(i) for i in range(len(given)))
    return tensors, tuple(0 if view.has_batch(t) else None for t in given)


def _replay(
    view: View, name: str, whole: bool = False, as_trained: bool = False
) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor]:
    """The module's forward for one sample, as a function of a parameter and the input tensors.

    Args:
        view: The call.
        name: Name of the parameter.
        whole: Run the batch instead of one sample, and show its samples in front.
        as_trained: Let all parameters require gradients that do in the module. A checkpoint runs
            its function again when the replay is over, and has to save the same tensors.
    """
    batched = [not whole and view.has_batch(t) for t in view.stored.inputs]
    args_, kwargs_ = view.args, view.kwargs
    module, owned = view.module, view.stored.owned
    # Those of modules inside as well, as they were in the forward pass.
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {n: view.parameter(n) for n in named}
    for n, parameter in parameters.items() if as_trained else ():
        if named[n].requires_grad and not parameter.requires_grad:
            parameters[n] = parameter.detach().requires_grad_()
    buffers = {n: owned.get(n, (b,))[0] for n, b in module.named_buffers(remove_duplicate=False)}

    def forward(parameter: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        queue = iter(
            x.unsqueeze(0) if has_batch else x for x, has_batch in zip(inputs, batched, strict=True)
        )
        args, kwargs = map_tensors((args_, kwargs_), lambda _: next(queue))
        copies = {n: buffer.clone() for n, buffer in buffers.items()}
        # A parameter under two names, or shared with a child, has a part for each.
        with parametrized(module, {**parameters, **copies, name: parameter}):
            output = module.forward(*args, **kwargs)
        found = list(iter_tensors(output))[view.index]
        if found._backward_hooks:  # they changed the gradient that has arrived already
            found._backward_hooks.clear()
        return found.movedim(view.axis, 0) if whole else found.squeeze(view.axis)

    return forward


@contextmanager
def replaying(view: View) -> Iterator[None]:
    """Settings as they were, hooks off, errors explained, and what the forward stores undone.

    A forward may store tensors (a hidden state, the weight that weight_norm computes); those of the
    replay would be dead wrappers.
    """
    call = view.call
    states = (State(view.module, *call.settings), *call.inside)
    modules = {*view.module.modules(), *(state.module for state in states)}
    attributes = [(module, dict(module.__dict__)) for module in modules]
    try:
        for module, names, values in states:
            module.__dict__.update(zip(names, values, strict=True))
        with disable(), quiet_vmap():
            yield
    except BackpackError:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise UnsupportedError(
            f"{view.path} has no layer rule, and its forward pass could not be replayed for single "
            f"samples ({first_line}). A module that draws random numbers inside, or cannot "
            "take a batch of one, cannot be replayed: write a layer rule for it."
        ) from error
    finally:
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)


def _check_hooks(view: View, name: str) -> None:
    """Raise where a parameter has its effect in a hook before the forward only."""
    module = view.call.module
    if not _hooks.have_company(module):
        return
    with replaying(view), torch.enable_grad():
        parameter = view.parameter(name).detach().requires_grad_()
        total = _of_batch(view, name, parameter).sum()
        is_used = total.requires_grad
        if is_used:
            is_used = torch.autograd.grad(total, parameter, allow_unused=True)[0] is not None
        if not is_used:
            raise UnsupportedError(
                f"{view.path} has no layer rule, and its forward does not use its parameter "
                f"{name!r}: a forward pre-hook computes something from it (as torch.nn.utils."
                "weight_norm does). Use torch.nn.utils.parametrizations instead, or write a layer "
                "rule."
            )


def _check_replay(view: View, name: str, output: Tensor) -> None:
    """Raise unless the replay for single samples gave what the forward pass gave.

    It does not where samples mix, where an input without samples happens to have as many rows as
    there are samples, or where the module changed since.
    """
    recorded = _recorded(view, name)
    # It may have been recorded in lower precision than it is differentiated in.
    dtypes = (recorded.dtype, view.stored.outputs[view.index].dtype)
    tolerance = min(0.1, max(1e-9, *(1e3 * torch.finfo(dtype).eps for dtype in dtypes)))
    scale = largest(recorded.abs()).clamp_min(1.0)
    if output.shape != recorded.shape or any_of((output - recorded).abs() > tolerance * scale):
        raise UnsupportedError(
            f"{view.path} has no layer rule, and its forward pass for single samples gives other "
            "values than for the whole batch: its samples influence each other, an input has no "
            "batch axis, or parameters were changed since. Write a layer rule for it."
        )


def _recorded(view: View, name: str) -> Tensor:
    """The output of the forward pass; where it was overwritten since, of another one."""
    try:
        return view.output
    except OverwrittenInputError:
        if _is_changed(view):
            raise
        with replaying(view), torch.no_grad():
            return _of_batch(view, name, view.parameter(name))


def _is_changed(view: View) -> bool:
    """Whether the module cannot be run as it was: it has other modules inside, or other numbers."""
    inside = [module for module in view.module.modules() if module is not view.module]
    return {*inside} != {state.module for state in view.call.inside} or any(
        version_of(tensor) != version for tensor, version in view.stored.owned.values()
    )
