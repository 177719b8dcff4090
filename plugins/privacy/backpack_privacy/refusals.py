"""Checks that refuse what cannot be private before the first step, and say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from backpack_core.errors import SampleMixingError, UsageError

RECIPE = "replace_batch_norm(model) puts GroupNorm in its place, before the optimizer is made"


def replace_batch_norm(
    model: nn.Module, norm: Callable[[_BatchNorm], nn.Module] | None = None
) -> nn.Module:
    """Replace each batch normalisation by one that treats samples separately.

    Call it before you make the optimizer: the new layers have their own parameters.

    Args:
        model: The model, which is changed in place.
        norm: What to put there; default: ``GroupNorm`` with at most 32 groups, and the scale and
            shift of the old layer.

    Returns:
        The model, or what replaces it if it is a batch normalisation itself.

    Raises:
        UsageError: It is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"replace_batch_norm(model) takes a module. Got {type(model).__name__}.")
    make = norm or _group_norm
    if isinstance(model, _BatchNorm):
        return make(model).train(model.training)
    for name, child in model.named_children():
        new = replace_batch_norm(child, norm)
        if new is not child:
            setattr(model, name, new)
    return model


def _group_norm(old: _BatchNorm) -> nn.Module:
    groups = next(g for g in range(min(32, old.num_features), 0, -1) if not old.num_features % g)
    new = nn.GroupNorm(groups, old.num_features, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight.data, new.bias.data = old.weight.data.clone(), old.bias.data.clone()
        new.weight.requires_grad_(old.weight.requires_grad)
        new.bias.requires_grad_(old.bias.requires_grad)
    return new.to(old.weight.device) if old.affine else new


def check_model(model: Any) -> None:
    """Refuse layers that mix samples, or keep data in buffers.

    Raises:
        UsageError: ``model`` is not a model, or another library has made it private.
        SampleMixingError: A batch normalisation is in train mode.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"The first argument must be the model. Got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "DataParallel splits batches without the accounting's knowledge. Pass the model "
            "itself, and use one process for each device."
        )
    if type(model).__name__ == "GradSampleModule":
        raise UsageError(
            "Opacus has wrapped the model already, so everything would be computed twice. Pass the "
            "model itself, GradSampleModule(model)._module."
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise SampleMixingError(
                f"{type(module).__name__} '{name}' makes every sample of a batch influence every "
                f"other, so no bound on one sample's share exists. {RECIPE}; or keep it in eval "
                "mode, with statistics of public data."
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise UsageError(
                f"{type(module).__name__} '{name}' keeps running statistics of private data in its "
                "buffers, without noise. Set track_running_stats=False."
            )


PRIVATE: WeakSet[Optimizer] = WeakSet()  # optimizers that take private gradients now


def check_new(optimizer: Any) -> None:
    """Refuse an optimizer that is private already.

    Raises:
        UsageError: The optimizer is private already.
    """
    if isinstance(optimizer, Optimizer) and optimizer in PRIVATE:
        raise UsageError(
            "The optimizer is private already: make_private(...) was called with it. Continue with "
            "what that call returned, or call its close() first."
        )


def check_open(optimizer: Optimizer) -> None:
    """Refuse to continue with an optimizer that is no longer private.

    Raises:
        UsageError: The optimizer is no longer private.
    """
    if optimizer not in PRIVATE:
        raise UsageError(
            "close() was called, so the optimizer takes plain gradients. Call make_private(...) "
            "again."
        )


def check_optimizer(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The trained parameters by name, which must be the same in model and optimizer.

    Raises:
        UsageError: They are not the same, or the optimizer cannot take noisy gradients.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"The third argument must be a torch.optim.Optimizer. Got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times in a step, and every evaluation would need to "
            "be private. Use an optimizer that takes one gradient for a step, such as SGD or Adam."
        )
    if any(kind.__module__.startswith("backpack_optimizers.") for kind in type(optimizer).__mro__):
        raise UsageError(
            f"{type(optimizer).__name__} reads curvature from private data, and no noise is added "
            "to that. Use an optimizer that takes gradients only, such as SGD or Adam."
        )
    if type(optimizer).__name__.startswith("DP") and "opacus" in type(optimizer).__module__:
        raise UsageError(
            "The optimizer is already one of Opacus. Pass optimizer.original_optimizer."
        )
    trained: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if p.requires_grad
    }
    if not trained:
        raise UsageError(
            "No parameter of the model requires a gradient. Call requires_grad_(True) on those to "
            "train, before make_private(...)."
        )
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    _check_same(model, trained, stepped)
    return trained


def _check_same(model: nn.Module, trained: dict[str, Tensor], stepped: set[Tensor]) -> None:
    ours = {*trained.values()}
    left = next((name for name, p in trained.items() if p not in stepped), None)
    strangers = [p for p in stepped if p not in {*model.parameters()}]
    if strangers:
        raise UsageError(
            f"The optimizer steps on a parameter of shape {[*strangers[0].shape]} that the model "
            "does not have. If the model was changed after the optimizer was made (adapters added, "
            "layers replaced or moved), make the optimizer again. If the parameter belongs to "
            "another module, put both into one model."
        )
    if left is not None:
        raise UsageError(
            f"The parameter {left} requires a gradient, but the optimizer does not step on it: it "
            "would use up a part of the bound and never move. Add it to the optimizer, or call "
            "requires_grad_(False) on it."
        )
    if stepped - ours:
        name = next(n for n, p in model.named_parameters() if p in stepped - ours)
        raise UsageError(
            f"The optimizer steps on {name}, which requires no gradient, so it would not be "
            "trained. Call requires_grad_(True) on it, or leave it out of the optimizer."
        )


def is_half(dtype: torch.dtype) -> bool:
    """Whether numbers have fewer bits than in single precision."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def check_precision(named: Mapping[str, Tensor]) -> None:
    """Refuse trained parameters in half precision.

    Raises:
        UsageError: The clipped sum would be rounded by more than one sample may change it.
    """
    for name, parameter in named.items():
        if is_half(parameter.dtype):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(
                f"The parameter {name} is in {dtype}, which rounds sums of gradients by more than "
                "one sample may change them, so the noise would not hide a sample. Keep trained "
                "parameters in float32, model.float(), and compute in torch.autocast."
            )


def check_no_hook(named: Mapping[str, Tensor]) -> None:
    """Refuse hooks on gradients of trained parameters, which would not run.

    Raises:
        UsageError: A parameter has one.
    """
    for name, parameter in named.items():
        hooks: Any = parameter
        if hooks._backward_hooks or hooks._post_accumulate_grad_hooks:
            raise UsageError(
                f"The parameter {name} has a hook on its gradient, but a private gradient is made "
                "in the step, after the backward pass, so the hook would not run. Remove it. To "
                "leave entries of a parameter out, compute it from others: "
                "torch.nn.utils.parametrize, or torch.nn.utils.prune."
            )


def check_loss(lossfunc: Any, normaliser: Any) -> None:
    """Refuse a loss with an unknown divisor.

    Raises:
        UsageError: It is a function, and ``normaliser`` is not given; it is a module that divides
            by something else; or it cannot be called.
    """
    if not callable(lossfunc):
        raise UsageError(
            f"The second argument must be the loss function. Got {type(lossfunc).__name__}."
        )
    if getattr(lossfunc, "reduction", None) == "none":
        raise UsageError(
            f'{type(lossfunc).__name__} has reduction="none", so it is not known how the losses '
            'are added up. Use reduction="mean" or "sum".'
        )
    told = normaliser in ("samples", None) or (
        isinstance(normaliser, (int, float)) and not isinstance(normaliser, bool)
    )
    if not (told or normaliser == "loss"):
        raise UsageError(
            'normaliser must be "loss" (what the loss module says), "samples" (a mean over '
            f"samples), a number, or None (a sum). Got {normaliser!r}."
        )
    if not isinstance(lossfunc, nn.Module) and normaliser == "loss":
        raise UsageError(
            "The loss is a function, so it is not known whether it divides by the number of "
            "samples, and the bound could have another scale. Use a module, such as "
            'nn.CrossEntropyLoss(). Or say it: normaliser="samples" for a mean over samples, '
            "normaliser=None for a sum."
        )
    _check_agree(lossfunc, normaliser)


def _check_agree(lossfunc: Any, normaliser: Any) -> None:
    """Refuse a divisor that is not the loss module's: gradients would depend on the batch's size.

    A sample that is added would then change what all others give, which no bound covers.
    """
    reduction = getattr(lossfunc, "reduction", None)
    if not isinstance(lossfunc, nn.Module) or normaliser == "loss":
        return
    if (reduction, normaliser == "samples") in (("mean", False), ("sum", True)):
        raise UsageError(
            f'{type(lossfunc).__name__} has reduction="{reduction}", and normaliser={normaliser!r} '
            "says otherwise. Gradients of samples would depend on how many are in the batch, and "
            "noise for one sample would not hide that. Leave normaliser= out: the module says what "
            "it divides by."
        )


def check_number(loss: Any) -> None:
    """Refuse a value that is not a loss to go backward from.

    Raises:
        UsageError: The value is not a tensor, not a single number, or has no graph.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"private.step takes the loss, a tensor. Got {type(loss).__name__}: pass only the "
            "loss, without .item()."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"private.step takes a loss of one number. Got {[*loss.shape]}: add it up, loss.sum(), "
            "and write make_private(..., normaliser=None)."
        )
    if not loss.requires_grad:
        raise UsageError(
            "The loss has no graph to go backward through. Remove torch.no_grad(), .detach() and "
            "torch.inference_mode()."
        )


def check_pass(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Refuse a backward pass that would not be private because the model has changed.

    Raises:
        UsageError: Other parameters are trained, or one is in half precision, or has a hook or a
            plain gradient.
        SampleMixingError: A batch normalisation is in train mode.
    """
    check_model(model)
    _check_trained(model, named)
    check_precision(named)
    check_no_hook(named)
    check_no_gradient(named)


def _check_trained(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    if {n for n, p in model.named_parameters() if p.requires_grad} != {*named}:
        raise UsageError(
            "Other parameters require a gradient than when make_private(...) was called: call it "
            "after all layers are added and frozen. To train others from now on, call "
            "private.close(), add them to the optimizer, call make_private(...) again, and load "
            "private.state_dict(), which says what was spent."
        )


def check_stepped(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that now steps on other parameters.

    Raises:
        UsageError: The optimizer steps on other parameters.
    """
    if {p for group in optimizer.param_groups for p in group["params"]} != {*named.values()}:
        raise UsageError(
            "The optimizer steps on other parameters than when make_private(...) was called, "
            "perhaps by gradients without noise. Call add_param_group before make_private(...)."
        )


def check_no_closure(arguments: Iterable[Any]) -> None:
    """Refuse a closure, which an optimizer would call in its step.

    Raises:
        UsageError: An argument can be called.
    """
    if any(callable(argument) for argument in arguments):
        raise UsageError(
            "optimizer.step(closure) evaluates the loss itself, without clipping. Call "
            "private.step(loss)."
        )


def check_finite(gradients: Iterable[Tensor]) -> None:
    """Refuse private gradients that are not numbers.

    Raises:
        UsageError: A gradient is not a number.
    """
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise UsageError(
            "The gradient of a sample is not a number, so the sum cannot be private. Look for "
            "inputs that are not finite, and for a mean over targets of which none counts (use "
            'reduction="sum"). Use autocast with bfloat16 instead of float16 (or a scaler, '
            "private.step(loss, scaler=scaler))."
        )


def check_no_gradient(named: Mapping[str, Tensor]) -> None:
    """Refuse plain gradients instead of private ones.

    Raises:
        UsageError: A trained parameter has one.
    """
    name = next((name for name, p in named.items() if p.grad is not None), None)
    if name is not None:
        raise UsageError(
            f"The parameter {name} has a plain gradient: backward() was called outside "
            "private.step(loss) and `with private:`, or zero_grad() was not called before. "
            "A step on it would not be private. Remove that backward(), and call "
            "optimizer.zero_grad() once."
        )
