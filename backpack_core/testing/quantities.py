"""The table save field → oracle: what the value of an extension must be. Imports torch only.

Open to authors: :func:`register_quantity` adds a row, and an ``ExtensionCase`` may bring one.
An extension whose save field has no row is checked to be finite and the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_core.testing.compare import SMALLEST_SCALE

if TYPE_CHECKING:
    from backpack_core.testing.reference import Reference

Needs = Literal["gradient", "curvature", "sampling", "second derivative", "structure"]


@dataclass(frozen=True)
class Quantity:
    """What an extension computes.

    Attributes:
        expected: The oracle: reference and name of the parameter to a tensor.
        observed: What to compare with it, made from the value that was stored; default: the value.
        needs: What a net must offer for the extension to have a value there. Every layer has a
            gradient and curvature; one without the rest may refuse. "sampling" is curvature that
            starts at random columns: exact only for the kit's own loss.
        cancels: Whether it is a small difference of large numbers, which half precision does not
            resolve: there it is not checked.
        arguments: What the extension's constructor needs, where it has no defaults.
    """

    expected: Callable[[Reference, str], Tensor]
    observed: Callable[[Any, Reference, str], Tensor] | None = None
    needs: Needs = "gradient"
    cancels: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def observe(self, value: Any, reference: Reference, name: str) -> Tensor:
        """The tensor to compare."""
        found = value if self.observed is None else self.observed(value, reference, name)
        if not isinstance(found, Tensor):
            raise UsageError(f"The value for {name!r} is no tensor but {type(found).__name__}.")
        return found


def _diagonal(blocks: Tensor, reference: Reference, name: str) -> Tensor:
    """The diagonals of ``[N, θ, θ]`` in the shape ``[N, *θ]``."""
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    return diagonal.reshape(len(blocks), *reference.parameters[name].shape)


def _variance(reference: Reference, name: str) -> Tensor:
    """``1/N Σ_n g_n² - (1/N Σ_n g_n)²`` of the gradients as the loss scales them."""
    gradients = reference.gradients(name)
    return gradients.square().mean(0) - gradients.mean(0).square()


def _clipped(reference: Reference, name: str) -> Tensor:
    """Gradients shortened to the norm 0.1 over all parameters, summed."""
    squares = [reference.gradients(p).flatten(1).square().sum(1) for p in reference.parameters]
    factors = (0.1 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
    return torch.einsum("n,n...->...", factors, reference.gradients(name))


def _gram(root: Tensor, reference: Reference, name: str) -> Tensor:
    """Outer products of columns, summed over columns: signs and rotations do not matter."""
    flat = root.flatten(2)
    return torch.einsum("vni,vnj->nij", flat, flat)


def _vectors(reference: Reference, name: str) -> Tensor:
    """Two fixed vectors ``[2, *θ]``."""
    shape = (2, *reference.parameters[name].shape)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))


def _applied(value: Any, reference: Reference, name: str) -> Tensor:
    """What a stored function returns for fixed vectors."""
    vectors = _vectors(reference, name).to(reference.parameters[name].dtype)
    result: Tensor = value(vectors)
    return result


def _block_product(blocks: Tensor, reference: Reference, name: str) -> Tensor:
    vectors = _vectors(reference, name)
    return (vectors.flatten(1) @ blocks.sum(0)).reshape(vectors.shape)


def _factor_error(
    block: Callable[[Reference, str], Tensor] | None,
) -> Callable[[Any, Reference, str], Tensor]:
    """How far Kronecker factors are from what is known of any of them, plus one.

    They are symmetric and of fitting size; a single factor is the block itself, if that is known.
    """

    def observed(value: Any, reference: Reference, name: str) -> Tensor:
        size, errors = 1, []
        for factor in value:
            size *= factor.shape[-1]
            scale = factor.abs().max().clamp_min(SMALLEST_SCALE)
            errors.append((factor - factor.mT).abs().max() / scale)
        if block is not None and len(value) == 1 and value[0].dim() == 2:
            expected = block(reference, name)
            scale = expected.abs().max().clamp_min(SMALLEST_SCALE)
            errors.append((value[0] - expected).abs().max() / scale)
        size *= len(value[0]) if value[0].dim() == 3 else 1
        fits = size == reference.parameters[name].numel()
        errors.append(torch.tensor(0.0 if fits else 1.0))
        return 1 + torch.stack([error.double() for error in errors]).max()

    return observed


def _one(reference: Reference, name: str) -> Tensor:
    return torch.ones((), dtype=torch.float64)


def _sampled_ggn(reference: Reference, name: str) -> Tensor:
    return _gram(reference.roots(name, 1), reference, name).sum(0)


_QUANTITIES: dict[str, Quantity] = {
    "grad_batch": Quantity(lambda r, p: r.gradients(p)),
    "batch_l2": Quantity(lambda r, p: r.gradients(p).flatten(1).square().sum(1)),
    "sum_grad_squared": Quantity(lambda r, p: r.gradients(p).square().sum(0)),
    "variance": Quantity(_variance, cancels=True),
    "batch_dot": Quantity(lambda r, p: r.gradients(p).flatten(1) @ r.gradients(p).flatten(1).T),
    "grad_clipped": Quantity(_clipped, arguments={"max_norm": 0.1}),
    "diag_ggn_exact": Quantity(lambda r, p: r.roots(p).square().sum((0, 1)), needs="curvature"),
    "diag_ggn_exact_batch": Quantity(lambda r, p: r.roots(p).square().sum(0), needs="curvature"),
    "diag_ggn_mc": Quantity(lambda r, p: r.roots(p, 1).square().sum((0, 1)), needs="sampling"),
    "diag_ggn_mc_batch": Quantity(lambda r, p: r.roots(p, 1).square().sum(0), needs="sampling"),
    "sqrt_ggn_exact": Quantity(lambda r, p: r.ggn(p), _gram, needs="curvature"),
    "sqrt_ggn_mc": Quantity(lambda r, p: _gram(r.roots(p, 1), r, p), _gram, needs="sampling"),
    "diag_h": Quantity(
        lambda r, p: _diagonal(r.hessian(p), r, p).sum(0), needs="second derivative"
    ),
    "diag_h_batch": Quantity(lambda r, p: _diagonal(r.hessian(p), r, p), needs="second derivative"),
    "ggnmp": Quantity(lambda r, p: _block_product(r.ggn(p), r, p), _applied, needs="curvature"),
    "hmp": Quantity(
        lambda r, p: _block_product(r.hessian(p), r, p), _applied, needs="second derivative"
    ),
    "ekfac": Quantity(
        lambda r, p: _sampled_ggn(r, p).trace(), lambda v, r, p: v.trace(), needs="structure"
    ),
    "kfac": Quantity(_one, _factor_error(_sampled_ggn), needs="structure"),
    "kflr": Quantity(_one, _factor_error(lambda r, p: r.ggn(p).sum(0)), needs="structure"),
    "kfra": Quantity(_one, _factor_error(None), needs="structure"),
}


def quantity_of(savefield: str) -> Quantity | None:
    """What is known about the extension that saves under this name."""
    return _QUANTITIES.get(savefield)


def register_quantity(savefield: str, quantity: Quantity) -> None:
    """Tell the kit what an extension computes, for all checks in this process.

    Args:
        savefield: The extension's save field.
        quantity: Its oracle.

    Raises:
        UsageError: There is a row for that name already.
    """
    if savefield in _QUANTITIES:
        raise UsageError(f"The kit has an oracle for {savefield!r} already.")
    _QUANTITIES[savefield] = quantity
