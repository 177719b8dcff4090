"""Kronecker factors from and to curvlinops; its classes hold one pair for each module.

curvlinops (https://curvlinops.readthedocs.io) is imported when a function is called. Only its
public interface is used: ``state_dict`` and ``load_state_dict``, as of version 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UnsupportedError, UsageError
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import CurvatureMatrix, ParameterOrder


def from_curvlinops(operator: Any, model: Module) -> BlockDiagonal:
    """The blocks of a ``KFACLinearOperator`` or an ``EKFACLinearOperator``.

    Args:
        operator: Made with ``separate_weight_and_bias=True``, for all trained parameters of the
            model in their order. Its factors are computed if they do not exist yet.
        model: The model.

    Returns:
        A matrix for each parameter. Averages have the weight one in sums.

    Raises:
        UnsupportedError: The operator treats weights and biases jointly, so a single parameter has
            no matrix.
    """
    is_corrected = hasattr(operator, "compute_eigenvalue_correction")
    state = operator.state_dict()
    if not state["separate_weight_and_bias"]:
        raise UnsupportedError(
            "The curvlinops operator has one matrix for weight and bias together, but a matrix for "
            "each parameter is needed: make it with separate_weight_and_bias=True."
        )
    if is_corrected and not state["corrected_eigenvalues"]:
        operator.compute_eigenvalue_correction()
    elif not is_corrected and not state["gradient_covariances"]:
        operator.compute_kronecker_factors()
    state = operator.state_dict()
    suffix = "_eigenvectors" if is_corrected else ""
    outer, inner = (state[f"{side}_covariances{suffix}"] for side in ("gradient", "input"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    positions = {name: position for position, name in enumerate(trained)}
    blocks: dict[str, CurvatureMatrix] = {}
    for name, parameter in trained.items():
        path, _, kind = name.rpartition(".")
        factors = [outer[path], inner[path]] if kind == "weight" else [outer[path]]
        order = ParameterOrder(parameter.shape, name=repr(name))
        if is_corrected:
            values = state["corrected_eigenvalues"][path][positions[name]]
            shape = [len(factor) for factor in factors]
            blocks[name] = KroneckerEigenbasis(factors, values.reshape(shape), order).clone()
        else:
            blocks[name] = KroneckerFactors(factors, order).clone()
    return BlockDiagonal(blocks)


def to_curvlinops(
    blocks: Mapping[str, CurvatureMatrix],
    model: Module,
    lossfunc: Callable[..., Tensor],
    loader: Iterable[Any],
    **settings: Any,
) -> Any:
    """A ``KFACLinearOperator`` or an ``EKFACLinearOperator`` with these blocks.

    curvlinops has one pair of factors for the weight and the bias of a module. A layer has the
    same, if no positions share its weight; otherwise take ``weight_sharing="reduce"``.

    Args:
        blocks: A block for each trained parameter, with the names of ``named_parameters``.
        model: The model, made of modules that curvlinops knows.
        lossfunc: Passed on to curvlinops because its constructor requires it; it is not called.
        loader: Passed on in the same way.
        settings: Further arguments of the operator, such as ``kfac_approx``.

    Raises:
        UnsupportedError: Weight and bias of a module have different factors, or a block has a form
            that curvlinops does not know.
        UsageError: A trained parameter has no block.
        ModuleNotFoundError: curvlinops is not installed.
    """
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name in trained if name not in blocks]
    if missing:
        raise UsageError(
            f"The blocks have none for {missing[0]!r}: pass one, or freeze the parameter."
        )
    is_corrected = isinstance(blocks[next(iter(trained))], KroneckerEigenbasis)
    operator_class = EKFACLinearOperator if is_corrected else KFACLinearOperator
    operator = operator_class(
        model,
        lossfunc,
        [*trained.values()],
        loader,
        check_deterministic=False,
        separate_weight_and_bias=True,
        **settings,
    )
    state = operator.state_dict()
    suffix = "_eigenvectors" if is_corrected else ""
    sides = [state[f"{side}_covariances{suffix}"] for side in ("gradient", "input")]
    for position, name in enumerate(trained):
        path = name.rpartition(".")[0]
        for side, factor in zip(sides, _factors(blocks[name], name, is_corrected), strict=False):
            known = side.setdefault(path, factor)
            if known is not factor and not torch.allclose(known, factor):
                raise UnsupportedError(
                    f"curvlinops has one factor for weight and bias of {path!r}, but these blocks "
                    'have two: take weight_sharing="reduce", or leave the bias out.'
                )
        if is_corrected:
            values = state["corrected_eigenvalues"].setdefault(path, {})
            values[position] = blocks[name].eigenbasis().values
    with warnings.catch_warnings():
        # It warns that parameters are overwritten; they are overwritten by the same values.
        warnings.simplefilter("ignore")
        operator.load_state_dict(state)
    return operator


def _factors(block: CurvatureMatrix, name: str, is_corrected: bool) -> list[Tensor]:
    """The two factors of a weight, or the only one of a bias."""
    wanted = KroneckerEigenbasis if is_corrected else KroneckerFactors
    parts: list[Tensor | None] = []
    if isinstance(block, wanted) and block.order.positions is None:
        parts = block.vectors if isinstance(block, KroneckerEigenbasis) else [*block]
    factors = [part for part in parts if part is not None and part.dim() == 2]
    if not factors or len(factors) != len(parts):
        raise UnsupportedError(
            f"curvlinops knows two Kronecker factors for a weight and one for a bias, not "
            f"{block!r} of {name!r}: freeze the parameter."
        )
    return factors
