"""A tidied program computes the same, and is shorter; what is overwritten or drawn stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backpack_capture.code import AnotherAnswer, code_of
from backpack_capture.program import Program
from backpack_capture.recorder import Recorder
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by
from backpack_capture.views import with_direct_views as direct
from tests.devices import rng_state, set_rng_state

WEIGHT = torch.rand(3, 3)
Function = Callable[[Tensor], Sequence[Tensor]]


def recorded(function: Function, x: Tensor) -> Program:
    recorder = Recorder([x], [WEIGHT], lambda tensor: False)
    with torch.no_grad(), seen_by(recorder), recorder:
        outs = function(x)
    assert recorder.refusal is None, recorder.refusal
    recorder.program.outs = [recorder.number_of(out) for out in outs]
    return recorder.program


def check(function: Function, size: int | None = None) -> str:
    """Recorded on one tensor, right on others; of so many operations."""
    torch.manual_seed(0)
    program = recorded(function, torch.rand(3, 3))
    before = len(program.operations)
    code = code_of(direct(tidy(program)), {id(WEIGHT): "weight"})
    assert size is None or len(program.operations) == size, code.text
    assert len(program.operations) <= before
    for _ in range(2):
        x = torch.randn(3, 3)
        state, memory, weight = rng_state(), x.clone(), WEIGHT.clone()
        right = [t.clone() for t in function(x)]
        after, drawn, kept = x.clone(), rng_state(), WEIGHT.clone()
        set_rng_state(state)
        x.copy_(memory), WEIGHT.copy_(weight)
        for _ in range(2):  # nothing of the first run is left in the second
            set_rng_state(state)
            x.copy_(memory), WEIGHT.copy_(weight)
            found = code.run(x)
            assert all(map(torch.equal, found, right))
            assert [t.dtype for t in found] == [t.dtype for t in right]
        assert torch.equal(x, after)
        assert torch.equal(WEIGHT, kept)
        assert torch.equal(rng_state(), drawn)
        for result in found:
            assert result is not WEIGHT
    return code.text


def test_dead_and_detached() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        x.exp().log()
        return [x.detach().sin().detach().cos().detach()]

    assert "sin" in check(function, 2)


def test_equal_values_are_computed_once() -> None:
    check(lambda x: [(x * 2).sin() + (x * 2).sin().t()], 4)


def test_numbers_of_other_types_differ() -> None:
    check(lambda x: [x.int().pow(2) + 0, x.int().pow(2.0) + 0])


def test_equal_results_have_memory_of_their_own() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        return [x * 2, x * 2]

    program = recorded(function, torch.rand(3, 3))
    first, second = code_of(direct(tidy(program)), {}).run(torch.rand(3, 3))
    assert first.data_ptr() != second.data_ptr()


def test_draws_are_not_merged_nor_left_out() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        torch.rand(2)
        return [torch.bernoulli(x.sigmoid()) + torch.bernoulli(x.sigmoid()), torch.rand(3)]

    text = check(function)
    assert text.count("rand") == 2
    assert text.count("bernoulli") == 2


def test_overwritten_values() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        first = x * 2
        second = first.t()
        second.add_(1)  # of which ``first`` is seen
        third = x * 2
        third[0].mul_(3)
        return [first, third, x * 2]

    check(function)


def test_what_is_read_before_and_after_a_change() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        before = x.sin() + 0
        x.add_(1)
        return [before, x.sin() + 0]

    check(function, 5)


def test_a_view_without_a_name() -> None:
    """``_unsafe_view`` says that it makes a new tensor."""

    def function(x: Tensor) -> Sequence[Tensor]:
        first = torch.ops.aten._unsafe_view(x * 2, [9])
        other = x * 2
        first.add_(1)
        return [first, other]

    check(function)


def test_what_is_from_outside_is_written_to() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        WEIGHT.mul_(0.5).add_(x)
        return [x.sum()]

    check(function)


def test_a_parameter_is_no_result_itself() -> None:
    check(lambda x: [WEIGHT.detach(), (x + 1).detach()])


def test_constants_are_computed_once() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        numbers = torch.arange(9).reshape(3, 3).t()
        assert torch.equal(numbers, numbers.clone())
        return [x + numbers * torch.tensor(2.0) + torch.ones_like(x)]

    text = check(function, 2)
    assert "equal" not in text


def test_constants_that_are_overwritten_or_returned() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        total = torch.zeros(3)
        total.add_(x[0])
        given = torch.tensor([1.0, 2.0, 3.0])
        given[0] += x[0, 0]
        like = torch.zeros_like(x)
        like[0] = 3
        return [total, given, torch.ones(3), torch.tensor(3.0), like, torch.ones_like(x)]

    check(function)


def test_a_constant_result_is_new_each_time() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        return [torch.tensor([1.0, 2.0]), torch.ones_like(x), torch.zeros(2)]

    run = code_of(direct(tidy(recorded(function, torch.rand(3, 3)))), {}).run
    for result in run(torch.rand(3, 3)):
        result.fill_(7)
    assert not any((result == 7).any() for result in run(torch.rand(3, 3)))


def test_several_results_of_one_operation() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        values, where = x.max(0)
        first, _, last = x.unbind()
        return [values, where, first + last, *torch.native_layer_norm(x, [3], None, None, 1e-5)]

    check(function)


def test_an_output_that_is_given() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        out = torch.empty(3, 3)
        torch.mul(x, 2, out=out)
        torch.add(out, 1, out=out)
        return [out]

    check(function)


def test_numbers_in_the_source() -> None:
    inf = float("inf")
    check(lambda x: [x.clamp(-inf, inf), x.nan_to_num(float("nan"), inf, -inf), x.to(torch.int32)])


@pytest.mark.parametrize("read", ["item", "tolist", "nan"])
def test_a_read_is_compared(read: str) -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        value = x[0, 0] * float("nan") if read == "nan" else x[0, 0]
        value.tolist() if read == "tolist" else value.item()
        return [x + 1]

    x = torch.rand(3, 3)
    run = code_of(direct(tidy(recorded(function, x))), {}).run
    if read != "tolist":
        assert torch.equal(run(x)[0], x + 1)
    if read == "item":
        with pytest.raises(AnotherAnswer):
            run(x + 1)


def test_views_of_another_kind_stay() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        y, z = x @ x, torch.complex(x, x + 1)
        return y.view(torch.int64) + 1, torch.view_as_real(z) * 2, z.conj() + z, z.conj().imag + 1

    check(function)


def test_views_of_views_are_views_of_the_memory() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        y = x @ x
        column = y.unsqueeze(0).reshape(1, 3, 1, 3).squeeze(2).transpose(1, 2)[0, 1:]
        y.mul_(2)  # seen by all of them
        return column + 1, y.view(9).view(3, 3), y.t().t().reshape(9), y

    text = check(function)
    assert "unsqueeze" not in text
    assert text.count("as_strided") == 1


def test_shapes_that_change_in_place() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        total = (x * 2).sum(0, keepdim=True)
        total.squeeze_(0)
        return [total.unsqueeze(0) + 1, total.unsqueeze(0).t() * 2]

    check(function)


def test_strides_that_change_in_place() -> None:
    """As torch does after it has averaged the pixels of an image."""

    def function(x: Tensor) -> Sequence[Tensor]:
        total = x * 2
        before = total[1:]
        total.as_strided_((3, 3), (1, 3))
        view, moved = total[1:], (x * 3).t_()
        total.mul_(2)
        return [view + 1, before * 2, total.view(3, 3, 1) - 1, moved[1:] * 2, total.t(), total]

    check(function)


def test_copies_of_views_are_copies() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        y = x * 2
        copy = y.view(1, 3, 1, 3).clone()
        other = y.t().unsqueeze(0).clone()
        return [copy.view(3, 3), copy.view(1, 9).sin(), other.add_(1), y]

    text = check(function)
    assert text.count("view") == 1, text


def test_views_of_weights() -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        turned = WEIGHT.t()
        return [x * turned, x * turned.t(), WEIGHT.view(9).view(3, 3), WEIGHT[1:].t()[:, 1]]

    text = check(function)
    assert text.count("torch.t(") == 2, text
