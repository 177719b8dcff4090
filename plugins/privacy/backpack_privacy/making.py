"""``make_private`` makes a training loop private in three lines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from backpack_core import extend
from backpack_core.errors import UsageError
from backpack_privacy.accounting import Accountant, Kind, check_delta
from backpack_privacy.clipping import Clipping
from backpack_privacy.private import Private
from backpack_privacy.processes import Processes, alone
from backpack_privacy.randomness import source
from backpack_privacy.refusals import (
    check_loss,
    check_model,
    check_new,
    check_no_hook,
    check_optimizer,
    check_precision,
)
from backpack_privacy.release import Budget, Release
from backpack_privacy.sampling import (
    SAMPLERS,
    PrivateLoader,
    Sampler,
    Sampling,
    Units,
    check_loader,
    check_order,
)
from backpack_privacy.shards import check_shards


def make_private(
    model: Module,
    lossfunc: Callable[..., Tensor],
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    max_norm: float | Mapping[str, float] | None = None,
    clipping: Clipping | None = None,
    sampling: Sampling = "poisson",
    users: Sequence[Hashable] | Tensor | None = None,
    max_records: int | None = None,
    max_rows: int | None = None,
    normaliser: Any = "loss",
    accountant: Kind = "pld",
    seed: int | None = None,
    checks: int = 5,
    public_buffers: Sequence[str] = (),
    process_group: Any = None,
) -> Private:
    """Train with differential privacy (DP-SGD; Abadi et al., 2016, arXiv:1607.00133).

    For each batch, the gradients of the samples' own losses are clipped and added up. Gaussian
    noise is added, and the optimizer gets the sum divided by the expected number of samples.

    Example:
        >>> private = make_private(
        ...     model, lossfunc, optimizer, loader, noise_multiplier=1.0, max_norm=1.0
        ... )
        >>> for inputs, targets in private.loader:
        ...     private.step(lossfunc(model(inputs), targets))

    Model, loss and optimizer stay the user's objects; names in ``state_dict()`` do not change.

    Args:
        model: The model to train, also inside ``DistributedDataParallel``, or sharded by
            ``fully_shard``. It is extended.
        lossfunc: The loss module; it is extended. Or a function, with ``normaliser``.
        optimizer: An optimizer of ``torch.optim`` that takes one gradient for a step.
        loader: The data. Batches are drawn anew: ``batch_size`` is the expected size.
        noise_multiplier: Standard deviation of the noise, relative to the sensitivity. Or:
        target_epsilon: What may be spent in ``epochs`` at ``target_delta``; the noise follows.
        target_delta: The probability that more may leak, below one over the number of samples.
        epochs: The planned number of epochs. Further steps raise an error.
        max_norm: The bound on the gradient of a sample's own loss, in the scale of a loss with
            ``reduction="sum"``. By patterns of names: see :class:`Clipping`.
        clipping: Instead of ``max_norm``: another :class:`Clipping`.
        sampling: ``"poisson"``: each sample is in each batch with the same probability.
            ``"shuffled"``: each is in one batch of an epoch, which costs more privacy.
        users: The user of each record of the data set. Then users are drawn and protected, each
            with all records; ``batch_size`` is the expected number of users.
        max_records: The largest number of records of a user in a batch.
        max_rows: Show batches in parts of at most this many rows, to save memory; a user with more
            is one part. The step is taken after the last part.
        normaliser: What the loss divides by: ``"loss"``: what the loss module says;
            ``"samples"``: the number of rows; ``None``: nothing, since it is a sum; or a number.
        accountant: ``"pld"``, ``"rdp"`` or a function, see
            :class:`~backpack_privacy.accounting.Accountant`.
        seed: For tests; default: a cryptographic generator, which the system seeds.
        checks: The number of steps in which the movement of parameters is compared with their
            private gradients.
        public_buffers: Names of buffers that may change, since they do not depend on data.
        process_group: The processes that train together; default: all.

    Raises:
        UsageError: An argument cannot be private, or is wrong; the message says what to do.
        SampleMixingError: A batch normalisation is in train mode.
    """
    inner = alone(model) if isinstance(model, Module) else model
    check_model(inner)
    check_loss(lossfunc, normaliser)
    check_new(optimizer)
    named = check_optimizer(inner, optimizer)
    check_precision(named)
    check_no_hook(named)
    check_loader(loader)
    if users is not None:
        check_order(loader)
    elif max_records is not None:
        raise UsageError("max_records= is for each user: name them, users=, or leave it out.")
    _check_noise(noise_multiplier, target_epsilon, target_delta, epochs)
    for name, number in (("max_records", max_records), ("max_rows", max_rows), ("epochs", epochs)):
        _check_count(name, number)
    _check_count("checks", checks, 0)
    processes, random = Processes(process_group), source(seed)
    is_sharded = check_shards(inner, named, processes.world, max_rows)
    records, parameters = len(loader.dataset), dict(inner.named_parameters())  # type: ignore[arg-type]
    sizes = {"The number of weights": sum(p.numel() for p in parameters.values())}
    sizes |= {"len(loader.dataset)": records, "batch_size": loader.batch_size or 0}
    processes.check_same(parameters, sizes)
    modules = [inner, lossfunc] if isinstance(lossfunc, Module) else [inner]
    processes.check_plugins(modules)
    units, clip = Units(records, users, max_records), _clipping(max_norm, clipping)
    noise = {"noise_multiplier": noise_multiplier, "target_epsilon": target_epsilon}
    plan = {"target_delta": target_delta, "epochs": epochs, "sampling": sampling}
    drawn = {"users": units.checksum, "max_records": max_records, "checks": checks}
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    others = {"The list of trained parameters": trained, "The clipping": clip.settings()}
    processes.check_settings({**noise, **plan, **drawn, **others})
    sampler = _sampler(sampling, units.count, loader.batch_size, processes)
    counted = Accountant(accountant)
    steps = None if epochs is None else epochs * sampler.steps
    if noise_multiplier is None:
        assert target_epsilon is not None
        assert target_delta is not None
        assert epochs is not None
        assert steps is not None
        count = epochs if sampler.rate is None else steps
        noise_multiplier = counted.noise_for(target_epsilon, target_delta, sampler.rate, count)
    private = Private(
        model,
        lossfunc,
        optimizer,
        inner=inner,
        release=Release(
            clip,
            float(noise_multiplier),
            sampler,
            random,
            counted,
            processes,
        ),
        normaliser=normaliser,
        budget=Budget(target_delta, steps, target_epsilon),
        checks=checks,
        public_buffers=public_buffers,
    )
    private.loader = PrivateLoader(
        *(loader, sampler, units, random, max_rows),
        *(private.draws, private.begins, private.ends),
        always_runs=is_sharded,
    )
    extend(inner)
    if isinstance(lossfunc, Module):
        extend(lossfunc)
    return private


def _clipping(max_norm: float | Mapping[str, float] | None, clipping: Clipping | None) -> Clipping:
    if max_norm is not None and clipping is not None:
        raise UsageError("Give max_norm= or clipping=, not both: Clipping(1.0) has the bound 1.0.")
    if max_norm is None and clipping is None:
        raise UsageError(
            "Give max_norm=, the bound on the gradient of each sample's own loss, or clipping=. "
            "1.0 is a usual start; private.records says what share of the samples it clips."
        )
    if clipping is None:
        assert max_norm is not None
        return Clipping(max_norm)
    if not isinstance(clipping, Clipping):
        raise UsageError(
            f"clipping must be a Clipping, such as Clipping(1.0, 'per_layer'). Got {clipping!r}."
        )
    if clipping.bounds:
        raise UsageError("The clipping belongs to another private model. Make a new one for each.")
    return clipping


def _check_noise(
    noise: Any, epsilon: float | None, delta: float | None, epochs: int | None
) -> None:
    if (noise is None) == (epsilon is None):
        raise UsageError(
            "Give either noise_multiplier=, or target_epsilon= with target_delta= and epochs=."
        )
    if noise is not None:
        is_number = isinstance(noise, (int, float)) and not isinstance(noise, bool)
        if not is_number or not 0 <= noise < inf:
            raise UsageError(f"noise_multiplier must be zero (not private) or more. Got {noise!r}.")
    elif delta is None or epochs is None:
        raise UsageError(
            "A target needs target_epsilon=, target_delta= (below one over the number of samples) "
            "and epochs=: noise depends on how often each sample is used."
        )
    if delta is not None:
        check_delta(delta)


def _check_count(name: str, number: Any, least: int = 1) -> None:
    if number is not None and (not isinstance(number, int) or number < least):
        raise UsageError(f"{name} must be a whole number from {least} on. Got {number!r}.")


def _sampler(sampling: str, units: int, expected: int | None, processes: Processes) -> Sampler:
    if sampling not in SAMPLERS:
        raise UsageError(f"sampling must be one of {', '.join(SAMPLERS)}. Got {sampling!r}.")
    assert expected is not None
    total = expected * processes.world  # a loader's batch_size is that of one process
    if total > units:
        raise UsageError(
            f"A batch would have {total} of {units} samples (users, with users=) on average. Each "
            "is drawn with a probability, which is 1 at most: make batch_size smaller."
        )
    return SAMPLERS[sampling](units, total, processes.rank, processes.world)
