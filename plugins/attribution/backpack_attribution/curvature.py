"""Influence functions: a query's gradient times the inverse of the curvature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack_attribution import forms
from backpack_attribution.forms import Gradients
from backpack_attribution.methods import InnerProduct, joined
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

    This is the first-order change of the query's loss if the training sample is left out (Koh and
    Liang, 2017, arXiv:1703.04730). ``C`` is the generalised Gauss-Newton matrix of the loss over
    all training data, as ``lossfunc`` scales it, and ``W`` what that divides by (one for a sum).
    ``C`` is approximated by Kronecker factors, or by these with corrected eigenvalues (Grosse et
    al., 2023, arXiv:2308.03296), with one block for each parameter. With ``refine``, that many
    steps of conjugate gradients start from there; they use exact products with ``C``, blocks
    between parameters included.

    The damping ``Λ`` is a number for each parameter. If training had weight decay, its strength
    (as a factor of ``½‖θ‖²`` added to the loss of ``lossfunc``) is exact at the minimum. The
    default without ``refine`` is a tenth of the mean eigenvalue of each block, as in Grosse et al.
    With ``refine``, it is five times the mean eigenvalue of all blocks together: the exact matrix
    shows what the approximation hides, and needs more damping (measured on the tasks of
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
            refine: The largest number of steps of conjugate gradients; each goes through the data
                once, for all queries together.
            rtol: A query is finished if its residual is below this share of its gradient's norm.
            mc_samples: Targets drawn from the model for each sample; ``None`` for the exact loss
                Hessian.
            weight_sharing: How positions enter Kronecker factors, as in
                :class:`~backpack_core.extensions.KFAC`.
            curvature_loader: Data for the curvature; default: the training data. Often fewer
                samples are enough. Scores keep their scale: ``W`` is that of the training data,
                which takes one more forward pass over these, and the curvature of a sum is
                multiplied by the ratio of the numbers of samples.
            queries_at_once: See :class:`InnerProduct`.

        Raises:
            UsageError: A setting is unknown, or the data can be gone through only once.
        """
        super().__init__(queries_at_once)
        if curvature not in get_args(Curvature):
            raise UsageError(f"curvature must be one of {get_args(Curvature)}. Got {curvature!r}.")
        if isinstance(refine, bool) or not isinstance(refine, int) or refine < 0:
            raise UsageError(f"refine must be a number of steps, or zero. Got {refine!r}.")
        dampings = damping.values() if isinstance(damping, Mapping) else [damping]
        if not all(each is None or (_is_number(each) and 0 <= each < inf) for each in dampings):
            raise UsageError(
                "damping must be zero or positive, and finite, for all or by name. Got "
                f"{damping!r}."
            )
        if not _is_number(rtol) or not rtol >= 0:
            raise UsageError(f"rtol must be zero or positive. Got {rtol!r}.")
        if isinstance(curvature_loader, Iterator):
            raise UsageError(
                "The data for the curvature are gone through more than once: pass them as a "
                "DataLoader or a list, not an iterator or a generator."
            )
        self.curvature, self.damping, self.refine = curvature, damping, refine
        self.rtol, self.mc_samples, self.weight_sharing = rtol, mc_samples, weight_sharing
        self._loader = curvature_loader
        self._blocks: dict[str, KroneckerEigenbasis] = {}
        self._dampings: dict[str, float] = {}
        self._divisor = self._scale = 1.0

    @property
    def name(self) -> str:
        """``"kfac"``, ``"ekfac"`` or ``"ekfac-cg"``."""
        return f"{self.curvature}-cg" if self.refine else self.curvature

    @property
    def dampings(self) -> dict[str, float]:
        """The damping of each parameter, after a fit."""
        return dict(self._dampings)

    def fit(self, run: Run) -> None:
        """One pass over the data for the factors, and for EKFAC one for the eigenvalues.

        Args:
            run: The computation.

        Raises:
            UsageError: The loss is a function, so its Hessian in the output is not known.
        """
        if not isinstance(run.problem.lossfunc, Module):
            raise UsageError(
                f"{self.name!r} needs the Hessian of the loss in the output: give a loss module, "
                f"such as CrossEntropyLoss(). Got {run.problem.lossfunc!r:.80}."
            )
        self._blocks = {}  # those of an earlier fit take as much memory as the factors
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
        self._blocks, self._divisor, self._scale = dict(basis), found.normaliser or 1.0, 1.0
        if self._loader is not None:
            self._weigh(run, is_mean=found.normaliser is not None)
        self._dampings = {name: self._damping_of(name) for name in self._blocks}

    def _weigh(self, run: Run, is_mean: bool) -> None:
        """Scale the curvature of other data like that of the training data."""
        batches = run.batches(run.train_loader, f"{self.name}: weights of training samples")
        if is_mean:
            self._divisor = run.total(map(run.problem.weight, batches))
            return
        assert self._loader is not None
        self._scale = run.total(map(run.samples, batches)) / run.total(
            map(run.samples, self._loader)
        )
        for name, block in self._blocks.items():
            self._blocks[name] = block.with_values(self._scale * block.values)

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
            if strangers := sorted(self.damping.keys() - self._blocks.keys()):
                raise UsageError(
                    f"damping names {strangers[0]!r}, and the trained parameters are "
                    f"{', '.join(self._blocks)}: take it out."
                )
            if name not in self.damping:
                raise UsageError(f"damping has no value for the parameter {name!r}: add one.")
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
        # The exact matrix couples parameters, so those that no query reaches take part in it.
        coupled = self._blocks if self.refine else ()
        known = {name: run.problem.parameters[name].detach().unsqueeze(0) for name in coupled}
        whole = forms.completed(queries, known)
        if self.refine:
            rhs = {name: forms.dense(value) for name, value in whole.items()}
            found = self._refined(rhs, self._approximate(rhs), run)
        else:  # formed queries are as large as as many models: one parameter at a time
            found = {n: self._inverse(n).matmul(forms.dense(value)) for n, value in whole.items()}
        return {name: value.div_(self._divisor) for name, value in found.items()}

    def transformed(
        self, parts: Iterator[Gradients], run: Run
    ) -> Iterator[tuple[Gradients, Gradients]]:
        """As in the base class; a product with ``C`` needs the same vectors on all processes."""
        if not self.refine or run.process_group is None:
            yield from super().transformed(parts, run)
            return
        while True:
            own = next(parts, {})
            every = run.of_all({name: forms.dense(value).cpu() for name, value in own.items()})
            counts = [len(next(iter(part.values()), ())) for part in every]
            if not any(counts):
                return
            found = joined(filter(None, every))
            whole = {name: value.to(run.problem.device) for name, value in found.items()}
            solved = self.transform(whole, run)
            first = sum(counts[: distributed.get_rank(run.process_group)])
            if own:
                yield own, {n: v[first : first + len(own[n])] for n, v in solved.items()}

    def _approximate(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._inverse(name).matmul(value) for name, value in vectors.items()}

    def _inverse(self, name: str) -> KroneckerEigenbasis:
        """Sampled or rounded eigenvalues may be negative, although the matrix has none."""
        block = self._blocks[name]
        if self.damping is None and not self._dampings[name] > 0:
            raise UsageError(
                f"The curvature of the parameter {name!r} is zero for the training data, and so is "
                "the default damping, a share of it: give damping=, or freeze the parameter."
            )
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
            with sdpa_kernel(SDPBackend.MATH):  # other kernels can be differentiated only once
                products = matrix @ [*vectors.values()]
            return {
                name: self._scale * product + self._dampings[name] * vectors[name]
                for name, product in zip(vectors, products, strict=True)
            }

        return solved(multiply, rhs, self._approximate, start, self.refine, self.rtol)

    def _require_same(self, queries: Gradients) -> None:
        missing = [name for name in queries if name not in self._blocks]
        if missing:
            raise UsageError(
                f"The queries depend on {missing[0]!r}, but no training sample reaches it, so it "
                "has no curvature. Freeze it, or give other data."
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

    Every right side has its own step lengths; one product multiplies all of them.

    Args:
        multiply: The matrix times vectors ``[M, *θ]`` for each parameter.
        rhs: Right sides.
        precondition: An approximate inverse.
        start: First guess.
        steps: The largest number of products.
        rtol: A right side is finished if its residual is below this share of its norm.
    """
    # Squares of small vectors underflow: right sides are divided by their largest entries.
    largest = [forms.flat(value.abs()).amax(1) for value in rhs.values() if value.numel()]
    sizes = torch.stack(largest).amax(0) if largest else torch.ones((), device="cpu")
    sizes = torch.where(sizes > 0, sizes, 1)
    rhs, x = _times(rhs, 1 / sizes), _times(start, 1 / sizes)
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
    return _times(x, sizes)


def _dots(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """``⟨a_m, b_m⟩`` over all parameters, ``[M]``."""
    return sum((forms.flat(a[n] * b[n]).sum(1) for n in a), torch.zeros((), device="cpu"))


def _times(a: Mapping[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    """``factor_m a_m``."""
    return {n: factor.to(v).reshape(-1, *[1] * (v.dim() - 1)) * v for n, v in a.items()}


def _plus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    """``a_m + factor_m b_m``."""
    return {n: a[n] + factor.to(b[n]).reshape(-1, *[1] * (b[n].dim() - 1)) * b[n] for n in a}


def _is_number(value: object) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or (isinstance(value, Real) and not isinstance(value, bool))
