"""Individual gradients, their norms and their inner products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backpack_core.contract.extension import FailMode
from backpack_core.errors import UsageError
from backpack_firstorder.divisors import Divisors, divided_by, see_divisors
from backpack_firstorder.names import name_of
from backpack_firstorder.products import norm
from backpack_firstorder.sample_gradients import SampleGradients
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension, warn_of_range
from backpack_firstorder.tokens import Per, as_per, entries_of
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.merging import SUM, Refused
from backpack_products.open_functions import Operation
from backpack_products.operations import dense, gram, squared_norm

_REFUSED = Refused(
    'gradients of form="product" are not added up over batches: join them with '
    "SampleGradients.cat, or pass a consumer in a loop of your own."
)
Form: TypeAlias = Literal["dense", "product"]
Consumer: TypeAlias = Callable[[str, SampleGradients], object]


class BatchGrad(FirstOrderExtension):
    """Individual gradients.

    Stored in ``grad_batch``, shape ``[N, *θ]``: the gradient of sample ``n``'s part of the loss,
    ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, so that ``Σ_n grad_batch[n] = grad``.
    With ``subsampling``, it has only the chosen samples, scaled as in the whole batch.

    With ``form="product"``, they are not formed: ``grad_batch`` is a
    :class:`~backpack_firstorder.SampleGradients` of the same shape and scale, which gives norms,
    inner products, projections and weighted sums, and can be kept, moved and stored. It has its own
    memory, and is not differentiable.

    With a ``consumer``, nothing is stored. ``consumer(name, gradients)`` is called once for each
    parameter during the backward pass, with its name in the model (for a tied parameter, the first)
    and its ``SampleGradients``. Only one parameter's gradients are held at a time.

    With ``per="token"``, ``grad_batch`` has the shape ``[N, T, *θ]``: a sample's gradient is the
    sum over its tokens. Then ``SampleGradients`` have ``N · T`` entries, those of the first sample
    first. A token's share is the term of its position at every use of the parameter: the gradient
    of a copy that only this position uses. Positions are counted along the axes of the module's
    input (for a convolution, of its output) that do not hold samples or features. The pass raises
    an error at a parameter without positions, or with uses of different numbers of positions.

    The result is exact for every net, unless samples influence each other (Dangel et al., 2020,
    BackPACK, ICLR, section 2.2).
    """

    savefield = "grad_batch"
    degree: float | None = 1
    over_batches: Any = "concatenate"
    needs: tuple[Operation[Any], ...] = (dense,)

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        form: Form = "dense",
        consumer: Consumer | None = None,
        divisors: Divisors | None = None,
        per: Per = "sample",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`backpack_core.Extension`.
            form: ``"dense"`` for tensors, ``"product"`` for gradients that are not formed.
            consumer: With ``form="product"``: a function that takes each parameter's gradients.
            divisors: With ``form="product"``: divisors of the gradients, by parameter name, see
                :func:`~backpack_firstorder.divisors_of`. The gradients are then at least in single
                precision.
            per: ``"sample"``, or ``"token"`` for the share of each position.

        Raises:
            UsageError: The form is unknown, or dense gradients have a consumer or divisors.
        """
        super().__init__(subsampling, savefield, fail_mode)
        if form not in get_args(Form):
            raise UsageError(f"form must be one of {get_args(Form)}. Got {form!r}.")
        if consumer is not None and not (callable(consumer) and form == "product"):
            raise UsageError(
                "consumer must be a function of a name and SampleGradients: write "
                f'BatchGrad(form="product", consumer=f). Got {consumer!r:.80}, with form={form!r}.'
            )
        if divisors is not None and form != "product":
            raise UsageError(
                'divisors divide products: write BatchGrad(form="product", divisors=...), or '
                "divide dense gradients yourself."
            )
        self.divisors, self.per = see_divisors(divisors), as_per(per)
        if per == "token":
            self.needs = ()
        self.consumer, self.is_product = consumer, form == "product"
        self.is_deferred = consumer is not None
        if self.is_product:
            self.needs, self.degree, self.over_batches = (), None, _REFUSED

    def read(self, product: SampleProduct) -> Any:
        """``M`` itself, of one column."""
        entries, lead = entries_of(product, self.per)
        if not self.is_product:
            return dense(entries).reshape(*lead, *product.shape)
        name = name_of(product)
        found = SampleGradients.of(divided_by(self.divisors, entries, name))
        if product.parameter is not None:
            dtype = product.parameter.dtype
            is_divided = self.divisors is not None  # it may leave the range of half precision
            found = found.to(
                dtype=torch.promote_types(dtype, torch.float32) if is_divided else dtype
            )
        if self.consumer is None:
            return found
        self.consumer(name, found)
        return name  # to be forgotten

    def finish(self, values: Mapping[Tensor, Any], normalisers: Sequence[Any]) -> dict[Tensor, Any]:
        """Store nothing: the consumer has taken the gradients."""
        return {}


class BatchL2Grad(SquaresExtension):
    """Squared Euclidean norms of the individual gradients.

    Stored in ``batch_l2``, shape ``[N]``: ``‖∇_θ ℓ_n‖²`` for a sum, and ``1/N² ‖∇_θ ℓ_n‖²`` for a
    mean. The squared norm over several parameters is the sum of theirs.

    At least in single precision. If that is not enough, as for norms beyond 10¹⁹ or below 10⁻¹⁹, a
    pass that is measured says so once, by a :class:`~backpack_core.errors.RangeWarning`.

    Individual gradients are not formed for a layer whose positions share no weight (Goodfellow,
    2015, arXiv:1510.01799), or if Gram matrices over positions are cheaper (Li et al., 2022,
    arXiv:2110.05679, section 4).

    With ``per="token"``, shape ``[N, T]``: the squared norm of each token's share of the gradient,
    see :class:`BatchGrad`.
    """

    savefield = "batch_l2"
    degree = 2
    over_batches = "concatenate"
    needs: tuple[Operation[Any], ...] = (squared_norm,)

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        per: Per = "sample",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`Extension`.
            per: ``"sample"``, or ``"token"`` for the share of each position.
        """
        super().__init__(subsampling, savefield, fail_mode)
        self.per = as_per(per)
        if per == "token":
            self.needs = ()

    def read(self, product: SampleProduct) -> Tensor:
        """``‖M[n]‖²``."""
        entries, lead = entries_of(product, self.per)
        single = in_single(entries)
        found = norm(single)
        squares = found.squared().to(single.like.dtype)
        # A square out of range shows in the result: it is infinite, or nearly zero. So the warning
        # may be left to passes that look at values anyway.
        if product.is_measured:
            _warn(self, product, found.value(), squares)
        return squares.reshape(lead)


class BatchDotGrad(SquaresExtension):
    """Inner products of all pairs of individual gradients.

    Stored in ``batch_dot``, shape ``[N, N]``: ``⟨∇_θ ℓ_n, ∇_θ ℓ_m⟩`` for a sum, and ``1/N²`` times
    that for a mean. Its diagonal is ``batch_l2``. Summed over parameters, it is the Gram matrix of
    the gradients: an empirical neural tangent kernel contracted with the loss's gradients.

    At least in single precision. A pass that is measured warns if that is not enough, as for
    :class:`BatchL2Grad`. Individual gradients are formed only if Gram matrices over positions would
    cost more. Where positions cancel, these are computed in double precision on the host; elsewhere
    they are right to 10⁻⁶ of what the norms would be if no positions cancelled, so that a cosine
    may exceed one.
    """

    savefield = "batch_dot"
    degree = 2
    over_batches = SUM.refused(
        "no batch's matrix has the inner products of samples of two batches: take BatchGrad, which "
        "combines batches, and multiply the individual gradients."
    )
    needs = (gram,)

    def read(self, product: SampleProduct) -> Tensor:
        """``⟨M[n], M[m]⟩``."""
        single = in_single(product)
        found = gram(single)[0, :, 0]
        if product.is_measured:
            _warn(self, product, norm(single).value()[0], found.diagonal())
        return found


def _warn(
    extension: SquaresExtension, product: SampleProduct, norm: Tensor, squares: Tensor
) -> None:
    message = (
        f"{extension.savefield} of {product.name!r} of {product.path} leaves the range of "
        f"{squares.dtype}: norms of individual gradients are so large or so small that their "
        "squares are infinite or zero. Scale the loss, or use double precision."
    )
    warn_of_range(norm, squares, (type(extension), extension.savefield), message)
