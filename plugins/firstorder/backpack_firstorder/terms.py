"""The terms of stored per-sample gradients: affine, of a table, or formed.

Each is a product of one column whose tensors have the samples on axis 0, so that terms can be
indexed, joined, moved and stored by name.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.factors import FactorProduct
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct, SampleProduct
from backpack_products.rows import whole

Index: TypeAlias = "int | slice | Sequence[int] | Tensor"
FORMS = {AffineProduct: "affine", LookupProduct: "lookup", DenseProduct: "dense"}


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """A parameter's rows, and its columns: the first axis, and all others."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def kept(terms: Sequence[SampleProduct]) -> list[SampleProduct]:
    """Terms in their own memory, or their sum formed if that takes less."""
    size = terms[0].samples * prod(terms[0].shape)
    numbers = [_numbers(term) for term in terms]
    if None not in numbers and sum(filter(None, numbers)) <= size:
        return [
            mapped(term, lambda factor: _copied(factor.detach()), torch.clone) for term in terms
        ]
    every = slice(0, 1), slice(0, terms[0].samples)
    formed = reduce(torch.add, (term.part(*every) for term in terms))
    return [DenseProduct(_copied(formed.detach()))]


def _numbers(term: SampleProduct) -> int | None:
    """How many numbers the factors of a term have; ``None`` if it has no factors to keep."""
    if isinstance(term, AffineProduct) and term.arrange is None and term.inp is not None:
        return term.out.numel() + prod(term.inp.shape)
    return term.out.numel() + term.row.numel() if isinstance(term, LookupProduct) else None


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def fresh(term: SampleProduct) -> SampleProduct:
    """A copy of a term, without stored results of operations."""
    if isinstance(term, FactorProduct):
        return term.with_factors(term.out, term.other, None)
    assert isinstance(term, DenseProduct)
    return DenseProduct(term.values)


def tensors_of(term: SampleProduct) -> list[tuple[str, Tensor]]:
    """The tensors of a term by name, samples on axis 0."""
    if isinstance(term, AffineProduct):
        return [("out", term.out[0]), ("inp", whole(term.inp))]  # type: ignore[arg-type]
    if isinstance(term, LookupProduct):
        return [("out", term.out[0]), ("row", term.row)]
    assert isinstance(term, DenseProduct)
    assert term.values is not None
    return [("values", term.values[0])]


def term_of(form: str, tensors: Mapping[str, Tensor], shape: torch.Size) -> SampleProduct:
    """The term from its :func:`tensors_of`."""
    if form == "affine":
        return AffineProduct(tensors["out"].unsqueeze(0), tensors["inp"], shape)
    if form == "lookup":
        return LookupProduct(tensors["out"].unsqueeze(0), tensors["row"], shape)
    if form != "dense":
        raise ValueError(form)
    return DenseProduct(tensors["values"].unsqueeze(0))


def times(term: SampleProduct, weights: Tensor) -> SampleProduct:
    """Each gradient of a term multiplied by its weight, ``[N]``."""
    (name, factor), *others = tensors_of(term)
    each = weights.to(factor).reshape(-1, *[1] * (factor.dim() - 1))
    return term_of(FORMS[type(term)], {name: factor * each, **dict(others)}, term.shape)


def state_of(terms: Sequence[SampleProduct]) -> dict[str, Tensor]:
    """The tensors of several terms by number, form and name."""
    return {
        f"{number}.{FORMS[type(term)]}.{name}": tensor
        for number, term in enumerate(terms)
        for name, tensor in tensors_of(term)
    }


def terms_from(state: Mapping[str, Tensor], shape: torch.Size) -> list[SampleProduct]:
    """The terms from the tensors of :func:`state_of`, for a parameter with a shape."""
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        number, form, name = key.split(".")
        found.setdefault((int(number), form), {})[name] = tensor
    return [term_of(form, found[number, form], shape) for number, form in sorted(found)]


def chosen_by(index: Index, samples: int, device: torch.device) -> slice | Tensor:
    """The index that chooses samples of a term, from any index of a user; a number chooses one.

    Raises:
        IndexError: No sample has this number, or the index has several axes or is not a number.
    """
    if isinstance(index, slice):
        if index.step is None or index.step > 0:
            return index
        index = range(samples)[index]  # tensors cannot be read backwards
    if isinstance(index, (tuple, str)):
        raise IndexError(
            "Gradients are indexed by sample alone: [0, 1], a list, for two samples, and "
            f".dense()[0, 1] for a part of one. Got {index!r:.80}."
        )
    if isinstance(index, Iterable) and not isinstance(index, Tensor):  # arrays of NumPy, too
        numbers = index.tolist() if hasattr(index, "tolist") else [*index]
        chosen = torch.as_tensor(numbers, device=device)
        index = chosen if len(chosen) else chosen.long()
    if isinstance(index, Tensor):
        is_mask = index.dtype == torch.bool
        if index.dim() > 1 or (is_mask and index.shape != (samples,)) or index.is_floating_point():
            raise IndexError(
                f"There are {samples} samples. Give places, [n], or a mask of that length. Got "
                f"{[*index.shape]} of {index.dtype}."
            )
        return index.to(device).reshape(-1)
    number = operator.index(index)
    if not -samples <= number < samples:
        raise IndexError(f"There are {samples} samples. Got the index {number}.")
    return slice(number, number + 1 or None)


def mapped(term: SampleProduct, function: Any, number: Any) -> SampleProduct:
    """Apply a function to the tensors of a term, and another one to numbers of rows."""
    tensors = {
        name: number(tensor) if name == "row" else function(tensor)
        for name, tensor in tensors_of(term)
    }
    return term_of(FORMS[type(term)], tensors, term.shape)


def numbered(terms: Iterable[SampleProduct]) -> Iterator[tuple[Any, SampleProduct]]:
    """The terms of one set, each with a key: terms with equal keys can be concatenated."""
    seen = Counter[Any]()
    for term in terms:
        form = type(term), term.sizes if isinstance(term, AffineProduct) else None
        yield (*form, seen[form]), term
        seen[form] += 1


def side_by_side(terms: Sequence[SampleProduct | None], counts: Sequence[int]) -> SampleProduct:
    """One term for the samples of several terms, zero for samples without a term."""
    there = [dict(tensors_of(term)) for term in terms if term is not None]
    like = next(term for term in terms if term is not None)
    is_formed = isinstance(like, DenseProduct)
    positions = 0 if is_formed else max(tensors["out"].shape[1] for tensors in there)
    joined = {}
    for name, first in there[0].items():
        parts = []
        for term, count in zip(terms, counts, strict=True):
            tensor = first[:0] if term is None else dict(tensors_of(term))[name]
            length = first.shape[1:] if is_formed else (positions, *first.shape[2:])
            filled = first.new_zeros(count, *length)
            if term is not None and is_formed:
                filled = tensor
            elif term is not None:
                filled[:, : tensor.shape[1]] = tensor
            parts.append(filled)
        joined[name] = torch.cat(parts)
    return term_of(FORMS[type(like)], joined, like.shape)
