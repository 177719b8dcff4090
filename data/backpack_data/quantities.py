"""The result of a run over a data set: the values of all parameters and fields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backpack_core import Extension
from backpack_core.errors import ShapeError, UsageError
from backpack_core.plugins.loading import ensure_loaded, missing
from backpack_core.plugins.registry import registry
from backpack_core.preferences import choose
from backpack_data import files
from backpack_data.shards import whole
from backpack_products.fingerprint import Fingerprint, Marked, agreed, same_name
from backpack_products.merging import OverBatches, declaration

Place = tuple[str, str]


class Quantities(Mapping[Place, Any]):
    """Values by path of the parameter and field: ``quantities["0.weight", "kfac"]``.

    They are in the order of the model's parameters. ``quantities.field("kfac")`` has those of one
    field. Sums, multiples and moving averages go value by value, with the values' own arithmetic
    (for Kronecker factors see ``KroneckerFactors``).

    Attributes:
        batches: How many batches there were.
        normaliser: What the loss of all samples divides by; ``None`` for a sum.
        plugins: Which plugins computed them, see :mod:`backpack_products.fingerprint`; empty if
            that is not known.
    """

    __array_ufunc__ = None  # so that ``numpy_scalar * quantities`` calls __rmul__

    def __init__(
        self,
        values: Mapping[Place, Any],
        shapes: Mapping[str, torch.Size],
        kinds: Mapping[str, str],
        batches: int = 0,
        normaliser: float | None = None,
        over: Mapping[str, OverBatches] | None = None,
        plugins: Fingerprint | None = None,
    ) -> None:
        """Store them.

        Args:
            values: By path and field.
            shapes: Of the parameters, by path, in the order of the model.
            kinds: The names of the extensions, by field.
            batches: How many batches there were.
            normaliser: See the class.
            over: Declarations for values that are not tensors, by field; default: those of the
                installed extensions.
            plugins: See the class.
        """
        self._shapes, self._kinds, self._over = dict(shapes), dict(kinds), dict(over or {})
        ordered = ((path, field) for path in self._shapes for field in self._kinds)
        self._values = {place: values[place] for place in ordered if place in values}
        self.batches, self.normaliser, self.plugins = batches, normaliser, dict(plugins or {})
        for (_, field), value in self._values.items():
            if self.plugins and not isinstance(value, Tensor):  # it may leave the others
                self._declared(field).marked(value, self.plugins)

    def __getitem__(self, place: Place) -> Any:
        """The value of a parameter in a field: ``found["0.weight", "kfac"]``.

        Names with and without the prefix of modules that ``torch.compile`` wraps are the same.
        """
        if place not in self._values and isinstance(place, tuple) and len(place) == 2:
            own = [path for path, field in self._values if field == place[1]]
            with suppress(KeyError):
                place = same_name(str(place[0]), own), place[1]
        if place not in self._values:
            known = {f"{path}, {field}": None for path, field in self._values}
            asked = ", ".join(map(str, place if isinstance(place, tuple) else (place,)))
            near = get_close_matches(asked, known, 1, 0.6)
            there = f"there are {'; '.join(known)}." if known else "this process had no sample."
            hint = f"did you mean {near[0]}?" if near else there
            raise KeyError(f"There is no value at {place!r}: {hint}")
        return self._values[place]

    def __iter__(self) -> Iterator[Place]:
        """Pairs of path and field."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many values there are."""
        return len(self._values)

    def field(self, name: str) -> Marked[Any]:
        """The values of one field, by path, with the fingerprint of their plugins.

        Raises:
            KeyError: There is no such field.
        """
        if name not in self._kinds:
            raise KeyError(f"{name!r} is not one of the fields {sorted(self._kinds)}.")
        found = {path: value for (path, own), value in self.items() if own == name}
        return Marked(found, self.plugins)

    # Arithmetic ----------------------------------------------------------------------------------

    def _map(self, function: Callable[[Place, Any], Any]) -> Quantities:
        values = {place: function(place, value) for place, value in self.items()}
        about = self._shapes, self._kinds, self.batches, self.normaliser, self._over, self.plugins
        return Quantities(values, *about)

    def _declared(self, field: str) -> OverBatches:
        """How values of a field consist of tensors."""
        return self._over.get(field) or declaration(_kind(self._kinds[field]))

    def __add__(self, other: Quantities) -> Quantities:
        """Value by value.

        Raises:
            UsageError: The other quantities have other parameters or fields, or come from other
                plugins.
            ShapeError: Values have several shapes, such as those per sample of other samples.
        """
        if not isinstance(other, Quantities):
            return NotImplemented
        return self._with(other, operator.add)

    def _with(self, other: Quantities, function: Callable[[Any, Any], Any]) -> Quantities:
        """A function of the values of both.

        Raises:
            UsageError: The other quantities have other parameters or fields, or come from other
                plugins.
            ShapeError: Values have several shapes.
        """
        if len(self) != len(other) or any(place not in other for place in self):
            missing = sorted(self.keys() ^ other.keys())[:3]
            raise UsageError(
                f"Only one of the two has values for {missing}: they cannot be combined."
            )
        agreed({"These quantities": self.plugins, "the others": other.plugins})
        for place, value in self.items():
            _require_one_shape(place, value, other[place])
        return self._map(lambda place, value: function(value, other[place]))

    def __mul__(self, factor: float) -> Quantities:
        """Value by value."""
        return self._map(lambda place, value: factor * value)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Quantities:
        """Value by value."""
        return (1 / divisor) * self

    def __radd__(self, other: object) -> Quantities:
        """Let :func:`sum` work, which starts from the number zero."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def moving_average(self, new: Quantities, decay: float) -> Quantities:
        """``decay · self + (1 - decay) · new``, value by value.

        Values with a moving average of their own combine by it, such as Kronecker factors: each
        factor has its average, and the samples in a batch have no say in it.

        Raises:
            UsageError: The decay is not between 0 and 1, there are no new quantities, or they have
                other parameters or fields, or come from other plugins.
            ShapeError: Values have several shapes.
        """
        given: object = new
        if not isinstance(given, Quantities):
            raise UsageError(f"The average needs new Quantities. Got {new!r:.80}.")
        number: Any = decay
        if not isinstance(number, (int, float)) or not 0 <= number <= 1:
            raise UsageError(f"decay lies between 0 and 1. Got {decay!r}.")

        def average(value: Any, latest: Any) -> Any:
            own = getattr(value, "moving_average", None)
            return decay * value + (1 - decay) * latest if own is None else own(latest, decay)

        return self._with(new, average)

    # Tensors -------------------------------------------------------------------------------------

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Quantities:
        """The same on another device, in another precision; indices keep their type."""
        if device is None and dtype is None:
            return self

        def move(tensor: Tensor) -> Tensor:
            is_float = tensor.is_floating_point()
            return tensor.to(device=device, dtype=dtype if is_float else None)

        def moved(place: Place, value: Any) -> Any:
            if isinstance(value, Tensor):
                return move(value)
            over = self._declared(place[1])
            tensors = {key: move(tensor) for key, tensor in over.take_apart(value).items()}
            return over.put_together(tensors, self._shapes[place[0]])

        return self._map(moved)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by ``path|field|part``. Shards are gathered, so all ranks must call it."""
        found = {}
        for (path, name), value in self.items():
            if isinstance(value, Tensor):
                found[files.joined(path, name, "")] = whole(value)
            else:
                for key, tensor in self._declared(name).take_apart(value).items():
                    found[files.joined(path, name, key)] = tensor
        return found

    def save(self, path: str | Path) -> None:
        """Write a file in the safetensors format, atomically."""
        about = {
            "shapes": {key: list(shape) for key, shape in self._shapes.items()},
            "kinds": self._kinds,
            "batches": self.batches,
            "normaliser": self.normaliser,
            "plugins": self.plugins,
        }
        files.write(Path(path), "quantities", self.tensors(), about)

    @classmethod
    def load(cls, path: str | Path) -> Quantities:
        """Read what :meth:`save` wrote.

        Raises:
            MissingPluginError: A value is not a tensor, and its extension is not installed.
            UsageError: The file holds something else.
        """
        tensors, about = files.read(Path(path), "quantities")
        shapes = {key: torch.Size(shape) for key, shape in about["shapes"].items()}
        parts: dict[Place, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            parameter, own, key = files.parts_of(name)
            parts.setdefault((parameter, own), {})[key] = tensor
        values: dict[Place, Any] = {}
        for place, found in parts.items():
            if set(found) == {""}:
                values[place] = found[""]
            else:
                over = declaration(_kind(about["kinds"][place[1]]))
                values[place] = over.put_together(found, shapes[place[0]])
        numbers = about["batches"], about["normaliser"]
        return cls(values, shapes, about["kinds"], *numbers, plugins=about["plugins"])

    def summary(self) -> str:
        """A table: parameter, field, kind, shapes, and the norm of each value."""
        rows = [("parameter", "field", "shapes", "norm")]
        for place, tensors in self._by_place().items():
            shapes = " ".join(str(list(tensor.shape)) for tensor in tensors)
            norms = " ".join(f"{float(tensor.double().norm()):.3e}" for tensor in tensors)
            rows.append((*place, shapes, norms))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        normaliser = "sum" if self.normaliser is None else f"normaliser {self.normaliser:.7g}"
        return "\n".join([*lines, f"{self.batches} batches, {normaliser}"])

    def _by_place(self) -> dict[Place, list[Tensor]]:
        found: dict[Place, list[Tensor]] = {}
        for name, tensor in self.tensors().items():
            path, own, _ = files.parts_of(name)
            found.setdefault((path, own), []).append(tensor)
        return found

    def __repr__(self) -> str:
        """Number of values, and names of extensions."""
        return f"<Quantities: {len(self)} values of {', '.join(sorted(self._kinds))}>"


def _require_one_shape(place: Place, value: Any, other: Any) -> None:
    """Raise an error where tensors would broadcast; matrices look themselves."""
    shapes = [[*v.shape] for v in (value, other) if isinstance(v, Tensor)]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise ShapeError(
            f"The values at {place} have the shapes {shapes[0]} and {shapes[1]}, and are not added."
        )


def _kind(name: str) -> Extension:
    """The class of an installed extension, for its declarations; no instance is made."""
    ensure_loaded()
    claims = registry.extensions.get(name)
    if not claims:
        raise missing(
            f"Values of the extension {name} are not tensors, and no installed plugin provides it.",
            name,
            " Install the plugin that wrote them.",
        )
    found: Any = choose(claims, name, "extension").value
    return found  # type: ignore[no-any-return]
