"""Private training on digits: accuracy at two budgets, and with users instead of images.

Run: ``python examples/private_digits.py``
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_privacy import make_private

DELTA, EPOCHS = 1e-4, 8


def data() -> tuple[TensorDataset, Tensor, Tensor]:
    """1,400 images for training, and 397 unseen ones."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def net() -> nn.Module:
    """Two convolutions; group normalisation, since batch normalisation mixes samples."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.AvgPool2d(2)
    second = nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10)
    return nn.Sequential(*first, *second)


def accuracy(epsilon: float, size: int, users: list[int] | None = None) -> float:
    """The accuracy on unseen images, after spending a budget."""
    train, inputs, labels = data()
    model, lossfunc = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    private = make_private(
        model,
        lossfunc,
        optimizer,
        DataLoader(train, batch_size=size),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_norm=1.0,
        users=users,
    )
    for _ in range(EPOCHS):
        for x, y in private.loader:
            private.step(lossfunc(model(x), y))
    with torch.no_grad():
        found = (model(inputs).argmax(1) == labels).float().mean().item()
    what = "images" if users is None else "users"
    clipped = sum(record.clipped["all"] for record in private.records) / len(private.records)
    print(
        f"{what} ε = {private.epsilon():.2f} (noise {private.noise_multiplier:.2f}, "
        f"{private.steps} steps, {clipped:.0%} clipped): {found:.1%} right"
    )
    return found


def main() -> None:
    """Compare budgets, and users with two images each, who cost more."""
    little, much = accuracy(3.0, 128), accuracy(8.0, 128)
    with_users = accuracy(8.0, 64, users=[number // 2 for number in range(1400)])
    assert little > 0.6
    assert much > 0.7
    assert with_users > 0.5


if __name__ == "__main__":
    main()
