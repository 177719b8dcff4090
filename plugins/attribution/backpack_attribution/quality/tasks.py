"""Small tasks with models that can be retrained a hundred times: digits, letters, facts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F

from backpack_attribution.quality.nets import ALPHABET, CharacterGPT
from backpack_core.errors import UsageError


@dataclass(frozen=True)
class Task:
    """Training samples, queries, and how to train a model on some of the samples.

    Attributes:
        inputs: Training samples, ``[N, *]``.
        targets: Their targets.
        query_inputs: Queries, ``[M, *]``.
        query_targets: Their targets.
        fit: Trains a model on inputs and targets with a seed.
        decay: The weight decay, as a factor of ``½‖θ‖²`` added to the mean loss of ``N`` samples.
        relevant: For facts: which samples state the fact of each query, ``[N, M]``.
        texts: For texts: the training samples as strings.
    """

    inputs: Tensor
    targets: Tensor
    query_inputs: Tensor
    query_targets: Tensor
    fit: Callable[[Tensor, Tensor, int], Module]
    decay: float = 0.0
    relevant: Tensor | None = None
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of training samples."""
        return len(self.inputs)

    @property
    def lossfunc(self) -> nn.CrossEntropyLoss:
        """The loss of training: a mean."""
        return nn.CrossEntropyLoss()

    def train(self, subset: Tensor | None = None, seed: int = 0) -> Module:
        """A model trained on some of the samples, in evaluation mode.

        Args:
            subset: Which samples, ``[N]``, boolean; default: all.
            seed: The seed of the first weights and the order of samples.
        """
        chosen = slice(None) if subset is None else subset
        return self.fit(self.inputs[chosen], self.targets[chosen], seed).eval()

    def losses(self, model: Module) -> Tensor:
        """The loss of each query, summed over its positions. Shape ``[M]``."""
        with torch.no_grad():
            output = model(self.query_inputs)
            found = F.cross_entropy(output, self.query_targets, reduction="none")
        return found.flatten(1).sum(1) if found.dim() > 1 else found

    def predictions(self, model: Module) -> Tensor:
        """The class that the model prefers for each query. Shape ``[M]`` or ``[M, S]``."""
        with torch.no_grad():
            found: Tensor = model(self.query_inputs).argmax(1)
        return found

    def train_loader(self, size: int = 64) -> list[tuple[Tensor, Tensor]]:
        """Batches of all training samples."""
        return [*zip(self.inputs.split(size), self.targets.split(size), strict=True)]

    def query_loader(self, size: int = 64) -> list[tuple[Tensor, Tensor]]:
        """Batches of the queries."""
        return [*zip(self.query_inputs.split(size), self.query_targets.split(size), strict=True)]

    def mislabelled(self, share: float = 0.1, seed: int = 0) -> tuple[Task, Tensor]:
        """The task with some wrong labels, and which these are, ``[N]``.

        Raises:
            UsageError: Targets are not one class for each sample.
        """
        if self.targets.dim() != 1:
            raise UsageError("mislabelled() needs a task with one class for each sample.")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator)
        wrong = torch.zeros(len(self), dtype=torch.bool)
        wrong[order[: round(share * len(self))]] = True
        classes = int(self.targets.max()) + 1
        shift = torch.randint(1, classes, self.targets.shape, generator=generator)
        targets = torch.where(wrong, (self.targets + shift) % classes, self.targets)
        return replace(self, targets=targets), wrong


def digits(
    kind: Literal["logistic", "mlp"] = "logistic",
    samples: int = 600,
    queries: int = 100,
    decay: float = 0.01,
    seed: int = 0,
) -> Task:
    """Handwritten digits of scikit-learn, 8 by 8, in double precision.

    Args:
        kind: ``"logistic"``: regression with weight decay, trained to its minimum, from zero.
            ``"mlp"``: one hidden layer of 64 units, by Adam in mini-batches.
        samples: The number of training samples.
        queries: The number of queries, which are other samples.
        decay: The weight decay.
        seed: The seed for the choice of samples.

    Raises:
        UsageError: The kind is unknown, or scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "The digits come with scikit-learn, which is not installed. Run "
            "`pip install 'backpack-attribution[quality]'`."
        ) from error
    if kind not in ("logistic", "mlp"):
        raise UsageError(f'kind must be "logistic" or "mlp". Got {kind!r}.')
    found: Any = load_digits()
    x = torch.from_numpy(found.data).double() / 16
    y = torch.from_numpy(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, asked = order[:samples], order[samples : samples + queries]

    def fit(inputs: Tensor, targets: Tensor, seed: int) -> Module:
        if kind == "logistic":
            return _minimum(inputs, targets, decay)
        return _perceptron(inputs, targets, decay, seed)

    return Task(x[train], y[train], x[asked], y[asked], fit, decay)


def _minimum(inputs: Tensor, targets: Tensor, decay: float) -> Module:
    model = nn.Linear(inputs.shape[1], 10, dtype=inputs.dtype)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        value = F.cross_entropy(model(inputs), targets) + decay / 2 * penalty
        value.backward()
        return value

    optimizer.step(objective)
    return model


def _perceptron(inputs: Tensor, targets: Tensor, decay: float, seed: int) -> Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(inputs.dtype)
    _steps(model, inputs, targets, seed, epochs=40, size=32, rate=3e-3, decay=decay)
    return model


def _steps(
    model: Module,
    inputs: Tensor,
    targets: Tensor,
    seed: int,
    epochs: int,
    size: int,
    rate: float,
    decay: float,
) -> None:
    """Adam with a rate that falls to zero, and weight decay in the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    total = epochs * -(-len(inputs) // size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)
    for batch in _batches(len(inputs), epochs, size, seed):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        schedule.step()


def _batches(samples: int, epochs: int, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(samples, generator=generator).split(size)


def characters(
    samples: int = 200, queries: int = 30, epochs: int = 30, words: int = 40, seed: int = 0
) -> Task:
    """Generated texts of three words, and a small GPT that learns them letter by letter.

    Some words are common and some are rare, so that it matters which texts a model has seen.

    Args:
        samples: The number of training texts.
        queries: The number of queries, which are other texts of the same words.
        epochs: The number of epochs.
        words: The number of different words.
        seed: The seed of the texts.
    """
    draw = random.Random(seed)
    names = _names(words, draw)
    weights = [1 / (place + 3) for place in range(words)]
    texts = [" ".join(draw.choices(names, weights, k=3)) + "." for _ in range(samples + queries)]
    return _of_texts(texts[:samples], texts[samples:], epochs)


def facts(count: int = 40, epochs: int = 60, seed: int = 0) -> Task:
    """Generated facts about invented countries, two wordings of each, and one more as its query.

    ``relevant`` says which training texts state the fact of a query. Queries count only the letters
    of the answer, so that they are about the fact, not the wording.

    Args:
        count: The number of facts.
        epochs: The number of epochs.
        seed: The seed of the names.
    """
    draw = random.Random(seed)
    names = _names(2 * count, draw)
    pairs = [*zip(names[:count], names[count:], strict=True)]
    wordings = ("{1} is the main town of {0}.", "the people of {0} live in {1}.")
    texts = [wording.format(*pair) for pair in pairs for wording in wordings]
    asked = [f"the capital of {country} is {town}." for country, town in pairs]
    # The model learns the wording of queries from other countries.
    more = _names(40, draw)
    others = [f"the capital of {a} is {b}." for a, b in zip(more[:20], more[20:], strict=True)]
    task = _of_texts([*texts, *others], asked, epochs)
    targets = task.query_targets.clone()
    for row, (_, town) in enumerate(pairs):
        first = asked[row].index(f" is {town}") + 3  # of the answer, among targets
        targets[row, :first] = -100
    relevant = torch.zeros(len(task), count, dtype=torch.bool)
    for row in range(count):
        relevant[2 * row : 2 * row + 2, row] = True
    return replace(task, query_targets=targets, relevant=relevant)


def _names(count: int, draw: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        name = "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(3))
        found[name] = None
    return [*found]


def _of_texts(texts: list[str], asked: list[str], epochs: int) -> Task:
    length = max(map(len, [*texts, *asked]))

    def coded(lines: list[str]) -> tuple[Tensor, Tensor]:
        codes = torch.tensor([[ALPHABET.index(c) for c in t.ljust(length)] for t in lines])
        targets = codes[:, 1:].clone()
        for row, text in enumerate(lines):
            targets[row, len(text) :] = -100  # padding, except for the first blank
        return codes[:, :-1], targets

    def fit(inputs: Tensor, targets: Tensor, seed: int) -> Module:
        torch.manual_seed(seed)
        model = CharacterGPT(length - 1).to(torch.get_default_dtype())
        _steps(model, inputs, targets, seed, epochs, size=32, rate=3e-3, decay=0.0)
        return model

    return Task(*coded(texts), *coded(asked), fit, texts=tuple(texts))
