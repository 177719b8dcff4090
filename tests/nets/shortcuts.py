"""Everything that is computed in a quicker way where that is possible, with how to do without it.

Each is a predicate or a constant of the library, or what a quick way stands beside, which is
replaced for a while. ``test_shortcuts.py`` compares each quick way with the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from typing import Any
from unittest import mock

from torch import Tensor

from backpack_core.record.view import View
from backpack_operations import bridge
from backpack_products.factors import FactorProduct
from backpack_products.product import SampleProduct

_CORE, _FIRST, _SECOND = "backpack_core", "backpack_firstorder", "backpack_secondorder"
_PRODUCTS, _OPERATIONS = "backpack_products", "backpack_operations"
Places = Mapping[str, Any]  # what stands at a dotted place


def always(*given: Any) -> bool:
    """Yes."""
    return True


def never(*given: Any) -> bool:
    """No."""
    return False


def nothing(*given: Any) -> None:
    """Nothing."""


@dataclass(frozen=True)
class Shortcut:
    """A quicker way.

    Attributes:
        off: What to put where, so that it is never taken.
        on: The same, so that it is taken wherever that is possible; nothing if it always is.
        taken: The function that runs if it is taken, by its places; some have none of their own.
        within: A shortcut that this one is a part of.
        gradient: Where the plain gradient comes from.
    """

    off: Places = field(default_factory=dict)
    on: Places = field(default_factory=dict)
    taken: Sequence[str] = ()
    within: str = ""
    gradient: str = "autograd"


def _at(places: Sequence[str], value: Any) -> Places:
    return dict.fromkeys(places, value)


def _apart(product: FactorProduct, others: Sequence[SampleProduct]) -> Any:
    return product, [*others]


def _one_by_one(formula: Any, mats: list[Tensor]) -> Any:
    return (bridge._one_by_one if len(mats[0]) else _over_columns)(formula, mats)


def _read_all(traversal: Any, lane: int, view: View, carrier: Any, quantity: Any) -> Any:
    return traversal.survey.trained[view.call]


_over_columns = bridge._over_columns
# Operations whose definitions read ``M``; their versions for forms are quicker.
_OPEN = [
    *(f"{_PRODUCTS}.operations.{name}" for name in ("square_sum", "per_sample_square_sum")),
    *(f"{_PRODUCTS}.operations.{name}" for name in ("batch_sum", "weighted_sum", "gram")),
    *(f"{_PRODUCTS}.operations.{name}" for name in ("squared_norm", "read_together")),
    *(f"{_SECOND}.position_pairs.{name}" for name in ("diagonal", "sample_diagonals")),
    f"{_FIRST}.products.norm",
]
_VERSIONS = "versions for forms"
_COLUMN = [f"{_PRODUCTS}.contractions", f"{_FIRST}.contractions", f"{_FIRST}.products"]

_INTERPLAY = "backpack_interplay"
_LEFT_OUT = f"{_INTERPLAY}.gradient.inputs_without"

_READ_WHAT_AUTOGRAD_SAVED = [
    "attention_nodes",
    "dropout",
    "max_pooling",
    "normalization",
    "piecewise_linear",
]

SHORTCUTS: dict[str, Shortcut] = {
    "condensed columns": Shortcut(
        {f"{_SECOND}.condensed.WORTHWHILE": 0.0},
        {f"{_SECOND}.condensed.WORTHWHILE": inf},
        [f"{_SECOND}.propagators.condensed"],
    ),
    "pairs of positions": Shortcut(
        {f"{_SECOND}.position_pairs.is_cheaper": never},
        _at([f"{_SECOND}.position_pairs.{name}" for name in ("_SMALL", "_COPIED")], 0),
        [f"{_SECOND}.position_pairs.by_pairs"],
        within=_VERSIONS,
    ),
    "kept products": Shortcut(
        {f"{_FIRST}.clipping.is_cheaper_kept": never},
        {f"{_FIRST}.clipping.is_cheaper_kept": always},
    ),
    "small parameters together": Shortcut(
        {f"{_FIRST}.clipping._SMALL": -1}, {}, [f"{_FIRST}.clipping._rows"]
    ),
    "one column": Shortcut(
        _at([f"{place}.is_column" for place in _COLUMN], never),
        {},
        [f"{_FIRST}.contractions.moments_of_column"],
        within=_VERSIONS,
    ),
    "norms by Gram matrices": Shortcut(
        {f"{_FIRST}.contractions.is_gram_cheaper": never},
        {f"{_FIRST}.contractions.is_gram_cheaper": always},
        [f"{_FIRST}.contractions.norm_by_gram"],
        within=_VERSIONS,
    ),
    "inner products by positions": Shortcut(
        {f"{_PRODUCTS}.contractions.is_gram_of_positions_cheaper": never},
        {f"{_PRODUCTS}.contractions.is_gram_of_positions_cheaper": always},
        [f"{_PRODUCTS}.contractions._gram_by_positions"],
        within=_VERSIONS,
    ),
    "halves of symmetric products": Shortcut(
        {f"{_SECOND}.covariances.SYMMETRIC": 10**9},
        _at([f"{_SECOND}.covariances.{name}" for name in ("SYMMETRIC", "MANY")], 2),
    ),
    "squares one by one": Shortcut(
        {f"{_PRODUCTS}.contractions.LARGE": inf},
        {f"{_PRODUCTS}.contractions.LARGE": 0},
        within=_VERSIONS,
    ),
    _VERSIONS: Shortcut(
        {f"{place}.{name}": {} for place in _OPEN for name in ("_versions", "_chosen")}
    ),
    "several from one formation": Shortcut(
        {f"{_PRODUCTS}.affine.read_together": lambda product: {}}, within=_VERSIONS
    ),
    "uses in one product": Shortcut({f"{_PRODUCTS}.factors.FactorProduct.plus": _apart}),
    "factors at operands": Shortcut(
        {f"{_OPERATIONS}.apart._factored": lambda *given: {}},
        {},
        [f"{_OPERATIONS}.apart.operand_product"],
    ),
    "columns by vmap": Shortcut({f"{_OPERATIONS}.bridge._over_columns": _one_by_one}),
    "parameters read inside": Shortcut(
        {f"{_OPERATIONS}.visits.read_here": _read_all},
        {},
        [f"{_OPERATIONS}.inside._reach"],
    ),
    "calls passed by": Shortcut({f"{_OPERATIONS}.passes.GraphPass.passes_by": never}),
    "quick recording": Shortcut({f"{_CORE}.recording.simple_node": nothing}),
    "what autograd saved": Shortcut(
        {f"backpack_layers.{name}.saved_in": nothing for name in _READ_WHAT_AUTOGRAD_SAVED}
    ),
    "the kernel of attention": Shortcut({"backpack_layers.attention._by_kernel": nothing}),
    "factors of Hessians": Shortcut(
        {f"{_SECOND}.signed_sqrt._may_factor": never}, {}, [f"{_SECOND}.signed_sqrt._factored"]
    ),
    "all columns at once": Shortcut(
        {f"{_OPERATIONS}.own_order.column_budget": lambda device: 1},
        {f"{_OPERATIONS}.own_order.column_budget": lambda device: 2**40},
    ),
    "gradients shared": Shortcut(gradient="shared", taken=[_LEFT_OUT]),
    "gradients left out": Shortcut(gradient="none", taken=[_LEFT_OUT]),
    "autograd skipped": Shortcut(gradient="skipped", taken=[f"{_INTERPLAY}.alone.visit_all"]),
}


@contextmanager
def placed(places: Places) -> Iterator[None]:
    """Put things at places for a while."""
    with ExitStack() as stack:
        for place, value in places.items():
            stack.enter_context(mock.patch.object(*_found(place), value))
        yield


@contextmanager
def counted(places: Sequence[str]) -> Iterator[list[int]]:
    """Count the calls of functions; the only entry of the list is the number."""
    count = [0]

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            count[0] += 1
            return function(*given, **named)

        return call

    with ExitStack() as stack:
        for place in places:
            owner, name = _found(place)
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield count


def plain(*left_on: str) -> Places:
    """All shortcuts off, but for some."""
    found: dict[str, Any] = {}
    for name, shortcut in SHORTCUTS.items():
        found.update({} if name in left_on else shortcut.off)
    return found


def together() -> Places:
    """All of them taken wherever that is possible."""
    found: dict[str, Any] = {}
    for shortcut in SHORTCUTS.values():
        found.update(shortcut.on)
    return found


def alone(name: str) -> Places:
    """All shortcuts off but one, which is taken wherever that is possible."""
    shortcut = SHORTCUTS[name]
    return {**plain(name, shortcut.within), **shortcut.on}


def _found(place: str) -> tuple[Any, str]:
    """A module or a class, and the name of something in it."""
    parent, _, name = place.rpartition(".")
    try:
        return import_module(parent), name
    except ModuleNotFoundError:
        outer, inner = _found(parent)
        return getattr(outer, inner), name
