"""Rules of the helper modules against autograd."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
import torch
from handmade import assert_equal, check_adjoint, check_input, check_parameters, draw, make_view
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_layers.custom import (
    PadRule,
    PermuteRule,
    ReduceTupleRule,
    ScaleModuleRule,
    SlicingRule,
    SumModuleRule,
)
from backpack_layers.modules import (
    Pad,
    Parallel,
    Permute,
    ReduceTuple,
    ScaleModule,
    Slicing,
    SumModule,
)
from backpack_products.derivatives import jac_mat_prod

BATCHES = pytest.mark.parametrize("batch", [1, 3])


@BATCHES
def test_sum_module(batch: int) -> None:
    for count in (1, 2, 3):
        check_input(
            SumModuleRule(), make_view(SumModule(), *(draw(batch, 2, 4) for _ in range(count)))
        )


def test_sum_module_of_other_shapes() -> None:
    x, y = draw(2, 3), draw(1, 3)
    torch.testing.assert_close(SumModule()(x, y), x + y)
    with pytest.raises(ValueError, match="at least one"):
        SumModule()()


def test_parallel_merges() -> None:
    x = draw(3, 4)
    first, second = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    assert_equal(Parallel(first, second)(x), first(x) + second(x))
    named = Parallel(OrderedDict(a=first, b=second), merge_module=SumModule())
    assert_equal(named(x), first(x) + second(x))
    assert set(named.state_dict()) == {
        f"branch.{branch}.{name}" for branch in "ab" for name in ("weight", "bias")
    }


@BATCHES
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_scale_module(batch: int, shape: tuple[int, ...]) -> None:
    rule = ScaleModuleRule()
    view = make_view(ScaleModule(0.7, optimize=True).double(), draw(batch, *shape))
    check_input(rule, view)
    check_parameters(rule, view)
    check_adjoint(rule, view, partial(jac_mat_prod, rule))
    theta = draw(2, 1)
    product = rule.param_jac_mat_prod(view, "weight", theta)
    assert_equal(product, theta.reshape(2, *[1] * (1 + len(shape))) * view.input)


def test_scale_module_optimizes_on_request() -> None:
    fixed, trained = ScaleModule(2.0), ScaleModule(2.0, optimize=True)
    assert fixed.weight == 2.0
    assert not list(fixed.parameters())
    assert [p.shape for p in trained.parameters() if p.requires_grad] == [(1,)]


@BATCHES
@pytest.mark.parametrize(
    "module",
    [Permute(0, 3, 1, 2), Permute(0, -1, 2, 1), Permute(1, -1, init_transpose=True)],
    ids=["permute", "negative", "transpose"],
)
def test_permute(batch: int, module: Permute) -> None:
    rule = PermuteRule()
    view = make_view(module, draw(batch, 2, 3, 4))
    check_input(rule, view)
    check_adjoint(rule, view, partial(jac_mat_prod, rule))


@pytest.mark.parametrize("module", [Permute(-1, -3, init_transpose=True)])
def test_permute_refuses_the_batch_axis(module: Permute) -> None:
    """Where only the shape of the input tells."""
    with pytest.raises(UnsupportedError, match="moves the batch axis"):
        PermuteRule().check(make_view(module, draw(2, 2, 2)))


@BATCHES
@pytest.mark.parametrize(
    ("pad", "mode"),
    [
        ((1, 2), "constant"),
        ((1, -2, 0, 3), "constant"),
        ((1, 2), "reflect"),
        ((1, 2, 2, 1), "reflect"),
        ((1, 2, 0, 1), "replicate"),
        ((3, 1, 2, 0), "circular"),
        ((0, 1, 0, 2, 0, 0, 0, 0), "constant"),
    ],
)
def test_pad(batch: int, pad: tuple[int, ...], mode: str) -> None:
    rule = PadRule()
    features = (2, 5) if len(pad) == 2 else (2, 4, 5)
    view = make_view(Pad(pad, mode), draw(batch, *features))
    check_input(rule, view)
    check_adjoint(rule, view, partial(jac_mat_prod, rule))


def test_pad_value_and_batch_axis() -> None:
    assert float(Pad((1, 1), value=3.0)(draw(2, 2))[0, 0]) == 3.0
    with pytest.raises(UnsupportedError, match="pads the batch axis"):
        PadRule().check(make_view(Pad((0, 0, 1, 0)), draw(2, 3)))


INDICES = {
    "full": slice(None),
    "last": (slice(None), -1),
    "range": (slice(None), slice(1, 3), slice(None, None, 2)),
    "ellipsis": (Ellipsis, 0),
    "only ellipsis": Ellipsis,
    "empty": (),
    "new axis": (slice(None), None, 2),
    "array with repeats": (slice(None), torch.tensor([0, 2, 2])),
    "list": (slice(None), slice(None), [1, 1, 0]),
    "two arrays": (slice(None), torch.tensor([0, 2]), torch.tensor([1, 1])),
    "mask": (slice(None), torch.tensor([[True, False], [False, True], [True, True]])),
    "late ellipsis": (slice(None), Ellipsis, 1),
    "bounds": (slice(0, 4), 1),
}


@BATCHES
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_slicing(batch: int, index: object) -> None:
    rule = SlicingRule()
    view = make_view(Slicing(index), draw(batch, 3, 2))
    check_input(rule, view)
    check_adjoint(rule, view, partial(jac_mat_prod, rule))


@pytest.mark.parametrize(
    "index",
    [
        0,
        slice(1, None),
        slice(None, None, 2),
        None,
        True,
        torch.tensor([1, 0]),
        (Ellipsis, slice(None), 0, 0),
        (slice(None), torch.tensor([0, 1]), slice(None), torch.tensor([0, 1])),
        (Ellipsis, torch.ones(2, 2, 2, dtype=torch.bool)),
    ],
    ids=str,
)
def test_slicing_refuses_the_batch_axis(index: object) -> None:
    axes = (
        4 if isinstance(index, tuple) and torch.is_tensor(index[-1]) and index[-1].dim() == 1 else 3
    )
    with pytest.raises(UnsupportedError, match="touches the batch axis"):
        SlicingRule().check(make_view(Slicing(index), draw(*[2] * axes)))


@pytest.mark.parametrize(("index", "slot"), [(0, 0), (1, 1), (-1, 1)])
def test_reduce_tuple(index: int, slot: int) -> None:
    rule = ReduceTupleRule()
    view = make_view(ReduceTuple(index), (draw(3, 2), draw(3, 4)))
    check_input(rule, view)
    assert [p is not None for p in rule.jac_t_mat_prod(view, draw(2, *view.output_shape))] == [
        position == slot for position in range(2)
    ]


def test_reduce_tuple_of_nested_tuples() -> None:
    nested = (draw(3, 2), (draw(1, 3, 2), draw(1, 3, 2)))
    view = make_view(ReduceTuple(1), nested, index=1)
    mat = draw(2, 1, 3, 2)
    assert ReduceTupleRule().jac_t_mat_prod(view, mat) == (None, None, mat)
    check_input(ReduceTupleRule(), view)
