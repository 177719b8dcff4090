"""Influence functions: a query's gradient times the inverse of the curvature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack_attribution import forms
from backpack_attribution.forms import Gradients
from backpack_attribution.methods import InnerProduct
from backpack_attribution.run import Run
from backpack_core.errors import UsageError
from backpack_core.extensions import EKFAC, KFAC, KFLR
from backpack_data import accumulate
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.over_data import GGN

Curvature: TypeAlias = Literal["kfac", "ekfac"]
Sharing: TypeAlias = Literal["kfc", "expand", "reduce"]


class Influence(InnerProduct):
    """Influence functions: ``1/W ⟨∇ℓ_n, (C + Λ)⁻¹ ∇ℓ_m⟩``.

    The first-order change of the query's loss if the training sample is left out (Koh and Liang,
    2017, arXiv:1703.04730). ``C`` is the generalised Gauss-Newton matrix of the loss over all
    training data, as ``lossfunc`` scales it, and ``W`` what that divides by (one for a sum). It is
    approximated by Kronecker factors, or by these with corrected eigenvalues (Grosse et al., 2023,
    arXiv:2308.03296), one block for each parameter. With ``refine``, that many steps of conjugate
    gradients on exact products with ``C``, blocks between parameters included, start from there.

    The damping ``Λ`` is a number for each parameter. Where training had weight decay, its strength
    (as a factor of ``½‖θ‖²`` beside the loss of ``lossfunc``) is exact at the minimum. The default
    without ``refine`` is a tenth of the mean eigenvalue of each block, as in Grosse et al. With
    ``refine``, it is five times the mean eigenvalue of all blocks together: the exact matrix lets
    through what the approximation hides, and wants more (measured on the tasks of
    :mod:`~backpack_attribution.quality`).
    """

    def __init__(
        self,
        curvature: Curvature = "ekfac",
        damping: float | Mapping[str, float] | None = None,
        refine: int = 0,
        rtol: float = 1e-3,
        mc_samples: int | None = 1,
        weight_sharing: Sharing = "expand",
        curvature_loader: Iterable[Any] | None = None,
        queries_at_once: int | None = None,
    ) -> None:
        """Store the settings.

        Args:
            curvature: ``"kfac"`` or ``"ekfac"``.
            damping: A number, or one for each parameter by name; see the class for the default.
            refine: Steps of conjugate gradients at most; each goes through the data once, for all
                queries together.
            rtol: A query whose residual is below this share of its gradient's norm is done.
            mc_samples: Targets drawn from the model for each sample; ``None`` for the exact loss
                Hessian.
            weight_sharing: How positions enter Kronecker factors, as in
                :class:`~backpack_core.extensions.KFAC`.
            curvature_loader: Data for the curvature; default: the training data. Fewer samples are
                often enough.
            queries_at_once: See :class:`InnerProduct`.

        Raises:
            UsageError: A setting is unknown.
        """
        super().__init__(queries_at_once)
        if curvature not in get_args(Curvature):
            raise UsageError(f"curvature is one of {get_args(Curvature)}. Got {curvature!r}.")
        if isinstance(refine, bool) or not isinstance(refine, int) or refine < 0:
            raise UsageError(f"refine is a number of steps, or zero. Got {refine!r}.")
        if isinstance(damping, (int, float)) and not damping >= 0:
            raise UsageError(f"Damping has to be zero or positive. Got {damping!r}.")
        self.curvature, self.damping, self.refine = curvature, damping, refine
        self.rtol, self.mc_samples, self.weight_sharing = rtol, mc_samples, weight_sharing
        self._loader = curvature_loader
        self._blocks: dict[str, KroneckerEigenbasis] = {}
        self._dampings: dict[str, float] = {}
        self._divisor = 1.0

    @property
    def name(self) -> str:
        """``"kfac"``, ``"ekfac"`` or ``"ekfac-cg"``."""
        return f"{self.curvature}-cg" if self.refine else self.curvature

    @property
    def dampings(self) -> dict[str, float]:
        """The damping of each parameter, once fitted."""
        return dict(self._dampings)

    def fit(self, run: Run) -> None:
        """One pass over the data for the factors, and for EKFAC one for the eigenvalues.

        Args:
            run: The computation.

        Raises:
            UsageError: The loss is a function, of which no Hessian in the output is known.
        """
        if not isinstance(run.problem.lossfunc, Module):
            raise UsageError(
                f"{self.name!r} needs the Hessian of the loss in the output: give a loss module, "
                f"such as CrossEntropyLoss(). Got {run.problem.lossfunc!r:.80}."
            )
        found = accumulate(
            run.problem.model,
            run.problem.lossfunc,
            run.train_loader if self._loader is None else self._loader,
            self._extension(),
            batch=run.problem.split_on_device,
            progress=run.progress,
            process_group=run.process_group,
        )
        field = found.field(self._extension().savefield)
        basis: Any = BlockDiagonal(field).eigenbasis()
        self._blocks, self._divisor = dict(basis), found.normaliser or 1.0
        self._dampings = {name: self._damping_of(name) for name in self._blocks}

    def _extension(self) -> Any:
        options: dict[str, Any] = {
            "weight_sharing": self.weight_sharing,
            "fail_mode": "diagonal",  # a tied embedding has no factors; its exact diagonal is used
        }
        if self.curvature == "ekfac":
            return EKFAC(self.mc_samples, **options)
        return KFLR(**options) if self.mc_samples is None else KFAC(self.mc_samples, **options)

    def _damping_of(self, name: str) -> float:
        if isinstance(self.damping, Mapping):
            if name not in self.damping:
                raise UsageError(f"No damping is given for the parameter {name!r}.")
            return float(self.damping[name])
        if self.damping is not None:
            return float(self.damping)
        if not self.refine:
            return 0.1 * float(self._blocks[name].values.clamp(min=0).mean())
        values = torch.cat([b.values.clamp(min=0).flatten() for b in self._blocks.values()])
        return 5.0 * float(values.mean())

    def transform(self, queries: Gradients, run: Run) -> Gradients:
        """``1/W (C + Λ)⁻¹`` times the queries."""
        self._require_same(queries)
        rhs = {name: forms.dense(value) for name, value in queries.items()}
        found = self._approximate(rhs)
        if self.refine:
            found = self._refined(rhs, found, run)
        return {name: value / self._divisor for name, value in found.items()}

    def _approximate(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._inverse(name).matmul(value) for name, value in vectors.items()}

    def _inverse(self, name: str) -> KroneckerEigenbasis:
        """Sampled or rounded eigenvalues may be below zero, where the matrix has none."""
        block = self._blocks[name]
        return block.with_values(block.values.clamp(min=0)).inverse(self._dampings[name])

    def _refined(
        self, rhs: Mapping[str, Tensor], start: dict[str, Tensor], run: Run
    ) -> dict[str, Tensor]:
        matrix = GGN(
            run.problem.model,
            run.problem.lossfunc,
            run.train_loader if self._loader is None else self._loader,
            [run.problem.parameters[name] for name in rhs],
            forward=run.problem.forward,
            process_group=run.process_group,
        )

        def multiply(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with sdpa_kernel(SDPBackend.MATH):  # the others are differentiable once
                products = matrix @ [*vectors.values()]
            return {
                name: product + self._dampings[name] * vectors[name]
                for name, product in zip(vectors, products, strict=True)
            }

        return solved(multiply, rhs, self._approximate, start, self.refine, self.rtol)

    def _require_same(self, queries: Gradients) -> None:
        missing = [name for name in queries if name not in self._blocks]
        if missing:
            raise UsageError(
                f"The queries depend on {missing[0]!r}, which no training sample reaches: there is "
                "no curvature of it. Freeze it, or give other data."
            )


def solved(
    multiply: Any,
    rhs: Mapping[str, Tensor],
    precondition: Any,
    start: dict[str, Tensor],
    steps: int,
    rtol: float,
) -> dict[str, Tensor]:
    """Preconditioned conjugate gradients for several right sides at once.

    Every right side has step lengths of its own; a product multiplies all of them together.

    Args:
        multiply: The matrix times vectors ``[M, *θ]`` for each parameter.
        rhs: Right sides.
        precondition: An approximate inverse.
        start: First guess.
        steps: Products at most.
        rtol: A right side whose residual is below this share of its norm is left alone.
    """
    x = dict(start)
    residual = _plus(rhs, multiply(x), torch.tensor(-1.0, device="cpu"))
    bound = rtol**2 * _dots(rhs, rhs)
    direction = precondition(residual)
    product = _dots(residual, direction)
    for _ in range(steps):
        active = _dots(residual, residual) > bound
        if not active.any():
            break
        image = multiply(direction)
        curvature = _dots(direction, image)
        step = torch.where(active & (curvature > 0), product / curvature, 0)
        x, residual = _plus(x, direction, step), _plus(residual, image, -step)
        preconditioned = precondition(residual)
        product, before = _dots(residual, preconditioned), product
        direction = _plus(preconditioned, direction, torch.where(active, product / before, 0))
    return x


def _dots(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """``⟨a_m, b_m⟩`` over all parameters, ``[M]``."""
    return sum(((a[n] * b[n]).flatten(1).sum(1) for n in a), torch.zeros((), device="cpu"))


def _plus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    """``a_m + factor_m b_m``."""
    return {n: a[n] + factor.to(b[n]).reshape(-1, *[1] * (b[n].dim() - 1)) * b[n] for n in a}
