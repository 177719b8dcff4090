"""Models written with ``torch.nn`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.models.trial import CLASSES, SAMPLES, VOCABULARY, Trial, classes, ids, images


class Block(Module):
    """The residual block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down: Module = nn.Identity()
        if stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.down = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions beside the identity."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


def resnet18(width: int = 2) -> Module:
    """ResNet-18 with ``width`` channels in place of 64."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    blocks: list[Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage in range(4):
        outputs = width * 2**stage
        blocks += [Block(channels, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


class UNet(Module):
    """Two levels, group normalisation, skip connections; an image for an image."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.GroupNorm(2, width), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(width, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, width, 2, 2)
        self.end = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Down, up, and the skip connection beside."""
        high = self.begin(x)
        return self.end(torch.cat([high, self.up(self.down(high))], 1))


class Recurrent(Module):
    """Embedding, a recurrent net, and a linear map of the last state."""

    def __init__(self, kind: type[Module], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.net = kind(4, 5, batch_first=True, **options)
        self.head = nn.Linear(10 if options.get("bidirectional") else 5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The last step."""
        return self.head(self.net(self.embedding(x))[0][:, -1])


class Packed(Recurrent):
    """The same on sequences of different lengths, packed."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over steps."""
        lengths = 2 + x[:, 0] % 4  # whatever the first word says
        packed = pack_padded_sequence(self.embedding(x), lengths, True, False)
        # Of all steps, or the mean of a sample would depend on the longest in the batch.
        steps, _ = pad_packed_sequence(self.net(packed)[0], True, total_length=x.shape[1])
        return self.head(steps.mean(1))


class Cells(Module):
    """A cell of a recurrent net in a loop over steps."""

    def __init__(self, kind: type[Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.cell = kind(4, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The last state."""
        state = None
        for step in self.embedding(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Bag(Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 4, mode="mean")
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the embeddings."""
        return self.head(self.bag(x))


class Offsets(Bag):
    """The same with all words in one row, and where each text begins."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the embeddings."""
        return self.head(self.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1])))


class Encoder(Module):
    """``nn.TransformerEncoder``, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The mean over positions."""
        return self.head(self.encoder(self.embedding(x)).mean(1))


class Mixer(Module):
    """A block of MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 6, 4, 4)
        self.tokens = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
        self.mix = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions, then channels."""
        y = self.embedding(x).flatten(2)
        y = y + self.mix(y)
        return self.head(y.transpose(1, 2).add(self.tokens(y.transpose(1, 2))).mean(1))


class Named(Module):
    """A model that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Features and logits."""
        features = self.body(x).tanh()
        return {"features": features, "logits": self.head(features)}


def mlp() -> Module:
    """Sigmoids, so that every derivative counts."""
    return nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))


def lenet() -> Module:
    """Convolutions and maximum pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24, CLASSES),
    )  # fmt: skip


class Named1(Module):
    """Its only argument is called ``x`` here, whatever the model calls it."""

    def __init__(self, net: Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        """Run the model."""
        return self.net(x)


def same(result: Any) -> Any:
    """The output is one tensor."""
    return result


def of(name: str, make: Callable[[], Module], x: Callable[[], Tensor], output: Any = same) -> Trial:
    """A model of one argument that predicts a class."""
    return Trial(name, lambda: Named1(make()), lambda: {"x": x()}, output, classes)


def numbers() -> Tensor:
    """A vector for each sample."""
    return torch.randn(SAMPLES, 6, dtype=torch.float64)


TRIALS: list[Trial] = [
    of("MLP", mlp, numbers),
    of("MLP, a dictionary", Named, numbers, lambda result: result["logits"]),
    of("LeNet", lenet, images),
    of("ResNet-18", resnet18, lambda: images(size=32)),
    of("MLP-Mixer", Mixer, images),
    Trial(
        "UNet", lambda: Named1(UNet()), lambda: {"x": images()}, same,
        lambda: torch.randn(SAMPLES, 1, 8, 8, dtype=torch.float64),
        lambda: nn.MSELoss(reduction="sum"),
    ),
    of("nn.TransformerEncoder", Encoder, ids),
    of("LSTM", lambda: Recurrent(nn.LSTM), ids),
    of("GRU, bidirectional", lambda: Recurrent(nn.GRU, bidirectional=True), ids),
    of("LSTM, packed", lambda: Packed(nn.LSTM), ids),
    of("LSTMCell", lambda: Cells(nn.LSTMCell), ids),
    of("GRUCell", lambda: Cells(nn.GRUCell), ids),
    of("RNNCell", lambda: Cells(nn.RNNCell), ids),
    of("EmbeddingBag", Bag, ids),
    of("EmbeddingBag, offsets", Offsets, ids),
]  # fmt: skip
