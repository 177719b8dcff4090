"""However numbers of a tensor get to Python or back: replayed right, noticed, or refused."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backpack_capture.code import AnotherAnswer, code_of
from backpack_capture.recorder import Recorder
from backpack_capture.tidying import tidy
from backpack_capture.unseen import seen_by
from tests.devices import rng_state, set_rng_state

Case = Callable[[Tensor], Tensor]


def row(x: Tensor) -> Tensor:
    """A whole number that depends on values."""
    return (x[0] * 2).long()


def put(x: Tensor, where: Any, value: Any) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        drawn = torch.rand(3)
    return x * drawn * torch.rand(3)


RIGHT: dict[str, Case] = {
    "tensor of a tensor": lambda x: torch.as_tensor(x) * 2,
    "numbers": lambda x: x * torch.tensor([1.0, 2.0, 3.0]),
    "numbers of numpy": lambda x: x * torch.tensor(np.array([1.0, 2.0, 3.0])),
    "new numbers": lambda x: x * x.new_tensor([1.0, 2.0, 3.0]),
    "fill": lambda x: torch.zeros(3).fill_(x[0]),
    "assigned": lambda x: put(x, 0, x[1]),
    "masked": lambda x: x.masked_fill(x > 0.5, x[0]),
    "clamp": lambda x: x.clamp(x[0], x[1]),
    "index": lambda x: x[row(x).reshape(1)] * 1,
    "sort": lambda x: x.sort()[0],
    "unique": lambda x: torch.unique(x),
    "membership": lambda x: x * (2 if x[0] in x[1:] else 1),
    "data": lambda x: x.data * 2,
    "other dtype": lambda x: x.view(torch.int64) * 1,
    "complex": lambda x: torch.fft.fft(x).real,
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "distribution": lambda x: torch.distributions.Gamma(x, 1.0).rsample(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "permutation": lambda x: x[torch.randperm(3)],
    "packed": lambda x: (
        torch.nn.utils.rnn.pack_padded_sequence(
            x[None, :, None], torch.tensor([3], device="cpu"), batch_first=True
        ).data
    ),
    "vmap": lambda x: torch.vmap(lambda v: v * 2)(x),
    "transform": lambda x: torch.func.grad(lambda v: (v**2).sum())(x),
    "solve": lambda x: torch.linalg.solve(torch.eye(3) + x[None].T @ x[None], x),
}
READ: dict[str, Case] = {
    "item": lambda x: x * x[0].item(),
    "list": lambda x: x * x.tolist()[0],
    "tensor of an item": lambda x: x * torch.tensor([x[0].item(), 2.0, 3.0]),
    "text": lambda x: x * float(f"{x[0]:.4f}"),
    "math": lambda x: x * math.sqrt(x[0]),
    "maximum": lambda x: max(x) * 1,
    "slice": lambda x: x[: row(x) + 1] * 1,
    "range": lambda x: sum(x * 1 for _ in range(row(x) + 1)),
    "size": lambda x: torch.zeros(row(x) + 1),
    "repeat": lambda x: x.repeat(row(x) + 1),
    "roll": lambda x: x.roll(int(row(x))),
    "narrow": lambda x: x.narrow(0, row(x), 1) * 1,
    "mask": lambda x: x[x > 0.5],
    "masked select": lambda x: x.masked_select(x > 0.5),
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "repeated": lambda x: x.repeat_interleave((x * 3).long()),
    "counts": lambda x: torch.bincount((x * 4).long()),
    "one hot": lambda x: F.one_hot((x * 4).long()),
    "alpha": lambda x: torch.add(x, x, alpha=x[0]),
    "probability": lambda x: F.dropout(x, float(x[0])),
}
REFUSED: dict[str, Case] = {
    "list of tensors": lambda x: torch.tensor([x[0], x[1]]) * 2,
    "nested list": lambda x: torch.as_tensor([[x[0]], [x[1]]]) * 2,
    "asarray": lambda x: torch.asarray([x[0], x[1]]) * 2,
    "new tensor": lambda x: x.new_tensor([x[0], 2.0]) * 2,
    "old constructor": lambda x: torch.Tensor([x[0], 1.0]) * 2,
    "constructor of a type": lambda x: x[torch.LongTensor([row(x)])] * 1,
    "list that is assigned": lambda x: put(x, slice(0, 2), torch.Tensor([x[1], x[0]])),
    "from numpy": lambda x: x * torch.from_numpy(np.array([1.0, 2.0, 3.0])),
    "array": lambda x: torch.tensor(np.array(x)) * 2,
    "deep copy": lambda x: copy.deepcopy(x) * 2,
    "repr": lambda x: x * float(repr(x[0]).strip("tensor()")),
    "text of all": lambda x: x * float(str(x)[8:14]),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)) * 2,
    "memory": lambda x: x * float(x.untyped_storage()[0]),
    "old memory": lambda x: x * float(x.storage()[0]),
    "forked": forked,
    "written aside": lambda x: F.ctc_loss(
        torch.stack([x, x, x])[:, None].log_softmax(2), torch.tensor([[1]]), (3,), (1,)
    ),
}


def outcome(function: Case) -> str:
    """What becomes of a function that is recorded on one tensor and replayed on another."""
    x, other = torch.tensor([0.21, 0.72, 0.33]), torch.tensor([0.91, 0.12, 0.63])
    recorder = Recorder([x], [], lambda tensor: False)
    with torch.no_grad(), seen_by(recorder), recorder:
        out = function(x)
    number = None if recorder.refusal else recorder.number_of(out)
    if recorder.refusal is None and not recorder.is_undisturbed():
        recorder.refusal = "draws"
    if recorder.refusal is not None or number is None:
        return "refused"
    recorder.program.outs = [number]
    run = code_of(tidy(recorder.program), {}).run
    for data in (x, other):
        state = rng_state()
        right = function(data)
        set_rng_state(state)
        try:
            (found,) = run(data)
        except AnotherAnswer:
            return "read"
        if found.shape != right.shape or not torch.equal(found, right):
            return f"wrong: {found}, {right}"
    return "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    assert outcome(RIGHT[name]) == "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_noticed(name: str) -> None:
    assert outcome(READ[name]) == "read"


@pytest.mark.host("numpy, text and forks are of there")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert outcome(REFUSED[name]) == "refused"


def test_methods_are_put_back() -> None:
    before = {name: vars(Tensor).get(name) for name in ("tolist", "numpy", "data_ptr", "__array__")}
    recorder = Recorder([], [], lambda tensor: False)
    with pytest.raises(KeyError), seen_by(recorder):
        raise KeyError
    assert before == {name: vars(Tensor).get(name) for name in before}
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_what_is_made_of_nothing_is_no_assumption() -> None:
    x = torch.rand(3)
    recorder = Recorder([x], [], lambda tensor: False)
    with seen_by(recorder), recorder:
        order = torch.arange(3).flip(0)
        assert order.tolist() == [2, 1, 0]
        assert not torch.equal(order, torch.arange(3))
        assert not recorder.program.assumptions
        counts = [0]
        for read in (
            lambda: bool((x * order).sum() > 0),  # of what is given
            lambda: order[:1].copy_(x[:1]) is None or order.tolist(),  # which was overwritten
            lambda: torch.rand(2).tolist(),  # drawn
        ):
            read()
            counts.append(len(recorder.program.assumptions))
    assert counts == sorted({*counts})


def test_numbers_in_the_place_of_tensors() -> None:
    """Torch hands numbers that autograd has saved to operations that take tensors alone."""
    aten, recorder = torch.ops.aten, Recorder((), (), lambda tensor: False)
    assert recorder.run(aten._local_scalar_dense.default, (), (0.5,), {}) == 0.5
    assert recorder.refusal is None
    found = recorder.run(aten.expand.default, (), (0.5, [2]), {})
    assert found.tolist() == [0.5, 0.5]
    assert "needs a number of autograd's as a tensor" in str(recorder.refusal)
