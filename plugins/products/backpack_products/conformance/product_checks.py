"""Checks of a rule's products against dense derivatives by autograd.

A check takes the run of a layer. It raises an error, or yields what must be compared: a name, the
value that was found, and the one that is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.compare import Entries, agree, refuses, require, untouched
from backpack_core.testing.layer_run import LayerRun, extended, run_layer
from backpack_products import operations as ops
from backpack_products.affine import AffineProduct
from backpack_products.parametric import AffineRule
from backpack_products.product import SampleProduct
from backpack_products.some_samples import subsample
from backpack_products.tuning import memory_budget, within_budget

# Names of the parameters that a parametrised weight is computed from; a rule covers the weight.
IS_COMPUTED = re.compile(r"(^|\.)parametrizations\.")


def jac_t_mat_prod(run: LayerRun, mat: Tensor | None = None, view: View | None = None) -> Entries:
    """Compare with ``Jᵀ mat`` for every input; if a view is given, for its samples only."""
    mat, chosen = run.columns() if mat is None else mat, _chosen(view)
    found = run.call("jac_t_mat_prod", mat[:, chosen], view=view)
    for slot in run.live:
        expected = oracle.transposed_product(run.jacobians[slot], mat)[:, chosen]
        yield f"jac_t_mat_prod, input {slot}", dict(enumerate(found)).get(slot), expected


def param_jac_t_mat_prod(
    run: LayerRun, mat: Tensor | None = None, view: View | None = None
) -> Entries:
    """Compare sample by sample, for every covered parameter."""
    mat, chosen = run.columns() if mat is None else mat, _chosen(view)
    for name in run.parameters:
        found = run.call("param_jac_t_mat_prod", name, mat[:, chosen], view=view)
        expected = oracle.per_sample_product(run.jacobians[name], mat)
        yield f"param_jac_t_mat_prod of {name!r}", found, expected[:, chosen]


def products(run: LayerRun, mat: Tensor | None = None, view: View | None = None) -> Entries:
    """Transposed Jacobian products with inputs and parameters."""
    if not run.rule.transparent:
        yield from jac_t_mat_prod(run, mat, view)
    yield from param_jac_t_mat_prod(run, mat, view)


def _chosen(view: View | None) -> slice | list[int]:
    return slice(None) if view is None or view.indices is None else list(view.indices)


def accepts(run: LayerRun) -> None:
    """Check that ``params`` is complete, ``check()`` passes, and nothing is kept or changed."""
    fresh, covered = run_layer(run.case), run.rule.parameter_names(run.module)
    left_out = [
        repr(name)
        for name, theta in run.module.named_parameters()
        if theta.requires_grad and name not in covered and not IS_COMPUTED.search(name)
    ]
    said = f"params leaves out {', '.join(left_out)}, which a {type(run.module).__name__} has: add "
    require(run.rule.transparent or not left_out, said + "it to params, with its product.")
    fresh.jacobians, stored, mat = run.jacobians, fresh.view.stored, fresh.columns()
    tensors = [mat, *stored.inputs, *stored.outputs, *fresh.module.parameters()]
    with untouched(fresh.rule, fresh.module, *tensors):
        fresh.rule.check(fresh.view)
        list(products(fresh, mat))


def overwritten_input(run: LayerRun) -> None:
    """Check that the rule refuses an input that the layer has overwritten."""
    message = "overwrites_input is declared, but the rule accepts an overwritten input."
    refuses(OverwrittenInputError, message, run.call, "jac_t_mat_prod", run.columns())


def jac_mat_prod(run: LayerRun) -> Entries:
    """Compare with ``J mat`` for the first input."""
    mat = run.input_columns()
    expected = oracle.product(run.jacobians[0], mat)
    what = "jac_mat_prod, the derivative of _jac_t_mat_prod by its columns"
    yield what, run.call("jac_mat_prod", mat), expected


def param_jac_mat_prod(run: LayerRun) -> Entries:
    """Compare with ``J mat`` for every covered parameter."""
    for name, theta in run.parameters.items():
        mat = oracle.draw((2, *theta.shape), 5)
        expected = oracle.product(run.jacobians[name], mat)
        found = run.call("param_jac_mat_prod", name, mat)
        what = f"param_jac_mat_prod of {name!r}, the derivative of its product by the columns"
        yield what, found, expected


# Each operation as a function of a product and of ``M`` itself, formed by the oracle. A parameter
# may be a single number.
_DEFINITIONS: dict[str, tuple[Callable[[SampleProduct], Tensor], Callable[[Tensor], Tensor]]] = {
    "square_sum": (ops.square_sum, lambda m: m.square().sum((0, 1))),
    "per_sample_square_sum": (ops.per_sample_square_sum, lambda m: m.square().sum(0)),
    "squared_norm": (ops.squared_norm, lambda m: m.square().unsqueeze(2).flatten(2).sum(2)),
    "batch_sum": (ops.batch_sum, lambda m: m.sum(1)),
    "dense": (ops.dense, lambda m: m),
    "gram": (ops.gram, lambda m: torch.einsum("vnp,wmp->vnwm", *[m.unsqueeze(2).flatten(2)] * 2)),
    "weighted_sum": (
        lambda p: ops.weighted_sum(p, oracle.draw((2, p.columns, p.samples), 12)),
        lambda m: torch.einsum("kvn,vn...->k...", oracle.draw((2, *m.shape[:2]), 12), m),
    ),
}

# Operations that other extensions may need in the same pass.
_PLANS: tuple[tuple[Any, ...], ...] = ((), (ops.batch_sum, ops.square_sum), (ops.dense,))


def operations(run: LayerRun) -> Entries:
    """Compare each operation with its definition, alone and with others, with little memory."""
    mat = run.columns()
    for name in run.parameters:
        formed = oracle.per_sample_product(run.jacobians[name], mat)
        for budget, needs in product((memory_budget(), 1), _PLANS):
            for what, (operation, definition) in _DEFINITIONS.items():
                with within_budget(budget), torch.no_grad():
                    form = run.call("param_product", name, mat)
                    form.needs = frozenset(needs)
                    found = operation(form)
                yield f"{what} of {name!r} within {budget} bytes", found, definition(formed)


def subsampled_call(run: LayerRun) -> Entries:
    """Check the products of ``subsample(view, [2, 0])``."""
    view = subsample(run.view, (2, 0))
    run.rule.check(view)
    return products(run, view=view)


def non_contiguous_columns(run: LayerRun) -> Entries:
    """Check columns with permuted strides, and columns that share memory; one, and many."""
    mat = run.columns()
    for strided in (mat.movedim(0, -1).contiguous().movedim(-1, 0), mat[:1].expand_as(mat)):
        yield from products(run, strided)
    for number in (1, 7):
        what = f"That is for V = {number} columns."
        agree(products(run, run.columns(number)), run.case.tolerances.float64, what)


def non_contiguous_input(run: LayerRun) -> Entries:
    """Check inputs that are every other entry of a larger tensor."""
    return products(run_layer(run.case, strided=True))


def keeps_dtype(run: LayerRun) -> None:
    """Check that every product of single-precision columns is in single precision."""
    single = run_layer(run.case, dtype=torch.float32)
    single.jacobians = {key: jacobian.float() for key, jacobian in run.jacobians.items()}
    agree(products(single), math.inf, "The columns are in torch.float32.")


def change(module: Module) -> None:
    """Change parameters, buffers, settings that are floats, and the mode of a module."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, Parameter(2 * parameter.detach() + 1))
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, 2 * buffer + 1)
        vars(part).update({k: 2 * v + 1 for k, v in vars(part).items() if type(v) is float})
    module.train(not module.training)


CHANGED = "The module was changed after the forward pass: read it from the view, and keep nothing."
_OVERWRITTEN = "The inputs were overwritten after the call: use view.input, not view.inputs."


def changed_since(run: LayerRun) -> None:
    """Change the module or its inputs after the forward pass: products must not change."""
    for where in (CHANGED, _OVERWRITTEN):
        run = run_layer(run.case)
        require(bool(run.jacobians), "Nothing is differentiated.")  # asked here, before the change
        for tensor in run.view.stored.inputs if where is _OVERWRITTEN else ():
            tensor.detach().zero_()
        if where is CHANGED:
            change(run.module)
        with suppress(OverwrittenInputError, UnsupportedError):
            agree(products(run), run.case.tolerances.float64, where)


AGAIN = "The module was called before, with other inputs or columns: keep nothing of that."


def called_again(run: LayerRun) -> None:
    """Call the module with other inputs, too, and use each call for several columns."""
    module, seeds = extended(run.case), (1, 9, 10)
    calls = [run_layer(run.case, run.case.arguments(seed=s), module=module) for s in seeds]
    for seed, call in enumerate((*calls, *calls)):
        agree(products(call, call.columns(seed=seed)), run.case.tolerances.float64, AGAIN)


def affine_form(run: LayerRun) -> Entries:
    """Check that ``W x + b`` in weight-sharing form is the output, rearranged."""
    rule, view = run.rule, run.view
    assert isinstance(rule, AffineRule)
    with torch.no_grad():
        inputs = rule.affine_input(view)[0 : view.batch_size]
        found = torch.einsum("goi,nsgi->nsgo", _matrix(run, "weight"), inputs)
        if getattr(run.module, "bias", None) is not None:
            found = found + _matrix(run, "bias")
        expected = rule.affine_output(view, view.output.unsqueeze(0))[0]
    yield "W x + b in affine form", found, expected


def _matrix(run: LayerRun, name: str) -> Tensor:
    """A weight as ``[G, O, I]``, or a bias as ``[G, O]``."""
    affine, numbers = _affine_product(run, name)
    theta = run.view.parameter(name)
    matrix = torch.empty_like(theta).flatten()
    matrix[affine.to_parameter(numbers).flatten()] = theta.flatten()
    return matrix.reshape(affine.sizes)


def _affine_product(run: LayerRun, name: str) -> tuple[AffineProduct, Tensor]:
    """The product of a parameter, and the flat indices of its entries in affine form."""
    assert isinstance(run.rule, AffineRule)
    affine = run.rule.param_product(run.view, name, run.columns())
    assert isinstance(affine, AffineProduct)
    return affine, torch.arange(affine.shape.numel()).reshape(affine.sizes)


def affine_weight(run: LayerRun) -> None:
    """Check that the arrangement of a parameter is a permutation, with any leading axes."""
    for name in run.parameters:
        affine, numbers = _affine_product(run, name)
        arranged = affine.to_parameter(numbers)
        once = arranged.shape == affine.shape and arranged.unique().numel() == numbers.numel()
        require(once, f"The arrangement of {name!r} is not a permutation of its entries.")
        several = affine.to_parameter(torch.stack([numbers, 2 * numbers])[None])
        same = torch.equal(several, torch.stack([arranged, 2 * arranged])[None])
        require(same, f"The arrangement of {name!r} differs if there are axes in front.")
