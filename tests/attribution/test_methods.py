"""Every method against autograd, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from backpack_attribution import (
    GradDot,
    Influence,
    Scores,
    TracIn,
    influence,
    self_influence,
)
from backpack_attribution.curvature import solved
from backpack_core import extend, is_extended
from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import EKFAC
from backpack_data import accumulate
from tests.attribution.problems import ggn, gradients, loader, mlp, scaled, tied, tokens, vectors

NETS = {"mlp": (mlp, vectors), "scaled": (scaled, vectors), "tied": (tied, tokens)}


@pytest.fixture(params=NETS)
def problem(request):
    net, data = NETS[request.param]
    return net(), data(7), data(3, seed=2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inner_products_and_cosines(problem, reduction: str) -> None:
    model, train, queries = problem
    lossfunc = nn.CrossEntropyLoss(reduction=reduction)
    g, q = gradients(model, train), gradients(model, queries)
    scores = influence(model, lossfunc, loader(train, 3), loader(queries, 2), "dot")
    assert torch.allclose(scores.values, (g @ q.T).cpu(), rtol=1e-12, atol=1e-12)
    assert (scores.train, scores.queries) == ([*range(7)], [*range(3)])
    scores = influence(model, lossfunc, loader(train, 4), loader(queries, 3), "cosine")
    wanted = nn.functional.normalize(g) @ nn.functional.normalize(q).T
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-12, atol=1e-12)
    assert not any(is_extended(m) for m in (model, lossfunc))
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())


def test_a_mean_over_the_batch_is_taken_as_a_sum(problem) -> None:
    """``KLDivLoss`` has its own word for a mean over samples, "batchmean"."""
    net, train, queries = problem
    model = nn.Sequential(net, nn.LogSoftmax(1))

    def told(data: Any) -> Any:
        inputs, classes = data
        shares = nn.functional.one_hot(classes, net(inputs).shape[1]).movedim(-1, 1)
        return inputs, (0.2 + shares.double()).log_softmax(1).exp()

    train, queries = told(train), told(queries)
    summed = nn.KLDivLoss(reduction="sum")
    g, q = gradients(model, train, summed), gradients(model, queries, summed)
    lossfunc = nn.KLDivLoss(reduction="batchmean")
    scores = influence(model, lossfunc, loader(train, 3), loader(queries, 2), "dot")
    assert torch.allclose(scores.values, (g @ q.T).cpu(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e18])
def test_cosines_of_gradients_of_any_size(problem, size: float) -> None:
    """In single precision, those of certain answers are 10⁻²⁵; their squares underflow."""
    model, train, queries = problem
    wanted = influence(
        model, nn.CrossEntropyLoss(), loader(train, 4), loader(queries, 2), "cosine"
    ).values

    def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return size * nn.functional.cross_entropy(output, target, reduction="sum")

    def single(data: Any) -> Any:
        return [tuple(t.float() if t.is_floating_point() else t for t in item) for item in data]

    train, queries = single(loader(train, 4)), single(loader(queries, 2))
    found = influence(model.float(), scaled, train, queries, "cosine").values
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    itself = self_influence(model, scaled, train, "cosine").values
    assert torch.equal(itself, torch.ones_like(itself))


@pytest.mark.parametrize("method", ["dot", "ekfac", "ekfac-cg", "trak"])
def test_models_that_write_into_their_inputs(method: str) -> None:
    """Every pass gets what the loader has."""

    class Overwrites(nn.Sequential):
        def forward(self, x):
            return super().forward(x.mul_(2))

    train, queries = vectors(7), vectors(3, seed=2)
    found = []
    for model, factor in ((mlp(), 2), (Overwrites(*mlp()), 1)):
        torch.manual_seed(0)
        batches = [loader((factor * x, y), 2) for x, y in (train, queries)]
        found.append(influence(model, nn.CrossEntropyLoss(), *batches, method).values)
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["dot", "cosine", "ekfac-cg", "logra", "tracin"])
def test_influence_on_themselves_is_the_diagonal(problem, method) -> None:
    model, train, _ = problem
    made = {
        "tracin": lambda: TracIn([model.state_dict()], [0.5]),
        "ekfac-cg": lambda: Influence(mc_samples=None, refine=50, rtol=1e-10),
    }.get(method, lambda: method)
    lossfunc, data = nn.CrossEntropyLoss(), loader(train, 3)
    wanted = influence(model, lossfunc, data, data, made())
    found = self_influence(model, lossfunc, data, made())
    assert found.queries == ["itself"]
    assert torch.allclose(found.values[:, 0], wanted.values.diagonal(), rtol=1e-6, atol=1e-9)


def test_frozen_parameters_take_no_part(problem) -> None:
    model, train, queries = problem
    next(model.parameters()).requires_grad_(False)
    scores = influence(model, nn.CrossEntropyLoss(), loader(train, 3), loader(queries, 2), "dot")
    g, q = gradients(model, train), gradients(model, queries)
    assert torch.allclose(scores.values, (g @ q.T).cpu(), rtol=1e-12, atol=1e-12)


def test_losses_of_the_user(problem) -> None:
    """A function that sums, another one for queries, and a part of the queries at a time."""
    model, train, queries = problem

    def summed(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum")

    def squares(output, target):
        return output.square().sum()

    scores = influence(
        model,
        summed,
        loader(train, 3),
        loader(queries, 1),
        GradDot(queries_at_once=2),
        query_lossfunc=squares,
    )
    wanted = gradients(model, train) @ gradients(model, queries, squares).T
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-12, atol=1e-12)
    function, asked = nn.functional.cross_entropy, loader(queries, 1)
    with pytest.raises(UsageError, match="is not the sum of its samples' losses"):
        influence(model, function, loader(train, 3), asked, "dot")
    with pytest.raises(UsageError, match="'ekfac' needs the Hessian of the loss in the output"):
        influence(model, function, loader(train, 3), asked, "ekfac")
    with pytest.raises(UsageError, match="TensorDataset gives single samples"):
        influence(model, nn.CrossEntropyLoss(), TensorDataset(*train), asked, "dot")


def test_tracin_adds_up_checkpoints_and_leaves_the_model(problem, tmp_path) -> None:
    model, train, queries = problem
    first = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = 0.5 * gradients(model, train) @ gradients(model, queries).T
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    torch.save(model.state_dict(), tmp_path / "second.pt")
    wanted += 2 * gradients(model, train) @ gradients(model, queries).T
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    last = {name: value.clone() for name, value in model.state_dict().items()}
    method = TracIn([first, tmp_path / "second.pt"], [0.5, 2.0])
    lossfunc = nn.CrossEntropyLoss()
    scores = influence(model, lossfunc, loader(train, 3), loader(queries, 2), method)
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-12, atol=1e-12)
    for name, value in model.state_dict().items():
        assert torch.equal(value, last[name])


def test_checkpoints_of_tied_models_and_others(tmp_path) -> None:
    """Files may have one of the names of a tied weight; states may be inside of something else."""
    model, data = tied(), loader(tokens(4), 2)
    save_model(model, str(tmp_path / "tied.safetensors"))
    state = model.state_dict()
    inside = {"state_dict": state, "epoch": 3}
    found = [
        influence(model, nn.CrossEntropyLoss(), data, data, TracIn([given]))
        for given in (state, tmp_path / "tied.safetensors")
    ]
    assert torch.equal(found[0].values, found[1].values)
    with pytest.raises(UsageError, match=r'such as checkpoint\["state_dict"\]'):
        influence(model, nn.CrossEntropyLoss(), data, data, TracIn([inside]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_conjugate_gradients_solve_with_the_whole_gauss_newton_matrix(
    problem, reduction: str
) -> None:
    model, train, queries = problem
    lossfunc, weight = nn.CrossEntropyLoss(reduction=reduction), train[1].numel()
    matrix, damping = ggn(model, train), 0.3
    if reduction == "mean":
        matrix, damping = matrix / weight, 0.3 / weight
    matrix = matrix + damping * torch.eye(len(matrix))
    wanted = gradients(model, train) @ torch.linalg.solve(matrix, gradients(model, queries).T)
    method = Influence(damping=damping, refine=200, rtol=1e-12)
    scores = influence(model, lossfunc, loader(train, 3), loader(queries, 2), method)
    divisor = weight if reduction == "mean" else 1
    assert torch.allclose(scores.values, (wanted / divisor).cpu(), rtol=1e-8, atol=1e-10)
    assert scores.method == "ekfac-cg"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("refine", [0, 3])
def test_other_data_for_the_curvature_keep_the_scale(reduction: str, refine: int) -> None:
    """Half of data that are there twice has the curvature of all, for each sample."""
    model, half, queries = mlp(), vectors(6), vectors(3, seed=2)
    lossfunc = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), reduction=reduction)
    train = loader(half, 4) + loader(half, 3)
    settings = {"mc_samples": None, "refine": refine, "rtol": 1e-12}
    for damping in (None, 0.3):
        wanted, found = (
            influence(
                *(model, lossfunc, train, loader(queries, 2)),
                Influence(curvature_loader=data, damping=damping, **settings),
                progress=False,
            )
            for data in (None, loader(half, 4))
        )
        assert torch.allclose(found.values, wanted.values, rtol=1e-9)


def test_the_weight_of_training_samples_in_half_precision() -> None:
    """It is not read from losses of that precision, which would be too inexact or infinite."""
    model, lossfunc, (x, y) = mlp().bfloat16(), nn.CrossEntropyLoss(), vectors(9)
    data = loader((x.bfloat16(), y), 3)
    methods = [Influence(damping=0.1, curvature_loader=other) for other in (None, data)]
    for method in methods:
        influence(model, lossfunc, data, data, method, progress=False)
    assert methods[0]._divisor == pytest.approx(methods[1]._divisor, rel=1e-6)


def test_conjugate_gradients_stay_on_the_device() -> None:
    """Step lengths, too: of the device's numbers only shapes are known here, and none are moved."""
    with FakeTensorMode():
        rhs = {"w": torch.ones(3, 2, 4, device="cuda"), "b": torch.ones(3, 2, device="cuda")}
        found = solved(dict, rhs, dict, rhs, steps=0, rtol=1e-3)
    assert {value.device.type for value in found.values()} == {"cuda"}


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-10, 1e18])
def test_conjugate_gradients_of_queries_of_any_size(size: float) -> None:
    """In single precision, squares of small gradients underflow: no step would be made."""
    model, train, queries = mlp().float(), loader(vectors(9), 4), loader(vectors(3, seed=2), 3)
    train, queries = ([(x.float(), y) for x, y in data] for data in (train, queries))

    def scores(factor: float) -> torch.Tensor:
        def asked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return factor * nn.functional.cross_entropy(output, target, reduction="sum")

        method = Influence(damping=0.1, refine=30, rtol=1e-5, mc_samples=None)
        lossfunc = nn.CrossEntropyLoss()
        found = influence(model, lossfunc, train, queries, method, query_lossfunc=asked)
        return found.values.double() / factor

    assert torch.allclose(scores(size), scores(1.0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_kronecker_factors(problem, curvature: str) -> None:
    """One block for each parameter, damped by a tenth of its mean eigenvalue."""
    model, train, queries = problem
    lossfunc, data = nn.CrossEntropyLoss(), loader(train, 3)
    method = Influence(curvature, mc_samples=None)
    scores = influence(model, lossfunc, data, loader(queries, 2), method)
    from backpack_core.extensions import KFLR

    extension = {"kfac": KFLR, "ekfac": EKFAC}[curvature]
    options = {"weight_sharing": "expand", "fail_mode": "diagonal"}
    asked = EKFAC(None, **options) if extension is EKFAC else KFLR(**options)
    found = accumulate(model, lossfunc, data, asked, progress=False).field(asked.savefield)
    solved, q, first = [], gradients(model, queries), 0
    for name, p in model.named_parameters():
        block = found[name].dense()
        damping = 0.1 * block.trace() / len(block)
        assert method.dampings[name] == pytest.approx(float(damping))
        part = q[:, first : first + p.numel()]
        solved.append(torch.linalg.solve(block + damping * torch.eye(len(block)), part.T))
        first += p.numel()
    wanted = gradients(model, train) @ torch.cat(solved) / train[1].numel()
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-8, atol=1e-12)


def test_what_is_left_out_changes_losses_by_the_scores() -> None:
    """Logistic regression with weight decay: influence is the derivative of the minimum."""
    train, queries, decay = vectors(40), vectors(5, seed=2), 1.0
    weights = torch.ones(40)

    def fitted(weights):
        model = nn.Linear(5, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
        )

        def objective():
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(train[0]), train[1], reduction="none")
            value = losses @ weights + decay / 2 * sum(p.square().sum() for p in model.parameters())
            value.backward()
            return value

        optimizer.step(objective)
        return model

    model = fitted(weights)
    method = Influence(damping=decay, refine=100, rtol=1e-10)
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    scores = influence(model, lossfunc, loader(train, 16), loader(queries, 5), method)
    step = 1e-4
    for index in (0, 7, 23):
        weights[index] -= step
        with torch.no_grad():
            changes = [
                nn.functional.cross_entropy(m(queries[0]), queries[1], reduction="none")
                for m in (fitted(weights), model)
            ]
        weights[index] += step
        slope = ((changes[0] - changes[1]) / step).cpu()
        assert torch.allclose(slope, scores.values[index], rtol=1e-2)


def test_an_extended_model_stays_extended() -> None:
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    scores = influence(model, lossfunc, loader(vectors(4), 2), loader(vectors(2), 2), "ekfac")
    assert isinstance(scores, Scores)
    assert is_extended(model)
    assert is_extended(lossfunc)


@pytest.mark.parametrize("method", ["dot", "cosine", "logra"])
def test_what_others_stored_on_parameters_stays(problem, method) -> None:
    model, train, queries = problem
    fields = "grad_batch", "grad_inner", "projected_grad"
    for parameter in model.parameters():
        vars(parameter).update(dict.fromkeys(fields, "own"))
    influence(model, nn.CrossEntropyLoss(), loader(train, 3), loader(queries, 2), method)
    assert all(vars(p) == dict.fromkeys(fields, "own") for p in model.parameters())


# Used badly ---------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Its first input has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, weights, x):
        return weights.sum() * self.layer(x)


@pytest.mark.parametrize("method", ["dot", "logra"])
def test_batches_that_begin_with_another_tensor(method: str) -> None:
    data = [((torch.ones(2), x), y) for x, y in loader(vectors(6), 3)]
    with pytest.raises(ShapeError, match=r"have 4 entries .* Put a tensor with the samples"):
        influence(Weighted(), nn.CrossEntropyLoss(), data, data, method)


def test_refusals() -> None:
    model, lossfunc = mlp(), nn.CrossEntropyLoss()
    train, queries = loader(vectors(4), 2), loader(vectors(2), 2)
    with pytest.raises(UsageError, match="did you mean 'ekfac'"):
        influence(model, lossfunc, train, queries, "ekfca")
    with pytest.raises(UsageError, match="TracIn needs checkpoints"):
        influence(model, lossfunc, train, queries, "tracin")
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        influence(lossfunc.forward, lossfunc, train, queries)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="The loss must be a module"):
        influence(model, nn.CrossEntropyLoss, train, queries)
    with pytest.raises(UsageError, match='reduction="none"'):
        influence(model, nn.CrossEntropyLoss(reduction="none"), train, queries)
    with pytest.raises(UsageError, match="No parameter of the model is trained"):
        influence(mlp().requires_grad_(False), lossfunc, train, queries)
    with pytest.raises(UsageError, match=r"A loader must give batches.* Got None"):
        influence(model, lossfunc, None, queries)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"learning_rates must be finite numbers\. Got \['a'\]"):
        TracIn([model.state_dict()], ["a"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="takes a list with the learning rate"):
        TracIn([model.state_dict()], {0: 0.1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gave no sample"):
        influence(model, lossfunc, [], queries)
    with pytest.raises(UsageError, match="list_iterator can be gone through only once"):
        influence(model, lossfunc, iter(train), queries)
    with pytest.raises(UsageError, match="A batch must be"):
        influence(model, lossfunc, [torch.zeros(2, 5)], queries)
    with pytest.raises(UsageError, match=r"must return \(inputs, targets\)\. Got tensor"):
        influence(model, lossfunc, train, queries, "dot", batch=lambda item: item[0])
    with pytest.raises(UsageError, match="3 identities for 4 samples"):
        influence(model, lossfunc, train, queries, identities=["a", "b", "c"])
    with pytest.raises(UsageError, match=r"must be a list.* Got \{0: 'a'"):
        influence(model, lossfunc, train, queries, identities=dict(enumerate("abcd")))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be zero or positive"):
        Influence(damping=-1.0)
    for wrong in (True, float("inf"), {"0.weight": -1.0}):
        with pytest.raises(UsageError, match="must be zero or positive, and finite"):
            Influence(damping=wrong)
    dead = nn.Sequential(nn.Linear(5, 4), nn.Threshold(1e3, 1.0), nn.Linear(4, 3))
    for name in ("kfac", "ekfac"):
        with pytest.raises(UsageError, match=r"curvature of the parameter '0\.weight' is zero"):
            influence(dead, lossfunc, train, queries, name)
    with pytest.raises(UsageError, match="damping names 'typo'"):
        influence(model, lossfunc, train, queries, Influence(damping={"typo": 1.0}))
    with pytest.raises(UsageError, match="gone through more than once"):
        Influence(curvature_loader=iter(train))
    with pytest.raises(UsageError, match="rtol must be"):
        Influence(rtol=-1.0)
    with pytest.raises(UsageError, match="a positive number of batches"):
        Influence(queries_at_once=0)
    with pytest.raises(UsageError, match="curvature must be one of"):
        Influence("ggn")  # type: ignore[arg-type]
    for rates in ([0.1], 0.1):
        with pytest.raises(UsageError, match="Got 2 checkpoints, and learning_rates="):
            TracIn([{}, {}], rates)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Write TracIn\(\.\.\.\)"):
        influence(model, lossfunc, train, queries, TracIn)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="The order is model, loss"):
        influence(model, train, lossfunc, queries)  # type: ignore[arg-type]
    noisy = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    with pytest.raises(UsageError, match=r"Dropout '1' is in train mode.*model.eval\(\)"):
        influence(noisy, lossfunc, train, queries)
    for noise in (nn.RReLU(), Noise()):
        noisy = nn.Sequential(nn.Linear(5, 4), noise, nn.Linear(4, 3))
        with pytest.raises(UsageError, match="The model is random"):
            influence(noisy, lossfunc, train, queries, "dot")
    x, y = vectors(4)
    x[2] = torch.nan
    bad = loader((x, y), 2)
    with pytest.raises(UsageError, match="training sample 2 are not finite"):
        influence(model, lossfunc, bad, queries, "dot")
    for method in ("dot", "cosine", "logra"):
        with pytest.raises(UsageError, match="training sample 2 are not finite"):
            self_influence(model, lossfunc, bad, method)
        with pytest.raises(UsageError, match="All scores for the query 2 are not finite"):
            influence(model, lossfunc, train, bad, method)

    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum")

    with pytest.raises(UsageError, match="The loss of a batch is nan, so it cannot be compared"):
        influence(model, summed, train, bad[1:], "dot")


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Slopes(nn.Module):
    """Adds the gradient of an inner net, which goes backward in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(leaf).sin().sum(), leaf)
        return self.outer(x + slope)


def test_models_that_go_backward_in_their_forward_pass() -> None:
    model, lossfunc, (x, y) = Slopes(), nn.CrossEntropyLoss(reduction="sum"), vectors(4)
    found = influence(model, lossfunc, [(x, y)], [(x, y)], "dot", progress=False).values
    outer, own = [*model.outer.parameters()], []
    for n in range(4):
        gradients = torch.autograd.grad(lossfunc(model(x[n : n + 1]), y[n : n + 1]), outer)
        own.append(torch.cat([each.flatten() for each in gradients]))
    torch.testing.assert_close(found, torch.stack(own) @ torch.stack(own).T)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models(whole: bool) -> None:
    """Models and modules in them run eagerly, as compiled code has no modules to record."""
    model, lossfunc = mlp(), nn.CrossEntropyLoss()
    train, queries = loader(vectors(6), 3), loader(vectors(2), 2)
    expected = influence(model, lossfunc, train, queries, "dot", progress=False)
    if whole:
        compiled = torch.compile(model, backend="aot_eager")
    else:
        compiled = nn.Sequential(torch.compile(model[0], backend="aot_eager"), *model[1:])
        compiled(train[0][0])
    found = influence(compiled, lossfunc, train, queries, "dot", progress=False)
    torch.testing.assert_close(found.values, expected.values)
    if whole:  # projections go by names, and checkpoints have those of the compiled model
        for method in ("trak", TracIn([compiled.state_dict()], [0.5])):
            pair = [influence(m, lossfunc, train, queries, method) for m in (model, compiled)]
            torch.testing.assert_close(pair[1].values, pair[0].values)


@pytest.mark.parametrize(
    "change", [lambda losses: losses, lambda losses: losses.sum().detach(), lambda losses: 1.0]
)
def test_losses_that_are_not_numbers_with_a_graph(change) -> None:
    def lossfunc(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return change(nn.functional.cross_entropy(output, target, reduction="none"))

    model, data = mlp(), loader(vectors(6), 3)
    with pytest.raises(UsageError, match="a tensor of one number that depends on"):
        influence(model, lossfunc, data, data, "dot", progress=False)
    with pytest.raises(UsageError, match="a tensor of one number that depends on"):
        influence(model, nn.CrossEntropyLoss(), data, data, "dot", query_lossfunc=lossfunc)


def test_loaders_that_shuffle_or_repeat() -> None:
    model, lossfunc, data = mlp(), nn.CrossEntropyLoss(), TensorDataset(*vectors(30))
    queries = loader(vectors(2), 2)
    shuffled = DataLoader(data, 4, shuffle=True)
    for method in ("dot", "logra"):
        with pytest.raises(UsageError, match="gave other batches than in the pass before"):
            influence(model, lossfunc, shuffled, queries, method)
        with pytest.raises(UsageError, match="gave other batches"):
            influence(model, lossfunc, queries, shuffled, method)
    once = map(tuple, loader(vectors(4), 2))
    with pytest.raises(UsageError, match="map can be gone through only once"):
        influence(model, lossfunc, once, queries, "dot")
    for options, said in (({"shuffle": True}, "shuffles"), ({"shuffle": False}, "repeats")):
        sampler = DistributedSampler(data, 4, 0, **options)
        with pytest.raises(UsageError, match=f"The DistributedSampler {said}"):
            influence(model, lossfunc, DataLoader(data, 4, sampler=sampler), queries, "dot")


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_targets_that_broadcast() -> None:
    """Outputs [N, 1] and targets [N] make a table of [N, N] losses."""
    model, data = nn.Linear(5, 1), [(vectors(4)[0], torch.randn(4))]
    with pytest.raises(UsageError, match=r"Give targets of the shape of the output, \[4, 1\]"):
        influence(model, nn.MSELoss(), data, data, "dot")


def test_loaders_without_a_length() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*vectors(5), strict=True))

    model, lossfunc, data = mlp(), nn.CrossEntropyLoss(), loader(vectors(5), 2)
    found = influence(model, lossfunc, DataLoader(Stream(), 2), data, "dot")
    assert torch.equal(found.values, influence(model, lossfunc, data, data, "dot").values)


def test_identities_of_all_kinds() -> None:
    model, lossfunc = mlp(), nn.CrossEntropyLoss()
    x, y = vectors(4)
    train, queries = loader((x, y), 2), loader(vectors(2), 2)
    named = influence(model, lossfunc, train, queries, "dot", identities=["a", "b", "c", "d"])
    numbered = influence(model, lossfunc, train, queries, "dot", identities=np.arange(4) * 3)
    assert numbered.train == [0, 3, 6, 9]
    by_content = influence(model, lossfunc, train, queries, "dot", identities="content")
    turned = [(x[[3, 0, 1]], y[[3, 0, 1]]), (x[[2]], y[[2]])]
    again = influence(model, lossfunc, turned, queries, "dot", identities="content")
    assert torch.allclose(again.aligned(by_content.train).values, by_content.values)
    assert torch.equal(by_content.values, named.values)
    marked = influence(
        model, lossfunc, train, queries, "dot", identities=lambda b: [*b[0][:, 0].mul(1e6).long()]
    )
    assert all(isinstance(name, int) for name in marked.train)
    top = named.top(2)
    assert top.identities[0] == [named.train[n] for n in named.values[:, 0].topk(2).indices]
    assert named.select(1) == [named.train[int(named.values.mean(1).argmax())]]


@pytest.mark.host("files are read to there")
def test_results_as_a_frame_and_as_a_file(tmp_path) -> None:
    scores = Scores(torch.arange(6.0).reshape(3, 2), ["a", 1, "c"], ["q", "r"], "dot")
    scores.save(tmp_path / "scores.safetensors")
    again = Scores.load(tmp_path / "scores.safetensors")
    assert torch.equal(again.values, scores.values)
    assert (again.train, again.queries, again.method) == (["a", 1, "c"], ["q", "r"], "dot")
    assert scores.sorted().train == [1, "a", "c"]
    assert scores.top(2, largest=False).identities == [["a", 1], ["a", 1]]
    bad = Scores(torch.tensor([[1.0], [torch.nan]]), ["a", "b"], ["q"])
    for call in (bad.top, bad.select):
        with pytest.raises(UsageError, match="must be numbers, and some are NaN"):
            call(1)
    assert bad.aligned(["a"]).select(1) == ["a"]
    with pytest.raises(UsageError, match="have none for 'x'"):
        scores.aligned(["x"])
    pandas = pytest.importorskip("pandas", reason="the extra for frames is not installed")
    frame = scores.to_pandas()
    assert frame.loc["c", "r"] == 5.0
    assert isinstance(frame, pandas.DataFrame)
