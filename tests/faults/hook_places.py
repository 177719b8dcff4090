"""Where a user may register a hook on a gradient, as nets that have it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import extend
from tests.cases import Net

Hook = Callable[[Tensor], Tensor | None]


# Where a hook may be registered. The library registers its own when a module returns.


def on_output(hook: Hook) -> nn.Module:
    """Behind the module, and after the library."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.register_hook(hook)
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def _on_activation(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.tanh(net.first(x))
        hidden.register_hook(hook)
        return net.last(hidden)  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), tanh=nn.Tanh(), last=nn.Linear(4, 3))


def _between(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = 2 * net.first(x)
        hidden.register_hook(hook)
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def _on_model_output(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        output = net.last(torch.tanh(net.first(x)))
        output.register_hook(hook)
        return output  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def _on_only_layer(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        output = net.last(x)
        output.register_hook(hook)
        return output  # type: ignore[no-any-return]

    return Net(forward, last=nn.Linear(3, 3))


def _on_identity(hook: Hook) -> nn.Module:
    """On a tensor that two modules returned."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.same(net.first(x))
        hidden.register_hook(hook)
        return net.last(torch.tanh(net.same(hidden)))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), same=nn.Identity(), last=nn.Linear(4, 3))


def _on_branch(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        branch = net.inner(hidden)
        branch.register_hook(hook)
        return net.last(hidden + branch)  # type: ignore[no-any-return]

    parts = {"first": nn.Linear(3, 4), "inner": nn.Linear(4, 4)}
    return Net(forward, **parts, last=nn.Linear(4, 3))


def _on_tokens(hook: Hook) -> nn.Module:
    """On a view."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x[:, :, None])
        hidden.register_hook(hook)
        return net.last(torch.tanh(hidden).flatten(1))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(1, 2), last=nn.Linear(6, 3))


def _on_features_first(hook: Hook) -> nn.Module:
    """Where samples are on another axis, and again in front."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x).mT
        hidden.register_hook(hook)
        return net.last(torch.tanh(hidden).mT)  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def _on_steps_first(hook: Hook) -> nn.Module:
    """On a tensor in front of modules that receive one step of all samples after the other."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x[:, :2, None]).sin()
        hidden.register_hook(hook)
        turned = torch.tanh(net.middle(hidden.transpose(0, 1)))
        return net.last(turned.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    parts = {"first": nn.Linear(1, 2), "middle": nn.Linear(2, 2)}
    return Net(forward, **parts, last=nn.Linear(4, 3))


def _inside_own(hook: Hook) -> nn.Module:
    """In a module without a rule, before the library."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = x * net.w
        hidden.register_hook(hook)
        return hidden  # type: ignore[no-any-return]

    own = Net(forward, w=nn.Parameter(torch.randn(4)))
    return nn.Sequential(nn.Linear(3, 4), own, nn.Linear(4, 3))


def _inside_container(hook: Hook) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.linear(x)
        hidden.register_hook(hook)
        return torch.tanh(hidden)

    return nn.Sequential(nn.Linear(3, 4), Net(forward, linear=nn.Linear(4, 4)), nn.Linear(4, 3))


def _by_forward_hook(hook: Hook) -> nn.Module:
    def register(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(hook)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].register_forward_hook(register)
    return model


def _by_first_forward_hook(hook: Hook) -> nn.Module:
    def register(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(hook)

    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    model[0].register_forward_hook(register, prepend=True)
    return model


def _by_input_hook(hook: Hook) -> nn.Module:
    def register(_: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(hook)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[1].register_forward_pre_hook(register)
    return model


def _on_node(hook: Hook) -> nn.Module:
    """On the node of autograd, before it runs."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.grad_fn.register_prehook(_of_many(hook))
        return net.last(torch.tanh(hidden))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def _behind_node(hook: Hook) -> nn.Module:
    """On the node of autograd, after it ran."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.tanh(net.first(x))
        hidden.grad_fn.register_hook(lambda inputs, _: _of_many(hook)(inputs))
        return net.last(hidden)  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), tanh=nn.Tanh(), last=nn.Linear(4, 3))


def _full_backward(hook: Hook) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[1].register_full_backward_hook(lambda _, inputs, __: _of_many(hook)(inputs))
    return model


def _full_backward_pre(hook: Hook) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].register_full_backward_pre_hook(lambda _, outputs: _of_many(hook)(outputs))
    return model


def _of_many(hook: Hook) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...] | None]:
    def run(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        changed = hook(grads[0])
        return None if changed is None else (changed,)

    return run


PLACES: dict[str, Callable[[Hook], nn.Module]] = {
    "output": on_output,
    "activation": _on_activation,
    "model_output": _on_model_output,
    "only_layer": _on_only_layer,
    "identity": _on_identity,
    "branch": _on_branch,
    "tokens": _on_tokens,
    "features_first": _on_features_first,
    "steps_first": _on_steps_first,
    "inside_container": _inside_container,
    "forward_hook": _by_forward_hook,
    "first_forward_hook": _by_first_forward_hook,
    "input": _by_input_hook,
}


# Not on what a module returned: on tensors between and inside of modules, on nodes of autograd, and
# those that torch puts around a module.
ELSEWHERE: dict[str, Callable[[Hook], nn.Module]] = {
    "between": _between,
    "inside_own": _inside_own,
    "node": _on_node,
    "behind_node": _behind_node,
    "full_backward": _full_backward,
    "full_backward_pre": _full_backward_pre,
}
