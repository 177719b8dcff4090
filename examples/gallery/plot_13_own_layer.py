r"""
A layer of your own, in two ways
================================

A layer that nobody has heard of: a learned radial bump, :math:`y = x \exp(-w^2 \|x\|^2)`. Every quantity works
on it at once, since the library reads its parameter where operations use it. A *layer rule*, two products, makes every
quantity fast.
A *module extension* computes one quantity only. Scripts for older libraries have these, and the compatibility
layer runs them.
"""

import time
import warnings

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from backpack import extensions as before
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack_core import View, backpack, extend
from backpack_core.errors import AutodiffFallbackWarning
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import temporary_plugin
from backpack_products import ParametricRule


class Bump(nn.Module):
    """One learned width for each channel of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.linspace(0.3, 0.9, channels)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.exp(-(self.width**2) * x**2)


# %%
# The rule. Columns ``mat`` have the shape ``[V, N, *out]``. The rule never sums over samples.


class BumpRule(ParametricRule):
    """How the bump differentiates."""

    module_types = (Bump,)
    params = ("width",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        w, x = view.parameter("width"), view.input
        return mat * (1 - 2 * w**2 * x**2) * torch.exp(-(w**2) * x**2)

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        w, x = view.parameter("width"), view.input
        return (mat * (-2 * w * x**3) * torch.exp(-(w**2) * x**2)).sum((3, 4), keepdim=True)


# %%
# The module extension: individual gradients, and nothing else.


class BumpGradients(FirstOrderModuleExtension):
    """Individual gradients of the bump."""

    def __init__(self) -> None:
        super().__init__(params=["width"])

    def width(self, ext, module, g_inp, g_out, bpQuantities):
        """``[N, C, 1, 1]``."""
        w, x = module.width, module.input0
        change = -2 * w * x**3 * torch.exp(-(w**2) * x**2)
        return (g_out[0] * change).sum((2, 3), keepdim=True)


def run(*extensions, repeat: int = 1) -> tuple[nn.Module, float]:
    """The model with its quantities, and the milliseconds of the fastest pass."""
    torch.manual_seed(0)
    model = extend(
        nn.Sequential(
            nn.Conv2d(1, 8, 3),
            Bump(8),
            nn.Conv2d(8, 8, 3),
            Bump(8),
            nn.Flatten(),
            nn.LazyLinear(10),
        )
    )
    lossfunc = extend(nn.CrossEntropyLoss())
    X, y = torch.randn(64, 1, 12, 12), torch.randint(10, (64,))
    model(X)
    times = []
    for _ in range(repeat):
        loss = lossfunc(model(X), y)
        start = time.perf_counter()
        with backpack(*extensions, check="never"):
            loss.backward()
        times.append(1000 * (time.perf_counter() - start))
    return model, min(times)


warnings.simplefilter("ignore", AutodiffFallbackWarning)
own_table = before.BatchGrad()
own_table.set_module_extension(Bump, BumpGradients())
timings = {}
automatic, timings["no rule"] = run(BatchGrad(), DiagGGNExact(), repeat=8)
extended, _ = run(own_table)
with temporary_plugin(BumpRule):
    ruled, timings["rule"] = run(BatchGrad(), DiagGGNExact(), repeat=8)

# %%
# All three agree on individual gradients. The GGN diagonal has no module extension, so there we compare two.
for other in (automatic, extended):
    for p, q in zip(ruled.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p.grad_batch, q.grad_batch, rtol=1e-3, atol=1e-6)
for p, q in zip(ruled.parameters(), automatic.parameters(), strict=True):
    assert torch.allclose(p.diag_ggn_exact, q.diag_ggn_exact, rtol=1e-3, atol=1e-6)
for name, milliseconds in timings.items():
    print(f"{name:14} {milliseconds:6.1f} ms for both quantities")

# %%
# Individual gradients of the eight widths: which images would narrow which bump?
figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(8.6, 2.9), width_ratios=[1, 2, 0.8], layout="constrained"
)
x = torch.linspace(-4, 4, 200)
for width in ruled[1].width.detach().flatten():
    left.plot(x, x * torch.exp(-(width**2) * x**2), color=plt.cm.viridis(width.item()))
left.set(title="the layer", xlabel="x", ylabel="y")
gradients = ruled[1].width.grad_batch.flatten(1).T
largest = gradients.abs().max()
middle.imshow(gradients, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
middle.set(title="individual gradients of the widths", xlabel="image", ylabel="channel")
middle.grid(visible=False)
right.bar(timings.keys(), timings.values(), color=["#c2571a", "#0b6e63"])
right.set(title="time [ms]", xlim=(-0.7, 1.7))
plt.show()
