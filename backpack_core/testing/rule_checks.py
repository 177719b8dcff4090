"""Checks of a rule's products against dense Jacobians by autograd.

A check takes an execution. It raises, or yields what it wants compared: what, found, expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.record.view import View
from backpack_core.testing import oracle
from backpack_core.testing.compare import CheckFailure, close, require, untouched
from backpack_core.testing.execution import Execution, draw, execute
from backpack_core.tuning import memory_budget, set_memory_budget
from backpack_products import operations as ops
from backpack_products.affine import AffineProduct
from backpack_products.parametric import AffineRule
from backpack_products.product import SampleProduct

# What a parametrised weight is computed from: a rule names the weight.
IS_COMPUTED = re.compile(r"(^|\.)parametrizations\.")

Entries = Iterator[tuple[str, Tensor | None, Tensor]]


def agree(entries: Entries | None, allowed: float) -> None:
    """Compare everything that a check yields. ``None`` stands for zero."""
    for what, found, expected in entries or ():
        if found is None:
            require(not bool(expected.any()), f"{what}: None, though the output depends on it.")
        else:
            close(found, expected, what, allowed)


def calls(
    run: Execution, mat: Tensor, view: View | None = None, only: str = ""
) -> Iterator[tuple[int | str, str, Tensor | None]]:
    """What ``jac_t_mat_prod`` and ``param_jac_t_mat_prod`` return: which input, name, and value."""
    if not run.rule.transparent and only != "parameters":
        found = dict(enumerate(run.call("jac_t_mat_prod", mat, view=view)))
        yield from ((slot, f"jac_t_mat_prod, input {slot}", found.get(slot)) for slot in run.live)
    for name in run.parameters if only != "inputs" else ():
        value = run.call("param_jac_t_mat_prod", name, mat, view=view)
        yield name, f"param_jac_t_mat_prod of {name!r}", value


def products(run: Execution, mat: Tensor, view: View | None = None, only: str = "") -> Entries:
    """Transposed Jacobians in inputs and parameters; those of samples, where the view has some."""
    chosen = slice(None) if view is None or view.indices is None else list(view.indices)
    for key, what, found in calls(run, mat[:, chosen], view, only):
        if isinstance(key, int):
            expected = oracle.transposed_product(run.jacobians[key], mat)
        else:
            expected = oracle.per_sample_product(run.jacobians[key], mat, run.batch_axis)
        yield what, found, expected[:, chosen]


def accepts(run: Execution) -> None:
    """``params`` has every parameter; ``check()`` passes; nothing is kept, changed, or drawn."""
    run = execute(run.case)
    require_all_parameters(run)
    mat, stored = run.columns(), run.view.stored
    given = [mat, *stored.inputs, *stored.outputs, *run.module.parameters()]
    with untouched(run.rule, run.module, *given):
        run.rule.check(run.view)
        list(calls(run, mat))


def require_all_parameters(run: Execution) -> None:
    """Raise where a rule stands for a module, and not for a parameter that the module trains."""
    covered = run.rule.parameter_names(run.module)
    left_out = [
        repr(name)
        for name, theta in run.module.named_parameters()
        if theta.requires_grad and name not in covered and not IS_COMPUTED.search(name)
    ]
    require(
        run.rule.transparent or not left_out,
        f"params leaves out {', '.join(left_out)}, which a {type(run.module).__name__} has: add it "
        "to params, with its product.",
    )


def overwritten_input(run: Execution) -> None:
    """The stored input is no longer what the layer received."""
    try:
        run.call("jac_t_mat_prod", run.columns())
    except OverwrittenInputError:
        return
    require(False, "overwrites_input is declared, but the rule does not raise on it.")


def jac_t_mat_prod(run: Execution) -> Entries:
    """For every input, against ``Jᵀ mat``."""
    return products(run, run.columns(), only="inputs")


def param_jac_t_mat_prod(run: Execution) -> Entries:
    """For every covered parameter, sample by sample."""
    return products(run, run.columns(), only="parameters")


def jac_mat_prod(run: Execution) -> Entries:
    """Against ``J mat`` for the first input. With ``jac_t_mat_prod``, they are adjoint."""
    mat = run.input_columns()
    expected = oracle.product(run.jacobians[0], mat)
    yield "jac_mat_prod", run.call("jac_mat_prod", mat), expected


def param_jac_mat_prod(run: Execution) -> Entries:
    """For every covered parameter."""
    for name, theta in run.parameters.items():
        mat = draw((2, *theta.shape), 5)
        expected = oracle.product(run.jacobians[name], mat)
        yield (
            f"param_jac_mat_prod of {name!r}",
            run.call("param_jac_mat_prod", name, mat),
            expected,
        )


# Each operation as a function of a product and of ``M`` itself, formed by the oracle.
_DEFINITIONS: dict[str, tuple[Callable[[SampleProduct], Tensor], Callable[[Tensor], Tensor]]] = {
    "square_sum": (ops.square_sum, lambda m: m.square().sum((0, 1))),
    "per_sample_square_sum": (ops.per_sample_square_sum, lambda m: m.square().sum(0)),
    "squared_norm": (ops.squared_norm, lambda m: m.flatten(2).square().sum(2)),
    "batch_sum": (ops.batch_sum, lambda m: m.sum(1)),
    "dense": (ops.dense, lambda m: m),
    "gram": (ops.gram, lambda m: torch.einsum("vnp,wmp->vnwm", m.flatten(2), m.flatten(2))),
    "weighted_sum": (
        lambda p: ops.weighted_sum(p, draw((2, p.columns, p.samples), 12)),
        lambda m: torch.einsum("kvn,vn...->k...", draw((2, *m.shape[:2]), 12), m),
    ),
}

# What other extensions may need in the same pass.
_PLANS: tuple[tuple[Any, ...], ...] = ((), (ops.batch_sum, ops.square_sum), (ops.dense,))


def operations(run: Execution) -> Entries:
    """Each operation against its definition by ``M``, alone and together, with little memory."""
    mat = run.columns()
    for name in run.parameters:
        formed = oracle.per_sample_product(run.jacobians[name], mat, run.batch_axis)
        for budget, needs in product((memory_budget(), 1), _PLANS):
            for what, (operation, definition) in _DEFINITIONS.items():
                with _budget(budget), torch.no_grad():
                    given = run.call("param_product", name, mat)
                    given.needs = frozenset(needs)
                    found = operation(given)
                yield f"{what} of {name!r} within {budget} bytes", found, definition(formed)


@contextmanager
def _budget(size: int) -> Iterator[None]:
    before = memory_budget()
    set_memory_budget(size)
    try:
        yield
    finally:
        set_memory_budget(before)


def subsampled_call(run: Execution) -> Entries:
    """Products of ``view.subsample([2, 0])``."""
    view = run.view.subsample((2, 0))
    run.rule.check(view)
    return products(run, run.columns(), view)


def non_contiguous_columns(run: Execution) -> Entries:
    """Columns with strides in another order, and columns that share memory."""
    mat = run.columns()
    for strided in (mat.movedim(0, -1).contiguous().movedim(-1, 0), mat[:1].expand_as(mat)):
        yield from products(run, strided)


def strided(tensor: Tensor) -> Tensor:
    """Every other entry of a larger tensor."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2] if tensor.dim() else tensor


def non_contiguous_input(run: Execution) -> Entries:
    """Inputs that are every other entry of a larger tensor."""
    given = run.case.arguments().map(strided)
    left = any(tensor.numel() > 1 and tensor.is_contiguous() for tensor in given.tensors())
    require(not left, "The kit could not make the inputs non-contiguous.")
    run = execute(run.case, given)
    return products(run, run.columns())


def keeps_dtype(run: Execution) -> None:
    """In single precision, what every product returns is in single precision."""
    run = execute(run.case, dtype=torch.float32)
    mat = run.columns()
    for _, what, found in calls(run, mat):
        dtype = mat.dtype if found is None else found.dtype
        require(dtype == mat.dtype, f"{what}: {dtype}, of columns in {mat.dtype}.")


def changed_since(run: Execution) -> None:
    """Parameters and mode change after the forward pass: products must be those of the forward."""
    run = execute(run.case)
    require(bool(run.jacobians), "Nothing is differentiated.")  # from before the change, too
    for part in run.module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, Parameter(2 * parameter.detach() + 1))
    run.module.train(not run.module.training)
    try:
        agree(products(run, run.columns()), run.allowed)
    except (OverwrittenInputError, UnsupportedError):
        return
    except CheckFailure as failure:
        raise CheckFailure(
            f"{failure} The module has other parameters, and another mode, than in the forward "
            "pass: read what the view shows, which is of then, and keep nothing."
        ) from None


def affine_form(run: Execution) -> Entries:
    """``W x + b`` in weight-sharing form is the output, rearranged."""
    rule, view = run.rule, run.view
    assert isinstance(rule, AffineRule)
    with torch.no_grad():
        inputs = rule.affine_input(view)[0 : view.batch_size]
        found = torch.einsum("goi,nsgi->nsgo", _matrix(run, "weight"), inputs)
        if "bias" in run.parameters:
            found = found + _matrix(run, "bias")
        expected = rule.affine_output(view, view.output.unsqueeze(0))[0]
    yield "W x + b in affine form", found, expected


def _matrix(run: Execution, name: str) -> Tensor:
    """A parameter as ``[G, O, I]``, or a bias as ``[G, O]``."""
    given, numbers = _affine_product(run, name)
    theta = run.parameters[name].detach()
    matrix = torch.empty_like(theta).flatten()
    matrix[given.to_parameter(numbers).flatten()] = theta.flatten()
    return matrix.reshape(given.sizes)


def _affine_product(run: Execution, name: str) -> tuple[AffineProduct, Tensor]:
    """A parameter's product, and the numbers of its entries in affine form."""
    assert isinstance(run.rule, AffineRule)
    given = run.rule.param_product(run.view, name, run.columns())
    assert isinstance(given, AffineProduct)
    return given, torch.arange(given.shape.numel()).reshape(given.sizes)


def affine_weight(run: Execution) -> None:
    """The arrangement of a parameter uses every entry once, with any leading axes."""
    for name in run.parameters:
        given, numbers = _affine_product(run, name)
        arranged = given.to_parameter(numbers)
        once = arranged.shape == given.shape and arranged.unique().numel() == numbers.numel()
        require(once, f"The arrangement of {name!r} is not a permutation of its entries.")
        several = given.to_parameter(torch.stack([numbers, 2 * numbers])[None])
        same = torch.equal(several, torch.stack([arranged, 2 * arranged])[None])
        require(same, f"The arrangement of {name!r} changes with axes in front.")
