"""Plain definitions of this package's quantities, for the conformance kit to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backpack_core.testing import Quantity, Reference, register_quantity
from backpack_core.testing.compare import relative_error
from backpack_core.testing.oracle import flat
from backpack_core.testing.quantities import fixed_vectors
from backpack_secondorder.oracle_units import averaged, input_moment, positive_curvature


def _diagonal(blocks: Tensor, reference: Reference, name: str) -> Tensor:
    """The diagonals of ``[N, θ, θ]`` in the shape ``[N, *θ]``."""
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    return diagonal.reshape(len(blocks), *reference.parameters[name].shape)


def _gram(root: Tensor, reference: Reference, name: str) -> Tensor:
    """Sum of outer products of columns, which is independent of their signs and rotations."""
    rows = flat(root, 2)
    return torch.einsum("vni,vnj->nij", rows, rows)


def _applied(value: Any, reference: Reference, name: str) -> Tensor:
    """What a stored function returns for fixed vectors."""
    vectors = fixed_vectors(reference, name).to(reference.parameters[name].dtype)
    result: Tensor = value(vectors)
    return result


def _block_product(blocks: Tensor, reference: Reference, name: str) -> Tensor:
    vectors = fixed_vectors(reference, name)
    return (flat(vectors, 1) @ blocks.sum(0)).reshape(vectors.shape)


Block = Callable[["Reference", str], Tensor | None]  # [θ, θ], or None if it is not known


def _factors(block: Block, reference: Reference, name: str) -> list[Tensor | None]:
    """The expected Kronecker factors: the block for a vector, two factors for a weight.

    A weight of the kit's own modules has ``B``, the block of the bias, and
    ``A = 1/N Σ_n Σ_s x xᵀ``.
    """
    moment = input_moment(reference, name)
    if moment is not None:
        bias = f"{name.removesuffix('weight')}bias"
        return [reference.once(block, bias) if bias in reference.parameters else None, moment]
    return [reference.once(block, name)] if reference.parameters[name].dim() == 1 else []


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    return relative_error(found.to(expected.dtype), expected)


def _one_plus_worst(errors: list[float]) -> Tensor:
    """One plus the largest error, for a comparison with one; NaN stays NaN."""
    return 1 + torch.tensor(errors, dtype=torch.float64).max()


def _factor_error(block: Block) -> Callable[[Any, Reference, str], Tensor]:
    """One plus the error of Kronecker factors.

    They must be symmetric and of the right size, and equal the expected ones if these are known.
    """

    def observed(value: Any, reference: Reference, name: str) -> Tensor:
        # A diagonal may be stored as a vector.
        value = [torch.diag(factor) if factor.dim() == 1 else factor for factor in value]
        size = math.prod(factor.shape[-1] for factor in value)
        size *= len(value[0]) if value[0].dim() == 3 else 1
        errors = [float(size != reference.parameters[name].numel())]
        errors += [_error(factor, factor.mT) for factor in value]
        known = _factors(block, reference, name)
        if len(known) == len(value) and value[0].dim() == 2:
            pairs = zip(value, known, strict=True)
            errors += [_error(found, factor) for found, factor in pairs if factor is not None]
        return _one_plus_worst(errors)

    return observed


def _eigenbasis_error(block: Block) -> Callable[[Any, Reference, str], Tensor]:
    """One plus the error of ``Q`` and ``λ`` in the definition of EKFAC (George et al., 2018).

    ``QᵀQ = 1``, ``λ = diag(Qᵀ G Q)`` for the explicit block ``G``, and factors of ``Q`` diagonalise
    the Kronecker factors that are known.
    """

    def observed(value: Any, reference: Reference, name: str) -> Tensor:
        theta, whole = reference.parameters[name], reference.once(block, name)
        assert whole is not None
        units = torch.eye(theta.numel(), dtype=value.values.dtype).reshape(-1, *theta.shape)
        q = value.rotate(units).double()
        errors = [
            _error(q.T @ q, torch.eye(len(q), dtype=q.dtype)),
            _error(value.values.flatten(), (q.T @ whole @ q).diagonal()),
        ]
        known = _factors(block, reference, name)
        if len(known) == len(value.vectors) and value.vectors[0].dim() == 2:
            for vectors, factor in zip(value.vectors, known, strict=True):
                if factor is not None:
                    turned = vectors.double().T @ factor @ vectors.double()
                    errors.append(_error(turned, torch.diag(turned.diagonal())))
        return _one_plus_worst(errors)

    return observed


def _one(reference: Reference, name: str) -> Tensor:
    return torch.ones((), dtype=torch.float64)


def _pair_norms(gram: Tensor) -> Tensor:
    """``Σ_vw ⟨M[v, n], M[w, m]⟩²`` for samples ``n, m``: independent of the choice of columns."""
    return gram.double().square().sum((0, 2)).flatten()


def _spectral(value: Any, reference: Reference, name: str) -> Tensor:
    """The block of ``Σ_k λ_k² e_k e_kᵀ``, ``[θ, θ]``, and both Gram matrices; as one vector.

    Squared, because eigenvectors are divided by ``√λ``: with ``λ`` itself, wrong eigenvalues would
    cancel.
    """
    values = value.spectrum.eigenvalues
    rank = int((values > 10 * len(values) * torch.finfo(values.dtype).eps * values[0]).sum())
    size = reference.parameters[name].numel()
    block = torch.zeros(size, size, dtype=torch.float64)
    if rank:
        vectors = flat(value.eigenvectors(rank), 1).double()
        block = (vectors.T * values[:rank].double().square()) @ vectors
    norms = [_pair_norms(gram) for gram in (value.gram, value.spectrum.gram)]
    return torch.cat([block.flatten(), *norms])


def _explicit_gram(reference: Reference, name: str) -> Tensor:
    """The same from explicit Jacobians: the block of ``G²``, with ``G`` over all parameters."""
    roots = {parameter: flat(reference.roots(parameter), 2) for parameter in reference.parameters}
    grams = {key: torch.einsum("vni,wmi->vnwm", root, root) for key, root in roots.items()}
    whole = torch.stack([*grams.values()]).sum(0)
    square = torch.einsum("vni,vnwm,wmj->ij", roots[name], whole, roots[name])
    return torch.cat([square.flatten(), _pair_norms(grams[name]), _pair_norms(whole)])


def _row_products(reference: Reference, name: str) -> Tensor:
    """``⟨J[n, c], J[m, d]⟩`` for the rows of the Jacobian. Shape ``[N, C, N, C]``."""
    rows = flat(reference.jacobian(name), 2)
    return torch.einsum("nci,mdi->ncmd", rows, rows)


def _both_directions(value: Any, reference: Reference, name: str) -> Tensor:
    """``J v`` and ``Jᵀ J v`` of a stored product for fixed vectors; as one vector."""
    forward = value(fixed_vectors(reference, name).to(reference.parameters[name].dtype))
    return torch.cat([forward.flatten(), value.transposed(forward).flatten()])


def _jacobian_products(reference: Reference, name: str) -> Tensor:
    jacobian, vectors = flat(reference.jacobian(name), 2), flat(fixed_vectors(reference, name), 1)
    forward = torch.einsum("ncp,vp->vnc", jacobian, vectors)
    return torch.cat([forward.flatten(), torch.einsum("vnc,ncp->vp", forward, jacobian).flatten()])


def _sampled_ggn(reference: Reference, name: str) -> Tensor:
    return _gram(reference.roots(name, 1), reference, name).sum(0)


def positive_curvature_product(modify: Callable[[Tensor], Tensor]) -> Quantity:
    """The row of products with the positive-curvature Hessian (Chen et al., 2018).

    Args:
        modify: A function from the eigenvalues ``[N, D]`` of residuals to new, non-negative ones.
    """

    def expected(reference: Reference, name: str) -> Tensor:
        block = positive_curvature(reference, name, modify)
        return _block_product(block.unsqueeze(0), reference, name)

    return Quantity(expected, _applied, needs="second derivative")


_QUANTITIES = {
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
    "ggnmp": Quantity(
        lambda r, p: _block_product(r.ggn(p), r, p), _applied, needs="double backward"
    ),
    "hmp": Quantity(
        lambda r, p: _block_product(r.hessian(p), r, p),
        _applied,
        needs="double backward",
        cancels=True,
    ),
    "diag_hmp": Quantity(
        lambda r, p: _diagonal(r.hessian(p), r, p).sum(0), needs="double backward", cancels=True
    ),
    "pchmp": positive_curvature_product(lambda values: values.clamp_min(0)),
    "jacobians": Quantity(lambda r, p: r.jacobian(p), needs="curvature"),
    "ntk": Quantity(_row_products, needs="curvature"),
    "jmp": Quantity(_jacobian_products, _both_directions, needs="double backward"),
    "ggn_gram": Quantity(_explicit_gram, _spectral, needs="curvature", cancels=True),
    "ekfac": Quantity(_one, _eigenbasis_error(_sampled_ggn), needs="structure"),
    "kfac": Quantity(_one, _factor_error(_sampled_ggn), needs="structure"),
    "kflr": Quantity(_one, _factor_error(lambda r, p: r.ggn(p).sum(0)), needs="structure"),
    "kfra": Quantity(_one, _factor_error(lambda r, p: averaged(r, p)), needs="structure"),
}
for _field, _quantity in _QUANTITIES.items():
    register_quantity(_field, _quantity)
