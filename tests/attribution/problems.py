"""Nets and data for attribution, and what autograd says about them, written plainly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Tokens in, scores of tokens out: one table at both ends, and a layer that runs twice."""

    def __init__(self, words: int = 7, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for _ in range(2):
            x = x + torch.tanh(self.layer(self.norm(x)))
        return self.head(x).transpose(1, 2)


class Scaled(nn.Sequential):
    """A layer whose scores are multiplied by one number, which is trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def vectors(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def tokens(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (samples, 6), generator=generator)
    return x[:, :-1], x[:, 1:]


def loader(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return [*zip(*(t.split(size) for t in data), strict=True)]


def gradients(
    model: nn.Module, data: tuple[Tensor, Tensor], lossfunc: Callable[..., Tensor] | None = None
) -> Tensor:
    """Gradients of the samples' own losses, one backward pass each, ``[N, P]``."""
    lossfunc = lossfunc or nn.CrossEntropyLoss(reduction="sum")
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for x, y in zip(*data, strict=True):
        loss = lossfunc(model(x.unsqueeze(0)), y.unsqueeze(0))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]))
    return torch.stack(rows)


def ggn(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The Gauss-Newton matrix of the summed cross-entropy, from whole Jacobians, ``[P, P]``."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total: Tensor | int = 0
    for x in data[0]:

        def output(values: dict[str, Tensor], x: Tensor = x) -> Tensor:
            found: Tensor = torch.func.functional_call(model, values, (x.unsqueeze(0),))
            return found.movedim(1, -1).flatten(0, -2)

        jacobians = torch.func.jacrev(output)({n: p.detach() for n, p in trained.items()})
        z = output({n: p.detach() for n, p in trained.items()})
        parts = [jacobians[n].unsqueeze(2).flatten(2) for n in trained]
        jacobian = torch.cat(parts, 2)  # [S, C, P]
        p = z.softmax(1)
        hessian = torch.diag_embed(p) - p.unsqueeze(1) * p.unsqueeze(2)
        total = total + torch.einsum("scp,scd,sdq->pq", jacobian, hessian, jacobian)
    assert isinstance(total, Tensor)
    return total
