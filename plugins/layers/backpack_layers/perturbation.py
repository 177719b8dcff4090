"""Quantities at inputs and outputs of modules, instead of parameters.

A tensor between modules is not a parameter, but ``x + δ`` with ``δ = 0`` has one: every quantity of
``δ`` is the quantity of ``x``. Flax has the same as ``Module.perturb``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import extend
from backpack_core.errors import UnsupportedError, UsageError, nearest
from backpack_core.extending import is_extended
from backpack_core.record.models import PATH_ATTRIBUTE
from backpack_core.record.nested import iter_tensors
from backpack_core.record.view import View
from backpack_products.columns import ApartColumns
from backpack_products.nested import map_tensors
from backpack_products.parametric import ProductRule
from backpack_products.product import DenseProduct, SampleProduct

__all__ = ["Perturbation", "Perturbations", "perturb"]

At = Literal["input", "output"]
_PLACES: Final = ("input", "output")


class Perturbation(Module):
    """``x ↦ x + δ`` with ``δ = 0``, one ``δ`` for all samples.

    Args:
        shape: The shape of ``δ``.
        like: A tensor of its type, on its device.

    Attributes:
        value: ``δ``.
    """

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        super().__init__()
        self.value = Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def forward(self, input: Tensor) -> Tensor:
        """Add ``δ``."""
        return input + self.value


class PerturbationRule(ProductRule):
    """The Jacobian of every sample in ``δ`` is the identity."""

    module_types = (Perturbation,)
    params = ("value",)
    linear_in_params = ("value",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat

    def _param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
        return _AtSamples(mat, view.path)

    def apart_products(
        self, view: View, names: Sequence[str], columns: ApartColumns
    ) -> list[SampleProduct]:
        """Refused: one ``δ`` for all entries of axis 0 would add up those of one sample."""
        raise _samples_elsewhere(view.path)


class _AtSamples(DenseProduct):
    """``M`` itself; its axis of samples is that of the tensor that was received."""

    def __init__(self, mat: Tensor, where: str) -> None:
        super().__init__(mat)
        self._where = where

    def of_samples(self, samples: int, kept: dict[Any, Any]) -> SampleProduct:
        """Refused, for the same reason."""
        raise _samples_elsewhere(self._where)


def _samples_elsewhere(path: str) -> UnsupportedError:
    return UnsupportedError(
        f"Axis 0 of the tensor at {path} does not hold the samples, so one perturbation for all "
        "samples has no meaning there. Name a module around it that receives [N, *], or write "
        "perturb(..., each=True), which perturbs every entry separately."
    )


class Perturbations(Mapping[str, Any]):
    """The perturbations of a forward pass, by the path of the module.

    ``received["2"]`` is the parameter ``δ`` at the module ``"2"``; results lie on it. A module that
    ran several times has one for each call: ``received.calls("2")``.
    """

    def __init__(self, paths: tuple[str, ...], each: bool) -> None:
        self._each = each
        self._made: dict[str, list[Perturbation]] = {path: [] for path in paths}
        self._count = dict.fromkeys(paths, 0)
        self._runs = False

    def calls(self, path: str) -> list[Any]:
        """One ``δ`` for each call of a module in the latest forward pass, in order.

        Args:
            path: One of the paths that were named.

        Raises:
            UsageError: The path was not named.
        """
        if path not in self._made:
            raise UsageError(
                f"perturb(...) was not given {path!r}{nearest(path, self._made) or '.'} It has "
                f"{', '.join(map(repr, self._made))}."
            )
        return [each.value for each in self._made[path][: self._count[path]]]

    def __getitem__(self, path: str) -> Any:
        """``δ`` of the one call of a module."""
        perturbations = self.calls(path)
        if len(perturbations) != 1:
            many = f"ran {len(perturbations)} times: take one of perturbations.calls({path!r})"
            none = (
                "did not run in this block. Run the model inside the block, and name modules that "
                "are called: a module around this one may use its weights without calling it"
            )
            raise UsageError(f"The module {path!r} {many if perturbations else none}.")
        return perturbations[0]

    def __iter__(self) -> Iterator[str]:
        """The paths."""
        return iter(self._made)

    def __len__(self) -> int:
        """How many modules were named."""
        return len(self._made)

    def begin(self, *_: Any) -> None:
        """A forward pass of the model begins: calls are counted from zero."""
        self._count = dict.fromkeys(self._made, 0)
        self._runs = True

    def end(self, *_: Any) -> None:
        """It has ended."""
        self._runs = False

    def added(self, path: str, received: Tensor) -> Tensor:
        """The tensor with the perturbation of the next call added."""
        if not self._runs:
            raise UnsupportedError(
                f"The module {path!r} runs outside a forward pass of the model of perturb(...). "
                "If a checkpoint runs it again, name a module outside the checkpoint. If you call "
                "parts of the model yourself, give perturb(...) the part that you call."
            )
        made, number = self._made[path], self._count[path]
        self._count[path] += 1
        shape = received.shape[not self._each :]
        if number == len(made) or not _fits(made[number].value, shape, received):
            new = extend(Perturbation(shape, received))
            new.__dict__[PATH_ATTRIBUTE] = path
            made[number : number + 1] = [new]
        perturbation = made[number]
        # Not through the module: its rule adds up samples. A plain function is looked at entry by
        # entry, wherever samples lie.
        result: Tensor = received + perturbation.value if self._each else perturbation(received)
        return result


def _fits(known: Tensor, shape: torch.Size, like: Tensor) -> bool:
    return known.shape == shape and known.dtype == like.dtype and known.device == like.device


@contextmanager
def perturb(
    model: Module,
    *paths: str,
    at: At = "input",
    argument: int | str | None = None,
    each: bool = False,
    alone: bool = False,
) -> Iterator[Perturbations]:
    """Add a parameter ``δ = 0`` to what modules receive, so that quantities are read there.

    Run the model inside the block. A later backward pass stores on ``δ`` what it stores on any
    parameter: ``DiagGGNExact`` the diagonal in the module's input, ``BatchGrad`` the gradient of
    each sample, ``KFAC`` the block, ``Jacobians`` the Jacobian, ``HMP`` products. Only the way
    through the module counts: a residual connection past it, for instance, is not perturbed.

    ``δ`` is a parameter in every respect: quantities over all parameters (clipping, ``GGNGram``,
    ``NTK``) count it.

    Args:
        model: An extended model.
        paths: Where modules lie in it; ``""`` is the model itself.
        at: ``"input"``, what the modules receive, or ``"output"``, what they return.
        argument: Which tensor, by its place among the arguments (or results) or by the name of a
            keyword. Default: the first floating-point tensor. Arguments that are the same tensor
            get the same perturbation.
        each: ``False``: ``δ`` has the shape ``[*]`` of one sample and is added to all, so that
            ``diag_ggn_exact`` is ``[*]``, and ``diag_ggn_exact_batch`` ``[N, *]``. ``True``: ``δ``
            has the shape of the tensor, for products with a vector for each sample (``HMP``,
            ``GGNMP``, ``JMP``), and wherever axis 0 does not hold the samples.
        alone: Freeze the model's own parameters in the block, so that its forward passes
            differentiate perturbations only, and a backward pass takes no time for anything else.

    Yields:
        The perturbations, by path.

    Raises:
        UsageError: The model is not extended, or no module or argument has the given name.
        UnsupportedError: A module receives no floating-point tensor, or runs in a checkpoint.

    Example:
        >>> with perturb(model, "", "3") as received:
        ...     loss = lossfunc(model(x), y)
        >>> with backpack(DiagGGNExact(), BatchDiagGGNExact()):
        ...     loss.backward()
        >>> saliency = received[""].diag_ggn_exact_batch  # of the shape of x
    """
    modules = _modules(model, paths, at)
    perturbations = Perturbations(paths, each)
    with ExitStack() as stack:
        for path, module in modules.items():
            hook = _Hook(perturbations, path, argument)
            put = hook.put_before if at == "input" else hook.put_behind
            stack.callback(put(module).remove)
        begins = model.register_forward_pre_hook(perturbations.begin, prepend=True)
        stack.callback(begins.remove)
        ends = model.register_forward_hook(perturbations.end, always_call=True)
        stack.callback(ends.remove)
        for parameter in [p for p in model.parameters() if alone and p.requires_grad]:
            stack.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        yield perturbations


def _modules(model: Module, paths: tuple[str, ...], at: str) -> dict[str, Module]:
    if at not in _PLACES:
        raise UsageError(f'perturb takes at="input" or at="output". Got {at!r}.')
    if not is_extended(model):
        raise UsageError("perturb takes an extended model: write perturb(extend(model), ...).")
    if not paths or not all(isinstance(path, str) for path in paths):
        raise UsageError('perturb takes paths of modules, as in perturb(model, "0", "2").')
    known = dict(model.named_modules())
    for path in paths:
        if path not in known:
            raise UsageError(f"The model has no module at {path!r}{nearest(path, known) or '.'}")
    return {path: known[path] for path in paths}


class _Hook:
    """Perturbs one of the tensors that a module receives or returns."""

    def __init__(self, made: Perturbations, path: str, argument: int | str | None) -> None:
        self._made, self._path, self._argument = made, path, argument

    def put_before(self, module: Module) -> Any:
        """Run the hook before the module, and before the hook that records its call."""
        return module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    def put_behind(self, module: Module) -> Any:
        """Run the hook after the module."""
        return module.register_forward_hook(self._behind)

    def _before(self, module: Module, args: Any, kwargs: Any) -> Any:
        return self._perturbed((args, kwargs), [*enumerate(args), *kwargs.items()])

    def _behind(self, module: Module, args: Any, result: Any) -> Any:
        items = result.items() if isinstance(result, Mapping) else enumerate(_listed(result))
        return self._perturbed(result, [*items])

    def _perturbed(self, whole: Any, items: list[tuple[int | str, Any]]) -> Any:
        """A nested structure of arguments or results, with one tensor perturbed."""
        asked = self._argument
        named = [value for name, value in items if asked is None or name == asked]
        found = [t for t in iter_tensors(tuple(named)) if t.is_floating_point()]
        if not found:
            has = f"no floating-point tensor{'' if asked is None else f' at {asked!r}'}"
            raise UnsupportedError(
                f"perturb: the module {self._path!r} has {has}. It has "
                f"{', '.join(repr(name) for name, _ in items) or 'nothing'}. Numbers of tokens "
                "have no derivatives: name the module behind the embedding."
            )
        chosen = found[0]
        perturbed = self._made.added(self._path, chosen)
        return map_tensors(whole, lambda t: perturbed if t is chosen else t)


def _listed(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
