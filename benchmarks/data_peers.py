"""What other libraries compute over a data set, for ``benchmarks.over_data``."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """One quantity of one library.

    Attributes:
        ours: Which of our rows is the same.
        library: Its name, and what is called.
        theirs: Runs over batches; what can be compared, by name, or ``None`` for what is drawn.
        mine: What is compared with it, of our result.
    """

    ours: str
    library: str
    theirs: Callable[[nn.Module, Any], Numbers | None]
    mine: Callable[[Mapping[Any, Any]], Numbers] = lambda found: {}

    @property
    def is_installed(self) -> bool:
        """Whether it can be run."""
        return importlib.util.find_spec(self.library.split()[0]) is not None


def weights_of(found: Mapping[Any, Any]) -> Numbers:
    """Both Kronecker factors of each weight as one product with a vector."""
    return {path: value @ _vector(value) for (path, _), value in found.items() if len(value) == 2}


def _vector(matrix: Any) -> Tensor:
    shape = matrix.order.shape
    return torch.linspace(0, 1, shape.numel()).sin().reshape(shape)


def diagonals_of(found: Mapping[Any, Any]) -> Numbers:
    """All of them as one vector."""
    return {"": torch.cat([value.flatten() for value in found.values()])}


def inputs_of(found: Mapping[Any, Any]) -> Numbers:
    """``A`` of the weights of linear layers."""
    linear = [(path, value) for (path, _), value in found.items() if len(value) == 2]
    return {path: value[1] for path, value in linear if int(path.split(".")[0]) >= 10}


def curvlinops(fisher: str, sharing: str) -> Callable[[nn.Module, Any], Numbers | None]:
    """Kronecker factors of curvlinops."""

    def run(model: nn.Module, images: Any) -> Numbers | None:
        from curvlinops import KFACLinearOperator

        from backpack_secondorder.curvlinops import from_curvlinops

        operator = KFACLinearOperator(
            model,
            nn.CrossEntropyLoss(reduction="sum"),
            [*model.parameters()],
            images,
            fisher_type=fisher,
            kfac_approx=sharing,
            separate_weight_and_bias=True,
            check_deterministic=False,
            num_data=images.samples,
            num_per_example_loss_terms=1,
        )
        blocks = from_curvlinops(operator, model)
        if fisher == "mc":
            return None
        pairs = [(name, blocks[name]) for name in blocks if name.endswith("weight")]
        return {name: block @ _vector(block) for name, block in pairs}

    return run


def laplace(structure: str, **backend: Any) -> Callable[[nn.Module, Any], Numbers | None]:
    """The loop of laplace-torch."""

    def run(model: nn.Module, images: Any) -> Numbers | None:
        from laplace import Laplace
        from laplace.curvature import BackPackGGN

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = Laplace(
                model,
                "classification",
                subset_of_weights="all",
                hessian_structure=structure,
                backend=BackPackGGN,
                backend_kwargs=backend,
            )
            fitted.fit(images)
        return None if backend.get("stochastic") else {"": fitted.H}

    return run


def kronfluence(model: nn.Module, images: Any) -> Numbers | None:
    """Covariances of kronfluence, for sampled targets."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            output = model(x)
            if sample:
                with torch.no_grad():
                    y = torch.multinomial(output.detach().softmax(-1), 1).flatten()
            return nn.functional.cross_entropy(output, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Classification()
    prepared = prepare_model(copy.deepcopy(model), task)
    _, found = fit_covariance_matrices_with_loader(
        prepared, State(cpu=True), task, images, FactorArguments(), disable_tqdm=True
    )
    # With the one for the bias; of linear layers, whose inputs have one order.
    inputs = found["activation_covariance"]
    return {f"{name}.weight": matrix[:-1, :-1] / images.samples for name, matrix in inputs.items()}


PEERS = [
    Peer("KFAC, expand", "curvlinops KFAC, mc, expand", curvlinops("mc", "expand")),
    Peer("KFAC, reduce", "curvlinops KFAC, mc, reduce", curvlinops("mc", "reduce")),
    Peer("KFLR, expand", "curvlinops KFAC, exact", curvlinops("type-2", "expand"), weights_of),
    Peer("KFLR, reduce", "curvlinops KFAC, exact", curvlinops("type-2", "reduce"), weights_of),
    Peer("DiagGGNExact", "laplace diag", laplace("diag"), diagonals_of),
    Peer("DiagGGNMC", "laplace diag, sampled", laplace("diag", stochastic=True)),
    Peer("KFAC, expand", "kronfluence covariances", kronfluence, inputs_of),
]
