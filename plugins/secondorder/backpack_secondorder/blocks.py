"""Block-diagonal curvature: a matrix for each parameter; blocks between parameters are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UsageError, nearest
from backpack_core.plugins.registry import registry
from backpack_products.fingerprint import (
    Marked,
    agreed,
    as_tensor,
    fingerprint,
    fingerprint_of,
    from_tensor,
)
from backpack_secondorder.kronecker import as_matrix, matrix_from_state
from backpack_secondorder.linear import LinearOperator
from backpack_secondorder.matrix import CurvatureMatrix, Number

_PLUGINS = "plugins"  # the key of the fingerprint; keys of tensors have a slash


class BlockDiagonal(LinearOperator, Mapping[str, CurvatureMatrix]):
    """The matrices of all parameters as one block-diagonal matrix, with the same methods.

    A mapping from names of parameters to their matrices, in the order of the rows. ``+``, multiples
    and moving averages go block by block; vectors come in the forms of
    :mod:`~backpack_secondorder.linear`.

    Attributes:
        plugins: The plugins that computed the matrix, see :mod:`backpack_products.fingerprint`;
            empty if they are not known. Matrices of different plugins cannot be added.
    """

    __array_ufunc__ = None

    def __init__(self, blocks: Mapping[str, CurvatureMatrix | Tensor]) -> None:
        """Store the matrices.

        Args:
            blocks: A matrix for each parameter, or a tensor in its shape for a diagonal. The result
                of ``found.field(...)`` of a run over data also has the plugins that computed it.

        Raises:
            UsageError: ``blocks`` is empty, a key is not a name, or a block is not a matrix or a
                tensor.
        """
        if not blocks:
            raise UsageError("A block-diagonal matrix needs at least one block. Got none.")
        if not isinstance(blocks, Mapping) or not all(isinstance(name, str) for name in blocks):
            raise UsageError(
                "A block-diagonal matrix takes a mapping from names of parameters to their "
                f"matrices. Got {type(blocks).__name__}: take one field of a result of accumulate, "
                "BlockDiagonal(found.field(...))."
            )
        self.plugins = fingerprint_of(blocks)
        matrices = {name: as_matrix(value) for name, value in blocks.items()}
        self._blocks = Marked(matrices, self.plugins)
        self.shapes = tuple(block.order.shape for block in self._blocks.values())

    @classmethod
    def of(cls, model: Module, field: str) -> BlockDiagonal:
        """The matrices that an extension stored on the trained parameters of a model.

        Args:
            model: The model.
            field: The extension's ``savefield``: ``"kfac"``, ``"ekfac"``, ``"diag_ggn_exact"``.

        Raises:
            UsageError: A trained parameter has no such attribute, or ``model`` is not a module.
        """
        if not isinstance(model, Module):
            raise UsageError(
                f"BlockDiagonal.of takes what a backward pass left on a model. Got "
                f"{type(model).__name__}: for a result of accumulate, write "
                f"BlockDiagonal(found.field({field!r}))."
            )
        blocks = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if not hasattr(parameter, field):
                    near = nearest(field, vars(parameter)) or "."
                    raise UsageError(
                        f"The parameter {name!r} has no {field!r}{near} Run a backward pass with "
                        "the extension that stores it, or freeze the parameter."
                    )
                blocks[name] = getattr(parameter, field)
        kinds = [c.value for claims in registry.extensions.values() for c in claims]
        kinds = [kind for kind in kinds if getattr(kind, "savefield", None) == field]
        return cls(Marked(blocks, fingerprint([model], kinds)))

    def __getitem__(self, name: str) -> CurvatureMatrix:
        """The block of a parameter."""
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        """Names of parameters."""
        return iter(self._blocks)

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._blocks)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the blocks."""
        return next(iter(self.values())).dtype

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return next(iter(self.values())).device

    def products(self, vectors: list[Tensor]) -> list[Tensor]:
        """Block by block."""
        return [block.matmul(v) for block, v in zip(self.values(), vectors, strict=True)]

    @overload
    def solve(self, vectors: Tensor, damping: Number = 0.0) -> Tensor: ...

    @overload
    def solve(self, vectors: Sequence[Tensor], damping: Number = 0.0) -> list[Tensor]: ...

    def solve(
        self, vectors: Tensor | Sequence[Tensor], damping: Number = 0.0
    ) -> Tensor | list[Tensor]:
        """The inverse of the matrix plus ``damping`` times the identity, times vectors."""

        def solved(parts: list[Tensor]) -> list[Tensor]:
            return [b.solve(v, damping) for b, v in zip(self.values(), parts, strict=True)]

        if isinstance(vectors, Tensor):
            return self._flat(vectors, solved)
        return self._lists(vectors, solved)

    def map(self, function: Callable[[Any], CurvatureMatrix | Tensor]) -> BlockDiagonal:
        """Apply a function to every block: ``blocks.map(lambda block: block.inverse(0.1))``."""
        mapped = {name: function(block) for name, block in self.items()}
        return BlockDiagonal(Marked(mapped, self.plugins))

    def inverse(self, damping: Number = 0.0) -> BlockDiagonal:
        """The inverse of every block, after damping of its form."""
        return self.map(lambda block: block.inverse(damping))

    def damped(self, damping: Number) -> BlockDiagonal:
        """Every block, damped in its form."""
        return self.map(lambda block: block.damped(damping))

    def eigenbasis(self) -> BlockDiagonal:
        """The eigendecomposition of every block."""
        return self.map(lambda block: block.eigenbasis())

    def logdet(self, damping: Number = 0.0) -> Tensor:
        """``log det`` of the matrix plus ``damping`` times the identity."""
        return torch.stack([block.logdet(damping) for block in self.values()]).sum()

    def trace(self) -> Tensor:
        """Sum of the traces."""
        return torch.stack([block.trace() for block in self.values()]).sum()

    def sample(
        self,
        count: int | None = None,
        damping: Number = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[Tensor]:
        """Draws from the Gaussian with this precision matrix; see :meth:`CurvatureMatrix.sample`.

        Returns:
            For each parameter ``[*θ]``, or ``[count, *θ]``.
        """
        return [block.sample(count, damping, generator) for block in self.values()]

    def moving_average(self, other: BlockDiagonal, decay: float) -> BlockDiagonal:
        """``decay · F + (1 - decay) · G``, with ``F`` the average so far."""
        return self._with(other, lambda a, b: a.moving_average(b, decay))

    def to(self, *args: Any, **kwargs: Any) -> BlockDiagonal:
        """The matrix on another device or in another dtype; arguments as for ``Tensor.to``."""
        return self.map(lambda block: block.to(*args, **kwargs))

    def state_dict(self) -> dict[str, Tensor]:
        """All blocks as tensors, for ``torch.save`` or safetensors."""
        state = {_PLUGINS: as_tensor(self.plugins)}
        for place, (name, block) in enumerate(self.items()):
            tensors = {**block.state_dict(), "place": torch.tensor(place, device="cpu")}
            tensors.pop(_PLUGINS, None)
            state.update((f"{name}/{key}", tensor) for key, tensor in tensors.items())
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> BlockDiagonal:
        """The matrix from its :meth:`state_dict`, with entries in any order.

        Raises:
            UsageError: The state is not that of a block-diagonal matrix.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        plugins = from_tensor(state[_PLUGINS]) if _PLUGINS in state else {}
        for full, tensor in state.items():
            if full == _PLUGINS:
                continue
            name, _, key = full.rpartition("/")
            parts.setdefault(name, {})[key] = tensor
        strange = [name for name, part in parts.items() if "place" not in part]
        if strange:
            raise UsageError(
                f"This is not the state of a block-diagonal matrix: {strange[0]!r} has no place in "
                "it. For the state of a single matrix, use matrix_from_state."
            )
        names = sorted(parts, key=lambda name: int(parts[name]["place"]))
        return cls(Marked({name: matrix_from_state(parts[name]) for name in names}, plugins))

    def __mul__(self, scalar: Number) -> BlockDiagonal:
        """Block by block."""
        return self.map(lambda block: block.scaled(scalar))

    __rmul__ = __mul__

    def __truediv__(self, scalar: Number) -> BlockDiagonal:
        """Block by block."""
        return self.map(lambda block: block / scalar)

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        """Block by block."""
        return self._with(other, lambda a, b: a + b)

    def __radd__(self, other: Any) -> BlockDiagonal:
        """Make :func:`sum` work: it starts from the number zero."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def _with(
        self, other: Any, function: Callable[[Any, Any], CurvatureMatrix | Tensor]
    ) -> BlockDiagonal:
        if not isinstance(other, BlockDiagonal) or [*self] != [*other]:
            names = [*other] if isinstance(other, BlockDiagonal) else type(other).__name__
            raise UsageError(
                "Block-diagonal matrices can be added if they have the same parameters in the same "
                f"order: {[*self]}. Got {names}."
            )
        results = {"This matrix": self.plugins, "the other one": other.plugins}
        plugins = agreed(results, is_one_quantity=False)
        return BlockDiagonal(Marked({n: function(self[n], other[n]) for n in self}, plugins))

    def __repr__(self) -> str:
        """Names and blocks."""
        return f"<BlockDiagonal {dict(self)}>"
