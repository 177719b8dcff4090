"""Whether each quantity of one model is right: computed, compared, or refused with a reason."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.errors import AutodiffFallbackWarning, BackpackError
from backpack_core.extensions import (
    GGNMP,
    HMP,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    DiagHMP,
    SumGradSquared,
)
from backpack_products.loss import HessianLossRule
from backpack_secondorder.factors import StructureError
from benchmarks.models.factors import factors
from benchmarks.models.oracle import Oracle
from benchmarks.models.trial import Trial, rounds

ENTRIES = 6


class Cell(NamedTuple):
    """What became of one quantity of one model.

    Attributes:
        error: The largest error, relative to the largest entry at its parameter.
        reason: Why there is no value, or what is wrong with it.
        note: What else is to be said of the value.
        instead: Why the note's way was taken, and not the usual one.
    """

    error: float = 0.0
    reason: str = ""
    note: str = ""
    instead: str = ""


class Wrong(Exception):
    """A quantity is missing, or is not what the oracle says."""


class Judge:
    """One model, with what is right for it."""

    def __init__(self, trial: Trial) -> None:
        """Build the model, and differentiate another one of the same numbers."""
        self.trial = trial
        self.model, self.inputs, self.lossfunc, self.target = trial.build()
        # Relative to the largest entry of a quantity at a parameter.
        self.tolerance = 1e-4 if rounds(self.model(**self.inputs)) else 1e-9
        self.oracle = Oracle(trial.build()[0], self.inputs, self.lossfunc, self.target)
        extend(self.model)
        extend(self.lossfunc)
        self.names = [name.removeprefix("net.") for name in self.oracle.names]
        self.parameters = [self.model.get_parameter(name) for name in self.oracle.names]
        self.error, self.note, self.instead = 0.0, "", ""

    def judge(self, quantity: str) -> Cell:
        """Compute one quantity, and compare."""
        self.error, self.note, self.instead = 0.0, "", ""
        try:
            QUANTITIES[quantity](self)
        except Exception as error:  # whatever it is, it is what a user would see
            return Cell(reason=sentence(error))
        finally:
            self._forget()
        return Cell(self.error, note=self.note, instead=self.instead)

    def run(self, *extensions: Extension) -> None:
        """A forward and a backward pass."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("ignore", AutodiffFallbackWarning)
            loss = self.lossfunc(self.model(**self.inputs), self.target)
            with backpack(*extensions):
                loss.backward()

    def fields(self, name: str) -> list[Any]:
        """What is stored, for each parameter."""
        missing = [
            n for n, p in zip(self.names, self.parameters, strict=True) if name not in p.__dict__
        ]
        if missing:
            total = sum(p.numel() for p in self.parameters)
            raise Wrong(
                f"No value at {len(missing)} of {len(self.names)} parameters ({total} entries "
                f"in all), as {missing[0]}."
            )
        return [getattr(parameter, name) for parameter in self.parameters]

    def compare(self, name: str, ours: Tensor, expected: Tensor, scale: float = 0.0) -> None:
        """Note the error; raise where it is larger than allowed."""
        if ours.shape != expected.shape:
            raise Wrong(f"WRONG: shape {list(ours.shape)} at {name}, not {list(expected.shape)}.")
        largest = max(scale, _largest(expected))
        difference = _largest(ours.double() - expected.double())
        error = difference / max(largest, 1e-300)
        self.error = max(self.error, error)
        if not error <= self.tolerance:
            raise Wrong(f"WRONG by {error:.0e} at {name}.")

    def compare_all(self, field: str, expected: list[Tensor]) -> None:
        """Every parameter."""
        # A value that is zero in truth (a bias in front of a softmax has no effect) is rounding.
        floor = 1e-3 * max(map(_largest, expected))
        for name, ours, reference in zip(self.names, self.fields(field), expected, strict=True):
            self.compare(name, ours.detach(), reference, floor)

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
            for name in [*parameter.__dict__]:
                del parameter.__dict__[name]


def first_order(judge: Judge) -> None:
    """Individual gradients, their norms, and sums of squares, beside each other."""
    judge.run(BatchGrad(), BatchL2Grad(), SumGradSquared())
    gradients = judge.oracle.individual_gradients()
    judge.compare_all("grad_batch", gradients)
    judge.compare_all("batch_l2", [g.square().reshape(len(g), -1).sum(1) for g in gradients])
    judge.compare_all("sum_grad_squared", [g.square().sum(0) for g in gradients])


def ggn_exact(judge: Judge) -> None:
    """The diagonal of the generalised Gauss-Newton matrix."""
    judge.run(DiagGGNExact())
    judge.compare_all("diag_ggn_exact", judge.oracle.ggn_diagonals())


def ggn_sampled(judge: Judge) -> None:
    """The same for the columns that were drawn."""
    drawn: list[Tensor] = []
    with _noting_columns(drawn):
        judge.run(DiagGGNMC(mc_samples=2))
    judge.compare_all("diag_ggn_mc", judge.oracle.sampled_diagonals(torch.cat(drawn)))


@contextmanager
def _noting_columns(drawn: list[Tensor]) -> Iterator[None]:
    original = HessianLossRule.sqrt_hessian_sampled

    def noting(rule: HessianLossRule, view: Any, samples: int) -> Tensor:
        found = original(rule, view, samples)
        drawn.append(found.detach())
        return found

    HessianLossRule.sqrt_hessian_sampled = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        HessianLossRule.sqrt_hessian_sampled = original  # type: ignore[method-assign]


def kronecker(judge: Judge) -> None:
    """Factors with the exact loss Hessian, against their definition; a single one, the block."""
    try:
        judge.run(KFLR())
    except StructureError:
        judge.run(KFLR(fail_mode="block"))
    found = judge.fields("kflr")
    known = factors(judge.oracle)
    floor = 1e-3 * max(map(_largest, judge.oracle.ggn_diagonals()))
    # In front of a softmax, the sum over positions of what arrives at keys is zero in truth.
    outer = 1e-3 * max((_largest(reference[0]) for reference in known.values()), default=0.0)
    blocks = 0
    for index, ours in enumerate(found):
        name = judge.names[index]
        if ours.structure == "block":
            judge.compare(name, ours.dense().detach(), judge.oracle.ggn_block(index), floor)
            blocks += ours.order.shape.numel() > max(ours.order.shape, default=1)
        elif index in known:
            for factor, reference in zip(ours, known[index], strict=True):
                full = torch.diag(factor) if ours.is_diagonal(factor) else factor
                least = outer if reference is known[index][0] else 0.0
                judge.compare(name, full.detach(), reference, least)
    if blocks:
        judge.note = f"{blocks} by block"


def products(judge: Judge) -> None:
    """Products with blocks of the Gauss-Newton matrix and of the Hessian."""
    judge.run(GGNMP(), HMP())
    vectors = [torch.randn_like(p) for p in judge.parameters]
    found = [f(v) for f, v in zip(judge.fields("ggnmp"), vectors, strict=True)]
    expected = judge.oracle.ggn_products(vectors)
    floor = 1e-3 * max(map(_largest, expected))
    for name, ours, reference in zip(judge.names, found, expected, strict=True):
        judge.compare(name, ours, reference, floor)
    multiply, columns = judge.fields("hmp"), []
    for index, entry, value in judge.oracle.hessian_entries(1):
        unit = torch.zeros_like(judge.parameters[index])
        unit.view(-1)[entry] = 1.0
        columns.append((index, entry, value, multiply[index](unit)))
    # Of the bias of an attention's keys, it is zero, and rounding is all that is there.
    floor = 1e-3 * max(_largest(column) for *_, column in columns)
    for index, entry, value, column in columns:
        right, largest = torch.tensor(value, dtype=torch.float64), max(floor, _largest(column))
        judge.compare(judge.names[index], column.flatten()[entry], right, largest)


def hessian_diagonal(judge: Judge) -> None:
    """The diagonal of the Hessian, at some entries of each parameter."""
    try:
        judge.run(DiagHessian())
        ours = judge.fields("diag_h")
    except (BackpackError, Wrong) as error:
        judge.note, judge.instead = "by products", sentence(error)
        judge.run(DiagHMP())
        ours = judge.fields("diag_hmp")
    # Of the bias of an attention's keys, it is zero, and rounding is all that is there.
    floor = 1e-3 * max(map(_largest, ours))
    for index, entry, value in judge.oracle.hessian_entries(ENTRIES):
        largest = max(floor, _largest(ours[index]))
        found = ours[index].flatten()[entry]
        judge.compare(judge.names[index], found, torch.tensor(value, dtype=torch.float64), largest)


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


QUANTITIES: dict[str, Callable[[Judge], None]] = {
    "first order": first_order,
    "GGN diagonal": ggn_exact,
    "GGN, sampled": ggn_sampled,
    "Kronecker": kronecker,
    "products": products,
    "Hessian diagonal": hessian_diagonal,
}


def sentence(error: BaseException) -> str:
    """The first sentence of what an error says."""
    text = " ".join(str(error).split())
    found = re.split(
        r"(?<=[a-z)'\"0-9\]])[.:;] (?=[A-Z]|use|derive|write|give|freeze)", text, maxsplit=1
    )[0]
    kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
    return f"{kind}{found.rstrip('.')}."


def judge_all(trial: Trial, quantities: list[str]) -> dict[str, Cell]:
    """Every quantity of one model; a model that cannot be built says why in the first."""
    try:
        judge = Judge(trial)
    except Exception as error:
        return {quantities[0]: Cell(reason=sentence(error))}
    return {quantity: copy.copy(judge.judge(quantity)) for quantity in quantities}
