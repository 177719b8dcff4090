"""The backend for laplace-torch, where that is installed, against its own by ``torch.func``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_core.errors import BackpackError, UnsupportedError, UsageError
from tests.oracle import assert_close

# Not in the environment of the tests, as its peers: make bench-env installs it.
laplace = pytest.importorskip("laplace", exc_type=ImportError)

from laplace.curvature import EFInterface, GGNInterface  # noqa: E402

from backpack_secondorder.laplace import laplace_backend  # noqa: E402

LIKELIHOODS = ("classification", "regression")


class Residual(nn.Module):
    """Additions, a module called twice, and a normalisation: no chain of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 5), nn.Linear(5, 5)
        self.norm, self.last = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = hidden + self.inner(hidden).tanh() * 0.5
        return self.last(self.norm(hidden + self.inner(hidden)))


def net(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "conv":
        body = (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
        return nn.Sequential(*body), torch.randn(6, 2, 4, 4)
    if name in ("frozen", "chain"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model[0].requires_grad_(name == "chain")
        return model, torch.randn(6, 4)
    return Residual(), torch.randn(6, 4)


def targets(likelihood: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 3, (6,)) if likelihood == "classification" else torch.randn(6, 3)


def both(name: str, likelihood: str, curvature: Any, **settings: Any) -> tuple[Any, Any, Any]:
    model, x = net(name)
    base = GGNInterface if curvature == "ggn" else EFInterface
    data = x, targets(likelihood)
    ours = laplace_backend(curvature)(model, likelihood, **settings)
    return ours, base(model, likelihood, **settings), data


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", ["residual", "conv", "frozen"])
def test_diagonal_and_matrix(name: str, likelihood: str, curvature: str) -> None:
    ours, theirs, data = both(name, likelihood, curvature)
    for structure in ("diag", "full"):
        (loss, found), (expected_loss, expected) = (
            getattr(backend, structure)(*data) for backend in (ours, theirs)
        )
        assert_close(loss, expected_loss)
        assert_close(found, expected)
    assert not any(vars(p) for p in ours.params)
    assert all(p.grad is None for p in ours.params)


@pytest.mark.parametrize("name", ["residual", "conv", "frozen"])
def test_jacobians_and_gradients(name: str) -> None:
    ours, theirs, data = both(name, "classification", "ggn")
    for found, expected in zip(ours.jacobians(data[0]), theirs.jacobians(data[0]), strict=True):
        assert_close(found, expected)
    for of_torch in (ours.functorch_jacobians(data[0]), ours.jacobians(data[0], True)):
        assert_close(of_torch[0], theirs.jacobians(data[0])[0])  # of a net that is extended
    ours, theirs, data = both(name, "regression", "ef")
    for found, expected in zip(ours.gradients(*data), theirs.gradients(*data), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_kronecker_factors_of_one_sample_are_the_block(likelihood: str, curvature: str) -> None:
    """Of a layer with one position, the product is exact; batches add up to the average."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(1, 4)
    y = targets(likelihood)[:1]
    ours = laplace_backend(curvature)(model, likelihood)
    _, kron = ours.kron(x, y, N=1)
    _, full = ours.full(x, y)
    assert_close(torch.kron(*kron.kfacs[0]), full[:12, :12])
    assert_close(kron.kfacs[1][0], full[12:, 12:])


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_from_a_net_to_predictions(structure: str, subset: str, likelihood: str) -> None:
    """As with the default backend of laplace-torch, evidence included."""
    # The default backend has Kronecker factors of linear layers and convolutions alone.
    model, x = net("chain" if (structure, subset) == ("kron", "all") else "residual")
    data = DataLoader(TensorDataset(x, targets(likelihood)), batch_size=4)
    settings = {"subset_of_weights": subset, "hessian_structure": structure}
    found = []
    for backend in (laplace_backend(), None):
        extra = {} if backend is None else {"backend": backend}
        la = laplace.Laplace(model, likelihood, **settings, **extra)
        la.fit(data)
        found.append([la.log_marginal_likelihood(torch.tensor(2.0)).detach()])
        with torch.no_grad():
            prediction = la(x)
        found[-1] += [prediction] if isinstance(prediction, Tensor) else [*prediction]
    for first, second in zip(*found, strict=True):
        assert torch.allclose(first, second, rtol=1e-8, atol=1e-8)


def test_a_last_layer_that_is_not_the_output_is_refused() -> None:
    """Its own output is not what the loss is of."""

    class Halved(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    data = DataLoader(TensorDataset(net("chain")[1], targets("classification")), batch_size=4)
    la = laplace.Laplace(Halved(), "classification", "last_layer", backend=laplace_backend())
    with pytest.raises(UnsupportedError, match="output is not that of its last layer"):
        la.fit(data)


@pytest.mark.filterwarnings("ignore:By default `link_approx` is")  # it says so of its default
def test_kronecker_factors_of_any_architecture() -> None:
    model, x = net("residual")
    la = laplace.Laplace(
        model, "classification", "all", hessian_structure="kron", backend=laplace_backend()
    )
    la.fit(DataLoader(TensorDataset(x, targets("classification")), batch_size=4))
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert_close(la(x).sum(1), torch.ones(6))


def test_a_subnetwork() -> None:
    ours, theirs, data = both("residual", "classification", "ggn")
    for backend in (ours, theirs):
        backend.subnetwork_indices = torch.tensor([0, 3, 17])
    assert_close(ours.full(*data)[1], theirs.full(*data)[1])
    assert_close(ours.diag(*data)[1], theirs.full(*data)[1].diagonal())


def test_a_sampled_fisher_is_the_matrix_in_expectation() -> None:
    model, x = net("residual")
    y = targets("classification")
    torch.manual_seed(0)
    settings: dict[str, Any] = {"stochastic": True, "num_samples": 3000}
    ours = laplace_backend()(model, "classification", **settings)
    exact = laplace_backend()(model, "classification").full(x, y)[1]
    sampled = ours.full(x, y)[1]
    assert float((sampled - exact).norm() / exact.norm()) < 0.05
    assert_close(laplace_backend()(model, "classification").diag(x, y)[1], exact.diagonal())


def test_what_has_no_form_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 2, groups=2), nn.Flatten())
    ours = laplace_backend()(model, "classification")
    with pytest.raises(UnsupportedError, match="with groups"):
        ours.kron(torch.randn(2, 4, 2), torch.tensor([0, 1]), N=2)
    sequence = laplace_backend()(nn.Linear(3, 2), "regression")
    with pytest.raises(UnsupportedError, match="reduce the other axes"):
        sequence.diag(torch.randn(2, 5, 3), torch.randn(2, 5, 2))
    with pytest.raises(UsageError, match="one of"):
        laplace_backend("hessian")  # type: ignore[arg-type]


def test_what_is_refused_leaves_nothing_behind() -> None:
    class Unused(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Linear(2, 2)

    class Grouped(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten())
            self.append(nn.Linear(4, 3))

    table = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)), nn.Flatten())
    table.append(nn.Linear(4, 3))
    x, y = net("chain")[1], targets("classification")
    for model in (Unused(), Grouped(), table):
        backend = laplace_backend()(model, "classification")
        with pytest.raises(BackpackError):
            backend.kron(x, y, N=6)
        assert not any(vars(p) for p in model.parameters())
