"""The generic rule: parameters of modules without a layer rule, by ``torch.func``.

The module's forward pass is replayed for single samples, with our hooks off, and differentiated.
Exact for every module that can be replayed: one that draws random numbers inside cannot, and says
so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from backpack_core.bridge import quiet_vmap
from backpack_core.calls import ModuleCall, iter_tensors, map_tensors
from backpack_core.context import disable
from backpack_core.errors import UnsupportedError
from backpack_core.rules import ParametricRule


class AutodiffRule(ParametricRule):
    """Stands in where no rule is installed: parameters by replay, propagation by the bridge."""

    transparent = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        raise AssertionError("a transparent rule is never asked to propagate")

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        forward = _replay(call, name)
        parameter = call.parameter(name)

        def one_sample(columns: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            output, pullback = vjp(lambda p: forward(p, inputs), parameter)[:2]
            product: Tensor = vmap(lambda column: pullback(column)[0])(columns)
            return product, output

        with _replaying(call):
            batched, axes = _batched_inputs(call)
            try:
                result, output = vmap(
                    one_sample, in_dims=(1, axes), out_dims=(1, 0), randomness="error"
                )(mat, batched)
            except RuntimeError as error:
                if "random" in str(error):
                    raise
                result, output = _one_by_one(call, name, mat)
        _check_replay(call, output)
        product: Tensor = result
        return product


def _one_by_one(call: ModuleCall, name: str, mat: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a loop, for modules that vmap cannot trace: fused cells, branches on values."""
    forward = _replay(call, name, keep_buffers=True)
    create_graph = torch.is_grad_enabled()
    inputs, axes = _batched_inputs(call)
    products, outputs = [], []
    with torch.enable_grad():
        parameter = call.parameter(name)
        if not (create_graph and parameter.requires_grad):
            parameter = parameter.detach().requires_grad_()
        for n, columns in enumerate(mat.unbind(1)):
            sample = [t if axis is None else t[n] for t, axis in zip(inputs, axes, strict=True)]
            output = forward(parameter, tuple(sample))
            outputs.append(output)
            products += [
                torch.autograd.grad(
                    output, parameter, column, True, create_graph, materialize_grads=True
                )[0]
                for column in columns
            ]
    stacked = torch.stack(products).unflatten(0, (mat.shape[1], mat.shape[0])).transpose(0, 1)
    values = torch.stack(outputs)
    return (stacked, values) if create_graph else (stacked.detach(), values.detach())


def transpose(
    call: ModuleCall, function: Callable[[Tensor], Tensor], shape: Sequence[int], vector: Tensor
) -> Tensor:
    """The transpose of a linear map, applied to a vector.

    The gradient of ``⟨A w, v⟩`` in ``w`` is ``Aᵀ v``, at any ``w``. Unlike forward mode through the
    module, this needs no second run of it: random numbers, padding and fused kernels do not matter.

    Args:
        call: The call that the map belongs to.
        function: The linear map ``w ↦ A w``, in differentiable operations.
        shape: Shape of ``w``.
        vector: ``v``, of the shape of ``A w``.

    Returns:
        ``Aᵀ v``, of the given shape.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), nullcontext() if create_graph else call.constant():
        w = vector.new_zeros(tuple(shape), requires_grad=True)
        image = function(w)
        if not image.requires_grad:  # the map is zero
            return vector.new_zeros(tuple(shape))
        (result,) = torch.autograd.grad(
            image, w, vector, create_graph=create_graph, materialize_grads=True
        )
    return result


def loss_gradient(call: ModuleCall) -> Tensor:
    """Gradient of a loss in its first input, with the arriving gradient as factor: ``[N, *in]``."""
    whole, create_graph = call.full, torch.is_grad_enabled()
    x = whole.input
    if not (create_graph and x.requires_grad):
        x = x.detach().requires_grad_()
    first = whole.inputs[0]
    args, kwargs = map_tensors((whole.args, whole.kwargs), lambda t: x if t is first else t)
    with disable(), torch.enable_grad():
        output = whole.module(*args, **kwargs)
    (gradient,) = torch.autograd.grad(output, x, whole.grad_output, create_graph=create_graph)
    return gradient if call.indices is None else gradient[list(call.indices)]


def _batched_inputs(call: ModuleCall) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Every input tensor, and the axis of the samples in it (``None`` where it has none)."""
    size = call.batch_size
    tensors = tuple(call.tensor_input(i) for i in range(len(call.inputs)))
    axes = tuple(0 if t.dim() and t.shape[0] == size else None for t in tensors)
    return tensors, axes


def _replay(
    call: ModuleCall, name: str | None, keep_buffers: bool = False
) -> Callable[[Tensor | None, tuple[Tensor, ...]], Tensor]:
    """The module's forward for one sample, as a function of a parameter and the input tensors."""
    size = call.batch_size
    batched = [t.dim() > 0 and t.shape[0] == size for t in call.inputs]
    names = [n for n, _ in call.module.named_parameters(remove_duplicate=False) if n != name]
    others = {n: call.parameter(n) for n in names}
    buffers = dict(call.module.named_buffers()) if keep_buffers else {}

    def forward(parameter: Tensor | None, inputs: tuple[Tensor, ...]) -> Tensor:
        queue = iter(
            x.unsqueeze(0) if has_batch else x for x, has_batch in zip(inputs, batched, strict=True)
        )
        args, kwargs = map_tensors((call.args, call.kwargs), lambda _: next(queue))
        values = others if name is None or parameter is None else {**others, name: parameter}
        values = {**values, **{n: buffer.clone() for n, buffer in buffers.items()}}
        # A parameter under two names, or shared with a child, has a part for each.
        output = functional_call(call.module, values, args, kwargs, tie_weights=False)
        return list(iter_tensors(output))[call.output_nr].squeeze(0)

    return forward


@contextmanager
def _replaying(call: ModuleCall) -> Iterator[None]:
    """Hooks off, errors of the replay explained, and what the forward stores on modules undone.

    A forward may store tensors (a hidden state, the weight that weight_norm computes); those of the
    replay would be dead wrappers. Forward hooks act on the output behind the recorded one.
    """
    attributes = [(module, dict(module.__dict__)) for module in call.module.modules()]
    call.module._forward_hooks = OrderedDict()
    try:
        with disable(), quiet_vmap():
            yield
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            raise
        raise UnsupportedError(
            f"{call.path} has no layer rule, and its forward pass could not be replayed for single "
            f"samples ({_first_line(error)}). A module that draws random numbers inside, or cannot "
            "take a batch of one, cannot be replayed: write a layer rule for it."
        ) from error
    finally:
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)


def _check_replay(call: ModuleCall, output: Tensor) -> None:
    """Raise unless the replay for single samples gave what the forward pass gave.

    It does not where samples mix, where an input without samples happens to have as many rows as
    there are samples, or where the module changed since.
    """
    recorded = call.output
    tolerance = min(0.1, max(1e-9, 1e3 * torch.finfo(recorded.dtype).eps))
    scale = recorded.abs().max().clamp_min(1.0)
    if output.shape != recorded.shape or bool((output - recorded).abs().max() > tolerance * scale):
        raise UnsupportedError(
            f"{call.path} has no layer rule, and its forward pass for single samples gives other "
            "values than for the whole batch: its samples influence each other, an input has no "
            "batch axis, or parameters were changed since. Write a layer rule for it."
        )


def _first_line(error: Any) -> str:
    return str(error).strip().split("\n", 1)[0]
