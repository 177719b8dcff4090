"""What cannot be private raises when it is made private, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, WeightedRandomSampler, default_collate

from backpack_core import extend
from backpack_optimizers import KFAC
from backpack_privacy import AdaptiveClipping, Clipping, make_private, replace_batch_norm
from tests.privacy.loops import DATA, check_refused
from tests.privacy.problems import loader_of, perceptron


def private(model: Any = None, lossfunc: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """Make something private, and everything that is not given well."""
    model = perceptron() if model is None else model
    lossfunc = nn.CrossEntropyLoss() if lossfunc is None else lossfunc
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = options.pop("loader") if "loader" in options else loader_of(DATA)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_norm": 1.0, **options}
    return make_private(model, lossfunc, optimizer, loader, **settings)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def frozen() -> nn.Module:
    return perceptron().requires_grad_(False)


def grown() -> Any:
    """The optimizer was made before the last layer was replaced."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[4] = nn.Linear(6, 3)
    return private(model, optimizer=optimizer)


def partly(trained: str, stepped: str) -> Any:
    model = perceptron()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(trained))
    chosen = [p for n, p in model.named_parameters() if n.startswith(stepped)]
    return private(model, optimizer=torch.optim.SGD(chosen, lr=0.1))


def hooked(register: str) -> Any:
    """A mask on a gradient, or an optimizer in the backward pass: neither would run."""
    model = perceptron()
    getattr(model[0].weight, register)(lambda tensor: None)
    return private(model)


def several() -> Any:
    model = perceptron()
    private(model, clipping=(clipping := Clipping(1.0)), max_norm=None)
    return private(perceptron(), clipping=clipping, max_norm=None)


def private_again() -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private(model, optimizer=optimizer).close()
    private(model, optimizer=optimizer)
    return private(model, optimizer=optimizer)


def of_opacus() -> nn.Module:
    class GradSampleModule(nn.Sequential):
        pass

    return GradSampleModule(nn.Linear(5, 3))


BEFORE: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: private(model=3, optimizer=3), "first argument must be the model"),
    "DataParallel": (lambda: private(nn.DataParallel(perceptron())), "DataParallel splits"),
    "wrapped by Opacus": (lambda: private(of_opacus()), "Opacus has wrapped"),
    "batch normalisation": (
        lambda: private(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
        "replace_batch_norm",
    ),
    "running statistics": (
        lambda: private(
            nn.Sequential(nn.Linear(5, 3), nn.InstanceNorm1d(3, track_running_stats=True))
        ),
        "track_running_stats=False",
    ),
    "nothing trained": (
        lambda: private(frozen(), optimizer=torch.optim.SGD(perceptron().parameters(), lr=0.1)),
        "requires_grad_",
    ),
    "a hook on a gradient": (lambda: hooked("register_hook"), "has a hook on its gradient"),
    "a hook after a gradient": (
        lambda: hooked("register_post_accumulate_grad_hook"),
        "has a hook on its gradient",
    ),
    "changed after the optimizer": (grown, "make the optimizer again"),
    "trained, not stepped on": (lambda: partly("", "0"), "does not step on it"),
    "stepped on, not trained": (lambda: partly("0", ""), "leave it out of the optimizer"),
    "private already": (private_again, "private already"),
    "no optimizer": (lambda: private(optimizer=3), "third argument"),
    "LBFGS": (
        lambda: private(m := perceptron(), optimizer=torch.optim.LBFGS(m.parameters())),
        "several times in a step",
    ),
    "KFAC": (lambda: private(m := extend(perceptron()), optimizer=KFAC(m)), "reads curvature"),
    "trained in bfloat16": (lambda: private(perceptron().bfloat16()), "is in bfloat16"),
    "one layer in float16": (
        lambda: private(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).half())),
        "The parameter 1.weight is in float16",
    ),
    "no loss": (lambda: private(lossfunc=3), "second argument"),
    "an optimizer for a loss": (
        lambda: private(lossfunc=torch.optim.SGD(perceptron().parameters(), lr=0.1)),
        "Got SGD.",
    ),
    "losses not added up": (
        lambda: private(lossfunc=nn.CrossEntropyLoss(reduction="none")),
        'reduction="none"',
    ),
    "a mean that nobody knows": (lambda: private(lossfunc=F.cross_entropy), "normaliser="),
    "unknown normaliser": (lambda: private(normaliser="batch"), "normaliser must be"),
    "a mean that is said to be a sum": (lambda: private(normaliser=None), "Leave normaliser= out"),
    "a mean that is said to have a number": (
        lambda: private(normaliser=4),
        "normaliser=4 says otherwise",
    ),
    "a sum that is said to be a mean": (
        lambda: private(lossfunc=nn.CrossEntropyLoss(reduction="sum"), normaliser="samples"),
        "normaliser='samples' says otherwise",
    ),
    "buffers in a string": (lambda: private(public_buffers="mean"), "Got 'mean'"),
    "a buffer that is misspelt": (lambda: private(public_buffers=["maen"]), "Got 'maen'"),
    "records of no user": (lambda: private(max_records=2), "name them, users="),
    "a target in words": (
        lambda: private(noise_multiplier=None, target_epsilon="3", target_delta=1e-3, epochs=1),
        "target_epsilon must be",
    ),
    "batch normalisation of nothing": (lambda: replace_batch_norm(3), "takes a module"),  # type: ignore[arg-type]
    "a list for a loader": (lambda: private(loader=[1, 2]), "DataLoader"),
    "a stream": (lambda: private(loader=loader_of(Stream())), "no length"),
    "no batch size": (
        lambda: private(loader=loader_of(DATA, None)),  # type: ignore[arg-type]
        "no batch_size",
    ),
    "weighted samples": (
        lambda: private(loader=loader_of(DATA, sampler=WeightedRandomSampler([1.0] * 12, 12))),
        "choices would be lost",
    ),
    "with replacement": (
        lambda: private(
            loader=loader_of(DATA, sampler=torch.utils.data.RandomSampler(DATA, replacement=True))
        ),
        "with replacement",
    ),
    "a batch larger than the data": (lambda: private(loader=loader_of(DATA, 13)), "1 at most"),
    "more users than there are": (lambda: private(users=[0, 1] * 6), "of 2 samples"),
    "users of other data": (lambda: private(users=[0, 1]), "12 in all"),
    "users by record": (lambda: private(users={n: n // 2 for n in range(12)}), "Got a dict"),
    "users on two axes": (lambda: private(users=torch.arange(12)[:, None]), "users.ravel()"),
    "users that are missing": (
        lambda: private(loader=loader_of(DATA, 1), users=torch.tensor([0.0, torch.nan] * 6)),
        "'not a number'",
    ),
    "checks that never end": (lambda: private(checks=-1), "checks must be a whole number from 0"),
    "users of rows in another order": (
        lambda: private(
            loader=loader_of(DATA, collate_fn=lambda rows: default_collate(rows[::-1])),
            users=[*range(6)] * 2,
        ),
        "the order of rows",
    ),
    "no bound": (lambda: private(max_norm=None), "Give max_norm="),
    "two bounds": (lambda: private(clipping=Clipping(1.0)), "not both"),
    "bound of zero": (lambda: private(max_norm=0.0), "positive and finite"),
    "bound without end": (lambda: private(max_norm=float("inf")), "positive and finite"),
    "no clipping": (lambda: private(max_norm=None, clipping="flat"), "clipping must be a Clipping"),
    "clipping used twice": (several, "a new one for each"),
    "pattern for nothing": (lambda: private(max_norm={"*": 1.0, "head": 1.0}), "'head'"),
    "parameter without a bound": (lambda: private(max_norm={"0.*": 1.0}), "fits no pattern"),
    "patterns and groups": (lambda: Clipping({"*": 1.0}, "per_layer"), "leave out groups="),
    "unknown groups": (lambda: Clipping(1.0, "layers"), "groups must be"),  # type: ignore[arg-type]
    "unknown weights": (
        lambda: Clipping(1.0, weights="auto"),  # type: ignore[arg-type]
        "weights must be",
    ),
    "quantile of one": (lambda: AdaptiveClipping(quantile=1.0), "between 0 and 1"),
    "counts spend everything": (
        lambda: private(max_norm=None, clipping=AdaptiveClipping(count_noise=0.4)),
        "Give count_noise more than 0.5",
    ),
    "no noise said": (lambda: private(noise_multiplier=None), "either noise_multiplier"),
    "noise and target": (lambda: private(target_epsilon=1.0), "either noise_multiplier"),
    "negative noise": (lambda: private(noise_multiplier=-1.0), "zero (not private) or more"),
    "target without delta": (
        lambda: private(noise_multiplier=None, target_epsilon=1.0, epochs=1),
        "target_delta=",
    ),
    "delta of one": (lambda: private(target_delta=1.0), "delta must be a probability"),
    "target of zero": (
        lambda: private(noise_multiplier=None, target_epsilon=0.0, target_delta=1e-3, epochs=1),
        "target_epsilon must be",
    ),
    "no epoch": (lambda: private(epochs=0), "epochs must be a whole number"),
    "unknown sampling": (lambda: private(sampling="uniform"), "sampling must be one of"),
    "unknown accountant": (lambda: private(accountant="prv"), "accountant must be"),
    "seed that is none": (lambda: private(seed="now"), "seed must be a whole number"),
}


@pytest.mark.parametrize("misuse", BEFORE)
def test_refused_when_made(misuse: str) -> None:
    check_refused(BEFORE[misuse])


def test_there_are_enough() -> None:
    """Of those alone that raise before any step."""
    assert len(BEFORE) >= 50
