"""A model and its loss, and the gradients of the samples' own losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from math import isclose, isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from backpack_attribution.forms import Value
from backpack_attribution.identities import content_hash
from backpack_core import Extension, backpack, is_extended, unextend
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad
from backpack_data.borrowed import extended, same_gradients
from backpack_firstorder import SampleGradients
from backpack_firstorder.tokens import Per, as_per
from backpack_interplay.compiled import uncompiled
from backpack_products.fingerprint import Fingerprint, fingerprint

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Split: TypeAlias = Callable[[Any], tuple[Any, Any]]

_HASHED = 1024  # entries of each parameter
_MEANS = "mean", "batchmean"
FIELD = "attribution"  # the attribute of parameters that holds results of our passes for a while


class Problem:
    """A model, a loss, and how a batch is read.

    The gradient of a sample is that of its own loss, without the divisor of a mean: for a loss
    module with ``reduction="mean"`` or ``"batchmean"``, that of ``"sum"`` is taken. Texts have the
    sum over their tokens.

    Attributes:
        model: The model. It runs in evaluation mode or without random layers.
        lossfunc: The loss as it was given.
        per: What has a separate gradient: a ``"sample"``, or each ``"token"`` of it, those of the
            first sample first.
        parameters: Trained parameters by name.
    """

    def __init__(
        self, model: Module, lossfunc: Loss, batch: Split | None = None, per: Per = "sample"
    ) -> None:
        """Check and store the parts.

        Args:
            model: The model, extended or not.
            lossfunc: A loss module, or a function of output and target that is a sum over samples.
            batch: Makes ``(inputs, targets)`` from an item of a loader, if that is not a pair of
                this kind or a dictionary with ``"labels"``.
            per: ``"sample"`` or ``"token"``.

        Raises:
            UsageError: An argument has the wrong type, no parameter is trained, or the model has
                random layers. The loss of the first batch shows other random operations.
        """
        _require(model, lossfunc)
        model = plain(model)
        self.model, self.lossfunc, self.split = model, lossfunc, batch or split
        self.per = as_per(per)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._summed = _summed(lossfunc)
        self._is_known_sum = _is_of_torch(lossfunc)
        self._is_repeated = False

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    def plugins(self) -> Fingerprint:
        """The plugins that compute the gradients."""
        modules = [m for m in (self.model, self._summed) if isinstance(m, Module)]
        return fingerprint(modules, [BatchGrad])

    def weights(self) -> str:
        """A hash of some entries of each parameter; empty if they are sharded.

        Training changes nearly all entries, so some tell, and a large model is not read as a whole.
        They are rounded to bfloat16, so that it is the same where a model runs in half precision.
        Buffers with numbers count, too, if a checkpoint has them, as those of a normalisation.
        Tensors are taken in the order of their names, which projections depend on.
        """
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        if any(hasattr(tensor, "placements") for tensor in tensors.values()):
            return ""
        buffers = {n: b for n, b in self.model.named_buffers() if b.is_floating_point()}
        kept = self.model.state_dict().keys() & buffers.keys()
        tensors |= {name: buffers[name] for name in kept}
        flat = [tensor.detach().flatten() for _, tensor in sorted(tensors.items())]
        some = [each[:: max(1, len(each) // _HASHED)].to(torch.bfloat16) for each in flat]
        return content_hash(some)

    def said_of_loss(self) -> str:
        """The settings of a loss module, apart from a mean or a sum; empty for a function."""
        if not isinstance(self._summed, Module):
            return ""
        said = []
        for module in self._summed.modules():
            plain = {k: v for k, v in vars(module).items() if isinstance(v, (str, int, float))}
            plain.pop("training")
            said.append(f"{type(module).__name__}({', '.join(f'{k}={plain[k]!r}' for k in plain)})")
        tensors = self._summed.state_dict()
        return " ".join([*said, *([content_hash(tensors)] if tensors else [])])

    def with_loss(self, lossfunc: Loss | None) -> Problem:
        """The same model with another loss, if one is given, for whole samples."""
        if lossfunc is None and self.per == "sample":
            return self
        return Problem(self.model, lossfunc or self.lossfunc, self.split)

    def extended(self) -> extended:
        """Extend model and loss for a while, if they are not extended."""
        return extended(self.model, self._summed)

    def split_on_device(self, batch: Any) -> tuple[Any, Any]:
        """Copies of inputs and targets of a batch, on the device of the model."""
        made = self.split(batch)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise UsageError(f"batch= must return (inputs, targets). Got {made!r:.80}.")
        inputs, targets = made
        return on_device(inputs, self.device), on_device(targets, self.device)

    def forward(self, model: Module, batch: Any) -> tuple[Any, Any]:
        """Output and target of a batch, on the device of the model."""
        inputs, targets = self.split_on_device(batch)
        if isinstance(inputs, Mapping):
            output = model(**inputs)
            return getattr(output, "logits", output), targets
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs), targets

    def loss(self, batch: Any) -> Tensor:
        """The sum of the samples' own losses, with its graph."""
        output, targets = self.forward(self.model, batch)
        loss = self._summed(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                "A loss must be a tensor of one number that depends on trained parameters: add it "
                "up, loss.sum(), and remove .detach(), .item(), torch.no_grad() and "
                f"torch.inference_mode(). Got {loss!r:.80}."
            )
        if not self._is_known_sum or _may_broadcast(output, targets):
            self._check_sum(loss.detach(), output, targets)
        if not self._is_repeated:
            self._check_repeated(loss.detach(), batch)
        return loss

    @torch.no_grad()
    def weight(self, batch: Any) -> float:
        """What a mean over a batch divides by; zero if no target counts."""
        output, targets = self.forward(self.model, batch)
        losses: list[Any] = [self.lossfunc, self._summed]
        if _is_half(output):  # a sum of many losses leaves its range, and a ratio is inexact
            losses = [copy.deepcopy(each).float() for each in losses]
            output, targets = (t.float() if _is_half(t) else t for t in (output, targets))
        others = (
            [torch.zeros_like(output), torch.ones_like(output)]
            if isinstance(output, Tensor)
            else []
        )
        for guess in (output, *others):  # the loss may be zero, but not of all three
            mean, total = (float(each(guess, targets)) for each in losses)
            if mean and isfinite(mean):
                return total / mean
        return 0.0

    def consume(self, batch: Any, consumer: Callable[[str, SampleGradients], object]) -> None:
        """Pass the gradients of a batch to a function, one parameter at a time.

        ``.grad`` does not change.

        Args:
            batch: A batch of the loader.
            consumer: Called with the name of each parameter and its ``[N, *θ]`` during the backward
                pass, which holds only these gradients.
        """
        settings: Any = {"savefield": FIELD, "form": "product", "per": self.per}
        self.compute(batch, BatchGrad(consumer=consumer, **settings))

    def compute(self, batch: Any, extension: Extension) -> dict[str, Any]:
        """What an extension finds for a batch, by parameter; parameters keep no results.

        Args:
            batch: A batch of the loader.
            extension: The extension. It stores under ``FIELD``, so that other results stay.
        """
        # Of a parameter that a function uses, autograd computes the gradient; and the forward pass,
        # outside of the block, may go backward itself.
        with torch.enable_grad(), uncompiled(), same_gradients(self.parameters.values()):
            loss = self.loss(batch)
            with backpack(extension, gradient="none"):
                loss.backward()
        found: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if FIELD in vars(parameter):
                found[name] = vars(parameter).pop(FIELD)
        return found

    def gradients(self, batch: Any) -> dict[str, Value]:
        """Gradients of the samples' own losses, ``[N, *θ]`` by parameter, as products.

        By token, ``[N · T, *θ]``.

        Raises:
            UsageError: No trained parameter has a gradient.
        """
        found: dict[str, Value] = {}
        self.consume(batch, found.__setitem__)
        if not found:
            raise UsageError(
                "The loss depends on no trained parameter: look at the results of batch= and of "
                "the loss."
            )
        return {name: found[name] for name in self.parameters if name in found}

    def _check_repeated(self, loss: Tensor, batch: Any) -> None:
        """Compare the loss of the first batch with that of another pass, once."""
        again = self._summed(*self.forward(self.model, batch)).detach()
        rtol = torch.finfo(loss.dtype).eps ** 0.5
        if not torch.allclose(loss, again, rtol=rtol, equal_nan=True):
            raise UsageError(
                f"The model is random: its loss of one batch is {float(loss):.6g} and then "
                f"{float(again):.6g}. Call model.eval() first, or take out what draws numbers."
            )
        self._is_repeated = True

    def _check_sum(self, loss: Tensor, output: Any, targets: Any) -> None:
        """Compare the loss of the first batch with the sum of those of its halves, once."""
        samples = samples_in(output)
        if samples < 2:
            return
        if not bool(loss.isfinite()):
            raise UsageError(
                f"The loss of a batch is {float(loss)}, so it cannot be compared with the losses "
                "of its samples: look at their inputs and targets, or leave some out."
            )
        with torch.no_grad():
            halves = [_some(output, samples, part) for part in (slice(1), slice(1, None))]
            wanted = [_some(targets, samples, part) for part in (slice(1), slice(1, None))]
            parts = [float(self._summed(o, t)) for o, t in zip(halves, wanted, strict=True)]
        total, rtol = sum(parts), max(1e-3, 4 * torch.finfo(loss.dtype).eps)
        # Parts of different signs may cancel, but what they were rounded by does not.
        if not isclose(float(loss), total, rel_tol=rtol, abs_tol=rtol * sum(map(abs, parts))):
            what = "a loss module of torch, or another loss that sums over samples, without a mean"
            if _may_broadcast(output, targets):
                what = f"targets of the shape of the output, {[*output.shape]}"
            raise UsageError(
                f"The loss of a batch, {float(loss):.4g}, is not the sum of its samples' losses, "
                f"{total:.4g}. Give {what}."
            )
        self._is_known_sum = True


def plain(model: Module) -> Module:
    """The model that ``torch.compile`` was called on: it runs eagerly, and has names of its own."""
    found: Module = getattr(model, "_orig_mod", model)
    return found


def split(item: Any) -> tuple[Any, Any]:
    """Inputs and targets, from a pair or from a dictionary with ``"labels"``.

    Raises:
        UsageError: The item is not one of these.
    """
    if isinstance(item, Mapping) and "labels" in item:
        return {key: value for key, value in item.items() if key != "labels"}, item["labels"]
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise UsageError(
        "A batch must be (inputs, targets), or a dictionary with 'labels'. Got "
        f"{type(item).__name__}. Give one batch as a list, [(inputs, targets)]. For batches of "
        "another kind, give batch=, a function that makes (inputs, targets) from one."
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Copies of tensors in dictionaries, tuples and lists: a model may write into its inputs."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: on_device(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [on_device(part, device) for part in value]
    return value


def samples_in(value: Any) -> int:
    """Number of samples: the length of the first tensor in a batch.

    Raises:
        UsageError: The batch has no tensor.
    """
    if isinstance(value, Tensor) and value.dim():
        return len(value)
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    for part in parts:
        try:
            return samples_in(part)
        except UsageError:
            continue
    raise UsageError("A batch needs a tensor with the samples on axis 0, but this one has none.")


def _may_broadcast(output: Any, targets: Any) -> bool:
    """Whether targets are numbers of another shape than the output, ``[N]`` and ``[N, 1]``."""
    are_tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
    return are_tensors and targets.is_floating_point() and targets.shape != output.shape


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4


def _some(value: Any, samples: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == samples else value
    if isinstance(value, Mapping):
        return {key: _some(entry, samples, part) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_some(entry, samples, part) for entry in value]
    return value


def _summed(lossfunc: Loss) -> Loss:
    """A loss module that sums, if the given one averages; others are returned unchanged."""
    if isinstance(lossfunc, Module) and getattr(lossfunc, "reduction", None) in _MEANS:
        found: Any = copy.deepcopy(lossfunc)
        found.reduction = "sum"
        summed: Loss = unextend(found) if is_extended(found) else found
        return summed
    return lossfunc


def _is_of_torch(lossfunc: Loss) -> bool:
    """Whether a loss is known to sum if its attribute says so; others may only store the word."""
    is_told = getattr(lossfunc, "reduction", None) in (*_MEANS, "sum")
    return is_told and type(lossfunc).__module__.startswith("torch.nn.")


def _require(model: Any, lossfunc: Any) -> None:
    if not isinstance(model, Module):
        raise UsageError(f"The model must be a torch.nn.Module. Got {type(model).__name__}.")
    if not callable(lossfunc) or isinstance(lossfunc, type):
        raise UsageError(
            "The loss must be a module, such as CrossEntropyLoss(), or a function of output and "
            f"target. Got {lossfunc!r:.80}. The order is model, loss, training data, queries."
        )
    if getattr(lossfunc, "reduction", None) == "none":
        raise UsageError('The loss has reduction="none": take "mean" or "sum".')
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "No parameter of the model is trained: set requires_grad for some. The model is "
            f"{type(model).__name__}."
        )
    for name, module in model.named_modules():
        rate = getattr(module, "p", None)
        is_random = isinstance(rate, float) and rate > 0 and "Dropout" in type(module).__name__
        if module.training and (is_random or "BatchNorm" in type(module).__name__):
            raise UsageError(
                f"{type(module).__name__} {name!r} is in train mode, so a sample's gradient is "
                "random or depends on the other samples: call model.eval() first."
            )
