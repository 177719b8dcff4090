"""Self-attention reads its projections where autograd brings their gradient, not by a formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_firstorder.individual import BatchGrad
from backpack_layers.attention import MultiheadAttentionRule

WIDTH, CLASSES = 4, 3


class Net(nn.Module):
    """Attention, once or twice, behind a linear layer or at the input."""

    def __init__(self, is_first: bool = False, uses: int = 1, **options: Any) -> None:
        super().__init__()
        self.before = nn.Identity() if is_first else nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.uses = uses
        self.double()
        for theta in self.parameters():
            nn.init.normal_(theta, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for _ in range(self.uses):
            h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.head(h).sum(1)
        return out


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls whose columns were carried back by a formula."""
    found: list[str] = []
    plain = MultiheadAttentionRule._carry_back

    def noted(self: Any, view: Any, mat: Tensor) -> Any:
        found.append(view.path)
        return plain(self, view, mat)

    monkeypatch.setattr(MultiheadAttentionRule, "_carry_back", noted)
    return found


def run(net: Net, passes: int = 1, **options: Any) -> None:
    """Some passes, and individual gradients against a loop over the samples."""
    x = torch.randn(3, 3, WIDTH, dtype=torch.double)  # as many positions as samples
    y = torch.randint(CLASSES, (3,))
    model, lossfunc = extend(net), extend(nn.CrossEntropyLoss(reduction="sum"))
    for _ in range(passes):
        model.zero_grad()
        with backpack(BatchGrad(), **{"check": "never", **options}):
            lossfunc(model(x), y).backward()
    trained = [theta for theta in net.parameters() if theta.requires_grad]
    for n in range(3):
        loss = nn.functional.cross_entropy(net(x[n : n + 1]), y[n : n + 1])
        for theta, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            torch.testing.assert_close(theta.grad_batch[n], gradient)


@pytest.mark.parametrize("gradient", ["autograd", "shared", "none", "skipped"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
def test_no_formula(carried: list[str], gradient: str, bias: bool, uses: int) -> None:
    run(Net(bias=bias, uses=uses), 4, gradient=gradient)
    assert not carried


def test_measured() -> None:
    """In passes that are measured, too."""
    run(Net(), 3, check="always")


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_frozen(carried: list[str], frozen: str) -> None:
    net = Net()
    net.attention.get_parameter(frozen).requires_grad_(False)
    run(net)
    assert not carried


@pytest.mark.parametrize("gradient", ["autograd", "none"])
def test_first_layer(carried: list[str], gradient: str) -> None:
    """Where autograd has nothing to do behind the attention, there is the formula."""
    run(Net(is_first=True), 4, gradient=gradient)
    assert bool(carried) == (gradient == "none")


def test_hook_sees_everything(carried: list[str]) -> None:
    """A hook behind a module's visit finds all of its results."""
    seen: list[bool] = []

    def hook(module: nn.Module) -> None:
        seen.append(all(hasattr(theta, "grad_batch") for theta in module.parameters()))

    run(Net(), extension_hook=hook)
    assert seen
    assert all(seen)
    assert carried


@pytest.mark.filterwarnings("ignore:Using backward")
def test_subsampling_and_graph(carried: list[str]) -> None:
    """Of some samples, and of gradients with a graph, there is the formula."""
    net, x = Net(), torch.randn(3, 2, WIDTH, dtype=torch.double)
    model, lossfunc = extend(net), extend(nn.CrossEntropyLoss(reduction="sum"))
    loss = lossfunc(model(x), torch.tensor([0, 1, 2]))
    with backpack(BatchGrad(subsampling=[2])):
        loss.backward(create_graph=True)
    assert carried
    weight = net.attention.in_proj_weight
    part = nn.functional.cross_entropy(net(x[2:]), torch.tensor([2]))
    torch.testing.assert_close(weight.grad_batch[0], *torch.autograd.grad(part, weight))
    assert weight.grad_batch.requires_grad


def test_nothing_is_left_on_the_graph() -> None:
    """A pass that fails inside leaves no hook that runs in the next one."""
    net = Net()
    model, lossfunc = extend(net), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(2, 3, WIDTH, dtype=torch.double), torch.tensor([0, 1])
    loss = lossfunc(model(x), y)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = net.attention.out_proj.weight.register_hook(fail)
    with backpack(BatchGrad()), pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    handle.remove()
    with backpack(BatchGrad()):
        loss.backward()
    torch.testing.assert_close(
        net.attention.in_proj_weight.grad_batch.sum(0),
        *torch.autograd.grad(lossfunc(model(x), y), net.attention.in_proj_weight),
    )


def test_a_pass_inside_is_another_one() -> None:
    """A hook inside the attention asks for gradients by the same graph, of something else."""
    net = Net()
    model, lossfunc = extend(net), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(2, 3, WIDTH, dtype=torch.double), torch.tensor([0, 1])
    out = model(x)
    loss, other, weight = lossfunc(out, y), out.sum(), net.attention.in_proj_weight
    handle = net.attention.out_proj.weight.register_hook(
        lambda _: torch.autograd.grad(other, net.before.weight, retain_graph=True) and None
    )
    with backpack(BatchGrad(), check="never"):
        loss.backward(retain_graph=True)
    handle.remove()
    torch.testing.assert_close(weight.grad_batch.sum(0), weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_cast_on_the_way(carried: list[str], dtype: torch.dtype, bias: bool) -> None:
    """Autocast casts parameters first: what arrives there is not the projection's gradient."""
    net = Net(bias=bias).float()
    model, lossfunc = extend(net), extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(2, 3, WIDTH, dtype=torch.float32), torch.tensor([0, 1])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(torch.get_default_device().type, dtype=dtype):
            out = model(x)
        value: Tensor = lossfunc(out.float(), y)
        return value

    with backpack(BatchGrad(), check="never"):
        loss(x, y).backward()
    assert carried
    weight = net.attention.in_proj_weight
    for n in range(2):
        expected = torch.autograd.grad(loss(x[n : n + 1], y[n : n + 1]), weight)[0]
        torch.testing.assert_close(weight.grad_batch[n], expected, rtol=0.05, atol=0.05)
