"""Functions with a backward pass of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Function(torch.autograd.Function):
    """What all have in common: a factor kept on the context."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.factor * grads[0]


class Scale(Function):
    """A number first."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        return factor * x


class ScaleOnce(Scale):
    """Without a second derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.factor * grad


class ScaleNew(Function):
    """With the context in a function of its own, and support for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: float, x: Tensor) -> Tensor:
        return factor * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[float, Tensor], output: Tensor) -> None:
        ctx.factor = inputs[0]


class ScaleNumpy(Scale):
    """Through another library, which vmap cannot see into."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, torch.from_numpy(ctx.factor * grad.cpu().numpy()).to(grad)


class ScaleInPlace(Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x.mul_(factor)


class Sine(torch.autograd.Function):
    """``sin x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].cos()


class Cube(torch.autograd.Function):
    """Nonlinear; the argument comes after three that are no tensors."""

    @staticmethod
    def forward(ctx: Any, name: str, nothing: None, shape: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, None, None, 3 * x**2 * grad


class Weigh(torch.autograd.Function):
    """Numbers between tensors, of which one is a constant and one a parameter."""

    @staticmethod
    def forward(
        ctx: Any, constant: Tensor, factor: float, x: Tensor, flag: bool, weight: Tensor
    ) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(constant, x, weight)
        return factor * constant * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        constant, x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        by_x = ctx.factor * constant * weight * grad
        by_weight = (ctx.factor * constant * x * grad).sum(0) if needs[4] else None
        return None, None, by_x, None, by_weight


class Pair(torch.autograd.Function):
    """Two outputs of a number and two tensors."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return factor * x + y, factor * y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return None, ctx.factor * first, first + ctx.factor * second


class Unmaterialised(torch.autograd.Function):
    """Sees ``None`` where an output got no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.factor = factor
        return factor * x, 2 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        parts = [f * g for f, g in ((ctx.factor, first), (2.0, second)) if g is not None]
        return None, sum(parts) if parts else None


class Largest(torch.autograd.Function):
    """An output of integers, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.factor = factor
        return index, factor * x

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> Any:
        return None, ctx.factor * grad


class Gather(torch.autograd.Function):
    """A tensor of integers first."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, count: int, x: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x[:, index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return None, None, torch.zeros_like(grad).index_add(1, index, grad)


class Reshape(torch.autograd.Function):
    """A tuple first; the gradient has another shape."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.reshape(len(x), *shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.reshape(ctx.shape)


class OneSided(torch.autograd.Function):
    """The second tensor gets no gradient, whatever it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None


class Opaque(torch.autograd.Function):
    """No gradient at all."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        return factor * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


Operation = Callable[[Tensor], Tensor]


# [N, 4] -> [N, *] of four features
OPERATIONS: dict[str, Operation] = {
    "number": lambda h: Scale.apply(2.0, h),
    "twice": lambda h: Scale.apply(2.0, h) * Scale.apply(0.5, h.sin()),
    "once": lambda h: ScaleOnce.apply(2.0, h),
    "new": lambda h: ScaleNew.apply(2.0, h),
    "numpy": lambda h: ScaleNumpy.apply(2.0, h),
    "in_place": lambda h: ScaleInPlace.apply(2.0, h * 1.0),
    "in_place_of_the_output": lambda h: ScaleInPlace.apply(2.0, h),
    "nonlinear": lambda h: Cube.apply("cube", None, (3,), h),
    "constants": lambda h: Weigh.apply(torch.arange(4.0), 2.0, h, True, torch.ones(4)),
    "pair": lambda h: sum(Pair.apply(2.0, h, h.tanh())),
    "pair_first": lambda h: Pair.apply(2.0, h, h.tanh())[0],
    "pair_second": lambda h: Pair.apply(2.0, h, h.tanh())[1],
    "unmaterialised": lambda h: Unmaterialised.apply(3.0, h)[0],
    "unmaterialised_second": lambda h: Unmaterialised.apply(3.0, h)[1],
    "integers": lambda h: Largest.apply(2.0, h)[1],
    "index": lambda h: Gather.apply(torch.tensor([2, 0, 0, 1]), 4, h),
    "tuple": lambda h: Reshape.apply((2, 2), h),
    "one_sided": lambda h: OneSided.apply(h, h.sin()),
    "opaque": lambda h: Opaque.apply(2.0, h) + h,
}
