"""Models that receive one tensor for each sample, of several sizes: in a list, or as arguments."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle
from tests.cases import Net
from tests.nets import bags

D, H, C = 3, 4, 3
Items = list[Tensor]
# Some item is as long as there are items, or all are, or the first has one row, or none of these.
SIZES = [(2, 3), (3, 1), (1, 3), (2, 2), (1, 1), (3, 2, 4), (3, 3, 2), (3, 3, 3), (2, 2, 4), (4, 5)]


def _written(h: Tensor) -> Tensor:
    h[:, :1] *= -2.0
    h[:, 1:] = h[:, 1:].sigmoid()
    h[:, 2:].relu_()
    return h


# From hidden states of all rows to one row for each item.
POOLS: dict[str, Callable[[Tensor, Items], Tensor]] = {
    **bags.POOLS,
    "written": lambda h, items: _written(bags.POOLS["sums"](h, items) * 0.5),
    "maxima": lambda h, items: torch.stack([k.amax(0) for k in bags.split(h, items)]),
}


def _pooled(net: Any, items: Items, joined: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(joined))
    return net.b(POOLS[net.pool](hidden, items))  # type: ignore[no-any-return]


def _padded(net: Any, items: Items, batch_first: bool = True) -> Tensor:
    x = pad_sequence(items, batch_first)
    mask = pad_sequence([item.new_ones(len(item), 1) for item in items], batch_first)
    return net.b((torch.tanh(net.a(x)) * mask).sum(int(batch_first)))  # type: ignore[no-any-return]


def _one_by_one(net: Any, items: Items) -> Tensor:
    hidden = [torch.tanh(net.a(item)).sum(0, keepdim=True) for item in items]
    return net.b(torch.cat(hidden))  # type: ignore[no-any-return]


def _last_states(net: Any, items: Items) -> Tensor:
    return net.b(net.r(pack_sequence(items, enforce_sorted=False))[1][0])  # type: ignore[no-any-return]


# What models do, with what they receive of the items: all of these at once, or one.
MODELS: dict[str, Callable[..., Tensor]] = {
    "joined": lambda net, items: _pooled(net, items, torch.cat(items)),
    "arguments": lambda net, *items: _pooled(net, [*items], torch.cat(items)),
    "dictionary": lambda net, items: _pooled(net, [*items.values()], torch.cat([*items.values()])),
    "scaled": lambda net, items: _pooled(net, items, torch.cat(items) / 2),
    "centred": lambda net, items: _pooled(net, items, torch.cat([k - k.mean(0) for k in items])),
    "looked up": lambda net, items: _pooled(net, items, net.e(torch.cat(items))),
    "beside one for each": lambda net, items, x: _pooled(net, items, torch.cat(items)) + net.c(x),
    "beside an index": lambda net, items: _pooled(
        net, items[:-1], torch.cat(items[:-1])[:, items[-1]]
    ),
    "two lists": lambda net, items, ids: _pooled(
        net, items, torch.cat(items) + net.e(torch.cat(ids))
    ),
    "beside what is not used": lambda net, items, unused: _pooled(net, items, torch.cat(items) / 2),
    "list of pairs": lambda net, pairs: _pooled(
        net,
        [pair["x"] for pair in pairs],
        torch.cat([pair["x"] for pair in pairs]) + net.e(torch.cat([pair["t"] for pair in pairs])),
    ),
    "padded": _padded,
    "padded, time first": lambda net, items: _padded(net, items, batch_first=False),
    "one by one": _one_by_one,
    "packed": _last_states,
}


def _given(way: str, sizes: tuple[int, ...]) -> tuple[tuple[Any, ...], Callable[[int], Any]]:
    """What a model receives, and what it would of one sample."""
    items = [torch.randn(size, D).double() for size in sizes]
    ids, beside = [torch.randint(7, (size,)) for size in sizes], torch.randn(len(sizes), 2).double()
    index, names = torch.tensor([2, 0, 1]), "abcdef"
    if way == "arguments":
        return (*items,), lambda n: (items[n],)
    if way == "dictionary":
        named = dict(zip(names, items, strict=False))
        return (named,), lambda n: ({names[n]: items[n]},)
    if way == "looked up":
        return (ids,), lambda n: ([ids[n]],)
    if way == "beside one for each":
        return (items, beside), lambda n: ([items[n]], beside[n : n + 1])
    if way == "beside an index":
        return ([*items, index],), lambda n: ([items[n], index],)
    if way == "two lists":
        return (items, ids), lambda n: ([items[n]], [ids[n]])
    if way == "beside what is not used":
        unused = [torch.randn(1 + n % 2, D) for n in range(len(sizes))]
        return (items, unused), lambda n: ([items[n]], unused[n : n + 1])
    if way == "list of pairs":
        pairs = [{"x": x, "t": t} for x, t in zip(items, ids, strict=True)]
        return (pairs,), lambda n: ([pairs[n]],)
    return (items,), lambda n: ([items[n]],)


def _net(way: str, pool: str = "sums") -> Net:
    layers = {"a": nn.Linear(D, H), "b": nn.Linear(H, C)}
    layers |= {"c": nn.Linear(2, C)} if way == "beside one for each" else {}
    layers |= (
        {"e": nn.Embedding(7, D)} if way in ("looked up", "two lists", "list of pairs") else {}
    )
    if way == "packed":
        layers = {"r": nn.GRU(D, H), "b": layers["b"]}
    net: Any = Net(MODELS[way], **layers).double()
    net.pool = pool
    return net  # type: ignore[no-any-return]


LOSSES = ("module", "function", "one for each")


def _check(way: str, pool: str, sizes: tuple[int, ...], loss: str) -> None:
    model, (given, of_one) = _net(way, pool), _given(way, sizes)
    parameters, y = [*model.parameters()], torch.randint(C, (len(sizes),))
    logits = [model(*of_one(n)) for n in range(len(sizes))]
    extend(model)
    lossfunc = F.cross_entropy if loss == "function" else extend(nn.CrossEntropyLoss())
    extensions = [BatchGrad(), SumGradSquared()]
    extensions += [] if loss == "function" else [DiagGGNExact(), BatchDiagGGNExact()]
    with backpack(*extensions, check="always"):
        out = model(*given)
        if loss == "one for each":
            terms = [lossfunc(out[n : n + 1], y[n : n + 1]) for n in range(len(y))]
            torch.stack(terms).mean().backward()
        else:
            lossfunc(out, y).backward()
    for parameter in parameters:
        gradients, diagonals = [], []
        for z, target in zip(logits, y, strict=True):
            p = z.softmax(1).detach()[0]
            rows = [torch.autograd.grad(k, parameter, retain_graph=True)[0] for k in z[0]]
            jacobian, weights = torch.stack(rows), (p - F.one_hot(target, C)) / len(y)
            hessian = (p.diag() - p.outer(p)) / len(y)
            gradients.append(torch.einsum("c,c...->...", weights, jacobian))
            diagonals.append(torch.einsum("c...,cd,d...->...", jacobian, hessian, jacobian))
        expected, found = torch.stack(gradients), vars(parameter)
        oracle.assert_close(found["grad_batch"], expected)
        oracle.assert_close(found["sum_grad_squared"], expected.square().sum(0))
        if loss != "function":
            oracle.assert_close(found["diag_ggn_exact_batch"], torch.stack(diagonals))
            oracle.assert_close(found["diag_ggn_exact"], torch.stack(diagonals).sum(0))


@pytest.mark.grid(8)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pool", POOLS)
def test_one_tensor_for_each_sample(pool: str, loss: str, sizes: tuple[int, ...]) -> None:
    _check("joined", pool, sizes, loss)


@pytest.mark.grid(8)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loss", LOSSES[:2])
@pytest.mark.parametrize("way", [way for way in MODELS if way not in ("joined", "packed")])
def test_what_models_do_with_them(way: str, loss: str, sizes: tuple[int, ...]) -> None:
    _check(way, "sums", sizes, loss)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("loss", LOSSES[:2])
@pytest.mark.parametrize("way", [w for w in MODELS if w not in ("arguments", "beside an index")])
def test_a_list_of_one(way: str, loss: str, rows: int) -> None:
    """As the last batch may be: the rows of the only tensor are no samples."""
    _check(way, "sums", (rows,), loss)


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
@pytest.mark.parametrize("way", ["rows", "merged", "with a number"])
def test_a_list_of_one_tensor_with_samples(way: str, loss: Any) -> None:
    """Its rows are samples if the net has as many at its end."""

    def forward(net: Any, given: dict[str, Tensor]) -> Any:
        h = net.b(torch.tanh(net.a(given["x"])))
        if way == "merged":
            return h.flatten(0, 1)
        return (h, net.b.bias.square().sum(0, keepdim=True)) if way != "rows" else h

    model = Net(forward, a=nn.Linear(D, H), b=nn.Linear(H, C))
    x, parameters = torch.randn(4, 2, D), [*model.parameters()]
    outputs = [forward(model, {"x": row[None]}) for row in x]
    h = [out[0] if isinstance(out, tuple) else out for out in outputs]
    single = [
        torch.autograd.grad(loss(z, torch.zeros_like(z)) / 4, parameters, retain_graph=True)
        for z in h
    ]
    out = extend(model)({"x": x})
    out = out[0] if isinstance(out, tuple) else out
    with backpack(BatchGrad()):
        value = (extend(loss) if isinstance(loss, nn.Module) else loss)(out, torch.zeros_like(out))
        value[None].mean().backward()
    for parameter, expected in zip(parameters, zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(expected))


@pytest.mark.host("torch packs lengths of there")
@pytest.mark.parametrize("sizes", [(3,), (2, 3), (4, 5), (3, 3), (3, 2, 4)])
def test_packed_sequences(sizes: tuple[int, ...]) -> None:
    _check("packed", "", sizes, "module")


def test_items_that_nobody_holds_any_more() -> None:
    """Then lengths are all that tells."""
    model, sizes = _net("joined"), (2, 3)
    torch.manual_seed(0)
    logits = extend(model)([torch.randn(size, D).double() for size in sizes])
    with backpack(BatchGrad()):
        logits.sum().backward()
    torch.manual_seed(0)
    for n, size in enumerate(sizes):
        logits = model([torch.randn(size, D).double()])
        for parameter in model.parameters():
            (own,) = torch.autograd.grad(logits.sum(), parameter, retain_graph=True)
            oracle.assert_close(vars(parameter)["grad_batch"][n], own)


def _attend(net: Any, x: Tensor, memory: Tensor) -> Tensor:
    h, rows = torch.tanh(net.a(torch.cat([x, memory]))).split([len(x), len(memory)])
    return net.b((h @ rows.T).softmax(1) @ rows + h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize(("samples", "rows"), [(2, 3), (3, 2), (2, 4), (1, 3), (4, 1)])
def test_something_that_all_share(samples: int, rows: int, is_list: bool) -> None:
    """Two tensors, as many as there are samples, and one has these in front."""
    layers = {"a": nn.Linear(D, H), "b": nn.Linear(H, C)}
    forward = (lambda net, both: _attend(net, *both)) if is_list else _attend
    model: Any = extend(Net(forward, **layers).double())
    x, memory = torch.randn(samples, D).double(), torch.randn(rows, D).double()

    def run(x: Tensor) -> Tensor:
        return model([x, memory] if is_list else x, *([] if is_list else [memory]))  # type: ignore[no-any-return]

    y, lossfunc = torch.randint(C, (samples,)), extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchGrad(), check="always"):
        lossfunc(run(x), y).backward()
    for n in range(samples):
        loss = F.cross_entropy(run(x[n : n + 1]), y[n : n + 1])
        own = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, expected in zip(model.parameters(), own, strict=True):
            oracle.assert_close(vars(parameter)["grad_batch"][n], expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("used", range(2))
def test_an_argument_that_is_not_used(used: int, samples: int, length: int) -> None:
    """Two arguments, and two merged rows of one of them: these are none of the other."""
    net: Any = Net(lambda net, *given: net.a(given[used].flatten(0, 1)), a=nn.Linear(D, C))
    model = extend(net.double())
    given = [torch.randn(samples, length, D).double() for _ in range(2)]
    rows = model(*given)
    y = torch.randint(C, (len(rows),))
    with backpack(BatchGrad(), DiagGGNExact(), BatchDiagGGNExact()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(rows, y).backward()
    total: Any = 0
    for n, label in enumerate(y.split(length)):
        z = model.a(given[used][n])
        (own,) = torch.autograd.grad(
            F.cross_entropy(z, label, reduction="sum"), model.a.weight, retain_graph=True
        )
        oracle.assert_close(model.a.weight.grad_batch[n], own)
        p = z.softmax(1).detach()
        diagonal = torch.einsum("tc,ti->ci", p * (1 - p), given[used][n].square())
        oracle.assert_close(model.a.weight.diag_ggn_exact_batch[n], diagonal)
        total = total + diagonal
    assert len(model.a.weight.grad_batch) == samples
    oracle.assert_close(model.a.weight.diag_ggn_exact, total)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_views_of_the_same_samples_that_are_joined(samples: int) -> None:
    """Row ``n`` of each is of sample ``n``, whatever operation joined them."""
    views = [torch.randn(samples, D).double() for _ in range(2)]
    layers = {"a": nn.Linear(D, H), "b": nn.Linear(H, C)}
    model: Any = extend(Net(lambda net, x: net.b(torch.tanh(net.a(torch.cat(x)))), **layers))
    model.double()
    y = torch.randint(C, (2 * samples,))
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(views), y).backward()
    for n in range(samples):
        logits = model([view[n : n + 1] for view in views])
        loss = F.cross_entropy(logits, y[n::samples], reduction="sum")
        own = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, expected in zip(model.parameters(), own, strict=True):
            oracle.assert_close(vars(parameter)["grad_batch"][n], expected)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("sizes", [(2, 3), (2, 4), (1, 3), (3, 3, 6)])
def test_an_entry_for_each_row_tells_nothing(
    sizes: tuple[int, ...], extension: Any, is_split: bool
) -> None:
    """Each item may be a sample, or each row, or the first tensor may be the batch."""
    layers = {"a": nn.Linear(D, H), "b": nn.Linear(H, C)}
    model: Any = extend(Net(lambda net, x: net.b(torch.tanh(net.a(torch.cat(x)))), **layers))
    logits, y = model([torch.randn(size, D) for size in sizes]), torch.randint(C, (sum(sizes),))
    lossfunc, cuts = extend(nn.CrossEntropyLoss()), [*sizes] if is_split else [sum(sizes)]
    pairs = zip(logits.split(cuts), y.split(cuts), strict=True)
    loss = sum(lossfunc(*pair) for pair in pairs)
    with pytest.raises(ShapeError, match="joined"), backpack(extension()):
        loss.backward()


@pytest.mark.parametrize("seed", range(60))
def test_drawn(seed: int) -> None:
    """Any of these, of any sizes, most of which are as many as the samples somewhere."""
    random = Random(seed)
    samples = random.randint(2, 4)
    sizes = tuple(random.choice([1, samples, samples, 2 * samples, 5]) for _ in range(samples))
    unclear = ("packed", "beside what is not used")  # a tensor that is not used may be the batch
    way = random.choice([way for way in MODELS if way not in unclear])
    _check(way, random.choice([*POOLS]), sizes, random.choice(LOSSES))


@pytest.mark.parametrize("lengths", [(4, 7), (5, 3), (3, 6)])
def test_indices_of_several_tables(lengths: tuple[int, int]) -> None:
    """A list of indices, and one of where bags begin: one is as long as two others, by chance."""
    samples, tables = 3, nn.ModuleList(nn.EmbeddingBag(7, C, mode="sum") for _ in lengths)
    ids = [torch.randint(7, (length,)) for length in lengths]
    starts, x = torch.tensor([0, 1, 2]), torch.randn(samples, C).double()

    def forward(net: Any, x: Tensor, ids: Items, starts: Items) -> Tensor:
        bags = [table(i, s) for table, i, s in zip(net.tables, ids, starts, strict=True)]
        return net.b(torch.tanh(torch.cat([x, *bags], 1)))  # type: ignore[no-any-return]

    model = Net(forward, tables=tables, b=nn.Linear(3 * C, C)).double()
    ends = [2 * [n + 1] if n + 1 < samples else [*lengths] for n in range(samples)]
    single = []
    for n in range(samples):
        own = [i[n:end] for i, end in zip(ids, ends[n], strict=True)]
        value = model(x[n : n + 1], own, 2 * [starts[:1]]).square().sum()
        single.append(torch.autograd.grad(value, [*model.parameters()]))
    with backpack(BatchGrad()):
        extend(model)(x, ids, [starts, starts.clone()]).square().sum().backward()
    for parameter, expected in zip(model.parameters(), zip(*single, strict=True), strict=True):
        oracle.assert_close(vars(parameter)["grad_batch"], torch.stack(expected))
