"""Bases of rules for layers with parameters, which return the product at each parameter.

The more structure a base knows, the cheaper the product is to read: from ``ParametricRule`` (any
parameter) over ``ProductRule`` and ``AffinePairsRule`` to ``AffineRule`` (linear, convolution).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from reprlib import repr as abridged
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bases import Candidate, base, judge
from backpack_core.contract.rules import LayerRule, expect
from backpack_core.errors import ShapeError, nearest
from backpack_core.record.guards import ask, guarded
from backpack_core.record.view import View
from backpack_products.affine import AffineProduct
from backpack_products.columns import ApartColumns, InRuns, OwnedColumns
from backpack_products.derivatives import SecondOrderRule
from backpack_products.operations import dense
from backpack_products.product import SHARED_ROWS, DenseProduct, SampleProduct, regrouped
from backpack_products.regrouping import of_owners
from backpack_products.rows import Rows
from backpack_products.some_samples import subsample
from backpack_products.transposition import transpose

# By module: see SHARED_ROWS.
_shared_rows: WeakKeyDictionary[Module, set[tuple[int, int]]] = WeakKeyDictionary()


@base
class ParametricRule(SecondOrderRule):
    """The rule of a layer ``x ↦ f(x, θ)`` with parameters.

    Class attributes:
        linear_in_params: The names among ``params`` in which ``f`` is affine: ``∂²f/∂θ² = 0``.

    To write:
        ``_jac_t_mat_prod(view, mat)``, as for every :class:`LayerRule`, and
        ``_param_jac_t_mat_prod(view, name, mat)``: ``J_θᵀ mat`` for one parameter,
        ``[V, N, *out] → [V, N, *θ]``, without a sum over samples.
    """

    linear_in_params: ClassVar[tuple[str, ...]] = ()

    def param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
        """The product at a parameter: ``M[v, n] = J_θ[n]ᵀ mat[v, n]``, in some form.

        Args:
            view: The forward execution.
            name: Which parameter ``θ``.
            mat: Columns at the output. Shape ``[V, N, *out]``.

        Returns:
            ``M``, of shape ``[V, N, *θ]``, without a sum over samples.

        Raises:
            ShapeError: ``mat`` or the product has the wrong shape.
        """
        return self.param_products(view, (name,), mat)[0]

    def param_products(self, view: View, names: Sequence[str], mat: Tensor) -> list[SampleProduct]:
        """The products at several parameters, for the same columns."""
        if not view.is_checked:  # a pass of the same structure was checked
            return self._param_products(view, names, mat)
        expect(view, self, "_param_product is given", mat, view.output_shape)
        with guarded(view, self, "_param_product", mat):
            products = self._param_products(view, names, mat)
        for name, product in zip(names, products, strict=True):
            if not isinstance(product, SampleProduct):
                raise ShapeError(
                    f"{type(self).__name__}._param_product returned {abridged(product)} for "
                    f"{name!r} of {view.path}, expected a SampleProduct."
                )
            shape = (product.columns, product.samples, *product.shape)
            expected = (*mat.shape[:2], *_shape_of(view, name))
            if shape != expected:
                raise ShapeError(
                    f"{type(self).__name__} gave a product of shape {list(shape)} for {name!r} of "
                    f"{view.path}, expected [V, N, *{name}] = {list(expected)}."
                )
        return products

    def _param_products(self, view: View, names: Sequence[str], mat: Tensor) -> list[SampleProduct]:
        return [self._param_product(view, name, mat) for name in names]

    def apart_product(self, view: View, name: str, columns: ApartColumns) -> SampleProduct:
        """The product at a parameter of a call without samples on axis 0, for columns kept apart.

        Args:
            view: The forward execution.
            name: Which parameter ``θ``.
            columns: At the output.

        Returns:
            ``M``, of shape ``[V, N, *θ]``.
        """
        return self.apart_products(view, (name,), columns)[0]

    def apart_products(
        self, view: View, names: Sequence[str], columns: ApartColumns
    ) -> list[SampleProduct]:
        """The products at several parameters, for columns kept apart."""
        if isinstance(columns, OwnedColumns):
            of_rows = self.param_products(view, names, columns.plain.mat)
            return [of_owners(product, columns.owned) for product in of_rows]
        if isinstance(columns, InRuns) and columns.is_in_front:
            of_rows, n = self.param_products(view, names, columns.plain.mat), columns.samples
            return [p if p.samples == n else regrouped(p, p.columns, n, {}) for p in of_rows]
        count, samples = columns.mat.shape[:2]
        products = self.param_products(view, names, columns.flat)
        view.call_cache[SHARED_ROWS] = _shared_rows.setdefault(view.call.module, set())
        return [regrouped(product, count, samples, view.call_cache) for product in products]

    def param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        """The formed ``M`` of :meth:`param_product`. Shape ``[V, N, *θ]``."""
        return dense(self.param_product(view, name, mat))

    def param_jac_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        """Apply the parameter Jacobian of each sample to columns in parameter space.

        Args:
            view: The forward execution.
            name: Which parameter ``θ``.
            mat: Columns in parameter space, the same for all samples. Shape ``[V, *θ]``.

        Returns:
            ``J_θ[n] mat[v]``. Shape ``[V, N, *out]``.
        """
        shape = (len(mat), *view.output_shape)
        shared = mat.unsqueeze(1).expand(-1, shape[1], *mat.shape[1:])
        return transpose(lambda out: self.param_jac_t_mat_prod(view, name, out), shape, shared)

    @abstractmethod
    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        """``[V, N, *out] → [V, N, *θ]``."""

    def _param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
        """The product for columns ``[V, N, *out]``, by ``_param_jac_t_mat_prod`` when formed."""
        shape, samples = view.parameter_itself(name).shape, range(mat.shape[1])

        def form(columns: slice, rows: slice) -> Tensor:
            part = view if len(samples[rows]) == len(samples) else subsample(view, samples[rows])
            some = mat[columns, rows]
            result: Tensor = ask(part, self, "_param_jac_t_mat_prod", part, name, some)
            expected = torch.Size((some.shape[1], *shape))
            what = f"_param_jac_t_mat_prod of {name!r} returned"
            expect(view, self, what, result, expected, len(some))
            return result

        return DenseProduct(form=form, mat=mat, shape=shape)


@base
class ProductRule(ParametricRule):
    """The rule of a layer that gives its products in a special form.

    To write:
        ``_jac_t_mat_prod(view, mat)``, and ``_param_product(view, name, mat)``: columns
        ``[V, N, *out]`` to a :class:`~backpack_products.SampleProduct` ``[V, N, *θ]``.
    """

    @abstractmethod
    def _param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
        """The product ``[V, N, *θ]`` for columns ``[V, N, *out]``."""

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return dense(self._param_product(view, name, mat))


@base
class AffinePairsRule(ProductRule):
    """The rule of a layer whose parameters are weights and biases of affine maps inside it.

    These maps are ``y[n, s, g] = W[g] x[n, s, g] + b[g]``, where ``y`` need not be the layer's
    output: gates of a recurrent cell, projections of attention. ``s`` runs over the positions that
    share the weight (pixels, tokens, time steps) in the order of the input, ``g`` over groups.
    Extensions contract columns at ``y`` with ``x``, without tensors ``[V, N, *θ]`` (this form:
    Eschenhagen et al. 2023, arXiv:2311.00636).

    To write:
        ``_jac_t_mat_prod(view, mat)``, and ``affine_pair(view, name, mat)``: ``y``'s columns
        ``[V, N, S, G, O]`` and ``x`` ``[N, S, G, I]``. Optional: ``arrangement(view, name)``.
    """

    @abstractmethod
    def affine_pair(self, view: View, name: str, mat: Tensor) -> tuple[Tensor, Rows | None]:
        """The two factors of the product at one parameter.

        Args:
            view: The forward execution.
            name: Which parameter.
            mat: Columns at the output. Shape ``[V, N, *out]``.

        Returns:
            The columns carried back to ``y``, shape ``[V, N, S, G, O]``, and for a weight ``x``,
            shape ``[N, S, G, I]``; ``None`` for a bias.
        """

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        """How ``[*lead, G, O, I]`` (for a bias ``[*lead, G, O]``) becomes ``[*lead, *θ]``.

        ``None``, the default, is a reshape. A layer that stores its weight differently overrides
        it.
        """
        return None

    def _param_product(self, view: View, name: str, mat: Tensor) -> AffineProduct:
        pair: Any = self.affine_pair(view, name, mat)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            who, of = f"{type(self).__name__}.affine_pair", f"{name!r} of {view.path}"
            raise ShapeError(
                f"{who} returned {abridged(pair)} for {of}, expected a pair: columns "
                "[V, N, S, G, O] and inputs [N, S, G, I], or None for a bias."
            )
        return AffineProduct(pair[0], pair[1], _shape_of(view, name), self.arrangement(view, name))


@base
class AffineRule(AffinePairsRule):
    """The rule of a layer ``y[n, s, g] = W[g] x[n, s, g] + b[g]`` (weight-sharing form).

    Linear layers, convolutions and transposed convolutions have this form.

    To write:
        ``_jac_t_mat_prod(view, mat)``, ``affine_input(view)``: ``[N, S, G, I]``, and
        ``affine_output(view, mat)``: ``[V, N, *out] → [V, N, S, G, O]``.
    """

    params = ("weight", "bias")
    linear_in_params = ("weight", "bias")
    hessian_is_zero = True

    @abstractmethod
    def affine_input(self, view: View) -> Rows:
        """The inputs that the weight multiplies. Shape ``[N, S, G, I]``.

        If they must be copied (patches of a convolution), return an object that copies those of
        some samples at a time instead of a tensor: see :class:`~backpack_products.rows.Rows`.
        """

    @abstractmethod
    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """The columns at the output, rearranged: ``[V, N, *out] → [V, N, S, G, O]``."""

    def affine_pair(self, view: View, name: str, mat: Tensor) -> tuple[Tensor, Rows | None]:
        """The rearranged columns and the inputs."""
        out = self.affine_output(view, mat)
        return out, None if name == "bias" else self.affine_input(view)

    def _param_products(self, view: View, names: Sequence[str], mat: Tensor) -> list[SampleProduct]:
        """The products, with columns that weight and bias share."""
        own, base = type(self), AffineRule
        if own._param_product is not base._param_product or own.affine_pair is not base.affine_pair:
            return super()._param_products(view, names, mat)
        out, products = self.affine_output(view, mat), list[SampleProduct]()
        for name in names:
            inp = None if name == "bias" else self.affine_input(view)
            shape = _shape_of(view, name)
            products.append(AffineProduct(out, inp, shape, self.arrangement(view, name)))
        return products


def _shape_of(view: View, name: str) -> torch.Size:
    owned = view.stored.owned.get(name)
    return (view.parameter_itself(name) if owned is None else owned[0]).shape


@judge
def _not_among_params(candidate: Candidate) -> Iterator[str]:
    """Yields a sentence for each name in ``linear_in_params`` that is not in fixed ``params``."""
    cls = candidate.cls
    if not issubclass(cls, ParametricRule):
        return
    own: object = vars(cls).get("linear_in_params", ())
    params: object = cls.params
    is_fixed = cls.parameter_names is LayerRule.parameter_names
    if not (is_fixed and isinstance(own, tuple) and isinstance(params, tuple)):
        return
    for name in own:
        if name not in params:
            yield f"linear_in_params names {name!r}, which is not in params{nearest(name, params)}"
