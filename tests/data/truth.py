"""What a drawn sum over a data set should be, by plain autograd on one batch of all samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import unextend
from backpack_core.testing import oracle as kit
from backpack_firstorder import Projection, SampleGradients
from tests import oracle
from tests.data.random_sums import CLASSES, THRESHOLD, Sum


class Truth:
    """What there should be, by plain autograd on one batch of all samples, in double precision."""

    def __init__(self, given: Sum) -> None:
        self.given = given
        self.model = unextend(copy.deepcopy(given.model)).double()
        self.body: Any = self.model.body
        has_shift = given.form in ("tuple", "keywords", "labels")
        self.x = given.x.double() + (given.shift.double() if has_shift else 0)
        is_real = given.target.is_floating_point()
        self.target = given.target.double() if is_real else given.target
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = [*self.named.values()]

    def loss(self, output: Tensor, reduction: str | None = None) -> Tensor:
        value: Tensor = self.given.make_loss(reduction).double()(output, self.target)
        return value

    def values(self) -> dict[tuple[str, str], Any]:
        """By name of the parameter and of the extension."""
        found, asked = dict[tuple[str, str], Any](), {*self.given.names}
        self._add_gradients(found)
        if {"DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "EKFAC"} & asked:
            self._add_curvature(found)
        if {"DiagHessian", "BatchDiagHessian"} & asked:
            self._add_hessians(found)
        if {"KFLR", "EKFAC"} & asked:
            self._add_factors(found)
        return found

    def _add_gradients(self, found: dict[tuple[str, str], Any]) -> None:
        each = oracle.individual_gradients(self.body, self.loss, [self.x], self.parameters)
        summed = partial(self.loss, reduction="sum")
        own = oracle.individual_gradients(self.body, summed, [self.x], self.parameters)
        norms = torch.cat([rows.flatten(1) for rows in own], 1).norm(dim=1)
        factors = (THRESHOLD / norms).clamp(max=1)
        for name, rows, alone in zip(self.named, each, own, strict=True):
            flat, queries = rows.flatten(1), self.given.queries[name].double().flatten(1)
            found[name, "BatchGrad"] = rows
            found[name, "BatchL2Grad"] = flat.square().sum(1)
            found[name, "SumGradSquared"] = rows.square().sum(0)
            found[name, "Variance"] = rows.square().mean(0) - rows.mean(0).square()
            found[name, "GradInner"] = flat @ queries.T
            found[name, "ClippedSumGrad"] = torch.tensordot(factors, alone, 1)
            gradients = SampleGradients.from_dense(rows)
            found[name, "ProjectedGrad"] = gradients.project(Projection(4), name)

    def _add_curvature(self, found: dict[tuple[str, str], Any]) -> None:
        blocks = oracle.ggn(self.body, self.loss, [self.x], self.parameters)
        for (name, parameter), block in zip(self.named.items(), blocks, strict=True):
            rows = block.diagonal(dim1=1, dim2=2).reshape(-1, *parameter.shape)
            found |= {(name, "BatchDiagGGNExact"): rows, (name, "DiagGGNExact"): rows.sum(0)}
            found[name, "SqrtGGNExact"] = block.sum(0)

    def _add_hessians(self, found: dict[tuple[str, str], Any]) -> None:
        """Those of one sample after the other, with the outputs of all others held fixed."""
        for name, parameter in self.named.items():
            rows = []
            for n in range(len(self.x)):
                output = self.body(self.x)
                is_own = (torch.arange(len(output)) == n).unsqueeze(1)
                value = self.loss(torch.where(is_own, output, output.detach()))
                block = kit.hessian(value, parameter).reshape(parameter.numel(), -1)
                rows.append(block.diagonal().reshape(parameter.shape))
            found[name, "BatchDiagHessian"] = torch.stack(rows)
            found[name, "DiagHessian"] = torch.stack(rows).sum(0)

    def _add_factors(self, found: dict[tuple[str, str], Any]) -> None:
        """``B = Σ_n J_nᵀ ∇²ℓ_n J_n`` at the output of a layer, ``A`` the mean of its inputs."""
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        hooks = [
            layer.register_forward_hook(lambda m, given, out: seen.update({m: (given[0], out)}))
            for layer in layers.values()
        ]
        output = self.body(self.x.clone().requires_grad_())
        hessian = oracle.loss_hessians(self.loss, output.detach())
        for hook in hooks:
            hook.remove()
        for path, layer in layers.items():
            inputs, out = seen[layer]
            rows = [kit.gradients(output[:, c].sum(), [out])[0] for c in range(CLASSES)]
            jacobian = torch.stack(rows, 1)
            first = torch.einsum("nci,ncd,ndj->ij", jacobian, hessian, jacobian)
            mean = (inputs.mT @ inputs / len(inputs)).detach()
            found[f"{path}.weight", "KFLR"] = [first, mean]
            found[f"{path}.bias", "KFLR"] = [first]


def difference(given: Sum, found: Mapping[tuple[str, str], Any]) -> str:
    """What is wrong; empty if nothing is."""
    truth = Truth(given).values()
    trained = [name for name, p in given.model.named_parameters() if p.requires_grad]
    for name in given.names:
        for path in trained:
            if (path, name) not in found:
                if truth[path, "BatchGrad"].any():
                    return f"{path}: {name} is missing"
                continue  # no sample reaches it
            if name == "EKFAC":
                if not _is_corrected(found[path, name], truth, path, given.is_single):
                    return f"{path}: {name} is wrong"
                continue
            ours, right = found[path, name], truth[path, name]
            if name == "SqrtGGNExact":
                flat = ours.double().flatten(2).flatten(0, 1)
                ours = flat.T @ flat
            pairs = zip(ours, right, strict=True) if name == "KFLR" else [(ours, right)]
            if not all(_close(a, b, given.is_single) for a, b in pairs):
                return f"{path}: {name} is wrong:\n{ours}\n{right}"
    if extra := {path for path, _ in found} - {*trained}:
        return f"{extra} are not trained"
    return ""


def _is_corrected(ours: Any, truth: Mapping[Any, Any], path: str, is_single: bool) -> bool:
    """Whether eigenvectors are those of the factors, and eigenvalues those of the whole block."""
    factors, block = truth[path, "KFLR"], truth[path, "SqrtGGNExact"]
    whole = factors[0] if len(factors) == 1 else torch.kron(*(f.contiguous() for f in factors))
    sizes = [factor.shape[0] for factor in factors]
    unit = torch.eye(len(whole), dtype=ours.values.dtype).reshape(-1, *sizes)
    rows = ours.rotate(unit).double()  # [P, P]
    turned = rows.T @ whole @ rows
    values = torch.einsum("ik,ij,jk->k", rows, block, rows)
    is_basis = _close(turned - turned.diagonal().diag(), torch.zeros_like(turned), is_single)
    return is_basis and _close(ours.values.flatten(), values, is_single)


def _close(ours: Tensor, right: Tensor, is_single: bool) -> bool:
    size = float(right.abs().max()) if right.numel() else 0.0
    bound = (1e-4 if is_single else 1e-9) * (1 + size)
    return ours.shape == right.shape and bool(((ours.double() - right).abs() <= bound).all())
